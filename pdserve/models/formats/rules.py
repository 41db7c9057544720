"""Rule: which modules a configuration means, and how it says that they are stored."""

import re
from collections.abc import Iterable
from typing import Literal

from pydantic import BaseModel, ConfigDict

from pdserve.models.formats.config_keys import Keys
from pdserve.models.formats.source_format import DENSE, SourceFormat

# The last part of the names of modules that stay in 16 bits here, whatever the configuration says.
# Routers are small and decide which experts a row goes to.
ALWAYS_DENSE = ("lm_head", "embed_tokens", "gate", "shared_expert_gate")

How = Literal["name", "components", "part", "match", "all"]


class Rule(BaseModel):
    """Modules and their format.

    how: how `text` fits a module. "name": the whole name. "components": whole components of it
        ("mlp.gate" in "model.layers.0.mlp.gate", but not in "mlp.gate_proj"). "part": any part of
        it. "match": an expression that matches from its start. "all": every module, without a text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    how: How
    text: str = ""
    format: SourceFormat = DENSE

    def fits(self, module: str) -> bool:
        match self.how:
            case "name":
                return module == self.text
            case "components":
                return f".{self.text}." in f".{module}."
            case "part":
                return self.text in module
            case "match":
                return re.match(self.text, module) is not None
            case "all":
                return True


def is_always_dense(module: str) -> bool:
    last = module.rpartition(".")[2]
    return last in ALWAYS_DENSE or last.endswith("norm")


def apply_rules(rules: Iterable[Rule], module: str) -> SourceFormat:
    """Returns the format of the first rule that fits; 16 bits if none does."""
    if is_always_dense(module):
        return DENSE
    return next((rule.format for rule in rules if rule.fits(module)), DENSE)


def listed(keys: Keys, key: str, how: How, format: SourceFormat = DENSE) -> list[Rule]:
    """Makes rules for the names in the list `key`; names that begin with "re:" are expressions."""
    rules = []
    for text in keys.words(key):
        if text.startswith("re:"):
            pattern = keys.pattern(key, text.removeprefix("re:"))
            rules.append(Rule(how="match", text=pattern, format=format))
        else:
            rules.append(Rule(how=how, text=text, format=format))
    return rules
