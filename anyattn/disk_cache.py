"""Disk cache of compiled kernels, private to the user: one file per kernel, named by a hash of everything it was compiled from.

A file is ``header | payload | facts as JSON | length of the facts | SHA-256 of all that and the name``. A truncated or altered file fails
the checksum: it is not loaded, and the kernel is compiled again and replaces it. Files are written by ``os.replace``, so a reader sees a
whole file or none. Processes that want the same kernel wait on a lock, which the system releases if its owner dies.

The folder also holds generated sources, ``triton-*.py``, for people to read; they are never loaded.

Only files that anyattn wrote, recognised by name and first bytes, are replaced or removed; symbolic links are never followed.

``ANYATTN_CACHE_DIR`` names the folder (default: ``anyattn`` in the user's cache folder), ``ANYATTN_CACHE=0`` turns the cache off.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import struct
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["TEXT_HEADER", "DiskCache", "Entry", "Payload", "cannot_check", "default_folder", "is_on", "keep_text", "open_cache", "why_not"]

TEXT_HEADER = "# Written by anyattn, to be read: nothing loads this file, and `anyattn cache clear` removes it.\n"
_HEADER = b"anyattn kernel 2\n"
_TAIL = struct.Struct("<Q")  # length of the facts
_SUM_SIZE = hashlib.sha256().digest_size
_SUFFIX, _LOCK, _TEXT, _PART = ".kernel", ".lock", ".py", ".part"
_PART_PREFIX = "anyattn-"
# files that anyattn writes: pattern of the name, first bytes, and whether a truncated one (a prefix of those bytes, or empty) counts too
_OWN_FILES = (
    (re.compile(r"(tiles-)?[0-9a-f]+\.kernel"), (_HEADER,), True),
    (re.compile(r"(tiles-)?[0-9a-f]+\.lock"), (b"",), True),
    (re.compile(r"triton-\w+\.py"), (TEXT_HEADER.encode(),), False),
    (re.compile(r"anyattn-\w+\.part"), (_HEADER, TEXT_HEADER.encode()), True),
)
_MOST = 1000  # most kernels in the cache, about 100 KiB each
_PATIENCE = 120.0  # seconds to wait for another process to compile this kernel (usually a few) before compiling it here too


class Payload(NamedTuple):
    """Contents of a cache file: the bytes to load, and facts as JSON (numbers, strings, lists) for people and for the loader."""

    data: bytes
    facts: dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """One cache file. facts is empty if the file is truncated or altered (``is_sound`` False)."""

    path: Path
    facts: dict[str, Any]
    size: int
    age: float
    is_sound: bool


def is_on() -> bool:
    """Whether kernels are cached on disk; ``ANYATTN_CACHE=0`` turns this off."""
    return os.environ.get("ANYATTN_CACHE", "1").strip().lower() not in ("0", "off", "false", "no")


def default_folder() -> Path:
    """The folder of cached kernels: ``kernels`` in ``ANYATTN_CACHE_DIR``, by default in ``anyattn`` in the user's cache folder."""
    chosen = os.environ.get("ANYATTN_CACHE_DIR")
    if chosen:
        return Path(os.path.abspath(os.path.expanduser(chosen))) / "kernels"
    base = os.environ.get("XDG_CACHE_HOME", "")
    # expanduser returns "~" unchanged for a user without a home folder
    return Path(base if os.path.isabs(base) else os.path.expanduser("~/.cache")) / "anyattn" / "kernels"


def cannot_check() -> str | None:
    """The reason on a system without POSIX's owners of files (Windows): whose code the folder holds is then unknown; else None."""
    return None if hasattr(os, "geteuid") else "this system does not say which user owns a folder, and anyattn would run the code in it"


def why_not(folder: Path) -> str | None:
    """Creates ``folder`` (0700) if it is missing. Returns None if only the user can write into it, else the reason not to use it.

    The folders above it are checked too: a user who may write into one of them can replace ``folder``.
    """
    if (reason := cannot_check()) is not None:
        return reason
    if not folder.is_absolute():
        return f"{folder} is no absolute path: this user has no home folder; wanted a folder for the cache: set ANYATTN_CACHE_DIR"
    try:
        reason = _why_not_above(folder)
        if reason is not None:
            return reason
        for missing in reversed([p for p in (folder, *folder.parents) if not p.exists()]):
            with contextlib.suppress(FileExistsError):
                missing.mkdir(mode=0o700)
        found, reason = folder.lstat(), _why_not_above(folder)  # second check: another user may have made a folder meanwhile
    except (OSError, RuntimeError) as error:  # RuntimeError: a cycle of symbolic links
        return f"{folder} cannot be made or read: {getattr(error, 'strerror', None) or error}"
    return reason or _why_not_itself(folder, found)


def _why_not_itself(folder: Path, found: os.stat_result) -> str | None:
    if stat.S_ISLNK(found.st_mode):
        return f"{folder} is a symbolic link; wanted a folder: ANYATTN_CACHE_DIR may name the one that it leads to"
    if not stat.S_ISDIR(found.st_mode):
        return f"{folder} is not a folder"
    if found.st_uid != os.geteuid():
        owner = f"user {found.st_uid}, not to {os.geteuid()}"
        return f"{folder} belongs to {owner}, and anyattn would run the code in it; wanted a folder of your own: set ANYATTN_CACHE_DIR"
    if stat.S_IMODE(found.st_mode) & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        return f"{folder} has mode {mode:04o}, and others could put code there; wanted 0700: chmod 700 {folder}"
    return None if os.access(folder, os.W_OK | os.X_OK) else f"{folder} is not writable"


def _why_not_above(folder: Path) -> str | None:
    """The reason if a folder above ``folder`` lets other users replace its contents, else None. Missing folders are skipped."""
    real = folder.parent.resolve()
    for place in dict.fromkeys((*folder.parents, real, *real.parents)):
        try:
            link, found = place.lstat(), place.stat()
        except FileNotFoundError:
            continue
        owner = next((s.st_uid for s in (link, found) if s.st_uid not in (0, os.geteuid())), None)
        if owner is not None:
            return f"{place}, above {folder}, belongs to user {owner}, who could put other code there"
        if found.st_mode & stat.S_ISVTX:  # sticky bit, as on /tmp: only owners can rename or delete their entries
            continue
        if found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and not _is_private_group(found.st_gid)):
            mode = stat.S_IMODE(found.st_mode)
            return f"{place}, above {folder}, has mode {mode:04o}, and others could put code there: chmod go-w {place}"
    return None


def _is_private_group(group: int) -> bool:
    """Whether ``group`` is the user's private group, of the user's name and without other members: it may write (umask 002 allows it)."""
    import grp
    import pwd

    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return found.gr_name == user.pw_name and user.pw_gid == group and set(found.gr_mem) <= {user.pw_name}


_refused: set[str] = set()


def open_cache() -> DiskCache | None:
    """The user's cache, or None if it is off or unsafe. The folder is checked at every call; each reason is warned about once."""
    if not is_on():
        return None
    folder = default_folder()
    reason = why_not(folder)
    if reason is None:
        return DiskCache(folder)
    if reason not in _refused:
        _refused.add(reason)
        cure = "ANYATTN_CACHE_DIR names another place, ANYATTN_CACHE=0 none"
        text = f"anyattn keeps no compiled kernels: {reason}. Every process compiles its own; {cure}"
        warnings.warn(text, RuntimeWarning, stacklevel=4)
    return None


def keep_text(name: str, text: str) -> Path | None:
    """Writes a source for people to read as ``name.py`` in the user's cache. Returns its path, or None if the cache is off or unusable.

    name: begins with ``triton-``. text: begins with ``TEXT_HEADER``.
    """
    assert text.startswith(TEXT_HEADER), name
    folder = default_folder()
    if not is_on() or why_not(folder) is not None:
        return None
    path = folder / (name + _TEXT)
    with contextlib.suppress(OSError):
        if not os.path.lexists(path):
            _replaced(path, text.encode())
            _prune(folder, _TEXT)
        return path
    return None


def _content(path: Path, most: int = -1) -> bytes | None:
    """The first ``most`` bytes of a regular file; None for anything else, such as a link, and for a file that cannot be read."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as file:
            return file.read(most) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else None
    except OSError:
        return None


def _is_own(path: Path) -> bool:
    """Whether anyattn wrote this file, by its name and its first bytes."""
    for pattern, headers, may_be_torn in _OWN_FILES:
        if pattern.fullmatch(path.name):
            start = _content(path, len(TEXT_HEADER))
            return start is not None and any((h and start.startswith(h)) or (may_be_torn and h.startswith(start)) for h in headers)
    return False


def _own_files(folder: Path, suffix: str = "") -> list[Path]:
    """The files in ``folder`` that anyattn wrote; none if ``folder`` is a symbolic link."""
    return [] if folder.is_symlink() else [p for p in folder.glob("*" + suffix) if _is_own(p)]


def _replaced(path: Path, content: bytes) -> None:
    """Writes a file atomically: a reader sees the whole content or none of it."""
    handle, name = tempfile.mkstemp(prefix=_PART_PREFIX, suffix=_PART, dir=path.parent)  # mode 0600
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
    """Removes the oldest of anyattn's files beyond ``_MOST``, and their locks; of texts, which come by the hundred, a quarter more, so that
    not each new one has all others looked at."""
    if sum(name.endswith(suffix) for name in os.listdir(folder)) <= _MOST:
        return
    most = _MOST - _MOST // 4 if suffix == _TEXT else _MOST
    times = {}
    for path in _own_files(folder, suffix):
        with contextlib.suppress(OSError):
            times[path] = path.lstat().st_mtime_ns
    for path in sorted(times, key=lambda p: times[p])[: max(len(times) - most, 0)]:
        path.unlink(missing_ok=True)
        lock = path.with_suffix(_LOCK)
        if _is_own(lock):
            lock.unlink(missing_ok=True)


class DiskCache:
    """The cache files in ``folder``, which the caller has checked with ``why_not``.

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
        """The payload stored under ``key``; None if there is none, or the file is truncated or altered."""
        packed = _content(self.path(key))
        return None if packed is None else _unpack(packed, key)

    def get_or_make(self, key: str, make: Callable[[], Payload], is_sound: Callable[[Payload], bool] = lambda payload: True) -> Payload:
        """The payload stored under ``key``. If it is missing, one process makes it while others wait for that process.

        is_sound: whether a stored payload can be used; if not, it is made again and replaced.
        If the file cannot be written (a full disk, no permission), the made payload is returned all the same.
        """
        found = self.get(key)
        if found is not None and is_sound(found):
            return found
        with self._locked(key):
            found = self.get(key)
            if found is None or not is_sound(found):
                found = make()
                with contextlib.suppress(OSError):
                    self._write(key, found)
        return found

    def entries(self) -> list[Entry]:
        """The kernels in the folder, newest first."""
        found = []
        for path in _own_files(self.folder, _SUFFIX):
            with contextlib.suppress(OSError):
                payload, status = _unpack(_content(path) or b"", path.name.removesuffix(_SUFFIX)), path.lstat()
                facts = {} if payload is None else payload.facts
                found.append(Entry(path, facts, status.st_size, max(0.0, time.time() - status.st_mtime), payload is not None))
        return sorted(found, key=lambda entry: (entry.age, entry.path))

    def clear(self) -> tuple[int, int]:
        """Removes all files that anyattn wrote; returns the number of kernels removed and their bytes. Loaded kernels go on working."""
        entries = self.entries()
        for path in _own_files(self.folder):
            with contextlib.suppress(OSError):
                path.unlink()
        gone = [entry for entry in entries if not entry.path.exists()]
        return len(gone), sum(entry.size for entry in gone)

    def strangers(self) -> list[Path]:
        """Files in the folder that other programs or earlier versions of anyattn wrote; they are never touched."""
        own = set(_own_files(self.folder))
        return sorted(p for p in self.folder.iterdir() if p not in own)

    @contextlib.contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        """Holds the lock of ``key``; continues without it if the file system has no locks or the lock is not free within ``_PATIENCE``."""
        from filelock import FileLock, Timeout

        path = self.folder / (key + _LOCK)
        lock = FileLock(path, timeout=_PATIENCE, mode=0o600)
        held = False
        with contextlib.suppress(Timeout, OSError, NotImplementedError):
            if not os.path.lexists(path) or _is_own(path):  # acquiring a lock truncates its file
                lock.acquire(poll_interval=0.02)
                held = True
        try:
            yield
        finally:
            if held:
                lock.release()

    def texts(self) -> list[Path]:
        """Generated sources that ``keep_text`` has written."""
        return sorted(_own_files(self.folder, _TEXT))

    def _write(self, key: str, payload: Payload) -> None:
        if os.path.lexists(self.path(key)) and not _is_own(self.path(key)):
            return
        _replaced(self.path(key), _pack(payload, key))
        _prune(self.folder, _SUFFIX)


def _sum(content: bytes, key: str) -> bytes:
    return hashlib.sha256(key.encode() + b"\0" + content).digest()


def _pack(payload: Payload, key: str) -> bytes:
    facts = json.dumps(payload.facts, sort_keys=True).encode()
    content = _HEADER + payload.data + facts + _TAIL.pack(len(facts))
    return content + _sum(content, key)


def _unpack(packed: bytes, key: str) -> Payload | None:
    """The payload in ``packed``; None for bytes that ``_pack`` did not write, even where their checksum is right."""
    content, digest = packed[:-_SUM_SIZE], packed[-_SUM_SIZE:]
    if not content.startswith(_HEADER) or len(content) < len(_HEADER) + _TAIL.size or digest != _sum(content, key):
        return None
    end = len(content) - _TAIL.size
    (length,) = _TAIL.unpack(content[end:])
    if length > end - len(_HEADER):
        return None
    try:
        facts = json.loads(content[end - length : end])
    except (ValueError, RecursionError):  # bad JSON, bad UTF-8
        return None
    return Payload(content[len(_HEADER) : end - length], facts) if isinstance(facts, dict) else None
