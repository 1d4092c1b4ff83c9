"""``python -m benchmarks.gpu.gpt``: the compiled training step by itself."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import torch

from benchmarks.bars import Found
from benchmarks.gpu.gpt import report
from benchmarks.gpu.gpt.measure import Limits, chosen, measured, processes
from benchmarks.gpu.gpt.model import SIZES

__all__ = ["run"]


def run(
    name: str,
    folder: Path,
    who: str | None = None,
    limits: Limits | None = None,
    device: str = "cuda",
    caches: Path | None = None,
    backend: str = "inductor",
) -> dict[str, Any]:
    """The figures of one size; figures, profiles and logs are written to the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    size, limits = SIZES[name], limits or Limits()

    def save(figures: dict[str, Any]) -> None:
        (folder / "figures.json").write_text(json.dumps(figures, indent=1) + "\n")
        (folder / "tables.md").write_text("\n".join([*report.tables(name, figures), "", *report.kernels(figures)]) + "\n")

    def echo(line: str) -> None:
        click.echo(line)
        sys.stdout.flush()

    with ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory(ignore_cleanup_errors=True)))  # compilers' processes may still write there
        start = processes(size, device, backend, folder, scratch, limits.hang, caches, stack)
        return measured(size, chosen(who), start, scratch, limits, save, echo)


@click.command(context_settings={"show_default": True})
@click.option("--size", "names", multiple=True, type=click.Choice(list(SIZES)), help="8k and 32k, unless named.")
@click.option("--tiny", is_flag=True, help="The tiny size on the CPU, by aot_eager: shows that all of it works.")
@click.option("--backend", help="torch.compile's; inductor, or aot_eager for the tiny size.")
@click.option("--who", help="Of the peers only those in whose name this regular expression finds something.")
@click.option("--seconds", default=180.0, help="Begin nothing more of a size after this long.")
@click.option("--hang", default=120.0, help="A question that takes a contestant longer (its first step, say) ends it.")
@click.option("--rounds", default=5, type=click.IntRange(1), help="Interleaved rounds of four timed steps.")
@click.option("--caches", type=click.Path(path_type=Path), help="Keep compilers' caches here: a second run's first steps are then warm.")
@click.option("--out", default="bench-out/gpt", type=click.Path(path_type=Path), help="A folder for tables, figures, profiles, logs.")
def main(
    names: tuple[str, ...],
    tiny: bool,
    backend: str | None,
    who: str | None,
    seconds: float,
    hang: float,
    rounds: int,
    caches: Path | None,
    out: Path,
) -> None:
    """Train a compiled GPT on new documents every step, by anyattn and by flex attention."""
    if not tiny and not torch.cuda.is_available():
        raise click.UsageError("this needs a CUDA device; --tiny works without one")
    from benchmarks.gpu.bars import BARS  # imported here, because they read figures of everything
    from benchmarks.report import bar_lines

    found, device = Found({}, {}), "cpu" if tiny else "cuda"
    backend = backend or ("aot_eager" if tiny else "inductor")
    for name in ("tiny",) if tiny else names or ("8k", "32k"):
        click.echo(f"gpt-{name}: {SIZES[name]}")
        figures = run(name, out / name, who, Limits(rounds, hang=hang, seconds=seconds), device, caches, backend)
        found.probes[f"gpt-{name}"] = figures
        click.echo("\n".join(report.tables(f"gpt-{name}", figures)))
    click.echo("\n".join(bar_lines(found, BARS)))


if __name__ == "__main__":
    main()
