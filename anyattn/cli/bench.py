"""``anyattn bench``: attention with the user's mods at the user's shape, judged and timed beside the installed peers."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from anyattn import gallery
from anyattn.cli import bench_report, limits
from anyattn.cli.loading import errors_of, named_mods
from anyattn.plan import BACKENDS
from anyattn.testing.harness import machine, runner
from anyattn.testing.harness.case import Case, Record, Shape
from anyattn.testing.harness.native import native_options
from anyattn.testing.harness.timing import Limits
from anyattn.testing.harness.variants import Variant

__all__ = ["PEER_NAMES", "command"]

PEER_NAMES = ("sdpa", "sdpa-mask", "sdpa-bias", "flex", "eager", "flash-attn", "fa3", "fa3-pages", "fa4", "cudnn", "fa2")
_PASSES = ("forward", "backward")
_DTYPES = ("float32", "bfloat16", "float16")
_SAMPLES = {"cpu": 0.02, "cuda": 1e-3}  # seconds of work per sample
_LEAST_ROUNDS = 3
_MOST_BYTES = 2**36  # of q, k, v, the output and their gradients


@click.command("bench")
@click.argument("mods", nargs=-1)
@click.option("--batch", default=1, show_default=True, type=click.IntRange(1, 2**16), help="Batch entries.")
@click.option("--heads", default=8, show_default=True, type=limits.HEADS, help="Query heads.")
@click.option("--heads-kv", type=limits.HEADS, help="Key and value heads.  [default: as many as query heads]")
@click.option("--seqlen", "seqlens", multiple=True, default=(2048,), show_default=True, type=limits.SEQLEN, help="Positions (repeatable).")
@click.option("--head-dim", default=64, show_default=True, type=limits.HEAD_DIM, help="Elements per head.")
@click.option("--dtype", type=click.Choice(_DTYPES), help="Of the inputs.  [default: float32, on a GPU bfloat16]")
@click.option("--device", type=click.Choice(("cpu", "cuda")), help="Where.  [default: cuda if there is one]")
@click.option("--backend", type=click.Choice(BACKENDS), help="Insist on one of anyattn's.  [default: its own choice]")
@click.option("--pass", "passes", multiple=True, type=click.Choice(_PASSES), help="Only this pass (repeatable).  [default: both]")
@click.option("--peer", "peers", multiple=True, type=click.Choice(PEER_NAMES), help="Only this peer (repeatable).  [default: all]")
@click.option("--rounds", default=9, show_default=True, type=click.IntRange(3, 1000), help="Interleaved rounds, at most.")
@click.option(
    "--seconds", default=10.0, show_default=True, type=click.FloatRange(0), help="Start no further round of a case after this long."
)
@click.option("--patience", default=5.0, show_default=True, type=click.FloatRange(0), help="CPU: wait so long for other processes to end.")
@click.option("--out", "outs", multiple=True, type=click.Path(path_type=Path), help="Write a plot, .png or .svg (repeatable).")
@click.option(
    "--json",
    "figures",
    type=click.Path(path_type=Path, allow_dash=True, dir_okay=False),
    help="Write all figures; - for stdout.",
)
@click.option("--context", is_flag=True, help="Fit the cost model of plans over several GPUs; --json writes it for 'anyattn plan --costs'.")
@click.option("--ranks", type=click.IntRange(1, 64), help="Processes of --context.  [default: 2, on a GPU one for each]")
def command(
    mods: tuple[str, ...],
    batch: int,
    heads: int,
    heads_kv: int | None,
    seqlens: tuple[int, ...],
    head_dim: int,
    dtype: str | None,
    device: str | None,
    backend: str | None,
    passes: tuple[str, ...],
    peers: tuple[str, ...],
    rounds: int,
    seconds: float,
    patience: float,
    outs: tuple[Path, ...],
    figures: Path | None,
    context: bool,
    ranks: int | None,
) -> int:
    """Time attention with MODS (nothing, a mask, a score mod, or both) at your shape, forward and backward, beside what is installed.

    Each of MODS is a name of the gallery, a call such as 'causal()', or file.py:function. Results are judged against float64 before they
    are timed. Ends with status 1 if anyattn's result is over its error budget, or it could not be timed.

    \b
    anyattn bench causal --seqlen 4096 --heads 16 --heads-kv 4
    anyattn bench my_masks.py:sliding 'softcap(30.0)' --dtype bfloat16 --out speed.svg
    anyattn bench --context --heads 16 --heads-kv 4 --head-dim 128 --seqlen 32768 --json costs.json
    """
    for out in outs:
        if out.suffix.lower() not in (".png", ".svg"):
            raise click.BadParameter(f"--out {out}: the name must end in .png or .svg")
    _check_places(outs, figures)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise click.BadParameter("--device cuda: torch finds no CUDA device here; leave it out to time the CPU, or run 'anyattn doctor'")
    dtype = dtype or ("bfloat16" if device == "cuda" else "float32")
    shapes = [Shape(batch, heads, heads_kv or heads, n, n, head_dim) for n in dict.fromkeys(seqlens)]
    _check_shapes(shapes, dtype)
    if context:
        if mods or outs or len(shapes) != 1 or batch != 1:
            raise click.BadParameter("--context has masks of its own; wanted no mods and no --out, one --seqlen and --batch 1")
        return _fit(shapes[0], dtype, device, rounds, ranks, figures)
    chosen = tuple(peers) or PEER_NAMES
    cases = [
        Case("bench", "flex", _title(mods), shape, chosen, backend, which == "backward", device=device, dtype=dtype)
        for which in _PASSES
        for shape in shapes
        if which in (passes or _PASSES)
    ]
    variants = {shape: _variant(mods, shape, device) for shape in shapes}
    console = Console(stderr=figures is not None and str(figures) == "-")
    records = _timed(cases, variants, Limits(rounds, seconds, _LEAST_ROUNDS, _SAMPLES[device], patience), console)
    _write(records, cases, console, outs, figures)
    return 0 if all(bench_report.is_right(record) for record in records) else 1


def _fit(shape: Shape, dtype: str, device: str, rounds: int, ranks: int | None, figures: Path | None) -> int:
    """The cost model of context parallelism."""
    from anyattn.cli import bench_context

    most = torch.cuda.device_count() if device == "cuda" else 64
    ranks = ranks or min(most, 64 if device == "cuda" else 2)
    if ranks > most:
        raise click.BadParameter(f"--ranks {ranks}: this host has {most} GPUs; wanted at most one process for each")
    setting = bench_context.Setting((shape.heads_q, shape.heads_kv), shape.head_dim, shape.seqlen_q, dtype, device, rounds, ranks)
    found = bench_context.fitted(setting)
    is_stdout = figures is not None and str(figures) == "-"
    console = Console(stderr=is_stdout)
    for line in bench_context.lines(found):
        console.print(line, highlight=False)
    text = json.dumps({"machine": machine.describe("anyattn bench " + " ".join(sys.argv[2:])), **found}, indent=1)
    if is_stdout:
        click.echo(text)
    elif figures is not None:
        figures.parent.mkdir(parents=True, exist_ok=True)
        figures.write_text(text + "\n")
        console.print(f"wrote {figures}", highlight=False)
    return 0


def _title(mods: Sequence[str]) -> str:
    return " + ".join(mods) or "full"


def _check_shapes(shapes: list[Shape], dtype: str) -> None:
    for shape in shapes:
        if shape.heads_q % shape.heads_kv:
            way_out = f"a multiple of --heads-kv, such as --heads {2 * shape.heads_kv}"
            raise click.BadParameter(f"--heads {shape.heads_q} --heads-kv {shape.heads_kv}: wanted {way_out}")
        elements = shape.batch * shape.head_dim * (3 * shape.heads_q * shape.seqlen_q + 4 * shape.heads_kv * shape.seqlen_k)
        needed = 2 * elements * getattr(torch, dtype).itemsize
        if needed > _MOST_BYTES:
            raise click.BadParameter(
                f"{shape} needs {needed >> 30} GiB for the tensors and their gradients; wanted at most {_MOST_BYTES >> 30} GiB: "
                "fewer positions, heads or batch entries"
            )


def _variant(names: Sequence[str], shape: Shape, device: str) -> Variant:
    """The mods named by ``names`` at one shape, with FlashAttention's equivalent options if there are any."""
    setting = gallery.Setting(shape.seqlen_k, shape.heads_q, device)
    mods = gallery.Mods()
    for name in names:
        found = named_mods(name, setting)
        if found.mask is not None and mods.mask is not None:
            raise click.BadParameter(f"{name!r} is a second mask; wanted at most one: compose them, 'causal() & document(...)'")
        if found.score is not None and mods.score is not None:
            raise click.BadParameter(f"{name!r} is a second score mod; wanted at most one: chain them with .then in a file")
        mods = gallery.Mods(found.mask or mods.mask, found.score or mods.score)
    with errors_of(_title(names)):
        if mods.mask is not None:
            limits.check_mask(mods.mask, (shape.seqlen_q, shape.seqlen_k))
        try:
            native = native_options(mods, shape.seqlen_k, device)
        except RuntimeError as error:  # torch's error for tensors on two devices
            way_out = f"what a mod captures must be on {device}: make it there, or name another --device"
            raise click.BadParameter(f"{_title(names)}: {error}; {way_out}") from error
    return Variant(lambda _: mods, native)


def _timed(cases: list[Case], variants: dict[Shape, Variant], limit: Limits, console: Console) -> list[Record]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    each = 1 + len(cases[0].contestants) * (2 + limit.rounds)  # per contestant: preparation, trial and every round
    records = []
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("bench", total=each * len(cases))
        for number, case in enumerate(cases):

            def watch(name: str, case: Case = case) -> None:
                what = f"{bench_report.pass_of(case)} S{case.shape.seqlen_q}"
                progress.update(task, advance=1, description=f"{what}: {name or 'inputs'}")

            records.append(_record(case, variants[case.shape], limit, watch))
            progress.update(task, completed=each * (number + 1))
    return records


def _record(case: Case, variant: Variant, limit: Limits, watch: Any) -> Record:
    try:
        return runner.run_case(case, limit, watch=watch, variant=variant)
    except Exception as error:  # the other cases still run
        return runner.refused(case, error)


def _check_places(outs: tuple[Path, ...], figures: Path | None) -> None:
    """Raises for unusable output paths before anything is timed."""
    given = [("--out", out) for out in outs] + [("--json", figures)] * (figures is not None and str(figures) != "-")
    for option, path in given:
        above = next(folder for folder in path.absolute().parents if folder.exists())  # type: ignore[union-attr]
        if path.is_dir() or not above.is_dir() or not os.access(above, os.W_OK):  # type: ignore[union-attr]
            raise click.BadParameter(f"{option} {path}: no file can be written there; name one in a folder that you may write to")


def _write(records: list[Record], cases: list[Case], console: Console, outs: tuple[Path, ...], figures: Path | None) -> None:
    where = machine.describe("anyattn bench " + " ".join(sys.argv[2:]))
    if cases[0].device == "cuda":
        where["gpu"] = torch.cuda.get_device_name()
    for line in bench_report.lines(records, cases, where):
        console.print(line, highlight=False)
    try:
        if figures is not None:
            text = json.dumps({"machine": where, "cases": [record.as_json() for record in records]}, indent=1)
            if str(figures) == "-":
                click.echo(text)
            else:
                figures.parent.mkdir(parents=True, exist_ok=True)
                figures.write_text(text + "\n")
        if outs and any(record.timings for record in records):
            from anyattn.cli import pictures

            pictures.save(bench_report.plot(records, cases, where), *outs)
    except (ImportError, OSError) as error:
        raise click.ClickException(str(error)) from error
    for path in (*outs, *([figures] if figures is not None and str(figures) != "-" else [])):
        if path.exists():
            console.print(f"wrote {path}", highlight=False)
