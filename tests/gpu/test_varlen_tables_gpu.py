"""On a Hopper GPU: the kernel that makes a ragged batch's tables against the torch operations that are its reference."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch

import anyattn
from anyattn import masks
from anyattn.arithmetic import ceil_div
from anyattn.backends.hopper import tables
from anyattn.backends.hopper.config import Config, Tiles
from anyattn.backends.hopper.tables_config import MOST_ENTRIES, THREADS
from anyattn.mods.analysis.row_ranges import row_ranges
from anyattn.mods.tracing.trace import trace
from anyattn.sequences.tile_order import longest_first, of_all_heads
from anyattn.sequences.unread_varlen import LengthTables, StoredSequences, StoredSizes
from anyattn.sequences.varlen_tables import entries_table

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) and importlib.util.find_spec("cutlass") is not None
pytestmark = pytest.mark.gpu
if not HAS_HOPPER:
    pytest.skip("needs a Hopper GPU and nvidia-cutlass-dsl", allow_module_level=True)

TILE = 128
CAUSAL = row_ranges(trace(masks.causal(), "mask"))
assert CAUSAL is not None
KERNELS = [Config(64, 64, True, Tiles(TILE, 128, 2), bands=bands, has_entries=True, has_order=True) for bands in ((), (CAUSAL.expr,))]


def ends(lengths: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).to("cuda", dtype)


def stored(batch: int, longest: int, kind: str, dtype: torch.dtype) -> StoredSequences:
    generator = torch.Generator().manual_seed(batch)
    of_q, of_k = (torch.randint(0, longest + 1, (batch,), generator=generator) for _ in range(2))
    of_q[torch.rand(batch, generator=generator) < 0.2] = 0
    used_q, used_k = ((n * torch.rand(batch, generator=generator)).long().to("cuda", dtype) for n in (of_q, of_k))
    rows_q, rows_k, device = int(of_q.sum()) + 300, int(of_k.sum()) + 7, torch.device("cuda")
    given = LengthTables(ends(of_q, dtype), ends(of_k, dtype), None, None)
    if kind == "used":
        given = given._replace(seqused_q=used_q, seqused_k=used_k)
    if kind == "padded":
        given, rows_q, rows_k = LengthTables(None, None, used_q, used_k), longest, longest
    return StoredSequences(given, StoredSizes(batch, rows_q, rows_k, min(longest, rows_q), min(longest, rows_k)), device=device)


def prepared(s: StoredSequences, ends_with_row: bool, heads: int = 3) -> tuple[torch.Tensor, ...]:
    storage = 1 if s.tables.cu_seqlens_q is not None else s.batch
    most = min(s.batch * ceil_div(s.sizes.rows_q, TILE), storage * s.sizes.rows_q // TILE + s.batch)
    out = torch.full((storage, heads, s.sizes.rows_q, 64), math.nan, dtype=torch.bfloat16, device="cuda")
    lse = torch.full(out.shape[:3], math.nan, device="cuda")
    return *tables._prepared(s, KERNELS[ends_with_row], most, (out, lse, None), out.device), out, lse


@pytest.mark.parametrize("ends_with_row", [False, True])
@pytest.mark.parametrize("kind,dtype", [("packed", torch.int32), ("used", torch.int64), ("padded", torch.int32)])
@pytest.mark.parametrize(
    "batch,longest", [(1, 5000), (3, 300), (64, 2000), (1023, 100), (MOST_ENTRIES[0] + 1, 20), (MOST_ENTRIES[1] + 1, 9)]
)
def test_tables(batch: int, longest: int, kind: str, dtype: torch.dtype, ends_with_row: bool) -> None:
    s = stored(batch, longest, kind, dtype)
    order, entries, out, lse = prepared(s, ends_with_row)
    assert torch.equal(entries, entries_table(s))
    wanted = of_all_heads(longest_first(s, TILE, len(order), ends_with_row=ends_with_row))
    count = int((wanted[:, 0] >= 0).sum())
    assert bool((order[:count, 0] >= 0).all()) and bool((order[count:, 0] == -1).all())
    number = [(t[:count, 2].long() * 2**20 + t[:count, 0]).sort().values for t in (order, wanted)]
    assert torch.equal(*number)
    seqlen_q, seqlen_k = (entries[order[:count, 2].long(), i] for i in (2, 5))
    cost = torch.minimum(seqlen_k, (order[:count, 0] + 1) * TILE + seqlen_k - seqlen_q) if ends_with_row else seqlen_k
    bins = cost.clamp(min=0) // ceil_div(s.bound_k + 1, THREADS)
    if batch <= MOST_ENTRIES[-1]:
        assert bool((bins.diff() <= 0).all())
    used = torch.zeros(out.shape[0], out.shape[2], dtype=torch.bool, device="cuda")
    for row, start, n in zip(s.q_row.tolist(), s.q_start.tolist(), s.seqlens_q.tolist(), strict=True):
        used[row, start : start + n] = True
    gaps = ~used[:, None].expand(lse.shape)
    assert bool((out[gaps] == 0).all()) and bool((lse[gaps] == -math.inf).all())
    assert bool(out[~gaps].isnan().all()) and bool(lse[~gaps].isnan().all())


def test_tables_that_are_wrong_stay_inside_storage() -> None:
    wrong = LengthTables(
        *(torch.tensor(t, device="cuda") for t in ([0, 900, 20, 90000], [-5, 7, 2**31 - 1, 12], [9, -3, 700], [1, 2, 2**40]))
    )
    s = StoredSequences(wrong, StoredSizes(3, 400, 12, 400, 12), device=torch.device("cuda"))
    order, entries, _, _ = prepared(s, True)
    for start, n, rows in ((entries[:, 1], entries[:, 2], 400), (entries[:, 4], entries[:, 5], 12)):
        assert bool(((start >= 0) & (n >= 0) & (start + n <= rows)).all())
    assert bool(((order[:, 0] >= -1) & (order[:, 0] < 4) & (order[:, 2] >= 0) & (order[:, 2] < 3)).all())


@pytest.mark.parametrize("batch,longest", [(7, 700), (300, 60)])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (64, 0)}, {"causal": True, "alibi": True}], ids=str)
@pytest.mark.parametrize("kind", ["packed", "used"])
def test_attention_with_either_tables(kind: str, options: dict, batch: int, longest: int) -> None:  # type: ignore[type-arg]
    """validate=True goes by the reference's tables; the results are the same bits, gaps included."""
    s = stored(batch, longest, kind, torch.int32)
    generator = torch.Generator("cuda").manual_seed(1)
    q, k = (torch.randn(n, 4, 64, generator=generator, device="cuda").bfloat16() for n in (s.sizes.rows_q, s.sizes.rows_k - 7))
    options = {n: x for n, x in options.items() if n != "alibi"} | (
        {"alibi_slopes": anyattn.scores.alibi_slopes(4).cuda()} if "alibi" in options else {}
    )
    q = q[: int(s.tables.cu_seqlens_q[-1])]  # type: ignore[index]
    given = dict(zip(LengthTables._fields, s.tables, strict=True)) | {"return_lse": True, "backend": "hopper"}
    given |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
    poison = torch.full_like(q, math.nan)  # what fresh memory may hold
    del poison
    found = anyattn.flash_attn_varlen_func(q, k, k, **given, **options)
    wanted = anyattn.flash_attn_varlen_func(q, k, k, **given, **options, validate=True)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
