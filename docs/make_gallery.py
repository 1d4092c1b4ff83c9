"""Writes docs/gallery.md and its pictures from anyattn/gallery.py and the library's own source: ``make docs``."""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path

import numpy as np
import torch

from anyattn import gallery
from anyattn.cli import pictures, tiles
from anyattn.mods import masks, scores

HERE = Path(__file__).resolve().parent
SEQLEN, TILE, HEADS = 512, 64, 4
INTRODUCTION = f"""# Gallery of mods

Written by `make docs` from `anyattn/gallery.py` and the library. Pictures: {SEQLEN} positions in tiles of {TILE}, head 0.
`setting` holds the sequence length and the number of heads. Masks compose with `&`, `|` and `~`, scores with `.then`; pass them as
`flex_attention(q, k, v, score_mod=..., mask_mod=...)`, or build `create_block_mask(mask, ...)` once for many calls.
"""


def score_panel(variant: gallery.Variant, mods: gallery.Mods) -> pictures.Panel:
    """What the score mod adds to 0 by place, or what it makes of a score where it is no bias by place."""
    score = mods.score
    assert score is not None
    place = (torch.tensor(0), torch.tensor(0), torch.arange(SEQLEN)[:, None], torch.arange(SEQLEN))
    added = torch.as_tensor(score(torch.zeros(()), *place)).expand(SEQLEN, SEQLEN).numpy().copy()
    if np.ptp(added) > 0:
        if mods.mask is not None:
            added[~mods.mask(*place).expand(SEQLEN, SEQLEN).numpy()] = np.nan
        return pictures.HeatPanel(variant.title, added, "added to a score of 0 by head 0; grey: masked")
    line = torch.linspace(-6, 6, 121)
    curves = {f"head {h}": score(line, torch.tensor(0), torch.tensor(h), place[3][5], place[3][1]).numpy() for h in range(HEADS)}
    if all(np.array_equal(curve, curves["head 0"]) for curve in curves.values()):
        curves = {"every head": curves["head 0"]}
    return pictures.CurvePanel(variant.title, line.numpy(), curves, "a score before and after")


def panels(variant: gallery.Variant) -> list[pictures.Panel]:
    mods = variant.mods(gallery.Setting(SEQLEN, HEADS))
    found: list[pictures.Panel] = []
    if mods.mask is not None:
        found.append(tiles.panel(variant.title if mods.score is None else "Its mask", mods.mask, (SEQLEN,) * 2, (TILE,) * 2))
    if mods.score is not None:
        found.append(score_panel(variant, mods))
    return found


def text() -> str:
    parts = [INTRODUCTION]
    for variant in gallery.VARIANTS.values():
        parts += [f"## {variant.title}", f"`{variant.name}`: {variant.meaning}", f"```python\n{variant.code}\n```"]
        parts.append(f"![{variant.title}](gallery/{variant.name}.svg)\n")
    parts.append("## The whole library")
    for module, title in ((masks, "`anyattn.masks`"), (scores, "`anyattn.scores`")):
        parts += [f"### {title}", "| call | meaning |\n|---|---|\n" + "\n".join(library_row(module, name) for name in module.__all__)]
    return "\n\n".join(parts) + "\n"


def library_row(module: object, name: str) -> str:
    function = getattr(module, name)
    meaning = textwrap.dedent(inspect.getdoc(function) or "").splitlines()[0].replace("|", "\\|")
    arguments = ", ".join(inspect.signature(function).parameters)
    return f"| `{name}({arguments})` | {meaning} |"


def main() -> None:
    (HERE / "gallery.md").write_text(text())
    for variant in gallery.VARIANTS.values():
        pictures.save(pictures.figure(panels(variant)), HERE / "gallery" / f"{variant.name}.svg")


if __name__ == "__main__":
    main()
