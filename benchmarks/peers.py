"""Who is timed: every contender turns a case and its inputs into a call that returns a result in one common form.

forward: out (B, H, S, D). backward: (dq, dk, dv). mask: a torch ``BlockMask``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.case import OURS, Case
from benchmarks.variants import VARIANTS, Variant

__all__ = ["PEERS", "Inputs", "Peer", "Unavailable"]


class Unavailable(Exception):
    """This contender cannot do this case here; the message says why."""


@dataclass
class Inputs:
    """A case's random tensors and mods; ``block_masks`` are built once, outside of what is timed."""

    case: Case
    variant: Variant
    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    dout: Tensor | None = None
    block_masks: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, case: Case, seed: int = 0) -> Inputs:
        shape = case.shape
        inputs = cls(case, VARIANTS[case.variant](shape.seqlen_k, shape.heads_q, case.device))
        if case.kind == "mask":
            return inputs
        random = torch.Generator().manual_seed(seed)
        sizes = {
            "q": (shape.batch, shape.heads_q, shape.seqlen_q, shape.head_dim),
            "k": (shape.batch, shape.heads_kv, shape.seqlen_k, shape.head_dim),
            "v": (shape.batch, shape.heads_kv, shape.seqlen_k, shape.head_dim),
            "dout": (shape.batch, shape.heads_q, shape.seqlen_q, shape.head_dim),
        }
        for name, size in sizes.items():
            setattr(inputs, name, torch.randn(size, generator=random).to(case.device, case.torch_dtype))
        return inputs

    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v; for the backward, leaves that require gradients."""
        assert self.q is not None and self.k is not None and self.v is not None
        if self.case.kind != "backward":
            return self.q, self.k, self.v
        q, k, v = (t.detach().clone().requires_grad_() for t in (self.q, self.k, self.v))
        return q, k, v

    def grid(self) -> tuple[int, int, int, int]:
        return 1, 1, self.case.shape.seqlen_q, self.case.shape.seqlen_k


@dataclass(frozen=True)
class Peer:
    """prepare: (inputs) -> what is timed; raises ``Unavailable``. devices: where it exists."""

    name: str
    prepare: Callable[[Inputs], Callable[[], Any]]
    devices: tuple[str, ...] = ("cpu", "cuda")


def _attention_call(inputs: Inputs, attention: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], Any]:
    """The forward itself, or the backward of one forward that is run beforehand."""
    qkv = inputs.qkv()
    if inputs.case.kind == "forward":
        return lambda: attention(*qkv)
    out = attention(*qkv)
    return lambda: torch.autograd.grad(out, qkv, inputs.dout, retain_graph=True)


def _anyattn(inputs: Inputs) -> Callable[[], Any]:
    import anyattn

    mask, score = inputs.variant.mask, inputs.variant.score
    if inputs.case.kind == "mask":
        visible = inputs.variant.masked()
        return lambda: anyattn.create_block_mask(visible, *inputs.grid(), device=inputs.case.device)
    block_mask = anyattn.create_block_mask(mask, *inputs.grid(), device=inputs.case.device) if mask else None
    inputs.block_masks[OURS] = block_mask
    return _attention_call(inputs, lambda q, k, v: anyattn.flex_attention(q, k, v, score, block_mask))


def _anyattn_full(inputs: Inputs) -> Callable[[], Any]:
    """The same shape without mods: what a variant's share of tiles is a share of."""
    import anyattn

    return _attention_call(inputs, anyattn.flex_attention)


def _sdpa(inputs: Inputs) -> Callable[[], Any]:
    if inputs.case.variant not in ("full", "causal"):
        raise Unavailable("SDPA has no name for this mask; see sdpa-mask")
    is_causal = inputs.case.variant == "causal"
    return _attention_call(inputs, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal))


def _sdpa_mask(inputs: Inputs) -> Callable[[], Any]:
    if inputs.variant.score is not None or inputs.variant.mask is None:
        raise Unavailable("a bool mask cannot say this variant")
    zero = torch.zeros((), dtype=torch.int64)
    rows, keys = (torch.arange(n) for n in (inputs.case.shape.seqlen_q, inputs.case.shape.seqlen_k))
    dense = inputs.variant.mask(zero, zero, rows[:, None], keys)
    return _attention_call(inputs, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=dense))


def _flex(inputs: Inputs) -> Callable[[], Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if inputs.case.kind == "backward" and inputs.case.device == "cpu":
        raise Unavailable("torch's flex_attention has no backward on the CPU")
    torch.compiler.reset()  # a fresh, specialised compilation for every case: the peer at its best
    compiled = torch.compile(flex_attention, dynamic=False)
    mask, score = inputs.variant.mask, inputs.variant.score
    block_mask = create_block_mask(mask, *inputs.grid(), device=inputs.case.device) if mask else None
    return _attention_call(inputs, lambda q, k, v: compiled(q, k, v, score_mod=score, block_mask=block_mask))


def _flex_mask(inputs: Inputs) -> Callable[[], Any]:
    from torch.nn.attention.flex_attention import create_block_mask

    torch.compiler.reset()
    compiled = torch.compile(create_block_mask)
    visible = inputs.variant.masked()
    return lambda: compiled(visible, *inputs.grid(), device=inputs.case.device)


PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(OURS, _anyattn),
        Peer("anyattn-full", _anyattn_full),
        Peer("sdpa", _sdpa),
        Peer("sdpa-mask", _sdpa_mask, ("cpu",)),
        Peer("flex", _flex),
        Peer("flex-mask", _flex_mask),
    )
}
