"""Says how a model embeds, as all rooms know it: read from a checkpoint by
`models.task`, used by `LLM.embed` and by routers.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class EmbeddingModel:
    """The embedding of a prompt is the hidden row of its last token.

    size: number of values in a whole embedding.
    normalizes: whether embeddings have length 1 unless a request says otherwise.
    dimensions: the lengths to which embeddings may be cut; empty: any length up to `size`.
    """

    size: int
    normalizes: bool = True
    dimensions: tuple[int, ...] = ()

    def check(self, dimensions: int | None) -> None:
        """Raise ValueError, which begins with "dimensions", when embeddings cannot have this
        length."""
        if dimensions is None:
            return
        if self.dimensions and dimensions not in self.dimensions:
            known = ", ".join(map(str, self.dimensions))
            raise ValueError(f"dimensions must be one of {known} for this model, not {dimensions}")
        if not 1 <= dimensions <= self.size:
            raise ValueError(
                f"dimensions must be from 1 to {self.size}, the size of this model's embeddings, "
                f"not {dimensions}"
            )
