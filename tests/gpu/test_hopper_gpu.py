"""The Hopper forward on a Hopper GPU, judged as everything else; its backward is torch's on the same device."""

from __future__ import annotations

import importlib.util

import pytest
import torch

import anyattn
from anyattn import masks, oracle, scores
from anyattn.testing import budget
from anyattn.testing.rounding import rounding

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) and importlib.util.find_spec("cutlass") is not None
pytestmark = pytest.mark.gpu
if not HAS_HOPPER:
    pytest.skip("needs a Hopper GPU and nvidia-cutlass-dsl", allow_module_level=True)


def qkv(batch=2, heads=4, kv_heads=2, sq=300, sk=333, d=128, dtype=torch.bfloat16, kind="normal"):  # type: ignore[no-untyped-def]
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, h, s, d, generator=g) for h, s in ((heads, sq), (kv_heads, sk), (kv_heads, sk)))
    if kind == "peaky":
        q = q * 4
    if kind == "coded":
        q, v = q * 0, (torch.arange(sk)[:, None].expand(batch, kv_heads, sk, d) % 97 * 0.25)
    return [t.to(dtype) for t in (q, k, v)]


def judge(q, k, v, score=None, mask=None, sink=None, captured=(), backward=False, **options):  # type: ignore[no-untyped-def]
    """score, mask: (for the oracle, for the library); plain functions that work on both devices stand for both."""
    (score_cpu, score_gpu), (mask_cpu, mask_gpu) = (x if isinstance(x, tuple) else (x, x) for x in (score, mask))
    leaves = [t.cuda().requires_grad_(backward) for t in (q, k, v)]
    logits = None if sink is None else sink.cuda()
    out, lse = anyattn.flex_attention(
        *leaves, score_gpu, mask_mod=mask_gpu, sink=logits, enable_gqa=True, return_lse=True, backend="hopper", **options
    )
    only = anyattn.flex_attention(*leaves, score_gpu, mask_mod=mask_gpu, sink=logits, enable_gqa=True, backend="hopper", **options)
    assert torch.equal(out, only)
    mods = {"score": score_cpu, "mask": mask_cpu, "sink": sink}
    want, plain, noise = oracle.attention(q, k, v, **mods), oracle.same_dtype(q, k, v, **mods), rounding(q, k, v, **mods)
    budget.check("out", out.cpu(), want.out, plain.out, noise.out)
    budget.check("lse", lse.cpu(), want.lse, plain.lse, noise.lse)
    if backward:
        dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
        grads = torch.autograd.grad(out, leaves, dout.cuda())
        back = [f(q, k, v, dout, **mods) for f in (oracle.gradients, oracle.same_dtype_gradients)]
        spread = rounding(q, k, v, dout, **mods)
        for name, grad in zip(("dq", "dk", "dv"), grads):
            budget.check(name, grad.cpu(), *(getattr(b, name) for b in back), getattr(spread, name))
    return out


MASKS = {
    "full": None,
    "causal": masks.causal(),
    "bottom right": masks.causal(33),
    "window": masks.sliding_window(100, 0),
    "both sides": masks.sliding_window(50, 20),
    "left": masks.sliding_window(90, None),
    "ahead": masks.sliding_window(None, -30),
    "nothing for most": lambda b, h, i, j: j > i + 280,
    "empty": masks.sliding_window(3, -9),
}


@pytest.mark.parametrize("d", [64, 128, 256])
@pytest.mark.parametrize("name", MASKS)
def test_bands(name: str, d: int) -> None:
    for kind in ("normal", "peaky", "coded"):
        judge(*qkv(d=d, kind=kind), mask=MASKS[name])
    judge(*qkv(d=d, dtype=torch.float16), mask=MASKS[name])


@pytest.mark.parametrize("sq,sk", [(1, 1), (1, 500), (500, 1), (128, 128), (129, 127), (64, 1000), (1000, 64), (2048, 2100)])
def test_lengths(sq: int, sk: int) -> None:
    for mask in (None, masks.causal(), masks.causal(sk - sq), masks.sliding_window(70, 70)):
        judge(*qkv(1, 2, 1, sq, sk), mask=mask)


@pytest.mark.parametrize("heads,kv_heads", [(1, 1), (3, 1), (12, 2), (7, 7)])
def test_grouped_heads_and_sinks(heads: int, kv_heads: int) -> None:
    sink = torch.linspace(-2, 3, heads)
    for mask in (None, masks.causal(), masks.sliding_window(3, -9)):
        judge(*qkv(2, heads, kv_heads), mask=mask, sink=sink)


def both(make):  # type: ignore[no-untyped-def]
    """A mod over captured tensors, for the oracle in float64 and for the library on the GPU."""
    return make(lambda t: t.double() if t.is_floating_point() else t), make(lambda t: t.cuda())


SLOPES, TABLE, TOKENS = torch.tensor([0.5, 0.25, 0.125, 0.0625]), torch.randn(4, 700), torch.randint(0, 5, (2, 333))
SCORES = {
    "softcap": scores.softcap(5.0),
    "temperature and number": lambda s, b, h, i, j: s * 0.5 + 0.01 * (i - j) - b,
    "alibi": both(lambda to: (lambda sl: lambda s, b, h, i, j: s - sl[h] * (i - j).abs())(to(SLOPES))),
    "relative": both(lambda to: (lambda t: lambda s, b, h, i, j: s + t[h, i - j + 350])(to(TABLE))),
    "from the end": both(lambda to: (lambda t: lambda s, b, h, i, j: s + t[h, i - j])(to(TABLE))),
    "per key": both(lambda to: (lambda t: lambda s, b, h, i, j: s + t[h, j])(to(TABLE))),
    "by token": both(lambda to: (lambda t: lambda s, b, h, i, j: torch.where(t[b, j] == 2, s * 0.25, s))(to(TOKENS))),
    "gate": lambda s, b, h, i, j: s * torch.sigmoid(0.01 * (i - j)),
}


@pytest.mark.parametrize("name", SCORES)
def test_score_mods(name: str) -> None:
    for mask in (None, masks.causal(), masks.sliding_window(100, 0)):
        judge(*qkv(), score=SCORES[name], mask=mask)
    judge(*qkv(d=64, dtype=torch.float16), score=SCORES[name], mask=masks.causal())


def test_gradients_come_from_torch() -> None:
    judge(*qkv(), mask=masks.causal(), backward=True)
    judge(*qkv(), score=scores.softcap(5.0), mask=masks.sliding_window(60, 0), backward=True)


def test_strides_and_other_doors() -> None:
    q, k, v = (t.cuda() for t in qkv(sq=300, sk=300))
    want = anyattn.flex_attention(q, k, v, mask_mod=masks.causal(), enable_gqa=True, backend="hopper")
    by_token = [t.transpose(1, 2).contiguous() for t in (q, k, v)]
    got = anyattn.flash_attn_func(*by_token, causal=True, backend="hopper")
    assert torch.equal(got.transpose(1, 2), want)
    wide = [torch.cat([t, t], -1)[..., :128] for t in (q, k, v)]
    assert torch.equal(anyattn.flex_attention(*wide, mask_mod=masks.causal(), enable_gqa=True, backend="hopper"), want)


def test_reruns_agree_and_memory_around_is_left_alone() -> None:
    q, k, v = (t.cuda() for t in qkv(4, 8, 8, 1025, 1025))
    first = anyattn.flex_attention(q, k, v, mask_mod=masks.causal(), backend="hopper")
    for _ in range(300):
        assert torch.equal(first, anyattn.flex_attention(q, k, v, mask_mod=masks.causal(), backend="hopper"))


def test_chosen_by_itself_and_says_why_not() -> None:
    q, k, v = (t.cuda() for t in qkv())
    assert anyattn.explain(q, k, v, enable_gqa=True, mask_mod=masks.causal()).plan.backend == "hopper"
    for options, words in (({"mask_mod": masks.prefix_lm(9)}, "band"), ({"score_mod": lambda s, b, h, i, j: s + i // 7}, "floordiv")):
        plan = anyattn.explain(q, k, v, enable_gqa=True, **options).plan
        assert plan.backend == "torch" and words in " ".join(plan.why)
        with pytest.raises(anyattn.BackendError, match=words):
            anyattn.flex_attention(q, k, v, enable_gqa=True, backend="hopper", **options)
