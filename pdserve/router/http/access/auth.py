"""Checks API keys, which come from an environment variable or a file, in constant time.

A key never leaves this file: it is not in errors, logs, timelines or metrics, and workers get only
a one-way tag of it. The key file is checked once a second, so keys change without a restart. Knows
no HTTP framework and no Ray. Made by `router.http.app`, called by `router.http.endpoints`.
`pdserve up` reads the keys too, once, to complain early.
"""

import hashlib
import hmac
import logging
import os
import stat
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from pdserve.configs.router import RouterConfig
from pdserve.router.errors import ApiError

logger = logging.getLogger(__name__)

RELOAD_S = 1.0

_Stamp = tuple[int, int, int]


class ApiKeys:
    """The keys of one router. Use it from one thread."""

    def __init__(
        self,
        config: RouterConfig,
        environment: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Reads the keys.

        Raises ValueError if the configuration asks for keys and there are none, or if one is
        malformed. The error names the variable, or the file and line, but no key.
        """
        self._clock = clock
        self._fixed = (
            _from_environment(config.api_key_env, environment) if config.api_key_env else ()
        )
        self._path = Path(config.api_keys_file) if config.api_keys_file else None
        self._stamp: _Stamp | None = None
        self._looked = clock()
        self._digests = self._fixed
        if self._path is not None:
            self._stamp = _stamp(self._path)
            self._digests = (*self._fixed, *_from_file(self._path))
            if self._path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
                logger.warning(
                    "%s can be read by other users of this machine: chmod 600", self._path
                )

    @property
    def required(self) -> bool:
        return bool(self._fixed) or self._path is not None

    def check(self, authorization: str | None) -> str:
        """Checks an Authorization header and returns a tag of its key.

        The tag is the same on every router and does not help to find the key. It is "" if no keys
        are configured. Raises ApiError (401).
        """
        if not self.required:
            return ""
        self._reload()
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip())
        known = False
        # compares with all keys always, so that the time does not tell which one was near
        for digest in self._digests:
            known |= hmac.compare_digest(given, digest)
        if scheme.lower() != "bearer" or not known:
            raise _refusal("the API key is wrong" if authorization else "an API key is missing")
        return hashlib.sha256(b"pdserve cache salt" + given).hexdigest()[:32]

    def _reload(self) -> None:
        """Reads a changed file. One that cannot be read or understood leaves the keys as they were,
        because a file is seldom replaced in one step."""
        now = self._clock()
        if self._path is None or now - self._looked < RELOAD_S:
            return
        self._looked = now
        try:
            stamp = _stamp(self._path)
            if stamp == self._stamp:
                return
            self._stamp = stamp
            self._digests = (*self._fixed, *_from_file(self._path))
            logger.info("API keys read again: %d", len(self._digests))
        except ValueError as error:
            if self._stamp is not None:
                logger.error("the API keys stay as they were: %s", error)
            self._stamp = None


def _refusal(what: str) -> ApiError:
    message = f"{what}: send the header 'Authorization: Bearer KEY' with a key of this server"
    return ApiError(message, status=401, kind="authentication_error", code="invalid_api_key")


def _from_environment(name: str, environment: Mapping[str, str]) -> tuple[bytes, ...]:
    keys = [part.strip() for part in environment.get(name, "").split(",")]
    where = f"router.api_key_env: the environment variable {name}"
    if not any(keys):
        raise ValueError(
            f"{where} is not set in this process: export it, with one or several keys separated by "
            "commas, before `pdserve up`, or before `ray start` on each node that has routers "
            "(docs/use/security.md)"
        )
    return _digests((f"{where}, key {number}", key) for number, key in enumerate(keys, 1) if key)


def _from_file(path: Path) -> tuple[bytes, ...]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ValueError(f"router.api_keys_file: {path} cannot be read: {reason}") from None
    numbered = ((number, line.strip()) for number, line in enumerate(lines, 1))
    keys = [
        (f"router.api_keys_file: {path}, line {n}", key)
        for n, key in numbered
        if key and not key.startswith("#")
    ]
    if not keys:
        raise ValueError(
            f"router.api_keys_file: {path} holds no key: write one key per line; lines that begin "
            "with # are comments"
        )
    return _digests(keys)


def _digests(keys: Iterable[tuple[str, str]]) -> tuple[bytes, ...]:
    """Hashes keys, which come with the places where they stand."""
    digests = []
    for where, key in keys:
        if not key.isascii() or not key.isprintable() or " " in key:
            raise ValueError(f"{where}: a key must be printable ASCII without spaces")
        digests.append(_digest(key))
    return tuple(digests)


def _digest(key: str) -> bytes:
    """Hashes a key. The length is the same for all, so that comparing does not reveal it."""
    return hashlib.sha256(key.encode()).digest()


def _stamp(path: Path) -> _Stamp:
    try:
        found = path.stat()
    except OSError as error:
        raise ValueError(f"router.api_keys_file: {path} cannot be read: {error.strerror}") from None
    return found.st_mtime_ns, found.st_size, found.st_ino
