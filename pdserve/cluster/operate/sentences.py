"""Turns errors of files into sentences: which file, what is wrong with it, and the cure.

The command line uses it for every error that reaches it, and so does `pdserve doctor`.
"""

import errno

REASONS = {
    errno.ENOENT: "there is no such file or folder: check the path",
    errno.EISDIR: "is a folder, but a file is needed: name the file",
    errno.ENOTDIR: "a part of this path is a file, not a folder: check the path",
    errno.EEXIST: "already exists and is not a folder: name another",
    errno.EACCES: "this user may not open it: change its mode or its owner",
    errno.EPERM: "this user may not open it: change its mode or its owner",
    errno.EROFS: "its file system is read-only: name another place",
    errno.ENOSPC: "its file system has no space left: make room",
}


def told(error: Exception) -> str:
    """Returns an error's text for the operator: a file's error as a sentence, any other as it
    is."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {REASONS.get(error.errno or 0, error.strerror)}"
    return str(error)
