"""Writes the demo model, or another small one, in the format of a quantised checkpoint.

    python -m demo.quantise awq /tmp/demo-awq
    pdserve up cluster.yaml      # with model: {path: /tmp/demo-awq}

Numbers are rounded to the nearest, group by group. This module is run by hand and by
demo/quality.py.
"""

import argparse
import sys
from pathlib import Path

from demo.storing import WAYS, write_quantised

MODEL_DIR = Path(__file__).parent / "pdserve-demo"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("format", choices=WAYS)
    parser.add_argument("out", type=Path, help="folder to create")
    parser.add_argument(
        "--model", type=Path, default=MODEL_DIR, help="folder of a model in one safetensors file"
    )
    options = parser.parse_args()
    if options.out.exists():
        parser.error(f"{options.out} exists already: choose another folder, or remove it")
    if not (options.model / "model.safetensors").is_file():
        parser.error(f"--model {options.model} has no model.safetensors: name another folder")
    write_quantised(options.model, options.out, WAYS[options.format])
    size = (options.out / "model.safetensors").stat().st_size
    print(f"{options.out}: {size:,} bytes of weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())
