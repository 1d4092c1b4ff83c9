"""``anyattn cache`` and ``anyattn warmup`` as a person meets them."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from test_cli import call

from anyattn import disk_cache
from anyattn.disk_cache import DiskCache, Payload


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
    cache.path("b2").write_bytes(b"torn")
    os.utime(cache.path("a1"), (1, 1))
    monkeypatch.setenv("ANYATTN_CACHE", "0")  # which is no reason not to look
    code, out, _ = call("cache", "list")
    for words in ("causal + lse", "128", "bfloat16", "5 KiB", " d", "torn or altered", "2 kernels"):
        assert words in out, (words, out)
    code, out, _ = call("cache", "clear")
    assert code == 0 and "removed 2 kernels" in out and not cache.entries()


def test_a_refused_folder_is_one_line(cache: DiskCache) -> None:
    cache.folder.chmod(0o755)
    for arguments in (["cache", "list"], ["cache", "clear"], ["warmup", "--arch", "sm_90a"]):
        code, _, err = call(*arguments)
        assert code == 1 and "chmod 700" in err and len(err.strip().splitlines()) == 1


@pytest.mark.skipif(
    importlib.util.find_spec("cutlass") is None or importlib.util.find_spec("tvm_ffi") is None,
    reason="needs nvidia-cutlass-dsl and apache-tvm-ffi",
)
def test_warmup_compiles_what_is_missing(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, err = call("warmup")
    assert code == 1 and "--arch sm_90a" in err
    with monkeypatch.context() as patch:
        patch.setenv("ANYATTN_CACHE", "0")
        code, _, err = call("warmup", "--arch", "sm_90a")
        assert code == 1 and "ANYATTN_CACHE" in err
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
def test_warmup_of_packed_sequences(cache: DiskCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call on a GPU launches is on disk, the kernel for its tables too: only ``launch.warm`` is asked which that is."""
    import torch

    import anyattn
    from anyattn import check_lengths, hardware
    from anyattn.backends.hopper import launch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, err = call("warmup", "--arch", "sm_90a", "--head-dim", 64, "--mask", "causal", "--layout", "packed", "--jobs", 1)
    assert code == 0 and "2 of 2 kernels ready" in out, (out, err)
    names = [e.facts["name"] for e in cache.entries()]
    assert sorted(names) == ["causal + ragged"] * 2 + ["causal + ragged + lse"] * 2 + ["tables of sequences"] * 2
    h200 = hardware.Hardware("cuda", "Hopper", 0, frozenset((torch.bfloat16, torch.float16, torch.float32)), (9, 0), 132)
    monkeypatch.setattr(hardware, "of", lambda *_: h200)
    monkeypatch.setattr(check_lengths, "takes_their_word", lambda device, validate: True)
    q, ends = torch.zeros(900, 4, 64, dtype=torch.bfloat16), torch.tensor([0, 300, 300, 900], dtype=torch.int32)
    with launch.compiling_only():
        for ends_k in (ends, ends.clone()):
            for wants_lse in (False, True):
                options = {"cu_seqlens_q": ends, "cu_seqlens_k": ends_k, "causal": True, "return_lse": wants_lse, "backend": "hopper"}
                anyattn.flash_attn_varlen_func(q, q, q, **options)
    assert [e.facts["name"] for e in cache.entries()] == names, "a call compiled what was not there"
