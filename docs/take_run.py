"""Writes docs/data/h200.json, which the front page's plot shows, from a run of the GPU benchmark: ``python docs/take_run.py OUT.json``.

Paste the run's OUT.md into a page of docs/history too: every plotted figure must stand there (``tests/project/test_docs.py``), and each
bar's newest measurement in docs/measured.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from anyattn.cli.bench_report import best_peer
from anyattn.testing.harness.case import OURS, Record

TARGET = Path(__file__).resolve().parent / "data" / "h200.json"
GROUPS = ("variants", "gqa", "window", "varlen", "backward")
NAMES = {
    "fa2": "FlashAttention 2",
    "fa3": "FlashAttention 3",
    "fa3-pages": "FlashAttention 3",
    "fa4": "FlashAttention 4",
    "cudnn": "cuDNN",
    "cudnn-fe": "cuDNN's interval masks",
    "flex-triton": "flex_attention, TRITON",
    "flex-flash": "flex_attention, FLASH",
}


def row(record: Record) -> dict[str, Any] | None:
    """One bar: anyattn beside the fastest peer that did the same job; None where there is none, or anyattn's result is wrong."""
    record.timings = {name: t for name, t in record.timings.items() if name == OURS or name in NAMES}
    peer = best_peer(record)
    if peer is None or OURS not in record.timings or record.budget.get(OURS, 0.0) > 1:
        return None
    variant = record.variant.replace("_", " ").replace("-", " + ")
    grouped = ", GQA" if "/" in record.shape.split(" ")[1] else ""
    form = {"window": ", by option", "varlen": ", packed"}.get(record.group, "")
    which = "backward" if record.group == "backward" else "forward"
    forward, _, last = str(record.extra.get("backend", "")).partition(" + ")  # of a backward pass "forward's + backward's"
    backend = (last or forward) if which == "backward" else forward
    return {
        "variant": f"{variant}{grouped}{form}",
        "peer": NAMES[peer],
        "backend": f"{backend.capitalize()}, {which}",
        "ratio": round(record.ratio(peer), 2),
        "case": record.case,
    }


def taken(run: dict[str, Any]) -> dict[str, Any]:
    """What docs/data/h200.json holds of a run's figures."""
    machine = run["machine"]
    found = (row(Record.from_json(case)) for case in run["cases"] if case["group"] in GROUPS)
    rows = [each for each in found if each is not None]
    if not rows:
        raise SystemExit(f"none of the groups {', '.join(GROUPS)} was timed beside a peer in this run")
    return {
        "title": f"{machine['gpu']}, bfloat16",
        "commit": machine["commit"],
        "date": machine["date"].split(" ")[0],
        "section": f"## {machine['date']}, commit {machine['commit']}",
        "command": machine["command"],
        "with": ", ".join(f"{name} {version}" for name, version in machine["versions"].items()),
        "rows": sorted(rows, key=lambda each: each["backend"]),
    }


if __name__ == "__main__":
    TARGET.write_text(json.dumps(taken(json.loads(Path(sys.argv[1]).read_text())), indent=2) + "\n")
