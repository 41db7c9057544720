"""Runs a few made-up requests through a new engine, so that no user's request has to wait while a
kernel is compiled.

They use the null prompt (token 0), every sampling feature, a full step and a fork. They leave
nothing behind: no cached block, no count. Knows the engine only from outside. Called once by
`engine.build` on CUDA.
"""

from pdserve.engine.engine import Engine
from pdserve.engine.expert_places import num_experts_everywhere
from pdserve.engine.pacing.pace import PaceTotals
from pdserve.engine.stepping.executor import padded_rows
from pdserve.kernels.experts.products.tiles import rows_to_warm
from pdserve.protocol.commands import Start, Submit
from pdserve.protocol.request_key import RequestKey
from pdserve.protocol.sampling_params import SamplingParams
from pdserve.protocol.start_progress import Report

MIXED = SamplingParams(
    n=2,
    temperature=0.8,
    top_k=20,
    min_tokens=2,
    stop_token_ids=[0],
    prompt_logprobs=1,
    seed=0,
    max_tokens=4,
)
# Prompt lengths, and tokens after each, from which a pace learns before the first request.
TAUGHT_LENGTHS = (2048, 512, 128)
TAUGHT_TOKENS = 12
TAUGHT = SamplingParams(temperature=0, seed=0, max_tokens=TAUGHT_TOKENS, ignore_eos=True)
GREEDY = SamplingParams(temperature=0, seed=0, max_tokens=4)


def warm_up(engine: Engine, report: Report) -> None:
    """Run the warm-up and wait until the device has done it. Call it before the first request.
    report: called after each part."""
    caching = engine.config.enable_prefix_caching
    _set_caching(engine, False)
    room = engine.max_request_tokens - 4
    longest = min(engine.config.max_num_batched_tokens, room)
    engine.executor.warm_prefill(max(longest, 1))
    # A full step, with a length that no prepared plan has; short ones; and forks, whose blocks are
    # copied.
    requests = [(longest - 1, GREEDY), (min(33, room), GREEDY), (min(33, room), MIXED)]
    sizes = [*_rows_of_experts(engine), *_rows_of_quantised(engine)]
    requests += [(min(rows, longest - 1), GREEDY) for rows in sizes]
    for index, (length, sampling) in enumerate(requests):
        report(1 + index, 1 + len(requests))
        if length > 0:
            _run(engine, length, sampling)
    _set_caching(engine, caching)
    _forget(engine)


def teach_pace(engine: Engine) -> None:
    """Show the engine's pace, if it has one, how long steps take. Call it after `warm_up`, whose
    own steps compiled kernels and took longer."""
    if engine.pace is None:
        return
    most = engine.config.max_num_batched_tokens
    engine.pace.forget(padded_rows(engine.executor, most))
    caching = engine.config.enable_prefix_caching
    _set_caching(engine, False)
    room = engine.max_request_tokens - TAUGHT_TOKENS
    longest = min(engine.config.max_num_batched_tokens, room)
    for length in (longest, *(each for each in TAUGHT_LENGTHS if each < longest)):
        if length > 0:
            _run(engine, length, TAUGHT)
    _set_caching(engine, caching)
    _forget(engine)
    engine.pace.totals = PaceTotals()


def _forget(engine: Engine) -> None:
    engine.scheduler.num_preemptions = 0  # a fork may have found a tiny KV cache full
    engine.scheduler.admitted.clear()


def _rows_of_experts(engine: Engine) -> list[int]:
    """Rows per home that cover all sizes of a mixture's steps. The expert router sees the rows of
    one home, the experts those of all homes."""
    if engine.spec.experts is None:
        return []
    routing = engine.spec.experts.routing
    num_homes = len(engine.homes)
    of_all_homes = rows_to_warm(routing, num_experts_everywhere(engine.spec, engine.config))
    return sorted({*rows_to_warm(routing), *(-(-rows // num_homes) for rows in of_all_homes)})


def _rows_of_quantised(engine: Engine) -> list[int]:
    """Rows that cover all tiles of products with quantised weights."""
    if engine.spec.formats is None:
        return []
    # imports Triton, which a machine without a GPU may lack
    from pdserve.kernels.linear.int4 import products

    return products.rows_to_warm()


def _set_caching(engine: Engine, is_on: bool) -> None:
    for home in engine.homes:
        home.blocks.enable_caching = is_on


def _run(engine: Engine, length: int, sampling: SamplingParams) -> None:
    """Run a request in every home at once."""
    for number in range(len(engine.homes)):
        key = RequestKey("warm-up", 0, f"{length}/{number}")
        choices = min(sampling.n, engine.config.max_num_seqs)
        starts = tuple(Start(choice) for choice in range(choices))
        submit = Submit(
            key=key, phase="full", prompt_token_ids=(0,) * length, sampling=sampling, starts=starts
        )
        request = engine.make_request(submit)
        request.home = number
        request.prefix_looked_up = True  # no statistics
        engine.add(request, starts)
    while engine.has_work:
        engine.step()
