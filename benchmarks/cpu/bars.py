"""Bars of the CPU benchmark."""

from __future__ import annotations

from collections.abc import Callable

from anyattn.testing.harness.case import OURS
from benchmarks.bars import Bar, Found, geometric_mean, one, probe, some
from benchmarks.cpu.cases import BUSY, GALLERY, SMALL, TABLES

__all__ = ["BARS"]


def _ratios(found: Found, dtype: str) -> dict[str, float]:
    """The ratios of the gallery's variants: all of them or none."""
    return {v: found.ratio(f"forward/{v}/4096/{dtype}", "flex") for v in GALLERY}


def _versus(group: str, variant: str, dtype: str, floor: float, aim: float | None) -> Bar:
    return Bar(
        f"{group} {variant} {dtype} vs SDPA",
        floor,
        lambda found: found.ratio(f"{group}/{variant}/4096/{dtype}", "sdpa"),
        aim=aim,
    )


def _worst_note(dtype: str) -> Callable[[Found], str]:
    def note(found: Found) -> str:
        ratios = _ratios(found, dtype)
        return min(ratios, key=lambda name: ratios[name])

    return note


def _gallery(dtype: str, each: float, mean: float) -> list[Bar]:
    name = f"gallery forward {dtype} vs compiled flex"
    return [
        Bar(f"{name}, worst", each, lambda found: min(_ratios(found, dtype).values()), note=_worst_note(dtype)),
        Bar(f"{name}, geometric mean", mean, lambda found: geometric_mean(_ratios(found, dtype).values())),
    ]


def _window(dtype: str) -> Bar:
    def over_share(found: Found) -> float:
        record = found.record(f"window/window-512/16384/{dtype}")
        return record.timings[OURS].median / (record.timings["anyattn-full"].median * record.extra["tile_share"])

    return Bar(f"window 512 at S=16,384 {dtype}, time over its share of tiles", 1.25, over_share, at_least=False)


def _mask_ratio(variant: str) -> Callable[[Found], float]:
    return lambda found: found.ratio(f"masks/{variant}/32768", "flex-mask")


def _mask_seconds(variant: str) -> Callable[[Found], float]:
    return lambda found: found.seconds(f"masks/{variant}/131072")


def _long_mask(variant: str, key: str) -> Callable[[Found], float]:
    return lambda found: found.probes["long-masks"][variant][key]


def _mask_bars() -> list[Bar]:
    bars = []
    for v in ("causal", "document-causal"):
        bars += [
            Bar(f"mask {v} 32,768 vs compiled create_block_mask", 20, _mask_ratio(v)),
            Bar(f"mask {v} 131,072", 0.5, _mask_seconds(v), at_least=False, unit="s"),
            Bar(f"mask {v} 1,048,576", 15, _long_mask(v, "seconds"), at_least=False, unit="s"),
            Bar(
                f"mask {v} 1,048,576 peak memory",
                2048,
                _long_mask(v, "peak_extra_mib"),
                at_least=False,
                unit="MiB",
            ),
        ]
    return bars


def _sequence_bars() -> list[Bar]:
    bars = []
    for d in ("float32", "bfloat16"):
        documents, decode = f"sequences/documents/16384/{d}", f"sequences/decode/1/{d}"
        bars += [
            Bar(f"64 documents, causal, {d} vs SDPA on the padded batch", 3, lambda found, c=documents: found.ratio(c, "sdpa-padded")),
            Bar(
                f"64 documents {d}, time over one call a document",
                1.15,
                lambda found, c=documents: 1 / found.ratio(c, "per-document"),
                at_least=False,
            ),
            Bar(f"decode 16 x 8,192 keys, 32/8 heads, {d} vs SDPA enable_gqa", 1.5, lambda found, c=decode: found.ratio(c, "sdpa-gqa")),
            *(
                Bar(
                    f"decode {d}, pages of {n} over contiguous",
                    1.3,
                    lambda found, c=decode, n=n: found.ratio(c, f"paged-{n}"),
                    at_least=False,
                )
                for n in (128, 16)
            ),
        ]
    for stored in ("contiguous", "paged"):
        for batch in (1, 16):
            bars.append(probe(f"host time of a decode call, batch {batch}, {stored}", "decode-host", f"batch {batch}, {stored}", 300, "us"))
    for heads in (8, 2):
        for what, most in (("append", 120), ("window 128", 150), ("flex_attention", 120)):
            name = f"batch 1, 8/{heads} heads, {what}"
            step = lambda found, name=name: found.probes["decode-step"][name]["us"]
            bars.append(Bar(f"decode call over 512 keys, {name}", most, step, at_least=False, unit="us"))
    lists = lambda found: found.probes["ragged-lists"]["causal"]["lists_s"]
    return [*bars, Bar("block lists of 1,000 sequences, causal", 1, lists, at_least=False, unit="s")]


def _table_bars() -> list[Bar]:
    bars = []
    for group in dict.fromkeys(case.group for case in TABLES):
        names = [case.name for case in TABLES if case.group == group]
        bars += some(f"{group.replace('-', ' ')} vs SDPA with a dense mask or bias", names, ("sdpa-mask", "sdpa-bias"), 0.8)
        if group == "tables":
            bars += some("tables vs compiled flex", names, ("flex",), 0.9)
    return bars


def _busy_bar(count: int) -> Bar:
    def factors(found: Found) -> dict[str, float]:
        return {case.name: found.probes["busy"][f"{case.name}, {count} busy"]["over_sdpa"] for case in BUSY}

    return Bar(
        f"beside {count} busy, time over idle relative to SDPA's, worst",
        1.3,
        lambda found: max(factors(found).values()),
        at_least=False,
        note=lambda found: max(factors(found).items(), key=lambda item: item[1])[0],
    )


BARS: list[Bar] = [
    _versus("forward", "full", "float32", 0.9, 1.0),
    _versus("forward", "causal", "float32", 0.9, 1.0),
    _versus("forward", "full", "bfloat16", 1.8, 2.5),
    _versus("forward", "causal", "bfloat16", 1.5, 1.8),
    *_gallery("float32", 1.0, 1.3),
    *_gallery("bfloat16", 1.2, 2.0),
    _versus("backward", "full", "float32", 0.9, None),
    _versus("backward", "causal", "float32", 0.9, None),
    _versus("backward", "full", "bfloat16", 1.3, None),
    _versus("backward", "causal", "bfloat16", 1.3, None),
    *(one(f"{c.group} small causal {c.dtype} vs SDPA", c.name, ("sdpa",), 0.9) for c in SMALL),
    *_table_bars(),
    *(_busy_bar(count) for count in (1, 2)),
    _window("float32"),
    _window("bfloat16"),
    probe("peak extra memory, S=65,536 H1 window 512, forward + backward", "memory", "peak_extra_mib", 300 * 1e6 / 2**20, "MiB"),
    *_mask_bars(),
    probe("first call with a new mod", "first-call", "worst", 0.5, "s"),
    probe("very first call of a process", "first-call", "very_first", 0.5, "s"),
    probe("extra host time of a new closure", "closure", "extra_ms", 1.0, "ms"),
    probe("import anyattn beyond torch", "import", "package_s", 1.0, "s"),
    probe("import anyattn and reach flex_attention, beyond torch", "import", "with_flex_attention_s", 1.0, "s"),
    *_sequence_bars(),
]
