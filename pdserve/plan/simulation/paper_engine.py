"""A real engine over an executor on paper. Scheduler, block manager, planner and collector are the
real ones. The model is only its config.json.

`scene` calls this module once per worker.
"""

import torch

from pdserve.configs.engine import EngineConfig
from pdserve.configs.kv_layout import KVLayout, LayerGroup, rows_digest
from pdserve.configs.router import SloConfig
from pdserve.engine.components import EngineComponents
from pdserve.engine.engine import Engine
from pdserve.engine.pacing.pace import Pace
from pdserve.engine.sampling.row_staging import RowStaging
from pdserve.engine.scheduling.home import num_slots_for
from pdserve.engine.warm_up import teach_pace
from pdserve.models.config import ModelSpec
from pdserve.plan.profile.step_times import StepTimes
from pdserve.plan.simulation.paper_executor import PaperExecutor


def layout_of(spec: ModelSpec, block_size: int, dtype: str) -> KVLayout:
    """Returns the layout of a token's KV rows as if one rank had all heads and layers."""
    if spec.latent is None:
        return KVLayout.uniform(
            num_layers=spec.num_layers,
            heads=tuple(range(spec.num_kv_heads)),
            head_dim=spec.head_dim,
            block_size=block_size,
            dtype=dtype,
        )
    group = LayerGroup(
        layers=tuple(range(spec.num_layers)),
        heads=(0,),
        row_width=spec.latent.kv_rank + spec.latent.rope_dim,
        planes=1,
        dtype=dtype,
    )
    return KVLayout(groups=(group,), block_size=block_size)


def paper_engine(
    spec: ModelSpec,
    config: EngineConfig,
    times: StepTimes,
    num_kv_tokens: int,
    dtype: str,
    slo: SloConfig | None,
    seed: int = 0,
) -> Engine:
    """Makes an engine on paper. Raises ValueError that names the wrong parameter.

    - num_kv_tokens: Number of tokens in the KV cache of a home.
    - slo: Promises by which the engine paces its steps, as a real one does. While it learns how
      long steps take, the clock advances. None: it does not pace them.
    - seed: Of its executor's chance.
    """
    resolved = config.for_device("cuda")
    layout = layout_of(spec, resolved.block_size, dtype)
    fingerprint = f"{spec.fingerprint()}/{dtype}"
    num_slots = resolved.data_parallel * num_slots_for(resolved.max_num_seqs)
    engine = Engine(
        EngineComponents(
            config=resolved,
            device=torch.device("cpu"),
            spec=spec,
            layout=layout,
            executor=PaperExecutor(times, layout, resolved.pipeline_parallel, seed),
            staging=RowStaging((), spec.vocab_size, num_slots),
            num_blocks=max(2, num_kv_tokens // resolved.block_size),
            fingerprint=fingerprint,
            rows_digest=rows_digest(fingerprint, layout.groups),
            unrounded={},
            max_model_len=spec.max_len(resolved.max_model_len),
            expert_load=None,
        ),
        Pace.of(slo, resolved.max_num_batched_tokens, spec.hidden_size)
        if slo is not None and resolved.pipeline_parallel == 1
        else None,
    )
    teach_pace(engine)
    return engine
