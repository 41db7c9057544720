"""Turns the hidden row that an engine hands out (`events.Embedded`) into an embedding.

Pure arithmetic in float32. Used by `LLM.embed` and by routers.
"""

import numpy as np

from pdserve.configs.embedding import EmbeddingModel

LEAST_LENGTH = 1e-12  # shorter rows are divided by this, as in torch's `normalize`


def embedding_of(
    values: bytes,
    model: EmbeddingModel,
    dimensions: int | None = None,
    normalize: bool | None = None,
) -> np.ndarray:
    """Returns a float32 `[dimensions]`: the first values of a row of little-endian float32,
    normalised.

    They are divided by their length if `normalize` is True, or if it is None and the model does so.
    If `dimensions` is None, all values are returned.
    """
    row = np.frombuffer(values, dtype="<f4")[:dimensions].astype(np.float32)
    if model.normalizes if normalize is None else normalize:
        row /= max(float(np.linalg.norm(row)), LEAST_LENGTH)
    return row
