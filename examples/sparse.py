"""Two small layers that choose the blocks of keys they read, trained on a CPU: one in the manner of NSA, one of MoBA.

The task is recall. The first half of a sequence states facts, a block of tokens for each topic; the second half asks for values of names,
some blocks about one topic each. A layer that reads few blocks must find those of the topic.

- NSA (arXiv:2502.11089) has three branches with keys and values of their own: keys compressed to one in ``STRIDE``, the blocks that most of
  the compressed branch's probability falls on, and a sliding window. Gates weigh the outputs (``--merge gates``), or the branches share one
  softmax, and gates weigh their parts of its denominator (``--merge lse``, by ``anyattn.flash_attn_combine``).
- MoBA (arXiv:2502.13189) reads the query's own block and those whose mean key suits the query best.

Each query of each head chooses for itself, causally. A map of the blocks that any query of a tile chose says which tiles are computed, and
a table inside the mask decides for each query. No gradient flows through the choice itself; what was chosen has its gradients.
``--check`` compares outputs and gradients, in float64, with dense attention under the same mask. Run it with ``python examples/sparse.py``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import click
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

import anyattn
from anyattn import masks

TOPICS, NAMES, VALUES = 6, 16, 8
BLOCK = NAMES  # positions of a block: the facts of a topic
HIDDEN, HEADS, HEADS_KV, HEAD_DIM = 64, 2, 1, 32
STRIDE, WINDOW = 8, 8  # tokens of a compressed key; keys that a query sees of the sliding window, besides its own
CHOSEN = 3  # blocks that a query reads, its own among them
FALLS_TO = 0.6  # of ln(VALUES), the loss of a guess
AGREE = 1e-11  # the greatest difference of sparse and dense, in float64, relative to the norm

Results = tuple[Tensor, Tensor]  # output (B, H, S, D) and log-sum-exp (B, H, S)
# (q, k, v, mask, which tiles are visited: bool (B, H, tiles, tiles), or None for those that the mask needs)
Attention = Callable[[Tensor, Tensor, Tensor, Callable[..., Any], Tensor | None], Results]


def sparse(q: Tensor, k: Tensor, v: Tensor, mask: Callable[..., Any], visited: Tensor | None) -> Results:
    """By anyattn, which computes visited tiles only."""
    blocks = None if visited is None else anyattn.BlockMask.from_block_map(visited, BLOCK_SIZE=BLOCK, mask_mod=mask)
    mask_mod = mask if blocks is None else None
    return anyattn.flex_attention(q, k, v, block_mask=blocks, mask_mod=mask_mod, enable_gqa=True, return_lse=True)


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Callable[..., Any], visited: Tensor | None) -> Results:
    """By the definition, with every score."""
    k, v = (x.repeat_interleave(HEADS // HEADS_KV, 1) for x in (k, v))
    place = torch.meshgrid(*map(torch.arange, (*q.shape[:3], k.shape[2])), indexing="ij")
    seen = mask(*place)
    scores = (q @ k.mT / math.sqrt(HEAD_DIM)).masked_fill(~seen, -math.inf)
    weights = scores.softmax(-1).masked_fill(~seen, 0.0)
    return weights @ v, scores.masked_fill(~seen.any(-1, keepdim=True), 0.0).logsumexp(-1).masked_fill(~seen.any(-1), -math.inf)


def chosen_blocks(suits: Tensor) -> Tensor:
    """Which blocks each query reads, bool like suits: its own and the CHOSEN - 1 before it that suit best. suits: (B, heads, S, blocks)."""
    own = torch.arange(suits.shape[2])[:, None] // BLOCK
    block = torch.arange(suits.shape[3])
    suits = suits.masked_fill(block == own, math.inf).masked_fill(block > own, -math.inf)
    best = suits.topk(min(CHOSEN, suits.shape[3]), -1).indices
    return torch.zeros_like(suits, dtype=torch.bool).scatter(-1, best, True) & (block <= own)  # early queries have fewer blocks


def attend_chosen(attention: Attention, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor) -> Results:
    """Causal attention to the chosen blocks. chosen: of ``chosen_blocks``, for each query head or for each K/V head."""
    group = HEADS // chosen.shape[1]

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return chosen[b, h // group, q_idx, kv_idx // BLOCK] & (q_idx >= kv_idx)

    visited = chosen.unflatten(2, (-1, BLOCK)).any(3).repeat_interleave(group, 1)
    return attention(q, k, v, mask, visited)


class Heads(nn.Module):
    """A projection to heads, (B, S, HIDDEN) -> (B, heads, S, HEAD_DIM)."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.project = nn.Linear(HIDDEN, heads * HEAD_DIM, bias=False)

    @torch.no_grad()
    def start_like(self, queries: Heads) -> None:
        """Keys that begin as their queries: tokens find their like from the first step."""
        weight = queries.project.weight.unflatten(0, (HEADS, HEAD_DIM))[:: HEADS // HEADS_KV]
        self.project.weight.copy_(weight.flatten(0, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)


class NSA(nn.Module):
    """Compressed keys, chosen blocks and a sliding window. merge: "gates" or "lse"."""

    def __init__(self, merge: str = "gates") -> None:
        super().__init__()
        self.merge, self.q = merge, Heads(HEADS)
        self.k, self.v = (nn.ModuleList(Heads(HEADS_KV) for _ in range(3)) for _ in range(2))
        self.compress = nn.ModuleList(nn.Linear(STRIDE * HEAD_DIM, HEAD_DIM) for _ in range(2))
        self.gates = nn.Linear(HIDDEN, 3 * HEADS)
        with torch.no_grad():
            for squeeze in self.compress:  # a mean, at first
                squeeze.weight.copy_(torch.eye(HEAD_DIM).repeat(1, STRIDE) / STRIDE)
            for keys in self.k:
                keys.start_like(self.q)

    def forward(self, x: Tensor, attention: Attention) -> tuple[Tensor, Tensor]:
        """The output (B, H, S, D), and the chosen blocks."""
        q, (k, k_chosen, k_near), (v, v_chosen, v_near) = self.q(x), *([each(x) for each in many] for many in (self.k, self.v))
        k, v = (squeeze(t.unflatten(2, (-1, STRIDE)).flatten(3)) for squeeze, t in zip(self.compress, (k, v), strict=True))
        chosen = self.choose(q, k)
        results = (
            attention(q, k, v, before, None),
            attend_chosen(attention, q, k_chosen, v_chosen, chosen),
            attention(q, k_near, v_near, masks.sliding_window(WINDOW, 0), None),
        )
        gates = self.gates(x).unflatten(-1, (3, HEADS)).permute(2, 0, 3, 1)  # (3, B, H, S)
        outs, lses = (torch.stack(each) for each in zip(*results, strict=True))
        if self.merge == "lse":
            return anyattn.flash_attn_combine(outs, lses + F.logsigmoid(gates))[0], chosen
        return (outs * gates.sigmoid()[..., None]).sum(0), chosen

    @torch.no_grad()
    def choose(self, q: Tensor, k: Tensor) -> Tensor:
        """By the probabilities of the compressed keys, added over a block and over the query heads of a K/V head."""
        scores = q.unflatten(1, (HEADS_KV, -1)) @ k[:, :, None].mT / math.sqrt(HEAD_DIM)  # (B, Hkv, group, S, keys)
        seen = before(0, 0, torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2]))
        weights = scores.masked_fill(~seen, -math.inf).softmax(-1).masked_fill(~seen, 0.0)
        return chosen_blocks(weights.sum(2).unflatten(-1, (-1, BLOCK // STRIDE)).sum(-1))


def before(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Whether a compressed key is of tokens up to the query."""
    return kv_idx * STRIDE + STRIDE - 1 <= q_idx


class MoBA(nn.Module):
    """The query's own block, and those of the best mean keys."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = Heads(HEADS), Heads(HEADS_KV), Heads(HEADS_KV)
        self.k.start_like(self.q)

    def forward(self, x: Tensor, attention: Attention) -> tuple[Tensor, Tensor]:
        q, k, v = self.q(x), self.k(x), self.v(x)
        with torch.no_grad():
            means = k.unflatten(2, (-1, BLOCK)).mean(3).repeat_interleave(HEADS // HEADS_KV, 1)
            chosen = chosen_blocks(q @ means.mT)
        return attend_chosen(attention, q, k, v, chosen)[0], chosen


class Model(nn.Module):
    """Embeddings, one layer, logits of the values."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(n, HIDDEN) for n in (TOPICS, NAMES, VALUES + 1))
        self.layer, self.out = layer, nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.norms, self.head = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2)), nn.Linear(HIDDEN, VALUES)

    def forward(self, tokens: Tensor, attention: Attention) -> tuple[Tensor, Tensor]:
        """tokens: (B, S, 3). Logits (B, S, VALUES), and the chosen blocks."""
        x = torch.stack([embed(tokens[..., i]) for i, embed in enumerate(self.embeddings)]).sum(0)
        out, chosen = self.layer(self.norms[0](x), attention)
        return self.head(self.norms[1](x + self.out(out.transpose(1, 2).flatten(2)))), chosen


class Batch(NamedTuple):
    """tokens: (B, 2 * TOPICS * NAMES, 3), topic, name and value, which is VALUES in questions. answers: (B, TOPICS * NAMES)."""

    tokens: Tensor
    answers: Tensor


def draw(batch: int, generator: torch.Generator) -> Batch:
    """All facts, topics and names in any order, and as many questions about topics in any order."""
    shape = (batch, TOPICS, NAMES)
    table = torch.randint(VALUES, shape, generator=generator)
    topics = torch.rand(batch, TOPICS, generator=generator).argsort(-1)[..., None].expand(shape)
    names = torch.rand(shape, generator=generator).argsort(-1)
    asked = torch.randint(TOPICS, (batch, TOPICS, 1), generator=generator).expand(shape)
    about = torch.randint(NAMES, shape, generator=generator)
    entry = torch.arange(batch)[:, None, None]
    facts = torch.stack((topics, names, table[entry, topics, names]), -1)
    questions = torch.stack((asked, about, torch.full(shape, VALUES)), -1)
    return Batch(torch.cat((facts, questions), 1).flatten(1, 2), table[entry, asked, about].flatten(1))


def loss_of(model: Model, batch: Batch, attention: Attention) -> tuple[Tensor, Tensor]:
    """The loss of the questions, and the chosen blocks."""
    logits, chosen = model(batch.tokens, attention)
    return F.cross_entropy(logits[:, -batch.answers.shape[1] :].flatten(0, 1), batch.answers.flatten()), chosen


def made(name: str, merge: str, seed: int) -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Model(NSA(merge) if name == "nsa" else MoBA())


def check(name: str, merge: str, seed: int, other: Attention = dense) -> float:
    """The greatest difference of a parameter's gradients by ``sparse`` and ``other``, in float64, relative to the norm of all gradients.
    Raises ``click.ClickException`` if it is above AGREE, or losses differ by more."""
    model, batch = made(name, merge, seed).double(), draw(1, torch.Generator().manual_seed(seed))
    parameters = dict(model.named_parameters())
    losses, gradients = [], []
    for attention in (sparse, other):
        loss, _ = loss_of(model, batch, attention)
        losses.append(float(loss.detach()))
        gradients.append(torch.autograd.grad(loss, list(parameters.values())))
    if not abs(losses[0] - losses[1]) <= AGREE * abs(losses[1]):
        raise click.ClickException(f"{name}: the loss is {losses[0]:.12g} by sparse and {losses[1]:.12g} by dense attention")
    worst, norm = 0.0, float(torch.cat([g.flatten() for g in gradients[1]]).norm())
    for parameter, got, want in zip(parameters, *gradients, strict=True):
        apart = float((got - want).norm()) / norm
        if not apart <= AGREE:
            raise click.ClickException(f"{name}: gradients of {parameter} differ by {apart:.2g} of the norm of all")
        worst = max(worst, apart)
    return worst


class Trained(NamedTuple):
    """losses: of each step. visited: the share of the causal tiles that the last step computed, of the branch that chooses."""

    losses: list[float]
    visited: float


def train(name: str, merge: str, steps: int, seed: int) -> Trained:
    """AdamW on a new batch at each step."""
    model, generator = made(name, merge, seed), torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, chosen = [], torch.empty(0)
    for _ in range(steps):
        optimizer.zero_grad()
        loss, chosen = loss_of(model, draw(8, generator), sparse)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    tiles = chosen.unflatten(2, (-1, BLOCK)).any(3).float()
    return Trained(losses, float(tiles.sum() / torch.ones_like(tiles).tril().sum()))


def judge(name: str, losses: list[float]) -> None:
    """Raises ``click.ClickException`` if the loss has not fallen as far as it must."""
    end, bound = sum(losses[-5:]) / len(losses[-5:]), FALLS_TO * math.log(VALUES)
    if not end <= bound:
        raise click.ClickException(f"{name}: the loss has come from {losses[0]:.3f} to {end:.3f} only; wanted {bound:.3f} or less")


@click.command()
@click.option("--merge", default="gates", show_default=True, type=click.Choice(["gates", "lse"]), help="How NSA's branches are joined.")
@click.option("--steps", default=200, show_default=True, type=click.IntRange(1), help="Of each training.")
@click.option("--check", "checks", is_flag=True, help="Also compare gradients with those of dense attention under the same mask.")
@click.option("--seed", default=0, show_default=True, help="Of the models and the batches.")
def main(merge: str, steps: int, checks: bool, seed: int) -> None:
    """Train two small layers that choose what they read; their losses must fall."""
    console = Console()
    for name in ("nsa", "moba"):
        if checks:
            worst = check(name, merge, seed)
            console.print(f"{name}: gradients differ from those of dense attention by {worst:.0e} of the norm at most [green]ok")
        start = time.perf_counter()
        with console.status(f"training {name}"):
            losses, visited = train(name, merge, steps, seed)
        seconds = time.perf_counter() - start
        shown = "  ".join(f"{losses[i]:.3f}" for i in range(0, steps, max(1, steps // 6)))
        console.print(f"{name}: loss {shown}  {losses[-1]:.3f} in {seconds:.0f} s; {visited:.0%} of the causal tiles computed")
        judge(name, losses)
        console.print(f"{name}: the loss falls [green]ok")


if __name__ == "__main__":
    main()
