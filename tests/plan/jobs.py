"""Small jobs for a simulated cluster, and the profile that they run on."""

import random
from dataclasses import dataclass

import msgspec

from pdserve.plan.profile.profile import DEFAULT, Profile, read_profile
from pdserve.plan.simulation.jobs import Job, Pool, Request

KV_TOKENS = 200_000


def profile() -> Profile:
    """The shipped profile, without chance."""
    return msgspec.structs.replace(read_profile(DEFAULT), spread=0.0)


@dataclass(frozen=True)
class Lengths:
    low_in: int = 100
    high_in: int = 3000
    high_out: int = 80


def requests(
    seed: int, rate: float, count: int, lengths: Lengths | None = None
) -> tuple[Request, ...]:
    lengths = lengths or Lengths()
    draw = random.Random(seed)
    now = 0.0
    found = []
    for number in range(count):
        now += draw.expovariate(rate)
        tokens = draw.randint(lengths.low_in, lengths.high_in)
        found.append(
            Request(now, ((f"own {seed} {number}", tokens),), draw.randint(1, lengths.high_out))
        )
    return tuple(found)


def split(prefills: int = 1, decodes: int = 1, kv_tokens: int = KV_TOKENS) -> tuple[Pool, ...]:
    return (
        Pool("prefill", prefills, profile(), kv_tokens, {}),
        Pool("decode", decodes, profile(), kv_tokens, {}),
    )


def whole(count: int = 2, kv_tokens: int = KV_TOKENS) -> tuple[Pool, ...]:
    return (Pool("both", count, profile(), kv_tokens, {}),)


def job(pools: tuple[Pool, ...], asked: tuple[Request, ...], **more: object) -> Job:
    return Job(pools=pools, requests=asked, keeps_all=True, max_model_len=8192, **more)  # type: ignore[arg-type]
