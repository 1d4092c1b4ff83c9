"""``anyattn cache`` and ``anyattn warmup`` as a person meets them."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from anyattn import disk_cache
from anyattn.cli import doctor
from anyattn.disk_cache import DiskCache, Payload
from tests.support.command_line import call


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DiskCache:
    monkeypatch.setenv("ANYATTN_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("ANYATTN_CACHE", raising=False)
    assert disk_cache.why_not(tmp_path / "kernels") is None
    return DiskCache(tmp_path / "kernels")


def test_list_and_clear(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = call("cache", "list")
    assert code == 0 and "no kernels in" in out and str(cache.folder) in out
    cache.get_or_make("a1", lambda: Payload(b"x" * 5000, {"name": "causal + lse", "head_dim": 128, "dtype": "bfloat16"}))
    cache.get_or_make("b2", lambda: Payload(b"x", {"name": "full", "head_dim": 64, "dtype": "float16"}))
    cache.path("b2").write_bytes(cache.path("b2").read_bytes()[:30])
    os.utime(cache.path("a1"), (1, 1))
    monkeypatch.setenv("ANYATTN_CACHE", "0")  # which is no reason not to look
    code, out, _ = call("cache", "list")
    for words in ("causal + lse", "128", "bfloat16", "5 KiB", " d", "torn or altered", "2 kernels"):
        assert words in out, (words, out)
    code, out, _ = call("cache", "clear")
    assert code == 0 and "removed 2 kernels" in out and not cache.entries()


def test_clear_says_what_it_leaves(cache: DiskCache) -> None:
    (cache.folder / "mine.py").write_text("import triton")
    (cache.folder / "b2.kernel").write_bytes(b"code of an earlier version, with its mark at the end: anyattn1")
    cache.get_or_make("a1", lambda: Payload(b"x", {}))
    code, out, _ = call("cache", "clear")
    assert code == 0 and "removed 1 kernel," in out and "left 2 other files alone" in out and "earlier versions" in out, out
    assert sorted(p.name for p in cache.folder.iterdir()) == ["b2.kernel", "mine.py"]
    for path in cache.folder.iterdir():
        path.unlink()
    assert "left" not in call("cache", "clear")[1]


def test_list_shows_odd_facts_as_they_are(cache: DiskCache) -> None:
    for key, facts in (("a1", {"name": "[/red] [bold", "tiles": "abc"}), ("b2", {"name": None, "tiles": [1], "head_dim": {}})):
        cache.get_or_make(key, lambda facts=facts: Payload(b"x", facts))  # type: ignore[misc]
    code, out, err = call("cache", "list")
    assert code == 0 and "[/red] [bold" in out and "2 kernels" in out, (out, err)


def test_a_refused_folder_is_one_line(cache: DiskCache) -> None:
    cache.folder.chmod(0o755)
    for arguments in (["cache", "list"], ["cache", "clear"], ["warmup", "--arch", "sm_90a"]):
        code, _, err = call(*arguments)
        assert code == 1 and "chmod 700" in err and len(err.strip().splitlines()) == 1


def test_a_system_without_owners_of_files_keeps_no_kernels(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Windows, where os has no geteuid."""
    monkeypatch.delattr(os, "geteuid")
    for command in ("list", "clear"):
        code, out, err = call("cache", command)
        assert code == 0 and "no kernels are kept: this system does not say" in out and not err
    assert "does not say" in doctor._cache()
    monkeypatch.setattr(disk_cache, "_refused", set())
    with pytest.warns(RuntimeWarning, match="does not say which user owns"):
        assert disk_cache.open_cache() is None
    assert disk_cache.open_cache() is None  # without a second warning


@pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None or importlib.util.find_spec("tvm_ffi") is None,
    reason="needs nvidia-cutlass-dsl and apache-tvm-ffi",
)
def test_warmup_says_what_it_needs(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, err = call("warmup")
    assert code == 1 and "--arch sm_90a" in err
    monkeypatch.setenv("ANYATTN_CACHE", "0")
    code, _, err = call("warmup", "--arch", "sm_90a")
    assert code == 1 and "ANYATTN_CACHE" in err


@pytest.mark.slow  # tests/backends/hopper/test_launch.py compiles one for another process, the tests below say which are compiled
@pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None or importlib.util.find_spec("tvm_ffi") is None,
    reason="needs nvidia-cutlass-dsl and apache-tvm-ffi",
)
def test_warmup_compiles_what_is_missing(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    arguments = ("warmup", "--arch", "sm_90a", "--head-dim", 64, "--mask", "causal", "--layout", "whole", "--jobs", 1)
    code, out, err = call(*arguments)
    assert code == 0 and "2 of 2 kernels ready" in out, (out, err)
    entries = cache.entries()
    assert sorted(e.facts["name"] for e in entries) == ["causal", "causal + lse"]
    code, out, _ = call(*arguments)
    assert code == 0 and "2 of 2 kernels ready" in out
    assert [(e.path, e.size) for e in cache.entries()] == [(e.path, e.size) for e in entries]
    assert all(now.age >= then.age for now, then in zip(cache.entries(), entries, strict=True)), "compiled again"


@pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None or importlib.util.find_spec("tvm_ffi") is None,
    reason="needs nvidia-cutlass-dsl and apache-tvm-ffi",
)
@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_warmup_of_packed_sequences(compiles: bool, cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call on a GPU launches is on disk, the kernel for its tables too: only ``launch.warm`` is asked which that is."""
    import torch

    import anyattn
    from anyattn import hardware
    from anyattn.backends.hopper.compile import build, launch
    from anyattn.cli import warmup
    from anyattn.validate import sequences

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if compiles:
        code, out, err = call("warmup", "--arch", "sm_90a", "--head-dim", 64, "--mask", "causal", "--layout", "packed", "--jobs", 1)
        assert code == 0 and "2 of 2 kernels ready" in out, (out, err)
    else:  # what would be compiled is noted in the same files
        facts = {"form": "object", "runtime": "", "function": "f"}
        monkeypatch.setattr(build, "make", lambda config, *_: Payload(b"\x7fELF", {"name": build.name_of(config), **facts}))
        for wants_lse in (False, True):
            warmup._compile(warmup._Variant("causal", 64, "bfloat16", "packed", wants_lse))
    names = [e.facts["name"] for e in cache.entries()]
    assert sorted(names) == ["causal + ragged"] * 2 + ["causal + ragged + lse"] * 2 + ["tables of sequences"] * 2
    h200 = hardware.Hardware("cuda", "Hopper", 0, frozenset((torch.bfloat16, torch.float16, torch.float32)), (9, 0), 132)
    monkeypatch.setattr(hardware, "of", lambda *_: h200)
    monkeypatch.setattr(sequences, "skips_device_reads", lambda device, validate: True)
    q, ends = torch.zeros(900, 4, 64, dtype=torch.bfloat16), torch.tensor([0, 300, 300, 900], dtype=torch.int32)
    with launch.compiling_only():
        for ends_k in (ends, ends.clone()):
            for wants_lse in (False, True):
                options = {"cu_seqlens_q": ends, "cu_seqlens_k": ends_k, "causal": True, "return_lse": wants_lse, "backend": "hopper"}
                anyattn.flash_attn_varlen_func(q, q, q, **options)
    assert [e.facts["name"] for e in cache.entries()] == names, "a call compiled what was not there"


@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl")
@pytest.mark.parametrize("mask", ["full", "causal", "window"])
@pytest.mark.parametrize("layout", ["whole", "grouped"])
def test_what_warmup_compiles_is_what_calls_ask_for(layout: str, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whole batches by both doors, of 64 queries and of few, whatever the ratio of heads: their configs, without compiling."""
    import torch

    import anyattn
    from anyattn import hardware, masks
    from anyattn.backends.hopper import api
    from anyattn.backends.result import Result
    from anyattn.call_cache import attention
    from anyattn.cli import warmup

    warmed = {api.config_of(p) for p in warmup._whole_problems(warmup._Variant(mask, 64, "bfloat16", layout, True))}
    h200 = hardware.Hardware("cuda", "Hopper", 0, frozenset((torch.bfloat16, torch.float16, torch.float32)), (9, 0), 132)
    asked = []

    def forward(launches, problem):  # type: ignore[no-untyped-def]
        asked.append(api.config_of(problem))
        out = problem.q.new_zeros(*problem.q.shape[:3], problem.v.shape[3])
        return Result(out, torch.zeros(out.shape[:3]), None)

    monkeypatch.setattr(hardware, "of", lambda *_: h200)
    monkeypatch.setattr(api.ForwardLaunches, "run", forward)
    attention.clear()
    shown = {"full": None, "causal": masks.causal(), "window": masks.sliding_window(37, 0)}[mask]
    band = {"full": {}, "causal": {"causal": True}, "window": {"window_size": (37, 0)}}[mask]
    for rows, heads in ((300, 2), (1000, 2)) if layout == "whole" else ((2, 4), (5, 3), (7, 16)):
        q, k = torch.zeros(2, heads, rows, 64, dtype=torch.bfloat16), torch.zeros(2, 1, 900, 64, dtype=torch.bfloat16)
        if layout == "whole":
            k = torch.zeros(2, 2, 900, 64, dtype=torch.bfloat16)
        anyattn.flex_attention(q, k, k, mask_mod=shown, enable_gqa=True, return_lse=True, backend="hopper")
        q, k = q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous()
        anyattn.flash_attn_func(q, k, k, return_lse=True, backend="hopper", **band)
    attention.clear()
    assert set(asked) == warmed and all((c.heads_per_tile > 1) is (layout == "grouped") for c in asked), (asked, warmed)
