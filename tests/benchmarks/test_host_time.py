"""The measurement of host time measures what it says: planned for Hopper, no kernel run, and warm calls are remembered ones."""

from __future__ import annotations

import json
from unittest import mock

import pytest
import torch
from click.testing import CliRunner

from anyattn import autograd, planner
from anyattn.call_cache import block_mask, replays
from anyattn.custom_ops import flex as operators
from anyattn.validate import flash, flex
from benchmarks import host_time

pytest.importorskip("cutlass")


def test_calls_are_planned_for_hopper_and_remembered(monkeypatch):
    checked = []
    for module, name in ((flex, "flex_problem"), (flash, "dense_problem"), (flash, "varlen_problem")):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, original=original: (checked.append(1), original(*a))[1])
    with host_time.stubbed():
        for name, call in {**host_time._calls("cpu"), **host_time._serving("cpu"), **host_time._by_triton("cpu")}.items():
            for _ in range(2):  # the first finds which of a mod's numbers are facts of the call
                call()
            before = len(checked)
            call()
            assert (len(checked) == before) is not name.endswith("a new length each time"), name


def test_calls_of_inference_engines_are_replayed(monkeypatch):
    with host_time.stubbed():
        for name, call in host_time._serving("cpu").items():
            for _ in range(9):
                call()
            with monkeypatch.context() as patched:
                patched.setattr(replays.Replays, "made", mock.Mock(side_effect=AssertionError(name)))
                call()


def test_figures_of_the_bars():
    with host_time.stubbed():
        found = host_time.serving_times("cpu")
    assert {*host_time.SERVING_BARS, "microseconds"} == {*found} and "torch's SDPA, one query" in found["microseconds"]


def test_compiled_calls_are_remembered(monkeypatch):
    """Neither checks nor the operator's way through the call cache are in what is measured."""
    with host_time.stubbed():
        for name, call in host_time._compiled("cpu").items():
            for _ in range(4):
                call()
            with monkeypatch.context() as patched:
                for module, function in ((flex, "flex_problem"), (operators, "mods_of_operands")):
                    patched.setattr(module, function, mock.Mock(side_effect=AssertionError(name)))
                call()


def test_block_masks_are_remembered(monkeypatch):
    with host_time.stubbed(), host_time.listing():
        for name, call in host_time._block_masks("cpu").items():
            call()
            with monkeypatch.context() as patched:
                patched.setattr(block_mask, "build_block_mask", mock.Mock(side_effect=AssertionError(name)))
                assert call().kv_indices.shape == (1, 1, 64, 64)


def test_another_backends_backward_pass_is_planned_once(monkeypatch):
    asked = []
    original = autograd.for_backward
    monkeypatch.setattr(autograd, "for_backward", lambda *a: (asked.append(1), original(*a))[1])
    monkeypatch.setattr(planner, "_slower", lambda *_: None)  # for so few rows Triton would have both passes
    bias = torch.zeros(256, requires_grad=True)
    with host_time.stubbed():
        call = host_time._both_passes("cpu", score_mod=lambda s, b, h, i, j: s + bias[i - j + 128], deterministic=True)
        for _ in range(3):
            call()
    assert len(asked) == 1


def test_command_line(monkeypatch):
    monkeypatch.setattr(host_time, "microseconds", lambda call: (call(), 1.5)[1])
    found = CliRunner().invoke(host_time.main, ["--json"], catch_exceptions=False)
    assert set(json.loads(found.output).values()) == {1.5}
    shown = CliRunner().invoke(host_time.main, ["--only", "decoding"], catch_exceptions=False).output
    assert "decoding, pages of 64 " in shown and "flash" not in shown
