"""Even shares of all key tiles among any number of programs, in Triton's interpreter, against the row-wise budget.

Run by test_in_the_interpreter.py, for the interpreter has to be chosen before Triton is imported.
"""

from dataclasses import replace

import pytest
import torch

import anyattn
from anyattn.backends.triton import launch_shape, tile_config
from anyattn.call_cache import attention
from anyattn.testing import budget
from anyattn.validate import sequences as check_lengths
from tests.entry_points import test_flash_cache as cache_tests
from tests.support import flash_calls as calls
from tests.support import flash_reference as reference
from tests.support.flash_calls import RECIPES

PROGRAMS = (1, 2, 3, 7, 24, 61)
SETTINGS = ("one each", "packed", "packed in pages behind padding", "padding, pages of 16", "other rows", "more queries than keys")
UNEVEN = cache_tests.Setting(cached=(197, 0, 64, 3), queries=(1,) * 4, capacity=260, heads=(6, 2), dims=(16, 24))


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):  # type: ignore[no-untyped-def]
    """As on a GPU nobody looks at tables; a sequence has several tiles of 16 keys."""
    monkeypatch.setattr(check_lengths, "skips_device_reads", lambda device, validate: validate is not True)
    monkeypatch.setattr(tile_config, "_few_rows", lambda tiles, rows, dtype: tile_config.Tiles(16, 16, 4, 2))
    attention.clear()
    yield
    attention.clear()


def shared(monkeypatch, programs, least=1, merged=10**6, spared=-(10**4)):  # type: ignore[no-untyped-def]
    """So many programs, with shares as small as may be, or as these numbers say."""
    attention.clear()
    monkeypatch.setattr(launch_shape, "_programs", lambda *args: programs)
    monkeypatch.setattr(launch_shape, "_LEAST_SHARED", 0)
    for name, value in (("_LEAST_TILES", least), ("_MERGED_TILES", merged), ("_SPARED_TILES", spared)):
        monkeypatch.setattr(launch_shape, name, value)


@pytest.mark.covering(1)
@pytest.mark.parametrize("programs", PROGRAMS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_any_number_of_programs(setting, programs, monkeypatch):  # type: ignore[no-untyped-def]
    shared(monkeypatch, programs)
    cache_tests.check(cache_tests.SETTINGS[setting], RECIPES["causal"], backend="triton", num_splits=0)


@pytest.mark.covering(1)
@pytest.mark.parametrize("page_size", [0, 5, 16, 32])
@pytest.mark.parametrize("programs", [5, 40])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_of_an_uneven_batch(recipe, programs, page_size, monkeypatch):  # type: ignore[no-untyped-def]
    shared(monkeypatch, programs)
    cache_tests.check(replace(UNEVEN, page_size=page_size), RECIPES[recipe], backend="triton", num_splits=0)


def test_more_sequences_than_are_counted_at_once(monkeypatch):  # type: ignore[no-untyped-def]
    """With some that are empty, some of one tile and some of several, among three chunks of 128."""
    random = torch.Generator().manual_seed(2)
    lengths = torch.randint(0, 90, (300,), generator=random) * (torch.rand(300, generator=random) < 0.8)
    q, k, v = (torch.randn(300, n, h, 16, generator=random) for n, h in ((1, 4), (96, 2), (96, 2)))
    given = {"cache_seqlens": lengths, "causal": True}
    for programs in (2, 50, 700):
        shared(monkeypatch, programs)
        out, lse = anyattn.flash_attn_with_kvcache(q, k, v, **given, return_lse=True, backend="triton", num_splits=0)
        wanted = reference.cached(q, k, v, **given)
        reference.judge(wanted.sequences, {"out": out, "lse": lse}, lambda tensors: {"causal": True}, label=str(programs))


SIZES = {"least": (4, 10**6, -(10**4)), "merged": (1, 1, -(10**4)), "spared": (1, 10**6, 10**4)}


@pytest.mark.parametrize(("least", "merged", "spared"), SIZES.values(), ids=SIZES)
def test_sizes_of_shares_that_save_merging(least, merged, spared, monkeypatch):  # type: ignore[no-untyped-def]
    for programs in (3, 8, 30):
        shared(monkeypatch, programs, least, merged, spared)
        cache_tests.check(UNEVEN, RECIPES["causal"], backend="triton", num_splits=0)


def test_row_tiles_of_one_program_are_to_the_bit_those_without_shares(monkeypatch):  # type: ignore[no-untyped-def]
    """A program for each row tile, and one for all of them, divide no keys."""
    given = cache_tests.arguments(UNEVEN) | {"causal": True, "backend": "triton", "return_lse": True}
    plain = calls_of(given, 1)
    for programs, spared in ((1, -(10**4)), (8, 10**4)):
        shared(monkeypatch, programs, spared=spared)
        assert all(calls.same_bits(a, b) for a, b in zip(calls_of(given, 0), plain, strict=True)), programs


def calls_of(given, splits):  # type: ignore[no-untyped-def]
    copies = {n: given[n].clone() for n in ("k_cache", "v_cache")}
    return anyattn.flash_attn_with_kvcache(**{**given, **copies}, num_splits=splits)


def test_lists_and_a_sink(monkeypatch):  # type: ignore[no-untyped-def]
    """A mask without row ranges: a portion of a row tile is one of the tiles that its list names, whatever lengths suggest."""
    random = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, n, h, 16, generator=random) for n, h in ((3, 4), (300, 2), (300, 2)))
    options = {"sink": torch.randn(4, generator=random), "mask_mod": lambda b, h, i, j: ((i + j) % 7 == 0) | (j // 40 == b + 2)}
    given = (q, k, v, torch.tensor([0, 3, 6]), torch.tensor([0, 300, 600]))
    packed = [t.flatten(0, 1) for t in given[:3]]

    def called(tensors, **more):  # type: ignore[no-untyped-def]
        return anyattn.flash_attn_varlen_func(*tensors, *given[3:], 3, 300, return_lse=True, **options | more)

    exact = called([t.double() for t in packed], sink=options["sink"].double(), backend="torch")
    rough = called(packed, backend="torch")
    for programs in (2, 9, 33):
        shared(monkeypatch, programs)
        for name, found, want, plain in zip(("out", "lse"), called(packed, num_splits=0, backend="triton"), exact, rough, strict=True):
            budget.check(f"{name}, {programs} programs", found, want, plain)
