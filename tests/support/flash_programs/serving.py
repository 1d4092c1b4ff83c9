"""A paged serving loop: prompts are prefilled together, with a prefix that is cached already, then every step adds a token to each text."""

import torch
from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
from torch import nn

HEADS, HEADS_KV, DIM, PAGE, PAGES = 4, 2, 16, 16, 24


class Context:
    """What a step says to all layers."""

    is_prefill = False
    slots = ends_q = ends_k = block_tables = lengths = None
    longest_q = longest_k = 0


context = Context()


class Attention(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.k_cache, self.v_cache = (torch.zeros(PAGES, PAGE, HEADS_KV, DIM, dtype=dtype) for _ in range(2))

    def forward(self, q, k, v):
        for cache, new in ((self.k_cache, k), (self.v_cache, v)):
            cache.view(-1, HEADS_KV, DIM).index_copy_(0, context.slots, new)
        if context.is_prefill:
            if context.block_tables is not None:  # a prefix is cached
                k, v = self.k_cache, self.v_cache
            return flash_attn_varlen_func(
                q, k, v, max_seqlen_q=context.longest_q, cu_seqlens_q=context.ends_q, max_seqlen_k=context.longest_k,
                cu_seqlens_k=context.ends_k, softmax_scale=DIM**-0.5, causal=True, block_table=context.block_tables,
            )  # fmt: skip
        return flash_attn_with_kvcache(
            q.unsqueeze(1), self.k_cache, self.v_cache, cache_seqlens=context.lengths, block_table=context.block_tables,
            softmax_scale=DIM**-0.5, causal=True,
        ).squeeze(1)  # fmt: skip


class Model(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        width = HEADS * DIM
        self.qkv = nn.ModuleList(nn.Linear(width, (HEADS + 2 * HEADS_KV) * DIM) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.to(dtype)
        self.attention = nn.ModuleList(Attention(dtype) for _ in range(2))

    def forward(self, x):
        for qkv, out, attention in zip(self.qkv, self.out, self.attention):
            q, k, v = qkv(x).view(len(x), -1, DIM).split((HEADS, HEADS_KV, HEADS_KV), 1)
            x = x + out(attention(q, k, v).flatten(1))
        return x


def step(model, texts, pages, cached, is_prefill):
    """texts: all embeddings of each text. cached: how many of each are in the cache. Returns the new rows' outputs."""
    context.is_prefill = is_prefill
    slots = [[p * PAGE + i for p in pages[t] for i in range(PAGE)][c : len(x)] for t, (x, c) in enumerate(zip(texts, cached))]
    context.slots = torch.tensor([slot for text in slots for slot in text])
    lengths = torch.tensor([len(x) for x in texts], dtype=torch.int32)
    new = lengths - torch.tensor(cached, dtype=torch.int32)
    zero = torch.zeros(1, dtype=torch.int32)
    context.ends_q, context.ends_k = (torch.cat((zero, n.cumsum(0, dtype=torch.int32))) for n in (new, lengths))
    context.longest_q, context.longest_k, context.lengths = int(new.max()), int(lengths.max()), lengths
    table = [p + [-1] * (max(map(len, pages)) - len(p)) for p in pages]
    is_paged = any(cached) or not is_prefill
    context.block_tables = torch.tensor(table, dtype=torch.int32) if is_paged else None
    return model(torch.cat([x[c:] for x, c in zip(texts, cached)]))


@torch.inference_mode()
def run(dtype, compiled):
    model = Model(dtype)
    texts = [torch.randn(n, HEADS * DIM).to(dtype) for n in (37, 5, 50)]
    pages = [[7, 3, 19], [0], [12, 4, 22, 9]]
    found = {"prefill": step(model, texts, pages, [0, 0, 0], True)}
    texts.append(torch.cat((texts[0][:32], torch.randn(9, HEADS * DIM).to(dtype))))  # shares two pages with the first text
    pages.append([7, 3, 14])
    found["prefix"] = step(model, texts[3:], pages[3:], [32], True)
    decode = compiled(model)
    for i in range(4):
        cached = [len(x) for x in texts]
        texts = [torch.cat((x, torch.randn(1, HEADS * DIM).to(dtype))) for x in texts]
        kept, model_of_step = cached, model if i == 0 else decode
        found[f"decode {i}"] = step(model_of_step, texts, pages, kept, False)
    return found
