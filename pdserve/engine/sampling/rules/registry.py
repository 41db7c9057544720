"""Lists all logit rules in the order of their application: those of vLLM's parameters, then those
that requests name (protocol/logit_rules.py)."""

from pkgutil import resolve_name
from typing import Any

import torch

from pdserve.engine.sampling.rules.bias import Bias
from pdserve.engine.sampling.rules.logit_rule import LogitRule
from pdserve.engine.sampling.rules.penalties import Penalties
from pdserve.engine.sampling.rules.stop_mask import StopMask
from pdserve.engine.sampling.rules.token_mask import MASK_S, TokenMask
from pdserve.kernels.ops import Ops
from pdserve.protocol.logit_rules import RULES, TOKEN_MASK

Rules = tuple[LogitRule[Any], ...]


def logit_rules(
    ops: Ops,
    vocab_size: int,
    num_slots: int,
    num_eos: int,
    device: torch.device,
    mask_s: float = MASK_S,
) -> Rules:
    """Make the rules of one rank. num_eos: number of end-of-sequence tokens of the model. mask_s:
    seconds that a grammar may take for a mask."""
    named = dict.fromkeys(kind.rule for kind in RULES.values())
    return (
        Bias(ops, vocab_size, num_slots, device),
        StopMask(ops, vocab_size, num_slots, num_eos, device),
        Penalties(ops, vocab_size, num_slots, device),
        *(
            TokenMask(ops, vocab_size, num_slots, device, mask_s)
            if rule == TOKEN_MASK
            else resolve_name(f"pdserve.engine.sampling.rules.{rule}")(
                ops, vocab_size, num_slots, device
            )
            for rule in named
        ),
    )
