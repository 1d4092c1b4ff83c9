"""``anyattn explain``: what anyattn makes of a mod, and how a call with it would be run."""

from __future__ import annotations

import click
import torch

from anyattn import gallery
from anyattn.cli.loading import named_mods
from anyattn.errors import BackendError, ModError
from anyattn.explanation import explain

__all__ = ["command"]

_DTYPES = ("float32", "float64", "bfloat16", "float16")


@click.command("explain")
@click.argument("mod")
@click.option("--seqlen", default=2048, show_default=True, type=click.IntRange(1), help="Queries and keys of the call.")
@click.option("--heads", default=8, show_default=True, type=click.IntRange(1), help="Query heads.")
@click.option("--head-dim", default=64, show_default=True, type=click.IntRange(1), help="Elements per head.")
@click.option("--dtype", default="float32", show_default=True, type=click.Choice(_DTYPES), help="Of the inputs.")
@click.option("--backend", help="Insist on a backend.")
def command(mod: str, seqlen: int, heads: int, head_dim: int, dtype: str, backend: str | None) -> None:
    """Explain MOD, a name of the gallery, a call such as 'causal()', or file.py:function: its program and what each line
    depends on, the row ranges of a mask, its key, what it captured, the plan and the reasons.
    """
    mods = named_mods(mod, gallery.Setting(seqlen, heads))
    # nothing is computed, so one number stands for all
    q = torch.zeros(1, dtype=getattr(torch, dtype)).expand(1, heads, seqlen, head_dim)
    try:
        text = str(explain(q, q, q, mods.score, mask_mod=mods.mask, backend=backend))
    except (ModError, BackendError, ValueError, TypeError, IndexError) as error:
        raise click.BadParameter(f"{mod}: {error}") from error
    click.echo(text)
