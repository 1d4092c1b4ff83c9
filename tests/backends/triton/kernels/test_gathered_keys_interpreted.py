"""The kernel that gathers keys and values, in Triton's interpreter: the bits of the dequantised cache, and attention over the copies.

Run by test_in_the_interpreter.py, for the interpreter has to be chosen before Triton is imported.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from anyattn.backends import repeater_of
from anyattn.backends.triton.gathered_keys import described, gathered
from anyattn.hardware import Hardware
from anyattn.plan import Backward
from anyattn.problem import Problem
from anyattn.sequences.unread_varlen import StoredSequences
from anyattn.validate import flash
from anyattn.validate import sequences as check_lengths
from anyattn.validate.flash import Options
from anyattn.validate.kvcache import CacheArguments, cache_call
from tests.support import sequences as seq
from tests.support.eight_bits import DTYPES, FORMS, SETTINGS, Case, Setting, made
from tests.support.sequences import Meaning

OF_CACHE = ("cache_seqlens", "cache_leftpad", "cache_batch_idx", "page_table")
CASES = SETTINGS | {
    "an entry without keys": Setting(cached=(70, 0, 7), page_size=16, queries=2),
    "odd dimensions": Setting(d=33, dv=7, page_size=5),
    "keys of two blocks": Setting(d=520, dv=24, page_size=16, queries=2),
    "many rows": Setting(cached=(150, 64, 65), capacity=200, page_size=16),
}


@pytest.fixture(params=[True, False], ids=["unread", "read"])
def is_unread(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param:  # as on a GPU nobody looks at tables
        monkeypatch.setattr(check_lengths, "skips_device_reads", lambda device, validate: validate is not True)
    return request.param


def of_cache(case: Case, meaning: Meaning | None = None) -> Problem:
    places = {name: case.options[name] for name in OF_CACHE if name in case.options}
    others = {name: x for name, x in case.options.items() if name not in OF_CACHE}
    return cache_call(CacheArguments(*case.args, **places), Options(return_lse=True, **others)).problem


def of_batch(case: Case) -> Problem:
    tables = [None, None, None, None, None, case.options["cache_seqlens"], case.options.get("page_table")]
    others = {name: x for name, x in case.options.items() if name not in OF_CACHE}
    return flash.varlen_problem(*case.args, tables[0], tables[1], *tables[2:4], *tables[4:], None, Options(return_lse=True, **others))


def check_copies(found: Problem, parts: tuple[list[Tensor], list[Tensor]]) -> None:
    """Each sequence's rows have the bits of the dequantised ones, rounded once; of keys, without the factors that the scores get."""
    s = found.sequences
    if found.score is not None:
        (of_k,) = found.score.tensors
        of_k = of_k[..., None] if of_k.ndim == 2 else of_k
        parts = [k / of_k[b, :, : k.shape[1], None].double() for b, k in enumerate(parts[0])], parts[1]
    assert s is not None and s.page_table is None and not s.is_cache and found.kv_scales is None
    assert found.k.dtype is found.v.dtype is found.q.dtype
    for t, wide in zip((found.k, found.v), parts, strict=True):
        for b, wanted in enumerate(wide):
            start, count = int(s.k_start[b]), int(s.seqlens_k[b])
            own = t[int(s.k_row[b]), :, start : start + count]
            assert torch.equal(own, wanted.float().to(t.dtype)), f"entry {b}"


@pytest.mark.covering(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("k_form", "v_form"), [(form, FORMS[(3 * i + 2) % 7]) for i, form in enumerate(FORMS)])
@pytest.mark.parametrize("name", CASES)
def test_copies_of_a_cache(name: str, k_form: str, v_form: str, dtype: torch.dtype, is_unread: bool) -> None:
    case = made(replace(CASES[name], k_form=k_form, v_form=v_form, dtype=dtype), Meaning(causal=True))
    problem = of_cache(case)
    check_copies(gathered(problem), (case.batch.k, case.batch.v))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("page_size", [0, 16])
def test_copies_of_a_batch(page_size: int, form: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_lengths, "skips_device_reads", lambda device, validate: validate is not True)
    case = made(replace(Setting(page_size=page_size, queries=5), k_form=form, v_form=form, dtype=dtype))
    problem = of_batch(case)
    assert isinstance(problem.sequences, StoredSequences)
    check_copies(gathered(problem), (case.batch.k, case.batch.v))


@pytest.mark.parametrize("forms", [("key", "head"), ("head", "key"), ("none", "none")])
def test_copies_of_packed_keys(forms: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_lengths, "skips_device_reads", lambda device, validate: validate is not True)
    counts, g = [9, 0, 140, 5], torch.Generator().manual_seed(0)
    batch = seq.ragged(counts, counts, 4, 2, 16, 24, torch.bfloat16)
    stored, descales, wide = [], [], []
    for form, parts in zip(forms, (batch.k, batch.v), strict=True):
        stored.append(seq.packed(parts).to(torch.float8_e4m3fn))
        shape = {"key": (1, sum(counts), 2), "head": (4, 2)}.get(form)
        descales.append(None if shape is None else torch.rand(shape, generator=g) + 0.1)
        of_keys = torch.ones(sum(counts), 2) if shape is None else descales[-1]
        each = of_keys[0] if form == "key" else of_keys if shape is None else of_keys.repeat_interleave(torch.tensor(counts), 0)
        wide.append(seq.unpacked(stored[-1].double() * each[..., None].double(), counts))
    ends = seq.ends(counts)
    options = Options(causal=True, k_descale=descales[0], v_descale=descales[1])
    problem = flash.varlen_problem(seq.packed(batch.q), *stored, ends, ends, None, None, None, None, None, None, options)
    found = gathered(problem)
    assert found.sequences is problem.sequences
    check_copies(found, (wide[0], wide[1]))


@pytest.mark.parametrize("page_size", [4, 16, 64])
def test_copies_of_16_bits(page_size: int, is_unread: bool) -> None:
    case = made(Setting(page_size=page_size, k_form="none", v_form="none", leftpad=(5, 0, 33)))
    wide = [t.to(torch.bfloat16) for t in case.args[1:]]
    found = gathered(of_cache(replace(case, args=(case.args[0], *wide))))
    check_copies(found, (case.batch.k, case.batch.v))


def test_a_cache_of_16_bits_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_lengths, "skips_device_reads", lambda device, validate: validate is not True)
    for name in ("plain", "left padding", "other rows"):
        case = made(replace(SETTINGS[name], k_form="none", v_form="none"))
        problem = of_cache(replace(case, args=(case.args[0], *[t.to(torch.bfloat16) for t in case.args[1:]])))
        found = gathered(problem)
        assert (found.k is problem.k and found.v is problem.v) is (name == "plain")
        check_copies(found, (case.batch.k, case.batch.v))


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("page_size", [0, 16])
def test_rows_that_a_step_appends_are_copied_too(page_size: int, is_packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables are those before the step, which is done when keys are gathered."""
    monkeypatch.setattr(check_lengths, "skips_device_reads", lambda device, validate: validate is not True)
    case = made(Setting(cached=(40, 7, 63), page_size=page_size, k_form="key", v_form="head"))
    counts = [3, 0, 5] if is_packed else [2, 2, 2]
    before = case.options["cache_seqlens"] - torch.tensor(counts, dtype=torch.int32)
    shape = (sum(counts),) if is_packed else (3, 2)
    q, k = (torch.zeros(*shape, heads, 16, dtype=torch.bfloat16) for heads in (4, 2))
    places = {name: case.options[name] for name in OF_CACHE if name in case.options} | {"cache_seqlens": before}
    if is_packed:
        places["cu_seqlens_q"] = seq.ends(counts)
    options = Options(**{name: case.options[name] for name in ("k_descale", "v_descale")})
    problem = cache_call(CacheArguments(q, *case.args[1:], k, k, **places), options).problem
    check_copies(gathered(problem), (case.batch.k, case.batch.v))


WRONG: dict[str, dict[str, Any]] = {
    "a page outside": {"page_table": torch.tensor([[0, 99], [-5, 1]])},
    "too many keys": {"cache_seqlens": torch.tensor([32, 2**30])},
    "a negative number of keys": {"cache_seqlens": torch.tensor([-7, 3])},
    "padding beyond": {"cache_leftpad": torch.tensor([40, 2])},
}


@pytest.mark.parametrize("name", WRONG)
def test_whatever_tables_hold_nothing_outside_is_read_or_written(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_lengths, "skips_device_reads", lambda device, validate: validate is not True)
    memory = torch.zeros(4, 16, 2, 16, dtype=torch.int8)
    options = {"cache_seqlens": torch.tensor([20, 3]), "page_table": torch.tensor([[0, 1], [2, 3]]), **WRONG[name]}
    call = cache_call(CacheArguments(torch.zeros(2, 1, 4, 16).bfloat16(), memory, memory, **options), Options())
    found = gathered(call.problem)
    s = found.sequences
    assert s is not None and found.k.shape == (2, 2, 32, 16)
    assert bool((s.seqlens_k >= 0).all()) and bool((s.k_start + s.seqlens_k <= 32)[s.seqlens_k > 0].all())


MEANINGS = {
    "causal": Meaning(causal=True),
    "window, sink": Meaning(window_size=(30, 0), sink=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "mods": Meaning(score_mod=lambda s, b, h, i, j: s + 0.1 * (i - j) * (h + 1), mask_mod=lambda b, h, i, j: (i - j) % 7 != 3),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("meaning", MEANINGS)
@pytest.mark.parametrize("name", ["pages of 16", "padding_in_pages", "other rows", "an entry without keys"])
def test_attention_over_copies(name: str, meaning: str, form: str, is_unread: bool) -> None:
    """Within the budget, and bit for bit that of the same kernels over a cache of 16 bits."""
    from anyattn.backends.triton.plan import plan_of

    case = made(replace(CASES[name], k_form=form, v_form=form, queries=3), MEANINGS[meaning])
    problem, machine = of_cache(case), Hardware("cpu", "the interpreter", 0, frozenset(), None, 2)
    plan = plan_of(described(problem)[0], machine, "a test", {}, Backward("triton"))
    plan = replace(plan, gathers=True)
    for _ in range(2):
        out, lse, _ = repeater_of(problem, plan).forward(problem)
        seq.judge({"out": list(out), "lse": list(lse)}, case.batch, MEANINGS[meaning], case.firsts)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("new", [0, 1, 3])
@pytest.mark.parametrize("page", [0, 16])
def test_keys_of_wide_heads_stay_where_they_are(page: int, new: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As sequences of the lengths after appending, as far as there is room, in the same memory and pages; rows see the same keys as in the
    cache."""
    monkeypatch.setattr(check_lengths, "skips_device_reads", lambda device, validate: validate is not True)
    lengths = [40 + i % 24 for i in range(140)] if not page else [40, 7, 0, 63]  # of two programs; wide tables hold other numbers between
    cached = torch.tensor(lengths, dtype=dtype).repeat_interleave(2)[::2]
    batch, rows = len(lengths), 64
    stored = torch.zeros(4 * batch, page, 1, 264) if page else torch.zeros(batch, rows, 1, 264)
    places = {"cache_seqlens": cached} | ({"page_table": torch.arange(4 * batch).view(batch, 4).int()} if page else {})
    q, fresh = torch.zeros(batch, 3, 2, 264), torch.zeros(batch, new, 1, 264) if new else None
    of_values = None if fresh is None else fresh[..., :256]
    problem = cache_call(CacheArguments(q, stored, stored[..., :256], fresh, of_values, **places), Options(causal=True)).problem
    found = gathered(problem)
    s, before = found.sequences, problem.sequences
    assert isinstance(s, StoredSequences) and before is not None
    assert found.k is problem.k and found.v is problem.v and s.page_table is before.page_table and s.page_size == page
    assert s.seqlens_k.tolist() == [min(n + new, rows) for n in lengths] == before.seqlens_k.tolist()
    assert s.tables.seqused_k is not None and s.tables.seqused_k.dtype is torch.int32
    (limits,), (wanted,) = found.row_limits, problem.row_limits
    assert limits is not None and wanted is not None and len(limits) == len(wanted)
    assert all(torch.equal(a.broadcast_to(b.shape).long(), b.long()) for a, b in zip(limits, wanted, strict=True))
