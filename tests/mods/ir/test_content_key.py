"""Keys and programs are the same in every process."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys

import pytest
import torch

from anyattn.mods.ir.content_key import content_key

_PRINT_KEYS = """
import torch, anyattn
from anyattn import masks, scores
from anyattn.mods.ir import codec
from anyattn.mods.ir.grad import score_gradients
from anyattn.mods.tracing.trace import trace
table = torch.zeros(4, 9)
window = 7
traced = [
    trace(masks.causal() & ~masks.sliding_window(3, None) | masks.document(torch.zeros(9, dtype=torch.int32)), "mask").expr,
    trace(scores.t5_bias(torch.zeros(32, 4)).then(scores.softcap(30.0)), "score").expr,
    trace(lambda s, b, h, q, k: torch.where(q - k < window, s * table[h, k], -float("inf")), "score").expr,
]
traced += [score_gradients(traced[1]).expr]
for expr in traced:
    print(expr.key, codec.encode(expr))
"""


def test_two_processes_agree():
    seed = "1" if os.environ.get("PYTHONHASHSEED") == "4242" else "4242"
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    another = subprocess.run([sys.executable, "-c", _PRINT_KEYS], env=environment, capture_output=True, text=True, check=True).stdout
    with contextlib.redirect_stdout(io.StringIO()) as here:
        exec(_PRINT_KEYS, {})
    assert another == here.getvalue() and len(another.splitlines()) == 4


def test_content_tells_types_apart():
    parts = [1, 1.0, "1", "1.0", (1,), ((1,),), None, "None", torch.int32, "torch.int32", int, float, -0.0, 0.0, float("nan"), True]
    assert len({content_key(p) for p in parts}) == len(parts)
    assert len({content_key(p) for p in ((1, 2), ((1, 2),), (1, (2,)), ("1,2",))}) == 4
    assert all(len(content_key(p)) == 32 and int(content_key(p), 16) >= 0 for p in parts)


def test_identities_have_no_place():
    with pytest.raises(AssertionError, match="no place in a content key"):
        content_key(object())
