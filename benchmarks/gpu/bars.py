"""Bars on an H200: rows of the tables of the Hopper forward pass, the Triton backend and compiled programs."""

from __future__ import annotations

from collections.abc import Callable

from anyattn.testing.harness.case import OURS
from benchmarks.bars import Bar, Found, one, probe, some, versus
from benchmarks.gpu import bars_backward, bars_compiled, bars_triton, bars_wide
from benchmarks.gpu.cases import CAUSAL_SCORES, DENSE, FA3, FLASH_ATTENTION, MASK_VARIANTS, PARTIAL, SCORE_VARIANTS, names_of
from benchmarks.gpu.classes import BIASES

__all__ = ["BARS"]

_VARIANTS = tuple(v for v in (*MASK_VARIANTS, *SCORE_VARIANTS) if v != "head_bias")  # the variants of the peers' table
_BUILT = ("causal", "equal-documents-causal")


def _variant(name: str) -> str:
    return f"variants/{name}/d128/8192"


def _share_of_causal(name: str) -> Bar:
    return Bar(f"{name}, causal, vs our own causal", 0.85, lambda found: versus(found, _variant(name), ["anyattn-causal"]), aim=0.95)


def _mask_bars() -> list[Bar]:
    bars = []
    for seqlen, floor, aim in ((131_072, 5, 20), (8192, 1, 2)):
        for v in _BUILT:
            bars.append(one(f"block mask {v} {seqlen:,} vs compiled create_block_mask", f"masks/{v}/{seqlen}", ("flex-mask",), floor, aim))

    def syncs(found: Found) -> float:
        records = [found.records[name] for name in found.records if name.startswith("masks/")]
        looked = [record.extra["syncs"] for record in records if "syncs" in record.extra]
        if not looked:
            raise KeyError("masks")
        return float(sum(bool(what) for what in looked))

    return [*bars, Bar("block masks whose building waits for the GPU", 0, syncs, at_least=False, unit="cases")]


def _microseconds(contestant: str) -> Callable[[Found], float]:
    return lambda found: found.seconds("host/full/128", contestant) * 1e6


_HOPPER: list[Bar] = [
    *some("dense vs the faster of FA3 and FA4", [case.name for case in DENSE], FLASH_ATTENTION, 0.90, 0.95, 1.03),
    one("GQA 64/8 causal vs FA3", "gqa/causal/d128/8192", FA3, 0.95, 1.05),
    one("varlen documents vs FA3", "varlen/document/d128/8192", FA3, 0.95, 1.05),
    one("varlen documents causal vs FA3", "varlen/document-causal/d128/8192", FA3, 0.95, 1.05),
    one("sliding window 1024 vs FA3", "window/sliding_window/d128/8192", FA3, 0.95, 1.05),
    *some("variants vs flex FLASH", [_variant(v) for v in _VARIANTS], ("flex-flash",), 1.0, 1.2, 1.4),
    *some("mask variants vs cuDNN's interval masks", [_variant(v) for v in MASK_VARIANTS], ("cudnn-fe",), 0.95, None, 1.05),
    *(_share_of_causal(v) for v in CAUSAL_SCORES),
    one("document by block mask vs FA3 varlen", _variant("document"), FA3, 0.95, 1.05),
    one("document-causal by block mask vs FA3 varlen", _variant("document-causal"), FA3, 0.95, 1.05),
    one("T5 bias vs flex FLASH", _variant("t5_bias"), ("flex-flash",), 1.3, 1.7),
    *_mask_bars(),
    *(one(f"{case.variant} vs the faster flex", case.name, ("flex-triton", "flex-flash"), 1.0) for case in PARTIAL),
    *some("odd head dimensions vs FA3, FA4 and cuDNN", names_of("head-dims"), ("cudnn", *FLASH_ATTENTION), 1.0, 1.05, 1.1),
    *some("a bias by table vs the best flex and SDPA", names_of("tables"), BIASES, 1.1, 1.3, 2.0),
    *some("a bias by table, time over our Triton kernel's", names_of("tables"), ("anyattn-triton",), 1.05, is_time=True),
    *some("three-dimensional neighbourhoods vs the best flex", names_of("video"), ("flex-triton", "flex-flash"), 1.2, 1.4, 2.0),
    *some("cross attention to few keys vs cuDNN", names_of("cross"), ("cudnn",), 1.05, 1.1, 1.2),
    Bar("host time of a call of flex_attention", 40, _microseconds(OURS), at_least=False, unit="us", aim=20),
    Bar("host time of a call of flash_attn_func", 40, _microseconds("anyattn-flash"), at_least=False, unit="us", aim=20),
    probe("first call, cold disk cache", "first-call", "cold_s", 5, "s", 2),
    probe("first call, warm disk cache", "first-call", "warm_s", 0.5, "s", 0.2),
    probe("compilations over 1,000 random shapes", "compilations", "random_shapes", 2, ""),
    probe("compilations for a new closure", "compilations", "new_closure", 0, ""),
]
BARS = [*_HOPPER, *bars_backward.BARS, *bars_triton.BARS, *bars_wide.BARS, *bars_compiled.BARS]
