"""Training with the sequence over several ranks: a small GPT on packed documents, compared at every step with one process.

Each step packs other documents into one long row. The mask keeps them apart, some layers have a window, and every head has a learned ALiBi
slope. ``anyattn.distributed.plan`` decides from the step's masks which rank computes which rows; the model is the same as in one process,
and so are its calls of ``anyattn.flex_attention``. ``DistributedDataParallel`` sums the gradients. The same training then runs in one
process without a plan: losses and norms of gradients must agree to rounding.

The ranks are processes of this machine, joined by gloo; on GPUs they are those of ``torchrun``, and ``train`` is the same.
Run it with ``python examples/context_parallel.py``.
"""

from __future__ import annotations

import functools
import os
import random
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import anyattn
from anyattn import distributed as ad
from anyattn import masks

VOCABULARY, HIDDEN, HEADS, HEADS_KV, HEAD_DIM = 128, 64, 4, 2, 16
LAYERS = ("full", "window", "full", "window")
WINDOW = 64  # positions before its own that a row of a windowed layer sees
BLOCK = 32  # of masks: small, as the sequence is; on a GPU the default is right
IGNORED = -100
AGREE = 4e-6  # the greatest relative difference of losses, and of norms of gradients, that roundings may add up to


class Settings(NamedTuple):
    length: int
    steps: int
    is_compiled: bool
    seed: int


class Batch(NamedTuple):
    """Documents end to end. ids: (1, length); targets: the next byte, ``IGNORED`` at the last one of a document; document: (length,)."""

    ids: Tensor
    targets: Tensor
    document: Tensor


class Step(NamedTuple):
    """What one step of a training shows. gradient: the norm of all gradients. plan: its ``stats``, None in one process."""

    documents: int
    loss: float
    gradient: float
    plan: Any


class Block(nn.Module):
    """Attention and a multilayer perceptron. Nothing in it knows of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))
        self.q, self.k, self.v = (nn.Linear(HIDDEN, n * HEAD_DIM, bias=False) for n in (HEADS, HEADS_KV, HEADS_KV))
        self.out = nn.Linear(HEADS * HEAD_DIM, HIDDEN, bias=False)
        self.log_slopes = nn.Parameter(torch.linspace(-5.0, -2.0, HEADS))
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor, angles: Tensor, mask: Any) -> Tensor:
        h = self.norms[0](x)
        q, k, v = (project(h).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for project in (self.q, self.k, self.v))
        slopes = self.log_slopes.exp()

        def alibi(score: Any, b: Any, head: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score - slopes[head] * (q_idx - kv_idx)  # positions of the whole sequence, on every rank

        out = anyattn.flex_attention(rotated(q, angles), rotated(k, angles), v, alibi, block_mask=mask, enable_gqa=True)
        x = x + self.out(out.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """Logits (1, rows, VOCABULARY) of bytes (1, rows) at ``positions`` (rows,) of the sequence, which need not be consecutive."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
            self.blocks = nn.ModuleList(Block() for _ in LAYERS)
            self.norm, self.head = nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, ids: Tensor, positions: Tensor, block_masks: Mapping[str, Any]) -> Tensor:
        frequencies = 100.0 ** -torch.linspace(0.0, 1.0, HEAD_DIM // 2)
        angles = positions[:, None] * frequencies
        x = self.embedding(ids)
        for kind, block in zip(LAYERS, self.blocks, strict=True):
            x = block(x, angles, block_masks[kind])
        return self.head(self.norm(x))


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary embedding of (1, heads, rows, HEAD_DIM) by (rows, HEAD_DIM / 2)."""
    a, b = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)


@functools.cache
def sentences() -> list[bytes]:
    return Path(__file__).with_name("sentences.txt").read_text(encoding="utf-8").encode("ascii", "replace").splitlines()


def pack(length: int, seed: int) -> Batch:
    """Documents of a few sentences each, until the row is full; the last one is cut."""
    draw = random.Random(seed)
    texts: list[bytes] = []
    while sum(map(len, texts)) < length:
        texts.append(b" ".join(draw.choices(sentences(), k=draw.choice((1, 2, 5, 12)))) + b"\n")
    sizes = torch.tensor([len(text) for text in texts])
    ids = torch.tensor(list(b"".join(texts)))
    targets = ids.roll(-1)
    targets[sizes.cumsum(0) - 1] = IGNORED
    document = torch.repeat_interleave(torch.arange(len(texts)), sizes)
    return Batch(ids[None, :length], targets[None, :length], document[:length])


def block_masks(batch: Batch) -> dict[str, Any]:
    """Of the layers' kinds, for the whole sequence."""
    length = len(batch.document)
    inside = masks.document(batch.document) & masks.causal()
    mods = {"full": inside, "window": inside & masks.sliding_window(WINDOW, 0)}
    return {kind: anyattn.create_block_mask(mod, None, None, length, length, device="cpu", BLOCK_SIZE=BLOCK) for kind, mod in mods.items()}


def train(settings: Settings, mesh: DeviceMesh | None) -> list[Step]:
    """AdamW on a new batch at each step. mesh: the ranks that share each sequence, of one dimension; None for one process."""
    model = GPT(settings.seed)
    if settings.is_compiled:
        for block in model.blocks:
            block.compile(fullgraph=True)
    ranks = 1 if mesh is None else mesh.size()
    runs: nn.Module = model if mesh is None else nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    steps = []
    for number in range(settings.steps):
        batch = pack(settings.length, settings.seed + number)  # every rank has the whole batch, and computes its rows
        ids, targets, positions = batch.ids, batch.targets, torch.arange(settings.length)
        layer_masks, stats = block_masks(batch), None
        if mesh is not None:
            plan = ad.plan(layer_masks, mesh, heads=(HEADS, HEADS_KV), head_dim=HEAD_DIM)
            ids, targets = plan.shard(ids, targets)
            layer_masks, positions, stats = plan.mask, plan.positions, plan.stats
        optimizer.zero_grad()
        logits = runs(ids, positions, layer_masks)
        count = (batch.targets != IGNORED).sum()  # of all ranks
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum") / count
        (loss * ranks).backward()  # DistributedDataParallel divides the sum of the gradients by the number of ranks
        gradient = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss = loss.detach()
        if mesh is not None:
            dist.all_reduce(loss, group=mesh.get_group())
        steps.append(Step(int(batch.document[-1]) + 1, loss.item(), gradient.item(), stats))
    return steps


def work(rank: int, ranks: int, folder: str, settings: Settings) -> None:
    """One process of the training over ranks; the first one leaves its steps in the folder."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    steps = train(settings, init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",)))
    if rank == 0:
        torch.save([tuple(step) for step in steps], Path(folder) / "steps")
    dist.destroy_process_group()
    os._exit(0)  # gloo has threads that abort an ordinary exit, rarely: "terminate called without an active exception"


def train_over(ranks: int, settings: Settings) -> list[Step]:
    """The steps of a training over ``ranks`` processes. An error of one is raised here."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (ranks, folder, settings), nprocs=ranks)  # type: ignore[no-untyped-call]
        return [Step(*step) for step in torch.load(Path(folder) / "steps", weights_only=False)]


def difference(a: float, b: float) -> float:
    """Relative to the first."""
    return abs(a - b) / abs(a)


def judge(alone: list[Step], together: list[Step]) -> None:
    """Raises ``click.ClickException`` at the first step at which the trainings disagree."""
    for number, (one, other) in enumerate(zip(alone, together, strict=True)):
        for what, a, b in (("loss", one.loss, other.loss), ("norm of the gradients", one.gradient, other.gradient)):
            if not difference(a, b) <= AGREE:
                raise click.ClickException(f"step {number}: the {what} is {a:.8g} in one process and {b:.8g} over the ranks")


@click.command()
@click.option("--ranks", default=2, show_default=True, type=click.IntRange(1), help="Processes that share each sequence.")
@click.option("--length", default=1024, show_default=True, type=click.IntRange(2), help="Bytes of a step, in packed documents.")
@click.option("--steps", default=12, show_default=True, type=click.IntRange(1))
@click.option("--compile", "is_compiled", is_flag=True, help="Compile each block of the model, as one graph for all documents.")
@click.option("--seed", default=0, show_default=True, help="Of the model and the documents.")
def main(ranks: int, length: int, steps: int, is_compiled: bool, seed: int) -> None:
    """Train a small GPT on packed documents, each sequence shared by several processes, and compare every step with one process."""
    console, settings = Console(), Settings(length, steps, is_compiled, seed)
    start = time.perf_counter()
    with console.status("training in one process"):
        alone = train(settings, None)
    middle = time.perf_counter()
    with console.status(f"training over {ranks} ranks"):
        together = train_over(ranks, settings)
    seconds = (middle - start, time.perf_counter() - middle)
    _print_steps(console, ranks, alone, together)
    judge(alone, together)
    console.print(f"losses and gradients of one process and of {ranks} ranks agree at every step [green]ok")
    console.print(f"{seconds[0]:.1f} s in one process, {seconds[1]:.1f} s over {ranks} on this machine, with their start")


def _print_steps(console: Console, ranks: int, alone: list[Step], together: list[Step]) -> None:
    names = ("step", "texts", "placement", "load", "keys", "1 process", f"{ranks} ranks", "losses", "gradients")
    table = Table(*names, box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.caption = "keys: received by a rank, at most; losses, gradients: relative differences"
    for number, (one, other) in enumerate(zip(alone, together, strict=True)):
        plan = (other.plan.placement, f"{other.plan.load:.2f}", str(max(other.plan.received)))
        losses = (f"{one.loss:.6f}", f"{other.loss:.6f}", f"{difference(one.loss, other.loss):.0e}")
        table.add_row(str(number), str(one.documents), *plan, *losses, f"{difference(one.gradient, other.gradient):.0e}")
    console.print(table)


if __name__ == "__main__":
    main()
