"""Compiles Triton kernels for a GPU that need not be there, in a process that interprets nothing.

python -m kernels.compiled    reads tasks from standard input, a line of JSON each, and answers each
                              with a line of JSON that has its PTX, or what was wrong

One such process serves all tests of a run, because it takes seconds to start. It ends with them.
"""

import json
import os
import select
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
LIMIT_S = 300.0
SHARED_BYTES = 227 << 10  # of a program on Hopper

_children: list["subprocess.Popen[str]"] = []  # at most one, that runs


def ptx(
    kernel: str,
    constants: dict[str, Any],
    kinds: dict[str, str],
    num_warps: int,
    multiples: Sequence[str] = (),
) -> str:
    """Compiles a kernel for Hopper and returns its PTX.

    kernel: "module:name".
    kinds: Triton's types of arguments; by default a pointer is *i32 and a number i32.
    multiples: numbers that are known to be multiples of 16, as pointers are.
    Raises AssertionError with the compiler's words if the kernel does not compile.
    """
    task = {"kernel": kernel, "constants": constants, "kinds": kinds}
    task |= {"multiples": list(multiples), "options": {"num_warps": num_warps}}
    said: dict[str, str] = json.loads(_answer(json.dumps(task)))
    assert "error" not in said, said["error"]
    return said["ptx"]


def _answer(line: str) -> str:
    """Returns the child's answer to a line. Raises TimeoutError after LIMIT_S."""
    child = _child()
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(line + "\n")
    child.stdin.flush()
    if not select.select([child.stdout], [], [], LIMIT_S)[0]:
        child.kill()
        raise TimeoutError(f"nothing is compiled within {LIMIT_S:.0f} s: {line}")
    answer = child.stdout.readline()
    assert answer, f"the compiler ended with status {child.wait()}: {line}"
    return answer


def _child() -> "subprocess.Popen[str]":
    if not _children or _children[0].poll() is not None:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        paths = [str(TESTS.parent), str(TESTS)]
        started = subprocess.Popen(
            [sys.executable, "-m", "kernels.compiled"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment | {"PYTHONPATH": os.pathsep.join(paths)},
            text=True,
        )
        _children[:] = [started]
    return _children[0]


def _compile(task: dict[str, Any]) -> str:
    from pkgutil import resolve_name

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = resolve_name(task["kernel"])
    constants = {k: v for k, v in task["constants"].items() if k in kernel.arg_names}
    signature = {}
    for name in kernel.arg_names:
        kind = task["kinds"].get(name, "*i32" if name.endswith("_ptr") else "i32")
        signature[name] = "constexpr" if name in constants else kind
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*") or name in task["multiples"]
    }
    source = ASTSource(kernel, signature, constants, aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=task["options"])
    shared = made.metadata.shared
    assert shared <= SHARED_BYTES, f"{shared} bytes of shared memory, a program has {SHARED_BYTES}"
    return str(made.asm["ptx"])


def _serve() -> None:
    """Answer until standard input ends. What compilers print goes to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        try:
            said = {"ptx": _compile(json.loads(line))}
        except Exception:
            said = {"error": traceback.format_exc()}
        print(json.dumps(said), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
