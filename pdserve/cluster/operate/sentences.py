"""Errors of files as sentences: which file, what is wrong with it, and the cure.

Used by the command line for whatever reaches it, and by `pdserve doctor`.
"""

import errno

REASONS = {
    errno.ENOENT: "there is no such file or folder: check the path",
    errno.EISDIR: "is a folder, and a file is wanted: name the file",
    errno.ENOTDIR: "a part of this path is a file, and no folder: check the path",
    errno.EEXIST: "is there already, and is no folder: name another",
    errno.EACCES: "this user may not open it: change its mode, or its owner",
    errno.EPERM: "this user may not open it: change its mode, or its owner",
    errno.EROFS: "its file system is read-only: name another place",
    errno.ENOSPC: "there is no space left on its file system: make room",
}


def told(error: Exception) -> str:
    """Say an error to the operator: a file's error as a sentence, any other as it is."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {REASONS.get(error.errno or 0, error.strerror)}"
    return str(error)
