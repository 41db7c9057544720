"""Profile: measured points of one engine on one device, as a JSON file.

`measure` (`pdserve profile`) makes it, or benchmarks/plan_fit.py from rows that were measured
before. `step_times` fits step times to it. `scaled` converts it to other degrees and models. This
module knows no engine.
"""

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from pydantic import ValidationError

from pdserve.models.config import ModelSpec

SHIPPED = Path(__file__).parent / "shipped"
DEFAULT = SHIPPED / "llama-3.1-8b-h200.json"

Count = Annotated[int, Meta(ge=1)]
Position = Annotated[int, Meta(ge=0)]
Positive = Annotated[float, Meta(gt=0)]
AtLeast0 = Annotated[float, Meta(ge=0)]
CPU = "CPU"  # `device` of a profile that was measured without a GPU


class DecodePoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of a step with `batch` decodes of `context` tokens each."""

    batch: Count
    context: Position
    seconds: Positive


class PromptPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of a step with `rows` tokens of one prompt, after `start` tokens that are computed
    already."""

    rows: Count
    start: Position
    seconds: Positive


class MixedPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of a step with `rows` tokens of a prompt beside `batch` decodes of `context` tokens
    each."""

    rows: Count
    batch: Count
    context: Position
    seconds: Positive


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Measured points of one engine. Times are seconds between the ends of two steps of a busy
    engine. That is what a client sees, and not only the device's part."""

    device: str  # Name of the GPU, or CPU.
    model: str
    dtype: str
    spec: dict[str, Any]  # The model's ModelSpec.
    source: tuple[str, ...]  # Where the points are from, in words.
    decodes: tuple[DecodePoint, ...]
    prompts: tuple[PromptPoint, ...]
    mixed: tuple[MixedPoint, ...] = ()
    # Numbers of rows of the steps with prompts that have CUDA graphs. Other steps up to the largest
    # of them are padded to the next one.
    graph_rows: tuple[Count, ...] = ()
    host_s: AtLeast0 = 0.4e-3  # From planning a step to its first kernel if nothing is in flight.
    # Time in which the host launches the kernels of a step without a graph, and does nothing else.
    launch_s: AtLeast0 = 0.0
    # Steps with prompts take so many times as long on a GPU that serves as in these short runs.
    hot_factor: Positive = 1.0
    # Standard deviation of the logarithm of the time of a step with prompts.
    spread: AtLeast0 = 0.0
    # A command from a router to a worker, through Serve, until the worker reads it: what is left of
    # first tokens at rest. By itself it was timed at 4.2 ms, but a GPU that has rested computes a
    # prompt faster than the points say.
    command_s: AtLeast0 = 1.5e-3
    message_s: AtLeast0 = 1.3e-3  # A message from a worker to a router.
    http_s: AtLeast0 = 1.4e-3  # What HTTP and the router add to a first token, without messages.
    hand_over_s: AtLeast0 = 0.35e-3  # Fixed part of a hand-off.
    link_bytes_per_s: Positive = 295e9  # Rate of a hand-off's bytes.
    memory_bytes: AtLeast0 = 0.0  # Memory of one GPU for weights and KV cache.
    # Tokens in the measured engine's KV cache. None: as many as memory_bytes leaves room for.
    num_kv_tokens: Count | None = None

    @property
    def is_cpu(self) -> bool:
        """True if it was measured without a GPU."""
        return self.device == CPU


def read_profile(path: Path) -> Profile:
    """Reads a profile. Raises ValueError that names the file, the fault and the cure."""
    cure = "write one by `pdserve profile --model DIR --out FILE`"
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=Profile)
    except OSError as error:
        raise ValueError(f"--profile {path} cannot be read ({error.strerror}): {cure}") from error
    except msgspec.DecodeError as error:
        raise ValueError(f"--profile {path} is no profile ({error}): {cure}") from error
    try:
        ModelSpec.model_validate(profile.spec)
    except ValidationError as error:
        name = ".".join(map(str, error.errors()[0]["loc"]))
        raise ValueError(
            f"--profile {path} is no profile (spec.{name}: {error.errors()[0]['msg']}): {cure}"
        ) from error
    if not profile.decodes or not profile.prompts:
        raise ValueError(f"--profile {path} holds no points of decodes or of prompts: {cure}")
    return profile


def write_profile(path: Path, profile: Profile) -> None:
    path.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
