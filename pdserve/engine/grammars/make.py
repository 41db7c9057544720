"""The builder of grammars for a model, as `LLM` and workers have it: llguidance over the model's
tokenizer."""

from collections.abc import Callable
from pathlib import Path

from pdserve.configs.engine import EngineConfig, ModelConfig
from pdserve.engine.grammars.builder import GrammarBuilder
from pdserve.engine.grammars.grammar import GrammarEngine
from pdserve.models.checkpoint import resolve_folder, tokenizer_folder
from pdserve.models.config import read_spec


def grammar_builder(
    model: ModelConfig,
    config: EngineConfig,
    wake: Callable[[], None] = lambda: None,
) -> GrammarBuilder:
    """Nothing is read before it is needed, or `GrammarBuilder.begin`."""

    def load() -> GrammarEngine:
        # Not before a grammar is wanted: where the library is missing, grammars alone are refused.
        from pdserve.engine.grammars.llguidance_engine import LLGuidanceEngine

        folder = resolve_folder(model.resolved_path, model.load_format, model.revision)
        spec = read_spec(str(folder), model.load_format, model.seed)
        return LLGuidanceEngine.load(tokenizer_folder(model), spec.eos_token_ids)

    return GrammarBuilder(load, config.grammar_build_s, wake)


def can_begin(model: ModelConfig) -> bool:
    """Whether the folder of its tokenizer is here already, so that that can be read at once."""
    return Path(model.resolved_tokenizer or model.resolved_path).is_dir()
