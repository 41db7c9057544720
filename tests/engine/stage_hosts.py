"""Rank 0 of an engine whose other ranks live on other hosts: answers the workload of several_ranks
as often as it is told to.

    python -m engine.stage_hosts FOLDER ADDRESS PARENT    ADDRESS: of this host

First it prints a RankTask for each other rank; process PARENT starts these. Then it prints, for
each line of standard input, the tokens of all answers, or why there are none. All is JSON.
"""

import sys

import msgspec
from engine.several_ranks import ROOMY, answers

from pdserve.configs.engine import EngineConfig, ModelConfig
from pdserve.engine import ranks
from pdserve.engine.llm import LLM
from pdserve.engine.ranks import RankTask
from pdserve.parallel.bring_up import RankGroup
from pdserve.parallel.dims import dims_of

STEP_DEADLINE_S = 5.0


class FarRanks:
    """Stands in for `RankProcesses`."""

    def __init__(self, model: ModelConfig, config: EngineConfig) -> None:
        self.group = RankGroup.host(dims_of(config), sys.argv[2])
        for rank in range(1, config.num_ranks):
            task = RankTask.of(model, config, rank, self.group)
            say(msgspec.structs.replace(task, parent=int(sys.argv[3])))

    def close(self) -> None:
        """They end by themselves."""


def say(what: object) -> None:
    print(msgspec.json.encode(what).decode(), flush=True)


def main() -> None:
    ranks.RankProcesses = FarRanks  # type: ignore[assignment,misc]
    llm = LLM(
        sys.argv[1],
        tokenizer=False,
        device="cpu",
        pipeline_parallel_size=2,
        step_deadline_s=STEP_DEADLINE_S,
        **ROOMY,
    )
    for _ in sys.stdin:
        try:
            say([[choice.token_ids for choice in each.outputs] for each in answers(llm)])
        except RuntimeError as error:
            say(str(error))


if __name__ == "__main__":
    main()
