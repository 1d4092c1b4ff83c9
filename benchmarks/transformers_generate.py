"""Benchmark of ``generate`` with a tiny Llama on this machine: tokens per second of ``attn_implementation="anyattn"`` over ``sdpa``.

    python -m benchmarks.transformers_generate [--rounds 7] [--new 96] [--batch 1] [--padded] [--compiled] [--clock cpu]

Eight layers of width 256 with random weights and a static cache. The implementations take turns within rounds, in changing order, and the
ratio is taken within a round, so that other load affects both. ``--clock cpu`` counts the process's CPU seconds instead, which other
processes disturb less; with one thread (OMP_NUM_THREADS=1) the two agree on a quiet machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

__all__ = ["main"]


def _model(name: str) -> Any:
    import transformers

    from anyattn.integrations.transformers import register

    register()
    settings: dict[str, Any] = {
        "vocab_size": 512, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 4, "max_position_embeddings": 4096, "pad_token_id": 0, "eos_token_id": None,
    }  # fmt: skip
    if name == "Mistral":
        settings["sliding_window"] = 64
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**settings)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def _seconds(
    model: Any, implementation: str, ids: torch.Tensor, mask: torch.Tensor, new: int, compiled: Any, clock: Callable[[], float]
) -> float:
    model.set_attn_implementation(implementation)
    options = {} if compiled is None else {"compile_config": compiled}
    start = clock()
    model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, cache_implementation="static", **options)
    return clock() - start


@click.command()
@click.option("--model", "name", default="Llama", type=click.Choice(["Llama", "Mistral"]))
@click.option("--rounds", default=7, help="Rounds that are counted.")
@click.option("--new", default=96, help="Tokens generated.")
@click.option("--batch", default=1)
@click.option("--prompt", default=64, help="Tokens of the prompt.")
@click.option("--padded", is_flag=True, help="Prompts of different lengths, padded on the left.")
@click.option("--compiled", is_flag=True, help="Compile the decoding step, as generate does by itself on a GPU.")
@click.option("--clock", "clock_name", default="wall", type=click.Choice(["wall", "cpu"]))
@torch.no_grad()
def main(name: str, rounds: int, new: int, batch: int, prompt: int, padded: bool, compiled: bool, clock_name: str) -> None:
    """Tokens a second of generate, anyattn over sdpa."""
    from transformers import CompileConfig

    clock = time.process_time if clock_name == "cpu" else time.perf_counter
    model = _model(name)
    ids = torch.randint(1, 512, (batch, prompt))
    mask = torch.ones_like(ids)
    if padded:
        for row in range(batch):
            mask[row, : row * prompt // (2 * batch)] = 0
    config = None
    if compiled:
        config = CompileConfig(mode="default")
        config._compile_all_devices = True
    both = ["anyattn", "sdpa"]
    for implementation in both:
        for _ in range(2):
            _seconds(model, implementation, ids, mask, new, config, clock)
    times: dict[str, list[float]] = {implementation: [] for implementation in both}
    for index in track(range(rounds), description="rounds", transient=True):
        for implementation in both if index % 2 else both[::-1]:
            times[implementation].append(_seconds(model, implementation, ids, mask, new, config, clock))
    ratios = [sdpa / ours for ours, sdpa in zip(times["anyattn"], times["sdpa"], strict=True)]
    table = Table("attn_implementation", "tokens/s, median", "of sdpa, median", "rounds from", "to")
    for implementation in both:
        rate = batch * new / statistics.median(times[implementation])
        shown = [f"{f(ratios):.3f}" for f in (statistics.median, min, max)] if implementation == "anyattn" else ["1", "", ""]
        table.add_row(implementation, f"{rate:.0f}", *shown)
    Console().print(f"{name}, batch {batch}, {'compiled' if compiled else 'eager'}, {torch.get_num_threads()} threads")
    Console().print(table)


if __name__ == "__main__":
    main()
