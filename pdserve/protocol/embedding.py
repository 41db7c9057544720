"""How the hidden row that an engine hands out (`events.Embedded`) becomes an embedding.

Pure arithmetic in float32. Used by `LLM.embed` and by routers.
"""

import numpy as np

from pdserve.configs.embedding import EmbeddingModel

LEAST_LENGTH = 1e-12  # a shorter row is divided by this, as torch's `normalize` does


def embedding_of(
    values: bytes,
    model: EmbeddingModel,
    dimensions: int | None = None,
    normalize: bool | None = None,
) -> np.ndarray:
    """float32 `[dimensions]` of a row of little-endian float32: its first values, divided by their
    length. dimensions None: all of them. normalize None: as the model does."""
    row = np.frombuffer(values, dtype="<f4")[:dimensions].astype(np.float32)
    if model.normalizes if normalize is None else normalize:
        row /= max(float(np.linalg.norm(row)), LEAST_LENGTH)
    return row
