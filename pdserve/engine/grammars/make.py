"""Makes the grammar builder for a model, for `LLM` and workers: llguidance over the model's
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
    """Make a builder. It reads nothing before the first grammar or `GrammarBuilder.begin`."""

    def load() -> GrammarEngine:
        # Imported only when a grammar is wanted: without the library, only grammars are refused.
        from pdserve.engine.grammars.llguidance_engine import LLGuidanceEngine

        folder = resolve_folder(model.resolved_path, model.load_format, model.revision)
        spec = read_spec(str(folder), model.load_format, model.seed)
        return LLGuidanceEngine.load(tokenizer_folder(model), spec.eos_token_ids)

    return GrammarBuilder(load, config.grammar_build_s, wake)


def can_begin(model: ModelConfig) -> bool:
    """True if the folder of the model's tokenizer is here, so that it can be read at once."""
    return Path(model.resolved_tokenizer or model.resolved_path).is_dir()
