"""`pdserve calibrate-kv MODEL --out FILE`: finds scales for a KV cache in fp8, shows them and their
cost, and writes them unless they cost too much."""

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.bench.option_values import POSITIVE, integer
from pdserve.calibration.windows import Window, windows_of

if TYPE_CHECKING:
    from pdserve.calibration.kv_scales import Calibration
    from pdserve.text.tokenizer import Tokenizer

SAMPLE = Path(__file__).parent / "sample.txt"
PROMPT_TOKENS = 2048
EXPONENTS = range(-6, 10)  # powers of two in the plot, one per column
BLOCK_SIZE = 64


def add_calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", help="folder or Hub id")
    parser.add_argument("--out", type=Path, required=True, help="file to write the scales to")
    parser.add_argument(
        "--text",
        type=Path,
        default=SAMPLE,
        help="UTF-8 text like the text that will be served (default: the demo model's)",
    )
    parser.add_argument(
        "--tokens",
        type=integer(16),
        default=16_384,
        help="most tokens of the text to use (default 16384)",
    )
    parser.add_argument(
        "--max-kl",
        type=POSITIVE,
        default=0.01,
        help="mean KL of next-token distributions, in nats, above which nothing is written "
        "(default 0.01)",
    )


def run_calibrate(options: argparse.Namespace) -> int:
    """Runs the command. Raises ValueError or OSError that names the wrong parameter and the
    cure."""
    import torch
    from tqdm import tqdm

    from pdserve.calibration.kv_scales import calibrate
    from pdserve.configs.engine import ModelConfig
    from pdserve.engine.memory.kv_cache import TORCH_DTYPES
    from pdserve.kernels.ops import ops_for
    from pdserve.models.checkpoint import resolve_folder
    from pdserve.models.config import read_spec
    from pdserve.models.kv_scales import save_scales
    from pdserve.models.loader import load_model
    from pdserve.text.tokenizer import Tokenizer

    if not options.out.parent.is_dir():
        raise ValueError(f"--out {options.out}: {options.out.parent} is no folder: make it first")
    if options.out.is_dir():
        raise ValueError(f"--out {options.out} is a folder, and a file is wanted: name the file")
    folder = resolve_folder(ModelConfig(path=options.model).resolved_path, "auto")
    spec = read_spec(str(folder))
    if spec.latent is not None:
        raise ValueError(
            f"{options.model} attends over latents (DeepSeek's attention), whose cache is not "
            "stored in fp8: serve it with engine.kv_cache_dtype: auto"
        )
    windows = _windows(options, Tokenizer.load(folder), spec.max_position)
    device = torch.device("cpu")  # in float32; a GPU would do, too, but that was not tried
    dtype = "float32"
    ops = ops_for(device)
    model = load_model(str(folder), spec, TORCH_DTYPES[dtype], device, ops)
    with tqdm(total=2 * len(windows), desc="calibrating", unit="prompt", disable=None) as bar:
        found = calibrate(model, ops, dtype, windows, BLOCK_SIZE, bar.update)
    _show(found)
    mean = found.kl.mean().item()
    if not mean <= options.max_kl:
        raise ValueError(
            f"--max-kl {options.max_kl:g}: the KV cache in fp8 costs {mean:.2g} nats per token, so "
            "no scales were written: serve this model with engine.kv_cache_dtype: auto, or raise "
            "--max-kl if its answers are good enough"
        )
    facts = {"text": options.text.name, "tokens": len(found.kl), "mean_kl": mean}
    save_scales(options.out, found.scales, spec.weights, facts)
    print(
        f"Written to {options.out}. In cluster.yaml:\n\nmodel: {{path: {options.model}, "
        f"kv_scales: {options.out}}}\nengine: {{kv_cache_dtype: fp8}}"
    )
    return 0


def _windows(
    options: argparse.Namespace, tokenizer: "Tokenizer", max_position: int
) -> list[Window]:
    try:
        text = options.text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--text {options.text} is no UTF-8 text ({error}): convert it") from error
    ids = tokenizer.encode(text)[: options.tokens]
    if len(ids) < 2:
        raise ValueError(f"--text {options.text} is empty: name a file with some text")
    return windows_of(ids, min(PROMPT_TOKENS, max_position))


def _show(found: "Calibration") -> None:
    from rich.console import Console
    from rich.table import Table

    span = f"2^{EXPONENTS[0]} to 2^{EXPONENTS[-1] + 1}"
    table = Table(title="Largest magnitudes of a layer's KV heads", caption=f"Bars: {span}.")
    table.add_column("layer", justify="right")
    for plane in ("keys", "values"):
        table.add_column(plane, no_wrap=True, min_width=len(EXPONENTS))
        table.add_column("of heads", no_wrap=True)
    for layer, heads in enumerate(found.largest):
        cells = []
        for low, high in zip(heads.amin(0).tolist(), heads.amax(0).tolist(), strict=True):
            cells += [_bar(low, high), f"{low:.3g} to {high:.3g}"]
        table.add_row(str(layer), *cells)
    console = Console()
    console.print(table)
    kl = found.kl
    console.print(
        f"KL of next-token distributions, from unrounded rows to fp8, over {len(kl):,} tokens, in "
        f"nats: mean {kl.mean():.2g}, median {kl.median():.2g}, 99 % {kl.quantile(0.99):.2g}, "
        f"largest {kl.max():.2g}"
    )


def _bar(low: float, high: float) -> str:
    """Returns a bar from the smallest to the largest head, on a scale of powers of two."""
    first, last = _column(low), _column(high)
    return " " * first + "━" * (last - first + 1)


def _column(magnitude: float) -> int:
    exponent = math.floor(math.log2(magnitude)) if magnitude > 0 else EXPONENTS[0]
    return max(0, min(len(EXPONENTS) - 1, exponent - EXPONENTS[0]))
