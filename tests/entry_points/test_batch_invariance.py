"""``deterministic="batch"``: a row's bits are the same alone and in every batch, prefilled, decoded, in pages, and in training.

In Triton's interpreter the calls name its backend (``tests/backends/triton/test_batch_invariance_interpreted.py``).
"""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch

import anyattn
from anyattn import BackendError, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, flex_attention, masks
from anyattn.determinism import is_batch_invariant
from tests.support import batches

MODE: dict[str, Any] = {"deterministic": "batch", "backend": "triton" if os.environ.get("TRITON_INTERPRET") else None}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = (((4, 2), (32, 32)), ((3, 1), (40, 24)), ((6, 6), (16, 64)), ((8, 1), (64, 64)))


def _call(name: str, heads: int, seed: int, **more: Any) -> dict[str, Any]:
    return {**batches.OPTIONS[name](heads, torch.Generator().manual_seed(seed)), **MODE, **more}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", batches.OPTIONS)
def test_random_batches(name: str, seed: int) -> None:
    g = torch.Generator().manual_seed(100 * seed + sorted(batches.OPTIONS).index(name))
    heads, dims = SHAPES[(seed + sorted(batches.OPTIONS).index(name)) % len(SHAPES)]
    dtype = DTYPES[(seed + len(name)) % 3]
    lengths = [int(n) for n in torch.randint(1, 330, (1 + seed,), generator=g)]
    batch = [batches.draw(g, n, heads, dims, dtype) for n in lengths]
    assert not batches.differing(g, batch, _call(name, heads[0], seed)), (name, seed, lengths, dtype)


def test_the_default_is_not_invariant() -> None:
    """What the other tests compare can differ."""
    g = torch.Generator().manual_seed(0)
    batch = [batches.draw(g, n, (4, 2), (32, 32), torch.float32) for n in (300, 30)]
    assert batches.differing(g, batch, {**MODE, "deterministic": True})


def test_a_neighbour_that_grows() -> None:
    """A prefill of 9 or 10 tokens next door."""
    g = torch.Generator().manual_seed(1)
    own = batches.draw(g, 200, (8, 2), (64, 64), torch.bfloat16)
    call = _call("causal", 8, 0)
    expected = batches.alone(own, call)
    for length in (1, 8, 9, 10, 11, 16, 17, 64, 65, 256):
        other = batches.draw(g, length, (8, 2), (64, 64), torch.bfloat16)
        found = batches.packed([other, own], 1, call)
        assert torch.equal(found[0], expected[0]), length
        assert torch.equal(found[1], expected[1]), length


def test_every_chunking_of_a_prefill() -> None:
    g = torch.Generator().manual_seed(2)
    own = batches.draw(g, 150, (4, 2), (32, 32), torch.float32)
    call = _call("window", 4, 3)
    out, lse = batches.alone(own, call)
    for step in (1, 7, 64, 149):
        for begin in range(0, 150, step) if step > 1 else (0, 1, 63, 64, 149):
            end = min(begin + step, 150)
            with torch.no_grad():
                part, part_lse = flash_attn_with_kvcache(
                    own.q[:, begin:end], own.k, own.v, cache_seqlens=end, causal=True, return_lse=True, **call
                )
            assert torch.equal(part[0], out[begin:end]), (step, begin)
            assert torch.equal(part_lse[0], lse[:, begin:end]), (step, begin)


def test_a_cache_that_is_appended_to() -> None:
    g = torch.Generator().manual_seed(3)
    own = batches.draw(g, 70, (4, 2), (32, 32), torch.bfloat16)
    call = _call("sink", 4, 1)
    out, _ = batches.alone(own, call)
    k_cache, v_cache = torch.zeros(2, 80, 2, 32, dtype=torch.bfloat16), torch.zeros(2, 80, 2, 32, dtype=torch.bfloat16)
    other = batches.draw(g, 70, (4, 2), (32, 32), torch.bfloat16)
    with torch.no_grad():
        for at in range(70):
            q, k, v = (torch.cat([getattr(s, name)[:, at : at + 1] for s in (own, other)]) for name in ("q", "k", "v"))
            used = torch.tensor([at, at])
            step = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=used, causal=True, **call)
            assert torch.equal(step[0, 0], out[at]), at


def test_eight_bits_in_pages_and_not() -> None:
    g = torch.Generator().manual_seed(4)
    keys, values = (torch.randint(-90, 90, (3, 96, 2, 32), generator=g).to(torch.int8) for _ in range(2))
    scales = torch.rand(3, 96, 2, generator=g) + 0.01, torch.rand(3, 96, 2, generator=g) + 0.01
    q = torch.randn(3, 5, 4, 32, generator=g).to(torch.bfloat16)
    order = torch.randperm(18, generator=g)
    pools = [torch.empty(18, 16, *x.shape[2:], dtype=x.dtype) for x in (keys, values, *scales)]
    for pool, x in zip(pools, (keys, values, *scales), strict=True):
        pool[order] = x.reshape(18, 16, *x.shape[2:])
    used = torch.tensor([96, 50, 7])
    more: dict[str, Any] = {"causal": True, **MODE}
    together = flash_attn_with_kvcache(q, keys, values, cache_seqlens=used, k_descale=scales[0], v_descale=scales[1], **more)
    for b in range(3):
        one = slice(b, b + 1)
        own = [x[one] for x in scales]
        found = flash_attn_with_kvcache(
            q[one, -1:], keys[one], values[one], cache_seqlens=used[one], k_descale=own[0], v_descale=own[1], **more
        )
        assert torch.equal(found[0, 0], together[b, -1]), b
    table = order.view(3, 6).to(torch.int32)
    paged = flash_attn_with_kvcache(q, *pools[:2], cache_seqlens=used, page_table=table, k_descale=pools[2], v_descale=pools[3], **more)
    assert torch.equal(paged, together)
    rows = [keys[b].float() * scales[0][b][..., None] for b in range(3)], [values[b].float() * scales[1][b][..., None] for b in range(3)]
    wide = [torch.stack(x).double() for x in rows]
    expected = flash_attn_with_kvcache(q.double(), *wide, cache_seqlens=used, causal=True)
    assert (together.double() - expected).abs().max() <= 2**-7 * expected.abs().max()


@pytest.mark.parametrize("heads", [(4, 2), (3, 3)])
def test_dense_varlen_lists_and_mods_agree(heads: tuple[int, int]) -> None:
    """The same mask as a mod, as a block mask, and as causal=True."""
    g = torch.Generator().manual_seed(5)
    own, other = (batches.draw(g, 260, heads, (32, 32), torch.float32) for _ in range(2))
    expected, _ = batches.alone(own, _call("causal", heads[0], 0))
    q, k, v = (torch.cat([getattr(s, name) for s in (other, own)]).transpose(1, 2) for name in ("q", "k", "v"))
    lists = anyattn.create_block_mask(masks.causal(), None, None, 260, 260, device="cpu")
    for more in ({"mask_mod": masks.causal()}, {"block_mask": lists}):
        out = flex_attention(q, k, v, enable_gqa=True, **MODE, **more)
        assert torch.equal(out[1].transpose(0, 1), expected), list(more)


@pytest.mark.parametrize("length", [5, 62, 100])
def test_lists_of_sequences_shorter_than_a_block(length: int) -> None:
    """A block holds all keys, however many there are."""
    g = torch.Generator().manual_seed(9)
    own = batches.draw(g, length, (2, 2), (32, 32), torch.float32)
    call = _call("thirds", 2, 0)
    expected, _ = batches.alone(own, call)
    visible = lambda b, h, q, kv: (q >= kv) & call["mask_mod"](b, h, q, kv)
    lists = anyattn.create_block_mask(visible, 1, 2, length, length, device="cpu", BLOCK_SIZE=128)
    q, k, v = (x.transpose(1, 2) for x in (own.q, own.k, own.v))
    out = flex_attention(q, k, v, block_mask=lists, **MODE)
    assert torch.equal(out[0].transpose(0, 1), expected)


def test_block_lists_that_do_not_follow_from_a_mask() -> None:
    g = torch.Generator().manual_seed(6)
    own, other = (batches.draw(g, 400, (2, 2), (32, 32), torch.bfloat16) for _ in range(2))
    chosen = torch.rand(2, 2, 4, 4, generator=g).argsort(-1)[..., :2].to(torch.int32)
    both = anyattn.BlockMask.from_topk(chosen, BLOCK_SIZE=128, seq_lengths=(400, 400))
    only = anyattn.BlockMask.from_topk(chosen[1:], BLOCK_SIZE=128, seq_lengths=(400, 400))
    q, k, v = (torch.cat([getattr(s, name) for s in (other, own)]).transpose(1, 2) for name in ("q", "k", "v"))
    out = flex_attention(q, k, v, block_mask=both, **MODE)
    single = flex_attention(q[1:], k[1:], v[1:], block_mask=only, **MODE)
    assert torch.equal(out[1:], single)


def test_training_gives_the_bits_of_serving() -> None:
    g = torch.Generator().manual_seed(7)
    own, other = (batches.draw(g, n, (4, 2), (32, 32), torch.float32) for n in (130, 60))
    call = _call("causal", 4, 0)
    with torch.no_grad():
        served = flash_attn_with_kvcache(own.q[:, 99:100], own.k, own.v, cache_seqlens=100, causal=True, **call)
    gradients = []
    for _ in range(2):
        q, k, v = (torch.cat([getattr(s, name)[0] for s in (other, own)]).requires_grad_() for name in ("q", "k", "v"))
        ends = torch.tensor([0, 60, 190])
        out = flash_attn_varlen_func(q, k, v, ends, ends, causal=True, **call)
        assert torch.equal(out[60 + 99], served[0, 0])
        gradients.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
    for first, second in zip(*gradients, strict=True):
        assert torch.equal(first, second)
        assert first.abs().max() > 0


# ---- the context


def test_inside_the_context_every_call_is_in_the_mode() -> None:
    g = torch.Generator().manual_seed(8)
    own = batches.draw(g, 300, (4, 2), (32, 32), torch.float32)
    expected, _ = batches.alone(own, _call("causal", 4, 0))
    plain = {"backend": MODE["backend"]}
    default, _ = batches.alone(own, plain)
    with anyattn.batch_invariant():
        inside, _ = batches.alone(own, plain)
        with anyattn.batch_invariant():
            pass
        still, _ = batches.alone(own, plain)
    outside, _ = batches.alone(own, plain)
    assert torch.equal(inside, expected)
    assert torch.equal(still, expected)
    assert torch.equal(outside, default)


def test_the_context_may_be_used_again_and_decorate() -> None:
    context, open_inside = anyattn.batch_invariant(), []
    with context, context:
        open_inside.append(is_batch_invariant())
    with context:
        open_inside.append(is_batch_invariant())
    for _ in range(2):
        context(lambda: open_inside.append(is_batch_invariant()))()
    assert open_inside == [True] * 4 and not is_batch_invariant()


def test_the_context_is_of_all_threads() -> None:
    seen = []
    with anyattn.batch_invariant():
        thread = threading.Thread(target=lambda: seen.append(anyattn.determinism.is_batch_invariant()))
        thread.start()
        thread.join()
    assert seen == [True]
    assert not anyattn.determinism.is_batch_invariant()


# ---- bad input


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"dropout_p": 0.1}, "dropout_p"),
        ({"skip_below": 1e-4}, "skip_below"),
        ({"kernel_options": {"tile_n": 32}}, "tile_n"),
        ({"kernel_options": {"num_splits": 3}}, "num_splits=3"),
        ({"deterministic": "batches"}, "'batches'; wanted True, False or 'batch'"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_refusals(more: dict[str, Any], message: str) -> None:
    q = torch.randn(1, 2, 40, 16)
    with pytest.raises(ValueError, match=message):
        flex_attention(q, q, q, **{"deterministic": "batch", **more})


def test_splits_are_refused() -> None:
    q = torch.randn(1, 40, 2, 16)
    with pytest.raises(ValueError, match=r"num_splits=4.*wanted num_splits left out"):
        flash_attn_func(q, q, q, deterministic="batch", num_splits=4)


def test_float64_is_refused() -> None:
    q = torch.randn(1, 2, 40, 16, dtype=torch.float64)
    with pytest.raises(BackendError, match=r'deterministic="batch" cannot have this call.*\.float\(\)'):
        flex_attention(q, q, q, deterministic="batch", backend="torch")


def test_no_compiler_is_an_error_and_no_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYATTN_COMPILED_LOOPS", "0")
    q = torch.randn(1, 2, 41, 16)
    with pytest.raises(BackendError, match="ANYATTN_COMPILED_LOOPS"):
        flex_attention(q, q, q, deterministic="batch", backend="torch")


@pytest.mark.parametrize("shape", [(0, 2, 5, 16), (2, 2, 0, 16)])
def test_empty_calls(shape: tuple[int, ...]) -> None:
    q = torch.randn(shape)
    assert flex_attention(q, q, q, deterministic="batch").shape == shape


def test_a_sequence_without_keys_beside_others() -> None:
    q, k = torch.randn(6, 2, 16), torch.randn(4, 2, 16)
    out, lse = flash_attn_varlen_func(q, k, k, torch.tensor([0, 2, 6]), torch.tensor([0, 0, 4]), causal=True, return_lse=True, **MODE)
    assert (out[:2] == 0).all()
    assert (lse[:, :2] == -torch.inf).all()
    assert (out[2:] != 0).all()
