"""``flash_attn_varlen_func``: every option in every form of storage against the oracle; what must be exact; what must be refused.

Whatever row belongs to no sequence holds NaN, the incoming gradient's too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn import flash_attn_varlen_func
from tests.support import flash_calls as calls
from tests.support import flash_reference as reference
from tests.support.covering import few
from tests.support.flash_calls import RECIPES, Ragged

LENGTHS = ([5, 0, 17, 64, 1, 33, 0, 40], [5, 3, 0, 50, 70, 33, 0, 16])
DTYPES = (torch.bfloat16, torch.float64, torch.float16)


class Stored:
    """A batch in one form of storage: qkv, dout and dlse as the door takes and gives them, and the arguments that say where rows are."""

    def __init__(self, qkv: tuple[Tensor, ...], dout: Tensor, dlse: Tensor, where: dict[str, Any]) -> None:
        self.qkv, self.dout, self.dlse, self.where = qkv, dout, dlse, where

    def sequences(self) -> list[reference.One]:
        named = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "page_table")
        return reference.packed(*self.qkv, **{n: v for n, v in self.where.items() if n in named})

    def call(self, tensors: dict[str, Tensor], options: dict[str, Any], backward: bool = True, with_lse: bool = True) -> dict[str, Tensor]:
        dout, dlse = (self.dout, self.dlse if with_lse else None) if backward else (None, None)
        return calls.call(flash_attn_varlen_func, self.qkv, tensors, {**self.where, **options}, dout, dlse, with_lse)


def _queries(made: Ragged, rows: Callable[[list[Tensor]], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    return rows(made.q), rows(made.dout), rows(made.dlse).transpose(-1, -2)


def packed(made: Ragged, int_type: torch.dtype = torch.int32, tail: int = 0, more_ends: int = 0) -> Stored:
    """Rows one after the other. tail: rows of garbage behind; more_ends: empty sequences at the end of cu_seqlens."""
    q, dout, dlse = _queries(made, lambda parts: calls.in_a_row(parts, tail=tail))
    k, v = (calls.in_a_row(p, tail=2 * tail) for p in (made.k, made.v))
    lengths = ([*n, *[0] * more_ends] for n in made.lengths)
    where = {f"cu_seqlens_{x}": calls.ends(n, int_type) for x, n in zip("qk", lengths)}
    return Stored((q, k, v), dout, dlse, where)


def partly_used(made: Ragged) -> Stored:
    """Packed, but each sequence has more rows than it uses."""
    n_q, n_k = made.lengths
    room_q, room_k = [n + b % 3 for b, n in enumerate(n_q)], [n + (b + 1) % 4 for b, n in enumerate(n_k)]
    q, dout, dlse = _queries(made, lambda parts: calls.in_a_row(parts, room_q))
    k, v = (calls.in_a_row(p, room_k) for p in (made.k, made.v))
    where = {"cu_seqlens_q": calls.ends(room_q), "cu_seqlens_k": calls.ends(room_k)}
    return Stored((q, k, v), dout, dlse, where | {"seqused_q": torch.tensor(n_q, dtype=torch.int32), "seqused_k": torch.tensor(n_k)})


def padded(made: Ragged) -> Stored:
    """(B, S, H, D) with lengths."""
    n_q, n_k = made.lengths
    q, dout, dlse = _queries(made, lambda parts: calls.side_by_side(parts, max(n_q) + 3))
    k, v = (calls.side_by_side(p, max(n_k) + 1) for p in (made.k, made.v))
    return Stored((q, k, v), dout, dlse, {"seqused_q": torch.tensor(n_q), "seqused_k": torch.tensor(n_k, dtype=torch.int32)})


def packed_q_padded_k(made: Ragged) -> Stored:
    one, other = packed(made), padded(made)
    where = {"cu_seqlens_q": one.where["cu_seqlens_q"], "seqused_k": other.where["seqused_k"]}
    return Stored((one.qkv[0], *other.qkv[1:]), one.dout, one.dlse, where)


def padded_q_packed_k(made: Ragged) -> Stored:
    one, other = padded(made), packed(made)
    where = {"seqused_q": one.where["seqused_q"], "cu_seqlens_k": other.where["cu_seqlens_k"]}
    return Stored((one.qkv[0], *other.qkv[1:]), one.dout, one.dlse, where)


def paged(made: Ragged, page_size: int, seed: int | None = 1, padded_q: bool = False) -> Stored:
    n_k = made.lengths[1]
    table, count = calls.pages_of(len(n_k), -(-max(n_k) // page_size) + 1, seed)
    k, v = (calls.in_pages(p, table, count, page_size) for p in (made.k, made.v))
    table = table.clone()
    for b, n in enumerate(n_k):
        table[b, -(-n // page_size) :] = 10**6 if b % 2 else -1  # entries that are not in use may say anything
    one = padded(made) if padded_q else packed(made)
    queries = {n: one.where[n] for n in ("cu_seqlens_q", "seqused_q") if n in one.where}
    return Stored(
        (one.qkv[0], k, v), one.dout, one.dlse, queries | {"seqused_k": torch.tensor(n_k, dtype=torch.int32), "page_table": table}
    )


FORMS: dict[str, Callable[[Ragged], Stored]] = {
    "packed": packed,
    "packed int64": lambda made: packed(made, torch.int64),
    "tail": lambda made: packed(made, tail=3, more_ends=2),
    "partly used": partly_used,
    "padded": padded,
    "packed q, padded k": packed_q_padded_k,
    "padded q, packed k": padded_q_packed_k,
    "pages of 1": lambda made: paged(made, 1),
    "pages of 3": lambda made: paged(made, 3, padded_q=True),
    "pages of 16": lambda made: paged(made, 16),
    "pages of 64": lambda made: paged(made, 64),
}
SHAPES = [((4, 2), (16, 16)), ((3, 1), (20, 8)), ((4, 1), (33, 40)), ((4, 4), (8, 12))]


def judged(
    made: Ragged, stored: Stored, recipe: calls.Recipe, backward: bool = True, with_lse: bool = True, **more: Any
) -> dict[str, Tensor]:
    batch = len(stored.sequences())
    tensors = recipe.draw(made.q[0].shape[1], batch, made.longest, made.q[0].dtype)
    got = stored.call(tensors, recipe.options(tensors) | more, backward, with_lse)
    dout, dlse = (stored.dout, stored.dlse if with_lse else None) if backward else (None, None)
    reference.judge(stored.sequences(), got, recipe.options, tensors, dout, dlse)
    return got


# every option packed and in one more form in turn, every form with five options; the dtype rotates
MATRIX = [(name, form, (i + j) % 5, SHAPES[(i + j) % 4]) for i, name in enumerate(RECIPES) for j, form in enumerate(
    ("packed", list(FORMS)[1 + i % (len(FORMS) - 1)]))]  # fmt: skip
MATRIX += [(name, form, (i + j) % 5, SHAPES[(i + j + 1) % 4]) for j, form in enumerate(FORMS) for i, name in enumerate(
    ("causal", "everything", "gate_entry_row"))]  # fmt: skip


@pytest.mark.covering(1)
@pytest.mark.parametrize(("name", "form", "turn", "shape"), dict.fromkeys(MATRIX), ids=str)
def test_options(name, form, turn, shape):
    dtype = (torch.float32, torch.float32, *DTYPES)[turn]
    made = calls.ragged(*LENGTHS, *shape, dtype, ("normal", "peaky", "coded")[turn % 3], seed=turn)
    judged(made, FORMS[form](made), RECIPES[name], with_lse=turn != 1)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", few(["packed", "partly used", "pages of 16"], "partly used", "pages of 16"))
def test_long(form, dtype):
    """Above 512 rows and 1,024 keys other ways are taken, and in 16 bits others where LSE is not asked for."""
    made = calls.ragged([1100, 3, 700], [1100, 1400, 30], (2, 1), dtype=dtype)
    for name in ("full", "causal", "window"):
        judged(made, FORMS[form](made), RECIPES[name], with_lse=dtype is torch.float32)


@pytest.mark.covering(2)
@pytest.mark.parametrize("lengths", [([0], [0]), ([0, 0], [3, 0]), ([4, 0], [0, 0]), ([0, 1, 0], [0, 1, 0])], ids=str)
@pytest.mark.parametrize("form", ["packed", "padded", "partly used", "pages of 3"])
@pytest.mark.parametrize("name", ["causal", "everything"])
def test_empty(name, form, lengths):
    made = calls.ragged(*lengths)
    judged(made, FORMS[form](made), RECIPES[name])


def test_no_sequences():
    q, k = torch.randn(0, 4, 8, requires_grad=True), torch.randn(0, 2, 8)
    nothing = torch.zeros(1, dtype=torch.int32)
    out, lse = flash_attn_varlen_func(q, k, k, cu_seqlens_q=nothing, cu_seqlens_k=nothing, max_seqlen_q=0, return_lse=True, causal=True)
    assert out.shape == (0, 4, 8) and lse.shape == (4, 0)
    out.sum().backward()


@pytest.mark.parametrize("most", [64, 70, 100])
def test_max_seqlen(most):
    """An int or a tensor of no dimensions, the very length or more; it changes nothing."""
    made = calls.ragged(*LENGTHS)
    stored = packed(made)
    want = stored.call({}, {"causal": True})
    for kind in (int, torch.tensor, lambda n: torch.tensor(n, dtype=torch.int32)):
        got = stored.call({}, {"causal": True, "max_seqlen_q": kind(most), "max_seqlen_k": kind(max(most, 70))})
        assert all(calls.same_bits(want[n], got[n]) for n in want)


@pytest.mark.covering(2)
@pytest.mark.parametrize("tile", [(16, 8), (32, 64)])
@pytest.mark.parametrize("layout", ["flat", "padded"])
@pytest.mark.parametrize("heads", [None, 4])
def test_block_lists(tile, layout, heads):
    mask = (lambda b, h, i, j: (i >= j) & (i - j < 12 + 5 * h)) if heads else (lambda b, h, i, j: (i >= j) & (i - j < 12 + b))
    made = calls.ragged(*LENGTHS, dims=(16, 8))
    stored = packed(made)
    lists = anyattn.compute_varlen_block_sparsity(*tile, heads, mask, **stored.where, layout=layout)
    for more in ({}, {"causal": True, "window_size": (7, 1), "softcap": 3.0}):
        judged(made, stored, calls.Recipe(lambda t, more=more: {"mask_mod": mask, **more}), block_sparse_tensors=lists)


def test_shared_pages():
    """Two sequences that begin with the same pages: their keys' gradients add up."""
    made = calls.ragged([7, 20, 9], [20, 24, 3])
    made.k[1][:16], made.v[1][:16] = made.k[0][:16], made.v[0][:16]
    stored = paged(made, 8)
    stored.where["page_table"][1, :2] = stored.where["page_table"][0, :2]
    for name in ("full", "causal", "bias_entry"):
        judged(made, stored, RECIPES[name])


@pytest.mark.parametrize("name", ["bias_key", "bias_row", "bias_entry", "gate_entry_row", "distance", "alibi_by_entry", "sink", "aux"])
def test_captured_gradients_are_sums_of_the_sequences(name):
    """What all sequences read gets the sum of the gradients that each on its own would give, by the oracle and by the other door."""
    made = calls.ragged(*LENGTHS)
    recipe = RECIPES[name]
    got = judged(made, packed(made), recipe)
    tensors = recipe.draw(4, len(made.q), made.longest, torch.float32)
    for each in tensors:
        assert got["dsink" if each == "sink" else each].abs().sum() > 0


# ---- exact


def _of(stored: Stored, got: dict[str, Tensor], b: int) -> dict[str, Tensor]:
    """Sequence b's rows of every result."""
    one = stored.sequences()[b]
    return {n: (t.transpose(-1, -2) if n == "lse" else t)[one.k_at if n in ("dk", "dv") else one.q_at] for n, t in got.items()}


EXACT = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (9, 2)},
    "softcap": {"softcap": 2.0},
    "splits": {"num_splits": 3},
    "mask": {"mask_mod": lambda b, h, i, j: (i * 3 + j * 5 + h) % 4 != 0},
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", EXACT)
def test_packed_is_each_sequence_on_its_own(name, dtype):
    """Bit for bit at these lengths; above the planner's tile sizes the tiles, and so the order of sums, depend on the longest sequence."""
    made = calls.ragged(*LENGTHS, dtype=dtype)
    stored = packed(made)
    got = stored.call({}, EXACT[name])
    for b in range(len(made.q)):
        q, k, v, dout = (x[b][None] for x in (made.q, made.k, made.v, made.dout))
        alone = calls.call(anyattn.flash_attn_func, (q, k, v), {}, EXACT[name], dout, made.dlse[b].transpose(0, 1)[None])
        mine = _of(stored, got, b)
        for n, t in alone.items():
            assert calls.same_bits(mine[n], (t.transpose(1, 2) if n == "lse" else t)[0]), (name, b, n)


@pytest.mark.parametrize("name", EXACT)
def test_every_form_gives_the_same_bits(name):
    made = calls.ragged(*LENGTHS)
    want = packed(made)
    found = want.call({}, EXACT[name])
    for form, store in FORMS.items():
        stored = store(made)
        got = stored.call({}, EXACT[name])
        for b in range(len(made.q)):
            one, other = _of(want, found, b), _of(stored, got, b)
            assert all(calls.same_bits(one[n], other[n]) for n in one), (form, b)


@pytest.mark.covering(1)
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shuffled_pages_are_pages_in_order(page_size, dtype):
    made = calls.ragged(*LENGTHS, dtype=dtype)
    for options in EXACT.values():
        one, other = (stored.call({}, options) for stored in (paged(made, page_size, None), paged(made, page_size, 5)))
        assert (
            calls.same_bits(one["out"], other["out"])
            and calls.same_bits(one["dq"], other["dq"])
            and calls.same_bits(one["lse"], other["lse"])
        )


@pytest.mark.covering(1)
@pytest.mark.parametrize("form", ["packed", "padded", "pages of 16"])
@pytest.mark.parametrize("name", EXACT)
def test_batch_permuted_is_output_permuted(name, form):
    made, order = calls.ragged(*LENGTHS), [3, 0, 6, 5, 2, 7, 4, 1]
    one, other = FORMS[form](made), FORMS[form](made.permuted(order))
    found, permuted = one.call({}, EXACT[name]), other.call({}, EXACT[name])
    for at, b in enumerate(order):
        mine, theirs = _of(one, found, b), _of(other, permuted, at)
        assert all(calls.same_bits(mine[n], theirs[n]) for n in mine), (b, name)


def test_same_call_same_bits():
    made = calls.ragged(*LENGTHS)
    tensors = RECIPES["everything"].draw(4, 8, 70, torch.float32)
    one, other = (packed(made).call(tensors, RECIPES["everything"].options(tensors) | {"deterministic": True}) for _ in range(2))
    assert all(calls.same_bits(one[n], other[n]) for n in one)


def test_nothing_is_written_but_results():
    made = calls.ragged(*LENGTHS)
    for store in FORMS.values():
        stored = store(made)
        before = [t.clone() for t in (*stored.qkv, *(t for t in stored.where.values()))]
        stored.call({}, {"causal": True})
        assert all(calls.same_bits(a, b) for a, b in zip(before, (*stored.qkv, *stored.where.values())))


# ---- refused

CU = torch.tensor([0, 5, 14], dtype=torch.int32)
Q, K, V = torch.randn(14, 4, 8), torch.randn(14, 2, 8), torch.randn(14, 2, 8)
POOL, TABLE = torch.randn(6, 4, 2, 8), torch.tensor([[0, 1, 2], [3, 4, 5]])
USED = torch.tensor([12, 9])


def varlen(q=Q, k=K, v=V, **options):  # type: ignore[no-untyped-def]
    return flash_attn_varlen_func(q, k, v, **{"cu_seqlens_q": CU, "cu_seqlens_k": CU, **options})


def with_pages(**options):  # type: ignore[no-untyped-def]
    paged_options = {"cu_seqlens_k": None, "page_table": TABLE, "seqused_k": USED}
    return varlen(k=POOL, v=POOL, **{**paged_options, **options})


def cu(*listed, dtype=torch.int32):  # type: ignore[no-untyped-def]
    return torch.tensor(listed, dtype=dtype)


def lists_of(*lengths, heads=None):  # type: ignore[no-untyped-def]
    made = calls.ends(lengths)
    return anyattn.compute_varlen_block_sparsity(
        16, 16, heads, lambda b, h, i, j: i >= j + (h if heads else 0), cu_seqlens_q=made, cu_seqlens_k=made
    )


BAD = {
    "cu_seqlens_q falls": (lambda: varlen(cu_seqlens_q=cu(0, 9, 5)), ValueError, r"cu_seqlens_q\[2\]=5.*9"),
    "cu_seqlens_k falls": (lambda: varlen(cu_seqlens_k=cu(0, 9, 5)), ValueError, r"cu_seqlens_k\[2\]=5.*9"),
    "cu_seqlens_k overruns": (lambda: varlen(cu_seqlens_k=cu(0, 9, 15)), ValueError, r"cu_seqlens_k\[2\]=15.*14"),
    "cu_seqlens_q does not begin at 0": (lambda: varlen(cu_seqlens_q=cu(1, 9, 14)), ValueError, r"cu_seqlens_q\[0\]=1.*0"),
    "cu_seqlens_q negative": (lambda: varlen(cu_seqlens_q=cu(0, -3, 14)), ValueError, r"cu_seqlens_q\[1\]=-3"),
    "cu_seqlens_q ends early": (lambda: varlen(cu_seqlens_q=cu(0, 5, 13), validate=True), ValueError, r"cu_seqlens_q\[2\]=13.*14"),
    "cu_seqlens_q a list": (lambda: varlen(cu_seqlens_q=[0, 5, 14]), TypeError, r"cu_seqlens_q.*list.*tensor"),
    "cu_seqlens_q of floats": (lambda: varlen(cu_seqlens_q=CU.float()), TypeError, r"cu_seqlens_q.*float32.*int32"),
    "cu_seqlens_q of rank 2": (lambda: varlen(cu_seqlens_q=CU[None]), ValueError, r"cu_seqlens_q.*\(1, 3\)"),
    "cu_seqlens_q empty": (lambda: varlen(cu_seqlens_q=CU[:0]), ValueError, r"cu_seqlens_q.*empty"),
    "cu_seqlens of two batches": (lambda: varlen(cu_seqlens_k=cu(0, 5, 9, 14)), ValueError, r"cu_seqlens_k.*3.*cu_seqlens_q.*2"),
    "cu_seqlens elsewhere": (lambda: varlen(cu_seqlens_k=CU.to("meta")), ValueError, r"cu_seqlens_k.*meta.*cpu"),
    "max_seqlen_q too short": (lambda: varlen(max_seqlen_q=8), ValueError, r"max_seqlen_q=8.*9"),
    "max_seqlen_k too short": (lambda: varlen(max_seqlen_k=torch.tensor(3)), ValueError, r"max_seqlen_k=3.*9"),
    "max_seqlen_q a float": (lambda: varlen(max_seqlen_q=9.0), TypeError, r"max_seqlen_q.*float.*int"),
    "max_seqlen_q a vector": (lambda: varlen(max_seqlen_q=torch.tensor([9])), (TypeError, ValueError), r"max_seqlen_q.*"),
    "seqused_q too many": (lambda: varlen(seqused_q=cu(6, 1)), ValueError, r"seqused_q\[0\]=6.*5"),
    "seqused_k too many": (lambda: varlen(seqused_k=cu(1, 10)), ValueError, r"seqused_k\[1\]=10.*9"),
    "seqused_k negative": (lambda: varlen(seqused_k=cu(1, -1)), ValueError, r"seqused_k\[1\]=-1"),
    "seqused_k of another batch": (lambda: varlen(seqused_k=cu(1, 1, 1)), ValueError, r"seqused_k.*3.*2"),
    "seqused_k of floats": (lambda: varlen(seqused_k=torch.ones(2)), TypeError, r"seqused_k.*float32.*int32"),
    "seqused_q past padded rows": (
        lambda: flash_attn_varlen_func(Q[None], K[None], V[None], seqused_q=cu(15)), ValueError, r"seqused_q\[0\]=15.*14"),
    "q padded": (lambda: varlen(q=Q[None]), ValueError, r"^q .*\(1, 14, 4, 8\).*3 dim"),
    "q packed without ends": (lambda: varlen(cu_seqlens_q=None), ValueError, r"^q .*\(14, 4, 8\).*4 dim"),
    "k packed without ends": (lambda: varlen(cu_seqlens_k=None), ValueError, r"^k .*\(14, 2, 8\).*4 dim"),
    "v of other rows": (lambda: varlen(v=V[:9]), ValueError, r"^v .*9.*14"),
    "k of another batch": (lambda: varlen(k=K[None], v=V[None], cu_seqlens_k=None), ValueError, r"^k .*1.*2"),
    "page outside the pool": (lambda: with_pages(page_table=cu(0, 1, 6, 3, 4, 5).view(2, 3)), ValueError, r"page_table\[0, 2\]=6.*6 pages"),
    "page negative": (lambda: with_pages(page_table=cu(0, 1, 2, -3, 4, 5).view(2, 3)), ValueError, r"page_table\[1, 0\]=-3"),
    "pages and no lengths": (lambda: with_pages(seqused_k=None), ValueError, r"seqused_k.*page_table"),
    "pages and ends of another batch": (lambda: with_pages(cu_seqlens_k=CU[:2]), ValueError, r"cu_seqlens_k.*1.*seqused_k.*2"),
    "pages too few": (lambda: with_pages(seqused_k=cu(13, 1)), ValueError, r"seqused_k\[0\]=13.*12"),
    "page table of another batch": (lambda: with_pages(page_table=TABLE[:1]), ValueError, r"page_table.*1.*2"),
    "page table of floats": (lambda: with_pages(page_table=TABLE.float()), TypeError, r"page_table.*float32"),
    "page table of rank 1": (lambda: with_pages(page_table=TABLE[0]), ValueError, r"page_table.*\(3,\)"),
    "page table a list": (lambda: with_pages(page_table=TABLE.tolist()), TypeError, r"page_table.*list"),
    "slopes of another batch": (lambda: varlen(alibi_slopes=torch.ones(3, 4)), ValueError, r"alibi_slopes.*\(3, 4\).*\(2, 4\)"),
    "table of rows too short": (lambda: varlen(score_mod=lambda s, b, h, i, j: s + SHORT[i]), (IndexError, ValueError), r"score_mod.*8"),
    "table of entries": (lambda: varlen(score_mod=lambda s, b, h, i, j: s + SHORT[b + 7]), (IndexError, ValueError), r"score_mod"),
    "block lists, lengths": (lambda: varlen(block_sparse_tensors=lists_of(9, 5)), ValueError, r"block_sparse_tensors.*9, 5.*5, 9"),
    "block lists, batch": (lambda: varlen(block_sparse_tensors=lists_of(5, 9, 1)), ValueError, r"block_sparse_tensors"),
    "block lists, heads": (lambda: varlen(block_sparse_tensors=lists_of(5, 9, heads=3)), ValueError, r"block_sparse_tensors.*3 heads"),
    "dense block lists": (
        lambda: varlen(block_sparse_tensors=anyattn.compute_block_sparsity(16, 16, 2, 1, 9, 9, lambda b, h, i, j: i >= j, device="cpu")),
        TypeError, r"block_sparse_tensors.*VarlenBlockSparseTensors"),
}  # fmt: skip
SHORT = torch.arange(8.0)


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    bad, error, words = BAD[name]
    with pytest.raises(error, match=words):
        bad()


@pytest.mark.parametrize("validate", [None, False])
def test_rows_behind_the_last_sequence_are_legal_unless_validated(validate):
    out, lse = varlen(cu_seqlens_q=cu(0, 5, 13), cu_seqlens_k=cu(0, 5, 13), validate=validate, return_lse=True)
    assert not out[13:].any() and torch.isneginf(lse[:, 13:]).all() and torch.isfinite(out).all()


def test_a_page_table_changed_before_the_backward():
    """Other tensors that say where rows are may change in between: they were copied, or read. Torch's own way, an error, would do too."""
    made = calls.ragged([5, 17], [5, 17])
    stored = paged(made, 4)
    leaves = [t.clone().requires_grad_() for t in stored.qkv]
    where = {n: t.long().clamp(0) for n, t in stored.where.items()}
    out = flash_attn_varlen_func(*leaves, **where, causal=True)
    before = torch.autograd.grad(out, leaves, stored.dout, retain_graph=True)
    for t in where.values():
        t.copy_(t.flip(-1))
    try:
        after = torch.autograd.grad(out, leaves, stored.dout)
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        assert all(calls.same_bits(a, b) for a, b in zip(before, after))
