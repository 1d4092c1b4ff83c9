"""The disk cache: what is torn, altered or not the user's own is never loaded, and a kernel is made once however many ask for it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import warnings
from pathlib import Path

import pytest
from filelock import FileLock

from anyattn import disk_cache
from anyattn.disk_cache import DiskCache, Payload
from tests.support.limits import HANG

SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def cache(tmp_path: Path) -> DiskCache:
    folder = tmp_path / "anyattn" / "kernels"
    assert disk_cache.why_not(folder) is None
    return DiskCache(folder)


class Maker:
    """Counts how often it was asked."""

    def __init__(self, data: bytes = b"machine code " * 50) -> None:
        self.data, self.calls = data, 0

    def __call__(self) -> Payload:
        self.calls += 1
        return Payload(self.data, {"name": "full", "head_dim": 64})


def never() -> Payload:
    raise AssertionError("made although it was there")


def test_what_is_made_is_found_again(cache: DiskCache) -> None:
    maker = Maker()
    made = cache.get_or_make("a1", maker)
    assert maker.calls == 1 and cache.get_or_make("a1", never) == made == DiskCache(cache.folder).get("a1")
    assert cache.get("b2") is None
    cache.get_or_make("b2", Maker(b""))
    assert cache.get("b2") == Payload(b"", {"name": "full", "head_dim": 64})
    assert cache.path("a1").stat().st_mode & 0o777 == 0o600 and cache.folder.stat().st_mode & 0o777 == 0o700
    assert not list(cache.folder.glob("*.part"))


@pytest.mark.parametrize("kept", [0, 1, 47, 48, 300, -1])
def test_a_torn_file_is_made_again(cache: DiskCache, kept: int) -> None:
    cache.get_or_make("a1", Maker())
    whole = cache.path("a1").read_bytes()
    cache.path("a1").write_bytes(whole[:kept])
    maker = Maker()
    assert cache.get("a1") is None and not cache.entries()[0].is_sound
    assert cache.get_or_make("a1", maker).data == maker.data and maker.calls == 1
    assert cache.path("a1").read_bytes() == whole


def test_no_altered_byte_goes_unseen(cache: DiskCache) -> None:
    cache.get_or_make("a1", Maker(b"0123456789"))
    whole = cache.path("a1").read_bytes()
    for at in range(len(whole)):
        altered = bytearray(whole)
        altered[at] ^= 1
        cache.path("a1").write_bytes(altered)
        assert cache.get("a1") is None, f"byte {at}"
    for text in (whole + b"x", b"x" + whole, whole + whole):
        cache.path("a1").write_bytes(text)
        assert cache.get("a1") is None


def test_a_file_under_another_name_is_not_taken(cache: DiskCache) -> None:
    cache.get_or_make("a1", Maker())
    os.rename(cache.path("a1"), cache.path("b2"))
    assert cache.get("b2") is None


def test_a_making_that_fails_leaves_nothing(cache: DiskCache) -> None:
    def failing() -> Payload:
        raise RuntimeError("no compiler")

    with pytest.raises(RuntimeError, match="no compiler"):
        cache.get_or_make("a1", failing)
    assert cache.get("a1") is None and cache.get_or_make("a1", Maker()).data == Maker().data


def test_a_disk_that_refuses_costs_no_kernel(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    maker = Maker()
    assert cache.get_or_make("a1", maker).data == maker.data
    assert cache.get("a1") is None and not list(cache.folder.glob("*.part"))


def _slow_make(folder: str, counter: str) -> None:
    """In a process of its own: asks for a kernel, and notes in ``counter`` if it had to make it."""

    def make() -> Payload:
        with open(counter, "ab", buffering=0) as file:
            file.write(b"x")
        time.sleep(1.0)
        return Payload(b"code", {})

    disk_cache._PATIENCE = HANG  # on a busy machine nobody gives up waiting
    assert DiskCache(Path(folder)).get_or_make("a1", make).data == b"code"


def test_processes_at_once_make_it_once(cache: DiskCache, tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    processes = [SPAWN.Process(target=_slow_make, args=(str(cache.folder), str(counter))) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(HANG)
        assert process.exitcode == 0
    assert counter.read_bytes() == b"x"


def _make_for_ever(folder: str, counter: str) -> None:
    def make() -> Payload:
        Path(counter).write_bytes(b"x")
        time.sleep(HANG)
        raise AssertionError

    DiskCache(Path(folder)).get_or_make("a1", make)


def test_a_dead_owner_of_a_lock_blocks_nobody(cache: DiskCache, tmp_path: Path) -> None:
    counter = tmp_path / "counter"
    owner = SPAWN.Process(target=_make_for_ever, args=(str(cache.folder), str(counter)))
    owner.start()
    deadline = time.monotonic() + HANG
    while not counter.exists():
        assert time.monotonic() < deadline and owner.is_alive()
        time.sleep(0.02)
    assert owner.pid is not None
    os.kill(owner.pid, signal.SIGKILL)
    owner.join()
    with FileLock(cache.folder / "a1.lock", timeout=0):
        pass  # nobody waits for it
    maker = Maker()
    cache.get_or_make("a1", maker)
    assert maker.calls == 1


def test_a_lock_held_too_long_is_passed_by(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "_PATIENCE", 0.1)
    with FileLock(cache.folder / "a1.lock"):
        maker = Maker()
        assert cache.get_or_make("a1", maker).data == maker.data and maker.calls == 1


def test_listing_and_clearing(cache: DiskCache) -> None:
    for key in ("a1", "b2"):
        cache.get_or_make(key, Maker())
    os.utime(cache.path("a1"), (time.time() - 7200,) * 2)
    (cache.folder / "anyattn-0a_b.part").write_bytes(cache.path("a1").read_bytes()[:20])  # of a process that died
    (cache.folder / "notes.txt").write_text("not ours")
    newest, oldest = cache.entries()
    assert (newest.path.name, oldest.path.name) == ("b2.kernel", "a1.kernel") and oldest.age > 7000 and newest.is_sound
    assert cache.clear() == (2, newest.size + oldest.size)
    assert cache.entries() == [] and [p.name for p in cache.folder.iterdir()] == ["notes.txt"]


def test_the_oldest_go_when_there_are_too_many(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "_MOST", 3)
    for i, key in enumerate(("a1", "b2", "c3")):
        cache.get_or_make(key, Maker())
        os.utime(cache.path(key), (1000 - i, 1000 - i))
    cache.get_or_make("d4", Maker())
    assert {e.path.stem for e in cache.entries()} == {"a1", "b2", "d4"}
    assert {p.stem for p in cache.folder.iterdir()} == {"a1", "b2", "d4"}


def test_texts_are_looked_at_once_for_a_quarter_of_them(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYATTN_CACHE_DIR", str(cache.folder.parent))
    monkeypatch.setattr(disk_cache, "_MOST", 8)
    own_files, looks = disk_cache._own_files, list[str]()
    monkeypatch.setattr(disk_cache, "_own_files", lambda folder, suffix: (looks.append(suffix), own_files(folder, suffix))[1])
    for i in range(12):
        written = disk_cache.keep_text(f"triton-{i}", disk_cache.TEXT_HEADER)
        assert written is not None
        os.utime(written, (1000 + i,) * 2)
    assert len(looks) == 2 and {p.stem for p in cache.folder.iterdir()} == {f"triton-{i}" for i in range(6, 12)}


def opened() -> tuple[DiskCache | None, str]:
    """What ``open_cache`` gives, and what it warned of."""
    disk_cache._refused.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = disk_cache.open_cache()
    return found, " ".join(str(w.message) for w in caught)


def test_the_environment_says_where_and_whether(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("ANYATTN_CACHE", "ANYATTN_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert disk_cache.default_folder() == tmp_path / "home/.cache/anyattn/kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert disk_cache.default_folder() == tmp_path / "xdg/anyattn/kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says its specification
    assert disk_cache.default_folder() == tmp_path / "home/.cache/anyattn/kernels"
    with monkeypatch.context() as patch:
        patch.setattr(os.path, "expanduser", lambda path: path)
        found, said = opened()
        assert found is None and "no home folder" in said and not Path("~").exists()
    monkeypatch.setenv("ANYATTN_CACHE_DIR", str(tmp_path / "mine"))
    found, said = opened()
    assert found is not None and found.folder == tmp_path / "mine/kernels" and not said
    for off in ("0", "off", "False"):
        monkeypatch.setenv("ANYATTN_CACHE", off)
        assert opened() == (None, "")
    monkeypatch.setenv("ANYATTN_CACHE", "1")
    assert opened()[0] is not None


def test_a_folder_that_others_could_write_into_is_refused(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYATTN_CACHE_DIR", str(cache.folder.parent))
    for mode in (0o755, 0o770, 0o701):
        cache.folder.chmod(mode)
        found, said = opened()
        assert found is None and "wanted 0700" in said and str(cache.folder) in said and "ANYATTN_CACHE_DIR" in said
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert disk_cache.open_cache() is None, "it is said once, and stays refused"
    cache.folder.chmod(0o700)
    assert opened()[0] is not None


def test_a_folder_of_another_user_is_refused(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = cache.folder.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert f"belongs to user {owner}" in str(disk_cache.why_not(cache.folder))


def test_a_place_that_cannot_be_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "is not a folder" in str(disk_cache.why_not(tmp_path / "file"))
    assert "cannot be made" in str(disk_cache.why_not(tmp_path / "file" / "kernels"))


def a_users_files(folder: Path) -> dict[str, bytes]:
    """Sources and others that a user may have in a folder called ``kernels``, some under names of ours."""
    files = {
        "softmax.py": b"import triton\n", "triton-mine.py": b"# my own\n", "triton-empty.py": b"", "model.kernel": b"weights",
        "a0.kernel": b"old",
        "yarn.lock": b"x", "a9.lock": b"x", "film.part": b"half", "anyattn-mine.part": b"mine", "notes.txt": b"",
    }  # fmt: skip
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return files


def test_clearing_removes_nothing_of_the_users(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    files = a_users_files(cache.folder)
    monkeypatch.setenv("ANYATTN_CACHE_DIR", str(cache.folder.parent))
    cache.get_or_make("a1", Maker())
    assert disk_cache.keep_text("triton-made", disk_cache.TEXT_HEADER + "x = 1\n") is not None
    assert [p.name for p in cache.texts()] == ["triton-made.py"] and [e.path.name for e in cache.entries()] == ["a1.kernel"]
    assert cache.clear()[0] == 1
    assert {p.name: p.read_bytes() for p in cache.folder.iterdir()} == files == {p.name: p.read_bytes() for p in cache.strangers()}


def test_pruning_removes_nothing_of_the_users(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    files = a_users_files(cache.folder)
    for path in cache.folder.iterdir():
        os.utime(path, (1, 1))
    monkeypatch.setenv("ANYATTN_CACHE_DIR", str(cache.folder.parent))
    monkeypatch.setattr(disk_cache, "_MOST", 2)
    for i, key in enumerate(("a1", "b2", "c3")):
        cache.get_or_make(key, Maker())
        os.utime(cache.path(key), (1000 + i,) * 2)
        written = disk_cache.keep_text(f"triton-{key}", disk_cache.TEXT_HEADER)
        assert written is not None
        os.utime(written, (1000 + i,) * 2)
    assert {e.path.stem for e in cache.entries()} == {"b2", "c3"} and [p.stem for p in cache.texts()] == ["triton-b2", "triton-c3"]
    assert {p.name: p.read_bytes() for p in cache.strangers()} == files


def test_links_are_neither_read_nor_removed_nor_written_through(cache: DiskCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.get_or_make("a1", Maker())
    target, name = tmp_path / "elsewhere", cache.path("a1")
    os.rename(name, target)
    name.symlink_to(target)
    whole, maker = target.read_bytes(), Maker(b"another")
    assert cache.get("a1") is None and cache.get_or_make("a1", maker).data == b"another" and maker.calls == 1
    (tmp_path / "precious").write_text("mine")
    (cache.folder / "b2.lock").symlink_to(tmp_path / "precious")
    cache.get_or_make("b2", Maker())
    assert cache.get("b2") is not None
    cache.clear()
    assert target.read_bytes() == whole and (tmp_path / "precious").read_text() == "mine" and name.is_symlink() and not cache.entries()


def test_a_folder_that_is_a_link_is_refused(cache: DiskCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.get_or_make("a1", Maker())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "kernels").symlink_to(cache.folder)
    monkeypatch.setenv("ANYATTN_CACHE_DIR", str(tmp_path / "other"))
    assert "symbolic link" in opened()[1]
    assert DiskCache(tmp_path / "other" / "kernels").clear() == (0, 0) and cache.get("a1") is not None
    (tmp_path / "above").symlink_to(cache.folder.parent)  # a home folder on another disk
    monkeypatch.setenv("ANYATTN_CACHE_DIR", str(tmp_path / "above"))
    assert opened()[0] is not None


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o770])
def test_a_parent_that_others_could_write_into_is_refused_at_every_use(
    cache: DiskCache, mode: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = cache.folder.parent
    monkeypatch.setenv("ANYATTN_CACHE_DIR", str(parent))
    monkeypatch.setattr(disk_cache, "_is_private_group", lambda group: False)
    assert opened()[0] is not None
    parent.chmod(mode)
    with pytest.warns(RuntimeWarning, match="could put code there"):
        assert disk_cache.open_cache() is None, "judged when it was first opened only"
    found, said = opened()
    assert found is None and f"{mode:04o}" in said and f"chmod go-w {parent}" in said
    parent.chmod(mode | 0o1000)
    assert opened()[0] is not None, "a sticky folder, as /tmp, lets nobody rename what is another's"
    parent.chmod(0o755)
    assert opened()[0] is not None


def test_a_parent_of_another_user_is_refused(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    real, parent = os.lstat(cache.folder).st_uid, cache.folder.parent
    monkeypatch.setattr(os, "geteuid", lambda: real + 7)
    if real == 0:  # root's own folders are fine for everyone
        assert disk_cache._why_not_above(cache.folder) is None
        os.chown(parent, 4242, -1)
        assert f"{parent}, above {cache.folder}, belongs to user 4242" in str(disk_cache._why_not_above(cache.folder))
    else:
        assert f"belongs to user {real}" in str(disk_cache._why_not_above(cache.folder))


def test_folders_that_are_made_are_the_users_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert disk_cache.why_not(tmp_path / "a" / "b" / "kernels") is None
    finally:
        os.umask(before)
    assert all((tmp_path / p).stat().st_mode & 0o777 == 0o700 for p in ("a", "a/b", "a/b/kernels"))


def _sealed(facts: bytes, length: int | None = None, data: bytes = b"code") -> bytes:
    """A file with the right sum, whatever it holds."""
    content = disk_cache._HEADER + data + facts + disk_cache._TAIL.pack(len(facts) if length is None else length)
    return content + disk_cache._sum(content, "a1")


@pytest.mark.parametrize(
    "content",
    [
        _sealed(b"{"),
        _sealed(b"\xff\xfe"),
        _sealed(b"[1, 2]"),
        _sealed(b"null"),
        _sealed(b"[" * 100_000),
        _sealed(b"{}", 2**40),
        _sealed(b"{}", 2**64 - 1),
        _sealed(b"", 0),
    ],
    ids=["torn JSON", "no UTF-8", "a list", "null", "deep", "too long", "longest", "nothing"],
)
def test_a_right_sum_over_a_bad_content_is_a_bad_entry(cache: DiskCache, content: bytes) -> None:
    cache.path("a1").write_bytes(content)
    maker = Maker()
    assert cache.get("a1") is None and [e.is_sound for e in cache.entries()] == [False]
    assert cache.get_or_make("a1", maker).data == maker.data and maker.calls == 1
    assert cache.get_or_make("a1", never).data == maker.data


def test_a_payload_of_another_form_is_made_again(cache: DiskCache) -> None:
    cache.get_or_make("a1", Maker(b"PK\x03\x04 no zip"))
    maker = Maker()
    for _ in range(2):
        assert cache.get_or_make("a1", maker, lambda payload: payload.data == maker.data).data == maker.data
    assert maker.calls == 1
