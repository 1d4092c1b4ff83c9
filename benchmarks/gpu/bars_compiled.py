"""Bars of compiled calls and of the compiled training step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.bars import Bar, Found, probe
from benchmarks.gpu.gpt.contestants import REPLACED
from benchmarks.gpu.gpt.measure import ratio
from benchmarks.gpu.gpt.report import FLASH, PEER

__all__ = ["BARS"]

_OURS = {"anyattn": "", "anyattn-forward": ", mask made in forward", REPLACED: ", replaced flex"}
_STEPS = 20
_OVER_FLASH = {"8k": (1.0, 0.95), "32k": (0.97, 0.90)}  # of a step's time: at most, and the aim


def _figures(found: Found, size: str, who: str) -> dict[str, Any]:
    """The contestant's figures. Raises ``KeyError`` if its first step was not tried."""
    figures = found.probes[f"gpt-{size}"]["contestants"][who]
    if "first_s" not in figures and not str(figures.get("error", "")).startswith("first"):
        raise KeyError(who)
    return figures


def _over(size: str, who: str, key: str) -> Callable[[Found], float]:
    return lambda found: _figures(found, size, who)[key] / _figures(found, size, PEER)[key]


def _is_full(size: str, who: str) -> Callable[[Found], float]:
    """1 if the first step ran, compiled by torch.compile as a whole, without graph breaks; else 0."""
    return lambda found: float("first_s" in (mine := _figures(found, size, who)) and not mine.get("breaks", 0))


def _graphs(size: str, who: str) -> Callable[[Found], float]:
    def graphs(found: Found) -> float:
        mine = _figures(found, size, who)
        if mine["steps"] < _STEPS:
            raise KeyError("too few steps")
        return mine["graphs"]

    return graphs


def _of_size(size: str, who: str) -> list[Bar]:
    name = f"compiled GPT {size}{_OURS[who]}"

    def most(title: str, most: float, measure: Callable[[Found], float], unit: str = "x") -> Bar:
        return Bar(f"{name}: {title}", most, measure, at_least=False, unit=unit)

    def share(found: Found) -> float:
        return max(_figures(found, size, who)["budget"].values())

    passed_on = [most("calls passed on to torch's own", 0, lambda found: _figures(found, size, who)["passed_on"], "")]
    return [
        *(passed_on if who == REPLACED else []),
        Bar(f"{name}: fullgraph", 1, _is_full(size, who), unit=""),
        most(f"graphs over {_STEPS} steps", 1, _graphs(size, who), ""),
        most("first step, time over compiled flex's", 1.0, _over(size, who, "first_s")),
        most("peak memory over compiled flex's", 1.05, _over(size, who, "peak_bytes")),
        most("step, time over compiled flex TRITON's", 1.0, lambda found: ratio(found.probes[f"gpt-{size}"], who, PEER)),
        most("waits for the device in a step", 0, lambda found: _figures(found, size, who)["waits"], ""),
        most("losses and gradients, share of their budget", 1.0, share),
    ]


def _over_flash(size: str) -> Bar:
    most, aim = _OVER_FLASH[size]
    name = f"compiled GPT {size}: step, time over compiled flex FLASH's"
    return Bar(name, most, lambda found: ratio(found.probes[f"gpt-{size}"], "anyattn", FLASH), at_least=False, aim=aim)


_HOST = "compiled-call"
BARS: list[Bar] = [
    *map(_over_flash, _OVER_FLASH),
    *(bar for size in ("8k", "32k") for who in _OURS for bar in _of_size(size, who)),
    probe("compiled call, host time over compiled flex's", _HOST, "over_flex", 1.0, "x"),
    probe("compiled call with a block mask, host time over compiled flex's", _HOST, "mask_over_flex", 1.0, "x"),
    probe("replaced flex call, host time beyond a direct one", _HOST, "replaced_extra_us", 10, "us"),
    probe("compiled replaced flex call, host time beyond a direct one", _HOST, "compiled_replaced_extra_us", 10, "us"),
]
