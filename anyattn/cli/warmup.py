"""``anyattn warmup``: compiles common kernels into the disk cache in advance, several at a time."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import click
from rich.console import Console

__all__ = ["command"]

_HEAD_DIMS = ("64", "128", "256")
_MASKS = ("full", "causal", "window")
_DTYPES = ("bfloat16", "float16")
_LAYOUTS = ("whole", "packed", "grouped")
_WORDS = {"whole": "", "packed": ", packed", "grouped": ", grouped"}
_GROUPS = (4, 8)  # heads that share row tiles: for ratios up to 4, and for larger ones


@dataclass(frozen=True)
class _Variant:
    mask: str
    head_dim: int
    dtype: str
    layout: str
    has_lse: bool  # as in training

    def __str__(self) -> str:
        return f"{self.mask} D {self.head_dim} {self.dtype}{_WORDS[self.layout]}{', lse' if self.has_lse else ''}"


@click.command("warmup")
@click.option("--head-dim", "head_dims", multiple=True, type=click.Choice(_HEAD_DIMS), help="Only this one (may be repeated).")
@click.option("--mask", "masks", multiple=True, type=click.Choice(_MASKS), help="Only this one (may be repeated).")
@click.option("--dtype", "dtypes", multiple=True, default=_DTYPES[:1], type=click.Choice(_DTYPES), help="bfloat16 by default.")
@click.option("--layout", "layouts", multiple=True, type=click.Choice(_LAYOUTS), help="Only this one (may be repeated).")
@click.option("--arch", type=click.Choice(("sm_90a",)), help="Compile for this GPU; needs no GPU in this machine.")
@click.option("--jobs", default=0, type=click.IntRange(0), help="Processes at a time; 0, the default, is one for each core.")
def command(
    head_dims: tuple[str, ...], masks: tuple[str, ...], dtypes: tuple[str, ...], layouts: tuple[str, ...], arch: str | None, jobs: int
) -> int:
    """Compile the common kernels of the Hopper backend into the disk cache: full, causal and window, with and without lse; for whole
    batches, for packed sequences (with int32 cu_seqlens; and the kernel that makes their tables), and grouped: few queries, with the 4 or 8
    query heads that share a key head in one tile.

    Kernels that are in the cache already are not compiled again. The code that launches them is made for this machine's type of processor:
    on another type, run this command again.
    """
    _check(arch)
    dims = [int(d) for d in head_dims or _HEAD_DIMS]
    every = itertools.product(masks or _MASKS, dims, dict.fromkeys(dtypes), layouts or _LAYOUTS, (False, True))
    variants = [_Variant(*v) for v in every]
    console, started, failed = Console(), time.perf_counter(), 0
    # with fork, a child of a process whose torch runs threads may hang
    context = multiprocessing.get_context("spawn")
    workers = min(len(variants), jobs or len(os.sched_getaffinity(0)))
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        try:
            waiting = {pool.submit(_compile, variant): variant for variant in variants}
            for future in as_completed(waiting):
                error = future.exception()
                failed += error is not None
                text = f"[red]failed[/]: {error}" if error is not None else f"{future.result():.1f} s"
                console.print(f"{waiting[future]}: {text}", highlight=False, soft_wrap=True)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    seconds = time.perf_counter() - started
    console.print(f"{len(variants) - failed} of {len(variants)} kernels ready, {seconds:.1f} s", highlight=False)
    return 1 if failed else 0


def _check(arch: str | None) -> None:
    """Raises with the reason if kernels cannot be compiled or cached."""
    import importlib.util

    import torch

    from anyattn import disk_cache
    from anyattn.backends.hopper.compile import build

    if not disk_cache.is_on():
        raise click.ClickException("ANYATTN_CACHE=0 turns the disk cache off, so that no kernel would be stored: leave it unset")
    reason = disk_cache.why_not(disk_cache.default_folder())
    if reason is not None:
        raise click.ClickException(reason)
    if importlib.util.find_spec("cutlass") is None or not build.has_tvm_ffi():
        raise click.ClickException("compiling needs nvidia-cutlass-dsl and apache-tvm-ffi: pip install 'anyattn[cute]'")
    if arch is None and not (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)):
        raise click.ClickException("there is no Hopper GPU here; pass --arch sm_90a to compile for one without it")


def _compile(variant: _Variant) -> float:
    """Compiles a variant's kernels in a separate process; returns the seconds taken."""
    import torch

    from anyattn import planner
    from anyattn.backends import repeater_of
    from anyattn.backends.hopper.compile import launch
    from anyattn.hardware import Hardware

    started = time.perf_counter()
    torch.set_num_threads(1)
    hardware = Hardware("cuda", "Hopper", 0, frozenset((torch.bfloat16, torch.float16, torch.float32)), (9, 0), 132)
    with launch.compiling_only():
        for problem in _packed_problems(variant) if variant.layout == "packed" else _whole_problems(variant):
            repeater_of(problem, planner.choose(problem, hardware, "hopper")).forward(problem)
    return time.perf_counter() - started


def _whole_problems(variant: _Variant) -> list[Any]:
    """Calls on whole batches by both entry points, whose windows have different forms; tensors are on the CPU, since nothing runs."""
    import torch

    from anyattn import masks
    from anyattn.mods.tracing.trace import trace
    from anyattn.problem import Problem
    from anyattn.validate.flash import Options, dense_problem

    mask = {"full": None, "causal": masks.causal(), "window": masks.sliding_window(128, 0)}[variant.mask]
    predicates = () if mask is None else (trace(mask, "mask"),)
    k, found = torch.zeros(1, 1, 64, variant.head_dim, dtype=getattr(torch, variant.dtype), device="cpu"), []
    for heads, rows in ((n, 2) for n in _GROUPS) if variant.layout == "grouped" else ((1, 64),):
        q = k.new_zeros(1, heads, rows, variant.head_dim)
        found.append(Problem(q=q, k=k, v=k, scale=1.0, predicates=predicates, wants_lse=variant.has_lse))
        if variant.mask == "window":
            options = Options(window_size=(16, 0), return_lse=variant.has_lse)
            found.append(dense_problem(q.transpose(1, 2), k.transpose(1, 2), k.transpose(1, 2), options))
    return found


def _packed_problems(variant: _Variant) -> list[Any]:
    """Calls on packed sequences whose tables stay on the GPU: with one cu_seqlens for queries and keys, and with two."""
    import torch

    from anyattn.sequences.unread_varlen import LengthTables
    from anyattn.validate.flash import Options, problem_of
    from anyattn.validate.sequences import offset_unread, unread_sequences

    packed, ends = (
        torch.zeros(64, 1, variant.head_dim, dtype=getattr(torch, variant.dtype), device="cpu"),
        torch.tensor([0, 64], dtype=torch.int32, device="cpu"),
    )
    window = (16, 0) if variant.mask == "window" else (-1, -1)
    options = Options(causal=variant.mask == "causal", window_size=window, return_lse=variant.has_lse)
    found = []
    for ends_k in (ends,) if variant.mask == "full" else (ends, ends.clone()):
        sequences = unread_sequences(packed, packed, LengthTables(ends, ends_k, None, None), (None, None), None)
        found.append(problem_of(packed, packed, packed, sequences, options, offset_unread(sequences, False)))
    return found
