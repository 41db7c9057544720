"""Models of the Hugging Face Hub: a download into its cache, once a node however many processes of
the node ask, and what cannot be had as a sentence with the cure.

The library's own settings hold: HF_TOKEN or `hf auth login`, HF_HOME, HF_HUB_OFFLINE, HF_ENDPOINT.
They must be set on every node. Torch-free. Called by models/checkpoint.py.
"""

import errno
import io
import os
import shutil
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

Report = Callable[[int, int], None]
"""Called with how many bytes are there, and of how many."""

# the same weights a second time, in the vendor's own naming
IGNORED = ["consolidated*", "original/*"]
CONFIGS = ["*.json", "*.jinja", "*.model", "*.txt"]
WEIGHTS = "*.safetensors"
FOREIGN = {".gguf": "GGUF", ".bin": "PyTorch's pickled .bin", ".pt": "PyTorch's pickled .pt"}


def download(
    name: str, with_weights: bool, revision: str | None = None, report: Report | None = None
) -> Path:
    """The folder of a model's files in the Hub's cache, downloaded where they are not there.
    ValueError says why a model cannot be had, and what to do."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    patterns = [*CONFIGS, WEIGHTS] if with_weights else CONFIGS
    try:
        _check(name, patterns, revision)
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


def _check(name: str, patterns: Sequence[str], revision: str | None) -> None:
    """ValueError when the model has no safetensors, or its files do not fit the disk. Nothing where
    the Hub does not say."""
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return
    try:
        found = HfApi().model_info(name, revision=revision, files_metadata=True, timeout=30)
    except Exception:  # refused, or out of reach: the cache may have the model
        return
    files = {file.rfilename: file.size or 0 for file in found.siblings or ()}
    if WEIGHTS in patterns and not any(fnmatch(file, WEIGHTS) for file in files):
        raise ValueError(f"{name}: {refused_formats(files)}")
    wanted = sum(size for file, size in files.items() if any(fnmatch(file, p) for p in patterns))
    cache = Path(constants.HF_HUB_CACHE)
    here = cache / f"models--{name.replace('/', '--')}" / "blobs"
    held = sum(blob.stat().st_size for blob in here.glob("*")) if here.is_dir() else 0
    free = shutil.disk_usage(_existing(cache)).free
    if wanted - held > free:
        raise ValueError(
            f"{name}: {(wanted - held) / 1e9:.1f} GB are to be downloaded, and {cache} has room "
            f"for {free / 1e9:.1f} GB: make room, or set HF_HOME to a folder of a larger disk"
        )


def refused_formats(files: Sequence[str] | dict[str, int]) -> str:
    """Why a folder without safetensors is not read."""
    kinds = sorted({FOREIGN[end] for file in files if (end := Path(file).suffix) in FOREIGN})
    if not kinds:
        return "has no weights in safetensors: check that it is the model's folder"
    return (
        f"has its weights as {' and '.join(kinds)} alone, and only safetensors are read: choose "
        "another repository of this model, or save it with save_pretrained of transformers"
    )


def _said(name: str, revision: str | None, error: Exception) -> str | None:
    """What an error means; None: nothing that is known."""
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
                else "it is private: set HF_TOKEN on every node, or run `hf auth login`"
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
                "folder of a larger disk; what is there already is not downloaded again"
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
    """The library's bars: those of bytes are reported, if anybody hears it, and then none is
    drawn."""
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
                most = int(self.n)  # of two bars, what is received and what is written
                report(most, int(self.total))
            return changed

    return Bar
