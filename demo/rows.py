"""Training rows: generated documents as token ids, one document per row, cut or padded to the row's
length.

This module needs no torch, so that worker processes start fast. It knows tokenizer.json and the
generators, but neither the model nor the schedule. demo/train.py calls it, in worker processes or
inline.
"""

import os
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from demo.data import EOS
from demo.documents import document
from demo.tokenizer import token_id

ROW_LENGTHS = (256, 1024, 2048)
RECALL_SHARE = {256: 0.5, 1024: 0.75, 2048: 0.8}
FILL = 0.92


@dataclass(frozen=True)
class Shard:
    """Training rows of one length.

    `rows` is uint16 [num_rows, row_length + 1]. It has the inputs and, one place to the right,
    their targets. Each row starts with <|bos|> and is padded at the end with <|eos|>.
    """

    row_length: int
    rows: npt.NDArray[np.uint16]


def make_shard(tokenizer: Tokenizer, seed: int, row_length: int, num_tokens: int) -> Shard:
    """Makes the shard that `seed` determines: about `num_tokens` tokens in rows of `row_length`,
    which is a key of RECALL_SHARE."""
    rng = random.Random(seed)
    num_rows = max(1, num_tokens // row_length)
    texts = [
        document(rng, int(FILL * row_length), RECALL_SHARE[row_length]) for _ in range(num_rows)
    ]
    rows = np.full((num_rows, row_length + 1), token_id(tokenizer, EOS), dtype=np.uint16)
    for row, encoding in zip(rows, tokenizer.encode_batch_fast(texts), strict=True):
        ids = encoding.ids[: row_length + 1]
        row[: len(ids)] = ids
    return Shard(row_length, rows)


_worker_tokenizer: list[Tokenizer] = []


def start_worker(tokenizer_file: Path) -> None:
    """Initialises a process of the pool with one tokenizer. It is single-threaded, because the pool
    already fills the cores."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker_tokenizer.append(Tokenizer.from_file(str(tokenizer_file)))


def worker_shard(task: tuple[int, int, int]) -> Shard:
    """Makes a shard in a process of the pool, from (seed, row_length, num_tokens). `start_worker`
    must have run before."""
    return make_shard(_worker_tokenizer[0], *task)
