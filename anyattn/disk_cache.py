"""Compiled kernels on disk, private to the user: one file each, named by the content of what it was made from.

A file is ``payload | facts as JSON | length of the facts | mark | SHA-256 of all that and the name``: what is torn or altered has the wrong
sum and is never loaded, but made again and replaced. Files appear by ``os.replace``, so that a reader sees all of one or none. Processes
that want the same kernel wait on a lock that the system takes back from a process that died.

Beside them lie sources that were written for a call, ``*.py``, for people to read: nothing loads them.

``ANYATTN_CACHE_DIR`` names the folder (default: ``anyattn`` in the user's cache folder), ``ANYATTN_CACHE=0`` does without.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import struct
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["DiskCache", "Entry", "Payload", "default_folder", "is_on", "keep_text", "open_cache", "why_not"]

_MARK = b"anyattn1"
_TAIL = struct.Struct("<Q8s")  # length of the facts, mark
_SUM_SIZE = hashlib.sha256().digest_size
_SUFFIX, _LOCK, _TEXT = ".kernel", ".lock", ".py"
_MOST = 1000  # kernels kept, some 100 KiB each
_PATIENCE = 120.0  # seconds to wait for another process, which compiles in a few, before doing its work again


class Payload(NamedTuple):
    """What is stored: the bytes that are loaded, and facts for people and for loading (JSON: numbers, strings, lists)."""

    data: bytes
    facts: dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """One file. facts is empty if the file is torn or altered (``is_sound`` False)."""

    path: Path
    facts: dict[str, Any]
    size: int
    age: float
    is_sound: bool


def is_on() -> bool:
    """Whether kernels are kept on disk at all: not with ``ANYATTN_CACHE=0``."""
    return os.environ.get("ANYATTN_CACHE", "1").strip().lower() not in ("0", "off", "false", "no")


def default_folder() -> Path:
    """Where kernels are kept: ``kernels`` in ``ANYATTN_CACHE_DIR``, else in ``anyattn`` in the user's cache folder."""
    chosen = os.environ.get("ANYATTN_CACHE_DIR")
    if chosen:
        return Path(os.path.abspath(os.path.expanduser(chosen))) / "kernels"
    base = os.environ.get("XDG_CACHE_HOME", "")
    # expanduser leaves the ~ of a user without a home
    return Path(base if os.path.isabs(base) else os.path.expanduser("~/.cache")) / "anyattn" / "kernels"


def why_not(folder: Path) -> str | None:
    """Makes ``folder`` (0700) if it is missing; None if it is the user's alone, else why it is not used."""
    if not folder.is_absolute():
        return f"{folder} is nowhere: this user has no home folder"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.stat()
    except OSError as error:
        return f"{folder} cannot be made or read: {error.strerror or error}"
    if not stat.S_ISDIR(found.st_mode):
        return f"{folder} is not a folder"
    if found.st_uid != os.geteuid():
        return f"{folder} belongs to user {found.st_uid}, not to {os.geteuid()}, and what lies there would be run"
    if stat.S_IMODE(found.st_mode) & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        return f"{folder} has mode {mode:04o}, and others could put code there; wanted 0700: chmod 700 {folder}"
    return None if os.access(folder, os.W_OK | os.X_OK) else f"{folder} is not writable"


def open_cache() -> DiskCache | None:
    """The user's cache, or None if it is off or refused; the latter is said once a folder as a ``RuntimeWarning``."""
    return _opened(default_folder()) if is_on() else None


@lru_cache(maxsize=8)
def _opened(folder: Path) -> DiskCache | None:
    reason = why_not(folder)
    if reason is not None:
        text = f"anyattn keeps no compiled kernels: {reason}. Every process compiles its own; ANYATTN_CACHE_DIR names another place"
        warnings.warn(text, RuntimeWarning, stacklevel=5)
        return None
    return DiskCache(folder)


def keep_text(name: str, text: str) -> Path | None:
    """Keeps a source for people to read, as ``name.py`` in the user's cache; where. None, and no word, where nothing is kept."""
    folder = default_folder()
    if not is_on() or why_not(folder) is not None:
        return None
    path = folder / (name + _TEXT)
    with contextlib.suppress(OSError):
        if not path.exists():
            _replaced(path, text.encode())
            _prune(folder, _TEXT)
        return path
    return None


def _replaced(path: Path, content: bytes) -> None:
    """Writes a file so that a reader sees all of it or nothing."""
    handle, name = tempfile.mkstemp(suffix=".part", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def _prune(folder: Path, suffix: str) -> None:
    """Removes the oldest files beyond ``_MOST``, and what else goes by their names."""
    paths = list(folder.glob("*" + suffix))
    if len(paths) > _MOST:
        times = {}
        for path in paths:
            with contextlib.suppress(OSError):
                times[path] = path.stat().st_mtime_ns
        for path in sorted(times, key=lambda p: times[p])[: len(times) - _MOST]:
            path.unlink(missing_ok=True)
            path.with_suffix(_LOCK).unlink(missing_ok=True)


class DiskCache:
    """Files in ``folder``, which the caller has judged with ``why_not``.

    >>> import tempfile
    >>> cache = DiskCache(Path(tempfile.mkdtemp()))
    >>> cache.get_or_make("a1", lambda: Payload(b"code", {"name": "full"}))[0], cache.get("a1").facts
    (b'code', {'name': 'full'})
    """

    def __init__(self, folder: Path):
        self.folder = folder

    def path(self, key: str) -> Path:
        return self.folder / (key + _SUFFIX)

    def get(self, key: str) -> Payload | None:
        """What is stored under ``key``; None if nothing is, or nothing sound."""
        try:
            return _unpack(self.path(key).read_bytes(), key)
        except OSError:
            return None

    def get_or_make(self, key: str, make: Callable[[], Payload]) -> Payload:
        """What is stored under ``key``, made first if need be: by one process, while others wait for it.

        A disk that is full or refuses costs the file, not the kernel: what ``make`` returned is handed over all the same.
        """
        found = self.get(key)
        if found is not None:
            return found
        with self._locked(key):
            found = self.get(key)
            if found is None:
                found = make()
                with contextlib.suppress(OSError):
                    self._write(key, found)
        return found

    def entries(self) -> list[Entry]:
        """What lies in the folder, the newest first."""
        found = []
        for path in self.folder.glob("*" + _SUFFIX):
            with contextlib.suppress(OSError):
                payload, status = _unpack(path.read_bytes(), path.name.removesuffix(_SUFFIX)), path.stat()
                facts = {} if payload is None else payload.facts
                found.append(Entry(path, facts, status.st_size, max(0.0, time.time() - status.st_mtime), payload is not None))
        return sorted(found, key=lambda entry: (entry.age, entry.path))

    def clear(self) -> tuple[int, int]:
        """Removes everything; how many kernels and how many bytes. Processes that have loaded one keep it."""
        entries = self.entries()
        for path in self.folder.iterdir():
            if path.name.endswith((_SUFFIX, _LOCK, _TEXT, ".part")):
                with contextlib.suppress(OSError):
                    path.unlink()
        gone = [entry for entry in entries if not entry.path.exists()]
        return len(gone), sum(entry.size for entry in gone)

    @contextlib.contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        """Holds the lock of ``key``; goes on without it where the file system has no locks or its owner takes too long."""
        from filelock import FileLock, Timeout

        lock = FileLock(self.folder / (key + _LOCK), timeout=_PATIENCE, mode=0o600)
        held = False
        with contextlib.suppress(Timeout, OSError, NotImplementedError):
            lock.acquire(poll_interval=0.02)
            held = True
        try:
            yield
        finally:
            if held:
                lock.release()

    def texts(self) -> list[Path]:
        """Sources to read, ``keep_text``."""
        return sorted(self.folder.glob("*" + _TEXT))

    def _write(self, key: str, payload: Payload) -> None:
        _replaced(self.path(key), _pack(payload, key))
        _prune(self.folder, _SUFFIX)


def _sum(content: bytes, key: str) -> bytes:
    return hashlib.sha256(key.encode() + b"\0" + content).digest()


def _pack(payload: Payload, key: str) -> bytes:
    facts = json.dumps(payload.facts, sort_keys=True).encode()
    content = payload.data + facts + _TAIL.pack(len(facts), _MARK)
    return content + _sum(content, key)


def _unpack(packed: bytes, key: str) -> Payload | None:
    content, digest = packed[:-_SUM_SIZE], packed[-_SUM_SIZE:]
    if len(content) < _TAIL.size or content[-len(_MARK) :] != _MARK or digest != _sum(content, key):
        return None
    end = len(content) - _TAIL.size
    length, _ = _TAIL.unpack(content[end:])
    return Payload(content[: end - length], json.loads(content[end - length : end]))
