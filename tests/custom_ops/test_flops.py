"""FLOP counters: what ``torch.utils.flop_counter`` counts for each entry point, in both passes and on all kinds of lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import anyattn

B, H, S, D, DV = 2, 4, 40, 16, 24
ENDS = torch.tensor([0, 30, 80])


def counted(call: Callable[[], Any]) -> tuple[int, set[str]]:
    """The sum, and the names of the operators that were counted."""
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops(), {str(name) for name in counter.get_flop_counts().get("Global", ())}


def rows(grad: bool = True, heads: int = H) -> list[Tensor]:
    return [torch.randn(B, n, S, d, requires_grad=grad) for n, d in ((H, D), (heads, D), (heads, DV))]


def dense(heads: int = H) -> tuple[int, int]:
    """What torch counts for its own attention forward, and backward."""
    of_q, of_k, of_v = (B, H, S, D), (B, heads, S, D), (B, heads, S, DV)
    return sdpa_flop_count(of_q, of_k, of_v), sdpa_backward_flop_count((B, H, S, DV), of_q, of_k, of_v)


def packed(*tensors: Tensor) -> list[Tensor]:
    return [t.transpose(1, 2).reshape(B * S, t.shape[1], t.shape[3]) for t in tensors]


def lists() -> Any:
    return anyattn.compute_block_sparsity(16, 16, B, H, S, S, lambda b, h, q, k: q >= k, device="cpu")


CALLS: dict[str, Callable[..., Tensor]] = {
    "flex": lambda q, k, v: anyattn.flex_attention(q, k, v, enable_gqa=True, mask_mod=lambda b, h, i, j: i >= j),
    "flash": lambda q, k, v: anyattn.flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=True),
    "flash with lists": lambda q, k, v: anyattn.flash_attn_func(
        *(t.transpose(1, 2) for t in (q, k, v)), mask_mod=lambda b, h, i, j: i >= j, block_sparse_tensors=lists()
    ),
}


@pytest.mark.parametrize("heads", [H, 2])
@pytest.mark.parametrize("name", CALLS)
def test_both_passes_count_as_torchs_own(name: str, heads: int) -> None:
    q, k, v = rows(heads=heads)
    forward, backward = dense(heads)
    assert counted(lambda: CALLS[name](q, k, v))[0] == forward
    found, operators = counted(lambda: CALLS[name](q, k, v).sum().backward())
    assert found == forward + backward
    assert len(operators) == 2 and all(o.startswith("anyattn.") for o in operators)


def test_equal_head_dimensions_count_two_and_a_half_times_as_much_backward() -> None:
    q, k, v = torch.randn(3, B, H, S, D, requires_grad=True).unbind()
    forward = 2 * B * H * S * S * 2 * D
    assert counted(lambda: anyattn.flex_attention(q, k, v).sum().backward())[0] == 3.5 * forward


def test_packed_sequences_count_with_their_lengths_in_both_passes() -> None:
    q, k, v = packed(*rows())
    pairs = 30 * 30 + 50 * 50
    found, _ = counted(lambda: anyattn.flash_attn_varlen_func(q, k, v, cu_seqlens_q=ENDS, cu_seqlens_k=ENDS).sum().backward())
    assert found == 2 * H * pairs * (D + DV) + 2 * H * pairs * (3 * D + 2 * DV)


def test_rows_in_use_count_where_a_table_names_them() -> None:
    q, k, v = (t.transpose(1, 2) for t in rows(False))
    used = torch.tensor([10, 40])
    assert counted(lambda: anyattn.flash_attn_varlen_func(q, k, v, seqused_k=used))[0] == 2 * H * S * 50 * (D + DV)


def test_fake_sequences_count_with_the_greatest_length() -> None:
    with FakeTensorMode():
        q, k, v = packed(*rows(False))
        ends = torch.tensor([0, 30, 80])
        tables = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 60, "max_seqlen_k": 50}
        assert counted(lambda: anyattn.flash_attn_varlen_func(q, k, v, **tables))[0] == 2 * H * 2 * 60 * 50 * (D + DV)


@pytest.mark.parametrize(
    ("options", "pairs"),
    [
        ({}, 2 * 64),
        ({"cache_seqlens": 7}, 2 * 7),
        ({"cache_seqlens": torch.tensor([20, 9])}, 29),
        ({"cache_seqlens": torch.tensor([20, 9]), "cache_leftpad": torch.tensor([2, 0])}, 27),
        ({"cache_seqlens": torch.tensor([20, 9]), "new": True}, 31),
        ({"cache_seqlens": torch.tensor([20, 9]), "page_table": torch.arange(4).view(2, 2)}, 29),
        ({"cache_seqlens": torch.tensor([20, 9]), "cu_seqlens_q": torch.tensor([0, 2, 5]), "new": True}, 2 * 22 + 3 * 12),
    ],
)
def test_a_step_of_decoding_counts_the_keys_that_it_reads(options: dict[str, Any], pairs: int) -> None:
    options = dict(options)
    q = torch.randn(5, H, D) if "cu_seqlens_q" in options else torch.randn(2, 1, H, D)
    shape = (4, 32) if "page_table" in options else (2, 64)
    caches = torch.zeros(*shape, H, D), torch.zeros(*shape, H, DV)
    new = {"k": torch.zeros_like(q), "v": torch.zeros(*q.shape[:-1], DV)} if options.pop("new", False) else {}
    assert counted(lambda: anyattn.flash_attn_with_kvcache(q, *caches, **new, **options))[0] == 2 * H * pairs * (D + DV)


def test_compiled_calls_count_the_same() -> None:
    q, k, v = rows()
    compiled = torch.compile(CALLS["flex"], backend="aot_eager")  # torch runs it eagerly under a mode
    assert counted(lambda: compiled(q, k, v).sum().backward())[0] == sum(dense())


def test_torchs_replaced_function_counts_the_same() -> None:
    from torch.nn.attention import flex_attention as torchs

    q, k, v = rows(False)
    with anyattn.replace_flex_attention():
        assert counted(lambda: torchs.flex_attention(q, k, v))[0] == dense()[0]


@pytest.mark.parametrize("is_inference", [False, True])
def test_a_counter_made_before_the_operators_counts_them(is_inference: bool) -> None:
    q, k, v = rows(False)
    counter = FlopCounterMode(display=False)
    counter.flop_registry = {key: formula for key, formula in counter.flop_registry.items() if "anyattn" not in str(key)}
    with torch.inference_mode(is_inference), counter:
        anyattn.flex_attention(q, k, v)
    assert counter.get_total_flops() == dense()[0]


def test_a_counter_of_the_backward_pass_alone_is_told_so() -> None:
    from anyattn import autograd

    out = anyattn.flex_attention(*rows()).sum()
    autograd._warn_of_modes.cache_clear()
    with pytest.warns(UserWarning, match="not in its forward pass.*run the forward pass inside of the mode too"):
        counted(out.backward)
