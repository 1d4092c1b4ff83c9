"""Writes docs/gallery.md and its pictures from anyattn/gallery.py and the library's own source: ``make docs``."""

from __future__ import annotations

import ast
import inspect
import re
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

Written by `make docs` from `anyattn/gallery.py` and the library. Pictures: {SEQLEN} positions in tiles of {TILE}, head 0. Each example
can be pasted and run. Masks compose with `&`, `|` and `~`, scores with `.then`; `create_block_mask(mask, ...)` makes lists of tiles once
for many calls.
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


def snippet(variant: gallery.Variant) -> str:
    """The variant's code with numbers in place of its setting, ending in a call: what can be pasted."""
    body, returned = variant.code.rsplit("return ", 1)
    made = ast.parse(returned.strip(), mode="eval").body
    assert isinstance(made, ast.Call) and ast.unparse(made.func) == "Mods"
    given = dict(zip(("mask_mod", "score_mod"), (ast.get_source_segment(returned.strip(), each) or "" for each in made.args)))
    mods = [f"{name}={given[name]}" for name in ("score_mod", "mask_mod") if given.get(name, "None") != "None"]
    call = f"out = anyattn.flex_attention(q, k, v, {', '.join(mods)})"
    code = re.sub(r"setting\.random\(([^()]*), seed=\d+\)", r"torch.randn(\1)", f"{body}{call}")
    for name, value in (("setting.seqlen", str(SEQLEN)), ("setting.heads", str(HEADS)), (".to(setting.device)", "")):
        code = code.replace(name, value)
    assert "setting" not in code, variant.name
    code = re.sub(r"\n+(?=def )", r"\n\n\n", code)  # as ruff formats it
    code = re.sub(r"(\n    [^\n]*)\n+(?=\w)", r"\1\n\n\n", code)
    library = [name for name in ("masks", "scores") if re.search(rf"\b{name}\.", code)]
    imports = ["import torch", "", "import anyattn", *([f"from anyattn import {', '.join(library)}"] if library else [])]
    return "\n".join([*imports, "", f"q, k, v = torch.randn(3, 1, {HEADS}, {SEQLEN}, 64)", code])


def text() -> str:
    parts = [INTRODUCTION]
    for variant in gallery.VARIANTS.values():
        parts += [f"## {variant.title}", f"`{variant.name}`: {variant.meaning}", f"```python\n{snippet(variant)}\n```"]
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
