"""Appending to caches of 8 bits beside caches of bf16, on a GPU, in CUDA graphs: new rows with rotary embedding, without the attention.

``python -m benchmarks.appending`` prints microseconds for each number of new rows, storage and form of the scales, and their ratio to bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import click
import torch
from torch import Tensor

from anyattn.call_cache.kvcache_step import step_call
from anyattn.validate.flash import Options
from anyattn.validate.kvcache import CacheArguments
from benchmarks.graphs import medians

__all__ = ["CASES", "FORMS", "Case", "appending_times", "calls_of"]

HEADS_Q, HEADS_KV, DIM, CAPACITY = 32, 8, 128, 4096
FORMS = ("bf16", "one factor", "factors of heads", "factors of tokens and heads", "int8, factors of tokens and heads")


class Case(NamedTuple):
    """new: rows appended to each of ``batch`` sequences. page: rows of a page, 0 for a contiguous cache."""

    batch: int
    new: int
    page: int

    @property
    def name(self) -> str:
        return f"B{self.batch}, {self.new} new, " + (f"pages of {self.page}" if self.page else "contiguous")


CASES = [Case(batch, new, page) for batch, new in ((1, 1), (64, 1), (8, 512)) for page in (0, 16, 64)]


def calls_of(case: Case, device: str) -> dict[str, Callable[[], Any]]:
    """For each of ``FORMS`` a call that appends and attends to nothing."""
    return {form: _appends(case, form, device) for form in FORMS}


def _appends(case: Case, form: str, device: str) -> Callable[[], Any]:
    def rows(heads: int) -> Tensor:
        return torch.randn(case.batch, case.new, heads, DIM, dtype=torch.bfloat16, device=device)

    dtype = {"bf16": torch.bfloat16}.get(form, torch.int8 if form.startswith("int8") else torch.float8_e4m3fn)
    store = (case.batch * CAPACITY // case.page, case.page) if case.page else (case.batch, CAPACITY)
    caches = [
        torch.zeros(*store, HEADS_KV, DIM, dtype=torch.uint8 if dtype.itemsize == 1 else dtype, device=device).view(dtype) for _ in "kv"
    ]
    angles = torch.rand(CAPACITY, DIM // 2, device=device)
    lengths = torch.randint(0, CAPACITY - case.new, (case.batch,), dtype=torch.int32, device=device)
    table = torch.randperm(store[0], device=device).view(case.batch, -1).int() if case.page else None
    arguments: dict[str, Any] = {"q": rows(HEADS_Q), "k_cache": caches[0], "v_cache": caches[1], "k": rows(HEADS_KV), "v": rows(HEADS_KV)}
    arguments |= {"rotary_cos": angles.cos().bfloat16(), "rotary_sin": angles.sin().bfloat16(), "cache_seqlens": lengths}
    descales = [_descale(form, case.batch, store, device) for _ in "kv"]
    options = Options(causal=True, num_splits=0, k_descale=descales[0], v_descale=descales[1])
    with torch.no_grad():
        found = step_call(CacheArguments(**arguments, page_table=table), options, "triton")
    assert found is not None
    call, plan = found
    return torch.no_grad()(lambda: call.prepared(plan))


def _descale(form: str, batch: int, store: tuple[int, ...], device: str) -> float | Tensor | None:
    if form.endswith("factors of tokens and heads"):
        return torch.ones(*store, HEADS_KV, device=device)
    if form == "factors of heads":
        return torch.full((batch, HEADS_KV), 0.02, device=device)
    return None if form == "bf16" else 0.02


def appending_times(rounds: int = 7, repeats: int = 20) -> dict[str, Any]:
    """microseconds: by case and form. ratio: the greatest of a form's time over that of bf16."""
    found = {case.name: medians(calls_of(case, "cuda"), rounds, repeats) for case in CASES}
    return {"ratio": max(us / times["bf16"] for times in found.values() for us in times.values()), "microseconds": found}


@click.command()
@click.option("--rounds", default=7, show_default=True)
@click.option("--repeats", default=20, show_default=True, help="Calls in a graph.")
def main(rounds: int, repeats: int) -> None:
    """Times appending to caches."""
    found = appending_times(rounds, repeats)
    for name, times in found["microseconds"].items():
        click.echo(f"{name:28}" + "  ".join(f"{form} {us:.2f} ({us / times['bf16']:.2f})" for form, us in times.items()))
    click.echo(f"the greatest ratio {found['ratio']:.2f}")


if __name__ == "__main__":
    main()
