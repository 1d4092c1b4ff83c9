"""Sweep of the tiles of wide heads on a GPU: ``python -m benchmarks.gpu.wide_tiles --pass forward --pass dq --kv one``.

Candidates are compiled in many processes first; those that the device refuses, or that spill more than ``--spills``, are left out. The
others take turns in CUDA graphs. Prints for each pass the candidates, the fastest first: microseconds, TFLOP/s of the pass's own products,
for decoding the share of a copy's bandwidth, and a star at what the tables have. The backward passes' times are those of forward and
backward pass minus the forward pass. ``--loop plain``, ``late`` and ``joined`` try these forward loops where values are apart, and
``undivided`` the tables' tiles with first products that both warp groups compute.

The winners belong into ``anyattn.backends.triton.wide_tiles``.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import click
import torch
from torch import Tensor

import anyattn
from anyattn import masks
from anyattn.backends.triton import api, backward_pass, tile_config, wide_tiles
from anyattn.backends.triton.tile_config import Shape, Tiles
from anyattn.backends.triton.wide_tiles import Numbers
from anyattn.call_cache import attention
from anyattn.triton_tools import launch
from benchmarks.gpu.ahead import Job, compile_ahead
from benchmarks.graphs import medians
from benchmarks.process import ANSWER, apart

__all__ = ["PASSES", "Size", "Trial", "calls_of", "candidates", "using"]

PASSES = ("forward", "dq", "dkdv", "few")
LOOPS = ("table", "plain", "joined", "late", "undivided")
_FORWARD_LOOPS = LOOPS[1:4]
_VALUES = 512  # columns of v
_HOPPER = (9, 0)
_FEWER_ROWS = 2048  # whose kernels are those of more rows
# by pass and whether values are in keys: tiles, warps and stages besides the tables' own
_CANDIDATES: dict[tuple[str, bool], tuple[Numbers, ...]] = {
    ("forward", False): ((64, 32, 8, 1), (64, 16, 8, 3), (64, 32, 8, 2), (32, 32, 8, 2)),
    ("forward", True): ((64, 32, 8, 3), (64, 32, 8, 2), (64, 64, 8, 1), (64, 16, 8, 4)),
    ("dq", False): ((32, 32, 8, 2), (64, 16, 8, 1), (32, 32, 4, 2), (32, 16, 8, 2)),
    ("dq", True): ((32, 32, 8, 2), (64, 16, 8, 3), (64, 16, 8, 2), (64, 32, 8, 1)),
    ("dkdv", False): ((16, 64, 8, 2), (16, 64, 8, 1), (16, 32, 8, 3), (32, 32, 4, 2)),
    ("dkdv", True): ((16, 64, 8, 3), (16, 64, 8, 2), (32, 64, 8, 1), (32, 32, 8, 2)),
    ("few", False): ((64, 64, 8, 1), (64, 16, 8, 3), (32, 32, 8, 2), (16, 32, 8, 3)),
    ("few", True): ((64, 32, 8, 3), (64, 32, 8, 2), (64, 64, 8, 1), (32, 64, 8, 2)),
}


class Trial(NamedTuple):
    """loop: one of ``LOOPS``; all but "undivided" are of the forward pass over many rows."""

    of: str
    head_dim: int
    has_one_kv: bool
    numbers: Numbers
    loop: str = "table"

    @property
    def name(self) -> str:
        return "{} x {}, {} warps, {} stages".format(*self.numbers) + ("" if self.loop == "table" else f", {self.loop} loop")


class Size(NamedTuple):
    """rows: of queries and of keys; of a cache, keys of each of ``batch`` sequences, for ``heads`` query heads."""

    rows: int = 8192
    batch: int = 32
    heads: int = 128


def candidates(of: str, head_dim: int, has_one_kv: bool, loops: tuple[str, ...] = ("table",)) -> list[Trial]:
    """The tables' tiles first; none that do not fit Hopper, whose stages or sizes a call would reduce."""
    table: Numbers = wide_tiles.tiles_of_few(64, has_one_kv) if of == "few" else wide_tiles.tiles_of(of, has_one_kv, 2, "sm_90")
    shape, as_pass = Shape(head_dim, _VALUES, torch.bfloat16, has_one_kv=has_one_kv), "forward" if of == "few" else of
    fitting = [n for n in _CANDIDATES[of, has_one_kv] if tile_config.fits(as_pass, Tiles(*n), shape, _HOPPER)]
    own = [Trial(of, head_dim, has_one_kv, numbers) for numbers in dict.fromkeys((table, *fitting))]
    # the other loops load tiles of values later than those of keys, by descriptors of whole rows
    more = [loop for loop in loops if loop in _FORWARD_LOOPS and of == "forward" and not has_one_kv and head_dim <= _VALUES]
    divides = "undivided" in loops and (has_one_kv or of in ("dq", "dkdv"))
    return own + [t._replace(loop=loop) for t, loop in product(own, more)] + [own[0]._replace(loop="undivided")] * divides


@contextmanager
def using(trial: Trial) -> Iterator[None]:
    """Context in which calls with wide heads have the trial's tiles in its pass."""
    tiles_of, pipeline_of = wide_tiles.tiles_of, tile_config.pipeline_of

    def table(name: str, *about: Any) -> Numbers:
        return trial.numbers if name == trial.of else tiles_of(name, *about)

    def pipeline(*about: Any) -> tile_config.PipelineOptions:
        found = pipeline_of(*about)
        is_late, is_joined = trial.loop == "late", trial.loop != "plain"
        return replace(found, is_joined=is_joined, is_late=is_late) if trial.loop in _FORWARD_LOOPS else found

    patches = [mock.patch.object(tile_config, "tiles_of", table), mock.patch.object(tile_config, "pipeline_of", pipeline)]
    if trial.of == "few":
        patches.append(mock.patch.object(tile_config, "tiles_of_few", lambda *about: trial.numbers))
    if trial.loop == "undivided":
        patches += [mock.patch.object(home, "is_divided", lambda *about: False) for home in (api, backward_pass, tile_config)]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        attention.clear()
        try:
            yield
        finally:
            attention.clear()


def calls_of(trials: list[Trial], size: Size, device: str = "cuda", backend: str | None = "triton") -> dict[str, Callable[[], Any]]:
    """The calls of trials of one pass, by name, and those that they are compared with: "copy" of the keys, or the "forward" pass."""
    of, d, has_one_kv = trials[0][:3]
    random = partial(torch.randn, device=device, dtype=torch.bfloat16)
    if of == "few":
        q, k = random(size.batch, 1, size.heads, d), random(size.batch, size.rows, 1, d)
        v = k[..., :_VALUES] if has_one_kv else random(size.batch, size.rows, 1, _VALUES)
        lengths, target = torch.full((size.batch,), size.rows, dtype=torch.int32, device=device), torch.empty_like(k)
        attend: Callable[[], Any] = partial(anyattn.flash_attn_with_kvcache, q, k, v, cache_seqlens=lengths, backend=backend)
        beside: dict[str, Callable[[], Any]] = {"copy": lambda: target.copy_(k)}
    else:
        q, k, v = (random(1, h, size.rows, n) for h, n in ((8, d), (4, d), (4, _VALUES)))
        attend = partial(_passes, of, q, k, None if has_one_kv else v, backend)
        beside = {} if of == "forward" else {"forward": partial(_passes, "forward", q, k, None if has_one_kv else v, backend)}

    def call(trial: Trial) -> Any:
        with using(trial):
            return attend()

    return {**{trial.name: partial(call, trial) for trial in trials}, **beside}


def _passes(of: str, q: Tensor, k: Tensor, v: Tensor | None, backend: str | None) -> Any:
    """The forward pass, and the backward pass for the gradients of a kernel. v: None for the first columns of k."""
    has_gradient = {"q": of == "dq", "k": of == "dkdv"}
    with torch.set_grad_enabled(of != "forward"):
        q, k = q.detach().requires_grad_(has_gradient["q"]), k.detach().requires_grad_(has_gradient["k"])
        v = k[..., :_VALUES] if v is None else v.detach().requires_grad_(has_gradient["k"])
        out = anyattn.flex_attention(q, k, v, mask_mod=masks.causal(), enable_gqa=True, backend=backend)
        leaves = [t for t in (q, k, v) if t.requires_grad and t.is_leaf]
        return torch.autograd.grad(out, leaves, out.detach()) if leaves else out


def _flops(trial: Trial, size: Size) -> int:
    """Of the pass's own products: those of dq with the scores and dP, of dk and dv with both once."""
    d = trial.head_dim
    if trial.of == "few":
        return 2 * size.batch * size.heads * size.rows * (d + _VALUES)
    each = {"forward": d + _VALUES, "dq": 2 * d + _VALUES, "dkdv": 2 * d + 2 * _VALUES}[trial.of]
    return 2 * 8 * size.rows * (size.rows + 1) // 2 * each


def _lines(trials: list[Trial], size: Size, times: dict[str, float]) -> list[str]:
    """The table of a pass. times: microseconds."""
    base, rows = times.get("forward", 0.0), []
    for place, trial in enumerate(trials):
        us = times[trial.name] - base
        text = f"{trial.name:44} {us:10.1f} us {_flops(trial, size) / max(us, 1e-3) / 1e6:7.0f} TFLOP/s"
        if copied := times.get("copy"):
            read = trial.head_dim + (0 if trial.has_one_kv else _VALUES)
            text += f", {read / (2 * trial.head_dim) * copied / us:.2f} of a copy's bandwidth"
        rows.append((us, text + (" *" if place == 0 else "")))
    return [text for _, text in sorted(rows)]


# ---- compilation ahead, in processes


def _compiled(trial: Trial, device: str) -> dict[str, str]:
    """Calls a trial once; returns the reason against it, by its name, if there is one."""
    found: list[Any] = []
    handle_of = launch.handle_of

    def noted(compiled: Any, *rest: Any) -> Any:
        found.append(compiled)
        return handle_of(compiled, *rest)

    with mock.patch.object(launch, "handle_of", noted):
        calls_of([trial], Size() if trial.of == "few" else Size(_FEWER_ROWS), device)[trial.name]()
    spilled = max((int(kernel.n_spills) for kernel in found), default=0)
    most = int(os.environ[_SPILLS])
    return {trial.name: f"spills {spilled} words of a thread"} if spilled > most else {}


_SPILLS = "WIDE_TILES_SPILLS"


def _serve(device: str = "cuda") -> None:
    with apart() as answers:
        for line in sys.stdin:
            of, d, one, numbers, loop = json.loads(json.loads(line)["case"])
            trial = Trial(of, d, one, tuple(numbers), loop)
            try:
                failed = _compiled(trial, device)
            except Exception as error:
                failed = {trial.name: f"{type(error).__name__}: {str(error)[:120]}"}
            gc.collect()
            print(ANSWER + json.dumps(failed), file=answers, flush=True)


def _without_failures(trials: list[Trial], jobs: int, spills: int) -> list[Trial]:
    os.environ[_SPILLS] = str(spills)
    by_job = {Job(json.dumps(trial), (trial.name,)): trial for trial in trials}
    with tempfile.TemporaryDirectory() as folder:
        done = compile_ahead(list(by_job), jobs, 240, 120, Path(folder) / "log", click.echo, ("-m", "benchmarks.gpu.wide_tiles", "--serve"))
    bad = {by_job[one.job] for one in done if one.failed}
    return [trial for trial in trials if trial not in bad]


@click.command()
@click.option("--pass", "passes", multiple=True, type=click.Choice(PASSES), default=PASSES, show_default=True)
@click.option("--dim", "dims", multiple=True, type=int, default=(512,), show_default=True, help="Head dimension, 257 to 576.")
@click.option("--kv", "kinds", multiple=True, type=click.Choice(("apart", "one")), default=("apart", "one"), show_default=True)
@click.option("--loop", "loops", multiple=True, type=click.Choice(LOOPS), default=("table",), show_default=True)
@click.option("--heads", default=Size().heads, show_default=True, help="Query heads of decoding.")
@click.option("--jobs", default=min(16, os.cpu_count() or 1), show_default=True, help="Processes that compile.")
@click.option("--spills", default=250, show_default=True, help="Most words of a thread that a kernel may spill.")
@click.option("--rounds", default=7, show_default=True)
@click.option("--serve", is_flag=True, hidden=True)
def main(
    passes: tuple[str, ...], dims: tuple[int, ...], kinds: tuple[str, ...], loops: tuple[str, ...], heads: int, jobs: int, spills: int,
    rounds: int, serve: bool,
) -> None:  # fmt: skip
    """Times tiles of wide heads."""
    if serve:
        _serve()
        return
    if not torch.cuda.is_available():
        raise click.UsageError("this needs a CUDA device")
    size = Size(heads=heads)
    groups = [candidates(of, d, kind == "one", loops) for of, d, kind in product(passes, dims, kinds)]
    left = set(_without_failures([trial for group in groups for trial in group], jobs, spills))
    with torch.no_grad():
        for group in groups:
            trials = [trial for trial in group if trial in left]
            of, d, one = group[0][:3]
            click.echo(f"\n{of}, D {d}, values {'in keys' if one else 'apart'}: {len(trials)} of {len(group)}")
            if trials:
                click.echo("\n".join(_lines(trials, size, medians(calls_of(trials, size), rounds, 2))))
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
