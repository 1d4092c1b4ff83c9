"""Random calls of all three doors by Triton's interpreter: the recipes of the other files here, on few keys and in small tiles.

Run by ``test_fuzz_triton.py`` in processes of their own. Lengths are 0, 1, 2, primes, and multiples of a tile with their neighbours. The
CPU is taken for one GPU or another, for each of which the kernels' loops run in another way.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from anyattn import hardware
from anyattn.backends.triton import tile_config
from anyattn.backends.triton.tile_config import PipelineOptions, TmaUse
from anyattn.backends.triton.wide_tiles import blocks_of
from anyattn.call_cache import attention
from tests.fuzz import test_fuzz_flash as flash
from tests.fuzz import test_fuzz_flex as flex
from tests.support import cases
from tests.support.fuzz import random_batches
from tests.support.fuzz.choices import Choice, choices
from tests.support.fuzz.random_batches import Limits
from tests.support.fuzz.random_mods import chains, trees
from tests.support.fuzz.requests import requests, thresholds

SEED = int(os.environ.get("ANYATTN_FUZZ_SEED", "0"))
EXAMPLES = json.loads(os.environ.get("ANYATTN_FUZZ_OF_EACH", "{}"))  # by kind of call, of which the others are left out; two of each
SHRINKS = os.environ.get("ANYATTN_FUZZ_SHRINKS") == "1"  # takes minutes

DTYPES = st.sampled_from((torch.float32, torch.bfloat16, torch.float16))
FEW = (0, 1, 2, 3, 7, 13, 15, 16, 17)
LENGTHS = st.one_of(st.sampled_from(FEW), st.sampled_from((31, 32, 33, 37, 41)), st.sampled_from((47, 48, 49, 61, 65)))
RATIOS = (1, 2, 3, 5, 8)
HEADS = st.tuples(st.sampled_from(RATIOS), st.integers(1, 2)).map(lambda x: (x[0] * (x[1] if x[0] < 4 else 1), x[1] if x[0] < 4 else 1))
DIMS, DIMS_V = (st.sampled_from((16, 8, 24, 64, 40, 16, 64, 33, 72, 1, widest)) for widest in (576, 512))
KINDS = st.sampled_from(cases.KINDS)
TILES = st.sampled_from(((16, 16), (32, 16), (16, 32), (64, 16), (16, 64), (64, 64)))
STRIDES = st.sampled_from(("plain", "transposed", "expanded", "transposed", "plain", "expanded", "plain", "offset"))
GPUS = st.sampled_from((None, (9, 0), (8, 0), (9, 0), (9, 0), (10, 0)))
PIPELINES = st.builds(
    PipelineOptions, *(st.sampled_from(TmaUse) if f.type in (TmaUse, "TmaUse") else st.booleans() for f in fields(PipelineOptions))
)
IN_MODE = st.sampled_from((False, False, True))
FORMS = st.sampled_from((*(f for f in flash.FORMS if f != "pages of 64"), "pages of 5", "dense"))


@contextmanager
def taken_for(capability: tuple[int, int] | None, pipeline: PipelineOptions) -> Iterator[None]:
    """Calls are planned and launched as on an NVIDIA GPU of this compute capability; None is none. The forward kernel's loop has these
    options wherever they are possible, not only where they are fast. Half of all calls have more queries than few."""
    real, plain = hardware.of, PipelineOptions(False, TmaUse.NONE)

    def of_loop(shape: tile_config.Shape, gpu: Any, is_short: bool) -> PipelineOptions:
        return plain if is_short or shape.has_8_bits or blocks_of(shape.d)[1] else pipeline

    attention.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware, "of", lambda *about: replace(real(*about), capability=capability))
        patch.setattr(tile_config, "most_short", lambda *about: 16)
        patch.setattr(tile_config, "pipeline_of", of_loop)
        patch.setattr(tile_config, "capability_of", lambda device: capability)
        yield
    attention.clear()


@st.composite
def flex_calls(draw: Callable) -> tuple[flex.Call, int]:
    """A call, and into how many pieces its keys are cut: up to one more than there are tiles."""
    heads, heads_kv = draw(HEADS)
    tile, seqlen_k = draw(TILES), draw(LENGTHS)
    call = flex.Call(
        mask=draw(st.one_of(st.none(), trees(), trees())), chain=draw(chains),
        batch=draw(st.integers(1, 1 if heads > 4 else 2)), heads_kv=heads_kv, ratio=heads // heads_kv,
        seqlen_q=draw(LENGTHS), seqlen_k=seqlen_k, head_dim=draw(DIMS), head_dim_v=draw(DIMS_V), dtype=draw(DTYPES), kind=draw(KINDS),
        strides=draw(st.tuples(STRIDES, STRIDES, STRIDES)), block=draw(st.one_of(st.none(), st.sampled_from((16, 24, 48, 80)))), tile=tile,
        has_sink=draw(st.booleans()), seed=draw(st.integers(0, 99)), in_mode=draw(IN_MODE),
    )  # fmt: skip
    if max(call.head_dim, call.head_dim_v) > 256:  # larger tiles do not fit a GPU's shared memory
        call = replace(call, tile=(16, 16))
    return call, draw(st.one_of(st.just(1), st.integers(1, -(-seqlen_k // tile[1]) + 1)))


def run_flex(drawn: tuple[flex.Call, int]) -> None:
    call, splits = drawn
    flex.run(call, num_splits=splits)


def run_chosen(drawn: tuple[tuple[flex.Call, int], Choice]) -> None:
    (call, _), choice = drawn
    flex.run(call, choice=choice)


sequences = st.builds(
    flash.Sequences,
    form=FORMS,
    lengths=st.lists(st.tuples(LENGTHS, LENGTHS), min_size=1, max_size=3),
    heads=HEADS,
    dims=st.tuples(DIMS, DIMS_V),
    dtype=DTYPES,
    kind=KINDS,
    options=flash.options,
    splits=st.sampled_from((1, 1, 2, 3, 6)),
    blocks=st.one_of(st.none(), st.none(), st.sampled_from(((16, 16), (48, 8), (32, 64)))),
    with_lse=st.booleans(),
    seed=st.integers(0, 99),
    in_mode=IN_MODE,
)


def single(call: flash.Cache, dtype: torch.dtype, heads: tuple[int, int]) -> flash.Cache:
    s = call.setting
    most = max(s.cached)
    cached = tuple(n if n <= 66 else n % 67 for n in s.cached)
    leftpad = None if s.leftpad is None else tuple(min(p, n) for p, n in zip(s.leftpad, cached, strict=True))
    capacity = s.capacity - most + max(cached)
    return replace(call, setting=replace(s, cached=cached, leftpad=leftpad, capacity=capacity, heads=heads, dtype=dtype))


caches = st.builds(single, flash.caches(), DTYPES, HEADS)


@st.composite
def of_8_bits(draw: Callable) -> flash.EightBits:
    call, (heads, kv_heads) = draw(flash.of_8_bits()), draw(HEADS)
    cached = tuple(n % 67 for n in call.setting.cached)
    leftpad = None if call.setting.leftpad is None else tuple(map(min, call.setting.leftpad, cached))
    room = call.setting.capacity - max(call.setting.cached)
    setting = replace(
        call.setting, cached=cached, leftpad=leftpad, capacity=max(cached) + room, heads=heads, kv_heads=kv_heads,
        queries=draw(st.integers(1, 40)),
    )  # fmt: skip
    return replace(call, setting=setting)


BATCHES = Limits(
    lengths=((1, 10), (1, 10), (60, 70), (120, 135), (10, 300)),
    dims=((16, 16), (64, 64), (80, 80), (40, 24), (128, 64), (33, 16), (256, 256), (576, 512)),
    heads=((1, 1), (4, 2), (8, 1), (3, 1), (2, 2)), neighbours=3, work=(2**24,), forms=2,
)  # fmt: skip


def run_batch(batch: random_batches.Batch) -> None:
    """With sections of 128 keys, so that a few hundred are several."""
    with random_batches.on_machines(section=128) as another:
        random_batches.check(batch, between=another, backend="triton")


KINDS_OF_CALL: dict[str, tuple[st.SearchStrategy, Callable[[Any], None]]] = {
    "flex": (flex_calls(), run_flex),
    "chosen blocks": (st.tuples(flex_calls(), choices), run_chosen),
    "requests": (st.tuples(flex_calls(), requests, st.one_of(st.none(), choices)), lambda drawn: flex.run_request(drawn[0][0], *drawn[1:])),
    "thresholds": (
        st.tuples(flex_calls(), thresholds, st.one_of(st.none(), choices)),
        lambda drawn: flex.run_threshold(drawn[0][0], *drawn[1:]),
    ),
    "sequences": (sequences, flash.run_sequences),
    "chosen sequences": (st.tuples(sequences, choices), lambda drawn: flash.run_chosen_sequences(*drawn)),
    "cache": (caches, flash.run_cache),
    "8 bits": (of_8_bits(), flash.run_8_bits),
    "batches": (st.integers(0, 2**32 - 1).map(lambda n: random_batches.drawn(random.Random(n), BATCHES)), run_batch),
}


@pytest.mark.parametrize("name", EXAMPLES or KINDS_OF_CALL)
def test_random_calls(name: str) -> None:
    drawn, run = KINDS_OF_CALL[name]

    @hypothesis.seed(SEED)
    @settings(
        max_examples=EXAMPLES.get(name, 2),
        deadline=None,
        database=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink) if SHRINKS else (Phase.generate,),
    )
    @hypothesis.given(drawn, st.tuples(GPUS, PIPELINES))
    def many(call: Any, how: tuple[tuple[int, int] | None, PipelineOptions]) -> None:
        stored = call.setting.dtype if isinstance(call, flash.EightBits) else getattr(call, "stored", None)
        if how[0] == (8, 0) and stored is torch.float8_e4m3fn:
            return  # which it does not read
        with taken_for(*how):
            run(call)

    many()
