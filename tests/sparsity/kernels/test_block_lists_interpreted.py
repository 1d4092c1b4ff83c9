"""Block lists by the Triton kernels, in Triton's interpreter, against those of torch operations.

Run by ``test_in_the_interpreter.py``: the interpreter is chosen before Triton is imported.
"""

import inspect
import re

import pytest
import torch
import triton
import triton.language as tl

from anyattn import masks
from anyattn.block_masks import create_block_mask
from anyattn.mods.analysis.evaluate import run
from anyattn.mods.analysis.tile_classes import classify
from anyattn.mods.ir.expr import OPS, Builder, category
from anyattn.mods.tracing.trace import trace
from anyattn.mods.tracing.weak_captures import bits_of_numbers
from anyattn.sparsity import compute, compute_block_sparsity
from anyattn.sparsity.block_mask import LISTS
from anyattn.sparsity.grid import ListForm, TileGrid
from anyattn.sparsity.kernels import block_lists
from anyattn.sparsity.lists import lists_of_grid, with_partial_tails
from anyattn.triton_tools import emit, jit_source
from tests.support.covering import few
from tests.support.tiles import brute_classes, dense, library_masks, random_mask
from tests.support.triton.pretended_lists import as_on_a_gpu

ROWS, COLUMNS = 16, 32


@triton.jit
def everywhere(out, scalars, tensors, score, FN: tl.constexpr, M: tl.constexpr, N: tl.constexpr, USES_SCORE: tl.constexpr):
    q, kv = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    place = q * N + kv
    if USES_SCORE:
        value = FN(1, 2, q, kv, tl.load(score + place), scalars, tensors)
    else:
        value = FN(1, 2, q, kv, scalars, tensors)
    tl.store(out + place, tl.broadcast_to(value, (M, N)).to(out.dtype.element_ty))


def by_triton(expr, scalars, tensors, score=None):  # type: ignore[no-untyped-def]
    out = torch.empty(ROWS, COLUMNS, dtype=expr.output.dtype)
    fn = jit_source.load(emit.function("mod", expr), f"mod_{expr.key}").mod
    packed = bits_of_numbers(scalars), emit.packed_tensors(tensors)
    everywhere[(1,)](out, *packed, out if score is None else score, fn, ROWS, COLUMNS, score is not None)
    return out


def by_torch(expr, scalars, tensors, score=None):  # type: ignore[no-untyped-def]
    b, h, q, kv = torch.tensor(1), torch.tensor(2), torch.arange(ROWS)[:, None], torch.arange(COLUMNS)
    leaves = {"b": b, "h": h, "q_idx": q, "kv_idx": kv, "score": score}
    return torch.broadcast_to(torch.as_tensor(run(expr, leaves, scalars, tensors)[0]), (ROWS, COLUMNS))


REALS = torch.tensor([0.0, -0.0, 1e-9, -1e-9, 0.3, -0.3, 0.5, 1.5, 2.5, -2.5, 1.0, -1.0, 3.7, -7.9, 40.0, -40.0])
MORE_REALS = torch.cat([REALS, REALS * 0.7 + 0.9])
WHOLES = torch.tensor([0, 1, -1, 2, -2, 3, -3, 5, 7, -7, 8, 63, -64, 100, -100, 127])
MORE_WHOLES = torch.cat([WHOLES, WHOLES.flip(0) // 3])


def operands(dtype, count):  # type: ignore[no-untyped-def]
    kind = category(dtype)
    if kind == "bool":
        return torch.arange(count) % 3 == 1
    values = (REALS, MORE_REALS) if kind == "float" else (WHOLES, MORE_WHOLES)
    values = values[count > ROWS]
    return (values.abs() if dtype is torch.uint8 else values).to(dtype)


WHOLE = (torch.bool, torch.int8, torch.uint8, torch.int32, torch.int64)
REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CASES = [(op, dtype) for op, spec in OPS.items() for dtype in WHOLE + REAL if op != "cast" and category(dtype) in spec.operands]


EXACT = ("add", "sub", "mul", "neg", "abs", "min", "max", "floor", "ceil", "trunc", "round", "sign", "where")


def same(op, ours, theirs):  # type: ignore[no-untyped-def]
    """Equal; for rounded functions within 8 roundings of the computation's dtype (of a power's exponent too) and 2 of the result's.

    Triton's interpreter cuts bfloat16 off where hardware rounds it.
    """
    dtype = theirs.dtype
    if not dtype.is_floating_point:
        return torch.equal(ours, theirs)
    equal = (ours == theirs) | (ours.isnan() & theirs.isnan())
    if op in EXACT and dtype is not torch.bfloat16:
        return bool(equal.all())
    inner = torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).eps
    growth = 1 + theirs.double().abs().log2().abs().nan_to_num(0, 0, 0) if op == "pow" else 1
    room = theirs.double().abs() * (8 * inner * growth + 2 * torch.finfo(dtype).eps) + torch.finfo(dtype).tiny
    room = room + 1e-8 * (op == "erf")  # torch's own bfloat16 erf cancels near 0
    return bool((equal | (torch.isfinite(theirs) & ((ours.double() - theirs.double()).abs() <= room))).all())


@pytest.mark.covering(1, of=lambda op, dtype: (op, dtype, (op, category(dtype))))
@pytest.mark.parametrize(("op", "dtype"), CASES, ids=lambda x: str(x).removeprefix("torch."))
def test_every_operation(op, dtype):  # type: ignore[no-untyped-def]
    builder = Builder()
    q, kv = (builder.add("index", dtype=torch.int64, attr=name) for name in ("q_idx", "kv_idx"))
    a, b = builder.add("load", q, dtype=dtype, attr=0), builder.add("load", kv, dtype=dtype, attr=1)
    tensors = [operands(dtype, ROWS), operands(dtype, COLUMNS)]
    if op in ("floordiv", "mod", "fmod") and category(dtype) == "int":
        tensors[1] = torch.where(tensors[1] == 0, 3, tensors[1]).to(dtype)
    if op == "pow" and category(dtype) == "int":
        tensors[1] = tensors[1].abs() % 9
    args = {1: [a], 2: [a, b], 3: [builder.add("lt", q, kv), a, b]}[OPS[op].arity]
    expr = builder.build(builder.add(op, *args))
    ours, theirs = by_triton(expr, (), tensors), by_torch(expr, (), tensors)
    assert same(op, ours, theirs), (ours[ours != theirs], theirs[ours != theirs])


@pytest.mark.parametrize(
    "mask", [lambda t, n, k: t[k] * 0.1 > 6.298, lambda t, n, k: n * t[k] > 6.298, lambda t, n, k: t[k] / 10.001 > 6.297]
)
def test_numbers_beside_halves(mask):  # type: ignore[no-untyped-def]
    """A number that 16-bit floats are multiplied or divided by keeps its 32 bits, as in torch."""
    t, n = torch.linspace(62.5, 63.5, COLUMNS).to(torch.float16), 0.1
    traced = trace(lambda b, h, q, k: mask(t, n, k), "mask")
    theirs = by_torch(traced.expr, traced.scalars, traced.tensors)
    assert theirs.any() and not theirs.all() and torch.equal(theirs[0], mask(t, n, torch.arange(COLUMNS)))
    assert torch.equal(by_triton(traced.expr, traced.scalars, traced.tensors), theirs)


EDGES = torch.tensor([0.0, -0.0, 1e-30, -1e-38, 1e-5, 0.2, -0.7, 0.999, -0.9999999, 1.0, -1.0, 3.0, -1e4, 88.9, -89.2, torch.inf])
MORE_EDGES = torch.cat([EDGES, torch.tensor([-torch.inf, torch.nan, 1e30, -1e30, 2, -2, 5, -5, 1e-20, 7, -7, 20, -20, 50, -50, 0.3])])


@pytest.mark.covering(1)
@pytest.mark.parametrize("op", ["tan", "atan", "sinh", "cosh", "erfinv", "atan2", "hypot"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_functions_at_the_edges(op, dtype):  # type: ignore[no-untyped-def]
    """Zeros, infinities, NaN, and where the textbook formula overflows or cancels; near -1 and 1 torch's own erfinv of float64 errs."""
    builder = Builder()
    q, kv = (builder.add("index", dtype=torch.int64, attr=name) for name in ("q_idx", "kv_idx"))
    a, b = (builder.add("load", at, dtype=dtype, attr=slot) for slot, at in enumerate((q, kv)))
    expr = builder.build(builder.add(op, *([b] if OPS[op].arity == 1 else [a, b])))
    tensors = [EDGES.to(dtype), MORE_EDGES.to(dtype)]
    theirs = getattr(torch, op)(*([tensors[1].double()] if OPS[op].arity == 1 else [tensors[0].double()[:, None], tensors[1].double()]))
    theirs = theirs.to(dtype).expand(ROWS, COLUMNS)
    ours = by_triton(expr, (), tensors)
    if op == "erfinv" and dtype is torch.float64:
        ours, theirs = (torch.where(MORE_EDGES.abs() < 0.9999, t, 0.0) for t in (ours, theirs))
    assert same(op, ours, theirs), ours - theirs


@pytest.mark.covering(1)
@pytest.mark.parametrize("source", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("target", [torch.bool, torch.int8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64])
def test_every_cast(source, target):  # type: ignore[no-untyped-def]
    builder = Builder()
    q = builder.add("index", dtype=torch.int64, attr="q_idx")
    expr = builder.build(builder.cast(builder.add("load", q, dtype=source, attr=0), target))
    tensors = [operands(source, ROWS)]
    assert torch.equal(by_triton(expr, (), tensors), by_torch(expr, (), tensors))


# ---- lists of tiles


ALL = [(True, True), (False, True), (True, False)]  # has_full_tails, separate_full


def assert_lists(mod, lengths, tile, batch=(2, 2), options=ALL, classes=None):  # type: ignore[no-untyped-def]
    """The kernels' lists, both ways, are those of the classes that torch operations find, unless others are given."""
    traced = trace(mod, "mask")
    classes = classify(traced, *lengths, *tile, *batch) if classes is None else classes
    for has_full_tails, separate in options:
        form = ListForm(separate, True, has_full_tails, True)
        found = block_lists.list_tiles(traced, TileGrid(lengths, tile, batch), torch.device("cpu"), form)
        grid = classes if has_full_tails else with_partial_tails(classes, lengths, tile)
        wanted = [*lists_of_grid(grid, separate), *lists_of_grid(grid.transpose(-1, -2), separate)]
        for ours, theirs in zip(found, wanted, strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or (ours.dtype is torch.int32 and ours.is_contiguous() and torch.equal(ours, theirs))


def in_ways(*ways):  # type: ignore[no-untyped-def]
    """A fixture: the ways in which the kernels list the tiles."""

    def way(request, monkeypatch):  # type: ignore[no-untyped-def]
        if request.param != "at once":
            monkeypatch.setattr(block_lists, "_MOST_POSITIONS", 0)
            monkeypatch.setattr(block_lists, "launches_of", block_lists.launches_of.__wrapped__)  # caches nothing
        if request.param == "many chunks":
            monkeypatch.setattr(block_lists, "_FEW", 1)
            monkeypatch.setattr(block_lists, "_MOST_CHUNK", 2)

    return pytest.fixture(params=ways)(way)


way = in_ways("two kernels", "many chunks")
SHAPES = [((30, 50), (5, 32)), ((97, 31), (48, 16)), ((64, 64), (128, 128)), ((1, 70), (16, 24))]


def test_captured_numbers_of_33_bits():  # type: ignore[no-untyped-def]
    for n, m in ((2**31 + 1, 0xDEADBEEF), (0xDEADBEEF, 2**31 + 1), (2**32 - 1, -(2**31) - 1)):
        for mod in (lambda b, h, q, k, n=n, m=m: n - m < k, lambda b, h, q, k, n=n, m=m: (n * 3 - m) // 5 - q > k):
            traced = trace(mod, "mask")
            assert traced.scalars
            assert torch.equal(by_triton(traced.expr, traced.scalars, ()), by_torch(traced.expr, traced.scalars, ()))


LIBRARY = list(library_masks(64, 64))


@pytest.mark.parametrize("name", few(LIBRARY, *LIBRARY[::2]))
def test_library_masks(name):  # type: ignore[no-untyped-def]
    for at, (lengths, tile) in enumerate(SHAPES):
        assert_lists(library_masks(*lengths)[name], lengths, tile, options=ALL if at > 1 else [(at == 1, True)])


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["document_causal", "tree", "causal_offset", "padding_causal"])
def test_several_ways(name, way):  # type: ignore[no-untyped-def]
    assert_lists(library_masks(97, 31)[name], (97, 31), (20, 6), (2, 1), options=ALL[:1])


@pytest.mark.covering(2, of=lambda seed: (seed % len(SHAPES), seed // 4 % 3))
@pytest.mark.parametrize("seed", range(32))
def test_random_masks(seed):  # type: ignore[no-untyped-def]
    lengths, tile = SHAPES[seed % len(SHAPES)]
    assert_lists(random_mask(1000 + seed, max(lengths)), lengths, tile, options=[ALL[seed // 4 % 3]])


def wild(table):  # type: ignore[no-untyped-def]
    """Sentinels in captured whole numbers: sums of them leave int64, and what the mask shows is what wrapped around."""
    return lambda b, h, q, k: (q + table[k] >= table[q]) | (table[q] - 3 * table[k] > k)


def with_table(table, mod):  # type: ignore[no-untyped-def]
    return lambda b, h, q, k: mod(table, b, h, q, k)


MORE_MASKS = {
    "sentinels": wild(torch.tensor([0, 2**62, -(2**63), 2**63 - 1, 5, -(2**61), 2**61] * 9)),
    "int32 wraps": with_table(torch.tensor([0, 2**31 - 1, -(2**31), 7] * 15, dtype=torch.int32), lambda t, b, h, q, k: t[q] + 5 > t[k]),
    "int8": with_table(torch.tensor([0, 127, -128, 3] * 15, dtype=torch.int8), lambda t, b, h, q, k: (t[q] + t[k] > 0) & (-t[k] < 100)),
    "uint8": with_table(torch.tensor([0, 255, 3] * 20, dtype=torch.uint8), lambda t, b, h, q, k: t[q] - t[k] < 7),
    "bools": with_table(torch.arange(60) > 20, lambda t, b, h, q, k: t[q] == t[k]),
    "bools differ": with_table(torch.arange(60) > 20, lambda t, b, h, q, k: (t[q] != t[k]) ^ (q > k)),
    "floats": with_table(torch.linspace(-1, 1, 60), lambda t, b, h, q, k: t[q] * 2 - t[k] > 0.3),
    "float of places": lambda b, h, q, k: torch.exp(-(q - k) * 0.1) > 0.5,
    "float number": lambda b, h, q, k: q * 0.5 >= k - 0.1,
    "nothing": lambda b, h, q, k: k < 0,
    "rows only": lambda b, h, q, k: q % 3 == 1,
    "one number": lambda b, h, q, k: h > 0,
    "unsorted ids": with_table(torch.arange(60) * 7 % 5, lambda t, b, h, q, k: t[q] == t[k]),
    "squares": lambda b, h, q, k: q * q - k * k * k > 100,
    "remainders": lambda b, h, q, k: (q - k) % 16 < 9,
    "bits": lambda b, h, q, k: ((q ^ k) & 6) == 2,
    "negative divisor": lambda b, h, q, k: q // -7 <= -(k // 3),
    "strided": with_table(torch.arange(240).reshape(60, 4).T, lambda t, b, h, q, k: t[h, q] >= t[b, k]),
    "from the end": with_table(torch.arange(60), lambda t, b, h, q, k: t[q - k] >= 30),
    "blocks": with_table(torch.arange(24).reshape(4, 6) % 5 < 2, lambda t, b, h, q, k: t[q // 16, k // 11]),
    "numbered blocks": with_table(torch.arange(24).reshape(4, 6) % 5, lambda t, b, h, q, k: (t[q // 16, k // 11] > 2) | (q == k)),
    "int32 blocks": with_table((torch.arange(24).reshape(4, 6) % 5).int(), lambda t, b, h, q, k: t[q // 16, k // 16] + t[q // 20, 0] == 4),
    "loads of loads": with_table(torch.arange(60).flip(0), lambda t, b, h, q, k: t[t[q]] >= t[k]),
    "per head": with_table(torch.tensor([3, 40]), lambda t, b, h, q, k: (q - k).abs() <= t[h] + b),
}


@pytest.mark.parametrize("name", MORE_MASKS)
def test_more_masks(name):  # type: ignore[no-untyped-def]
    assert_lists(MORE_MASKS[name], (50, 60), (11, 16), options=ALL[:1])
    assert_lists(MORE_MASKS[name], (60, 45), (30, 8), (1, 1), options=ALL[1:2])


def test_a_needle():  # type: ignore[no-untyped-def]
    """One pair unlike all others of its tile, in the first and the last place of every step of the search."""
    for q_at, kv_at in ((0, 0), (31, 15), (32, 16), (37, 16), (47, 31), (48, 30), (96, 0)):
        for hides in (True, False):
            needle = lambda b, h, q, k, i=q_at, j=kv_at, hides=hides: (((q ^ i) | (k ^ j)) != 0) == hides
            assert_lists(needle, (97, 32), (48, 16), (1, 1), options=ALL[:1])


@pytest.mark.parametrize(
    "dtype", few([torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64], torch.uint8, torch.int16, torch.int64)
)
def test_sums_that_wrap_around(dtype):  # type: ignore[no-untyped-def]
    """Over tiles in which the table is constant, so that bounds are points: they must not outgrow the dtype that torch adds in."""
    info = torch.iinfo(dtype)
    table = torch.tensor([info.max, info.min, 3, info.max // 2 + 1, info.max], dtype=dtype).repeat_interleave(16)
    for mod in (
        lambda b, h, q, k: table[q] + table[k] > 0,
        lambda b, h, q, k: table[q] - table[k] > 0,
        lambda b, h, q, k: (table[q] + table[k]).abs() > 5,
        lambda b, h, q, k: -(table[q] - table[k]) < table[k],
        lambda b, h, q, k: table[q] * table[k] > 100,
        lambda b, h, q, k: (table[q] + table[k] + 1 > table[q]) & (q >= k),
    ):
        # brute force: row ranges take it that int64 is never left
        assert_lists(mod, (80, 80), (16, 16), (1, 1), options=ALL[:1], classes=brute_classes(dense(mod, 80, 80), 16, 16))


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_list(lengths):  # type: ignore[no-untyped-def]
    assert_lists(lambda b, h, q, k: q >= k, lengths, (16, 16))


def test_block_masks_by_the_kernels(monkeypatch):  # type: ignore[no-untyped-def]
    """The front doors take the kernels' lists as they are."""
    made = []

    def by_kernels(*args):  # type: ignore[no-untyped-def]
        made.append(1)
        return block_lists.list_tiles(*args)

    def both(mod):  # type: ignore[no-untyped-def]
        sizes = (2, 3, 40, 70)
        return create_block_mask(mod, *sizes, "cpu", (16, 32)), compute_block_sparsity(16, 32, *sizes, mod, device="cpu")

    for name in ("causal", "document_per_batch", "tree"):
        mod = library_masks(40, 70)[name]
        theirs, other = both(mod)
        with monkeypatch.context() as patched:
            patched.setattr(compute, "device_lists", by_kernels)
            ours, lists = both(mod)
        assert len(made) == 2, name
        made.clear()
        for field in ("kv", "full_kv", "q", "full_q"):
            for part in ("num_blocks", "indices"):
                assert torch.equal(getattr(ours, f"{field}_{part}"), getattr(theirs, f"{field}_{part}")), (name, field, part)
        assert torch.equal(lists.mask_block_idx, other.mask_block_idx) and torch.equal(lists.full_block_cnt, other.full_block_cnt), name
        assert ours.is_exact == theirs.is_exact


def test_warm_calls_by_the_kernels() -> None:
    """Closures made anew: what they capture, and new memory for the lists, are all that a warm call passes."""
    size, tile = (40, 70), (16, 32)
    ids = [torch.arange(70) // n for n in (9, 20, 70)]
    x, y, z = (torch.arange(70) // n for n in (3, 10, 17))

    def run(kernel, grid, given, options):  # type: ignore[no-untyped-def]
        def pointer(name, value):  # type: ignore[no-untyped-def]
            is_one = name in block_lists._LISTS or name == "hulls" or re.fullmatch(r"t\d+", name)
            return launches.tensor_at(value, *ids, x, y, z) if is_one and isinstance(value, int) else value

        names = [name for name in inspect.signature(kernel.fn).parameters if name not in options]
        kernel[grid](*map(pointer, names, given), **options)

    makers = {
        "window": (lambda n: lambda b, h, q, k: (q >= k) & (q - k < n), (3, 30, 31)),
        "documents": (lambda t: lambda b, h, q, k: (t[q] == t[k]) & (q >= k), ids),
        "scratch memory": (lambda n: lambda b, h, q, k: (x[q] == x[k]) | (y[q] == y[k]) & (z[q] == z[k]) | (q == k + n), (0, 1, 2)),
    }
    for name, (make, captured) in makers.items():
        for separate in (True, False):
            theirs = [create_block_mask(make(c), 2, 1, *size, "cpu", tile, separate_full_blocks=separate) for c in captured]
            with as_on_a_gpu(run) as launches:
                for at in (0, 0, 1, 2, 1):
                    launches.made.clear()
                    ours = create_block_mask(make(captured[at]), 2, 1, *size, "cpu", tile, separate_full_blocks=separate)
                    for field in LISTS:
                        a, b = getattr(ours, field), getattr(theirs[at], field)
                        assert (a is None) == (b is None) and (a is None or torch.equal(a, b)), (name, field)
            assert all(x.is_warm for x in launches.made) and len(launches.made) == 1 + (name == "scratch memory")


def test_bounds_settle_what_they_should(monkeypatch):  # type: ignore[no-untyped-def]
    """No tile of these is evaluated whole: bounds and samples are enough."""
    from anyattn.sparsity.kernels import classify as tile_classes

    def never(*args):  # type: ignore[no-untyped-def]
        raise AssertionError("a tile is evaluated pair by pair")

    monkeypatch.setattr(tile_classes, "_settled", never)
    sorted_ids = torch.arange(96) // 21
    cases = {
        "causal": masks.causal(),
        "window": masks.sliding_window(30, 0),
        "sink": masks.sink_window(16, 47),
        "prefix": masks.prefix_lm(20),
        "document": masks.document(sorted_ids),
        "document_causal": masks.document(sorted_ids) & masks.causal(),
        "chunked": masks.chunked(32),
        "padding": masks.left_padding(torch.tensor([3, 50])),
        "blocks": with_table(torch.arange(36).reshape(6, 6) % 5 < 2, lambda t, b, h, q, k: t[q // 16, k // 16] & (q >= k)),
        "captured window": with_table(torch.tensor([3, 40]), lambda t, b, h, q, k: (q - k).abs() <= t[b]),
    }
    evaluated = []
    for name, mod in cases.items():
        try:
            assert_lists(mod, (96, 96), (16, 16), options=ALL[:1])
        except triton.runtime.errors.InterpreterError:
            evaluated.append(name)
    assert not evaluated
    with pytest.raises(Exception, match="pair by pair"):
        assert_lists(lambda b, h, q, k: (q ^ k) != 255, (96, 96), (16, 16), options=ALL[:1])
