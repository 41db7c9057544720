"""The kernels of several ranks, compiled for a GPU that need not be there: that they compile, and
that rows cross in pieces of 16 bytes."""

import os
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

SCRIPT = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from pdserve.kernels.collective import peer_sums

name, size = sys.argv[1], int(sys.argv[2])
kernel = getattr(peer_sums, name)
constants = dict(
    RANK=1, SIZE=size, SLOTS=8192, WIDTH=4096, ROW_WORDS=1024, WORDS=2048,
    BLOCK=2048 if name == "few_rows_kernel" else 4096, KIND=peer_sums.BFLOAT16,
    NORM=True, PLUS_ONE=False, LOOKS=1024, PDL=True,
)
rows = "*i32" if name == "few_rows_kernel" else "*bf16"
kinds = {"regions_ptr": "*i64", "eps": "fp32"}
kinds |= dict.fromkeys(["partial_ptr", "stream_ptr", "weight_ptr", "out_ptr"], rows)
signature = {}
for argument in kernel.arg_names:
    pointer = "*i32" if argument.endswith("_ptr") else "i32"
    signature[argument] = "constexpr" if argument in constants else kinds.get(argument, pointer)
aligned = {
    (i,): [["tt.divisibility", 16]]
    for i, argument in enumerate(kernel.arg_names)
    if argument.endswith("_ptr")
}
source = ASTSource(
    kernel, signature, {k: v for k, v in constants.items() if k in kernel.arg_names}, aligned
)
made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
print(made.asm["ptx"])
"""


@pytest.mark.parametrize(
    ("name", "size"), [("few_rows_kernel", 2), ("many_rows_kernel", 2), ("shared_rows_kernel", 4)]
)
def test_they_compile(name: str, size: int) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, name, str(size)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    # nothing that it loads or stores is narrower than the device allows
    narrow = set(re.findall(r"(?:ld|st)\.global\.[a-z0-9.]*b16", ran.stdout))
    assert not narrow, narrow
    if name != "few_rows_kernel":
        assert "ld.global.cg.v4.b32" in ran.stdout and "st.global.v4.b32" in ran.stdout
        assert "atom.global.sys.release.exch" in ran.stdout
