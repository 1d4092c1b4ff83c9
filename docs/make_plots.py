"""Draws docs/plots/*.svg from the figures in docs/data/*.json, each of which stands in docs/history: ``make docs``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from anyattn import gallery
from anyattn.cli import bars, pictures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
TIMES = "how many times as fast as the peer (dashed: as fast)"
PEERS = {"flex": "compiled flex_attention", "sdpa": "SDPA", "sdpa-mask": "SDPA, dense mask"}


def data(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / "data" / f"{name}.json").read_text())
    return found


def caption(found: dict[str, Any]) -> str:
    sources = [found, *found.get("sources", {}).values()]
    sections = dict.fromkeys(source["section"].lstrip("# ") for source in sources)
    commits = dict.fromkeys(f"{source['commit']}, {source['date']}" for source in sources)
    return f"{found['with']}; commit {'; '.join(commits)}\ncommand and every figure: docs/history, {'; '.join(sections)}"


def h200() -> Figure:
    """One bar a variant, by backend and pass, with the card and the commit of each panel's figures."""
    found, panels = data("h200"), []
    places = [(row["backend"], row.get("source", "")) for row in found["rows"]]
    for backend, source in dict.fromkeys(places):
        rows = [row for row, place in zip(found["rows"], places, strict=True) if place == (backend, source)]
        groups = [bars.Group(row["variant"], {"anyattn": row["ratio"]}, f"vs {row['peer']}") for row in rows]
        of = found.get("sources", {}).get(source, found)
        heading = f"{backend} ({', '.join(of[name] for name in ('card', 'commit') if name in of)})"
        panels.append(bars.Panel(heading, groups, TIMES if (backend, source) == places[-1] else "", line=1.0, digits=2))
    return bars.chart(panels, ["anyattn"], f"anyattn beside its peers: {found['title']}", caption(found))


def cpu() -> Figure:
    """The gallery's variants, beside each peer, by dtype."""
    found, panels = data("cpu"), []
    for dtype in ("float32", "bfloat16"):
        groups = [
            bars.Group(title(row["variant"]), {f"vs {PEERS[peer]}": ratio for peer, ratio in row["ratios"].items()})
            for row in found["rows"]
            if row["dtype"] == dtype
        ]
        panels.append(bars.Panel(dtype, groups, TIMES, line=1.0, digits=2))
    return bars.chart(panels, [f"vs {peer}" for peer in PEERS.values()], f"anyattn beside its peers: {found['title']}", caption(found))


def title(variant: str) -> str:
    return gallery.VARIANTS[variant].title if variant in gallery.VARIANTS else variant.capitalize()


def main() -> None:
    for name, figure in (("speed", h200), ("cpu", cpu)):
        pictures.save(figure(), HERE / "plots" / f"{name}.svg")


if __name__ == "__main__":
    main()
