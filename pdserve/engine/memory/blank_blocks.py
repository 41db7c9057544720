"""Free blocks without known content. Neighbours are handed out together, because contiguous blocks
move with one descriptor.

Knows no owners and no content. Owned by the block manager.
"""

import numpy as np


class BlankBlocks:
    """A set of blocks among 1..num_blocks - 1; block 0 is never blank."""

    def __init__(self, num_blocks: int) -> None:
        """Start with all of them blank."""
        self._num_blocks = num_blocks
        self._is_blank = np.ones(num_blocks, dtype=bool)
        self._is_blank[0] = False
        self._count = num_blocks - 1

    def __len__(self) -> int:
        return self._count

    def __contains__(self, block: int) -> bool:
        return bool(self._is_blank[block])

    def add(self, block: int) -> None:
        self._is_blank[block] = True
        self._count += 1

    def take(self, count: int, after: int | None) -> np.ndarray:
        """Take `count` blocks, int64; count is at least 1 and at most all. They are neighbours
        where possible, and come right after block `after` if those are blank."""
        taken = np.asarray(self._pick(count, after), dtype=np.int64)
        self._is_blank[taken] = False
        self._count -= count
        return taken

    def run_lengths(self) -> np.ndarray:
        """Length of each run of neighbours; takes at most 0.2 ms for 50,000 blocks."""
        edges = np.flatnonzero(np.append(self._is_blank[1:], False) != self._is_blank)
        return edges[1::2] - edges[::2]

    def ids(self) -> list[int]:
        return np.flatnonzero(self._is_blank).tolist()

    def _pick(self, count: int, after: int | None) -> list[int]:
        first = (after if after is not None else 0) + 1
        if (
            after is not None
            and first + count <= self._num_blocks
            and self._is_blank[first : first + count].all()
        ):
            return list(range(first, first + count))
        if count == 1:
            return [int(self._is_blank.argmax())]
        return self._pick_runs(count)

    def _pick_runs(self, count: int) -> list[int]:
        """Pick from the first run that is long enough, else from the longest runs first."""
        ids = np.flatnonzero(self._is_blank)
        starts = np.concatenate(([0], np.flatnonzero(np.diff(ids) != 1) + 1))
        lengths = np.diff(np.append(starts, len(ids)))
        fitting = int((lengths >= count).argmax())
        if lengths[fitting] >= count:
            return ids[starts[fitting] :][:count].tolist()
        blocks: list[int] = []
        for run in np.argsort(-lengths, kind="stable"):
            blocks += ids[starts[run] :][: min(lengths[run], count - len(blocks))].tolist()
            if len(blocks) == count:
                break
        return blocks
