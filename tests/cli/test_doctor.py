"""``anyattn doctor`` on a machine with GPUs, which are injected: every device's backends are called, and what ran is named."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from anyattn import hardware, planner
from anyattn.cli import selfcheck
from anyattn.cli.selfcheck import Place
from tests.support.command_line import call
from tests.support.processes import python

CPU = torch.device("cpu")
H200 = hardware.Hardware("cuda", "NVIDIA H200", 0, frozenset((torch.bfloat16,)), (9, 0), 132)


def place(**backends: str | None) -> Place:
    return Place(CPU, "cuda:0 NVIDIA H200", {"torch": "not asked", "triton": "not asked", "hopper": "not asked", **backends})


def test_every_gpu_is_a_place_with_backends_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    a100 = hardware.Hardware("cuda", "NVIDIA A100", 0, frozenset((torch.bfloat16,)), (8, 0), 108)
    cpu = hardware.of("cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(hardware, "of", lambda kind, index=None: cpu if kind == "cpu" else (H200, a100)[index])
    found = selfcheck.places()
    assert [p.name for p in found] == ["cpu", "cuda:0 NVIDIA H200", "cuda:1 NVIDIA A100"]
    assert [p.backends for p in found] == [planner.available(h) for h in (cpu, H200, a100)]
    assert "compute capability 9.0" in str(found[2].backends["hopper"])


def test_each_backend_that_can_run_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[tuple[str, str]] = []

    def noting(name: str):  # type: ignore[no-untyped-def]
        return lambda place, backend: called.append((backend, name)) or 0.5  # type: ignore[func-returns-value]

    monkeypatch.setattr(selfcheck, "_training", noting("training"))
    monkeypatch.setattr(selfcheck, "_decoding", noting("decoding"))
    found = list(selfcheck.outcomes(place(torch=None, triton=None, hopper=None)))
    assert called == [("torch", "training"), ("torch", "decoding"), ("triton", "training"), ("triton", "decoding"), ("hopper", "training")]
    assert all(o.is_right for o in found)
    called.clear()
    list(selfcheck.outcomes(place(triton=None)))
    assert {backend for backend, _ in called} == {"triton"}


def test_the_doctor_says_what_ran_and_how_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "places", lambda: [place(torch=None, hopper="its compiler is missing")])
    code, out, _ = call("doctor")
    lines = out.splitlines()
    for what in ("forward and backward", "decode"):
        (line,) = (line for line in lines if line.startswith(f"cuda:0 NVIDIA H200, torch, {what}: "))
        assert "% of the error budget" in line and line.endswith("by torch's operations")
    assert code == 0 and "cuda:0 NVIDIA H200" in out and "its compiler is missing" in out and "10 self-checks" in out


def test_a_wrong_result_or_an_error_is_named_and_the_rest_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(place: Place, backend: str) -> float:
        raise RuntimeError("CUDA driver version\nis insufficient [/red]")

    monkeypatch.setattr(selfcheck, "places", lambda: [place(torch=None)])
    monkeypatch.setattr(selfcheck, "_training", broken)
    code, out, _ = call("doctor")
    assert code == 1 and "torch, forward and backward: failed: RuntimeError: CUDA driver version is insufficient [/red]" in out
    assert "torch, decode: " in out and "wrong: cpu torch, forward and backward" in out
    monkeypatch.setattr(selfcheck, "_training", lambda place, backend: 1.5)
    code, out, _ = call("doctor")
    assert code == 1 and "150% of the error budget" in out


def test_a_cache_that_is_written_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    import anyattn

    decode = anyattn.flash_attn_with_kvcache

    def also_elsewhere(q, k_cache, *args, **options):  # type: ignore[no-untyped-def]
        out = decode(q, k_cache, *args, **options)
        k_cache[0, 99] = 0
        return out

    monkeypatch.setattr(anyattn, "flash_attn_with_kvcache", also_elsewhere)
    assert not next(o for o in selfcheck.outcomes(place(torch=None)) if o.call == "decode").is_right


INTERPRETED = """
import sys
import torch
from anyattn import cli
from anyattn.cli import doctor, selfcheck
from tests.support.interpreter import mend

mend()
selfcheck._SEQLEN, selfcheck._HEAD_DIM = 72, 16
doctor._CHECKED = ("causal",)
backends = {"torch": None, "triton": None, "hopper": "it is not interpreted"}
selfcheck.places = lambda: [selfcheck.Place(torch.device("cpu"), "cuda:0 interpreted", backends)]
cli.main(["doctor"])
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_kernels_of_triton_are_judged_and_named() -> None:
    """By Triton's interpreter, which is chosen when Triton is imported: in a process of its own."""
    done = python("-c", INTERPRETED, TRITON_INTERPRET="1", OMP_NUM_THREADS="1", ANYATTN_CACHE="0")
    assert done.returncode == 0, done.stdout + done.stderr
    training, decode = (line for line in done.stdout.splitlines() if line.startswith("cuda:0 interpreted, triton, "))
    assert "forward and backward: " in training and "triton forward_tile_" in training
    assert "decode: " in decode and "triton forward_tile_" in decode and "triton cache_step" in decode
    backward = training.partition("triton forward_tile_")[2]
    assert backward.count("triton ") >= 2, training
