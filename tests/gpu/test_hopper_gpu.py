"""The forward on whole batches that need no lists of tiles, judged as everything else; the Hopper kernel's backward is another's."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn import masks, scores
from tests.support.gpu import judging
from tests.support.gpu.judging import KINDS, Capturing, flex, judge, qkv, random, same

pytestmark = pytest.mark.gpu
judging.needs_the_backend()

HALF = torch.float16
ENDS = torch.tensor([300, 17])
MASKS: dict[str, Any] = {
    "full": None,
    "causal": masks.causal(),
    "bottom right": masks.causal(33),
    "window": masks.sliding_window(100, 0),
    "both sides": masks.sliding_window(50, 20),
    "left": masks.sliding_window(90, None),
    "ahead": masks.sliding_window(None, -30),
    "nothing for most": masks.sliding_window(-281, None),
    "empty": masks.sliding_window(3, -9),
    "by head and entry": lambda b, h, i, j: (j <= i + 40 * h - 30 * b) & (j > i - 90 - 30 * h),
    "by a table": Capturing(lambda to: (lambda ends: lambda b, h, i, j: j <= i + ends[b])(to(ENDS))),
    "two predicates": anyattn.and_masks(masks.causal(5), masks.sliding_window(70, None)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MASKS)
def test_bands(name: str, kind: str) -> None:
    judge(qkv(kind=kind), mask=MASKS[name])


@pytest.mark.parametrize(
    "name,d", [("full", 64), ("causal", 64), ("both sides", 64), ("empty", 64), ("causal", 256), ("both sides", 256), ("empty", 256)]
)
def test_bands_of_other_head_dims(name: str, d: int) -> None:
    for kind in KINDS:
        judge(qkv(d=d, kind=kind), mask=MASKS[name], label=kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["full", "causal", "both sides"])
def test_long(name: str, kind: str) -> None:
    """More key tiles than stages of the pipeline, and more row tiles than multiprocessors."""
    judge(qkv(1, 4, 2, 2048, 2100, kind=kind), mask=MASKS[name])
    judge(qkv(2, 8, 4, 2311, 2311, 64, kind=kind), mask=MASKS[name])


@pytest.mark.parametrize("sq,sk", [(1, 1), (1, 500), (500, 1), (128, 128), (129, 127), (64, 1000), (1000, 64), (2, 129), (127, 257)])
def test_lengths(sq: int, sk: int) -> None:
    for mask in (None, masks.causal(), masks.causal(sk - sq), masks.sliding_window(70, 70)):
        judge(qkv(1, 2, 1, sq, sk), mask=mask, label=str(mask))


@pytest.mark.parametrize("sq,sk", [(1, 1), (191, 111), (192, 112), (193, 113), (300, 1000), (385, 225), (1000, 64)])
@pytest.mark.parametrize("name", ["full", "causal", "both sides"])
def test_lengths_at_the_edges_of_192_rows_and_112_keys(name: str, sq: int, sk: int) -> None:
    judge(qkv(2, 4, 2, sq=sq, sk=sk, d=88), mask=MASKS[name])


@pytest.mark.parametrize("sq,sk,batch", [(0, 5, 1), (5, 0, 2), (0, 0, 1), (5, 5, 0)])
def test_nothing_to_multiply(sq: int, sk: int, batch: int) -> None:
    q, k, v = qkv(batch, 2, 1, sq, sk)
    out, lse = flex(q, k, v, return_lse=True, backend=None)
    assert out.shape == q.shape and bool((out == 0).all()) and bool((lse == -torch.inf).all())


@pytest.mark.parametrize("heads,kv_heads", [(1, 1), (3, 1), (5, 1), (12, 2), (7, 1), (8, 8), (24, 2)])
def test_grouped_heads_and_sinks(heads: int, kv_heads: int) -> None:
    sink = torch.linspace(-2, 3, heads)
    for mask in (None, masks.sliding_window(3, -9), masks.sliding_window(60, 0)):
        judge(qkv(2, heads, kv_heads), mask=mask, sink=sink)


@pytest.mark.parametrize("d", [8, 40, 72, 96, 120, 136, 192, 200, 248])
def test_head_dims_by_padding(d: int) -> None:
    judge(qkv(1, 4, 2, d=d), mask=masks.causal())
    judge(qkv(1, 4, 2, 130, 150, d=d, kind="coded"), mask=masks.causal())


@pytest.mark.parametrize("d,dv", [(192, 128), (72, 200), (256, 8)])
def test_values_of_another_head_dim(d: int, dv: int) -> None:
    for kind in ("normal", "coded"):
        judge(qkv(1, 4, 2, d=d, dv=dv, kind=kind), mask=masks.causal(), label=kind)


@pytest.mark.parametrize("name", ["causal", "bottom right"])
def test_float16(name: str) -> None:
    for kind in KINDS:
        judge(qkv(dtype=HALF, kind=kind), mask=MASKS[name], label=kind)


@pytest.mark.parametrize("name,sink", [("full", None), ("nothing for most", torch.linspace(-2, 3, 4))], ids=["full", "nothing for most"])
def test_max_scores(name: str, sink: Tensor | None) -> None:
    for kind in KINDS:
        judge(qkv(kind=kind), mask=MASKS[name], has_max=True, sink=sink, label=kind)


@pytest.mark.parametrize("cap", [5.0, 60.0, -5.0])
@pytest.mark.parametrize("name", ["full", "bottom right"])
def test_max_scores_under_a_cap(name: str, cap: float) -> None:
    """Of a cap that bounds exponentials, of one too high for that, and of one that turns the order of the scores round."""
    for kind in KINDS:
        judge(qkv(kind=kind), score=lambda s, b, h, i, j: abs(cap) * torch.tanh(s / cap), mask=MASKS[name], has_max=True, label=kind)


@pytest.mark.parametrize("name,scales", [("full", (0.5, 1e-6)), ("bottom right", (-0.1, 0.0, 0.5, 1e-6))])
def test_scales(name: str, scales: tuple[float, ...]) -> None:
    """A negative scale turns the order of the scores round, 0 makes them equal."""
    for scale in scales:
        if scale == 0.0 and judging.MODE == "cpu":
            continue  # multiplying by an alpha of 0 leaves NaN that was there before
        judge(qkv(), mask=MASKS[name], scale=scale, label=str(scale))


@judging.not_on_the_cpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, HALF], ids=str)
def test_max_scores_change_no_bit_of_the_output(dtype: torch.dtype) -> None:
    capped = (
        scores.softcap(5.0),
        scores.softcap(60.0),
        lambda s, b, h, i, j: 5.0 * torch.tanh(s / -5.0),
        lambda s, b, h, i, j: 8.0 * torch.sigmoid(s),
    )
    others = (None, lambda s, b, h, i, j: s + (i - j), lambda s, b, h, i, j: s * s, lambda s, b, h, i, j: s * 2)
    for score, mask in itertools.product((*capped, *others), (None, masks.causal())):
        for kind in KINDS:
            q, k, v = qkv(dtype=dtype, kind=kind)
            out, aux = flex(q, k, v, score, mask, return_aux=anyattn.AuxRequest(max_scores=True))
            both, more = flex(q, k, v, score, mask, return_aux=anyattn.AuxRequest(lse=True, max_scores=True))
            assert same(flex(q, k, v, score, mask), out) and same(out, both) and same(aux.max_scores, more.max_scores)


@judging.not_on_the_cpu
def test_lse_changes_no_bit_of_the_output() -> None:
    q, k, v = qkv(1, 2, 2)
    alone = flex(q, k, v, None, masks.causal())
    assert same(alone, flex(q, k, v, None, masks.causal(), return_lse=True)[0])


def test_a_window_as_wide_as_the_keys_is_none() -> None:
    q, k, v = qkv(1, 2, 2)
    assert same(flex(q, k, v, None, masks.sliding_window(333, 333), return_lse=True), flex(q, k, v, return_lse=True))


SLOPES, TABLE, KEY_BIAS = torch.tensor([0.5, 0.25, 0.125, 0.0625]), random(4, 700), random(2, 4, 333, seed=3)
TOKENS = torch.randint(0, 5, (2, 333), generator=torch.Generator().manual_seed(5))


def tempered(by: float, slope: float) -> Any:
    return lambda s, b, h, i, j: s * by + slope * (i - j) - b


def hiding(far: int, more: int) -> Any:
    return lambda s, b, h, i, j: torch.where(j - i < far + more * h, -torch.inf, s)


SCORES: dict[str, Any] = {
    "softcap": scores.softcap(5.0),
    "temperature and number": tempered(0.5, 0.01),
    "alibi": Capturing(lambda to: (lambda sl: lambda s, b, h, i, j: s - sl[h] * (i - j).abs())(to(SLOPES))),
    "relative": Capturing(lambda to: (lambda t: lambda s, b, h, i, j: s + t[h, i - j + 350])(to(TABLE))),
    "from the end": Capturing(lambda to: (lambda t: lambda s, b, h, i, j: s + t[h, i - j])(to(TABLE))),
    "per key": Capturing(lambda to: (lambda t: lambda s, b, h, i, j: s + t[b, h, j])(to(KEY_BIAS))),
    "by token": Capturing(lambda to: (lambda t: lambda s, b, h, i, j: torch.where(t[b, j] == 2, s * 0.25, s))(to(TOKENS))),
    "gate and huge bias": lambda s, b, h, i, j: s * torch.sigmoid(0.01 * (i - j)) + torch.where(j < 7, 1e4, 0.0),
    "hides": hiding(-60, -20),
    "rounded": lambda s, b, h, i, j: s + torch.round((i - j) * 0.3) * 0.05 - ((i - 50) // 3 % 5) * torch.sign(j - i) + ((i ^ j) & 3) * 0.1,
    "rests": lambda s, b, h, i, j: s + ((i - j) % 1.5) * 0.1 + torch.fmod((i - j) * 0.5, 7.25) * 0.1 + torch.fmod(i - j, 5) * 0.1,
    "logarithmic": lambda s, b, h, i, j: s - torch.log1p((i - j).abs().float()) + torch.expm1(-s.abs()),
    "powers": lambda s, b, h, i, j: s + 0.01 * s**3 + 0.05 * s.abs() ** 1.7 - 0.9 ** (i - j).abs() + (1e-5 * (i - j)) ** 3 * (h + 1.0) ** b,
    "straight": Capturing(lambda to: (lambda sl: lambda s, b, h, i, j: s - sl[h] * (i - j))(to(SLOPES))),
    "by head": Capturing(lambda to: (lambda sl: lambda s, b, h, i, j: s + sl[h])(to(SLOPES))),
    "by distance": Capturing(lambda to: (lambda t: lambda s, b, h, i, j: s + t[h, (i - j).abs()])(to(TABLE))),
    "clipped": Capturing(lambda to: (lambda t: lambda s, b, h, i, j: s + t[h, torch.clamp(i - j, -90, 90) + 90])(to(TABLE))),
    "capped high": scores.softcap(60.0),
    "capped, sloping": Capturing(lambda to: (lambda sl: lambda s, b, h, i, j: 5 * torch.tanh(s / 5) - sl[h] * (i - j).abs())(to(SLOPES))),
    "gated": lambda s, b, h, i, j: 8.0 * torch.sigmoid(s),
}
# what a mod makes of scores does not hang on the mask, and every pair is a kernel: each mod has one, these the full one
IN_FULL = {
    "alibi",
    "from the end",
    "by token",
    "gate and huge bias",
    "rounded",
    "rests",
    "logarithmic",
    "powers",
    "straight",
    "by distance",
    "clipped",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SCORES)
def test_score_mods(name: str, kind: str) -> None:
    for mask in (None,) if name in IN_FULL else (masks.causal(), masks.causal(33)):
        judge(qkv(kind=kind), score=SCORES[name], mask=mask, label=str(mask))


OTHERS: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [  # (name, label, other inputs, other arguments)
    ("softcap", "window", {}, {"mask": masks.sliding_window(100, 0)}),
    ("relative", "window", {}, {"mask": masks.sliding_window(100, 0)}),
    ("alibi", "64 in float16", {"d": 64, "dtype": HALF}, {"mask": masks.causal()}),
    ("relative", "256", {"d": 256}, {"mask": masks.causal()}),
    ("hides", "sink", {}, {"mask": masks.causal(), "sink": torch.linspace(-2, 3, 4)}),
]


@pytest.mark.parametrize("name,label,inputs,arguments", OTHERS, ids=[f"{name}, {label}" for name, label, *_ in OTHERS])
def test_score_mods_of_other_kinds(name: str, label: str, inputs: dict[str, Any], arguments: dict[str, Any]) -> None:
    for kind in KINDS:
        judge(qkv(kind=kind, **inputs), score=SCORES[name], label=f"{label}, {kind}", **arguments)


@pytest.mark.parametrize("d,dtype", [(64, torch.bfloat16), (128, torch.bfloat16), (128, HALF), (256, torch.bfloat16)], ids=str)
def test_maxima_that_rise(d: int, dtype: torch.dtype) -> None:
    """From key tile to key tile, visited from the last to the first: by little, by more than a guess at a row's maximum allows, and so
    that a sum would be infinite; all rows of a warp or some."""
    q, k, v = qkv(1, 4, 2, 300, 700, d=d, dtype=dtype)
    some = q * torch.where(torch.arange(300, device=q.device) % 5 == 0, 1.0, 0.01)[:, None].to(dtype)
    for most in (3.0, 12.0, 60.0):
        rising = k * torch.linspace(most, 0.5, 700, device=k.device)[:, None].to(dtype)
        for queries in (q, some):
            for mask in (None, masks.causal(400)):
                judge((queries, rising, v), mask=mask, label=f"{most}, {mask}")


@pytest.mark.parametrize("name", ["alibi", "by distance"])
def test_biases_on_maxima_that_rise(name: str) -> None:
    q, k, v = qkv(2, 4, 2)
    rising = k * torch.linspace(40.0, 0.5, 333, device=k.device)[:, None].to(k.dtype)
    judge((q, rising, v), score=SCORES[name], mask=masks.causal() if name == "alibi" else None)


@pytest.mark.parametrize("cap", [50.0, 30.0, 5.0])
def test_caps_near_and_far(cap: float) -> None:
    """Scores from far below a cap to far beyond it, in all rows or in some: near it another way is taken to tanh."""
    q, k, v = qkv(1, 4, 2, 300, 700)
    some = torch.where(torch.arange(300, device=q.device) % 64 == 0, 1.0, 0.02)[:, None].to(q.dtype)
    for size in (0.2, 2.0, 5.0, 40.0):
        for factor in (1.0, -1.0, some):
            judge((q * size * factor, k, v), score=scores.softcap(cap), mask=masks.causal(400), label=f"{size}")
    judge((q * 5, k, v), score=lambda s, b, h, i, j: cap * torch.tanh(-s / cap), mask=masks.causal(400), label="turned round")


@pytest.mark.parametrize("far", [-400, 0, 128, 250, 400])
def test_a_score_mod_that_hides_all_of_a_row(far: int) -> None:
    """-inf from the mod itself, for whole tiles and whole rows, is no NaN. The mask leaves each row 300 keys ahead of its place."""
    judge(qkv(), score=hiding(far, 20), mask=masks.causal(300))


def test_captured_numbers_may_change_from_call_to_call() -> None:
    for number in (0.5, -0.5, 0.0, 3.0, -1.0):
        judge(qkv(1, 2, 2), score=tempered(number, 0.02 * number), mask=masks.causal(), label=str(number))
        judge(qkv(1, 2, 2), score=scores.softcap(abs(number) + 1.0), mask=masks.causal(int(number)), label=str(number))


@pytest.mark.parametrize("name", ["causal", "window", "softcap", "relative", "sink"])
def test_gradients(name: str) -> None:
    more = {"score": SCORES[name]} if name in SCORES else {}
    mask = MASKS.get(name, masks.sliding_window(60, 0))
    sink = torch.linspace(-2, 3, 4) if name == "sink" else None
    judge(qkv(), mask=mask, sink=sink, backward=True, **more)


@judging.hopper_alone
@judging.not_on_the_cpu
def test_chosen_by_itself_and_says_why_not() -> None:
    q, k, v = qkv()
    assert anyattn.explain(q, k, v, enable_gqa=True, mask_mod=masks.causal()).plan.backend == "hopper"
    wide, odd = qkv(1, 2, 2, d=584), qkv(1, 2, 2, d=28)
    cases = ((wide, "576", "torch"), (odd, "multiples? of", "triton"), ([t.float() for t in (q, k, v)], "float32", "triton"))
    for inputs, words, instead in cases:
        plan = anyattn.explain(*inputs, enable_gqa=True).plan
        assert plan.backend == instead and re.search(words, " ".join(plan.why))
        with pytest.raises(anyattn.BackendError, match=words):
            flex(*inputs)
