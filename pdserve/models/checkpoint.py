"""A checkpoint as files: which folder, which safetensors files, what their headers say, and a
digest of their content.

This file needs no torch. It reads headers and samples of bytes, never whole tensors
(models/loader.py does). It knows nothing of architectures. models/config.py calls it for the
identity of the weights, and models/loader.py to learn what to read.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from pdserve.configs.engine import ModelConfig
from pdserve.models.hub import download, refused_formats

LoadFormat = Literal["auto", "dummy"]
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
WINDOWS = 4
MAX_WINDOW_BYTES = 16 << 10
MAX_READ_BYTES = 256 << 20
READERS = 16  # a network file system answers each read slowly, but many at once


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a safetensors file.

    start, end: offsets of its bytes in `file`.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def resolve_folder(
    path: str,
    load_format: LoadFormat,
    revision: str | None = None,
    report: Callable[[int, int], None] | None = None,
) -> Path:
    """Returns the local folder of a model: `path` itself, or the snapshot of the Hub id `path`. The
    snapshot is downloaded if it is not cached.

    load_format: "dummy" downloads no weights.
    revision: revision of the Hub's model; None: main.
    report: is called with the number of downloaded bytes, and the number of all bytes.
    Raises ValueError if `path` is neither a folder nor a repository of the Hub, or if the download
    fails.
    """
    folder = Path(path)
    if folder.is_dir():
        return folder
    return download(path, load_format == "auto", revision, report)


def tokenizer_folder(model: ModelConfig) -> Path:
    """Returns the folder from which a model's tokenizer is read. Raises like `resolve_folder`."""
    if model.resolved_tokenizer is not None:
        try:
            return resolve_folder(model.resolved_tokenizer, "dummy")
        except ValueError as error:
            said = str(error).removeprefix("model ")
            raise ValueError(f"tokenizer {said}") from error
    return resolve_folder(model.resolved_path, "dummy", model.revision)


def weight_files(folder: Path) -> list[Path]:
    """Returns the safetensors files of `folder`: those that its index names, or the single one.
    Raises ValueError, which names missing files."""
    index = folder / INDEX_FILE
    names = (
        sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if index.is_file()
        else [SINGLE_FILE]
    )
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        if absent == [SINGLE_FILE]:
            said = refused_formats([file.name for file in folder.iterdir()])
            raise ValueError(f"no weights in {folder}: it {said}; or load_format: dummy")
        raise ValueError(
            f"no weights in {folder}: missing {', '.join(absent)} (only safetensors are read; "
            f"load_format='dummy' needs config.json alone)"
        )
    return [folder / name for name in names]


def tensor_entries(file: Path) -> Iterator[TensorEntry]:
    """Yields the tensors of one safetensors file, as its header says them. Raises ValueError if the
    file is cut short or is not a safetensors file."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        size = file.stat().st_size
        if not 2 <= length <= size - 8:
            raise ValueError(
                f"{file} is not a complete safetensors file: header of {length} bytes in {size}"
            )
        content = stream.read(length)
    try:
        header = dict(json.loads(content))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{file} is not a safetensors file, its header is not valid ({error}): download it "
            "again"
        ) from error
    for name, facts in header.items():
        if name == "__metadata__":
            continue
        try:
            start, end = (8 + length + int(offset) for offset in facts["data_offsets"])
            entry = TensorEntry(name, file, str(facts["dtype"]), tuple(facts["shape"]), start, end)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{file}: the header says {facts!r} of tensor {name}, which is not valid: download "
                "the file again"
            ) from error
        if end > size:
            raise ValueError(f"{file} is cut short: tensor {name} ends at byte {end} of {size}")
        yield entry


def read_entries(folder: Path) -> list[TensorEntry]:
    """Returns all tensors of a model's weights, from the headers. Raises ValueError if files are
    missing or not complete."""
    return [entry for file in weight_files(folder) for entry in tensor_entries(file)]


def weights_digest(entries: Iterable[TensorEntry]) -> str:
    """Hex digest of the weights' identity: every tensor's name, dtype, shape and a sample of its
    bytes.

    It is equal for the same weights on every host, however they are sharded, because file names,
    sizes and times do not count. A tensor of up to 4 windows counts as a whole, a larger one by 4
    windows. So a retrained tensor changes the digest, and yet any model is read in seconds. A
    window has 16 KiB. With more than 4,096 tensors it has less, so that all windows stay within 256
    MiB. The digest tells models apart; it is no proof against forgery.
    """
    entries = sorted(entries, key=lambda entry: entry.name)
    window = min(MAX_WINDOW_BYTES, MAX_READ_BYTES // (WINDOWS * max(len(entries), 1)))
    digest = hashlib.blake2b(digest_size=16)
    with ExitStack() as files, ThreadPoolExecutor(READERS) as readers:
        named = {entry.file for entry in entries}
        opened = {file: files.enter_context(file.open("rb")) for file in named}
        samples = readers.map(lambda entry: _sample(opened[entry.file], entry, window), entries)
        for entry, sample in zip(entries, samples, strict=True):
            digest.update(json.dumps([entry.name, entry.dtype, entry.shape]).encode())
            digest.update(sample)
    return digest.hexdigest()


def _sample(file: BinaryIO, entry: TensorEntry, window: int) -> bytes:
    size = entry.end - entry.start
    if size <= WINDOWS * window:
        return _read_at(file, entry.start, size)
    starts = [entry.start + i * (size - window) // (WINDOWS - 1) for i in range(WINDOWS)]
    return b"".join(_read_at(file, start, window) for start in starts)


def _read_at(file: BinaryIO, start: int, size: int) -> bytes:
    """Reads all `size` bytes, even if a file system returns pieces. Any thread may call it."""
    found = b""
    while len(found) < size:
        piece = os.pread(file.fileno(), size - len(found), start + len(found))
        if not piece:
            raise ValueError(f"{file.name} was cut short while it was read")
        found += piece
    return found
