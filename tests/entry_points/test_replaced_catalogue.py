"""Score mods and masks as PyTorch's own tests of flex_attention and the attention-gym collection have them, run replaced."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.attention.experimental._paged_attention import PagedAttention
from torch.nn.attention.flex_attention import AuxRequest, _identity, and_masks, create_block_mask, flex_attention, noop_mask, or_masks

import anyattn
from anyattn import oracle
from anyattn.testing import budget
from anyattn.testing.rounding import rounding
from tests.support import flex_calls as calls

B, H, S, D, SIDE = 2, 4, 64, 16, 8
torchs_operator = torch.ops.higher_order.flex_attention


def table(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def integers(high, *shape):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(2))


offsets = torch.tensor([0, 9, 10, 40, S])
documents = torch.repeat_interleave(torch.arange(4), offsets.diff())
head_scale, row_bias, batch_bias, pair_bias, cap = table(H), table(S), table(B, S), table(H, S, S), torch.tensor(3.0)
lengths, is_padding, hops, hop_bias = integers(S, B) + 1, integers(2, B, S).bool(), integers(5, B, S, S), table(H, 5)
is_global, ancestors, tile_map = torch.arange(S) % 13 == 0, integers(2, S, S).bool(), integers(2, B, H, S // 8, S // 8).bool()
parts, half = table(2 * S - 1), 0.5
strided_bias, half_bias, flags = table(2 * S)[::2], table(S).bfloat16(), integers(2, H, S).bool()

SCORES = {
    "identity": _identity,
    "times two": lambda s, b, h, q, k: s * 2,
    "squared": lambda s, b, h, q, k: s * s,
    "causal by -inf": lambda s, b, h, q, k: torch.where(q >= k, s, float("-inf")),
    "anti-causal by -inf": lambda s, b, h, q, k: torch.where(q <= k, s, float("-inf")),
    "relative": lambda s, b, h, q, k: s + (q - k),
    "alibi": lambda s, b, h, q, k: s + (k - q) * torch.exp2(-((h + 1) * 8.0 / H)),
    "trigonometry": lambda s, b, h, q, k: torch.cos(s) * torch.sin(s) + torch.sin(b) / torch.cos(b),
    "tanh cap": lambda s, b, h, q, k: 20 * torch.tanh(s / 20),
    "captured cap": lambda s, b, h, q, k: cap * torch.tanh(s / cap),
    "head scale": lambda s, b, h, q, k: s * head_scale[h],
    "row bias": lambda s, b, h, q, k: s + row_bias[q] + row_bias[k],
    "batch bias": lambda s, b, h, q, k: s + batch_bias[b, q],
    "pair bias": lambda s, b, h, q, k: s + pair_bias[h, q, k],
    "indexed twice": lambda s, b, h, q, k: s + hop_bias[h, hops[b, q, k]],
    "clipped distance": lambda s, b, h, q, k: s + row_bias[torch.clamp(torch.abs(q - k), max=9)],
    "toeplitz": lambda s, b, h, q, k: s + parts[q - k + S - 1],
    "mean of parts": lambda s, b, h, q, k: s + sum(hop_bias[h, hops[b, q, k] * 0 + i] for i in range(5)) / 5,
    "document causal": lambda s, b, h, q, k: torch.where((documents[q] == documents[k]) & (q >= k), s, float("-inf")),
    "padding": lambda s, b, h, q, k: s.masked_fill(is_padding[b, k] & (k > 0), float("-inf")),
    "flags": lambda s, b, h, q, k: torch.where(flags[h, k], s, s - 1),
    "strided table": lambda s, b, h, q, k: s + strided_bias[k],
    "half precision table": lambda s, b, h, q, k: s + half_bias[k],
    "log of an activation": lambda s, b, h, q, k: torch.log(s * torch.sigmoid(s) + 1.5),
    "two mods": lambda s, b, h, q, k: SCORES["alibi"](SCORES["tanh cap"](s, b, h, q, k), b, h, q, k),
    "numbers": lambda s, b, h, q, k: s * half + 1,
}


def tile(i):
    return i // SIDE, i % SIDE


def canvas(b, h, q, k):
    (qx, qy), (kx, ky) = tile(q), tile(k)
    cx, cy = qx.clamp(2, SIDE - 3), qy.clamp(2, SIDE - 3)
    return ((cx - kx).abs() <= 2) & ((cy - ky).abs() <= 2)


def causal(b, h, q, k):
    return q >= k


def window(b, h, q, k):
    return (q - k).abs() <= 9


MASKS = {
    "everything": noop_mask,
    "causal": causal,
    "anti-causal": lambda b, h, q, k: q <= k,
    "window": and_masks(causal, window),
    "prefix": or_masks(causal, lambda b, h, q, k: k < 20),
    "dilated": lambda b, h, q, k: window(b, h, q, k) & ((q - k).abs() % 3 == 0),
    "documents": lambda b, h, q, k: (documents[q] == documents[k]) & causal(b, h, q - offsets[documents[q]], k - offsets[documents[k]]),
    "document starts": lambda b, h, q, k: (k >= offsets[documents[q]]) & (q >= k),
    "shared prefix": lambda b, h, q, k: ((documents[q] == documents[k]) | (documents[k] == 0)) & (q >= k),
    "lengths": lambda b, h, q, k: k < lengths[b],
    "padding and heads": lambda b, h, q, k: (is_padding[b, k] | (q == k)) & ((h > 0) | (q >= k)),
    "global": lambda b, h, q, k: window(b, h, q, k) | is_global[q] | is_global[k],
    "block diffusion": lambda b, h, q, k: torch.where(q >= 32, (q - 32) // 8 == (k - 32) // 8, q // 8 >= k // 8),
    "ancestors": lambda b, h, q, k: ancestors[q, k] | (q == k),
    "canvas": canvas,
    "frames": lambda b, h, q, k: (k < 6) | (((q - 6) % 9 - (k - 6) % 9).abs() <= 2),
    "tile map": lambda b, h, q, k: tile_map[b, h, q // 8, k // 8],
    "modality": lambda b, h, q, k: (q >= k) | (is_padding[b, q] & is_padding[b, k] & (documents[q] == documents[k])),
    "bits": lambda b, h, q, k: ((q >> 2) ^ (k >> 2)) & 1 == 0,
}


def inputs(dtype=torch.float32, heads_kv=H, batch_kv=B, length=S):
    g = torch.Generator().manual_seed(0)
    shapes = ((B, H), (batch_kv, heads_kv), (batch_kv, heads_kv))
    return [torch.randn(*shape, length, D, generator=g).to(dtype) for shape in shapes]


def block_mask_of(mask, length=S):
    return create_block_mask(mask, B, H, length, length, device="cpu", BLOCK_SIZE=16)


def replaced_flex(compiles, wants_mask):
    """torch's function as ``calls.judge`` calls anyattn's, eager or compiled."""
    call = torch.compile(flex_attention, backend="aot_eager", fullgraph=True, dynamic=False) if compiles else flex_attention

    def flex(*args, mask_mod=None, sink=None, enable_gqa=True, return_lse=False, **options):
        assert sink is None and (mask_mod is None or not wants_mask)
        found = call(*args, enable_gqa=enable_gqa, return_aux=AuxRequest(lse=True) if return_lse else None, **options)
        return (found[0], found[1].lse) if return_lse else found

    return flex


@pytest.fixture(params=["eager", "compiled"])
def judged(request, monkeypatch):
    """Judges replaced calls, forward and backward, by the budget, and that torch's operator means the same."""

    def judged(score=None, mask=None, **shapes):
        monkeypatch.setattr(calls, "flex", replaced_flex(request.param == "compiled", mask is not None))
        tensors = inputs(**shapes)
        options = {} if mask is None else {"block_mask": block_mask_of(mask)}
        taken = anyattn.replaced()
        torch._dynamo.reset()
        with anyattn.replace_flex_attention():
            got = calls.judge(*tensors, score=score, mask=mask, **options)
        assert anyattn.replaced().taken - taken.taken == 2 and anyattn.replaced().passed_on == taken.passed_on
        lists = (options.get("block_mask") or block_mask_of(noop_mask)).as_tuple()
        exact = torchs_operator(*[t.double() for t in tensors], score or _identity, lists, 1 / math.sqrt(D), {})
        keys = [t.expand(B, *t.shape[1:]) for t in tensors[1:]]
        mods = {"score": score, "mask": mask}
        plain, noise = (f(tensors[0], *keys, **mods) for f in (oracle.same_dtype, rounding))
        budget.check("out beside torch's", got["out"], exact[0], plain.out, noise.out)
        budget.check("lse beside torch's", got["lse"], exact[1] * math.log(2), plain.lse, noise.lse)

    return judged


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", SCORES)
def test_score(name, judged):
    judged(SCORES[name])


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", MASKS)
def test_mask(name, judged):
    judged(None, MASKS[name])


@pytest.mark.covering(1)
@pytest.mark.parametrize("shapes", [{"heads_kv": 2}, {"heads_kv": 1}, {"batch_kv": 1}], ids=str)
def test_shared_keys(shapes, judged):
    judged(SCORES["head scale"], MASKS["documents"], **shapes)


def test_masks_and_scores_of_several(judged):
    judged(SCORES["two mods"], and_masks(MASKS["lengths"], or_masks(MASKS["canvas"], MASKS["causal"])))


def test_a_table_indexed_in_steps():
    with anyattn.replace_flex_attention():
        in_steps = flex_attention(*inputs(), lambda s, b, h, q, k: s + batch_bias[b][q])
        assert torch.equal(in_steps, flex_attention(*inputs(), SCORES["batch bias"]))


def test_lengths_change_in_one_compiled_function():
    torch._dynamo.reset()
    call = torch.compile(lambda q, k, v: flex_attention(q, k, v, SCORES["relative"]), backend="aot_eager", fullgraph=True, dynamic=True)
    with anyattn.replace_flex_attention():
        taken = anyattn.replaced().taken
        for n in (64, 40, 33, 48):
            tensors = [t[:, :, :n] for t in inputs()]
            with_lse = flex_attention(*tensors, SCORES["relative"], return_aux=AuxRequest(lse=True))  # as the operator is asked
            assert torch.equal(call(*tensors), with_lse[0])
        assert anyattn.replaced().taken - taken <= 2 + 4


def test_torchs_paged_attention():
    page, (q, k, v) = 16, inputs()
    pages = B * S // page + 3
    cache = PagedAttention(pages, page, B, device="cpu")
    pools = [torch.zeros(1, H, pages * page, D) for _ in range(2)]
    for b in (1, 0):
        cache.reserve(torch.tensor(b), torch.tensor(S))
    cache.assign(torch.arange(B), torch.arange(S).expand(B, S), k, v, *pools)
    mask, score = MASKS["documents"], SCORES["relative"]
    block_mask = create_block_mask(mask, B, 1, S, S, device="cpu", BLOCK_SIZE=page)
    with anyattn.replace_flex_attention():
        taken = anyattn.replaced().taken
        got = flex_attention(q, *pools, cache.get_score_mod(score), cache.convert_logical_block_mask(block_mask))
        assert anyattn.replaced().taken == taken + 1
    exact, plain, noise = (f(q, k, v, score=score, mask=mask).out for f in (oracle.attention, oracle.same_dtype, rounding))
    budget.check("out", got, exact, plain, noise)


def test_gradients_are_those_of_finite_differences():
    with anyattn.replace_flex_attention():
        tensors = [t[:1, :2, :12].detach().requires_grad_() for t in inputs(torch.float64)]
        assert torch.autograd.gradcheck(lambda q, k, v: flex_attention(q, k, v, SCORES["squared"]), tensors)
