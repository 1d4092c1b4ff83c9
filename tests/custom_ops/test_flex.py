"""``torch.compile`` and ``torch.export`` see attention as one operator, and get what an eager call gives."""

from __future__ import annotations

import pytest
import torch

import anyattn
from anyattn import masks, scores
from anyattn.custom_ops.flex import attend, operands_of
from anyattn.mods.tracing.trace import trace
from tests.support import cases

B, H, S, D = 2, 4, 48, 8
SHAPE = cases.Shape(B, H, H, S, S, D, D)


def inputs(*, heads_kv=H, dtype=torch.float32, grad=True):
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(B, n, S, D, generator=g, dtype=dtype) for n in (H, heads_kv, heads_kv))
    return [t.requires_grad_(grad) for t in (q, k, v)]


def compiled(call):
    torch._dynamo.reset()
    return torch.compile(call, fullgraph=True, backend="aot_eager")


def same_with_gradients(call, tensors, extra=()):
    """The compiled call's outputs and gradients are the eager call's."""
    results = []
    for f in (call, compiled(call)):
        outs = f(*tensors)
        outs = outs if isinstance(outs, tuple) else (outs,)
        total = sum((o * torch.linspace(0.5, 1.5, o.numel(), dtype=o.dtype).view(o.shape)).sum() for o in outs)
        results.append((outs, torch.autograd.grad(total, [*tensors, *extra])))
    for eager, other in zip(results[0][0] + results[0][1], results[1][0] + results[1][1]):
        # the operator may get other strides and so other sums: a few roundings of the greatest element, never more
        assert other.dtype is eager.dtype and other.shape == eager.shape
        assert float((eager - other).abs().max()) <= 32 * torch.finfo(eager.dtype).eps * float(eager.abs().max())


@pytest.mark.parametrize("name", ["causal", "window", "alibi", "t5", "softcap", "pair_bias", "gated_sink"])
def test_gallery(name):
    if name not in cases.VARIANTS:
        pytest.skip(f"no such variant: {sorted(cases.VARIANTS)}")
    variant = cases.VARIANTS[name]
    made = variant.make(SHAPE, torch.Generator().manual_seed(1))
    mods = variant.mods(made, SHAPE)
    score, mask = (anyattn.mod(m) if m is not None else None for m in (mods["score"], mods["mask"]))
    same_with_gradients(lambda q, k, v: anyattn.flex_attention(q, k, v, score_mod=score, mask_mod=mask), inputs())


def test_captured_parameters_get_gradients():
    slopes, table, cap = (
        scores.alibi_slopes(H).requires_grad_(),
        torch.randn(H, 21, requires_grad=True),
        torch.tensor(3.0, requires_grad=True),
    )
    score = scores.alibi(slopes).then(scores.relative_bias(table)).then(scores.softcap(cap))
    same_with_gradients(lambda q, k, v: anyattn.flex_attention(q, k, v, score_mod=score), inputs(), (slopes, table, cap))


def test_sink_lse_gqa_and_two_masks():
    sink = torch.randn(H, requires_grad=True)
    mask = masks.causal()
    block_mask = anyattn.create_block_mask(masks.sliding_window(9, 9), 1, 1, S, S, device="cpu", BLOCK_SIZE=16)

    def call(q, k, v):
        return anyattn.flex_attention(q, k, v, block_mask=block_mask, mask_mod=mask, sink=sink, enable_gqa=True, return_lse=True, scale=0.3)

    same_with_gradients(call, inputs(heads_kv=2), (sink,))


@pytest.mark.covering(1)
@pytest.mark.parametrize("maker", ["ours", "torchs"])
@pytest.mark.parametrize("mask", [masks.causal(), masks.document(torch.arange(S) // 7) | masks.dilated(3, 2)], ids=["ranges", "tiles"])
def test_block_masks(mask, maker):
    from torch.nn.attention.flex_attention import create_block_mask

    create = anyattn.create_block_mask if maker == "ours" else create_block_mask
    block_mask = create(mask, 1, 1, S, S, device="cpu", BLOCK_SIZE=16)
    score = scores.softcap(2.0)
    same_with_gradients(lambda q, k, v: anyattn.flex_attention(q, k, v, score_mod=score, block_mask=block_mask), inputs())


@pytest.mark.parametrize("n", [2**53 + 1, -(2**62) - 1, 2**63 - 1, 0x9E3779B97F4A7C15, 7])
def test_captured_whole_numbers_are_exact(n):
    """A wrapped mod's numbers are no floats on their way through the operator, and those beside them still are."""
    mask = anyattn.mod(lambda b, h, q, k: ((q * 3 + k + n) ^ n) % 5 < 3)
    score = anyattn.mod(lambda s, b, h, q, k, x=0.1: s + ((q + n) % 7) * x)
    same_with_gradients(lambda q, k, v: anyattn.flex_attention(q, k, v, score_mod=score, mask_mod=mask), inputs())
    q, k = torch.arange(S)[:, None], torch.arange(S)
    seen = anyattn.flex_attention(*(torch.zeros(1, 1, S, 8) for _ in "qk"), torch.eye(S)[None, None], mask_mod=mask) > 0
    through = compiled(lambda *x: anyattn.flex_attention(*x, mask_mod=mask))
    assert torch.equal(through(*(torch.zeros(1, 1, S, 8) for _ in "qk"), torch.eye(S)[None, None]) > 0, seen)
    assert torch.equal(seen[0, 0], ((q * 3 + k + n) ^ n) % 5 < 3)


def test_max_scores():
    mask = masks.causal()

    def call(q, k, v):
        out, aux = anyattn.flex_attention(q, k, v, mask_mod=mask, return_aux=anyattn.AuxRequest(lse=True, max_scores=True))
        return out, aux.lse, aux.max_scores

    tensors = inputs(grad=False)
    for eager, other in zip(call(*tensors), compiled(call)(*tensors)):
        assert torch.equal(eager, other)


def test_lists_of_an_exact_block_mask_that_are_written_to():
    """A graph looks whether its lists are still those that the mask makes."""
    block_mask = anyattn.create_block_mask(masks.causal(), 1, 1, S, S, device="cpu", BLOCK_SIZE=16)
    q, k, v = inputs(grad=False)
    call = lambda q, k, v: anyattn.flex_attention(q, k, v, block_mask=block_mask)
    graph = compiled(call)
    graph(q, k, v)
    block_mask.full_kv_num_blocks.zero_()
    expected = anyattn.flex_attention(q, k, v, mask_mod=lambda b, h, i, j: (i >= j) & (i // 16 == j // 16))
    for found in (graph(q, k, v), compiled(call)(q, k, v), call(q, k, v)):
        assert float((found - expected).abs().max()) <= 32 * torch.finfo(q.dtype).eps * float(expected.abs().max())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_dtypes(dtype):
    score, mask = scores.softcap(2.0), masks.causal()
    same_with_gradients(lambda q, k, v: anyattn.flex_attention(q, k, v, score_mod=score, mask_mod=mask), inputs(dtype=dtype))


def test_transposed_inputs():
    q, k, v = (t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in inputs())
    same_with_gradients(lambda q, k, v: anyattn.flex_attention(q, k, v).sin(), (q, k, v))


def test_inductor():
    mask = masks.causal()
    call = lambda q, k, v: anyattn.flex_attention(q, k, v, mask_mod=mask)
    tensors = inputs()
    torch._dynamo.reset()
    got = torch.compile(call, fullgraph=True)(*tensors)
    assert torch.equal(got, call(*tensors))
    grads = [torch.autograd.grad(o.sum(), tensors) for o in (got, call(*tensors))]
    assert all(torch.equal(a, b) for a, b in zip(*grads))


@pytest.mark.slow
def test_inductors_cpp_wrapper():
    """Which writes the operands' texts into C++, between double quotes as they stand."""
    bias, documents = torch.randn(H), torch.arange(S) // 20
    score, mask = scores.head_bias(bias), anyattn.and_masks(masks.causal(), masks.document(documents))
    call = lambda q, k, v: anyattn.flex_attention(q, k, v, score_mod=score, mask_mod=mask, kernel_options={"tile_m": 32})
    tensors = inputs(grad=False)
    torch._dynamo.reset()
    with torch._inductor.config.patch(cpp_wrapper=True):
        got = torch.compile(call, fullgraph=True)(*tensors)
    assert torch.equal(got, call(*tensors))


def test_one_graph_for_other_values_of_captured_tensors():
    graphs = []

    def count(graph, example):
        graphs.append(graph)
        return graph.forward

    bias = torch.zeros(H)
    score = scores.head_bias(bias)
    torch._dynamo.reset()
    call = torch.compile(lambda q, k, v: anyattn.flex_attention(q, k, v, score_mod=score, return_lse=True), fullgraph=True, backend=count)
    tensors = inputs(grad=False)
    before = call(*tensors)[1]
    bias += 1.0
    after = call(*tensors)[1]
    assert len(graphs) == 1 and not torch.equal(before, after)


def test_export():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.score, self.mask = scores.softcap(4.0), masks.causal() & masks.sliding_window(11, None)

        def forward(self, q, k, v):
            return anyattn.flex_attention(q, k, v, score_mod=self.score, mask_mod=self.mask)

    tensors = tuple(inputs(grad=False))
    exported = torch.export.export(Layer(), tensors)
    assert any("anyattn" in str(node.target) for node in exported.graph.nodes)
    assert torch.equal(exported.module()(*tensors), Layer()(*tensors))


def operands(score, mask, *, blocks=False, sink=None, wants_max=False, grad=True):
    q, k, v = inputs(grad=grad)
    lists = []
    if blocks:
        made = anyattn.create_block_mask(mask, 1, 1, S, S, device="cpu", BLOCK_SIZE=16)
        lists = [made.kv_num_blocks, made.kv_indices, made.full_kv_num_blocks, made.full_kv_indices]
    of_mods = (*operands_of(q, score and trace(score, "score")), *operands_of(q, mask and trace(mask, "mask")))
    size = [16, 16] if blocks else [0, 0]
    return (q, k, v, sink, *of_mods, lists, size, False, 0.25, wants_max, False, "", "")


OPCHECKS = {
    "bare": lambda: operands(None, None),
    "score_and_mask": lambda: operands(scores.alibi(scores.alibi_slopes(H).requires_grad_()), masks.causal()),
    "blocks_and_sink": lambda: operands(None, masks.document(torch.arange(S) // 5), blocks=True, sink=torch.zeros(H, requires_grad=True)),
    "max_scores": lambda: operands(scores.softcap(2.0), None, wants_max=True, grad=False),
}


@pytest.mark.parametrize("name", OPCHECKS)
def test_opcheck(name):
    torch.library.opcheck(attend, OPCHECKS[name]())


def test_lists_are_read_once_while_they_are_the_same(monkeypatch):
    """What is found out of a block mask is kept with what stands for it in the operator: forward, backward and in the next call."""
    import gc
    import weakref

    from anyattn.custom_ops import flex

    found, make = [], flex.call_of
    monkeypatch.setattr(flex, "call_of", lambda *given, **named: found.append((made := make(*given, **named))[0]) or made)
    mask = anyattn.mod(lambda b, h, q, k: (q - k) % 2 == 0)
    lists = anyattn.create_block_mask(mask, 1, 1, S, S, device="cpu", BLOCK_SIZE=16)
    call = compiled(lambda q, k, v: anyattn.flex_attention(q, k, v, block_mask=lists))
    for _ in range(2):
        call(*inputs()).sum().backward()
    assert len(found) == 4 and found[0].blocks is not None and all(p.blocks is found[0].blocks for p in found)
    lists.kv_num_blocks.add_(0)  # torch counts that
    call(*inputs())
    assert found[-1].blocks is not found[0].blocks
    kept = weakref.ref(found[-1].blocks)
    for fields in (vars(lists), found):
        fields.clear()
    torch._dynamo.reset()
    gc.collect()
    assert kept() is None
