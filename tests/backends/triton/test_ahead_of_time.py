"""The Triton kernels compiled for GPUs that are not here: that they fit, spill nothing in a loop, and compute no more than they must."""

from __future__ import annotations

import importlib.util
import itertools
import pkgutil
import re
from pathlib import Path

import pytest
import torch

from anyattn.sparsity import read_lists
from anyattn.validate import flex
from tests.support.covering import few
from tests.support.triton.pinned import judged_with_the_pinned_triton

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
if importlib.util.find_spec("triton") is not None:
    from tests.support.triton import ahead

BIAS, TABLE, PAIRS, IDS, SHIFT, CAP = torch.zeros(4), torch.zeros(4, 600), torch.zeros(256, 256), torch.zeros(256), 256, 30.0
SCORES = {
    "alibi": lambda s, b, h, q, k: s + BIAS[h] * (q - k),
    "relative": lambda s, b, h, q, k: s + TABLE[h, q - k + SHIFT],
    "half the distance": lambda s, b, h, q, k: s - 0.5 * (q - k).abs(),
    "softcap": lambda s, b, h, q, k: CAP * torch.tanh(s / CAP),
    "pairs": lambda s, b, h, q, k: s + PAIRS[q, k],
    "sigmoid": lambda s, b, h, q, k: s * torch.sigmoid(s) + IDS[k],
}


def per_score(mod, until="ptx", **options):  # type: ignore[no-untyped-def]
    """Instructions of the PTX loop over full tiles, and how many of them there are for one score of a thread."""
    (launch,) = ahead.launches(ahead.problem_of(mod, **options), (9, 0))
    kernel = ahead.compiled(launch, (9, 0), until)
    found = min(ahead.loops(kernel), key=len)
    scores = launch.options["TILE_M"] * launch.options["TILE_N"] / (32 * launch.options["num_warps"])
    return found, len(found) / scores, kernel


@pytest.fixture(scope="module")
def plain():  # type: ignore[no-untyped-def]
    return per_score(None)[1]


@pytest.mark.parametrize("name", few(SCORES, "alibi", "relative", "softcap", "pairs"))
def test_what_a_score_mod_adds_to_the_loop(name, plain):  # type: ignore[no-untyped-def]
    """Nothing in 64 bits but addresses, no call, no branch, and at most so many PTX instructions for each score."""
    found, count, kernel = per_score(SCORES[name])
    text = "\n".join(found)
    assert not re.search(r"\.f64|cvt\.\w+\.f32\.s64|sub\.s64|call", text), name
    assert len(re.findall(r"setp\.\w+\.s64", text)) <= 1, name  # tiles are counted, not scores
    assert "ld.global.nc.b32" not in text or "relative" in name or "pairs" in name
    assert kernel.metadata.shared <= 170 << 10  # no room for tiles of captured values
    # the first of them is the scale, which without a score mod is part of the exponential
    most = {"alibi": 6, "relative": 8, "half the distance": 8, "softcap": 5, "pairs": 8, "sigmoid": 10}[name]
    assert count <= plain + most, (count, plain)


def test_as_exact_as_the_dtype_asks() -> None:
    """NVIDIA's tanh has 11 bits: enough for bfloat16, not for float16."""
    for dtype, is_coarse in ((torch.bfloat16, True), (torch.float16, False)):
        found, count, _ = per_score(SCORES["softcap"], dtype=dtype)
        assert ("tanh.approx" in "\n".join(found)) is is_coarse and count <= 26, (dtype, count)


def test_a_product_that_is_rounded_to_a_whole_number_is_rounded_before() -> None:
    """15 * 0.3 is 4.5 in float32, which torch rounds to 4; the exact product is a little more."""
    for score in (lambda s, b, h, q, k: s + torch.round((q - k) * 0.3), lambda s, b, h, q, k: torch.where((q - k) * 0.3 - 0.5 > h, s, 0.0)):
        found, _, _ = per_score(score)
        assert "mul.rn.f32" in "\n".join(found)


def test_float32_keeps_the_exact_functions() -> None:
    """A quotient and a hyperbolic tangent as torch rounds them, which takes many instructions."""
    found, _, _ = per_score(SCORES["softcap"], dtype=torch.float32, dim=64)
    assert "div.rn.f32" in "\n".join(found) and "tanh.approx" not in "\n".join(found)


def test_float32_exponentials_approximate_nothing() -> None:
    """Neither NVIDIA's approximations, beside those of the softmax, nor 64 bits, nor calls, nor spilled registers."""
    functions = (torch.exp, torch.expm1, torch.sigmoid, torch.tanh, torch.sinh, torch.cosh, torch.log1p)
    loops = []
    for mod in (None, lambda s, b, h, q, k: sum(f(s) for f in functions)):
        found, _, kernel = per_score(mod, "ptx" if mod is None else "cubin", dtype=torch.float32, dim=64)
        loops.append("\n".join(found))
    assert ahead.spilled(kernel) <= ahead.MOST_SPILLED
    assert not re.search(r"\.f64|call", loops[1])
    plain, full = (len(re.findall(r"(?:ex2|lg2|rcp|tanh)\.approx", loop)) for loop in loops)
    assert plain == full


GPUS = ((8, 0), (8, 6), (9, 0), (10, 0))
DIMS = (
    (64, 64, torch.bfloat16),
    (128, 128, torch.float16),
    (256, 256, torch.bfloat16),
    (128, 64, torch.float32),
    (256, 256, torch.float32),
)


@pytest.mark.parametrize("capability", GPUS, ids=str)
def test_tiles_fit(capability: tuple[int, int]) -> None:
    """Every default and candidate that calls itself fitting, without compiling; and none outgrows the threads of a block."""
    from anyattn.backends.triton import tile_config

    for d, dv, dtype in itertools.product((16, 64, 128, 256), (16, 64, 256), (torch.float32, torch.bfloat16)):
        for has_score, columns in itertools.product((False, True), (0, 4)):
            shape = tile_config.Shape(d, dv, dtype, has_score, columns)
            for (rows, is_short, group), name in itertools.product(((1, True, 1), (64, True, 8), (4096, False, 1)), tile_config.PASSES):
                for tiles in tile_config.candidates(name, shape, capability, rows, is_short, group):
                    assert tile_config.fits(name, tiles, shape, capability) and min(tiles.tile_m, tiles.tile_n) >= 16


# (capability, place in DIMS, is the backward pass): each generation, and each dtype, in one pass or the other
TILES = [
    pytest.param(*case)
    for case in (
        *(((9, 0), 1, False), ((8, 6), 1, False), ((10, 0), 0, False), ((9, 0), 2, True), ((8, 0), 1, True), ((10, 0), 1, True)),
        *(((8, 6), 3, False), ((9, 0), 3, True), ((9, 0), 4, False), ((9, 0), 4, True)),
    )
]


@judged_with_the_pinned_triton
@pytest.mark.parametrize(("capability", "at", "backward"), few(TILES, TILES[0], TILES[2], TILES[4], TILES[6]))
def test_what_the_compiler_makes_of_the_tiles(capability, at, backward) -> None:  # type: ignore[no-untyped-def]
    """The formula for shared memory is at least what is taken, and what is taken is there."""
    from anyattn.backends.triton import tile_config
    from anyattn.backends.triton.codegen.assumptions import shape_of

    d, dv, dtype = DIMS[at]
    problem = ahead.problem_of(SCORES["alibi"], lambda b, h, q, k: q >= k, dim=d, dim_v=dv, dtype=dtype, has_grad=backward)
    for launch in ahead.launches(problem, capability, backward=backward):
        options = launch.options
        if "TILE_N" not in options:
            continue
        name = "forward" if not backward else "dkdv" if "IS_GROUPED" in options else "dq"
        tiles = tile_config.Tiles(options["TILE_M"], options["TILE_N"], options["num_warps"], options["num_stages"])
        kernel = ahead.compiled(launch, capability)
        needed = tile_config.needed(name, tiles, shape_of(problem), capability)
        assert kernel.metadata.shared <= needed <= tile_config.shared_memory(capability), (name, tiles)
        assert ahead.spilled(kernel) <= ahead.MOST_SPILLED, (name, tiles)


@pytest.mark.parametrize(
    ("capability", "dim"),
    [((8, 6), 128), *(pytest.param(*other, marks=pytest.mark.slow) for other in (((9, 0), 128), ((9, 0), 256), ((10, 0), 128)))],
)
def test_gradients_of_pairs_and_distances_find_their_room(capability: tuple[int, int], dim: int) -> None:
    """dq with what its scores send to two captured tensors, by entries and by diagonals: what most shared memory is taken for. Nothing is
    assembled: only the memory counts."""
    from anyattn.backends.triton import tile_config
    from anyattn.backends.triton.codegen.assumptions import shape_of

    table, pairs = torch.zeros(4, 600, requires_grad=True), torch.zeros(256, 256, requires_grad=True)
    score = lambda s, b, h, q, k: s + table[h, q - k + SHIFT] * pairs[q, k]
    problem = ahead.problem_of(score, lambda b, h, q, k: q >= k, dim=dim, has_grad=True)
    launch = next(x for x in ahead.launches(problem, capability, backward=True) if "SLOT_M" in x.options)
    options = launch.options
    tiles = tile_config.Tiles(options["TILE_M"], options["TILE_N"], options["num_warps"], options["num_stages"])
    taken, needed = (
        ahead.compiled(launch, capability, "llir").metadata.shared,
        tile_config.needed("dq", tiles, shape_of(problem), capability),
    )
    assert taken <= needed <= tile_config.shared_memory(capability), (capability, dim, tiles, taken, needed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_float32_is_summed_on_two_levels(dtype: torch.dtype) -> None:
    """A tile's product begins at zero, and one fused operation adds it to the tiles before it: so the compiler has not joined them. In 16
    bits the products of the results go on from what there is."""
    problem = ahead.problem_of(None, lambda b, h, q, k: q >= k, dim=64, dtype=dtype, has_grad=True)
    made = [*ahead.launches(problem, (9, 0)), *ahead.launches(problem, (9, 0), backward=True)[1:]]
    for launch, results in zip(made, (1, 1, 2), strict=True):
        text = ahead.compiled(launch, (9, 0), "llir").asm["ttgir"]
        sums = re.findall(r"(?:tt\.dot|ttng\.warp_group_dot) %\S+, %\S+, (%\S+)", text)
        zeros = re.findall(r"(%\S+) = arith\.constant dense<0\.0+e\+00> : tensor<\d+x\d+xf32", text)
        carried = len([name for name in sums if name.rstrip(",") not in zeros])
        loops = 2  # over full tiles and over partial ones
        fused = len(re.findall(r"math\.fma", text))
        assert (carried, fused) == ((0, loops * results) if dtype == torch.float32 else (loops * results, 0)), (sums, zeros)


@pytest.mark.parametrize("capability", few([(8, 0), (9, 0), (10, 0)], (9, 0)), ids=str)
def test_calls_of_documents(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Both forms of each kernel, as they are launched until it is known which of them has nothing to do: they fit, that of sequences spills
    nothing, and the other one reads its guard before anything else."""
    import anyattn
    from anyattn.backends.triton import tile_config
    from anyattn.documents.rewrite import DocumentTables

    monkeypatch.setattr(read_lists, "row_ranges", lambda mask: None)  # as on a GPU: lists beside the mask
    monkeypatch.setattr(DocumentTables, "answer", lambda self: None)
    ids = torch.arange(256) // 100
    lists = anyattn.create_block_mask(lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k), None, None, 256, 256, device="cpu")
    problem = ahead.problem_of(None, block_mask=lists, dim=64, has_grad=True)
    made = [*ahead.launches(problem, capability), *ahead.launches(problem, capability, backward=True)]
    ways = [(launch.options["HAS_ENTRIES"], launch.options["HAS_GUARD"]) for launch in made]
    assert ways == [(True, False), (False, True), *[(True, False)] * 3, *[(False, True)] * 3]
    for launch in made if capability == (9, 0) else made[:2]:
        kernel = ahead.compiled(launch, capability, "llir" if launch.options["HAS_GUARD"] else "cubin")
        assert kernel.metadata.shared <= tile_config.shared_memory(capability)
        if not launch.options["HAS_GUARD"]:
            assert ahead.spilled(kernel) <= ahead.MOST_SPILLED
        else:
            first = kernel.asm["ttgir"].split("tt.load", 2)[1]
            assert "cf.cond_br" in first, "something else is loaded before the guard is looked at"


LOADED = (torch.bool, torch.uint8, torch.int16, torch.int64, torch.bfloat16)


@pytest.mark.parametrize("dtype", few(LOADED, torch.bool, torch.int64, torch.bfloat16), ids=str)
def test_entries_of_every_dtype(dtype: torch.dtype) -> None:
    """Captured pairs come straight from memory, in the width of their dtype, whatever it is, for a score and for a mask; rows that begin at
    multiples of 16 bytes by way of shared memory."""
    pairs = torch.zeros(256, 257, dtype=dtype)[:, :256]
    score = lambda s, b, h, q, k: s + pairs[q, k]
    (launch,) = ahead.launches(ahead.problem_of(score, lambda b, h, q, k: pairs[q, k] != 0, dim=64), (9, 0))
    kernel = ahead.compiled(launch, (9, 0), "ptx")
    width = "u8" if dtype.itemsize == 1 else "u16" if dtype.itemsize == 2 else f"b{8 * dtype.itemsize}"
    assert f"ld.global.nc.{width}" in kernel.asm["ptx"] and kernel.metadata.shared <= 120 << 10
    even = pairs.contiguous()
    score = lambda s, b, h, q, k: s + even[q, k]
    (launch,) = ahead.launches(ahead.problem_of(score, lambda b, h, q, k: even[q, k] != 0, dim=64), (9, 0))
    kernel = ahead.compiled(launch, (9, 0), "ptx")
    assert "ld.global.nc" not in kernel.asm["ptx"] and "cp.async.c" in kernel.asm["ptx"] and kernel.metadata.shared <= 227 << 10


def test_what_fits_no_tile_is_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that no block's shared memory can hold is somebody else's, and says why."""
    from anyattn.backends.triton import plan, tile_config

    wide = ahead.problem_of(dim=256, dtype=torch.float32)
    assert plan.reason_against(wide) is None and plan.reason_against_backward(wide) is None
    monkeypatch.setattr(tile_config, "capability_of", lambda device: (7, 5))
    assert plan.reason_against_backward(ahead.problem_of(dim=128)) is None
    assert "a block has 64" in str(plan.reason_against_backward(wide))


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=str)
def test_values_that_were_in_keys_and_are_restored_elsewhere(capability: tuple[int, int]) -> None:
    """Hooks of saved tensors may copy them between the passes: a tile then has no room for as many keys."""
    from anyattn.backends.triton import Repeater, tile_config
    from anyattn.backends.triton.codegen.assumptions import shape_of

    apart = ahead.problem_of(dim=576, dim_v=512, has_grad=True)
    together = apart.like(v=apart.k.detach()[..., :512].requires_grad_())
    with ahead.caught(capability) as made:
        repeater = Repeater(together, ahead.planned(together, capability))
        found = repeater.forward(together)
        for problem in (together, apart):
            made.clear()
            repeater.backward(problem, found.out, found.lse, torch.zeros_like(found.out), None)  # type: ignore[arg-type]
            dq, dk, dv = [x for x in made if "TILE_N" in x.options]
            for name, x in (("dq", dq), ("dkdv", dk)):
                tiles = tile_config.Tiles(*(x.options[n] for n in ("TILE_M", "TILE_N", "num_warps", "num_stages")))
                assert tile_config.fits(name, tiles, shape_of(problem), capability)
            # which loads no values, and may have tiles of its own
            assert ahead.resources(ahead.compiled(dv, capability)).shared <= tile_config.shared_memory(capability)


def test_what_no_grid_has_room_for_is_not_supported() -> None:
    """A launch with more than 65,535 heads fails in the driver, and so does that which lists tiles of as many entries."""
    from anyattn import hardware, planner
    from anyattn.backends.triton import plan
    from anyattn.errors import BackendError

    def problem(batch: int, heads: int):  # type: ignore[no-untyped-def]
        q = torch.zeros(1, 1, 1, 1).expand(batch, heads, 1, 16).contiguous()
        return flex.flex_problem(q, q, q, None, None, None, None, None, False, None, True, False, False)

    machine = hardware.Hardware("cuda", "a GPU", 0, frozenset(), (8, 0), 108)
    uneven = lambda b, h, i, j: (b + i) % 3 > j % 2
    listed = flex.flex_problem(*[problem(65536, 1).q] * 3, None, None, uneven, None, None, False, None, True, False, False)
    assert plan.reason_against(problem(1, 65535)) is None
    for asked in (listed, problem(1, 65536)):
        assert "65536" in str(plan.reason_against(asked)) and "65536" in str(plan.reason_against_backward(asked))
        assert planner.choose(asked, machine).backend == "torch"
        with pytest.raises(BackendError, match=r"65536 .* 65535: call it on parts"):
            planner.choose(asked, machine, "triton")
    packed = torch.zeros(70000, 1, 16)
    from anyattn.sequences.unread_varlen import LengthTables
    from anyattn.validate.flash import Options, problem_of
    from anyattn.validate.sequences import offset_unread, unread_sequences

    ends = torch.arange(70001, dtype=torch.int32)
    sequences = unread_sequences(packed, packed, LengthTables(ends, ends, None, None), (1, 1), None)
    of_one_token_each = problem_of(packed, packed, packed, sequences, Options(), offset_unread(sequences, False))
    assert of_one_token_each.batch == 70000 and plan.reason_against(of_one_token_each) is None


@pytest.mark.parametrize(
    ("capability", "ratio", "packed", "tiles"),
    [((9, 0), 8, 8, 1), ((9, 0), 17, 9, 2), ((9, 0), 24, 12, 2), ((9, 0), 40, 14, 3), ((9, 0), 71, 15, 5), ((8, 0), 71, 36, 2)],
)  # fmt: skip
def test_any_number_of_heads_shares_tiles(capability: tuple[int, int], ratio: int, packed: int, tiles: int) -> None:
    """As few tiles as hold a group's heads, for each reads all keys; also of a number that nothing divides."""
    q, k = torch.zeros(1, 2 * ratio, 1, 64, dtype=torch.bfloat16), torch.zeros(1, 2, 256, 64, dtype=torch.bfloat16)
    problem = flex.flex_problem(q, k, k, None, None, None, None, None, True, None, True, False, False)
    plan = ahead.planned(problem, capability, {"num_splits": 1})
    (launch,) = ahead.launches(problem, capability, {"num_splits": 1})
    assert plan.heads_per_tile == packed and launch.grid[1] == 2 * tiles
    assert f"{packed} query heads share a row tile" in " ".join(plan.why)


def test_launches_are_caught_in_one_place() -> None:
    """A module that had these names of its own would go on asking the machine it runs on."""
    from anyattn.backends import triton as backend
    from anyattn.backends.triton import tile_config
    from anyattn.backends.triton.codegen import assumptions

    found = pkgutil.walk_packages(backend.__path__, f"{backend.__name__}.")
    modules = [importlib.import_module(m.name) for m in found]
    for name, home in (("capability_of", tile_config), ("is_nvidia", assumptions)):
        assert [m.__name__ for m in modules if hasattr(m, name)] == [home.__name__]


def test_few_rows_are_as_many_to_the_kernel() -> None:
    """Few rows have a sum for each column, and registers for each key's place: the compiler is asked for both by the same number."""
    from anyattn.backends.triton import tile_config
    from anyattn.backends.triton.kernels import key_tiles

    numbers = [x.value for name, x in vars(key_tiles).items() if name.startswith("_FEW")]
    assert numbers == [tile_config.FEW] and "constexpr(FEW)" in Path(key_tiles.__file__).read_text()
    rows = [16, 32, 64, 128]
    assert [tile_config.row_sums(m, 64, torch.bfloat16) == 64 for m in rows] == [m <= tile_config.FEW for m in rows]


@pytest.mark.parametrize("rows", [1, 200])
def test_any_number_of_entries(rows: int) -> None:
    """Windows of an image, say: beyond its first axis a grid has 65,535 places."""
    q, k = (torch.zeros(1, dtype=torch.bfloat16).expand(70000, 1, n, 16) for n in (rows, 200))
    problem = flex.flex_problem(q, k, k, None, None, None, None, None, False, None, True, False, False)
    (launch,) = ahead.launches(problem, (9, 0))
    assert launch.grid[0] == 70000 and max(launch.grid[1:]) < 65536 and launch.given[launch.kernel.arg_names.index("together")] == -1


def test_loads_are_wide_where_rows_are_aligned() -> None:
    """Pieces of 16 bytes, as the real launcher sees it; one odd address and they are single."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    odd = torch.zeros(4 * 256 * 64 + 1, dtype=torch.bfloat16)[1:].view(1, 4, 256, 64)
    for moved in (False, True):
        problem = ahead.problem_of(dim=64)
        (launch,) = ahead.launches(problem.like(q=odd) if moved else problem, (8, 0))
        kernel = launch.kernel
        bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 80, 32)))
        special = bind(*launch.given, **launch.options)[1]
        assert all(s == ("*bf16", None if moved else "D") for s in special[:4])
        text = ahead.compiled(launch, (8, 0), "ptx").asm["ptx"]
        assert ("cp.async.cg.shared.global [ %r" in text) is not moved
        assert ("st.global.v4.b32" in text) is not moved and ("st.global.b16" in text) is moved


def test_gradients_by_distance_are_summed_first() -> None:
    """What has an entry for each distance sends a fifth of its tiles' scores, and the product that sums them finds its shared memory."""
    from anyattn.backends.triton import tile_config
    from anyattn.backends.triton.codegen.assumptions import shape_of

    table = torch.zeros(4, 256, requires_grad=True)
    problem = ahead.problem_of(lambda s, b, h, q, k: s + table[h, torch.abs(q - k)], dim=128, has_grad=True)
    launch = next(x for x in ahead.launches(problem, (9, 0), backward=True) if "dq_tile" in x.kernel.fn.__code__.co_filename)
    tile = tile_config.backward_tiles(shape_of(problem), (9, 0))["dq"]
    kernel = ahead.compiled(launch, (9, 0))
    each = tile.tile_m * tile.tile_n / (32 * tile.num_warps)
    loops = [ops for ops in ahead.machine_loops(kernel.asm["cubin"]) if any("HGMMA" in op for op in ops)]
    assert loops and all(sum(op.startswith(("RED", "ATOM")) for op in ops) <= each / 4 for ops in loops)
    assert kernel.metadata.shared <= tile_config.needed("dq", tile, shape_of(problem), (9, 0))
    assert ahead.spilled(kernel) <= ahead.MOST_SPILLED


@pytest.mark.parametrize("capability", few([(8, 0), (9, 0), (10, 0)], (9, 0)), ids=str)
def test_deterministic_gradients_of_captured_tensors(capability: tuple[int, int]) -> None:
    """They are added as whole numbers, by diagonals and one by one, in kernels that find their shared memory and registers; nothing else
    is, and a call that is not deterministic has none of it."""
    from anyattn.backends.triton import tile_config

    table, pairs = torch.zeros(4, 512, requires_grad=True), torch.zeros(256, 256, requires_grad=True)
    mods = (lambda s, b, h, q, k: s + table[h, q - k + 256], lambda s, b, h, q, k: s + pairs[q, k])
    for mod in mods:
        problem = ahead.problem_of(mod, dim=64, has_grad=True)
        for is_deterministic in (True, False) if mod is mods[1] else (True,):
            made = ahead.launches(problem.like(deterministic=is_deterministic), capability, backward=True)
            names = [x.kernel.fn.__code__.co_filename for x in made]
            assert len(made) == 3 + is_deterministic and ("deterministic_sum" in names[-1]) is is_deterministic
            launch = next(x for x, name in zip(made, names, strict=True) if "dq_tile" in name)
            kernel = ahead.compiled(launch, capability, "cubin" if is_deterministic else "ptx")
            sent = {found.group(1) for found in re.finditer(r"(?:red|atom)\.[a-z.]*add\.(?:noftz\.)?([a-z0-9]+)", kernel.asm["ptx"])}
            assert sent == ({"u64"} if is_deterministic else {"f32"}), sent
            assert kernel.metadata.shared <= tile_config.shared_memory(capability)
            if is_deterministic:
                assert ahead.spilled(kernel) <= ahead.MOST_SPILLED
                assert ahead.compiled(made[-1], capability, "llir").metadata.shared == 0


@pytest.mark.parametrize("capability", few([(8, 0), (9, 0), (10, 0)], (9, 0)), ids=str)
def test_gradients_of_pages(capability: tuple[int, int]) -> None:
    import anyattn

    pools = [torch.zeros(9, 16, 2, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    q, table = torch.zeros(50, 4, 64, dtype=torch.bfloat16, requires_grad=True), torch.arange(8, dtype=torch.int32).view(2, 4)
    places = {"cu_seqlens_q": torch.tensor([0, 20, 50]), "seqused_k": torch.tensor([60, 33]), "page_table": table}
    with ahead.on(capability) as made:
        out = anyattn.flash_attn_varlen_func(q, *pools, **places, causal=True, backend="triton")
        torch.autograd.grad(out, [q, *pools], torch.zeros_like(out))
    names = [x.kernel.fn.__code__.co_filename for x in made]
    assert ["gathered_keys" in name for name in names] == [False, True, *[False] * 3, True, True]
    assert ahead.compiled(made[-1], capability, "llir").metadata.shared == 0


@pytest.mark.parametrize(("dim", "most"), [(64, 168), (128, 255)])
def test_descriptors_come_with_the_launch(dim: int, most: int) -> None:
    """On Hopper keys, values and output have descriptors, no store is narrow, and as many programs fit on a multiprocessor as were
    measured: three of head dimension 64, two of 128."""
    problem = ahead.problem_of(mask_mod=lambda b, h, q, k: q >= k, dim=dim)
    (launch,) = ahead.launches(problem, (9, 0))
    assert launch.options["IS_DESCRIBED"] >= 2 and all(hasattr(launch.given[i], "block_shape") for i in (1, 2))
    kernel = ahead.compiled(launch, (9, 0))
    used = ahead.resources(kernel)
    assert used.registers <= most and used.stack <= 16
    assert "st.global.b16" not in ahead.compiled(launch, (9, 0)).asm["ptx"]
    assert (3 if dim == 64 else 2) * (used.shared + 1024) <= 228 << 10
    # products are not waited for one by one
    assert all(sum(op.startswith("WARPGROUP") for op in ops) < 10 for ops in ahead.machine_loops(kernel.asm["cubin"]))


def test_known_kernels_are_launched_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second launch of the same kind goes past Triton's launcher, one of another dtype does not."""
    from types import SimpleNamespace

    from anyattn.backends.triton.codegen import entry

    calls: list[tuple] = []

    class Compiled:
        def __getitem__(self, grid):  # type: ignore[no-untyped-def]
            return lambda *given: calls.append(("direct", grid, given))

    class Kernel:
        params = (SimpleNamespace(name="x", is_constexpr=False), SimpleNamespace(name="A", is_constexpr=True))

        def __getitem__(self, grid):  # type: ignore[no-untyped-def]
            def run(*given, **options):  # type: ignore[no-untyped-def]
                calls.append(("launcher", grid, options))
                return Compiled()

            return run

    monkeypatch.setattr(entry, "current_device", lambda device: __import__("contextlib").nullcontext())
    kernel, device = Kernel(), torch.device("cuda", 0)
    for tensor, a in ((torch.zeros(1), 3), (torch.ones(2), 3), (torch.zeros(1), 4), (torch.zeros(1).half(), 3), (torch.zeros(1), 3)):
        entry.run_entry(kernel, (1, 2, 3), [tensor, 7], [], device, {"A": a, "num_warps": 4})
    assert [c[0] for c in calls] == ["launcher", "direct", "launcher", "launcher", "direct"]
    assert calls[1][1] == (1, 2, 3) and calls[1][2][1:] == (7, 3) and calls[0][2] == {"A": 3, "num_warps": 4}


def test_a_second_backward_launches_its_kernels_alone() -> None:
    """The lists of a block mask are transposed once: later backward passes compute nothing besides their three kernels."""
    import anyattn
    from tests.support.inside import InsideMode

    class Operations(InsideMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            found.add(operation.overloadpacket.__name__)
            return operation(*args, **(kwargs or {}))

    found: set[str] = set()
    mask = anyattn.create_block_mask(lambda b, h, q, k: (IDS[q] == IDS[k]) & (q * k % 5 < 3), 1, 1, 256, 256, device="cpu")
    problem = ahead.problem_of(block_mask=mask, has_grad=True)
    for expected in (True, False):
        found.clear()
        with Operations():
            assert len(ahead.launches(problem, (9, 0), backward=True)) == 3
        # (zeros_like is the helper's own gradient of the output)
        assert bool(found - {"empty", "empty_like", "empty_strided", "detach", "zeros_like"}) is expected, found


@judged_with_the_pinned_triton
@pytest.mark.parametrize("mask", [pytest.param(None, marks=pytest.mark.slow), lambda b, h, q, k: q >= k], ids=["full", "causal"])
def test_what_the_loops_of_the_backward_are_made_of(mask) -> None:  # type: ignore[no-untyped-def]
    """Over full tiles: rows' statistics come as tiles do, in pieces of 8 bytes, each address is a pointer that moves plus what stays, tiles
    are asked for a whole step ahead, and a score takes so many of the machine's instructions (6 of them its own arithmetic)."""
    made = ahead.launches(ahead.problem_of(mask_mod=mask, has_grad=True), (9, 0), backward=True)
    assert len(made) == 3
    for launch in made[1:]:
        kernel, options = ahead.compiled(launch, (9, 0)), launch.options
        full = "\n".join(next(x for x in ahead.loops(kernel) if any("wgmma.mma" in line for line in x)))
        assert len(re.findall(r"(mul\.lo|mad\.lo)\.s64", full)) <= 4 and "ld.global" not in full
        assert {int(n, 16) for n in re.findall(r"cp\.async\.ca\.\S+ \[.*?\], \[.*?\], (0x\w+)", full)} <= {8}
        assert re.search(r"cp\.async\.wait_group\s+(0x)?[1-9]", full)
        scores = options["TILE_M"] * options["TILE_N"] / (32 * options["num_warps"])
        machine = min((x for x in ahead.machine_loops(kernel.asm["cubin"]) if any("MMA" in o for o in x)), key=len)
        assert len(machine) <= 14 * scores, len(machine) / scores


@judged_with_the_pinned_triton
def test_a_score_mod_by_distance_in_the_backward() -> None:
    """ALiBi takes a score no more than a difference, an absolute value, a product and the score's own sum: distances are floats from the
    start, log2(e) is part of the slope, and the derivative, which is 1, is nothing. No register goes to memory for it. Heads that share
    keys compile too."""
    import anyattn

    score = anyattn.scores.alibi(BIAS).fn
    _, dq, dkdv = ahead.launches(ahead.problem_of(score, lambda b, h, q, k: q >= k, has_grad=True), (9, 0), backward=True)
    for launch, most in ((dq, 14), (dkdv, 18)):
        kernel, options = ahead.compiled(launch, (9, 0)), launch.options
        scores = options["TILE_M"] * options["TILE_N"] / (32 * options["num_warps"])
        machine = min((x for x in ahead.machine_loops(kernel.asm["cubin"]) if any("MMA" in o for o in x)), key=len)
        assert len(machine) <= most * scores, len(machine) / scores
        assert sum(o.startswith("I2F") for o in machine) <= scores / 2  # of columns, not of scores


def test_the_backward_of_a_band() -> None:
    """Rows that see a band of keys have tiles of their own, and one loop visits full and partial tiles: what only the partial ones ask is
    in a branch, before which and after which products are in flight as in a loop without."""
    from anyattn import masks
    from anyattn.backends.triton.codegen.programs import program_of

    bands = {"window": masks.sliding_window(100, 0), "sink": masks.sink_window(8, 100), "chunks": masks.chunked(64)}
    others = {"causal": masks.causal(), "prefix": masks.prefix_lm(30), "none": None, "after": lambda b, h, q, k: k >= q}
    for name, mask in {**bands, **others}.items():
        problem = ahead.problem_of(mask_mod=getattr(mask, "fn", mask), has_grad=True)
        assert program_of(problem).program.has_band is (name in bands), name
    _, dq, dkdv = ahead.launches(ahead.problem_of(mask_mod=bands["window"].fn, has_grad=True), (9, 0), backward=True)
    assert (dq.options["TILE_M"], dq.options["num_warps"]) == (64, 4) and dkdv.options["IS_JOINED"]
    kernel = ahead.compiled(dkdv, (9, 0))
    loop, *_ = (x for x in ahead.machine_loops(kernel.asm["cubin"]) if any("MMA" in o for o in x))  # the other repairs what is not finite
    assert sum("BRA" in o for o in loop) == 2 and sum("HGMMA" in o for o in loop) == 24
    assert ahead.spilled(kernel) <= ahead.MOST_SPILLED


@pytest.mark.parametrize("dim", [64, pytest.param(128, marks=pytest.mark.slow), pytest.param(256, marks=pytest.mark.slow)])
def test_reductions_spill_nothing_and_take_one_product(dim: int) -> None:
    """Two programs of a full mask's sums fit a multiprocessor's registers and shared memory up to 128 dimensions."""
    from anyattn.backends.triton import Repeater

    problem = ahead.problem_of(dim=dim)
    repeater, lse = Repeater(problem, ahead.planned(problem, (9, 0))), torch.zeros(problem.q.shape[:3])
    with ahead.caught((9, 0)) as made:
        repeater.key_sums(problem, lse, 0)
        repeater.block_reductions(problem, lse, (64, 64), True, False)
    for launch in (made[1], made[2]):
        kernel = ahead.compiled(launch, (9, 0))
        found = ahead.resources(kernel)
        assert found.stack == 0 and (dim > 128 or (found.registers <= 128 and found.shared <= 113 << 10)), found
        loop = "\n".join(min(ahead.loops(kernel), key=len))
        steps = launch.options["TILE_M"] // 64 * dim // 16 if "BLOCK_ROWS" in launch.options else dim // 16
        assert loop.count("wgmma.mma_async") * launch.options["num_warps"] // 4 <= 2 * steps, loop
