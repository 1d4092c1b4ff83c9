"""What has to be reached on an H200, as data: the rows of the Hopper forward's table, read from a run's records."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from benchmarks.bars import Bar, Found
from benchmarks.case import OURS
from benchmarks.gpu.cases import CAUSAL_SCORES, DENSE, FA3, FLASH_ATTENTION, MASK_VARIANTS, SCORE_VARIANTS
from benchmarks.gpu.runner import GpuRecord, is_wrong
from benchmarks.runner import geometric_mean

__all__ = ["BARS", "versus"]

_VARIANTS = tuple(v for v in (*MASK_VARIANTS, *SCORE_VARIANTS) if v != "head_bias")  # the variants of the peers' table
_BUILT = ("causal", "equal-documents-causal")


def _variant(name: str) -> str:
    return f"variants/{name}/d128/8192"


def versus(found: Found, case: str, peers: Iterable[str], mine: str = OURS) -> float:
    """How many times as fast as the fastest of ``peers`` that did the same job. ``KeyError`` if none was timed, or anyattn was not."""
    record = found.record(case)
    assert isinstance(record, GpuRecord)
    timed = [p for p in peers if p in record.timings and not is_wrong(record, p)]
    if mine not in record.timings or not timed:
        raise KeyError(case)
    return min(record.ratio_of(mine, peer) for peer in timed)


def _all(found: Found, cases: Iterable[str], peers: Iterable[str]) -> dict[str, float]:
    """The ratios of those cases that have one. Raises ``KeyError`` if none has."""
    ratios: dict[str, float] = {}
    for case in cases:
        try:
            ratios[case] = versus(found, case, peers)
        except KeyError:
            continue
    if not ratios:
        raise KeyError(next(iter(cases)))
    return ratios


def _some(name: str, cases: list[str], peers: tuple[str, ...], each: float, mean: float | None, aim: float | None) -> list[Bar]:
    """Bars on the worst case and on the geometric mean; each says of how many of its cases."""

    def count(found: Found) -> str:
        measured = len(_all(found, cases, peers))
        return "" if measured == len(cases) else f"{measured} of {len(cases)} cases"

    def worst(found: Found) -> str:
        by_case = _all(found, cases, peers)
        return ", ".join(part for part in (min(by_case, key=lambda case: by_case[case]), count(found)) if part)

    def ratios(found: Found) -> list[float]:
        return list(_all(found, cases, peers).values())

    least = Bar(f"{name}, worst", each, lambda found: min(ratios(found)), aim=None if mean else aim, note=worst)
    if mean is None:
        return [least]
    return [Bar(f"{name}, geometric mean", mean, lambda found: geometric_mean(ratios(found)), aim=aim, note=count), least]


def _one(name: str, case: str, peers: tuple[str, ...], floor: float, aim: float) -> Bar:
    return Bar(name, floor, lambda found: versus(found, case, peers), aim=aim)


def _share_of_causal(name: str) -> Bar:
    return Bar(f"{name}, causal, vs our own causal", 0.85, lambda found: versus(found, _variant(name), ["anyattn-causal"]), aim=0.95)


def _mask_bars() -> list[Bar]:
    bars = []
    for seqlen, floor, aim in ((131_072, 5, 20), (8192, 1, 2)):
        for v in _BUILT:
            bars.append(_one(f"block mask {v} {seqlen:,} vs compiled create_block_mask", f"masks/{v}/{seqlen}", ("flex-mask",), floor, aim))

    def syncs(found: Found) -> float:
        records = [found.records[name] for name in found.records if name.startswith("masks/")]
        looked = [record.extra["syncs"] for record in records if "syncs" in record.extra]
        if not looked:
            raise KeyError("masks")
        return float(sum(bool(what) for what in looked))

    return [*bars, Bar("block masks whose building waits for the GPU", 0, syncs, at_least=False, unit="cases")]


def _microseconds(contestant: str) -> Callable[[Found], float]:
    return lambda found: found.record("host/full/128").timings[contestant].median * 1e6


def _probe(name: str, probe: str, key: str, most: float, unit: str, aim: float | None = None) -> Bar:
    return Bar(name, most, lambda found: found.probes[probe][key], at_least=False, unit=unit, aim=aim)


BARS: list[Bar] = [
    *_some("dense vs the faster of FA3 and FA4", [case.name for case in DENSE], FLASH_ATTENTION, 0.90, 0.95, 1.03),
    _one("GQA 64/8 causal vs FA3", "gqa/causal/d128/8192", FA3, 0.95, 1.05),
    _one("varlen documents vs FA3", "varlen/document/d128/8192", FA3, 0.95, 1.05),
    _one("varlen documents causal vs FA3", "varlen/document-causal/d128/8192", FA3, 0.95, 1.05),
    _one("sliding window 1024 vs FA3", "window/sliding_window/d128/8192", FA3, 0.95, 1.05),
    *_some("variants vs flex FLASH", [_variant(v) for v in _VARIANTS], ("flex-flash",), 1.0, 1.2, 1.4),
    *_some("mask variants vs cuDNN's interval masks", [_variant(v) for v in MASK_VARIANTS], ("cudnn-fe",), 0.95, None, 1.05),
    *(_share_of_causal(v) for v in CAUSAL_SCORES),
    _one("document by block mask vs FA3 varlen", _variant("document"), FA3, 0.95, 1.05),
    _one("document-causal by block mask vs FA3 varlen", _variant("document-causal"), FA3, 0.95, 1.05),
    _one("T5 bias vs flex FLASH", _variant("t5_bias"), ("flex-flash",), 1.3, 1.7),
    *_mask_bars(),
    Bar("host time of a call of flex_attention", 40, _microseconds(OURS), at_least=False, unit="us", aim=20),
    Bar("host time of a call of flash_attn_func", 40, _microseconds("anyattn-flash"), at_least=False, unit="us", aim=20),
    _probe("first call, cold disk cache", "first-call", "cold_s", 5, "s", 2),
    _probe("first call, warm disk cache", "first-call", "warm_s", 0.5, "s", 0.2),
    _probe("compilations over 1,000 random shapes", "compilations", "random_shapes", 2, ""),
    _probe("compilations for a new closure", "compilations", "new_closure", 0, ""),
]
