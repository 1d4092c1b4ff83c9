"""Sums of the probabilities and maxima of the scores (``AuxRequest``) against the oracle's dense weights."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn import AuxRequest, oracle
from anyattn.arithmetic import ceil_div
from tests.support.reductions import blocks, judged, listed

IDS, BIAS, TABLE = torch.arange(200) // 37, torch.linspace(-1, 1, 8), torch.randn(50, 70, generator=torch.Generator().manual_seed(9))


BACKEND = os.environ.get("ANYATTN_TEST_BACKEND", "torch")


class Path(NamedTuple):
    """A call of ``flex_attention``. shapes: B, Hq, Hkv, Sq, Sk, D."""

    shapes: tuple[int, ...] = (2, 4, 2, 40, 70, 16)
    mask: Callable | None = None
    score: Callable | None = None
    block_size: Any = None
    has_sink: bool = False
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] | None = None


CAUSAL = lambda b, h, q, k: q + 30 >= k
PATHS = {
    "full": Path(),
    "causal": Path(mask=CAUSAL, has_sink=True),
    "rows that see nothing": Path(mask=lambda b, h, q, k: (q > 20) & (k < q)),
    "nothing": Path(mask=lambda b, h, q, k: q < -1),
    "sink and window": Path((1, 2, 1, 90, 90, 16), lambda b, h, q, k: (q >= k) & ((k < 5) | (q - k < 20))),
    "pairs": Path((1, 2, 1, 40, 50, 16), lambda b, h, q, k: (q * k + h) % 3 > 0),
    "score": Path(mask=CAUSAL, score=lambda s, b, h, q, k: 3 * torch.tanh(s / 3) - BIAS[h] * (q - k).abs()),
    "table": Path((1, 2, 2, 40, 70, 16), score=lambda s, b, h, q, k: s + TABLE[q, k]),
    "row bias": Path((1, 2, 2, 40, 70, 16), CAUSAL, lambda s, b, h, q, k: s + BIAS[q % 8] * 5, has_sink=True),
    "lists": Path((2, 4, 2, 90, 100, 16), lambda b, h, q, k: (q // 16 + h) % 3 != (k // 16) % 3, block_size=16, has_sink=True),
    "wide lists": Path((1, 2, 1, 150, 200, 16), lambda b, h, q, k: (IDS[q] == IDS[k]) | (k < 3), block_size=(64, 32)),
    "shorter than lists": Path((1, 2, 1, 27, 45, 16), lambda b, h, q, k: (q * k + h) % 3 > 0, block_size=(32, 64)),
    "odd lists": Path((1, 2, 2, 70, 70, 16), lambda b, h, q, k: (q // 16) % 3 != (k // 16) % 3, block_size=(31, 40)),
    "documents": Path((1, 2, 1, 90, 90, 16), lambda b, h, q, k: (IDS[q] == IDS[k]) & (q >= k), block_size=(32, 32)),
    "bfloat16": Path((1, 4, 1, 65, 129, 32), CAUSAL, dtype=torch.bfloat16),
    "float16": Path((1, 2, 2, 33, 47, 40), CAUSAL, dtype=torch.float16),
    "one query": Path((2, 4, 1, 1, 90, 16)),
    "splits": Path(options={"num_splits": 3}),
}
BLOCKS = {"32, 16": (32, 16), "16, 64": (16, 64), "1, 16": (1, 16), "64, 32": (64, 32)}


class Operands(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None


def operands(path: Path) -> Operands:
    g, (b, hq, hkv, sq, sk, d) = torch.Generator().manual_seed(0), path.shapes
    q, k, v = (torch.randn(shape, generator=g).to(path.dtype) for shape in ((b, hq, sq, d), (b, hkv, sk, d), (b, hkv, sk, d)))
    return Operands(q, k, v, torch.linspace(-1, 2, hq) if path.has_sink else None)


def called(path: Path, request: AuxRequest, of: Operands | None = None) -> Any:
    q, k, v, sink = operands(path) if of is None else of
    mask = {"mask_mod": path.mask}
    if path.block_size is not None:
        sizes = (None, path.shapes[1], q.shape[2], k.shape[2])
        mask = {"block_mask": anyattn.create_block_mask(path.mask, *sizes, device="cpu", BLOCK_SIZE=path.block_size)}
    return anyattn.flex_attention(
        q, k, v, path.score, enable_gqa=True, sink=sink, return_aux=request, kernel_options=path.options, **mask
    )[1]  # fmt: skip


def dense(path: Path) -> tuple[oracle.Weights, oracle.Weights]:
    q, k, _, sink = operands(path)
    mods = {"score": path.score, "mask": path.mask, "sink": sink}
    return oracle.weights(q, k, **mods), oracle.same_dtype_weights(q, k, **mods)


@pytest.mark.parametrize("name", PATHS)
def test_reductions_equal_the_oracles(name: str) -> None:
    path = PATHS[name]
    weights, block = dense(path), (32, 16)
    hkv, rows = path.shapes[2], ceil_div(path.shapes[3], block[0])
    if BACKEND == "triton" and name == "odd lists":
        block, rows = (1, 40), path.shapes[3]
    indices = torch.randint(
        -1, ceil_div(path.shapes[4], block[1]) + 1, (path.shapes[0], hkv, rows, 3), generator=torch.Generator().manual_seed(1)
    )
    aux = called(path, AuxRequest(max_scores=True, key_sums=True, block_sums=block, block_max=block, listed_sums=(indices, block)))
    judged("key_sums", aux.key_sums, weights, lambda w: w.probabilities.sum(2))
    judged("block_sums", aux.block_sums, weights, lambda w: blocks(w.probabilities, block, "sum"))
    judged("block_max", aux.block_max, weights, lambda w: blocks(w.scores, block, "max"))
    judged("listed_sums", aux.listed_sums, weights, lambda w: listed(blocks(w.probabilities, block, "sum"), indices))
    assert torch.equal(aux.block_max.amax((2, 3)), aux.max_scores.amax(2)) or path.dtype is not torch.float32
    assert all(t.dtype is torch.float32 for t in (aux.key_sums, aux.block_sums, aux.block_max, aux.listed_sums))


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("name", ["causal", "lists", "wide lists"])
def test_blocks_of_other_sizes(name: str, block: tuple[int, int]) -> None:
    path = PATHS[name]
    weights = dense(path)
    aux = called(path, AuxRequest(block_sums=block, block_max=(16, 16)))
    judged("block_sums", aux.block_sums, weights, lambda w: blocks(w.probabilities, block, "sum"))
    judged("block_max", aux.block_max, weights, lambda w: blocks(w.scores, (16, 16), "max"))


@pytest.mark.parametrize("last", [1, 7, 39, 1000])
@pytest.mark.parametrize("name", ["causal", "lists"])
def test_last_queries(name: str, last: int) -> None:
    path = PATHS[name]
    weights = dense(path)
    aux = called(path, AuxRequest(key_sums=True, block_sums=16, last_queries=last))
    judged("key_sums", aux.key_sums, weights, lambda w: w.probabilities[:, :, -last:].sum(2))
    whole = (path.shapes[3], 16)
    judged("block_sums", aux.block_sums, weights, lambda w: blocks(w.probabilities[:, :, -last:], whole, "sum")[:, :, 0])


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_listed_sums_are_over_the_heads_that_share_indices(heads: int) -> None:
    path = PATHS["causal"]
    indices = torch.tensor([4, 0, 0, -1, 99, -7]).expand(2, heads, 40, 6)
    aux = called(path, AuxRequest(listed_sums=(indices, (1, 16))))
    judged("listed_sums", aux.listed_sums, dense(path), lambda w: listed(blocks(w.probabilities, (1, 16), "sum"), indices))


def test_listed_blocks_that_a_block_mask_leaves_out_are_zero() -> None:
    chosen = torch.tensor([[[[0, 2, 0], [1, 2, 0]]]], dtype=torch.int32)
    mask = anyattn.BlockMask.from_kv_blocks(torch.full((1, 1, 2), 2, dtype=torch.int32), chosen, BLOCK_SIZE=16, seq_lengths=(32, 48))
    q, k, v = torch.randn(3, 1, 1, 48, 16, generator=torch.Generator().manual_seed(0))
    indices = torch.arange(3).expand(1, 1, 2, 3)
    aux = anyattn.flex_attention(q[:, :, :32], k, v, block_mask=mask, return_aux=AuxRequest(listed_sums=(indices, (16, 16))))[1]
    assert (aux.listed_sums == 0).tolist() == [[[[False, True, False], [True, False, False]]]]
    table = torch.tensor([[True, False, True], [False, True, True]])
    seen = {"mask": lambda b, h, i, j: table[i // 16, j // 16]}
    weights = (oracle.weights(q[:, :, :32], k, **seen), oracle.same_dtype_weights(q[:, :, :32], k, **seen))
    judged("listed_sums", aux.listed_sums, weights, lambda w: listed(blocks(w.probabilities, (16, 16), "sum"), indices))


def test_packed_sequences_as_one_row() -> None:
    """What the packed functions say when they refuse: sums are those of each sequence alone."""
    ends = torch.tensor([0, 30, 30, 64, 65, 90])
    q, k, v = (torch.randn(90, h, 16, generator=torch.Generator().manual_seed(h)) for h in (4, 2, 2))
    as_row = [t.transpose(0, 1)[None] for t in (q, k, v)]
    mask = anyattn.masks.document_from_cu_seqlens(ends) & anyattn.masks.causal()
    aux = anyattn.flex_attention(*as_row, mask_mod=mask, enable_gqa=True, return_aux=AuxRequest(key_sums=True))[1]
    for first, last in itertools.pairwise(ends.tolist()):
        one = [t[:, :, first:last] for t in as_row[:2]]
        weights = tuple(f(*one, mask=anyattn.masks.causal()) for f in (oracle.weights, oracle.same_dtype_weights))
        judged("key_sums", aux.key_sums[:, :, first:last], weights, lambda w: w.probabilities.sum(2))


def test_only_what_is_asked_for() -> None:
    path = PATHS["causal"]
    aux = called(path, AuxRequest(key_sums=True))
    assert [name for name, t in aux._asdict().items() if t is not None] == ["key_sums"]
    assert called(path, AuxRequest()) == (None, None)
    lse = called(path, AuxRequest(lse=True, block_max=(16, 16))).lse
    assert torch.equal(lse, called(path, AuxRequest(lse=True)).lse)


@pytest.mark.parametrize("shapes", [(0, 2, 2, 8, 8, 16), (1, 2, 2, 0, 8, 16), (1, 2, 2, 8, 0, 16)], ids=str)
def test_empty_calls(shapes: tuple[int, ...]) -> None:
    b, h, _, sq, sk, _ = shapes
    indices = torch.zeros((b, 1, ceil_div(sq, 4), 2), dtype=torch.int32)
    aux = called(Path(shapes), AuxRequest(key_sums=True, block_sums=(4, 4), block_max=(4, 4), listed_sums=(indices, (4, 4))))
    assert aux.key_sums.shape == (b, h, sk) and not aux.key_sums.any()
    assert aux.block_sums.shape == aux.block_max.shape == (b, h, ceil_div(sq, 4), ceil_div(sk, 4))
    assert aux.listed_sums.shape == indices.shape and not aux.listed_sums.any()


def test_sums_have_no_gradients_and_leave_those_of_the_call() -> None:
    path = PATHS["score"]
    grads = []
    for request in (AuxRequest(lse=True), AuxRequest(lse=True, key_sums=True, block_max=(16, 16))):
        of = operands(path)
        q, k, v = (t.requires_grad_() for t in of[:3])
        out, aux = anyattn.flex_attention(q, k, v, path.score, mask_mod=path.mask, enable_gqa=True, return_aux=request)
        assert not any(t.requires_grad for t in aux[2:] if t is not None) and aux.lse.requires_grad
        (out.sum() + aux.lse.sum()).backward()
        grads.append([t.grad for t in (q, k, v)])
    assert all(map(torch.equal, *grads))


def test_dropout_does_not_change_the_sums() -> None:
    path = PATHS["causal"]
    q, k, v, sink = operands(path)
    aux = anyattn.flex_attention(
        q, k, v, mask_mod=path.mask, enable_gqa=True, sink=sink, dropout_p=0.5, return_aux=AuxRequest(key_sums=True)
    )[1]  # fmt: skip
    judged("key_sums", aux.key_sums, dense(path), lambda w: w.probabilities.sum(2))


def test_blocks_that_divide_no_tile_are_refused_by_triton_where_parts_take_much_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    request = AuxRequest(block_sums=(32, 16))
    if BACKEND == "triton":
        sums = called(PATHS["odd lists"], request).block_sums
        judged("block_sums", sums, dense(PATHS["odd lists"]), lambda w: blocks(w.probabilities, (32, 16), "sum"))
        monkeypatch.setattr("anyattn.backends.triton.reductions._MOST_BYTES", 2**10)
        with pytest.raises(anyattn.BackendError, match=r"block of 32 queries and 16 keys .* lists of 31 x 40.* 64 x 64"):
            called(PATHS["odd lists"], request)
    judged(
        "block_sums", called(PATHS["odd lists"], AuxRequest(block_sums=(1, 40))).block_sums, dense(PATHS["odd lists"]),
        lambda w: blocks(w.probabilities, (1, 40), "sum"),
    )  # fmt: skip


WRONG: dict[str, tuple[Any, type[Exception], list[str]]] = {
    "key_sums of 3": ({"key_sums": 3}, TypeError, ["key_sums", "int"]),
    "block of one": ({"block_max": 16}, ValueError, ["block_max", "16", "pair"]),
    "block of 0": ({"block_sums": (0, 16)}, ValueError, ["block_sums", "(0, 16)", "positive"]),
    "block of 0 keys": ({"block_sums": 0}, ValueError, ["block_sums", "0", "positive"]),
    "last of 0": ({"key_sums": True, "last_queries": 0}, ValueError, ["last_queries", "0"]),
    "last without sums": ({"block_max": (4, 4), "last_queries": 3}, ValueError, ["last_queries", "key_sums"]),
    "no pair": ({"listed_sums": torch.zeros(1)}, TypeError, ["listed_sums", "indices"]),
    "float indices": ({"listed_sums": (torch.zeros(2, 1, 40, 1), (1, 16))}, TypeError, ["float32", "int32"]),
    "rows of indices": ({"listed_sums": (torch.zeros(2, 1, 3, 1).int(), (1, 16))}, ValueError, ["(2, 1, 3, 1)", "40"]),
    "heads of indices": ({"listed_sums": (torch.zeros(2, 3, 40, 1).int(), (1, 16))}, ValueError, ["(2, 3, 40, 1)", "4, 2, 1"]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_requests_are_named(name: str) -> None:
    fields, error, words = WRONG[name]
    with pytest.raises(error) as caught:
        called(PATHS["causal"], AuxRequest(**fields))
    assert all(word in str(caught.value) for word in words), caught.value
