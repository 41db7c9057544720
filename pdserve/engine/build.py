"""Builds an engine that is ready to serve: its components, the engine over them, and on CUDA the
warm-up.

Knows no requests but the warm-up's. Called by `LLM` and by the worker's host.
"""

from pdserve.configs.engine import EngineConfig, ModelConfig
from pdserve.engine.components import make_components
from pdserve.engine.engine import Engine
from pdserve.engine.warm_up import warm_up
from pdserve.protocol.start_progress import StartProgress


def build_engine(
    model: ModelConfig, config: EngineConfig, progress: StartProgress | None = None
) -> Engine:
    """Load the model and allocate the KV cache; ValueError names the parameter that is wrong.
    progress: hears how far the start is."""
    progress = progress or StartProgress()
    engine = Engine(make_components(model, config, progress))
    if engine.device.type == "cuda":
        progress.enter("warm_up")
        warm_up(engine, progress.report)
        engine.mark_warm()
    return engine
