"""Compiles Triton kernels for a GPU that need not be there, in a process that interprets nothing.

python -m kernels.compiled    reads a task from standard input as JSON, and prints PTX
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
LIMIT_S = 300.0
SHARED_BYTES = 227 << 10  # of a program on Hopper


def ptx(
    kernel: str,
    constants: dict[str, Any],
    kinds: dict[str, str],
    num_warps: int,
    multiples: Sequence[str] = (),
) -> str:
    """kernel: "module:name", for Hopper. kinds: Triton's types of arguments; a pointer is *i32, a
    number i32, unless said. multiples: numbers that are known to be multiples of 16, as pointers
    are. AssertionError with the compiler's words when it does not compile."""
    task = {"kernel": kernel, "constants": constants, "kinds": kinds}
    task |= {"multiples": list(multiples), "options": {"num_warps": num_warps}}
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    paths = [str(TESTS.parent), str(TESTS)]
    ran = subprocess.run(
        [sys.executable, "-m", "kernels.compiled"],
        input=json.dumps(task),
        env=environment | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


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


if __name__ == "__main__":
    print(_compile(json.load(sys.stdin)))
