"""Models of the Hugging Face Hub. They are downloaded into the Hub's cache, once per node, however
many processes of the node ask. If a model cannot be had, the error is a sentence with the cure.

Processes that share a cache download a model's weights one after another, so all but the first find
them there. Those that wait report the progress of the first. The library's own settings apply:
HF_TOKEN or `hf auth login`, HF_HOME, HF_HUB_OFFLINE, HF_ENDPOINT. They must be set on every node,
except for the token, which `pdserve up` brings there. This file needs no torch.
models/checkpoint.py calls it.
"""

import errno
import fcntl
import io
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

Report = Callable[[int, int], None]
"""Is called with the number of bytes that are there, and the number of all bytes."""

# These files hold the same weights a second time, under the vendor's own names.
IGNORED = ["consolidated*", "original/*"]
CONFIGS = ["*.json", "*.jinja", "*.model", "*.txt"]
WEIGHTS = "*.safetensors"
LOOK_S = 0.2  # seconds between two looks at another process' download
FOREIGN = {".gguf": "GGUF", ".bin": "PyTorch's pickled .bin", ".pt": "PyTorch's pickled .pt"}


def download(
    name: str, with_weights: bool, revision: str | None = None, report: Report | None = None
) -> Path:
    """Returns the folder of a model's files in the Hub's cache, and downloads those that are not
    there. ValueError says why a model cannot be had, and what to do."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    patterns = [*CONFIGS, WEIGHTS] if with_weights else CONFIGS
    try:
        num_bytes = _check(name, patterns, revision)
        with _turn(name, num_bytes if with_weights else None, report):
            return Path(
                snapshot_download(
                    name,
                    revision=revision,
                    allow_patterns=patterns,
                    ignore_patterns=IGNORED,
                    tqdm_class=_bar_of(report),
                )
            )
    except HFValidationError as error:
        raise ValueError(
            f"model path {name!r} is not a local folder, nor a name of the Hub ({error}): write a "
            "folder that exists, or OWNER/MODEL"
        ) from error
    except Exception as error:
        if (said := _said(name, revision, error)) is None:
            raise
        raise ValueError(f"model path {name!r} is not a local folder, and {said}") from error


def _check(name: str, patterns: Sequence[str], revision: str | None) -> int | None:
    """Returns how many bytes the model's files have; None if the Hub does not say. Raises
    ValueError if it has no safetensors, or if its files do not fit the disk."""
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        found = HfApi().model_info(name, revision=revision, files_metadata=True, timeout=30)
    except Exception:  # refused or unreachable; the cache may have the model
        return None
    files = {file.rfilename: file.size or 0 for file in found.siblings or ()}
    if WEIGHTS in patterns and not any(fnmatch(file, WEIGHTS) for file in files):
        raise ValueError(f"{name}: {refused_formats(files)}")
    wanted = sum(size for file, size in files.items() if any(fnmatch(file, p) for p in patterns))
    cache = Path(constants.HF_HUB_CACHE)
    held = _held_bytes(cache, name)
    free = shutil.disk_usage(_existing(cache)).free
    if wanted - held > free:
        raise ValueError(
            f"{name}: {(wanted - held) / 1e9:.1f} GB must be downloaded, but {cache} has room "
            f"for {free / 1e9:.1f} GB: make room, or set HF_HOME to a folder of a larger disk"
        )
    return wanted


@contextmanager
def _turn(name: str, num_bytes: int | None, report: Report | None) -> Iterator[None]:
    """Waits until no other process downloads these weights into this cache. The kernel frees the
    lock of a process that dies. num_bytes: of all files; None: there is no need to wait."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    lock = None if num_bytes is None else _lock_file(cache, name)
    most = 0
    try:
        while lock is not None and not _take(lock):
            held = min(_held_bytes(cache, name), num_bytes or 0)
            if report is not None and held > most:
                most = held  # a file may be missed for a moment while it is moved to its place
                report(most, num_bytes or 0)
            time.sleep(LOOK_S)
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _lock_file(cache: Path, name: str) -> int | None:
    """Returns the lock file's descriptor. It is None if nobody can write there; then nothing is
    downloaded either."""
    folder = cache / ".locks" / _folder_of(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return os.open(folder / "pdserve.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o664)
    except OSError:
        return None


def _take(lock: int) -> bool:
    """Tries to take the lock. On a file system without locks it leaves locking to the library,
    which then makes lock files of its own."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _held_bytes(cache: Path, name: str) -> int:
    """Number of bytes that the cache has of a model, including files that are not complete."""
    total = 0
    for blob in (cache / _folder_of(name) / "blobs").glob("*"):
        with suppress(FileNotFoundError):  # it was moved to its place
            total += blob.stat().st_size
    return total


def _folder_of(name: str) -> str:
    return f"models--{name.replace('/', '--')}"


def refused_formats(files: Sequence[str] | dict[str, int]) -> str:
    """Says why a folder without safetensors is not read."""
    kinds = sorted({FOREIGN[end] for file in files if (end := Path(file).suffix) in FOREIGN})
    if not kinds:
        return "has no weights in safetensors: check that it is the model's folder"
    return (
        f"has its weights as {' and '.join(kinds)} alone, and only safetensors are read: choose "
        "another repository of this model, or save it with save_pretrained of transformers"
    )


def _said(name: str, revision: str | None, error: Exception) -> str | None:
    """Says what an error means; None if it is not a known one."""
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    has_token = get_token() is not None
    page = f"{constants.ENDPOINT}/{name}"
    match error:
        case GatedRepoError():
            who = "the account of your token" if has_token else "an account, and set HF_TOKEN to it"
            return f"is gated on the Hub: accept its terms at {page} with {who}"
        case RepositoryNotFoundError():
            cure = (
                "your token (HF_TOKEN or `hf auth login`) may not read it"
                if has_token
                else "it is private: set HF_TOKEN, or run `hf auth login`"
            )
            return f"the Hub has no such model, or {cure}"
        case RevisionNotFoundError():
            return f"the Hub's model has no revision {revision or 'main'!r}: see {page}/tree/main"
        case LocalEntryNotFoundError() | OfflineModeIsEnabled():
            why = (
                "HF_HUB_OFFLINE is set"
                if constants.HF_HUB_OFFLINE
                else f"the Hub cannot be reached ({_cause(error)})"
            )
            return (
                f"its files are not all in the cache ({constants.HF_HUB_CACHE}), and {why}: run "
                f"`hf download {name}` where there is a network, and copy the cache"
            )
        case HfHubHTTPError() if error.response.status_code == 401:
            return "the Hub refuses your token (HF_TOKEN or `hf auth login`): make a new one"
        case HfHubHTTPError():
            return f"the Hub refused it: {str(error).splitlines()[0]}"
        case OSError() if error.errno == errno.ENOSPC:
            return (
                f"the disk of {constants.HF_HUB_CACHE} is full: make room, or set HF_HOME to a "
                "folder of a larger disk; files that are already there are not downloaded again"
            )
    return None


def _cause(error: BaseException) -> str:
    said = str(error.__cause__ or error).splitlines()
    return said[0] if said else type(error).__name__


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def _bar_of(report: Report | None) -> type[Any]:
    """Returns a class of progress bars for the library. Bars of bytes are reported if there is a
    report; then no bar is drawn."""
    most = 0

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            is_silent = report is not None or os.environ.get("HF_HUB_DISABLE_PROGRESS_BARS")
            self._tells = report is not None and kwargs.get("unit") == "B"
            super().__init__(*args, **kwargs | ({"file": io.StringIO()} if is_silent else {}))

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal most
            changed = super().update(n)
            if self._tells and report is not None and self.total and self.n > most:
                most = int(self.n)  # the larger of two bars: received bytes and written bytes
                report(most, int(self.total))
            return changed

    return Bar
