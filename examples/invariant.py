"""Log probabilities of a trainer and a server, compared bit by bit on a CPU.

A server answers several prompts at once: it prefills them in chunks, decodes with a paged cache, and notes the log probability of each
token that it draws. A trainer computes the same log probabilities for the finished texts, packed one after the other, with gradients. By
default the two differ in their last bits, which reinforcement learning takes for a difference of policies; inside
``anyattn.batch_invariant()`` they are equal.

All of the model but attention is computed row by row here, so that it has the same bits in every batch by itself. The model is untrained.
Run it with ``python examples/invariant.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import anyattn

VOCABULARY, HIDDEN, LAYERS, HEADS, HEADS_KV, HEAD_DIM, PAGE = 64, 64, 2, 4, 2, 32, 16
PROMPTS, NEW, CHUNK = (57, 3, 130, 20), 12, 50

# (layer, queries (rows, HEADS, HEAD_DIM), keys, values (rows, HEADS_KV, HEAD_DIM)) -> (rows, HEADS, HEAD_DIM)
Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]


def each(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """``function`` of each row alone."""
    return torch.stack([function(row) for row in rows])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))
        self.qkv = nn.Linear(HIDDEN, (HEADS + 2 * HEADS_KV) * HEAD_DIM, bias=False)
        self.out = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN, bias=False), nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor, layer: int, attention: Attention) -> Tensor:
        qkv = each(lambda row: self.qkv(self.norms[0](row)), x).unflatten(-1, (-1, HEAD_DIM))
        found = attention(layer, *qkv.split((HEADS, HEADS_KV, HEADS_KV), 1)).flatten(1)
        x = x + each(self.out, found)
        return x + each(lambda row: self.down(F.silu(self.up(self.norms[1](row)))), x)


class Decoder(nn.Module):
    """Log probabilities (rows, VOCABULARY) of what follows each of the tokens (rows,)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, attention: Attention) -> Tensor:
        x = self.embed(tokens)
        for layer, block in enumerate(self.blocks):
            x = block(x, layer, attention)
        return each(lambda row: self.head(row).log_softmax(-1), x)


class Server:
    """Pages for several texts, in a random order."""

    def __init__(self, model: Decoder, texts: int, longest: int) -> None:
        pages = -(-longest // PAGE)
        self.model = model
        self.table = torch.randperm(texts * pages).view(texts, pages).to(torch.int32)
        self.pools = [[torch.zeros(texts * pages, PAGE, HEADS_KV, HEAD_DIM) for _ in range(2)] for _ in range(LAYERS)]
        self.used = torch.zeros(texts, dtype=torch.int32)

    def step(self, which: list[int], tokens: list[Tensor]) -> Tensor:
        """The log probabilities of what follows the last token of each text in ``which``, after appending its new tokens, equally many."""
        used, rows = self.used[which], len(tokens[0])

        def attention(layer: int, *qkv: Tensor) -> Tensor:
            q, k, v = (x.unflatten(0, (len(which), rows)) for x in qkv)
            options = {"cache_seqlens": used, "page_table": self.table[which], "causal": True}
            return anyattn.flash_attn_with_kvcache(q, *self.pools[layer], k, v, **options).flatten(0, 1)

        found = self.model(torch.cat(tokens), attention).view(len(which), rows, VOCABULARY)
        self.used[which] += rows
        return found[:, -1]

    def answer(self, prompts: list[Tensor]) -> tuple[list[Tensor], Tensor]:
        """The prompts with NEW drawn tokens each, and the log probabilities of these, (texts, NEW)."""
        following = []
        for at, prompt in enumerate(prompts):  # each prompt by chunks
            for chunk in prompt.split(CHUNK):
                last = self.step([at], [chunk])
            following.append(last[0])
        texts, noted, rows = list(prompts), [], torch.stack(following)
        for _ in range(NEW):  # all texts together, a token at a time
            drawn = torch.multinomial(rows.exp(), 1)
            noted.append(rows.gather(1, drawn)[:, 0])
            texts = [torch.cat((text, token)) for text, token in zip(texts, drawn, strict=True)]
            rows = self.step(list(range(len(texts))), list(drawn))
        return texts, torch.stack(noted, 1)


def trained(model: Decoder, texts: list[Tensor]) -> Tensor:
    """The log probabilities of the last NEW tokens of each text, (texts, NEW), with gradients."""
    ends = torch.tensor([0, *map(len, texts)]).cumsum(0)

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return anyattn.flash_attn_varlen_func(q, k, v, ends, ends, causal=True)

    packed = torch.cat(texts)
    found = model(packed, attention)
    rows = torch.stack([torch.arange(int(end) - NEW, int(end)) for end in ends[1:]])
    return found[rows - 1].gather(-1, packed[rows][..., None])[..., 0]


def differing(is_invariant: bool, seed: int = 0) -> tuple[int, float]:
    """The number of drawn tokens whose log probability differs between server and trainer, and the greatest difference."""
    torch.manual_seed(seed)
    model = Decoder()
    prompts = [torch.randint(VOCABULARY, (length,)) for length in PROMPTS]
    with anyattn.batch_invariant() if is_invariant else nullcontext():
        with torch.no_grad():
            texts, served = Server(model, len(prompts), max(PROMPTS) + NEW).answer(prompts)
        of_trainer = trained(model, texts)
        of_trainer.sum().backward()
    distance = (served - of_trainer.detach()).abs()
    return int((distance > 0).sum()), float(distance.max())


def main() -> None:
    table = Table("", "drawn tokens", "log probabilities that differ", "by at most")
    for name, is_invariant in (("default", False), ("anyattn.batch_invariant()", True)):
        count, most = differing(is_invariant)
        table.add_row(name, str(len(PROMPTS) * NEW), str(count), f"{most:.1e}")
        if is_invariant and count:
            raise SystemExit("the bits of the server and the trainer differ")
    Console().print(table)


if __name__ == "__main__":
    main()
