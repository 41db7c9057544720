"""Files that say how many rows chose each expert: JSON `{"<layer>": [rows of each expert]}`.

They are written from the counts of a running cluster (`pdserve expert-load`) or of an `LLM`, and
read when an engine starts whose ranks hold experts by load. This file needs no torch.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def write_load(path: str | Path, load: Mapping[int, Iterable[int]]) -> None:
    """Writes `load`, a mapping from layers to counts; the counts may be arrays."""
    rows = {str(layer): [int(count) for count in counts] for layer, counts in load.items()}
    Path(path).write_text(json.dumps(rows) + "\n")


def read_load(
    path: str | Path, layers: Iterable[int], num_experts: int
) -> dict[int, tuple[int, ...]]:
    """Returns the rows of each expert in these layers. Other layers in the file do not matter,
    because a stage of a pipeline has only some. Raises ValueError for a file that lacks them."""
    try:
        said = json.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read as a load of experts: {error}") from error
    if not isinstance(said, dict):
        raise ValueError(f'{path} must hold {{"<layer>": [rows of each expert]}} as JSON')
    wanted = list(layers)
    if missing := [layer for layer in wanted if str(layer) not in said]:
        raise ValueError(
            f"{path} lacks layers {missing} of the model: write it from the load of all stages "
            "(pdserve expert-load, or LLM.save_expert_load)"
        )
    return {layer: _checked(path, layer, said[str(layer)], num_experts) for layer in wanted}


def _checked(path: str | Path, layer: int, counts: Any, num_experts: int) -> tuple[int, ...]:
    if not isinstance(counts, list) or len(counts) != num_experts:
        found = len(counts) if isinstance(counts, list) else "no list of"
        raise ValueError(
            f"{path} has {found} counts for layer {layer}, but the model has {num_experts} "
            "experts: does the file belong to another model?"
        )
    for expert, count in enumerate(counts):
        if type(count) is not int or count < 0:
            raise ValueError(
                f"{path} has {count!r} as the number of rows of expert {expert} of layer {layer}: "
                "a count must be a whole number, 0 or more"
            )
    return tuple(counts)
