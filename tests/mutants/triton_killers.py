"""Small judged calls on the Triton backend, each of which fails under some mutant (``triton_mutants.py``)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

import anyattn
from anyattn import masks, planner
from anyattn.call_cache import attention
from anyattn.validate import sequences as check_lengths
from tests.entry_points import test_8_bit_append as appending
from tests.entry_points import test_8_bit_caches as eight_bits
from tests.entry_points import test_dropout as dropout
from tests.entry_points import test_flash_varlen as varlen
from tests.entry_points import test_reductions as reductions
from tests.entry_points import test_skipping as skipping
from tests.support import batches, cases, flash_reference
from tests.support import eight_bits as quantised
from tests.support import sequences as seq
from tests.support.chosen_blocks import choice, mask_of, table_of
from tests.support.flex_calls import judge, results
from tests.support.sequences import Meaning

SMALL = cases.Shape(1, 4, 2, 35, 43, 16, 16)
LONG = cases.Shape(1, 2, 1, 70, 70, 16, 16)
SINK = torch.tensor([0.5, -1.0, 2.0, 0.0])
INLINE = eight_bits.Setting(k_form="inline", v_form="inline", heads=8, kv_heads=4, d=32, dv=32)


def qkv(*shape: int, kind: str = "normal") -> tuple[torch.Tensor, ...]:
    return cases.inputs(kind, cases.Shape(*shape), torch.float32, 0)[:3]


@functools.cache
def wanted(variant: str, shape: cases.Shape, kind: str) -> tuple[cases.Case, cases.Expected]:
    case = cases.Case(variant, shape, kind)
    return case, cases.expected(case, torch.float32)


def variant(name: str, shape: cases.Shape = SMALL, kind: str = "normal") -> Callable[[], None]:
    def check() -> None:
        case, want = wanted(name, shape, kind)
        forward = want._replace(results={which: want.results[which] for which in ("out", "lse")})
        want.check(results(case, want, forward_is=lambda got: forward.check(got, name)), name)

    return check


def judged(shape: tuple[int, ...], **options: Any) -> Callable[[], None]:
    return lambda: judge(*qkv(*shape), **options) and None


def rising() -> None:
    """Every tile of keys has greater scores than the one before."""
    q, k, v = qkv(1, 2, 1, 20, 70, 16, 16)
    judge(q, k * torch.linspace(0.2, 4, 70)[:, None], v)


def far_sides() -> None:
    """Tiles on both sides of the diagonal in which a clamped distance is a constant, next to tiles in which it just is not."""
    of_row, of_key = (torch.randn(100, 24, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in (1, 2))

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        at = torch.clamp(i - j, -10, 13) + 10
        return s + of_row[i, at] + of_key[j, at]

    for rows, keys in ((89, 83), (80, 100)):
        options = {"score": score, "captured": [of_row, of_key], "kernel_options": {"tile_m": 16, "tile_n": 16}}
        judge(*qkv(1, 1, 1, rows, keys, 16, 16), **options)


def bands() -> None:
    """Tables by row and distance, of queries and of keys, in tiles that are near, far and cut, and by two programs of places."""
    tables = [torch.randn(2, 2, n, 72, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in (100, 83)]

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        at = torch.clamp(i - j, -10, 13) * 3 + 31
        return s + tables[0][b, h, i, at] + 0.5 * tables[1][b, h, j, at]

    from anyattn.backends.triton import distance_bands  # of the backend with the bug

    q, k, v, _ = cases.inputs("normal", cases.Shape(2, 2, 2, 100, 83, 16, 16), torch.bfloat16, 0)
    with mock.patch.multiple(distance_bands, _MOST_BYTES=1 << 30, _MOST_NEAR=1 << 30):
        judge(q, k, v, score=score, captured=tables, kernel_options={"tile_m": 16, "tile_n": 16})


def random_lists(tile: tuple[int, int], sizes: tuple[int, int, int, int], listed: int = 0) -> Callable[[], None]:
    """Random lists, others for each entry and head, or with ``listed`` heads for all; what a partial tile shows has holes that a full one
    does not, and are others in each head."""

    def check() -> None:
        batch, heads, sq, sk = sizes
        each = heads // (listed or heads)
        grid = (batch, heads // each, -(-sq // tile[0]), -(-sk // tile[1]))
        kinds = torch.randint(0, 3, grid, generator=torch.Generator().manual_seed(4))
        kinds[..., -1] = 2  # the sequence's end cuts full tiles
        kinds[0, 0, 0] = 0
        tables = []
        for which in (1, 2):
            at = kinds == which
            tables += [at.sum(-1, dtype=torch.int32), at.int().argsort(dim=-1, descending=True, stable=True).int()]
        shown = lambda b, h, i, j: (i + j + h) % 3 != 0
        made = anyattn.BlockMask.from_kv_blocks(*tables, BLOCK_SIZE=tile, mask_mod=shown, seq_lengths=(sq, sk))

        def meant(b: Any, h: Any, i: Any, j: Any) -> Any:
            kind = kinds[b, h // each, i // tile[0], j // tile[1]]
            return (kind == 2) | ((kind == 1) & shown(b, h, i, j))

        judge(*qkv(batch, heads, 1, sq, sk, 16, 16), mask=meant, block_mask=made)

    return check


def lists_of_kv_heads() -> None:
    """Chosen blocks of each K/V head, which its query heads share."""
    lengths, tile = (48, 64), (16, 16)
    indices = choice((1, 2), lengths, tile, 2)
    block_mask = anyattn.BlockMask.from_topk(indices, BLOCK_SIZE=tile, seq_lengths=lengths)
    judge(*qkv(1, 4, 2, *lengths, 16, 16), mask=mask_of(table_of(indices, 4), tile, 2, lengths), block_mask=block_mask)


def sorted_choices() -> None:
    """Repeated numbers, numbers of no block and numbers behind a count."""
    from anyattn.sparsity.kernels.class_grids import sorted_choice

    indices = torch.tensor([[[[4, 1, 4, -1, 9], [2, 2, 2, 3, 2], [-1, -5, 7, 8, 3]]]])
    counts, tiles = sorted_choice(indices, torch.tensor([[[5, 2, 4]]]), 8, 5)
    assert [row[:n].tolist() for row, n in zip(tiles[0, 0], counts[0, 0].tolist(), strict=True)] == [[1, 4], [2], [7]]


def ranked_lists() -> None:
    """A key tile that the first row tile alone does not see, in a grid of more tiles than a program lists at a time."""
    from anyattn.sparsity.kernels.class_grids import ranked_lists
    from anyattn.sparsity.lists import both_ways

    classes = torch.ones(1, 1, 2, 300, dtype=torch.uint8)
    classes[..., 0, 0], classes[..., 1, 1::2] = 0, 2
    both: Any = both_ways(classes, True)
    counts, tiles, ranks = ranked_lists(both[:4], both[4:])
    assert counts[0, 0].tolist() == [1, *([2] * 299)]
    assert tiles[0, 0, 0, 0] == 3 and tiles[0, 0, 1].tolist() == [2, 1] and tiles[0, 0, 298].tolist() == [3, 1]
    assert ranks[0, 0, 1:, 0].tolist() == list(range(299)) and ranks[0, 0, :, 1].tolist() == list(range(300))


def in_sections(check: Callable[[], None], processors: int = 1) -> Callable[[], None]:
    """A check of batch-invariant calls whose sections have 128 keys. processors: with many, each section has a program."""

    def checked() -> None:
        shape = importlib.import_module("anyattn.backends.triton.launch_shape")
        machine = planner.machines.of
        attention.clear()
        with (
            mock.patch.object(shape, "SECTION", 128),
            mock.patch.object(planner.machines, "of", lambda kind: dataclasses.replace(machine(kind), sm_count=processors)),
        ):
            check()
        attention.clear()

    return checked


def in_every_batch(name: str) -> Callable[[], None]:
    """The bits of a sequence among others are those that it has alone, which are right."""

    def check() -> None:
        g = torch.Generator().manual_seed(2)
        batch = [batches.draw(g, n, (2, 1), (16, 16), torch.float32) for n in (300, 140)]
        call = {**batches.OPTIONS[name](2, g), "deterministic": "batch"}
        assert not batches.differing(g, batch, call)

    return check


def sloping(*factors: tuple[float, float]) -> Callable[[], None]:
    """Scores that rise or fall, by less and by more than a maximum may lag behind: what is subtracted is not the greatest score, which is
    asked for. factors: of the first and of the last key."""

    def check() -> None:
        for first, last in factors:
            q, k, v = qkv(1, 4, 2, 100, 300, 16, 16)
            k = k * torch.linspace(first, last, 300)[:, None]
            judge(q, k, v, deterministic="batch")
            aux = anyattn.AuxRequest(lse=True, max_scores=True)
            out, found = anyattn.flex_attention(q, k, v, enable_gqa=True, return_aux=aux, deterministic="batch", backend="triton")
            exact = (q.double() @ k.double().repeat_interleave(2, 1).transpose(-1, -2)).amax(-1) / 4
            assert bool(((found.max_scores.double() - exact).abs() <= 2.0**-18 * exact.abs()).all())
            plain = anyattn.flex_attention(q, k, v, enable_gqa=True, return_lse=True, deterministic="batch", backend="triton")
            assert torch.equal(out, plain[0]) and torch.equal(found.lse, plain[1])

    return check


def lists_in_every_batch() -> None:
    """Full tiles of lists, in which the mask hides keys; a row tile whose rows see lists of its own."""
    hides = lambda b, h, i, j: (i + j) % 3 != 0
    one, chosen = torch.ones(1, 1, 3).int(), torch.tensor([0, 2, 1])
    index = ((chosen[:, None] + torch.arange(3)) % 3).int()[None, None]
    lists = one, index, one, index.roll(-1, -1)
    made = anyattn.BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=128, mask_mod=hides, seq_lengths=(300, 300))

    def meant(b: Any, h: Any, i: Any, j: Any) -> Any:
        first = chosen[i // 128]
        return ((j // 128 == first) & hides(b, h, i, j)) | (j // 128 == (first + 1) % 3)

    judge(*qkv(1, 2, 1, 300, 300, 16, 16), mask=meant, block_mask=made, deterministic="batch")


def beside_lists() -> None:
    """Lists that say nothing of what the mask beside them hides in every tile."""
    q, k, v = qkv(1, 2, 1, 64, 64, 16, 16)
    shown = lambda b, h, i, j: (i // 16 - j // 16) % 3 != 1
    made = anyattn.create_block_mask(shown, None, None, 64, 64, device="cpu", BLOCK_SIZE=32)
    beside = lambda b, h, i, j: (i * 3 + j * 5) % 4 != 0
    both = lambda b, h, i, j: shown(b, h, i, j) & beside(b, h, i, j)
    judge(q, k, v, mask=both, block_mask=made, mask_mod=beside)


def packed(form: Callable[..., Any] = varlen.packed_call) -> Callable[[], None]:
    """Lengths that differ between sequences and sides; forward and backward."""

    def check() -> None:
        batch = seq.ragged([20, 3, 37], [30, 41, 18])
        meaning = Meaning(causal=True, score_mod=lambda s, b, h, i, j: s + 0.1 * b * (i % 3))
        got, shared = varlen.results(batch, meaning, form)
        seq.judge(got, batch, meaning, shared=shared)

    return check


def ragged_lists() -> None:
    lengths = ([20, 40, 9], [30, 41, 20])
    batch = seq.ragged(*lengths, 2, 1)
    ids = (torch.arange(150).reshape(3, 50) * 7 // 31) % 5
    mask = lambda b, h, i, j: (ids[b, i] == ids[b, j]) | (j < 6 * b + 5 * h)
    where = {"cu_seqlens_q": seq.ends(lengths[0]), "cu_seqlens_k": seq.ends(lengths[1])}
    for layout in ("flat", "padded"):
        lists = anyattn.compute_varlen_block_sparsity(32, 16, 2, mask, layout=layout, device="cpu", **where)
        meaning = Meaning(mask_mod=mask)
        got, _ = varlen.results(batch, meaning, varlen.packed_call, block_sparse_tensors=lists)
        seq.judge(got, batch, meaning, label=layout)


def pages(size: int) -> Callable[[], None]:
    """Shuffled pages; keys that the batch does not use hold NaN."""

    def check() -> None:
        batch = seq.ragged([9, 20, 3], [30, 41, 18])
        table, count = seq.shuffled_table(3, 48, size, 1)
        used = torch.tensor(batch.lengths[1])
        pools = [seq.paged(part, size, table, count) for part in (batch.k, batch.v)]
        ends = seq.ends(batch.lengths[0])
        out, lse = anyattn.flash_attn_varlen_func(
            seq.packed(batch.q), *pools, cu_seqlens_q=ends, seqused_k=used, page_table=table, causal=True, return_lse=True
        )
        lengths = batch.lengths[0]
        seq.judge({"out": seq.unpacked(out, lengths), "lse": list(lse.split(lengths, 1))}, batch, Meaning(causal=True))

    return check


def exact() -> None:
    """Sums in no order of terms of very different sizes: of diagonals, of single pairs, of rows, of all; none is rounded away."""
    distance, table, rows = (torch.linspace(-1, 1, n, dtype=torch.float64).sin() for n in (2 * 90, 5 * 7, 37))
    distance, table, heat = distance.reshape(2, 90), table.reshape(5, 7), torch.tensor(0.75, dtype=torch.float64)
    score = lambda s, b, h, i, j: s * heat + distance[h, i - j + 45] + table[i % 5, j % 7] + rows[i] * s
    dout = torch.randn(2, 2, 37, 16, generator=torch.Generator().manual_seed(1)) * torch.logspace(0, -30, 37)[:, None]
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v, incoming = (t.to(dtype) for t in (*qkv(2, 2, 1, 37, 43, 16, 16), dout))
        options = {"captured": [distance, table, heat, rows], "deterministic": True, "kernel_options": {"tile_m": 32, "tile_n": 32}}
        judge(q, k, v, score=score, dout=incoming, **options)


def two_tables() -> None:
    a, b = torch.linspace(-1, 1, 43, dtype=torch.float64), torch.linspace(1, -2, 37, dtype=torch.float64)
    judge(*qkv(1, 2, 1, 37, 43, 16, 16), score=lambda s, _, h, i, j: s + a[j] * b[i], captured=[a, b])


def pairs() -> None:
    """An entry of its own for every pair, in a tensor with room to spare; the second time two pairs share one, or a pair has two."""
    a = torch.linspace(-1, 1, 2 * 2 * 40 * 48, dtype=torch.float64).sin().reshape(2, 2, 40, 48)
    mask = lambda b, h, i, j: (i + 2 * j) % 3 < 2
    for score in (
        lambda s, b, h, i, j: s * 0.5 + a[b, h, i, j], lambda s, b, h, i, j: s + a[0, h, i, j],
        lambda s, b, h, i, j: s + a[b, h, i, j] * a[b, 0, i, j],
    ):  # fmt: skip
        judge(*qkv(2, 2, 1, 37, 43, 16, 16), score=score, captured=[a])
        judge(*qkv(2, 2, 1, 37, 43, 16, 16), score=score, captured=[a], mask=mask)


def relative() -> None:
    """A captured entry for each distance, in tiles that are wider than high, higher than wide, and square."""
    table = torch.linspace(-1, 1, 2 * 170, dtype=torch.float64).sin().reshape(2, 170)
    for tile in ((16, 64), (64, 16), (32, 32)):
        options = {"tile_m": tile[0], "tile_n": tile[1]}
        score = lambda s, b, h, i, j: s + table[h, i - j + 95]
        halves = (t.half() for t in qkv(1, 2, 1, 70, 91, 16, 16))  # in float32 nothing is summed by products
        judge(*halves, score=score, captured=[table], mask=masks.causal(30), kernel_options=options)


def few_entries() -> None:
    """Many pairs for each entry: buckets by distance, of which far tiles have one, and what is looked up by row, by key and by both; in
    tables that are large enough for one copy too."""
    ids = torch.arange(91) * 5 % 3
    names, far = (torch.linspace(-1, 1, n, dtype=torch.float64).sin().reshape(-1, *more) for n, *more in ((18, 3, 3), (16, 2)))
    large = torch.zeros(3, 2**18, dtype=torch.float64)
    buckets = anyattn.scores.t5_bias(far, max_distance=5)
    for score, captured in (
        (buckets, [far]), (lambda s, b, h, i, j: s + names[h, ids[i], ids[j]], [names]),
        (lambda s, b, h, i, j: s + names[h, ids[i], 2] + large[ids[i], ids[j]] + names[1, 0, ids[j]] * s, [names, large]),
    ):  # fmt: skip
        for dtype in (torch.float32, torch.float16):
            given = (t.to(dtype) for t in qkv(1, 2, 1, 70, 91, 16, 16))
            options = {"captured": captured, "kernel_options": {"tile_m": 32, "tile_n": 32}}
            judge(*given, score=score, mask=masks.causal(40), **options)


def overlap() -> None:
    """Two ranges of keys that share tiles which both fill."""
    judge(*qkv(1, 1, 1, 70, 100, 16, 16), mask=lambda b, h, i, j: (j < i + 40) | ((j >= 20) & (j < 90)))


def infinite_derivative() -> None:
    """Of narrow heads, and of so wide ones that nothing is computed again where a sum is not finite."""
    for d in (16, 136):
        judge(*qkv(1, 1, 1, 40, 40, d, d), score=lambda s, b, h, i, j: s / torch.clamp(i - j + 1, min=0), mask=masks.causal())


def documents() -> None:
    """Launched as sequences and by lists, of which one sends nothing into the table's gradient."""
    from unittest import mock

    from anyattn.call_cache import attention
    from anyattn.documents.rewrite import DocumentTables
    from anyattn.sparsity import read_lists

    ids = torch.repeat_interleave(torch.tensor([4, 1, 3]), torch.tensor([20, 19, 1]))
    table = torch.linspace(-1, 1, 40, dtype=torch.float64)
    for one in (ids, torch.where(torch.arange(40) < 37, ids, 4)):  # the first is documents, in the other one of them comes back
        mask = lambda b, h, i, j, one=one: (one[i] == one[j]) & (i >= j)
        with mock.patch.object(read_lists, "row_ranges", lambda _: None), mock.patch.object(DocumentTables, "answer", lambda _: None):
            attention.clear()
            lists = anyattn.create_block_mask(mask, None, None, 40, 40, device="cpu", BLOCK_SIZE=16)
            score = lambda s, b, h, i, j: s + table[abs(i - j)]
            judge(*qkv(1, 2, 1, 40, 40, 16, 16), score=score, captured=[table], mask=mask, block_mask=lists)


def two_entries_at_a_time(call: Callable[[], Any]) -> Callable[[], None]:
    """Programs of ``pair_tile`` compute two batch entries each."""

    def check() -> None:
        from unittest import mock

        from anyattn.backends.triton import pair_tiles

        with mock.patch.object(pair_tiles, "_entries_each", lambda *about: 2):
            call()

    return check


def windows() -> None:
    """All pairs of an entry in one tile: two captured tensors with derivatives of their own, and none."""
    a, b = torch.linspace(-1, 1, 35, dtype=torch.float64), torch.linspace(1, -2, 2 * 20 * 13, dtype=torch.float64).sin().reshape(2, 20, 13)
    x, options = [t.half() for t in qkv(3, 2, 2, 20, 13, 16, 24)], {"kernel_options": {"tile_m": 32, "tile_n": 32}}
    judge(*x, score=lambda s, _, h, i, j: s * a[i + j] + b[h, i, j], captured=[a, b], mask=masks.causal(3), **options)
    judge(*x, mask=lambda b, h, i, j: (i + 2 * j) % 3 < 2, **options)


def shares() -> None:
    """Decoding of an uneven batch of more sequences than are counted at once, whose tiles few and many programs share; with NaN in rows
    that are not in use."""
    from unittest import mock

    from anyattn.backends.triton import launch_shape, tile_config
    from anyattn.call_cache import attention

    random = torch.Generator().manual_seed(2)
    lengths = torch.randint(0, 40, (140,), generator=random)
    lengths[7], lengths[133] = 90, 75
    q, k, v = (torch.randn(140, n, h, 16, generator=random) for n, h in ((1, 4), (96, 2), (96, 2)))
    for x in (k, v):
        x[torch.arange(96, device="cpu") >= lengths[:, None]] = math.nan
    given: dict[str, Any] = {"cache_seqlens": lengths, "causal": True}
    wanted = flash_reference.cached(q, k, v, **given)
    for programs in (5, 150):
        patches = [
            (launch_shape, "_programs", lambda *about, programs=programs: programs),
            (launch_shape, "_LEAST_SHARED", 0),
            (launch_shape, "_MOST_ROWS", 64),
        ]
        patches += [(launch_shape, "_MERGED_TILES", 10**6), (launch_shape, "_SPARED_TILES", -(10**4)), (launch_shape, "_LEAST_TILES", 1)]
        patches += [(tile_config, "_few_rows", lambda *about: tile_config.Tiles(16, 16, 4, 2))]
        with contextlib.ExitStack() as stack:
            for patch in patches:
                stack.enter_context(mock.patch.object(*patch))
            attention.clear()
            options = {"sink": SINK, "return_lse": True, "backend": "triton", "num_splits": 0, "validate": False}
            with torch.no_grad():
                out, lse = anyattn.flash_attn_with_kvcache(q, k, v, **given, **options)
        flash_reference.judge(wanted.sequences, {"out": out, "lse": lse}, lambda _: {"causal": True, "sink": SINK}, label=str(programs))
    attention.clear()


def drafts() -> None:
    """Decoding under a mask that shows each query a prefix of its own, which begins and ends inside tiles, and some other keys."""
    from anyattn.backends.triton import tile_config
    from anyattn.call_cache import attention

    random = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, n, h, 16, generator=random) for n, h in ((5, 4), (90, 2), (90, 2)))
    first, end, lengths = torch.tensor([3, 18]), torch.tensor([40, 55]), torch.tensor([90, 61])
    given: dict[str, Any] = {"cache_seqlens": lengths}

    def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        return ((j >= first[b] - i % 5) & (j < end[b] + i % 5 * 3)) | ((i * 3 + j * 5) % 4 == 0)

    wanted = flash_reference.cached(q, k, v, **given)
    attention.clear()
    with mock.patch.object(tile_config, "_few_rows", lambda *about: tile_config.Tiles(16, 16, 4, 2)), torch.no_grad():
        out, lse = anyattn.flash_attn_with_kvcache(q, k, v, **given, mask_mod=seen, return_lse=True, backend="triton")
    attention.clear()
    flash_reference.judge(wanted.sequences, {"out": out, "lse": lse}, lambda _: {"mask_mod": seen}, label="drafts")


def ranges(sink: int, window: int) -> Callable[[], None]:
    return judged((1, 1, 1, 100, 100, 16, 16), mask=masks.sink_window(sink, window))


def appended_scales() -> None:
    for form in ("head", "key"):
        appending.check(appending.Setting(k_form=form, v_form=form, page_size=3, queries=2), Meaning(causal=True), 2, half=6)


def gathered() -> None:
    from anyattn.backends.triton.gathered_keys import gathered as gather
    from tests.backends.triton.kernels import test_gathered_keys_interpreted as gathering

    with mock.patch.object(check_lengths, "skips_device_reads", lambda device, validate: validate is not True):
        case = quantised.made(quantised.Setting(page_size=16, leftpad=(5, 0, 33), k_form="key", v_form="key"))
        gathering.check_copies(gather(gathering.of_cache(case)), (case.batch.k, case.batch.v))


KILLERS: dict[str, Callable[[], Any]] = {
    "batch": in_sections(judged((1, 2, 1, 300, 300, 16, 16), mask=masks.causal(), deterministic="batch")),
    "batch_of_windows": in_sections(in_every_batch("window")),
    "batch_of_two_ranges": in_sections(judged((1, 2, 1, 200, 300, 16, 16), mask=masks.sink_window(3, 40), deterministic="batch")),
    "batch_of_rising": in_sections(sloping((0.2, 60), (1, 4))),
    "batch_of_falling": in_sections(sloping((60, 0.2))),
    "batch_of_rising_parts": in_sections(sloping((0.2, 60), (1, 4)), 1000),
    "batch_of_lists": in_sections(lists_in_every_batch),
    "batch_of_parts": in_sections(lists_in_every_batch, 1000),
    "full": variant("full"),
    "causal": variant("causal", LONG),
    "window": judged((1, 2, 1, 70, 90, 16, 16), mask=masks.sliding_window(37, 5)),
    "dilated": variant("dilated", LONG),
    "islands": variant("islands", LONG),
    "sink_window": lambda: (ranges(4, 19)(), ranges(17, 40)()),
    "overlap": overlap,
    "peaky": rising,
    "sink": variant("sink"),
    "alibi": variant("alibi"),
    "far_sides": far_sides,
    "bands": bands,
    "gated": variant("gated"),
    "softcap": variant("softcap"),
    "two_tables": two_tables,
    "pairs": pairs,
    "relative": relative,
    "few_entries": few_entries,
    "infinite_derivative": infinite_derivative,
    "head_dim": judged((1, 2, 1, 20, 20, 24, 40)),
    "few_rows": judged((1, 6, 2, 3, 50, 16, 16), score=lambda s, b, h, i, j: s - 0.02 * h * j),
    # 17 heads take two tiles of 16 rows: of nine heads, and of eight
    "uneven_group": judged((1, 34, 2, 1, 50, 16, 16), kernel_options={"tile_m": 16}),
    "many splits": judged((1, 2, 1, 5, 300, 16, 16), mask=masks.causal(295), kernel_options={"num_splits": 12, "tile_n": 16}),
    "splits": judged((1, 4, 2, 9, 100, 16, 16), mask=masks.causal(85), sink=SINK, kernel_options={"num_splits": 3}),
    "shares": shares,
    "lists": random_lists((32, 32), (2, 2, 50, 56)),
    "uneven_lists": random_lists((48, 24), (1, 2, 70, 50)),
    "lists_of_kv_heads": lists_of_kv_heads,
    "ranked_lists": ranked_lists,
    "sorted_choices": sorted_choices,
    "single_queries": random_lists((1, 16), (2, 3, 9, 150), listed=1),
    "beside_lists": beside_lists,
    "drafts": drafts,
    "dropout": lambda: dropout.test_flex_against_the_oracle("pairs", torch.float32),
    "reductions": lambda: reductions.test_reductions_equal_the_oracles("causal"),
    "skipping": lambda: (
        skipping.test_a_tile_is_skipped_only_if_all_of_its_rows_skip_it(),
        skipping.test_what_is_skipped_and_the_bound_of_its_error(None, torch.float32),
    ),
    "last_queries": lambda: reductions.test_last_queries("causal", 7),
    "packed": packed(),
    "documents": documents,
    "ragged_lists": ragged_lists,
    "pages": pages(8),
    "uneven_pages": pages(12),
    "exact": exact,
    "windows": two_entries_at_a_time(windows),
    "factors_of_heads": lambda: eight_bits.check(eight_bits.Setting(k_form="head", v_form="head"), Meaning(causal=True)),
    "factors_of_keys": lambda: eight_bits.check(eight_bits.Setting(k_form="key", v_form="key", page_size=16), Meaning(causal=True)),
    "wrapped": lambda: eight_bits.check(INLINE, Meaning(causal=True)),
    "appended": lambda: appending.check(appending.Setting(k_form="none", v_form="none", queries=3), Meaning(), 3),
    "appended_scales": appended_scales,
    "gathered": gathered,
    "shared_pages": lambda: varlen.test_shared_pages(torch.float32),
}
