"""What the Triton backend allocates for long sequences, with its launches left out: nothing that grows with the square of their length.

Every allocation of a call counts, also what is freed again, so that the sum bounds the peak. On a GPU the peak itself is asserted
(``tests/gpu/test_triton_gpu.py``).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn import masks
from anyattn.validate import sequences
from tests.support.inside import InsideMode

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
if importlib.util.find_spec("triton") is not None:
    from tests.support.triton import ahead

LONG, DIM, HEADS, KV_HEADS = 65536, 64, 4, 2
BF16 = {"dtype": torch.bfloat16, "requires_grad": True}
ROWS = LONG * HEADS * DIM * 2  # bytes of q, and of out
KEYS = LONG * KV_HEADS * DIM * 2
NUMBERS = LONG * HEADS * 4  # a float32 for every row
SQUARE = LONG * LONG // 8  # a bit for every pair of one head


class Allocations(InsideMode):
    """Bytes of every memory that an operation returns and that is no argument's, by the operation."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[int, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        leaves = torch.utils._pytree.tree_leaves
        known = {t.untyped_storage()._cdata for t in leaves((args, kwargs)) if isinstance(t, Tensor)}
        found = func(*args, **(kwargs or {}))
        for t in leaves(found):
            if isinstance(t, Tensor) and t.untyped_storage()._cdata not in known:
                self.made.append((t.untyped_storage().nbytes(), func.overloadpacket.__name__))
        return found

    @property
    def total(self) -> int:
        return sum(size for size, _ in self.made)


@contextmanager
def as_on_a_gpu() -> Iterator[Allocations]:
    """CPU tensors are taken for an H200's; a mask's tiles are listed by the backend's kernels, and no kernel is launched."""
    from anyattn.sparsity import compute
    from anyattn.sparsity.kernels import block_lists

    def listed(*about: Any) -> Any:
        found = block_lists.list_tiles(*about)
        return found and tuple(None if t is None else t.zero_() for t in found)  # what nothing has filled would be refused

    with pytest.MonkeyPatch.context() as patch, ahead.on((9, 0)), Allocations() as found:
        patch.setattr(sequences, "skips_device_reads", lambda device, validate: validate is not True)
        patch.setattr(compute, "device_lists", listed)
        yield found


def drawn(*lead: int) -> list[Tensor]:
    return [torch.empty(*lead[:-1], h, lead[-1], DIM, **BF16) for h in (HEADS, KV_HEADS, KV_HEADS)]  # type: ignore[arg-type]


IDS = torch.arange(LONG) // 3001
SLOPES, BIAS = torch.zeros(HEADS, requires_grad=True), torch.zeros(HEADS, LONG, requires_grad=True)
FLEX: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "causal": lambda: {"mask_mod": masks.causal()},
    "sink and window": lambda: {"mask_mod": masks.sink_window(4, 512)},
    "tiles listed": lambda: {"mask_mod": lambda b, h, i, j: (IDS[i] == IDS[j]) | (i % 64 == 0)},
    "block mask": lambda: {"block_mask": anyattn.create_block_mask(masks.document(IDS) & masks.causal(), None, None, LONG, LONG, "cpu")},
    "captured": lambda: {"score_mod": lambda s, b, h, i, j: s - SLOPES[h] * (i - j) + BIAS[h, j], "mask_mod": masks.causal()},
    "a sink's logit": lambda: {"sink": torch.zeros(HEADS, requires_grad=True), "mask_mod": masks.causal()},
    "max scores": lambda: {"return_aux": anyattn.AuxRequest(lse=True, max_scores=True)},
}


@pytest.mark.parametrize("name", FLEX)
def test_19_no_square_tensor_at_length_65536(name: str) -> None:
    """Its output, its gradients, a few numbers per row, and lists of tiles of 128 x 128."""
    q, k, v = drawn(1, LONG)
    dout = torch.empty_like(q)
    with as_on_a_gpu() as found:
        out = anyattn.flex_attention(q, k, v, **FLEX[name](), enable_gqa=True, backend="triton")
        out = out[0] if isinstance(out, tuple) else out
        forward = found.total
        out.backward(dout)
    assert all(t.grad is not None for t in (q, k, v))
    lists = 16 * HEADS * (LONG // 128) ** 2 if name in ("tiles listed", "block mask") else 0
    assert max(found.made)[0] <= ROWS < SQUARE, max(found.made)
    assert forward <= ROWS + 3 * NUMBERS + lists, (forward, sorted(found.made)[-5:])
    assert found.total <= 2 * ROWS + 2 * KEYS + 16 * NUMBERS + 2 * lists, (found.total, sorted(found.made)[-9:])


@pytest.mark.parametrize(
    ("wanted", "kernels", "size"),
    [("q", ["dq"], ROWS), ("k", ["dkdv"], KEYS), ("v", ["dkdv"], KEYS), ("kv", ["dkdv"], 2 * KEYS), ("bias", ["dq"], 0)],
)
def test_what_nobody_asks_for_is_neither_allocated_nor_launched(wanted: str, kernels: list[str], size: int) -> None:
    q, k, v = (t.detach().requires_grad_(name in wanted) for name, t in zip("qkv", drawn(1, LONG), strict=True))
    bias = torch.zeros(HEADS, requires_grad=wanted == "bias")
    options = {"score_mod": lambda s, b, h, i, j: s + bias[h], "mask_mod": masks.causal(), "enable_gqa": True, "backend": "triton"}
    with as_on_a_gpu() as found, ahead.caught((9, 0)) as made:
        out = anyattn.flex_attention(q, k, v, **options)  # type: ignore[arg-type]
        before = found.total
        made.clear()
        out.backward(torch.empty_like(q))
    names = [launch.kernel.fn.__code__.co_filename for launch in made]
    assert len(names) == 2 and "prepare_tile" in names[0] and [f"{k}_tile" in n for k, n in zip(kernels, names[1:], strict=True)] == [True]
    assert [t.grad is not None for t in (q, k, v, bias)] == [name in wanted for name in "qkv"] + [wanted == "bias"]
    assert size <= found.total - before - ROWS <= size + 16 * NUMBERS, sorted(found.made)[-5:]  # ROWS: dout, made above


def test_19_packed_sequences() -> None:
    q, k, v = (torch.empty(LONG, h, DIM, **BF16) for h in (HEADS, KV_HEADS, KV_HEADS))  # type: ignore[arg-type]
    ends = torch.tensor([0, 5, 40000, LONG], dtype=torch.int32)
    with as_on_a_gpu() as found:
        out = anyattn.flash_attn_varlen_func(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, causal=True, backend="triton")
        out.backward(torch.empty_like(q))
    assert max(found.made)[0] <= ROWS
    assert found.total <= 3 * ROWS + 2 * KEYS + 16 * NUMBERS, (found.total, sorted(found.made)[-9:])


@pytest.mark.parametrize("page_size", [0, 16])
def test_19_decoding(page_size: int) -> None:
    """Of 65,536 cached keys nothing is copied, though they are cut into pieces; what is allocated does not know of them."""
    totals = []
    for length in (LONG, LONG // 8):
        rows = (length // page_size, page_size) if page_size else (1, length)
        k, v = (torch.empty(*rows, KV_HEADS, DIM, dtype=torch.bfloat16) for _ in "kv")
        q, new = torch.empty(1, 1, HEADS, DIM, dtype=torch.bfloat16), torch.empty(1, 1, KV_HEADS, DIM, dtype=torch.bfloat16)
        more = {"page_table": torch.arange(length // page_size, dtype=torch.int32)[None]} if page_size else {}
        where = {"cache_seqlens": torch.tensor([length - 1], dtype=torch.int32)}
        with as_on_a_gpu() as found:
            anyattn.flash_attn_with_kvcache(q, k, v, k=new, v=new, **where, **more, causal=True, num_splits=8, backend="triton")
        totals.append(found.total)
    assert totals[0] == totals[1] <= 64 << 10, totals


def test_what_is_counted() -> None:
    with Allocations() as found:
        square = torch.empty(LONG, LONG, dtype=torch.bool, device="meta")
        view = square[5:].view(torch.int8).T
        view.zero_()
        sums = square.sum(0)
    assert [size for size, _ in found.made] == [8 * SQUARE, sums.nbytes]
