"""A small decoder that generates token by token with a paged cache, compared at every step with recomputing everything.

Prompts of different lengths run in one batch through ``anyattn.flash_attn_with_kvcache``; a request that is done gives its pages back, and
one that waited takes them. The model is untrained (random weights, fixed seed), so its words mean nothing; what is shown is that the cache
changes no result. For every token that is generated, the whole text is also run without a cache, packed, through
``anyattn.flash_attn_varlen_func``: the tokens must be the same, and the logits within the error budget of ``anyattn.testing.budget``, whose
yardstick is the same model in float64.

Run it with ``python examples/generate.py``. A smaller pool, ``--pages 9``, makes more of them wait, or stop and start again.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import click
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import anyattn
from anyattn.testing import budget

VOCABULARY, HIDDEN, LAYERS, HEADS, HEADS_KV, HEAD_DIM, LONGEST = 199, 96, 3, 6, 2, 16, 256
# name, length of the prompt, tokens to generate. In the default pool "late" must wait until "early" is done, and runs on its pages.
REQUESTS = (("early", 61, 6), ("long", 23, 30), ("one word", 1, 24), ("late", 18, 20))

# (layer, queries (..., HEADS, HEAD_DIM), keys and values (..., HEADS_KV, HEAD_DIM)) -> (..., HEADS, HEAD_DIM)
Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))
        self.q, self.k, self.v = (nn.Linear(HIDDEN, n * HEAD_DIM, bias=False) for n in (HEADS, HEADS_KV, HEADS_KV))
        self.out = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.gate, self.up = (nn.Linear(HIDDEN, 2 * HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor, layer: int, attention: Attention) -> Tensor:
        h = self.norms[0](x)
        q, k, v = (project(h).unflatten(-1, (-1, HEAD_DIM)) for project in (self.q, self.k, self.v))
        x = x + self.out(attention(layer, q, k, v).flatten(-2))
        h = self.norms[1](x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    """Logits (..., VOCABULARY) of tokens (...). Its attention, and with it all that knows of positions, is whatever it is given."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
            self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
            self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
            for matrix in (m for m in self.parameters() if m.ndim == 2):  # wide enough that what a token sees decides what follows it
                nn.init.normal_(matrix, std=2 * matrix.shape[1] ** -0.5)
        self.norm = nn.RMSNorm(HIDDEN)
        angle = torch.outer(torch.arange(LONGEST), 10_000.0 ** (-torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2)))
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, tokens: Tensor, attention: Attention) -> Tensor:
        x = self.embedding(tokens)
        for layer, block in enumerate(self.blocks):
            x = block(x, layer, attention)
        return self.head(self.norm(x))


def cached(model: Decoder, cache: anyattn.PagedKVCache, handles: list[int]) -> Attention:
    """Attention of new tokens (B, new), whose keys and values it appends to the cache."""
    held, pages = cache.seqlens(handles), cache.page_table(handles)

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return anyattn.flash_attn_with_kvcache(
            q,
            cache.k_cache(layer),
            cache.v_cache(layer),
            k=k,
            v=v,
            rotary_cos=model.cos,
            rotary_sin=model.sin,
            rotary_interleaved=False,
            cache_seqlens=held,
            page_table=pages,
            causal=True,
        )

    return attention


def from_scratch(model: Decoder, texts: list[list[int]]) -> Tensor:
    """(texts, VOCABULARY): logits behind the last token of each text; all of them packed, and no cache."""
    lengths = torch.tensor([len(text) for text in texts])
    ends = F.pad(lengths.cumsum(0), (1, 0))
    positions = torch.cat([torch.arange(len(text)) for text in texts])
    cos, sin = model.cos[positions, None], model.sin[positions, None]

    def turned(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return anyattn.flash_attn_varlen_func(turned(q), turned(k), v, cu_seqlens_q=ends, cu_seqlens_k=ends, causal=True)

    return model(torch.tensor([token for text in texts for token in text]), attention)[ends[1:] - 1]


@dataclass(eq=False)
class Request:
    """text: the prompt, then what was generated. pages: those it had when it ended; reused: how many of them had been another's.
    starts: more than 1 if it was stopped. worst: the greatest part of its error budget that any of its logits used.
    """

    name: str
    prompt: list[int]
    wanted: int
    text: list[int] = field(default_factory=list)
    handle: int = -1
    pages: list[int] = field(default_factory=list)
    reused: int = 0
    starts: int = 0
    worst: float = 0.0

    @property
    def generated(self) -> list[int]:
        return self.text[len(self.prompt) :]

    @property
    def is_done(self) -> bool:
        return len(self.generated) >= self.wanted


class Comparison:
    """Logits with the cache against those from scratch, in float32 and float64."""

    def __init__(self, model: Decoder) -> None:
        self.model, self.exact = model, copy.deepcopy(model).double()
        self.count = 0

    def __call__(self, requests: list[Request], logits: Tensor) -> None:
        """Raises ``click.ClickException`` naming the request if a token differs or a logit exceeds its budget."""
        texts = [request.text for request in requests]
        plain, exact = from_scratch(self.model, texts), from_scratch(self.exact, texts)
        for i, request in enumerate(requests):
            where = f"token {len(request.generated)} of request {request.name!r}"
            if not torch.equal(logits[i].argmax(), plain[i].argmax()):
                raise click.ClickException(f"{where} is {int(logits[i].argmax())} with the cache but {int(plain[i].argmax())} from scratch")
            share = budget.share(logits[i], exact[i], plain[i])
            if not share <= 1:
                raise click.ClickException(f"the logits of {where} use {share:.3g} of their error budget")
            request.worst = max(request.worst, share)
            self.count += 1


class Generator:
    """Requests in, texts out: one batch that requests join when pages are free and leave when they are done."""

    def __init__(self, model: Decoder, cache: anyattn.PagedKVCache, compare: Callable[[list[Request], Tensor], None]) -> None:
        self.model, self.cache, self.compare = model, cache, compare
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.given_back: set[int] = set()

    @torch.inference_mode()
    def run(self, requests: Iterable[Request]) -> None:
        self.waiting += requests
        while self.waiting or self.running:
            while self.waiting and self._start(self.waiting[0]):
                self.running.append(self.waiting.popleft())
            self._leave()
            if self.running:
                self._step()
                self._leave()

    def _start(self, request: Request) -> bool:
        """Runs a whole text at once, if there are pages for it."""
        request.text = request.text or list(request.prompt)
        request.handle = self.cache.add_sequence()
        try:
            self.cache.reserve(request.handle, len(request.text))
        except anyattn.OutOfPagesError:
            self.cache.free(request.handle)
            if not self.running:
                raise  # nobody will give pages back
            return False
        request.starts += 1
        self._forward([request], torch.tensor([request.text]))
        return True

    def _step(self) -> None:
        """One more token for everyone; where pages are short the youngest stops, and starts again when there are some."""
        while True:
            try:
                self.cache.reserve([request.handle for request in self.running], 1)
                break
            except anyattn.OutOfPagesError:
                if len(self.running) == 1:
                    raise
                stopped = self.running.pop()
                self._give_back(stopped)
                self.waiting.appendleft(stopped)
        self._forward(self.running, torch.tensor([request.text[-1:] for request in self.running]))

    def _forward(self, requests: list[Request], tokens: Tensor) -> None:
        """tokens: (requests, new), the ends of their texts, which the cache does not hold yet."""
        handles = [request.handle for request in requests]
        logits = self.model(tokens, cached(self.model, self.cache, handles))[:, -1]
        self.cache.advance(handles, tokens.shape[1])
        self.compare(requests, logits)
        for request, token in zip(requests, logits.argmax(-1).tolist()):
            request.text.append(token)

    def _leave(self) -> None:
        for request in [r for r in self.running if r.is_done]:
            self.running.remove(request)
            self._give_back(request)

    def _give_back(self, request: Request) -> None:
        request.pages = self.cache.page_table(request.handle)[0].tolist()
        request.reused = len(self.given_back.intersection(request.pages))
        self.given_back.update(request.pages)
        self.cache.free(request.handle)


def make_requests(seed: int) -> list[Request]:
    random = torch.Generator().manual_seed(seed)
    return [Request(name, torch.randint(VOCABULARY, (n,), generator=random).tolist(), wanted) for name, n, wanted in REQUESTS]


@click.command()
@click.option("--pages", default=14, show_default=True, type=click.IntRange(1), help="Pages of the pool.")
@click.option("--page-size", default=8, show_default=True, type=click.IntRange(1), help="Tokens of a page.")
@click.option("--seed", default=0, show_default=True, help="Of the weights and the prompts.")
def main(pages: int, page_size: int, seed: int) -> None:
    """Generate for a few requests with a paged cache, and compare every step with recomputing from scratch."""
    console = Console()
    model, requests = Decoder(seed), make_requests(seed)
    cache = anyattn.PagedKVCache(pages, page_size, HEADS_KV, HEAD_DIM, num_layers=LAYERS, dtype=torch.float32)
    compare = Comparison(model)
    try:
        Generator(model, cache, compare).run(requests)
    except anyattn.OutOfPagesError as error:
        raise click.ClickException(f"one request alone needs more than the pool has: {error}") from None
    table = Table("request", "prompt", "generated", "pages", "of them reused", "starts", "budget used", "first tokens")
    for r in requests:
        first = " ".join(map(str, r.generated[:6]))
        numbers = (len(r.prompt), len(r.generated), len(r.pages), r.reused, r.starts)
        table.add_row(r.name, *map(str, numbers), f"{r.worst:.2f}", first)
    console.print(table)
    console.print(f"all {compare.count} tokens equal those computed from scratch, logits within the error budget [green]ok")
    console.print(repr(cache), highlight=False)


if __name__ == "__main__":
    main()
