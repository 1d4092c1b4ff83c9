"""``anyattn explain``: the traced program and structure of a mod, and the plan of a call with it."""

from __future__ import annotations

import importlib.util

import click
import torch

from anyattn import gallery
from anyattn.cli import limits
from anyattn.cli.loading import errors_of, named_mods
from anyattn.errors import BackendError
from anyattn.explanation import explain, triton_source
from anyattn.validate import flex

__all__ = ["command"]

_DTYPES = ("float32", "float64", "bfloat16", "float16")


@click.command("explain")
@click.argument("mod")
@click.option("--seqlen", default=2048, show_default=True, type=limits.SEQLEN, help="Queries and keys of the call.")
@click.option("--heads", default=8, show_default=True, type=limits.HEADS, help="Query heads.")
@click.option("--head-dim", default=64, show_default=True, type=limits.HEAD_DIM, help="Elements per head.")
@click.option("--dtype", default="float32", show_default=True, type=click.Choice(_DTYPES), help="Of the inputs.")
@click.option("--backend", help="Insist on a backend.")
def command(mod: str, seqlen: int, heads: int, head_dim: int, dtype: str, backend: str | None) -> None:
    """Explain MOD, a name of the gallery, a call such as 'causal()', or file.py:function: its program and what each line
    depends on, the row ranges of a mask, its key, what it captured, the plan and the reasons.
    """
    mods = named_mods(mod, gallery.Setting(seqlen, heads))
    # nothing is computed, so an expanded scalar stands for all tensors
    q = torch.zeros(1, dtype=getattr(torch, dtype), device="cpu").expand(1, heads, seqlen, head_dim)
    try:
        with errors_of(mod):
            text = str(explain(q, q, q, mods.score, mask_mod=mods.mask, backend=backend))
    except BackendError as error:
        if backend != "triton" or importlib.util.find_spec("triton") is None:
            raise click.BadParameter(f"{mod}: {error}") from error
        # the code that would be generated for a GPU can be read without one
        problem = flex.flex_problem(q, q, q, mods.score, None, mods.mask, None, None, False, None, False, False, False)
        text = f"{error}\n\nwhat it would write for this call:\n\n{triton_source(problem)}"
    click.echo(text)
