"""Point clouds: points in the order of a curve, cut into patches of one length, of which the last borrows from the patch before."""

import flash_attn
import torch
from torch import nn

HEADS, DIM, PATCH = 2, 16, 16


def patches(counts):
    """The places of all patches' points, the place in the patches of each point, and cu_seqlens."""
    pad, unpad, ends, start, first = [], [], [], 0, 0
    for n in counts:
        places = list(range(n))
        whole = max(-(-n // PATCH), 1) * PATCH if n > PATCH else n
        if n > PATCH and whole != n:
            places = places[: n - n % PATCH] + places[-PATCH:]
        unpad += [first + (i if i < n - n % PATCH or n <= PATCH else whole - n + i) for i in range(n)]
        pad += [start + i for i in places]
        ends += list(range(first, first + whole, PATCH))
        start, first = start + n, first + whole
    return torch.tensor(pad), torch.tensor(unpad), torch.tensor([*ends, first], dtype=torch.int32)


class SerializedAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(HEADS * DIM, 3 * HEADS * DIM), nn.Linear(HEADS * DIM, HEADS * DIM)
        self.attn_drop = 0.0

    def forward(self, x, order, inverse, pad, unpad, ends):
        qkv = self.qkv(x)[order[pad]]
        out = flash_attn.flash_attn_varlen_qkvpacked_func(
            qkv.reshape(-1, 3, HEADS, DIM),
            ends,
            max_seqlen=PATCH,
            dropout_p=self.attn_drop if self.training else 0,
            softmax_scale=DIM**-0.5,
        ).reshape(-1, HEADS * DIM)
        return x + self.proj(out[unpad][inverse])


def run(dtype, compiled):
    counts = (70, 9, 32)
    layer = SerializedAttention().to(dtype)
    x = torch.randn(sum(counts), HEADS * DIM).to(dtype).requires_grad_()
    order = torch.cat([torch.randperm(n) + sum(counts[:i]) for i, n in enumerate(counts)])
    out = compiled(layer)(x, order, order.argsort(), *patches(counts))
    (out * torch.linspace(-1, 1, out.numel(), dtype=torch.float32).to(dtype).view(out.shape)).sum().backward()
    return {"out": out, "dx": x.grad, "dqkv": layer.qkv.weight.grad}
