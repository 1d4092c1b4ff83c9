"""flex_attention on random calls: mask trees, score chains, lengths, head ratios, head dims, strides, tiles, dtypes.

200 fixed calls as a rule, an eighth of them in ``make test``; with ANYATTN_FUZZ=n (or ``make fuzz``) n fresh ones, whose seeds are printed
and can be given back as ANYATTN_FUZZ_SEED.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import strategies as st

import anyattn
from tests.support import cases
from tests.support.flex_calls import judge
from tests.support.fuzz.choices import Choice, choices
from tests.support.fuzz.fresh import FRESH, many
from tests.support.fuzz.random_batches import or_refused
from tests.support.fuzz.random_mods import chains, mask_of, score_of, trees
from tests.support.fuzz.requests import Operands, Request, Threshold, judge_request, judge_threshold, requests, thresholds
from tests.support.fuzz.shards import shards

SHARDS = 8
LENGTHS = (0, 1, 2, 3, 7, 31, 33, 64, 65, 97, 127, 128, 129, 130)
RARE_LENGTHS = (255, 256, 257, 400)


@dataclass(frozen=True)
class Call:
    """One random call; its repr is all that is needed to repeat it. in_mode: with ``deterministic="batch"``, where the call can have it."""

    mask: tuple | None
    chain: list
    batch: int
    heads_kv: int
    ratio: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    kind: str
    strides: tuple
    block: int | None
    tile: tuple | None
    has_sink: bool
    seed: int
    in_mode: bool = False


lengths = st.one_of(st.sampled_from(LENGTHS), st.sampled_from(LENGTHS), st.sampled_from(RARE_LENGTHS))
dims, dims_v = (st.sampled_from((1, 4, 8, 16, 20, 33, 64, widest)) for widest in (576, 512))
calls = st.builds(
    Call,
    mask=st.one_of(st.none(), trees(), trees()),
    chain=chains,
    batch=st.integers(1, 3),
    heads_kv=st.integers(1, 2),
    ratio=st.sampled_from((1, 2, 3, 5, 8)),
    seqlen_q=lengths,
    seqlen_k=lengths,
    head_dim=dims,
    head_dim_v=dims_v,
    dtype=st.sampled_from((torch.float32, torch.float64, torch.bfloat16, torch.float16)),
    kind=st.sampled_from(cases.KINDS),
    strides=st.tuples(*[st.sampled_from(("plain", "transposed", "offset", "expanded"))] * 3),
    block=st.one_of(st.none(), st.sampled_from((16, 48, 128))),
    tile=st.one_of(st.none(), st.tuples(st.sampled_from((1, 16, 64, 100)), st.sampled_from((8, 64, 129)))),
    has_sink=st.booleans(),
    seed=st.integers(0, 99),
    in_mode=st.sampled_from((False, False, True)),
)


def _laid_out(tensor: torch.Tensor, how: str) -> torch.Tensor:
    if how == "transposed":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "offset":
        return torch.nn.functional.pad(tensor, (3, 5))[..., 3:-5]
    if how == "expanded" and tensor.shape[1] > 1:
        return tensor[:, :1].expand(tensor.shape)
    return tensor


def operands(
    call: Call, device: str = "cpu", backend: str | None = None, choice: Choice | None = None, **more: int
) -> tuple[Operands, list]:
    """The call, and the tensors that its score captures. choice: blocks that are chosen, in which the call's mask decides. more: further
    ``kernel_options``."""
    heads = call.heads_kv * call.ratio
    shape = cases.Shape(call.batch, heads, call.heads_kv, call.seqlen_q, call.seqlen_k, call.head_dim, call.head_dim_v)
    q, k, v, _ = cases.inputs(call.kind, shape, call.dtype, call.seed)
    q, k, v = (_laid_out(t.to(device), how) for t, how in zip((q, k, v), call.strides))
    score, captured = score_of(call.chain, heads)
    mask = None if call.mask is None else mask_of(call.mask)
    sink = torch.linspace(-2, 2, heads, dtype=torch.float64).to(q) if call.has_sink else None
    options: dict = {"backend": backend} | ({"kernel_options": dict(more)} if more else {})
    if choice is not None:
        lengths = (call.seqlen_q, call.seqlen_k)
        options["block_mask"], mask = choice.made(call.batch, (heads, call.heads_kv), lengths, mask, device)
    elif call.block is not None and mask is not None:
        options["block_mask"] = anyattn.create_block_mask(
            mask, call.batch, heads, call.seqlen_q, call.seqlen_k, device=device, BLOCK_SIZE=call.block
        )
    if call.tile is not None:
        options["kernel_options"] = more | dict(zip(("tile_m", "tile_n"), call.tile))
    return Operands(q, k, v, score, mask, sink, options), captured


def run(call: Call, device: str = "cpu", backend: str | None = None, choice: Choice | None = None, **more: int) -> None:
    """Forward and backward; arguments as ``operands``. Calls in the mode have no tiles and splits of their own, and blocks of 128."""
    in_mode = call.in_mode and choice is None and call.dtype is not torch.float64
    if in_mode:
        call, more = replace(call, tile=None, block=call.block and 128), {}
    (q, k, v, score, mask, sink, options), captured = operands(call, device, backend, choice, **more)
    if in_mode:
        options["deterministic"] = "batch"
    with or_refused(in_mode):
        judge(q, k, v, score=score, mask=mask, sink=sink, captured=captured, **options)


def run_request(call: Call, request: Request, choice: Choice | None = None, device: str = "cpu", backend: str | None = None) -> None:
    judge_request(operands(call, device, backend, choice)[0], request)


def run_threshold(call: Call, threshold: Threshold, choice: Choice | None = None, device: str = "cpu", backend: str | None = None) -> None:
    judge_threshold(operands(call, device, backend, choice)[0], threshold)


def many_of(shard: int, fixed: int, run_one: Callable, *drawn: st.SearchStrategy) -> None:
    """Runs a shard of ``fixed`` calls, or of the fresh ones."""
    many(lambda values: run_one(*values), st.tuples(*drawn), -(-(FRESH or fixed) // SHARDS), shard)


@pytest.mark.parametrize("shard", shards(SHARDS, FRESH))
def test_random_calls(shard: int) -> None:
    many_of(shard, 200, run, calls)


@pytest.mark.parametrize("shard", shards(SHARDS, FRESH))
def test_random_choices_of_blocks(shard: int) -> None:
    many_of(shard, 64, lambda call, choice: run(call, choice=choice), calls, choices)


@pytest.mark.parametrize("shard", shards(SHARDS, FRESH))
def test_random_requests(shard: int) -> None:
    """Sums of the probabilities and maxima of the scores, half of them over chosen blocks."""
    many_of(shard, 96, run_request, calls, requests, st.one_of(st.none(), choices))


@pytest.mark.parametrize("shard", shards(SHARDS, FRESH))
def test_random_thresholds(shard: int) -> None:
    """Tiles that are left out at run time."""
    many_of(shard, 96, run_threshold, calls, thresholds, st.one_of(st.none(), choices))


_PLAIN = {"mask": None, "chain": [], "batch": 1, "seqlen_q": 255, "strides": ("plain",) * 3, "block": None, "tile": None, "seed": 0}


@pytest.mark.parametrize(
    "call",
    [
        Call(heads_kv=2, ratio=8, seqlen_k=0, head_dim=1, head_dim_v=1, dtype=torch.bfloat16, kind="normal", has_sink=True, **_PLAIN),
        Call(heads_kv=1, ratio=8, seqlen_k=1, head_dim=1, head_dim_v=1, dtype=torch.float64, kind="coded", has_sink=True, **_PLAIN),
        Call(heads_kv=2, ratio=1, seqlen_k=1, head_dim=64, head_dim_v=16, dtype=torch.float32, kind="normal", has_sink=False, **_PLAIN),
        Call(
            mask=None, chain=[], batch=1, heads_kv=1, ratio=5, seqlen_q=1, seqlen_k=31, head_dim=16, head_dim_v=8, dtype=torch.float32,
            kind="peaky", strides=("expanded", "plain", "plain"), block=None, tile=None, has_sink=False, seed=1,
        ),
        Call(
            heads_kv=1, ratio=1, seqlen_k=64, head_dim=1, head_dim_v=1, dtype=torch.bfloat16, kind="coded", has_sink=False,
            **_PLAIN | {"mask": ("rows", 42), "chain": [("head_bias", 1), ("row_gate", 1)]},
        ),
        Call(
            heads_kv=1, ratio=1, seqlen_k=2, head_dim=1, head_dim_v=1, dtype=torch.float32, kind="normal", has_sink=False,
            **_PLAIN | {"chain": [("distance_table", 0), ("softcap", 0.7)], "seqlen_q": 1},
        ),
    ],
    ids=["a sink alone", "a sink and one key", "one key", "equal heads", "equal scores", "a saturated cap"],
)  # fmt: skip
def test_rows_that_share_their_rounding_errors(call: Call) -> None:
    """Found by random calls: equal LSEs, heads and scores err alike, queries of one key leave no error in the plain formula, and the
    derivative of a saturated cap is all rounding."""
    run(call)


def test_sums_of_queries_that_share_their_rounding_errors() -> None:
    """Found by random calls: 255 equal probabilities err alike, and all keys of a query by the error of its log-sum-exp."""
    call = Call(
        heads_kv=2, ratio=1, seqlen_k=97, head_dim=1, head_dim_v=1, dtype=torch.float32, kind="coded", has_sink=True,
        **_PLAIN | {"batch": 2, "mask": ("all", True), "block": 16, "tile": (1, 129), "seed": 8},
    )  # fmt: skip
    run_request(call, Request(True, None, 1, None, None, (26, 61), "all heads", 3, 9))
    run_request(replace(call, heads_kv=1, batch=1, seqlen_q=64, seqlen_k=2), Request(False, None, 7, None, None, None, "all heads", 0, 0))


def test_a_head_that_sees_nothing_in_the_tiles_that_it_visits() -> None:
    """Found by random calls: all tiles are skipped."""
    call = Call(
        heads_kv=1, ratio=5, seqlen_k=33, head_dim=1, head_dim_v=72, dtype=torch.float32, kind="coded", has_sink=True,
        **_PLAIN | {"mask": ("documents", 3), "chain": [("hidden", 4), ("pair", 2)], "seqlen_q": 47, "tile": (64, 64), "seed": 78},
    )  # fmt: skip
    run_threshold(call, Threshold(0.05, False, True), Choice((32, 64), 5, "query heads", True, True, True, False, 33))
