"""``flash_attn_func`` and ``flash_attn_varlen_func`` against the oracle, forward and backward, in every form of storage."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import anyattn
from anyattn import oracle
from anyattn.testing import budget
from anyattn.testing.rounding import Noise, rounding
from anyattn.validate import sequences
from tests.support import poison
from tests.support import sequences as seq
from tests.support.covering import few
from tests.support.sequences import Meaning

TABLE = torch.linspace(-1.5, 1.5, 4 * 70, dtype=torch.float64).view(4, 70)
PER_ENTRY = torch.linspace(-1, 1, 7, dtype=torch.float64)
SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])

MEANINGS = {
    "full": lambda: Meaning(),
    "causal": lambda: Meaning(causal=True),
    "window": lambda: Meaning(window_size=(9, 2)),
    "causal window": lambda: Meaning(causal=True, window_size=(5, 5)),
    "left only": lambda: Meaning(window_size=(4, None)),
    "shifted band": lambda: Meaning(window_size=(11, -3)),
    "empty band": lambda: Meaning(window_size=(2, -4)),
    "softcap": lambda: Meaning(causal=True, softcap=2.0),
    "alibi": lambda: Meaning(alibi_slopes=SLOPES),
    "alibi per entry": lambda: Meaning(causal=True, alibi_slopes=torch.stack([SLOPES / (b + 1) for b in (1, 3, 1, 7, 1, 3, 0)])),
    "sink": lambda: Meaning(causal=True, sink=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "bias by head and row": lambda: Meaning(score_mod=lambda s, b, h, i, j: s + TABLE[h, i], captured=[TABLE]),
    "bias by entry and key": lambda: Meaning(score_mod=lambda s, b, h, i, j: s + PER_ENTRY[b] * (j % 5), captured=[PER_ENTRY]),
    "mask by entry": lambda: Meaning(mask_mod=lambda b, h, i, j: (i * 3 + j * 5 + b + h) % 4 != 0),
    "everything": lambda: Meaning(
        causal=True,
        window_size=(30, 0),
        softcap=5.0,
        alibi_slopes=SLOPES,
        sink=torch.tensor([0.5, -1.0, 2.0, 0.0]),
        score_mod=lambda s, b, h, i, j: s * 0.75 + TABLE[h, i],
        mask_mod=lambda b, h, i, j: (i + j + b) % 5 != 0,
        captured=[TABLE],
    ),
}
LENGTHS = ([5, 0, 17, 64, 1, 33, 0], [5, 3, 0, 50, 70, 33, 0])


def results(batch, meaning, call, **options):  # type: ignore[no-untyped-def]
    """out, lse and the gradients of a door: ``call`` turns leaves into ((out, lse) as lists of sequences, leaves as lists)."""
    leaves = [[t.clone().requires_grad_() for t in part] for part in (batch.q, batch.k, batch.v)]
    sink = None if meaning.sink is None else meaning.sink.clone().requires_grad_()
    for t in meaning.captured:
        t.requires_grad_().grad = None
    with poison.enabled():
        outs, lses = call(*leaves, **{**meaning.options(), "sink": sink, **options})
        loss = sum((o.double() * d.double()).sum() for o, d in zip(outs, batch.dout))
        wanted = [t for part in leaves for t in part] + ([sink] if sink is not None else []) + meaning.captured
        grads = list(torch.autograd.grad(loss, wanted, allow_unused=True))
    count = len(batch.q)
    zeros = [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, grads)]
    got = {"out": outs, "dq": zeros[:count], "dk": zeros[count : 2 * count], "dv": zeros[2 * count : 3 * count]}
    if lses is not None:
        got["lse"] = lses
    rest = zeros[3 * count :]
    shared = {"dsink": rest.pop(0)} if sink is not None else {}
    return {n: [t.detach() for t in v] for n, v in got.items()}, shared | {f"captured{i}": g for i, g in enumerate(rest)}


def packed_call(q, k, v, return_lse=True, int_type=torch.int32, **options):  # type: ignore[no-untyped-def]
    lengths_q, lengths_k = ([t.shape[1] for t in part] for part in (q, k))
    found = anyattn.flash_attn_varlen_func(
        *map(seq.packed, (q, k, v)),
        cu_seqlens_q=seq.ends(lengths_q, int_type),
        cu_seqlens_k=seq.ends(lengths_k, int_type),
        return_lse=return_lse,
        **options,
    )
    out, lse = found if return_lse else (found, None)
    return seq.unpacked(out, lengths_q), None if lse is None else list(lse.split(lengths_q, 1))


@pytest.mark.parametrize("name", MEANINGS)
def test_packed(name: str) -> None:
    meaning = MEANINGS[name]()
    batch = seq.ragged(*LENGTHS, dv=8)
    for return_lse in (True, False):
        got, shared = results(batch, meaning, packed_call, return_lse=return_lse)
        seq.judge(got, batch, meaning, shared=shared, label=name)


@pytest.fixture
def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are believed unseen, as on a GPU."""
    monkeypatch.setattr(sequences, "skips_device_reads", lambda device, validate: validate is not True)


@pytest.mark.parametrize(
    "name", few(MEANINGS, "causal", "left only", "shifted band", "empty band", "alibi per entry", "sink", "mask by entry", "everything")
)
def test_packed_with_tables_that_nobody_looked_at(name: str, unread: None) -> None:
    meaning = MEANINGS[name]()
    batch = seq.ragged(*LENGTHS, dv=8)
    got, shared = results(batch, meaning, packed_call)
    seq.judge(got, batch, meaning, shared=shared, label=name)
    assert all(torch.equal(a, b) for a, b in zip(*(results(batch, meaning, packed_call, **o)[0]["out"] for o in ({}, {"validate": True}))))


def test_tables_may_change_before_the_backward_pass(unread: None) -> None:
    q, k, v = torch.randn(3, 90, 4, 16)
    found = []
    for later in ([0, 50, 90], [0, 1, 90]):
        cu_q, cu_k = torch.tensor([0, 50, 90]), torch.tensor([0, 20, 90])
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out = anyattn.flash_attn_varlen_func(*leaves, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True)
        cu_q.copy_(torch.tensor(later))
        found.append(torch.autograd.grad(out.square().sum(), leaves))
    assert all(torch.equal(a, b) for a, b in zip(*found))


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["causal", "window", "softcap", "bias by head and row", "mask by entry", "everything"])
def test_packed_dtypes(name: str, dtype: torch.dtype) -> None:
    meaning = MEANINGS[name]()
    batch = seq.ragged(*LENGTHS, dtype=dtype)
    for return_lse in (True, False):
        got, shared = results(batch, meaning, packed_call, return_lse=return_lse, int_type=torch.int64)
        seq.judge(got, batch, meaning, shared=shared, label=name)


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", ["peaky", "coded"])
@pytest.mark.parametrize("heads,kv_heads,d,dv", [(4, 4, 64, 64), (4, 1, 20, 33), (6, 2, 1, 40), (12, 1, 128, 8)])
def test_shapes(kind: str, heads: int, kv_heads: int, d: int, dv: int) -> None:
    meaning = Meaning(causal=True, window_size=(40, 0))
    batch = seq.ragged([130, 3, 260], [100, 40, 300], heads, kv_heads, d, dv, kind=kind)
    got, _ = results(batch, meaning, packed_call)
    seq.judge(got, batch, meaning)


def test_packed_is_each_sequence_on_its_own_to_the_bit() -> None:
    batch = seq.ragged(*LENGTHS)
    for name in ("full", "causal", "window", "alibi", "sink"):
        meaning = MEANINGS[name]()
        got, _ = results(batch, meaning, packed_call)
        for b, (q, k, v, dout) in enumerate(zip(batch.q, batch.k, batch.v, batch.dout)):
            leaves = [t.transpose(0, 1)[None].clone().requires_grad_() for t in (q, k, v)]
            out, lse = anyattn.flash_attn_func(*leaves, return_lse=True, **meaning.options())
            grads = torch.autograd.grad(out, leaves, dout.transpose(0, 1)[None])
            for what, one in zip(("out", "dq", "dk", "dv"), (out, *grads)):
                assert torch.equal(got[what][b], one[0].transpose(0, 1)), (name, b, what)
            assert torch.equal(got["lse"][b], lse[0]), (name, b)


def test_batch_permuted_is_output_permuted_to_the_bit() -> None:
    batch = seq.ragged(*LENGTHS)
    order = [3, 0, 6, 5, 2, 4, 1]
    other = seq.Ragged(*([part[i] for i in order] for part in (batch.q, batch.k, batch.v, batch.dout)))
    for meaning in (Meaning(causal=True), Meaning(window_size=(9, 2), softcap=3.0)):
        one, two = results(batch, meaning, packed_call)[0], results(other, meaning, packed_call)[0]
        for what in one:
            assert all(torch.equal(one[what][i], two[what][at]) for at, i in enumerate(order)), what


def dense_call(q, k, v, **options):  # type: ignore[no-untyped-def]
    out, lse = anyattn.flash_attn_func(*(torch.stack(part).transpose(1, 2) for part in (q, k, v)), return_lse=True, **options)
    return list(out.transpose(1, 2)), list(lse)


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["full", "causal", "window", "empty band", "alibi", "sink", "mask by entry", "everything"])
@pytest.mark.parametrize("lengths", [(20, 33), (33, 20), (1, 40), (65, 65)])
def test_dense(name: str, lengths: tuple[int, int]) -> None:
    meaning = MEANINGS[name]()
    batch = seq.ragged([lengths[0]] * 2, [lengths[1]] * 2, dv=8)
    got, shared = results(batch, meaning, dense_call)
    seq.judge(got, batch, meaning, shared=shared, label=name)


def used_call(q, k, v, **options):  # type: ignore[no-untyped-def]
    """Padded tensors, with NaN in every row that is not in use; results of those rows are checked here."""
    used = [torch.tensor([t.shape[1] for t in part]) for part in (q, k)]
    capacity = [int(u.max()) + 3 for u in used]
    padded = [
        torch.stack([torch.cat([t.transpose(0, 1), t.new_full((c - t.shape[1], t.shape[0], t.shape[2]), seq.NAN)]) for t in part])
        for part, c in zip((q, k, v), (capacity[0], capacity[1], capacity[1]))
    ]
    out, lse = anyattn.flash_attn_varlen_func(*padded, seqused_q=used[0].int(), seqused_k=used[1], return_lse=True, **options)
    for b, n in enumerate(used[0].tolist()):
        assert not out[b, n:].any() and torch.isneginf(lse[b, :, n:]).all()
    return [o[:n].transpose(0, 1) for o, n in zip(out, used[0].tolist())], [x[:, :n] for x, n in zip(lse, used[0].tolist())]


@pytest.mark.parametrize("name", ["full", "causal", "window", "sink", "bias by entry and key", "everything"])
def test_padded_with_garbage_behind(name: str) -> None:
    meaning = MEANINGS[name]()
    batch = seq.ragged(*LENGTHS, dv=8)
    got, shared = results(batch, meaning, used_call)
    seq.judge(got, batch, meaning, shared=shared, label=name)


@pytest.mark.covering(1)
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("name", ["causal", "everything"])
def test_pages(name: str, page_size: int) -> None:
    """Packed queries over shuffled pages, forward and backward: the pool's gradient is that of the keys, 0 where nothing belongs."""
    meaning = MEANINGS[name]()
    batch = seq.ragged(*LENGTHS)
    table, count = seq.shuffled_table(7, 75, page_size, seed=page_size)
    for t in meaning.captured:
        t.requires_grad_()
    q, dout = seq.packed(batch.q).requires_grad_(), seq.packed(batch.dout)
    pools = [seq.paged(part, page_size, table, count).requires_grad_() for part in (batch.k, batch.v)]
    lengths_q, lengths_k = batch.lengths
    options = {"cu_seqlens_q": seq.ends(lengths_q), "seqused_k": torch.tensor(lengths_k), **meaning.options()}
    out, lse = anyattn.flash_attn_varlen_func(q, *pools, page_table=table, return_lse=True, **options)
    dq, dk, dv = torch.autograd.grad(out, [q, *pools], dout)
    got = {"out": seq.unpacked(out.detach(), lengths_q), "lse": list(lse.detach().split(lengths_q, 1)), "dq": seq.unpacked(dq, lengths_q)}
    for what, grad in (("dk", dk), ("dv", dv)):
        flat = grad.flatten(0, 1)
        rows = [[int(table[b, t // page_size]) * page_size + t % page_size for t in range(n)] for b, n in enumerate(lengths_k)]
        got[what] = [flat[r].transpose(0, 1) for r in rows]
        rest = torch.ones(len(flat), dtype=torch.bool)
        rest[[r for per_entry in rows for r in per_entry]] = False
        assert not flat[rest].any()
    seq.judge(got, batch, meaning, label=name)
    in_order = torch.arange(table.numel(), dtype=torch.int32).view_as(table)
    ordered = [seq.paged(part, page_size, in_order, count) for part in (batch.k, batch.v)]
    again = anyattn.flash_attn_varlen_func(q, *ordered, page_table=in_order, **options)
    assert torch.equal(again, anyattn.flash_attn_varlen_func(q, *pools, page_table=table, **options))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_shared_pages(dtype: torch.dtype) -> None:
    """Sequences that begin with the same pages, the second of which ends inside of them: a page's gradient is the sum of all."""
    lengths_q, lengths_k, shared, size = [9, 20, 3, 1], [30, 12, 41, 16], 16, 8
    batch = seq.ragged(lengths_q, lengths_k, 4, 2, 16, 8, dtype=dtype)
    for part in (batch.k, batch.v):
        for t in part[1:]:
            t[:, :shared] = part[0][:, : min(shared, t.shape[1])]
    table, count = seq.shuffled_table(4, 48, size, 1)
    table[1:, :2] = table[0, :2]
    pools = [seq.paged(part, size, table, count).requires_grad_() for part in (batch.k, batch.v)]
    q = seq.packed(batch.q).requires_grad_()
    places = {"cu_seqlens_q": seq.ends(lengths_q), "seqused_k": torch.tensor(lengths_k), "page_table": table}
    out = anyattn.flash_attn_varlen_func(q, *pools, **places, causal=True)
    dq, *found = torch.autograd.grad(out, [q, *pools], seq.packed(batch.dout))
    seq.judge({"out": seq.unpacked(out.detach(), lengths_q), "dq": seq.unpacked(dq, lengths_q)}, batch, Meaning(causal=True))
    for name, pool, grad in zip(("dk", "dv"), pools, found):
        true, plain, noise = (torch.zeros(pool.shape, dtype=torch.float64).flatten(0, 1) for _ in range(3))
        for b, one in enumerate(zip(batch.q, batch.k, batch.v, batch.dout)):
            one = [t[None] for t in one]
            mods = Meaning(causal=True).of(b, lengths_q[b], lengths_k[b], 0)
            mods.pop("sink")
            rows = [int(table[b, t // size]) * size + t % size for t in range(lengths_k[b])]
            parts = oracle.gradients(*one, **mods), oracle.same_dtype_gradients(*one, **mods)
            for total, of in zip((true, plain), parts):
                total[rows] += getattr(of, name)[0].transpose(0, 1).double()
            noise[rows] += getattr(rounding(*one, **mods), name).sigma[0].transpose(0, 1)
        budget.check(name, grad.flatten(0, 1), true, plain.to(dtype), Noise(noise, noise))


def test_rows_behind_the_last_sequence() -> None:
    """A packed tensor that is longer than its sequences, and sequences of length 0 at the end of cu_seqlens."""
    batch = seq.ragged([5, 9], [5, 9])
    tail = torch.full((4, 4, 16), seq.NAN)
    q, k, v = torch.cat([seq.packed(batch.q), tail]), *(torch.cat([seq.packed(p), tail[:, :2]]) for p in (batch.k, batch.v))
    cu = torch.tensor([0, 5, 14, 14, 14], dtype=torch.int32)
    out, lse = anyattn.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=torch.tensor(9), max_seqlen_k=9, causal=True, return_lse=True
    )
    assert not out[14:].any() and torch.isneginf(lse[:, 14:]).all()
    seq.judge({"out": seq.unpacked(out, [5, 9]), "lse": list(lse[:, :14].split([5, 9], 1))}, batch, Meaning(causal=True))
    with pytest.raises(ValueError, match=r"cu_seqlens_q\[4\]=14 ends before the 18 rows"):
        anyattn.flash_attn_varlen_func(q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, validate=True)


def test_nothing_at_all() -> None:
    q = torch.randn(0, 4, 16, requires_grad=True)
    for cu in (torch.tensor([0]), torch.tensor([0, 0, 0])):
        out, lse = anyattn.flash_attn_varlen_func(q, q[:, :2], q[:, :2], cu_seqlens_q=cu, cu_seqlens_k=cu, return_lse=True)
        assert out.shape == (0, 4, 16) and lse.shape == (4, 0)
        out.sum().backward()
    keys = torch.randn(2, 0, 2, 16)
    out, lse = anyattn.flash_attn_func(torch.randn(2, 3, 4, 16), keys, keys, sink=torch.ones(4), return_lse=True)
    assert not out.any() and (lse == 1.0).all()


@pytest.mark.covering(1)
@pytest.mark.parametrize("layout", ["flat", "padded"])
@pytest.mark.parametrize("tile", [(16, 8), (64, 32), (32, 64)])
def test_block_lists(layout: str, tile: tuple[int, int]) -> None:
    mask = lambda b, h, i, j: (i >= j) & (i - j < 12 + b)
    lengths = [5, 0, 70, 64, 1, 33]
    batch = seq.ragged(lengths, lengths)
    cu = seq.ends(lengths)
    lists = anyattn.compute_varlen_block_sparsity(*tile, None, mask, cu_seqlens_q=cu, cu_seqlens_k=cu, layout=layout)
    for meaning in (Meaning(mask_mod=mask), Meaning(mask_mod=mask, causal=True, window_size=(7, 0), softcap=3.0)):
        got, shared = results(batch, meaning, packed_call, block_sparse_tensors=lists)
        seq.judge(got, batch, meaning, shared=shared)
    dense = seq.ragged([70] * 2, [50] * 2)
    lists = anyattn.compute_block_sparsity(*tile, 2, None, 70, 50, mask, device="cpu")
    got, _ = results(dense, Meaning(mask_mod=mask), dense_call, block_sparse_tensors=lists)
    seq.judge(got, dense, Meaning(mask_mod=mask))


def test_aux_tensors() -> None:
    batch = seq.ragged([9, 30], [9, 30])
    bias = torch.randn(2, 30, dtype=torch.float64)
    outs, _ = packed_call(batch.q, batch.k, batch.v, score_mod=lambda s, b, h, i, j, aux: s + aux[0][b, j], aux_tensors=[bias], softcap=2.0)
    seq.judge({"out": outs}, batch, Meaning(score_mod=lambda s, b, h, i, j: s + bias[b, j], softcap=2.0))


def test_a_table_over_the_packed_rows() -> None:
    """What a mod captures may be packed as the batch is: cu[b] + q stays inside though b and q at their greatest together would not."""
    lengths = [9, 30, 2]
    batch = seq.ragged(lengths, lengths)
    cu, table = seq.ends(lengths, torch.int64), torch.randn(41, dtype=torch.float64)
    meaning = Meaning(score_mod=lambda s, b, h, i, j: s + table[cu[b] + i] * table[cu[b] + j], captured=[table])
    got, shared = results(batch, meaning, packed_call)
    seq.judge(got, batch, meaning, shared=shared)
    with pytest.raises(ValueError, match="captured tensor"):
        packed_call(batch.q, batch.k, batch.v, score_mod=lambda s, b, h, i, j: s + table[cu[b] + i + 1])


def test_windows_wider_than_any_integer_of_64_bits() -> None:
    batch = seq.ragged([9, 30], [9, 30])
    for window, meaning in (((2**70, 3), (-1, 3)), ((-(2**70), 3), (-40, 3)), ((3, -(2**70)), (3, -40)), ((2**63, 2**63), (-1, -1))):
        out, _ = packed_call(batch.q, batch.k, batch.v, window_size=window)
        seq.judge({"out": out}, batch, Meaning(window_size=meaning), label=str(window))


EMPTY_ENDED = {  # a table for the last position that exists, and the lengths beyond which nothing of it may be read
    "entry without queries": (3, ([3, 4, 5, 0], [3, 4, 5, 6])),
    "entry without keys": (3, ([3, 4, 5, 6], [3, 4, 5, 0])),
    "entry without both": (3, ([3, 4, 5, 0], [3, 4, 5, 0])),
    "first entry without keys": (10, ([15, 10, 4], [0, 10, 4])),
    "first entry without queries": (10, ([0, 10, 4], [15, 10, 4])),
    "no pair at all": (0, ([3, 0], [0, 5])),
}
OF_TABLES = {
    "bias by entry": lambda t: {"score_mod": lambda s, b, h, i, j: s + t[b]},
    "factor by entry": lambda t: {"score_mod": lambda s, b, h, i, j: s * t[b]},
    "slope by entry": lambda t: {"score_mod": lambda s, b, h, i, j: s + t[b] * (i - j)},
    "bias by entry and key": lambda t: {"score_mod": lambda s, b, h, i, j: s + t[b] * j},
    "bias by row": lambda t: {"score_mod": lambda s, b, h, i, j: s + t[i]},
    "bias by key": lambda t: {"score_mod": lambda s, b, h, i, j: s + t[j]},
    "bias by distance": lambda t: {"score_mod": lambda s, b, h, i, j: s + t[(i - j).abs()]},
    "mask by entry": lambda t: {"mask_mod": lambda b, h, i, j: (t[b] < 2) & (i - j < 3)},
    "mask by row and key": lambda t: {"mask_mod": lambda b, h, i, j: t[i] <= t[j]},
    "mask by parity": lambda t: {"mask_mod": lambda b, h, i, j: (t[i] + b + j) % 2 < 1},
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("mods", OF_TABLES)
@pytest.mark.parametrize("lengths", EMPTY_ENDED)
def test_nothing_is_read_for_a_sequence_without_pairs(lengths: str, mods: str) -> None:
    """A mod is never asked about a sequence without queries or keys, so its tables need not reach there."""
    size, (lengths_q, lengths_k) = EMPTY_ENDED[lengths]
    if size == 3 and ("row" in mods or "key" in mods or "distance" in mods or "parity" in mods):
        size = 5  # these read by position
    table = torch.linspace(0, 1, 20)
    batch = seq.ragged(lengths_q, lengths_k)
    got, _ = results(batch, Meaning(**OF_TABLES[mods](table[:size])), packed_call)
    seq.judge(got, batch, Meaning(**OF_TABLES[mods](table)), label=f"{lengths}, {mods}")


@pytest.mark.parametrize("mods", OF_TABLES)
@pytest.mark.parametrize("lengths", [(2, 0, 5), (2, 5, 0), (0, 5, 5)])
def test_nothing_is_read_for_a_batch_without_pairs(lengths: tuple[int, int, int], mods: str) -> None:
    b, sq, sk = lengths
    q, k, v = torch.randn(b, sq, 4, 8), torch.randn(b, sk, 2, 8), torch.randn(b, sk, 2, 8)
    for splits in (1, 2):
        out, lse = anyattn.flash_attn_func(q, k, v, return_lse=True, num_splits=splits, **OF_TABLES[mods](torch.ones(0)))
        assert not out.any() and bool(torch.isneginf(lse).all())


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("has_sink", [False, True])
def test_whatever_stands_in_rows_that_see_nothing(has_sink: bool, splits: int) -> None:
    """NaN in the q and dout of padding rows reaches no gradient, the sink's neither; dlse of such a row goes to the sink."""
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0]).requires_grad_() if has_sink else None
    mods = {"mask_mod": lambda b, h, i, j: (i >= 6) & ((j + i) % 3 > 0), "sink": sink, "num_splits": splits, "return_lse": True}
    clean = [torch.randn(1, 40, heads, 8) for heads in (4, 2, 2)]
    dout, dlse = torch.randn(1, 40, 4, 8), torch.randn(1, 4, 40) if has_sink else torch.zeros(1, 4, 40)
    found = []
    for filling in (0.0, seq.NAN):
        q, k, v = (t.clone() for t in clean)
        q[:, :6] = dout[:, :6] = filling
        leaves = [t.requires_grad_() for t in (q, k, v)] + ([sink] if sink is not None else [])
        found.append(torch.autograd.grad(anyattn.flash_attn_func(q, k, v, **mods), leaves, [dout.clone(), dlse]))
    assert all(torch.equal(a, b) and bool(a.isfinite().all()) for a, b in zip(*found))


FAR = {
    "rows at -1e9": lambda s, b, h, i, j: torch.where(i >= 3, s, -1e9),
    "all at -1e9": lambda s, b, h, i, j: s * 0 - 1e9,
    "a constant": lambda s, b, h, i, j: s + 30_000.0,
    "a bias by row": lambda s, b, h, i, j: s + 3e6 * i,
    "a slope": lambda s, b, h, i, j: s + 1e5 * (j // 20),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("name", FAR)
def test_gradients_of_scores_far_from_zero(name: str, splits: int) -> None:
    """The log-sum-exp of 50 scores at -1e9 is -1e9 in float32: their number must not be lost on the way back."""
    for sink in (None, torch.tensor([0.5, -1.0, 2.0, 0.0])):
        for dtype in (torch.float32, torch.bfloat16):
            meaning = Meaning(score_mod=FAR[name], sink=sink)
            batch = seq.ragged([8, 3, 70], [50, 200, 7], dtype=dtype)
            got, _ = results(batch, meaning, packed_call, num_splits=splits)
            seq.judge({n: got[n] for n in ("dq", "dk", "dv")}, batch, meaning, label=name)


@pytest.mark.parametrize("heads,kv_heads", [(0, 2), (2, 0), (3, 2), (2, 4)])
def test_heads_that_cannot_share_keys_are_refused(heads: int, kv_heads: int) -> None:
    q, k = torch.randn(1, 5, heads, 8), torch.randn(1, 5, kv_heads, 8)
    with pytest.raises(ValueError, match=f"q has {heads} heads but k has {kv_heads}"):
        anyattn.flash_attn_func(q, k, k)
    assert anyattn.flash_attn_func(q[:, :, :0], k[:, :, :0], k[:, :, :0]).shape == (1, 5, 0, 8)


@pytest.mark.parametrize("name", ["row ranges", "evaluated", "block lists"])
def test_a_mask_whose_table_changes_before_the_backward_pass_is_refused(name: str) -> None:
    """As torch refuses it for its own operations: the gradient would be that of another mask."""
    ids = torch.arange(40) // 10
    mask = {"row ranges": lambda b, h, i, j: ids[i] == ids[j]}.get(name, lambda b, h, i, j: (ids[i] + ids[j]) % 3 != 0)
    lists = anyattn.compute_block_sparsity(16, 16, 1, 1, 40, 40, mask) if name == "block lists" else None
    q = torch.randn(1, 40, 2, 8, requires_grad=True)
    out = anyattn.flash_attn_func(q, q, q, mask_mod=mask, block_sparse_tensors=lists)
    ids.fill_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_tables_may_be_written_behind_torchs_back() -> None:
    """A table that shares NumPy's memory changes without torch counting it; what was found of it before must not be used again."""
    ends = np.array([0, 5, 20], dtype=np.int32)
    cu, q = torch.from_numpy(ends), torch.randn(20, 2, 16)
    once = lambda table: anyattn.flash_attn_varlen_func(q, q, q, cu_seqlens_q=table, cu_seqlens_k=table)
    first = once(cu)
    ends[1] = 12
    assert torch.equal(once(cu), once(cu.clone())) and not torch.equal(once(cu), first)
