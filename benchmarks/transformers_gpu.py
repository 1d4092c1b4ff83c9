"""Benchmark of Transformers on a GPU: ``attn_implementation="anyattn"`` beside others, for known model shapes with random weights.

    python -m benchmarks.transformers_gpu [--cases eager,paged,...] [--seconds 150] [--tiny]

Nothing is downloaded. Cases: generate of a Llama of 1B parameters with a dynamic cache (``eager``) and with a static one, whose step is
compiled (``compiled``), of a Mistral with a window (``mistral``) and of a gpt-oss with sinks and windows (``gpt-oss``), all with prompts of
uneven lengths, padded on the left; a training step over packed documents (``training``); continuous batching (``paged``).

The implementations take turns within a round, in changing order, and ratios are taken within rounds. The cases run in a separate process,
each under a time limit: a case that exceeds it is ended with its process, and the others continue in a new one. ``--tiny`` is for trying
the script on a CPU.
"""

from __future__ import annotations

import gc
import inspect
import json
import os
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.process import ANSWER, Child, apart

__all__ = ["CASES", "main"]

OURS = "anyattn"
_START_S = 60  # for a fresh process's imports and device initialisation, in addition to its case's limit


@dataclass(frozen=True)
class Case:
    """model: the prefix of Transformers' class names. settings: of its config. window: of sliding layers. peers: other implementations.

    batch, prompt, new: sequences, tokens of the longest prompt, generated tokens; for training: 1, tokens per step, documents.
    limit: seconds.
    """

    kind: str
    model: str
    settings: dict[str, Any]
    batch: int
    prompt: int
    new: int
    peers: tuple[str, ...]
    limit: float

    def tiny(self) -> Case:
        """The same case in a size that a CPU computes in a moment."""
        small = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16}
        small |= {"num_attention_heads": 4, "num_key_value_heads": 2}
        if "sliding_window" in self.settings:
            small["sliding_window"] = 16
        if "layer_types" in self.settings:
            small["layer_types"] = self.settings["layer_types"][:2]
        peers = tuple(p for p in self.peers if p != "flex_attention")  # compiled for a CPU it has no gradients
        return replace(self, settings=self.settings | small, batch=min(self.batch, 4), prompt=48, new=min(self.new, 6), peers=peers)


_LLAMA: dict[str, Any] = {
    "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 16384, "tie_word_embeddings": True,
}  # fmt: skip
_MISTRAL: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 16384, "sliding_window": 1024,
}  # fmt: skip
_GPT_OSS: dict[str, Any] = {
    "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 16384, "sliding_window": 128, "num_local_experts": 4,
    "num_experts_per_tok": 2, "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip

CASES: dict[str, Case] = {
    "eager": Case("dynamic", "Llama", _LLAMA, 8, 4096, 64, ("sdpa",), 40),
    "paged": Case("paged", "Llama", _LLAMA, 64, 1024, 64, ("sdpa",), 45),
    "training": Case("training", "Llama", _LLAMA, 1, 8192, 8, ("sdpa", "flex_attention"), 60),
    "gpt-oss": Case("dynamic", "GptOss", _GPT_OSS, 8, 4096, 128, ("eager", "flex_attention"), 75),
    "mistral": Case("static", "Mistral", _MISTRAL, 8, 4096, 128, ("sdpa",), 70),
    "compiled": Case("static", "Llama", _LLAMA, 8, 4096, 128, ("sdpa",), 150),
}


# ---- in the child: one case


def _model(case: Case, device: torch.device, dtype: torch.dtype) -> Any:
    """The model with random weights, created on the device."""
    import transformers

    from anyattn.integrations.transformers import register

    register()
    config = getattr(transformers, f"{case.model}Config")(**case.settings, pad_token_id=0, bos_token_id=1, eos_token_id=None)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = getattr(transformers, f"{case.model}ForCausalLM")(config)
    finally:
        torch.set_default_dtype(before)
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0.0, 0.02, generator=generator)
            elif "bias" in name or "sinks" in name:
                weight.zero_()
    return model.eval()


def _lengths(case: Case) -> list[int]:
    """The lengths of the prompts: from half of the longest to all of it."""
    return [case.prompt - case.prompt * row // (2 * case.batch) for row in range(case.batch)]


def _generating(case: Case, model: Any, device: torch.device) -> Callable[[str], float]:
    ids = torch.randint(2, case.settings["vocab_size"], (case.batch, case.prompt), device=device)
    mask = torch.arange(case.prompt, device=device) >= case.prompt - torch.tensor(_lengths(case), device=device)[:, None]
    options: dict[str, Any] = {"max_new_tokens": case.new, "do_sample": False}
    if case.kind == "static":
        options["cache_implementation"] = "static"
        if device.type == "cpu":  # for which generate does not compile by itself
            from transformers import CompileConfig

            options["compile_config"] = CompileConfig(mode="default")
            options["compile_config"]._compile_all_devices = True

    @torch.no_grad()
    def run(implementation: str) -> float:
        model.set_attn_implementation(implementation)
        found = model.generate(ids, attention_mask=mask.long(), **options)
        assert found.shape[1] == case.prompt + case.new
        return case.batch * case.new

    return run


def _training(case: Case, model: Any, device: torch.device) -> Callable[[str], float]:
    """Forward and backward pass of one packed sequence of documents of uneven lengths."""
    model.train()
    weights = torch.arange(1, case.new + 1)
    lengths = (case.prompt * weights // int(weights.sum())).tolist()
    lengths[-1] += case.prompt - sum(lengths)
    ids = torch.randint(2, case.settings["vocab_size"], (1, case.prompt), device=device)
    places = torch.cat([torch.arange(n, device=device) for n in lengths])[None]

    def run(implementation: str) -> float:
        model.set_attn_implementation(implementation)
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, position_ids=places, labels=ids, use_cache=False).loss.backward()
        return case.prompt

    return run


def _batching(case: Case, model: Any, device: torch.device) -> Callable[[str], float]:
    """Continuous batching of requests of uneven lengths that all arrive at the start."""
    import transformers

    texts = [torch.randint(2, case.settings["vocab_size"], (n,)).tolist() for n in _lengths(case)]
    page = 256 if device.type == "cuda" else 8
    names = inspect.signature(transformers.ContinuousBatchingConfig).parameters
    sizes = {"page_size" if "page_size" in names else "block_size": page, "max_batch_tokens": 4096 if device.type == "cuda" else 64}
    sizes["num_blocks"] = case.batch * (-(-(case.prompt + case.new) // page) + 1)
    config = transformers.ContinuousBatchingConfig(**sizes)
    greedy = transformers.GenerationConfig(do_sample=False, max_new_tokens=case.new, eos_token_id=-1, pad_token_id=0)

    def run(implementation: str) -> float:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model.set_attn_implementation(f"paged|{implementation}")
            found = model.generate_batch(texts, generation_config=greedy, continuous_batching_config=config, progress_bar=False)
        answers = list(found.values())
        assert [a.error for a in answers] == [None] * len(texts)
        return sum(len(a.generated_tokens) for a in answers)

    return run


_KINDS = {"dynamic": _generating, "static": _generating, "training": _training, "paged": _batching}


def _measured(case: Case, device: torch.device, say: Callable[[str], None]) -> dict[str, Any]:
    """rates: tokens per second of each implementation, by round. memory: GiB of each. errors: of those that raised."""
    start = time.perf_counter()
    model = _model(case, device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    run = _KINDS[case.kind](case, model, device)
    say(f"model made ({time.perf_counter() - start:.0f} s)")
    rates: dict[str, list[float]] = {}
    memory: dict[str, float] = {}
    errors: dict[str, str] = {}

    def once(implementation: str) -> float:
        _wait(device)
        began = time.perf_counter()
        count = run(implementation)
        _wait(device)
        return count / (time.perf_counter() - began)

    for implementation in (OURS, *case.peers):
        try:
            began = time.perf_counter()
            once(implementation)
            say(f"{implementation}: first run {time.perf_counter() - began:.1f} s")
            rates[implementation] = []
        except Exception as error:
            traceback.print_exc()
            errors[implementation] = f"{type(error).__name__}: {error}"[:200]
    rounds, taken = 0, 0.0
    while rates and rounds < 7 and (rounds < 1 or time.perf_counter() - start + 1.2 * taken < case.limit):
        began = time.perf_counter()
        for implementation in list(rates) if rounds % 2 else list(rates)[::-1]:
            _forget_peak(device)
            rates[implementation].append(once(implementation))
            memory[implementation] = _peak(device)
        rounds, taken = rounds + 1, time.perf_counter() - began
        say(f"round {rounds}: " + ", ".join(f"{name} {found[-1]:.0f} tokens/s" for name, found in rates.items()))
    return {"rates": rates, "memory": memory, "errors": errors}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def _peak(device: torch.device) -> float:
    return torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0


def _serve(is_tiny: bool) -> None:
    """Answers each line, a case's name and limit, with its figures."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with apart() as answers:
        for line in sys.stdin:
            name, limit = json.loads(line)
            case = replace(CASES[name].tiny() if is_tiny else CASES[name], limit=limit)
            try:
                found = _measured(case, device, lambda text, name=name: print(f"{name}: {text}", file=sys.stderr, flush=True))  # type: ignore[misc]
            except Exception as error:
                traceback.print_exc()
                found = {"rates": {}, "memory": {}, "errors": {"case": f"{type(error).__name__}: {error}"[:200]}}
            torch.compiler.reset()
            gc.collect()  # frees the finished case's model
            if device.type == "cuda":
                torch.cuda.empty_cache()
            print(ANSWER + json.dumps(found), file=answers, flush=True)


# ---- the parent


def _rows(name: str, found: dict[str, Any]) -> list[tuple[str, ...]]:
    rows = []
    ours = found["rates"].get(OURS, [])
    for who, rates in found["rates"].items():
        shown = [""] * 3
        if ours and who != OURS:
            ratios = [a / b for a, b in zip(ours, rates, strict=True)]
            shown = [f"{f(ratios):.2f}" for f in (statistics.median, min, max)]
        memory = found["memory"].get(who, 0.0)
        rows.append((name, who, f"{statistics.median(rates):.0f}", *shown, f"{memory:.1f}" if memory else "", str(len(rates))))
    return rows


@click.command()
@click.option("--cases", "chosen", default=",".join(CASES), help="Which, separated by commas; in this order.")
@click.option("--seconds", default=150.0, help="For all cases together; one that no time is left for is not measured.")
@click.option("--tiny", is_flag=True, help="Sizes that a CPU computes in a moment.")
@click.option("--serve", is_flag=True, hidden=True)
def main(chosen: str, seconds: float, tiny: bool, serve: bool) -> None:
    """Tokens a second of Transformers with anyattn and with its other attention implementations."""
    if serve:
        _serve(tiny)
        return
    names = chosen.split(",")
    if unknown := [name for name in names if name not in CASES]:
        raise click.BadParameter(f"no case {unknown[0]!r}; wanted some of {', '.join(CASES)}", param_hint="--cases")
    end, console = time.monotonic() + seconds, Console(width=None if sys.stdout.isatty() else 150)
    command = [sys.executable, "-m", "benchmarks.transformers_gpu", "--serve", *(["--tiny"] if tiny else [])]
    log = sys.__stderr__ or sys.stderr  # the process's own stderr, even if a test replaces sys.stderr
    rows: list[tuple[str, ...]] = []
    missing: list[str] = []
    child: Child | None = None
    for name in names:
        left = end - time.monotonic()
        if left < 5:
            missing.append(f"{name}: not measured, {seconds:.0f} s are over")
            continue
        limit = min(CASES[name].limit, left)
        start = 0 if child is not None else min(_START_S, left - limit)
        console.print(f"{name}: at most {limit:.0f} s")
        child = child or Child(command, log, os.environ)
        try:
            found = child.ask([name, limit], limit + start)
            rows += _rows(name, found)
            missing += [f"{name}: {who}: {error}" for who, error in found["errors"].items()]
        except RuntimeError as error:
            missing.append(f"{name}: ended, at most {limit:.0f} s: {error}")
            child.end()
            child = None
    if child is not None:
        child.end(5)
    table = Table("case", "attn_implementation", "tokens/s, median", "anyattn's over it", "from", "to", "GiB", "rounds")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for line in missing:
        console.print(line, markup=False)


if __name__ == "__main__":
    main()
