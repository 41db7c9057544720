"""Decides how many prompt rows the next step may take if no time between tokens is promised.

Streams then have no deadlines. What counts is how long requests take in all. A prompt takes about
as long in chunks of some hundred rows as at once, and every stream gets a token from each chunk. So
prompts have short chunks while few rows wait, and longer ones when first tokens would come late.

Knows a step's load and its predicted time. Asked by `pace.Pace`.
"""

from collections.abc import Sequence

from pdserve.engine.pacing.step_model import MOST_EFFICIENT, StepLoad, StepModel

STALL_S = 0.05  # without a promise, a step with prompts may always take as long
STRETCH = 1.25  # a step may have STRETCH x the rows if no prompt row is left after it


def unpromised_rows(
    model: StepModel,
    homes: Sequence[StepLoad],
    longest: float,
    least: int,
    wanted: int,
    context: int,
    expects_streams: bool,
) -> list[int]:
    """Returns the prompt rows that each home may have.

    Parameters:
    - homes: The load of each home's decodes. At least one has decodes.
    - longest: Seconds that the step may take, if that is more than STALL_S.
    - least: Rows of a chunk that is worth a step.
    - wanted: Rows that prompts want in all. What could not be computed in STALL_S after this step
      is computed in it, as far as it fits.
    - context: Computed rows of the first prompt.
    - expects_streams: True if prefill workers hand streams to this engine. Then most prompts are
      computed there, and chunks stay short, however many prompts wait.
    """
    busiest = max(homes, key=lambda load: (load.num_decodes, load.context_tokens))
    chunk = max(MOST_EFFICIENT, model.longest_rows(busiest))
    if not expects_streams:
        soon = min(model.prompt_rows_within(STALL_S, load, context) for load in homes)
        chunk = max(chunk, wanted - soon)
    if wanted <= STRETCH * chunk:  # better than one more step for the rest
        chunk = wanted
    longest = max(STALL_S, longest)
    fitting = [min(chunk, model.prompt_rows_within(longest, load, context)) for load in homes]
    return [
        max(least, model.filling_rows(rows, load))
        for rows, load in zip(fitting, homes, strict=True)
    ]
