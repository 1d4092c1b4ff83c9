"""Plain functions as mods inside ``torch.compile(fullgraph=True)``: eager's results, and no graph for other values of what they capture."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import anyattn
from anyattn import masks, scores
from tests.support.compiling import fresh, same

B, H, S, D = 2, 4, 48, 8


def inputs(heads_kv: int = H, seed: int = 0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(B, n, S, D, generator=g).requires_grad_() for n in (H, heads_kv, heads_kv)]


def test_closures_made_inside_capture_parameters_ids_and_numbers() -> None:
    """A parameter read at captured ids, one tensor of rank 0, ids and a number: gradients too, and one graph for other tensors."""
    table, factor = nn.Parameter(torch.randn(H, 65)), torch.tensor(0.7)

    def call(q, k, v, ids, width):
        def score(s, b, h, i, j):
            return s + table[h, torch.clamp(i - j, -32, 32) + 32] * factor + table[h, ids[j]]

        def mask(b, h, i, j):
            return (ids[i] == ids[j]) & (i >= j) & (i - j < width)

        return anyattn.flex_attention(q, k, v, score, mask_mod=mask)

    compiled, graphs = fresh(call)
    for step in range(3):
        given = inputs(seed=step)
        assert same(compiled, call, (*given, torch.arange(S) // (5 + step), 30), (*given, table))
    assert graphs.frame_count == 1
    for width in (20, 25, 29):  # numbers: what Dynamo itself makes anew, once
        given = inputs(seed=width)
        assert same(compiled, call, (*given, torch.arange(S) // 9, width), (*given, table))
    assert graphs.frame_count == 2


def test_sizes_of_captured_tensors_that_the_compiler_keeps_symbolic() -> None:
    """Under ``dynamic=True`` a captured tensor's size is a symbolic number, which the mod takes at run time: one graph for all lengths."""

    def call(q, k, v, ids):
        last = lambda at: torch.clamp(at, 0, ids.shape[0] - 1)
        mask = lambda b, h, i, j: (ids[last(i)] == ids[last(j)]) & (j < ids.size(0))
        return anyattn.flex_attention(q, k, v, lambda s, b, h, i, j: s + ids.shape[0], mask_mod=mask)

    compiled, graphs = fresh(call, dynamic=True)
    for length in (48, 96, 160):
        given = [t.detach().repeat(1, 1, length // S + 1, 1)[:, :, :length].requires_grad_() for t in inputs()]
        assert same(compiled, call, (*given, torch.arange(length) // 7), given)
    assert graphs.frame_count == 1


def test_floats_that_change_are_compiled_once_more_and_no_oftener() -> None:
    def call(q, k, v, factor):
        return anyattn.flex_attention(q, k, v, lambda s, b, h, i, j: s * factor)

    compiled, graphs = fresh(call)
    for factor in (0.3, 0.4, 0.5, 0.6):
        given = inputs()
        assert same(compiled, call, (*given, factor), given)
    assert graphs.frame_count == 2


@pytest.mark.parametrize("entry_point", ["flex", "flash"])
def test_a_learned_table_that_no_gradient_reaches(entry_point: str) -> None:
    """Detached, or cut to whole numbers: its gradient is zeros, and the others' are eager's."""
    moved, still, cut = (nn.Parameter(torch.randn(H, S)) for _ in range(3))

    def call(q, k, v):
        def score(s, b, h, i, j):
            return s.detach() * moved[h, i] + still[h, j].detach() + torch.floor(cut[h, j])

        return (anyattn.flex_attention if entry_point == "flex" else anyattn.flash_attn_func)(q, k, v, score_mod=score)

    compiled, given = fresh(call)[0], inputs()
    if entry_point == "flash":
        given = [t.detach().transpose(1, 2).contiguous().requires_grad_() for t in given]
    assert same(compiled, call, given, (*given, moved))
    assert not any(t.any() for t in torch.autograd.grad(compiled(*given).sum(), (still, cut)))


@pytest.mark.parametrize("wrap", ["plain", "anyattn.mod", "library"])
def test_block_masks_from_outside_are_new_every_step(wrap: str) -> None:
    def call(q, k, v, blocks):
        return anyattn.flex_attention(q, k, v, block_mask=blocks)

    compiled, graphs = fresh(call)
    for step in range(3):
        ids = torch.arange(S) // (5 + 3 * step)
        plain = lambda b, h, i, j, ids=ids: ids[i] == ids[j]
        mask = {"plain": plain, "anyattn.mod": anyattn.mod(plain), "library": masks.document(ids)}[wrap]
        blocks = anyattn.create_block_mask(mask, None, None, S, S, device="cpu", BLOCK_SIZE=16)
        given = inputs(seed=step)
        assert same(compiled, call, (*given, blocks), given)
    assert graphs.frame_count == 1


@pytest.mark.parametrize("separate", [True, False])
def test_block_masks_made_inside(separate: bool) -> None:
    def call(q, k, v, ids):
        def mask(b, h, i, j):
            return (ids[b, i] == ids[b, j]) & (i >= j)

        blocks = anyattn.create_block_mask(mask, B, None, S, S, device=q.device, BLOCK_SIZE=16, separate_full_blocks=separate)
        return anyattn.flex_attention(q, k, v, block_mask=blocks)

    compiled, graphs = fresh(call)
    for step in range(2):
        given, ids = inputs(seed=step), torch.stack([torch.arange(S) // (4 + step), torch.arange(S) // 19])
        assert same(compiled, call, (*given, ids), given)
    assert graphs.frame_count == 1


def test_lists_made_inside_are_the_eager_ones() -> None:
    def lists(ids):
        made = anyattn.create_block_mask(lambda b, h, i, j: ids[i] == ids[j], 1, 2, 50, 70, device="cpu", BLOCK_SIZE=(16, 32))
        return [getattr(made, f"{side}_{what}") for side in ("kv", "full_kv", "q", "full_q") for what in ("num_blocks", "indices")]

    assert same(fresh(lists)[0], lists, (torch.arange(70) // 20,))


LIBRARY = {
    "joined": lambda ids: {"mask_mod": masks.causal() & masks.document(ids) | masks.sliding_window(3, 3)},
    "plain and library": lambda ids: {"mask_mod": masks.causal() & (lambda b, h, i, j: ids[i] == ids[j])},
    "and_masks": lambda ids: {"mask_mod": anyattn.and_masks(masks.causal(), masks.document(ids), masks.prefix_lm(7))},
    "others": lambda ids: {"mask_mod": masks.chunked(9) | masks.dilated(3, 4) | masks.sink_window(2, 5) | masks.block_diagonal(6)},
    "scores": lambda ids: {"score_mod": scores.alibi(scores.alibi_slopes(H)).then(scores.softcap(20.0)).then(scores.temperature(1.5))},
    "mod": lambda ids: {"score_mod": anyattn.mod(lambda s, b, h, i, j: s * 2), "mask_mod": anyattn.mod(lambda b, h, i, j: i >= j)},
}


@pytest.mark.parametrize("name", LIBRARY)
def test_the_library_is_called_inside(name: str) -> None:
    def call(q, k, v, ids):
        return anyattn.flex_attention(q, k, v, **LIBRARY[name](ids))

    given = inputs()
    assert same(fresh(call)[0], call, (*given, torch.arange(S) // 10), given)


def test_learned_captures_of_the_library_inside() -> None:
    slopes, table = scores.alibi_slopes(H).requires_grad_(), torch.randn(H, 21, requires_grad=True)

    def call(q, k, v):
        return anyattn.flex_attention(q, k, v, score_mod=scores.alibi(slopes).then(scores.relative_bias(table)))

    given = inputs()
    assert same(fresh(call)[0], call, given, (*given, slopes, table))


class _Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, 1.0, 1.5, 2.0]))

    def forward(self, s, b, h, i, j):
        return s * self.weight[h]

    def method(self, s, b, h, i, j):
        return s * self.weight[h] + 1.0


def test_modules_methods_and_partials_are_mods() -> None:
    gate = _Gate()
    by_factor = functools.partial(lambda factor, s, b, h, i, j: s * factor, 3.0)
    for mod, learned in ((gate, [gate.weight]), (gate.method, [gate.weight]), (by_factor, [])):
        call = lambda q, k, v, mod=mod: anyattn.flex_attention(q, k, v, score_mod=mod)
        given = inputs()
        assert same(fresh(call)[0], call, given, (*given, *learned))


def test_aux_tensors_inside() -> None:
    bias = torch.randn(H, requires_grad=True)

    def call(q, k, v):
        score = lambda s, b, h, i, j, aux: s + aux[0][h]
        mask = lambda b, h, i, j: i >= j
        return anyattn.flex_attention(q, k, v, score, mask_mod=mask, aux_tensors=[bias])

    given = inputs()
    assert same(fresh(call)[0], call, given, (*given, bias))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_scores_have_the_dtype_of_eager_calls(dtype: torch.dtype) -> None:
    """Inside a mod the score is float32 (float64), whatever the query's dtype: a cast to the score's own dtype changes nothing."""

    def call(q, k, v):
        return anyattn.flex_attention(q, k, v, lambda s, b, h, i, j: (s * 3.0).to(s.dtype) + (i - j).to(s.dtype) * 0.01)

    given = [t.detach().to(dtype).requires_grad_() for t in inputs()]
    assert same(fresh(call)[0], call, given, given)


def test_lists_that_are_edited_are_read() -> None:
    """In a compiled graph too, a list that was written to or replaced is not taken for what the mask says."""

    def made():
        return anyattn.create_block_mask(lambda b, h, i, j: i >= j, None, None, S, S, device="cpu", BLOCK_SIZE=16)

    def plain(q, k, v, blocks):
        return anyattn.flex_attention(q, k, v, block_mask=blocks)

    def edited(q, k, v, blocks):
        blocks.full_kv_num_blocks.zero_()
        return plain(q, k, v, blocks)

    def edited_inside(q, k, v, blocks):
        return edited(q, k, v, made())

    def assigned(q, k, v, blocks):
        blocks.full_kv_num_blocks = torch.zeros_like(blocks.full_kv_num_blocks)
        return plain(q, k, v, blocks)

    given = inputs()
    whole = plain(*given, made())
    for call in (edited, edited_inside, assigned):
        found, wanted = (f(*given, made()) for f in (fresh(call)[0], call))
        assert torch.equal(found, wanted) and not torch.equal(found, whole)
    compiled = fresh(plain)[0]
    assert torch.equal(compiled(*given, made()), whole)
    blocks = made()
    blocks.full_kv_num_blocks.zero_()
    assert torch.equal(compiled(*given, blocks), plain(*given, blocks))


def test_flash_entry_points_take_plain_mods() -> None:
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 30, n, D, generator=g).requires_grad_() for n in (H, 2, 2))
    bias, sink, width = torch.randn(H, requires_grad=True), torch.randn(H, requires_grad=True), torch.tensor(9)
    score = lambda s, b, h, i, j: s + bias[h] * (i - j)
    mask = lambda b, h, i, j: i - j < width

    def dense(q, k, v):
        options = {"causal": True, "score_mod": score, "mask_mod": mask, "sink": sink, "softcap": 3.0}
        return anyattn.flash_attn_func(q, k, v, **options, return_lse=True)

    assert same(fresh(dense)[0], dense, (q, k, v), (q, k, v, bias, sink))
    ends = torch.tensor([0, 7, 30, 60])
    packed = [t.detach().reshape(60, -1, D).requires_grad_() for t in (q, k, v)]

    def varlen(q, k, v):
        options = {
            "cu_seqlens_q": ends,
            "cu_seqlens_k": ends,
            "max_seqlen_q": 30,
            "max_seqlen_k": 30,
            "causal": True,
            "window_size": (11, 0),
        }
        return anyattn.flash_attn_varlen_func(q, k, v, **options, score_mod=score)

    assert same(fresh(varlen)[0], varlen, packed, (*packed, bias))


def test_decoding_with_plain_mods_and_a_static_cache() -> None:
    g = torch.Generator().manual_seed(4)
    cache, new = torch.randn(2, 2, 32, 2, D, generator=g), torch.randn(2, 2, 1, 2, D, generator=g)
    q, lengths = torch.randn(2, 1, H, D, generator=g), torch.tensor([5, 9])

    def step(q, k_cache, v_cache, k, v, lengths):
        score = lambda s, b, h, i, j: s - 0.1 * (i - j)
        return anyattn.flash_attn_with_kvcache(q, k_cache, v_cache, k=k, v=v, cache_seqlens=lengths, causal=True, score_mod=score)

    compiled, graphs = fresh(step)
    caches = [cache.clone(), cache.clone()]
    for i in range(3):
        found, wanted = (f(q, *c, *new, lengths + i) for f, c in ((compiled, caches[0]), (step, caches[1])))
        assert torch.equal(found, wanted) and torch.equal(*caches)
    assert graphs.frame_count == 1


def test_flex_attention_itself_is_compiled() -> None:
    compiled, _ = fresh(anyattn.flex_attention)
    q, k, v = inputs()
    mod = lambda s, b, h, i, j: s * 2 + b
    assert torch.equal(compiled(q, k, v, score_mod=mod), anyattn.flex_attention(q, k, v, score_mod=mod))
