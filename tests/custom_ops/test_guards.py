"""What Dynamo compares again before every call of a compiled graph: of our own code as little as it takes to follow a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.eval_frame import _debug_get_cache_entry_list

import anyattn

QKV = tuple(torch.randn(1, 2, 32, 16) for _ in range(3))
ROWS = tuple(torch.randn(1, 32, 2, 16) for _ in range(3))
LISTS = anyattn.create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 32, 32, device="cpu", BLOCK_SIZE=16)
TILES = anyattn.compute_block_sparsity(16, 16, 1, 1, 32, 32, lambda b, h, q, k: q >= k, device="cpu")
CALLS: dict[str, tuple[Callable[..., Tensor], tuple]] = {
    "flex": (lambda q, k, v: anyattn.flex_attention(q, k, v), QKV),
    "block mask": (lambda q, k, v, lists: anyattn.flex_attention(q, k, v, block_mask=lists), (*QKV, LISTS)),
    "score mod": (lambda q, k, v: anyattn.flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s + (j - i)), QKV),
    "flash": (lambda q, k, v: anyattn.flash_attn_func(q, k, v, causal=True), ROWS),
    "lists": (lambda q, k, v, lists: anyattn.flash_attn_func(q, k, v, block_sparse_tensors=lists), (*ROWS, TILES)),
}


def guards_on_us(fn: Any) -> list[str]:
    """The comparisons of what belongs to anyattn's modules, without those of arguments and defaults."""
    (entry,) = _debug_get_cache_entry_list(fn._torchdynamo_orig_callable.__code__)
    lines = [line.lstrip(" |+-") for line in str(entry.guard_manager).splitlines()]
    assert not any("_pytree" in line for line in lines)
    ours = [line for line in lines if "__import_anyattn" in line]
    return [line for line in ours if "GuardManager:" not in line and "defaults__" not in line]


@pytest.mark.parametrize("name", CALLS)
def test_few_guards(name: str) -> None:
    torch._dynamo.reset()
    call, given = CALLS[name]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*given), call(*given))
    found = guards_on_us(compiled)
    assert 0 < len(found) <= 10, "\n".join(found)
