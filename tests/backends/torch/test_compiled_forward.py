"""Compiled loops: the forward pass against the oracle, for any number of threads, and where nothing can be compiled."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import warnings

import pytest
import torch

import anyattn
from anyattn import oracle, problem
from anyattn.backends.torch.compiled import build, decision, emit
from anyattn.call_cache import attention
from anyattn.mods.analysis import row_ranges
from anyattn.testing import budget
from anyattn.testing.rounding import later
from tests.support import poison
from tests.support.compiled_loops import HK, B, H, K, S, for_small_calls, qkv, random
from tests.support.limits import HANG

pytestmark = pytest.mark.skipif(build.reason_against() is not None, reason="no C++ compiler")
flex = anyattn.flex_attention


@pytest.fixture(autouse=True)
def _small_calls():
    with for_small_calls():
        yield


def whole(end, *shape, seed=0, dtype=torch.int64):
    return torch.randint(0, end, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


bias, kinds, mixed = random(B, H, S, K, seed=1), whole(4, B, 256, seed=2), whole(100, S, K, seed=3, dtype=torch.int16)
two, table = random(2, H, seed=4), random(7, 5, seed=5)
holes = torch.where(whole(3, S, K, seed=6) == 0, -math.inf, random(S, K, seed=7))
holes[5] = -math.inf
half = random(B, S, K, seed=8, dtype=torch.bfloat16)
seen, begin = whole(2, B, K, seed=9, dtype=torch.bool), whole(K, S, seed=10)
choice = whole(7, S, K, seed=11, dtype=torch.int32) - 3

SCORES = {
    "none": None,
    "bias": lambda s, b, h, i, j: s + bias[b, h, i, j],
    "bias by a choice": lambda s, b, h, i, j: s + two[(kinds[b, i] == kinds[b, j]).to(torch.int32), h],
    "gathers": lambda s, b, h, i, j: s * table[choice[i, j], 2] + table[kinds[b, j], h] - holes[i, j].exp(),
    "infinite": lambda s, b, h, i, j: s + holes[i, j],
    "capped": lambda s, b, h, i, j: torch.tanh(s * 0.3) * 4 + half[b, i, j] + 0.01 * (i - j),
    "whole numbers": lambda s, b, h, i, j: s + torch.where((mixed[i, j] >> 2) % 5 == 1, mixed[i, j] // 7 - 3, (i - mixed[i, j]) & 3) * 0.25,
    "functions": lambda s, b, h, i, j: (
        torch.sigmoid(s) + (s * 0.2).exp2() + (s.abs() + 0.5).rsqrt() - torch.maximum(s, bias[b, h, i, j]) ** 2
    ),
}
MASKS = {
    "none": None,
    "causal": lambda b, h, i, j: i >= j,
    "window": lambda b, h, i, j: (i - j).abs() <= 20,
    "no row after 100": lambda b, h, i, j: (i < 100) & (i >= j),
    "kinds": lambda b, h, i, j: (kinds[b, i] == kinds[b, j]) | seen[b, j] & (j < begin[i]),
    "pairs": lambda b, h, i, j: (mixed[i, j] > 30) ^ seen[b, j],
}
PAIRS = [(s, m) for s in SCORES for m in ("none", "causal")] + [
    (s, m) for s in ("none", "bias") for m in MASKS if m not in ("none", "causal")
]


def judged(q, k, v, score=None, mask=None, sink=None, **options):
    """The results, after they are judged and it is certain that compiled loops computed them."""
    mods = {"score": score, "mask": mask, "sink": sink}
    why = anyattn.explain(q, k, v, score_mod=score, mask_mod=mask, sink=sink, enable_gqa=True, **options).plan.why
    assert any(line.startswith("compiled loops") for line in why), why
    with poison.enabled():
        out, aux = flex(
            q,
            k,
            v,
            score_mod=score,
            mask_mod=mask,
            sink=sink,
            enable_gqa=True,
            return_aux=anyattn.AuxRequest(lse=True, max_scores=True),
            **options,
        )
    compare(out, aux.lse, q, k, v, **mods)
    return out, aux.lse, aux.max_scores


def compare(out, lse, q, k, v, **mods):
    exact, plain = (f(q, k, v, **mods) for f in (oracle.attention, oracle.same_dtype))
    noise = later(q, k, v, torch.ones_like(out), **mods, captured=())
    budget.check("out", out, exact.out, plain.out, noise.of("out"))
    if lse is not None:
        budget.check("lse", lse, exact.lse, plain.lse, noise.of("lse"))


QUICK = {
    ("none", "causal"),
    ("gathers", "causal"),
    ("whole numbers", "none"),
    ("functions", "none"),
    ("bias", "kinds"),
    ("infinite", "none"),
}


@pytest.mark.parametrize(("score", "mask"), [pytest.param(*p, marks=[] if p in QUICK else pytest.mark.slow) for p in PAIRS])
def test_results_are_within_the_budget(score, mask):
    judged(*qkv(), SCORES[score], MASKS[mask])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("score", ["none", "bias"])
def test_16_bits(dtype, score):
    judged(*qkv(dtype), SCORES[score], MASKS["causal"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tables_of_16_bits(dtype):
    own, pairs = two.to(dtype), bias.to(dtype)
    judged(*qkv(dtype), lambda s, b, h, i, j: s + own[(kinds[b, i] == kinds[b, j]).to(torch.int32), h])
    judged(*qkv(dtype), lambda s, b, h, i, j: s + torch.clamp(0.3 * pairs[b, h, i, j] - own[0, h], min=-0.1), MASKS["causal"])


@pytest.mark.parametrize(("d", "dv"), [(8, 8), (64, 64), (1, 3), (130, 96), (32, 256)])
def test_head_dims(d, dv):
    judged(*qkv(d=d, dv=dv), mask=MASKS["causal"])


def test_rows_of_any_number():
    for rows in (1, 5, 63, 64, 65, 128, 150):
        q, k, v = qkv()
        judged(q[:, :, :rows], k, v, mask=MASKS["window"])


def test_a_sink():
    judged(*qkv(), SCORES["infinite"], MASKS["no row after 100"], sink=random(H, seed=31))


def test_strides():
    q, k, v = random(B, S, H, 24, seed=1).transpose(1, 2), random(B, 24, K, HK, seed=2).permute(0, 3, 2, 1), random(1, HK, K, 80, seed=3)
    judged(q, k, v[..., ::2].expand(B, HK, K, 40), lambda s, b, h, i, j: s + bias.transpose(2, 3)[b, h, j, i], MASKS["causal"])
    judged(q[..., ::2], k[..., 1::2], v[..., 3:35].expand(B, HK, K, 32))


def test_a_block_mask():
    block = anyattn.create_block_mask(MASKS["kinds"], B, None, S, K, device="cpu")
    got = flex(*qkv(), block_mask=block, enable_gqa=True)
    assert torch.equal(got, flex(*qkv(), mask_mod=MASKS["kinds"], enable_gqa=True))


def test_sequences():
    lengths_q, lengths_k = [70, 0, 33, 129, 5], [70, 20, 101, 0, 200]
    starts = [torch.tensor([0, *n]).cumsum(0).to(torch.int32) for n in (lengths_q, lengths_k)]
    q, k, v = random(237, H, 24, seed=1), random(391, HK, 24, seed=2), random(391, HK, 24, seed=3)
    with poison.enabled():
        out, lse = anyattn.flash_attn_varlen_func(q, k, v, *starts, 129, 200, causal=True, return_lse=True)
    for b, (m, n) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        rows, keys = slice(int(starts[0][b]), int(starts[0][b]) + m), slice(int(starts[1][b]), int(starts[1][b]) + n)
        parts = [t[None].transpose(1, 2) for t in (q[rows], k[keys], v[keys])]
        mask = lambda b, h, i, j, n=n, m=m: j <= i + n - m
        compare(out[rows][None].transpose(1, 2), lse[:, rows][None], *parts, mask=mask)


def test_a_warm_call_computes_no_row_limits(monkeypatch):
    call = lambda: flex(*qkv(), mask_mod=MASKS["window"], enable_gqa=True)
    first = call()
    monkeypatch.setattr(problem, "limits", lambda *_: pytest.fail("the limits of the rows are computed again"))
    assert torch.equal(call(), first)


def test_a_mask_of_tables_is_solved_once_for_their_contents(monkeypatch):
    first, end = whole(K // 2, B, seed=12), K - whole(K // 3, B, seed=13)
    mask = lambda b, h, i, j: (j >= first[b]) & (i >= j) | (j >= end[b])
    judged(*qkv(), mask=mask)
    derive = row_ranges._derive
    with monkeypatch.context() as patch:
        patch.setattr(row_ranges, "_derive", lambda *_: pytest.fail("the ranges are derived again"))
        judged(*qkv(), mask=mask)
        first, end = first.clone(), end.clone()
        judged(*qkv(), mask=mask)
    derived = []
    monkeypatch.setattr(row_ranges, "_derive", lambda *args: derived.append(args) or derive(*args))
    first.numpy()[:] += 3  # a write that torch does not count
    judged(*qkv(), mask=mask)
    assert derived


def test_values_that_are_not_finite_reach_the_rows_that_see_them():
    q, k, v = qkv()
    k[0, 0, 10, 3], q[1, 2, 7, 0] = math.nan, math.inf
    out, aux = flex(q, k, v, mask_mod=MASKS["causal"], enable_gqa=True, return_aux=anyattn.AuxRequest(lse=True, max_scores=True))
    reached = torch.zeros(B, H, S, dtype=torch.bool)
    reached[0, :2, 10:] = True
    reached[1, 2, 7] = True
    assert torch.equal(out.isnan().any(-1), reached)
    assert torch.equal(aux.lse.isnan(), reached)
    assert torch.equal(aux.max_scores[0].isnan(), reached[0])


def test_the_number_of_threads_changes_no_bit():
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            attention.clear()
            long = flex(*(random(1, 2, 2048, 32, seed=n) for n in range(3)), mask_mod=MASKS["causal"])
            found.append((flex(*qkv(), SCORES["gathers"], mask_mod=MASKS["kinds"], enable_gqa=True), long))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_an_index_outside_of_a_table_is_an_error():
    place = choice.clone()
    place[70, 100] = 7
    score = lambda s, b, h, i, j: s + table[place[i, j], 0]
    with pytest.raises((IndexError, ValueError)):
        flex(*qkv(), score_mod=score, enable_gqa=True)


@pytest.mark.parametrize(
    ("score", "reason"),
    [
        (lambda s, b, h, i, j: torch.erf(s), "erf"),
        (lambda s, b, h, i, j: s + two[0, h] * i, "all of a row"),
        (lambda s, b, h, i, j: s + mixed[i, j] // mixed[j % S, 0], "floordiv"),
    ],
)
def test_explain_says_why_not(score, reason):
    lines = anyattn.explain(*qkv(), score_mod=score, enable_gqa=True).plan.why
    assert any("no compiled loops" in line and reason in line for line in lines), lines


def test_a_head_dimension_beyond_a_threads_memory_is_torchs():
    """A row of queries is widened where scores are kept."""
    for d, is_compiled in ((4096, True), (12_000, False)):
        q, k, v = random(1, 1, 70, d, seed=1), random(1, 1, 80, d, seed=2), random(1, 1, 80, 8, seed=3)
        why = anyattn.explain(q, k, v, mask_mod=MASKS["causal"]).plan.why
        assert any(line.startswith("compiled loops") for line in why) is is_compiled
        out, lse = flex(q, k, v, mask_mod=MASKS["causal"], return_lse=True)
        compare(out, lse, q, k, v, mask=MASKS["causal"])


def test_a_table_whose_indices_take_64_bits_is_torchs():
    far = torch.arange(2**15, dtype=torch.int8).as_strided((2**31 + 300,), (0,))
    place = 2**31 + torch.arange(K) + torch.zeros(S, 1, dtype=torch.int64)
    score = lambda s, b, h, i, j: s + far[place[i, j]] + far[-1 - j]
    q, k, v = qkv()
    assert "indices of a captured tensor do not fit 32 bits" in str(anyattn.explain(q, k, v, score_mod=score, enable_gqa=True).plan.why)
    out, lse = flex(q, k, v, score_mod=score, enable_gqa=True, return_lse=True)
    compare(out, lse, q, k, v, score=score)


def test_small_calls_are_not_compiled(monkeypatch):
    monkeypatch.setattr(decision, "_LEAST_SCORES", 2**17)
    q = random(1, 1, 64, 16)
    assert any("the call is small" in line for line in anyattn.explain(q, q, q).plan.why)


@pytest.fixture
def _fresh(monkeypatch, tmp_path):
    """As in a process that has compiled nothing, with an empty cache on disk."""
    monkeypatch.setattr(build, "_failure", [])
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setenv("ANYATTN_CACHE_DIR", str(tmp_path))
    attention.clear()
    yield
    attention.clear()


def compiler(tmp_path, script):
    path = tmp_path / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    return str(path)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'x.cpp:1: error: no such thing' >&2; exit 1", "no such thing"),
        ('for f; do :; done; case "$f" in *.so) echo junk > "$f";; esac', ""),
    ],
    ids=["fails", "writes junk"],
)
@pytest.mark.usefixtures("_fresh")
def test_a_compiler_that_fails_is_warned_about_once(monkeypatch, tmp_path, script, reason):
    monkeypatch.setenv("CXX", compiler(tmp_path, script))
    with pytest.warns(RuntimeWarning, match=f"without compiled loops.*{reason}") as warned:
        out = flex(*qkv(), enable_gqa=True)
        flex(*qkv(), SCORES["bias"], enable_gqa=True)
    assert len(warned) == 1
    compare(out, None, *qkv())
    attention.clear()
    assert any("compiling them failed" in line for line in anyattn.explain(*qkv(), enable_gqa=True).plan.why)


@pytest.mark.usefixtures("_fresh")
def test_without_a_compiler_torch_computes(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flex(*qkv(), enable_gqa=True)
    assert any("there is no C++ compiler" in line for line in anyattn.explain(*qkv(), enable_gqa=True).plan.why)


@pytest.mark.usefixtures("_fresh")
def test_the_variable_turns_them_off(monkeypatch):
    monkeypatch.setenv("ANYATTN_COMPILED_LOOPS", "0")
    assert any("ANYATTN_COMPILED_LOOPS" in line for line in anyattn.explain(*qkv(), enable_gqa=True).plan.why)


@pytest.mark.usefixtures("_fresh")
def test_a_second_process_compiles_nothing(monkeypatch, tmp_path):
    first = flex(*qkv(), enable_gqa=True)
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    assert torch.equal(flex(*qkv(), enable_gqa=True), first)


def test_two_processes_at_once(tmp_path):
    program = (
        "import torch, anyattn; torch.manual_seed(0); q = torch.randn(1, 4, 256, 32);"
        "print(anyattn.flex_attention(q, q, q, mask_mod=lambda b, h, i, j: i >= j).double().sum().item())"
    )
    environment = os.environ | {"ANYATTN_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    running = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment) for _ in range(2)]
    assert len({p.communicate(timeout=HANG)[0] for p in running}) == 1
    assert len(list(tmp_path.glob("**/*.kernel"))) == 1


BUGS = {
    "keys after the end of a tile": ("FORWARD", "hide(row - t, to, t_end);", "", "none"),
    "a greater maximum later": ("FORWARD", "rescale + r);", "nullptr);", "none"),
    "rows of another item": ("FORWARD", "record->q_lo + at % parts * ROWS, rows", "record->q_lo, rows", "causal"),
    "the last key of a range": ("COMMON", "hide(s, end, hi);", "hide(s, end + 1, hi);", "causal"),
    "one range of several": ("COMMON", "is_seen |= (low", "is_seen = (low", "ends"),
}
MASKS["ends"] = lambda b, h, i, j: (j < 3) | ((i >= j) & (i - j < 9))


@pytest.mark.parametrize("name", BUGS)
def test_a_bug_in_the_text_is_found(name, monkeypatch):
    text, right, wrong, mask = BUGS[name]
    plain = getattr(emit, text)
    assert plain.count(right) == 1
    decision._written.cache_clear()
    monkeypatch.setattr(emit, text, plain.replace(right, wrong))
    attention.clear()
    try:
        with pytest.raises(AssertionError):
            judged(*qkv(), mask=MASKS[mask])
    finally:
        decision._written.cache_clear()
