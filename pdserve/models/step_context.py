"""The context of a step: what a model is given beside its rows. It says how they attend, and what
else they bring or leave.

The model runner makes a new one each step. A model passes it on and reads what concerns it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from pdserve.kernels.attention.spec import AttentionSpec
from pdserve.kernels.kv.ops import HeadNorms
from pdserve.kernels.latents.spec import LatentAttentionSpec, LatentHeads

RopeTables = tuple[Tensor, Tensor]
"""The tables cos and sin; see models/rope.py, which makes them."""
Attend = Callable[
    [int, AttentionSpec, Tensor, Tensor, Tensor, RopeTables, HeadNorms | None, Tensor | None],
    Tensor,
]
"""`attend(layer, spec, q [T, Hq, D], k [T, Hk, D], v [T, Hk, D], rope, norms, sinks) -> [T, Hq,
D]`. It norms the heads of q and k (None: they have no norms) and rotates them, and may do so in
place. The sinks are float32 `[Hq]` if the spec has them, else None."""
AttendLatent = Callable[[int, LatentAttentionSpec, Tensor, Tensor, LatentHeads, RopeTables], Tensor]
"""`attend_latent(layer, spec, q [T, Hq, nope_dim + rope_dim], latent [T, rank + rope_dim], heads,
rope) -> [T, Hq, v_dim]`. It norms the latent, rotates the last columns of q and of the latent, and
may do so in place."""


@dataclass(frozen=True)
class GivenRows:
    """Embeddings that rows bring instead of token ids. rows: int64 `[G]`; values: `[G, hidden]`."""

    rows: Tensor
    values: Tensor


def no_latents(*_: object) -> Tensor:
    raise AssertionError("a model that attends over latents got no function to do so")


@dataclass
class StepContext:
    """The context of a step.

    attend, attend_latent: compute the attention of a layer.
    positions: int32 `[T]`, the position of each row in its sequence; or `[3, T]` for a rope of
        three (Qwen2-VL) that `attend` knows.
    given: None if all rows are token ids.
    adapter_slots: int32 `[T]`, the adapter of each row; None: no row has one.
    live: bool `[T]`, false for rows that are padding; None for models that need not know.
    taps: layers whose input stream is wanted; the model writes it there.
    home_rows: T of each home; empty: there is one home.
    """

    attend: Attend
    positions: Tensor | None = None
    given: GivenRows | None = None
    adapter_slots: Tensor | None = None
    live: Tensor | None = None
    taps: dict[int, Tensor | None] = field(default_factory=dict)
    attend_latent: AttendLatent = no_latents
    home_rows: tuple[int, ...] = ()
