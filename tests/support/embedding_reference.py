"""A tiny model in Qwen3-Embedding's form, and what transformers makes of texts with it in float32.

    python -m support.embedding_reference FOLDER TEXT...

writes the model into FOLDER, and the embeddings as JSON into FOLDER/expected.json. Used by the
tests of clients, whose environment has no torch.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from support.tiny_models import make_embedding

from pdserve.text.tokenizer import Tokenizer


def embeddings_of(folder: Path, texts: list[str]) -> list[list[float]]:
    """Returns the last hidden row of each text by transformers, normalised."""
    from transformers import AutoModel

    model: Any = AutoModel.from_pretrained(folder, dtype=torch.float32)
    tokenizer = Tokenizer.load(folder)
    found = []
    for text in texts:
        with torch.inference_mode():
            row = model(torch.tensor([tokenizer.encode(text)])).last_hidden_state[0, -1]
        found.append(torch.nn.functional.normalize(row, dim=0).tolist())
    return found


def main(folder: Path, texts: list[str]) -> None:
    make_embedding(folder)
    (folder / "expected.json").write_text(json.dumps(embeddings_of(folder, texts)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
