"""Everything from the network is decoded into msgspec types: a pickle, which may run code, is
refused everywhere.
"""

import ast
import os
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdserve.cluster.links.handle_api import (
    decode_answer,
    decode_call,
    decode_order,
    decode_outcome,
)
from pdserve.kvtransfer.p2p.letters import decode_letter
from pdserve.protocol.codec import decode_batch, decode_command, decode_routed

ROOT = Path(__file__).parents[2] / "pdserve"

# Modules and calls that run what they read, or may.
MODULES = {
    "pickle",
    "cloudpickle",
    "dill",
    "marshal",
    "shelve",
    "jsonpickle",
    "joblib",
    "multiprocessing.connection",
}
CALLS = {
    *("eval", "exec", "compile", "recv_pyobj", "send_pyobj", "unsafe_load", "full_load"),
    *("yaml.load", "torch.load", "numpy.load", "np.load"),
}


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self._path,)


DECODERS = [
    decode_command,
    decode_batch,
    decode_routed,
    decode_letter,
    decode_call,
    decode_answer,
    decode_order,
    decode_outcome,
]


@pytest.mark.parametrize("decode", DECODERS, ids=lambda decode: decode.__name__)
def test_a_pickle_is_no_message(decode: Callable[[bytes], Any], tmp_path: Path) -> None:
    path = str(tmp_path / "boom")
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        data = pickle.dumps(Bomb(path), protocol)
        extension = msgspec.msgpack.encode(msgspec.msgpack.Ext(1, data))
        for message in (
            data,
            msgspec.msgpack.encode(data),
            extension,
            msgspec.msgpack.encode({"type": data}),
        ):
            with pytest.raises((msgspec.MsgspecError, ValueError)):
                decode(message)
    assert not os.path.exists(path)
    pickle.loads(data)  # the bomb is one
    assert os.path.exists(path)


def dangers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            plain = called in CALLS or called.rpartition(".")[2] in {"recv_pyobj", "send_pyobj"}
            is_safe = called == "torch.load" and any(k.arg == "weights_only" for k in node.keywords)
            if plain and not is_safe:
                yield called


def test_nothing_in_the_package_unpickles_or_evaluates() -> None:
    files = sorted(ROOT.rglob("*.py"))
    assert len(files) > 50
    found = {
        str(file.relative_to(ROOT)): list(dangers(ast.parse(file.read_text()))) for file in files
    }
    assert {name: what for name, what in found.items() if what} == {}


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from cloudpickle import loads",
        "x.recv_pyobj()",
        "torch.load(f)",
        "yaml.load(f)",
        "eval(x)",
    ],
)
def test_the_search_finds_what_it_looks_for(text: str) -> None:
    assert list(dangers(ast.parse(text)))
