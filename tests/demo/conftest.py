"""Makes `demo` and `benchmarks`, which are scripts beside the package, importable; loads the
shipped tokenizer once."""

import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[2]))


@pytest.fixture(scope="session")
def model_dir() -> Path:
    return Path(__file__).parents[2] / "demo" / "pdserve-demo"


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))
