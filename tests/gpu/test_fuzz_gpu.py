"""Random ``flex_attention`` calls by the Triton kernels on a GPU, forward and backward, with chosen blocks, requests and thresholds too.

The recipes are those of ``tests/fuzz``, at lengths around a GPU's tile sizes: 40 fixed calls, which compile some 200 kernels, and 16 of
each other kind, batches for ``deterministic="batch"`` among them; with ANYATTN_FUZZ=n n fresh ones of each, whose seeds are printed and can
be passed as ANYATTN_FUZZ_SEED.
``tests/fuzz/test_fuzz_triton.py`` makes calls through the other entry points too, in Triton's interpreter.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st

from tests.fuzz import test_fuzz_flex as flex
from tests.gpu import fuzz
from tests.support.fuzz import random_mods as mods
from tests.support.fuzz.choices import choices
from tests.support.fuzz.fresh import first_seed, many
from tests.support.fuzz.requests import requests, thresholds
from tests.support.gpu import judging

pytestmark = pytest.mark.gpu
judging.needs_the_backend(only="triton")

FRESH = int(os.environ.get("ANYATTN_FUZZ") or 0)
FIRST_SEED = first_seed(FRESH)
SHARDS = 8
LENGTHS = st.one_of(st.sampled_from((0, 1, 2, 3, 15, 16, 17, 37)), st.sampled_from((63, 64, 65, 127, 128, 129, 131, 255, 257, 383, 400)))
DIMS, DIMS_V = (st.sampled_from((8, 16, 33, 40, 64, 72, 128, 256, widest)) for widest in (576, 512))
calls = st.builds(
    flex.Call,
    mask=st.one_of(st.none(), mods.trees(3), mods.trees(3)),
    chain=mods.chains,
    batch=st.integers(1, 3),
    heads_kv=st.integers(1, 2),
    ratio=st.sampled_from((1, 2, 3, 5, 8)),
    seqlen_q=LENGTHS,
    seqlen_k=LENGTHS,
    head_dim=DIMS,
    head_dim_v=DIMS_V,
    dtype=st.sampled_from((torch.bfloat16, torch.bfloat16, torch.float16, torch.float32)),
    kind=st.sampled_from(judging.KINDS),
    strides=st.tuples(*[st.sampled_from(("plain", "transposed", "offset", "expanded"))] * 3),
    block=st.one_of(st.none(), st.sampled_from((48, 64, 128))),
    tile=st.one_of(st.none(), st.none(), st.sampled_from(((16, 64), (32, 32), (64, 64)))),
    has_sink=st.booleans(),
    seed=st.integers(0, 99),
    in_mode=st.sampled_from((False, False, True)),
).map(lambda call: replace(call, tile=None) if max(call.head_dim, call.head_dim_v) > 128 else call)  # larger ones have tiles that fit


def backend_of(call: flex.Call) -> str | None:
    return None if 0 in (call.seqlen_q, call.seqlen_k) else judging.BACKEND  # a named backend refuses empty calls


KINDS: dict[str, tuple[int, st.SearchStrategy, Callable[..., None]]] = {
    "calls": (40, st.tuples(calls, st.integers(1, 4)), lambda call, n: flex.run(call, judging.DEVICE, backend_of(call), num_splits=n)),
    "chosen": (16, st.tuples(calls, choices), lambda call, choice: flex.run(call, judging.DEVICE, backend_of(call), choice)),
    "requests": (
        16, st.tuples(calls, requests, st.one_of(st.none(), choices)),
        lambda call, request, choice: flex.run_request(call, request, choice, judging.DEVICE, backend_of(call)),
    ),
    "thresholds": (
        16, st.tuples(calls, thresholds, st.one_of(st.none(), choices)),
        lambda call, threshold, choice: flex.run_threshold(call, threshold, choice, judging.DEVICE, backend_of(call)),
    ),
    "batches": (16, st.tuples(st.integers(0, 2000)), lambda seed: fuzz.batches([seed])),
}  # fmt: skip


@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("kind", KINDS)
def test_random_calls(kind: str, shard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed, drawn, run = KINDS[kind]
    monkeypatch.setattr(mods, "DEVICE", judging.DEVICE)
    examples, shrinks = -(-(FRESH or fixed) // SHARDS), FRESH > 0  # every smaller call is compiled anew
    many(lambda values: run(*values), drawn, examples, shard, FIRST_SEED, FRESH, shrinks)
