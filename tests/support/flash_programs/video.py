"""A video generator that makes one chunk of frames after another, with a rolling cache of keys that keeps the first frame."""

import torch
from torch import nn

try:
    import flash_attn_interface

    FLASH_ATTN_3_AVAILABLE = True
except ModuleNotFoundError:
    FLASH_ATTN_3_AVAILABLE = False

try:
    import flash_attn

    FLASH_ATTN_2_AVAILABLE = True
except ModuleNotFoundError:
    FLASH_ATTN_2_AVAILABLE = False

HEADS, DIM, FRAME, CHUNK, CAPACITY = 3, 16, 12, 2, 5  # tokens per frame, frames per chunk, frames in the cache


def flash_attention(q, k, v, q_lens=None, k_lens=None, causal=False, window_size=(-1, -1), deterministic=False, version=None):
    """q: (B, Lq, H, D); k, v: (B, Lk, H, D)."""
    b, lq, lk = q.size(0), q.size(1), k.size(1)
    if q_lens is None:
        q, q_lens = q.flatten(0, 1), torch.tensor([lq] * b, dtype=torch.int32)
    if k_lens is None:
        k, v, k_lens = k.flatten(0, 1), v.flatten(0, 1), torch.tensor([lk] * b, dtype=torch.int32)
    else:
        k, v = (torch.cat([u[:n] for u, n in zip(x, k_lens)]) for x in (k, v))
    ends_q, ends_k = (torch.cat([n.new_zeros([1]), n]).cumsum(0, dtype=torch.int32) for n in (q_lens, k_lens))
    if (version is None or version == 3) and FLASH_ATTN_3_AVAILABLE:
        x = flash_attn_interface.flash_attn_varlen_func(
            q=q, k=k, v=v, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k, seqused_q=None, seqused_k=None, max_seqlen_q=lq, max_seqlen_k=lk,
            softmax_scale=None, causal=causal, deterministic=deterministic,
        )  # fmt: skip
        x = x[0] if isinstance(x, tuple) else x
    else:
        assert FLASH_ATTN_2_AVAILABLE
        x = flash_attn.flash_attn_varlen_func(
            q=q, k=k, v=v, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k, max_seqlen_q=lq, max_seqlen_k=lk, dropout_p=0.0, softmax_scale=None,
            causal=causal, window_size=window_size, deterministic=deterministic,
        )  # fmt: skip
    return x.unflatten(0, (b, lq))


class Layer(nn.Module):
    def __init__(self, version):
        super().__init__()
        self.version = version
        self.qkv, self.out = nn.Linear(HEADS * DIM, 3 * HEADS * DIM), nn.Linear(HEADS * DIM, HEADS * DIM)
        self.text = nn.Linear(HEADS * DIM, 2 * HEADS * DIM)

    def forward(self, x, cache, text, text_lens):
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, DIM)).unbind(2)
        for name, new in (("k", k), ("v", v)):
            kept = torch.cat((cache[name], new), 1) if name in cache else new
            if kept.shape[1] > CAPACITY * FRAME:
                kept = torch.cat((kept[:, :FRAME], kept[:, -(CAPACITY - 1) * FRAME :]), 1)
            cache[name] = kept
        x = x + self.out(flash_attention(q, cache["k"], cache["v"], version=self.version).flatten(2))
        k, v = self.text(text).unflatten(-1, (2, HEADS, DIM)).unbind(2)
        return x + flash_attention(q, k, v, k_lens=text_lens, version=self.version).flatten(2)


@torch.no_grad()
def run(dtype, compiled):
    layers = nn.ModuleList(Layer(version) for version in (None, 2)).to(dtype)
    text, text_lens = torch.randn(2, 9, HEADS * DIM).to(dtype), torch.tensor([9, 4], dtype=torch.int32)
    caches, found = [{} for _ in layers], {}
    for chunk in range(4):
        x = torch.randn(2, CHUNK * FRAME, HEADS * DIM).to(dtype)
        for layer, cache in zip(layers, caches):
            x = layer(x, cache, text, text_lens)
        found[f"chunk {chunk}"] = x
    return found
