"""Every mutant of the package on the CPU is caught by the check that it names; with no bug, all checks pass."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable

import pytest
import torch

from anyattn.call_cache import attention
from tests.backends.torch import test_backward as streaming
from tests.backends.torch import test_decode as decoding
from tests.call_cache import test_attention as known_attention
from tests.call_cache import test_block_mask as known_masks
from tests.call_cache import test_kvcache as known_calls
from tests.entry_points import test_8_bit_append as appending
from tests.entry_points import test_dropout as dropout
from tests.entry_points import test_edge_cases as edge
from tests.entry_points import test_flash_varlen as varlen
from tests.entry_points import test_kvcache as kvcache
from tests.kvcache import test_quantise as quantising
from tests.mods.analysis import test_tile_classes as tile_classes
from tests.mutants import cpu_mutants as mutants
from tests.sequences import test_block_info as blocks
from tests.support import cases
from tests.support import sequences as seq
from tests.support.flex_calls import judge, results
from tests.support.machines import PLAIN, WITH_BF16, planned_for

_fresh = itertools.count()
SMALL = cases.Shape(2, 4, 2, 67, 67, 16, 16)
TALL = cases.Shape(1, 2, 1, 300, 310, 8, 8)


@functools.cache
def wanted(variant: str, shape: cases.Shape, kind: str, dtype: torch.dtype, with_lse: bool) -> tuple[cases.Case, cases.Expected]:
    case = cases.Case(variant, shape, kind)
    return case, cases.expected(case, dtype, with_lse=with_lse)


def case(variant: str, shape=SMALL, kind="normal", dtype=torch.float32, with_lse=True, **options) -> Callable[[], None]:
    def check() -> None:
        which, want = wanted(variant, shape, kind, dtype, with_lse)
        want.check(results(which, want, **options), variant)

    return check


def half(variant: str, shape=SMALL) -> Callable[[], None]:
    return case(variant, shape, dtype=torch.bfloat16, with_lse=False)


def block_mask(block: int) -> Callable[[], None]:
    """Torch's lists, which are taken as they are; those that anyattn made say no more than their mask does."""

    def check() -> None:
        from torch.nn.attention.flex_attention import create_block_mask

        q, k, v = edge.qkv(1, 2, 1, 130, 141, 8, 8)
        mask = lambda b, h, i, j: (j <= i) & ((j < 100) | (i == 120))
        made = create_block_mask(mask, None, None, 130, 141, device="cpu", BLOCK_SIZE=block)
        judge(q, k, v, mask=mask, block_mask=made, kernel_options={"tile_m": 16})

    return check


def by(name: str) -> Callable[[], None]:
    """Masks that differ by head or batch entry, which splits the work, and biases that must follow."""

    def check() -> None:
        q, k, v = edge.qkv(2, 4, 2, 80, 90, 8, 8)
        mask = {"head": lambda b, h, i, j: i - j >= 3 * h, "batch": lambda b, h, i, j: i - j >= 3 * b}[name]
        bias = torch.linspace(-1, 1, 4, dtype=torch.float64)
        score = {"head": lambda s, b, h, i, j: s + bias[h] * j * 0.1, "batch": lambda s, b, h, i, j: s + bias[b] * j * 0.1}[name]
        judge(q, k, v, mask=mask)
        judge(q, k, v, mask=mask, score=score, captured=[bias])

    return check


def blind_half() -> None:
    q, k, v = edge.qkv(1, 2, 1, 100, 100, 8, 8, dtype=torch.bfloat16)
    judge(q, k, v, mask=lambda b, h, i, j: (j <= i) & (i < 90) & (j >= 10))


def where() -> None:
    judge(*edge.qkv(1, 2, 1, 40, 50, 8, 8), score=lambda s, b, h, i, j: torch.where(i >= j, s * 2.0, s * 0.5))


def tables() -> None:
    """A bias for each pair in tiles whose rows ascend and in such that descend, and a choice of two numbers."""
    q, k, v = edge.qkv(2, 2, 2, 70, 70, 8, 8)
    kinds = torch.arange(70) % 3
    pair, two = (
        torch.randn(2, 2, 70, 70, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
        torch.tensor([[1.0, -1.0], [0.5, 2.0]]),
    )
    two = two.double()
    for mask in (lambda b, h, i, j: kinds[i] != kinds[j], lambda b, h, i, j: (kinds[i] != kinds[j]) | (i == j)):
        judge(q, k, v, mask=mask, score=lambda s, b, h, i, j: s + pair[b, h, i, j], captured=[pair], kernel_options={"tile_m": 32})
        added = pair.detach().float()  # of the scores' dtype, so that it is no more than a bias
        judge(q, k, v, mask=mask, score=lambda s, b, h, i, j: s + added[b, h, i, j])  # noqa: B023
    judge(q, k, v, score=lambda s, b, h, i, j: s + two[(kinds[i] == kinds[j]).to(torch.int32), h], captured=[two])


def hidden_by_a_bias() -> None:
    bias = torch.zeros(70, 70)
    bias[11] = -math.inf
    judge(*edge.qkv(1, 2, 2, 70, 70, 8, 8), score=lambda s, b, h, i, j: s + bias[i, j])


def narrowed() -> None:
    """A mask by the sign of what wraps around in 32 bits."""
    added = torch.tensor([12345, 7])
    judge(*edge.qkv(2, 2, 1, 40, 50, 8, 8), mask=lambda b, h, i, j: (i + j * 2**27 + added[b]).to(torch.int32) > 0)


def runs_half() -> None:
    q, k, v = edge.qkv(1, 1, 1, 100, 700, 8, 8, dtype=torch.bfloat16)
    judge(q, k, v, mask=lambda b, h, i, j: (j < 20) | ((j >= 400 + i) & (j < 500 + i)))


def packed() -> None:
    """Lengths that differ between sequences and sides, an offset per sequence, a bias that knows its sequence."""
    batch = seq.ragged([40, 3, 70], [50, 90, 20])
    bias = torch.tensor([0.5, -2.0, 3.0], dtype=torch.float64)
    for meaning in (
        seq.Meaning(causal=True, score_mod=lambda s, b, h, i, j: s + bias[b] * (i % 3)),
        seq.Meaning(mask_mod=lambda b, h, i, j: (i + j * j + b) % 3 != 0),
    ):
        got, _ = varlen.results(batch, meaning, varlen.packed_call)
        seq.judge(got, batch, meaning)


def used() -> None:
    batch = seq.ragged([4, 9], [5, 30])
    got, _ = varlen.results(batch, seq.Meaning(), varlen.used_call)
    seq.judge(got, batch, seq.Meaning())


def cache(meaning: str = "causal", **setting) -> Callable[[], None]:
    def check() -> None:
        kvcache.check(kvcache.Setting(**{"new": 3, "queries": 3, **setting}), kvcache.MEANINGS[meaning])

    return check


def again(**setting) -> Callable[[], None]:
    """A call and another of the same facts, which is known."""

    def check() -> None:
        for seed in (0, 1):
            kvcache.check(kvcache.Setting(**setting, seed=seed), kvcache.MEANINGS["causal"])

    return check


def hidden_index() -> None:
    """An index that leaves its table where a captured number lets the mask hide it, and no further."""
    pytest.importorskip("triton")
    table = torch.zeros(300)
    name = f"n{next(_fresh)}"  # code that equals none of an earlier run, which may have left something
    text = f"[lambda b, h, q, k, {name}=n: (q < {name}) & (table[q + 10] == 0) for n in numbers]"
    masks = eval(text, {"table": table, "numbers": (290, 291)})
    with known_masks.as_on_a_gpu() as gpu:
        known_masks.warmed(gpu, lambda: known_masks.made(masks[0]))
        try:
            known_masks.made(masks[1])
        except ValueError:
            return
    raise AssertionError("a mask that reads outside its table is not refused")


def far_numbers() -> None:
    pytest.importorskip("triton")
    with known_masks.as_on_a_gpu() as gpu:
        known_masks.test_far_numbers_are_never_warm(gpu, lambda n: lambda b, h, q, k: q < n, 2**40 + 1)


def known_mask() -> None:
    pytest.importorskip("triton")
    with known_masks.as_on_a_gpu() as gpu:
        known_masks.test_closures_made_anew(gpu)


def splits() -> None:
    batch = seq.ragged([3, 40], [500, 300])
    meaning = seq.Meaning(causal=True, sink=torch.tensor([0.5, -1.0, 2.0, 0.0]))
    got, _ = varlen.results(batch, meaning, varlen.packed_call, num_splits=3)
    seq.judge(got, batch, meaning)


def appended_to_8_bits() -> None:
    for form in ("head", "key"):
        appending.check(appending.Setting(k_form=form, v_form=form, queries=2, page_size=3), seq.Meaning(causal=True), 2, half=6)


CHECKS: dict[str, Callable[[], object]] = {
    "full": case("full"),
    "tables": tables,
    "hidden_by_a_bias": hidden_by_a_bias,
    "causal": case("causal", TALL),
    "window": case("window", TALL),
    "islands": case("islands"),
    "sink": case("sink"),
    "alibi": case("alibi"),
    "relative": case("relative"),
    "relative_window": case("relative_window"),
    "head_bias": case("head_bias"),
    "softcap": case("softcap"),
    "chunks": case("full", kind="peaky", kernel_options={"tile_m": 16, "tile_n": 16}),
    "gqa": case("causal", SMALL, kernel_options={"tile_m": 32}),
    "full_half": half("full"),
    "one_key_half": lambda: streaming.test_a_row_that_sees_one_key_has_the_dq_of_exact_products(torch.bfloat16, 70, False),
    "blind_half": blind_half,
    "runs_half": runs_half,
    "block_mask": block_mask(32),
    "by_head": by("head"),
    "by_batch": by("batch"),
    "where": where,
    "narrowed": narrowed,
    "dropout": lambda: dropout.test_flex_against_the_oracle("tiles", torch.float32),
    "dropout_again": lambda: dropout.test_a_seed_for_each_call_which_manual_seed_repeats(dropout.flash),
    "garbage_at_a_sink": lambda: edge.test_12_garbage_in_a_row_that_sees_only_the_sink("float16"),
    "infinite_derivative": edge.test_16_a_derivative_that_is_infinite_under_the_mask,
    "closures": edge.test_17_two_closures_with_equal_code,
    "closures_of_other_lengths": edge.test_17_closures_with_equal_code_in_calls_of_other_lengths,
    "huge_table": edge.test_05_a_captured_table_indexed_past_two_to_the_31,
    "inputs": edge.test_inputs_are_never_modified,
    "packed": packed,
    "used": used,
    "pages": cache(page_size=3),
    "leftpad": cache(leftpad=(5, 0, 33, 12), capacity=140),
    "leftpad_rotary": cache(leftpad=(5, 0, 33, 12), rotary_dim=8),
    "rotary": cache(rotary_dim=8),
    "rows": cache(shuffled_rows=True),
    "places": cache("mods see places"),
    "known": again(),
    "decode": lambda: decoding.test_against_the_oracle("pages of 16 behind padding", seq.Meaning(window_size=(9, 0))),
    "decode_sink": lambda: decoding.test_against_the_oracle("alike", seq.Meaning(causal=True)),
    "rounding": lambda: quantising.test_the_nearest_number_ties_to_even(torch.int8),
    "counting": lambda: quantising.test_what_saturates_is_what_rounding_leaves_out_of_range(torch.float8_e4m3fn),
    "own_scales": lambda: quantising.test_a_row_s_own_scale(torch.int8),
    "appended_to_8_bits": appended_to_8_bits,
    "known_8_bits": lambda: appending.check(appending.Setting(k_form="head", v_form="head"), seq.Meaning(), 1),
    "known_pages": again(cached=(41, 8, 62, 11), page_size=3),
    "known_mask": known_mask,
    "far_numbers": far_numbers,
    "hidden_index": hidden_index,
    "traced_mods": lambda: known_attention.test_a_traced_mod_is_the_same_in_every_call(known_attention._score_of_two_numbers),
    "pages_by_head": known_calls.test_pages_of_a_sequence_whose_heads_see_other_keys,
    "bits": lambda: kvcache.test_the_batch_changes_no_bit_of_an_entry((20, 20, 20, 20), 1),
    "splits": splits,
    "bounds": lambda: (tile_classes.test_wild_values_are_left_open(), tile_classes.test_unknown_stays_unknown()),
    "blocks": lambda: blocks.test_ranges_are_tight_and_transposes_of_each_other(0),
}


@pytest.fixture(autouse=True)
def cpu():
    """Whole spans are for a CPU with bfloat16 products, and streaming is for all else."""
    with planned_for(WITH_BF16):
        yield


@pytest.mark.parametrize("name", CHECKS)
def test_without_a_bug_the_checks_pass(name):
    CHECKS[name]()


@pytest.fixture(autouse=True)
def _by_torchs_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled loops, which have bugs of their own (``test_compiled_forward``), compute nothing here."""
    monkeypatch.setenv("ANYATTN_COMPILED_LOOPS", "0")
    attention.clear()


@pytest.mark.parametrize("name", mutants.MUTANTS)
def test_killed(name):
    check = CHECKS[mutants.MUTANTS[name].killer]
    with mutants.active(name), pytest.raises((AssertionError, RuntimeError, IndexError)):
        check()
    check()  # and the bug is gone afterwards


@pytest.mark.parametrize("name", [name for name in CHECKS if "half" in name])
def test_the_checks_of_half_precision_pass_on_a_cpu_without_it(name):
    with planned_for(PLAIN):
        CHECKS[name]()
