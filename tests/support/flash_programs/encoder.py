"""An encoder that computes batches without their padding, rotary embedding included, and trains."""

import torch
from flash_attn import flash_attn_varlen_kvpacked_func, flash_attn_varlen_qkvpacked_func
from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
from flash_attn.layers.rotary import apply_rotary_emb
from torch import nn

HEADS, DIM = 4, 16


class Layer(nn.Module):
    def __init__(self, window):
        super().__init__()
        self.window = window
        self.norm = nn.LayerNorm(HEADS * DIM)
        self.qkv, self.out = nn.Linear(HEADS * DIM, 3 * HEADS * DIM), nn.Linear(HEADS * DIM, HEADS * DIM)

    def forward(self, x, ends, longest, cos, sin):
        qkv = self.qkv(self.norm(x)).view(-1, 3, HEADS, DIM)
        q, k, v = qkv.unbind(1)
        q, k = (apply_rotary_emb(t, cos, sin, cu_seqlens=ends, max_seqlen=longest) for t in (q, k))
        out = flash_attn_varlen_qkvpacked_func(
            torch.stack((q, k, v), 1), ends, longest, dropout_p=0.1 if self.training and self.window is None else 0.0,
            window_size=(-1, -1) if self.window is None else (self.window, self.window),
        )  # fmt: skip
        return x + self.out(out.flatten(1))


def run(dtype, compiled):
    layers = nn.ModuleList(Layer(window) for window in (None, 6)).to(dtype).eval()
    pool = torch.randn(1, HEADS, DIM).to(dtype)
    x = torch.randn(3, 21, HEADS * DIM).to(dtype).requires_grad_()
    mask = torch.arange(21) < torch.tensor([[21], [13], [6]])
    angle = torch.outer(torch.arange(32.0), 100.0 ** -(torch.arange(DIM // 2) / (DIM // 2)))
    rows, indices, ends, longest, *_ = unpad_input(x, mask)
    for layer in layers:
        rows = compiled(layer)(rows, ends, longest, angle.cos().to(dtype), angle.sin().to(dtype))
    out = pad_input(rows, indices, 3, 21)
    firsts = index_first_axis(x.flatten(0, 1), torch.arange(3) * 21)
    one = torch.arange(4, dtype=torch.int32)
    kv = rows.view(-1, 1, HEADS, DIM).expand(-1, 2, -1, -1)
    pooled = flash_attn_varlen_kvpacked_func(pool.expand(3, -1, -1), kv, one, ends, 1, longest).flatten(1) + firsts
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float32).to(dtype).view(out.shape)
    ((out * weights).sum() + pooled.sum()).backward()
    return {"out": out, "pooled": pooled, "dx": x.grad} | {f"d {name}": p.grad for name, p in layers.named_parameters() if p.ndim > 1}
