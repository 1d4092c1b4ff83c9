"""Bars of the Triton backend on an H200."""

from __future__ import annotations

from anyattn.testing.harness.case import OURS
from anyattn.testing.harness.decode import EIGHT_BITS
from anyattn.testing.harness.peers import PAGED_SPLITS, SPLITS
from benchmarks.bars import Bar, one, probe, some
from benchmarks.gpu.cases import BACKWARD, DECODE, DECODE_8_BITS, FA2, GRADIENTS, MASK_VARIANTS, SCORE_VARIANTS
from benchmarks.host_time import SERVING_BARS

__all__ = ["BARS"]

_TRITON, _FLEX = "anyattn-triton", ("flex-triton",)
_TABLE = [v for v in (*MASK_VARIANTS, *SCORE_VARIANTS) if v != "head_bias"]  # the variants of the peers' table, and grouped heads
_FORWARD = [*(f"variants/{v}/d128/8192" for v in _TABLE), "gqa/causal/d128/8192"]
_BACKWARD = [case.name for case in BACKWARD if case.variant in _TABLE]
_HARD = {"t5_bias": "T5 bias", "softcap": "softcap"}
_DECODE = [case.name for case in DECODE]
_LEARNING = {"head_bias": ("(H,)", 1.3), "t5_bias": ("(H, S)", 1.5), "pair_bias": ("(B, H, S, S)", 2.0), "bucket_bias": ("(32, H)", 1.5)}


def _fa2(group: str) -> list[str]:
    return [case.name for case in FA2 if case.group == group]


def _decode_bars() -> list[Bar]:
    bars = some("decode, share of the copy bandwidth", _DECODE, ("copy",), 0.85)
    bars += some("decode with a score mod, share of the copy bandwidth", _DECODE, ("copy",), 0.80, mine="anyattn-alibi")
    for size in (64, 16):
        bars += some(f"decode, pages of {size}, time over contiguous", _DECODE, (OURS,), 1.05, mine=f"anyattn-paged-{size}", is_time=True)
    bars += some("decode, chosen splits, time over the best of 1 to 32", _DECODE, SPLITS, 1.05, is_time=True)
    name = "decode from pages of 16, chosen splits, time over the best of 1 to 32"
    return bars + some(name, _DECODE, PAGED_SPLITS, 1.05, mine="anyattn-paged-16", is_time=True)


def _eight_bit_bars() -> list[Bar]:
    """Caches of 8 bits at 32k keys: 1.8 times the speed of bfloat16's, which reads at 0.9 of a copy's bandwidth, is 1.6 times a copy's."""
    case, bars = [DECODE_8_BITS[0].name], []
    for name, (dtype, form, page_size, has_score) in EIGHT_BITS.items():
        stored = str(dtype).removeprefix("torch.") + (f" in pages of {page_size}" if page_size else "") + " with a score mod" * has_score
        least = 1.3 if has_score else 1.6
        bars += some(f"decode from {stored}, scales: {form}, vs a copy of the keys in bfloat16", case, ("copy",), least, mine=name)
    return bars


def _learning_bars() -> list[Bar]:
    bars = []
    for case in GRADIENTS:
        shape, most = _LEARNING[case.variant]
        name = f"backward with the gradient of a captured {shape} bias, time over that without"
        bars += some(name, [case.name], ("anyattn-frozen",), most, is_time=True)
    return bars


def _memory_bars() -> list[Bar]:
    bars = []
    for function in ("flex", "varlen"):
        name = f"memory of 60,000 tokens forward and backward, {function}"
        bars.append(probe(f"{name}: largest allocation over a gradient's", "memory", f"{function}_largest", 1.0, "x"))
        bars.append(probe(f"{name}: peak over output, gradients, statistics", "memory", f"{function}_peak", 1.02, "x"))
    return bars


def _host_bars() -> list[Bar]:
    return [
        probe(f"host time of a warm call, {name}", "serving-call", figure, most, "us", aim)
        for figure, (name, most, aim) in SERVING_BARS.items()
    ]  # fmt: skip


BARS: list[Bar] = [
    *some("Triton forward vs flex TRITON", _FORWARD, _FLEX, 1.0, 1.15, mine=_TRITON),
    *(one(f"Triton forward, {name}, vs flex TRITON", f"variants/{v}/d128/8192", _FLEX, 1.3, mine=_TRITON) for v, name in _HARD.items()),
    *some("Triton backward vs flex TRITON", _BACKWARD, _FLEX, 1.0, 1.15),
    *(one(f"Triton backward, {name}, vs flex TRITON", f"backward/{v}/d128/8192", _FLEX, 1.3) for v, name in _HARD.items()),
    *some("Triton dense forward vs FA2", _fa2("fa2"), ("fa2",), 1.4),
    *some("Triton dense backward vs FA2", _fa2("fa2-backward"), ("fa2",), 1.2),
    *_decode_bars(),
    *_host_bars(),
    probe("appending to an 8-bit cache over appending to bf16, longest", "appending", "ratio", 1.0, "x"),
    *_eight_bit_bars(),
    *_learning_bars(),
    *_memory_bars(),
    probe("Triton: compilations over 1,000 random shapes", "compilations-triton", "random_shapes", 2, ""),
    probe("Triton: compilations for a new closure", "compilations-triton", "new_closure", 0, ""),
]
