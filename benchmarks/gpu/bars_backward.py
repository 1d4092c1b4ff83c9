"""Bars of the Hopper backward pass on an H200."""

from __future__ import annotations

from anyattn.testing.harness.case import OURS
from anyattn.testing.harness.peers import PRODUCT_SIZE
from benchmarks.bars import Bar, Found, one, probe, some, versus
from benchmarks.gpu.cases import BESIDE_A_PRODUCT, CAUSAL_SCORES, DETERMINISTIC, MASK_VARIANTS, SCORE_VARIANTS, names_of
from benchmarks.gpu.classes import BIASES

__all__ = ["BARS"]

_FA4, _FLEX = ("fa4",), ("flex-triton", "flex-flash", "cudnn-fe")
_TABLE = [v for v in (*MASK_VARIANTS, *SCORE_VARIANTS) if v != "head_bias"]  # the variants of the peers' table
_LEARNING = {"head_bias": ("(H,)", 1.2), "t5_bias": ("(H, S)", 1.3), "pair_bias": ("(B, H, S, S)", 1.6), "bucket_bias": ("(32, H)", 1.3)}


def _variant(name: str) -> str:
    return f"variants-backward/{name}/d128/8192"


def _share_of_causal(name: str) -> Bar:
    def share(found: Found) -> float:
        rates = [found.record(case).flops / found.seconds(case) for case in (_variant(name), _variant("causal"))]
        return rates[0] / rates[1]

    return Bar(f"backward, {name}: rate over causal's", 0.85, share, aim=0.95)


def _share_of_product(found: Found) -> float:
    return found.record(BESIDE_A_PRODUCT).flops / (2 * PRODUCT_SIZE**3) * versus(found, BESIDE_A_PRODUCT, ["matrix-product"])


def _captured_bars() -> list[Bar]:
    bars = []
    for name in names_of("captured-backward"):
        shape, most = _LEARNING[name.split("/")[1]]
        bars += some(f"backward with a captured {shape} gradient, time over that without", [name], ("anyattn-frozen",), most, is_time=True)
    return bars


_FIXED = [_variant(v) for v in DETERMINISTIC]
BARS: list[Bar] = [
    *some("dense backward vs the faster of FA4 and cuDNN", names_of("dense-backward"), ("cudnn", *_FA4), 0.93, 1.0, 1.08),
    Bar("backward, D128 S16k full: rate over that of a matrix product", 0.80, _share_of_product, aim=0.85),
    *(one(f"backward, {name}, vs FA4", name, _FA4, 1.0, 1.1) for name in names_of("dims-backward")),
    *some("variants' backward vs the best flex", [_variant(v) for v in _TABLE], _FLEX, 1.0, 1.15, 1.3),
    one("backward, T5 bias, vs the best flex", _variant("t5_bias"), _FLEX, 1.5),
    *(_share_of_causal(v) for v in CAUSAL_SCORES),
    *(one(f"backward, {name}, vs FA4", name, _FA4, 1.0, 1.15) for name in (*names_of("native-backward"), *names_of("packed-backward"))),
    *(one(f"backward, {name}, vs the best flex", name, _FLEX, 1.0, 1.5) for name in names_of("partial-backward")),
    *some("backward of few K/V heads vs FA4", names_of("few-heads-backward"), _FA4, 1.0, 1.05, 1.1),
    *some("backward of short ragged sequences vs FA4 and cuDNN", names_of("short-backward"), ("cudnn", *_FA4), 0.97, 1.0, 1.1),
    *some("backward of odd head dimensions vs cuDNN", names_of("head-dims-backward"), ("cudnn",), 1.0, 1.05, 1.1),
    *some("backward with a bias by table vs the best flex and SDPA", names_of("tables-backward"), BIASES, 1.1, 1.3, 2.0),
    *some("backward with a learned bias vs the best flex and SDPA", names_of("tables-learned-backward"), BIASES, 1.1, 1.3, 2.0),
    *some("backward of three-dimensional neighbourhoods vs the best flex", names_of("video-backward"), _FLEX, 1.2, 1.4, 2.0),
    *some("deterministic backward, time over the default's", _FIXED, (OURS,), 1.10, mine="anyattn-deterministic", is_time=True),
    *_captured_bars(),
    probe("first backward call, cold disk cache", "training-call", "cold_s", 6, "s"),
    probe("first backward call, warm disk cache", "training-call", "warm_s", 0.5, "s"),
    probe("host time of a call of flex_attention and its backward pass", "training-call", "host_us", 70, "us"),
]
