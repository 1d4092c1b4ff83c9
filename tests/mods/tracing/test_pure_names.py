"""What a mod reads of the world beside its captures is read anew at each call: grad mode, autocast, a tensor's flags, the clock."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch
from torch import is_grad_enabled

from anyattn import flex_attention, masks, scores
from anyattn.mods.analysis.evaluate import evaluate
from anyattn.mods.tracing import pure_names
from anyattn.mods.tracing.fingerprint import recognise
from anyattn.mods.tracing.trace import trace

I = torch.arange(6)
table = torch.zeros(6)
library, functions, limit, noop = torch, [torch.is_grad_enabled], 3, len
enabled = torch.is_autocast_enabled


def seen(fn) -> int:
    """How many of 6 x 6 pairs the mask shows."""
    shown = evaluate(trace(fn, "mask"), torch.tensor(0), torch.tensor(0), I[:, None], I)
    return int(shown.expand(6, 6).sum())


def by_import(b, h, q, k):
    from torch import is_grad_enabled as asked

    return q - k < (6 if asked() else 0)


READERS = {
    "grad_mode": lambda b, h, q, k: q - k < (6 if torch.is_grad_enabled() else 0),
    "imported": lambda b, h, q, k: q - k < (6 if is_grad_enabled() else 0),
    "imported_inside": by_import,
    "alias": lambda b, h, q, k: q - k < (6 if library.is_grad_enabled() else 0),
    "by_text": lambda b, h, q, k: q - k < (6 if getattr(torch, "is_" + "grad_enabled")() else 0),
    "default": lambda b, h, q, k, asked=torch.is_grad_enabled: q - k < (6 if asked() else 0),
    "nested": lambda b, h, q, k: (lambda: q - k < (6 if torch.is_grad_enabled() else 0))(),
    "inner_module": lambda b, h, q, k: q - k < (6 if torch._C._functorch is not None and torch.is_grad_enabled() else 0),
    "evaluated": lambda b, h, q, k: q - k < (6 if eval("torch.is_grad_enabled()") else 0),
}


@pytest.mark.parametrize("name", READERS)
def test_grad_mode_read_inside_a_mod_is_read_anew(name):
    fn = READERS[name]
    assert recognise(fn) is None
    assert seen(fn) == 36
    with torch.no_grad():
        assert seen(fn) == 15
    assert seen(fn) == 36


@pytest.mark.parametrize(
    "fn",
    [lambda b, h, q, k: q - k < (6 if torch.is_autocast_enabled("cpu") else 0), lambda b, h, q, k: q - k < (6 if enabled("cpu") else 0)],
    ids=["attribute", "captured"],
)
def test_autocast_read_inside_a_mod_is_read_anew(fn):
    assert seen(fn) == 15
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert seen(fn) == 36
    assert seen(fn) == 15


def make(read):
    """A mask of new tensors each time: only its code can be remembered."""

    def of(t):
        return lambda b, h, q, k: (q - k < (6 if read(t) else 0)) & (t[q] == 0)

    return of


@pytest.mark.parametrize(
    ("read", "change"),
    [
        (lambda t: t.requires_grad, lambda: torch.zeros(6, requires_grad=True)),
        (lambda t: t.is_leaf, lambda: torch.zeros(6)),
        (lambda t: t.is_contiguous(), lambda: torch.zeros(6)),
        (lambda t: t.stride() == (1,), lambda: torch.zeros(6)),
        (lambda t: isinstance(t, torch.nn.Parameter), lambda: torch.nn.Parameter(torch.zeros(6))),
        (lambda t: type(t) is torch.nn.Parameter, lambda: torch.nn.Parameter(torch.zeros(6))),
        (lambda t: getattr(t, "flag", 0), lambda: _flagged(torch.zeros(6))),
    ],
    ids=["requires_grad", "is_leaf", "is_contiguous", "stride", "isinstance", "type", "attribute"],
)
def test_what_a_captured_tensor_says_of_itself_is_read_anew(read, change):
    of, other = make(read), change()
    plain = torch.zeros(12, requires_grad=True)[::2] if read(torch.zeros(6)) else torch.zeros(6)
    for _ in range(2):
        assert seen(of(other)) == 36
        assert seen(of(plain)) == 15


def _flagged(t):
    t.flag = 1
    return t


def test_time_read_inside_a_mod_is_read_anew(monkeypatch):
    now = [1]
    monkeypatch.setattr(time, "time", lambda: now[0])

    def mask(b, h, q, k):
        return q - k < time.time()

    assert seen(mask) == 21
    now[0] = 2
    assert seen(mask) == 26


def test_a_global_that_is_looked_up_by_text_is_read_anew(monkeypatch):
    def mask(b, h, q, k):
        return q - k < globals()["limit"]

    for value in (1, 3):
        monkeypatch.setitem(globals(), "limit", value)
        assert seen(mask) == seen(lambda b, h, q, k: q - k < value)  # noqa: B023


def test_flex_attention_under_another_grad_mode_or_autocast_is_what_a_first_call_is():
    q, k, v = torch.randn(3, 1, 2, 6, 8, generator=torch.Generator().manual_seed(0))

    def score(s, b, h, i, j):
        return s * 2 if torch.is_grad_enabled() else s

    def mask(b, h, i, j):
        return i - j < (1 if torch.is_autocast_enabled("cpu") else 6)

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        return flex_attention(q, k, v, score), flex_attention(q, k, v, mask_mod=mask)

    plain = flex_attention(q, k, v, lambda s, b, h, i, j: s)
    whole = flex_attention(q, k, v, mask_mod=lambda b, h, i, j: i - j < 6)
    doubled = flex_attention(q, k, v, lambda s, b, h, i, j: s * 2)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # which casts q, k and v too
        narrow = flex_attention(q, k, v, mask_mod=lambda b, h, i, j: i - j < 1)
    for _ in range(2):
        got = both()
        assert torch.equal(got[0], doubled) and torch.equal(got[1], whole)
        with torch.no_grad():
            assert torch.equal(both()[0], plain)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(flex_attention(q, k, v, mask_mod=mask), narrow)


KNOWN = {
    "causal": lambda b, h, q, k: q >= k,
    "torch_functions": lambda s, b, h, q, k: torch.where(q >= k, torch.tanh(s / 20) * 20, -float("inf")) + s.to(torch.float32).abs(),
    "limits": lambda s, b, h, q, k: torch.clamp(s, min=torch.finfo(torch.float32).min, max=torch.finfo(s.dtype).max),
    "math": lambda s, b, h, q, k: s * math.sqrt(2) + math.pi - math.log2(8.0),
    "numpy": lambda s, b, h, q, k: np.minimum(s, np.float64(0.5)),
    "shape": lambda s, b, h, q, k: s + table[torch.clamp(q + k, max=table.shape[0] - 1)] * table.numel() * table.dim(),
    "library": lambda b, h, q, k: masks.causal()(b, h, q, k) & masks.sliding_window(3, 0)(b, h, q, k),
    "scores": lambda s, b, h, q, k: scores.softcap(20.0)(s, b, h, q, k),
    "builtins": lambda b, h, q, k: sum(abs(q - k) < i for i in range(3)) > min(1, limit),
    "library_masks": masks.causal() & masks.sliding_window(2, 0),
    "functional": lambda s, b, h, q, k: torch.nn.functional.relu(s) + torch.special.expit(s),
}


@pytest.mark.parametrize("name", KNOWN)
def test_code_of_pure_names_is_recognised(name):
    assert recognise(KNOWN[name]) is not None


def test_names_that_are_added_later_are_pure():
    def mask(b, h, q, k):
        return torch.nameless_mask(q, k)

    assert recognise(mask) is None
    pure_names.add_pure_names(["nameless_mask"])
    try:
        assert recognise(mask) is not None
    finally:
        pure_names._library.discard("nameless_mask")
        pure_names.names_of.cache_clear()
