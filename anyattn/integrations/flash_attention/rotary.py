"""The functions of ``flash_attn.layers.rotary`` and ``flash_attn.ops.triton.rotary``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyattn.kvcache.rotary import apply_rotary_emb

__all__ = ["RotaryEmbedding", "apply_rotary", "apply_rotary_emb", "apply_rotary_emb_func", "apply_rotary_emb_kv_", "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch", "rotate_half"]  # fmt: skip

apply_rotary_emb_func = apply_rotary_emb


def apply_rotary(
    x, cos, sin, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None, interleaved=False, inplace=False, conjugate=False
):  # fmt: skip
    """``apply_rotary_emb``. conjugate: rotates the other way."""
    return apply_rotary_emb(x, cos, -sin if conjugate else sin, interleaved, inplace, seqlen_offsets, cu_seqlens, max_seqlen)


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """``x`` with each pair (a, b) of dimensions as (-b, a)."""
    half = x.shape[-1] // 2
    a, b = x.unflatten(-1, (half, 2)).unbind(-1) if interleaved else x.split(half, -1)
    return torch.stack((-b, a), -1).flatten(-2) if interleaved else torch.cat((-b, a), -1)


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """``apply_rotary_emb`` from position 0, in the dtypes of x and the tables. cos, sin: (S, rotary_dim / 2), or (B, S, rotary_dim / 2)."""
    cos, sin = (t.repeat_interleave(2, -1) if interleaved else t.repeat(*[1] * (t.ndim - 1), 2) for t in (cos, sin))
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    return torch.cat((turned * cos.unsqueeze(-2) + rotate_half(turned, interleaved) * sin.unsqueeze(-2), rest), -1)


def apply_rotary_emb_qkv_(
    qkv, cos, sin, cos_k=None, sin_k=None, interleaved=False, seqlen_offsets=0, num_heads_q=None
):  # fmt: skip
    """Rotates q and k of qkv in place. qkv: (B, S, 3, H, D), or with num_heads_q (B, S, Hq + 2 Hkv, D). cos_k, sin_k: the tables of k."""
    if num_heads_q is None:
        q, k, _ = qkv.unbind(2)
    else:
        heads_k = (qkv.shape[2] - num_heads_q) // 2
        q, k, _ = qkv.split((num_heads_q, heads_k, heads_k), 2)
    turned_q = apply_rotary_emb(q, cos, sin, interleaved, seqlen_offsets=seqlen_offsets)
    cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    turned_k = apply_rotary_emb(k, cos_k, sin_k, interleaved, seqlen_offsets=seqlen_offsets)
    turned = torch.stack((turned_q, turned_k), 2) if num_heads_q is None else torch.cat((turned_q, turned_k), 2)
    qkv.narrow(2, 0, turned.shape[2]).copy_(turned)
    return qkv


def apply_rotary_emb_kv_(kv, cos, sin, interleaved=False, seqlen_offsets=0):
    """Rotates k of kv (B, S, 2, H, D) in place."""
    kv.select(2, 0).copy_(apply_rotary_emb(kv.select(2, 0), cos, sin, interleaved, seqlen_offsets=seqlen_offsets))
    return kv


class RotaryEmbedding(torch.nn.Module):
    """Rotary embedding of packed q, k and v, with tables that grow as positions need them.

    dim: rotary_dim. base: of the geometric series of wavelengths. scale_base: None; xPos is not computed.
    """

    inv_freq: Tensor

    def __init__(self, dim, base=10000.0, interleaved=False, scale_base=None, device=None):
        super().__init__()
        if scale_base is not None:
            raise ValueError(f"scale_base={scale_base!r}; wanted None: for xPos scale the tables and use apply_rotary_emb_qkv_ with cos_k")
        self.dim, self.base, self.interleaved, self.scale_base, self.scale = dim, float(base), interleaved, None, None
        self.register_buffer("inv_freq", self._frequencies(device), persistent=False)
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None

    def _frequencies(self, device: Any) -> Tensor:
        return self.base ** -(torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim)

    def _update_cos_sin_cache(self, seqlen: int, device: Any = None, dtype: torch.dtype | None = None) -> None:
        cos = self._cos_cached
        if cos is None or len(cos) < seqlen or cos.device != device or cos.dtype != dtype or (self.training and cos.is_inference()):
            frequencies = self.inv_freq if self.inv_freq.dtype is torch.float32 else self._frequencies(device)
            angles = torch.arange(seqlen, device=device, dtype=torch.float32)[:, None] * frequencies.to(device)
            self._cos_cached, self._sin_cached = angles.cos().to(dtype), angles.sin().to(dtype)

    def forward(
        self, qkv: Tensor, kv: Tensor | None = None, seqlen_offset: int | Tensor = 0, max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
        """Rotates in place. qkv: as in ``apply_rotary_emb_qkv_``, or with kv (B, S, 2, H, D) only q, (B, S, H, D). seqlen_offset: an int,
        or integers (B,) and max_seqlen, the greatest position that they lead to plus 1."""
        if max_seqlen is None and isinstance(seqlen_offset, Tensor) and self._cos_cached is None:
            raise ValueError("seqlen_offset is a tensor and max_seqlen is None; wanted max_seqlen, for which tables are made")
        if max_seqlen is not None or not isinstance(seqlen_offset, Tensor):
            longest = qkv.shape[1] + seqlen_offset if max_seqlen is None else max_seqlen
            self._update_cos_sin_cache(longest, device=qkv.device, dtype=qkv.dtype)  # type: ignore[arg-type]
        cos, sin = self._cos_cached, self._sin_cached
        if kv is None:
            return apply_rotary_emb_qkv_(
                qkv, cos, sin, interleaved=self.interleaved, seqlen_offsets=seqlen_offset, num_heads_q=num_heads_q
            )  # fmt: skip
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)  # type: ignore[arg-type]
        return q, apply_rotary_emb_kv_(kv, cos, sin, self.interleaved, seqlen_offset)
