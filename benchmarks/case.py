"""What a benchmark is about: shapes, cases, and what was measured of them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["OTHER_JOB", "OURS", "Case", "Record", "Shape", "Timing"]

OURS = "anyattn"
_PRODUCTS = {"forward": 2, "backward": 5, "mask": 0, "documents": 2, "decode": 2}  # matrix products of each kind
OTHER_JOB = ("anyattn-full",)  # contenders whose result is another case's: judged there, and of other FLOPs


@dataclass(frozen=True)
class Shape:
    batch: int = 1
    heads_q: int = 8
    heads_kv: int = 8
    seqlen_q: int = 4096
    seqlen_k: int = 4096
    head_dim: int = 64

    @classmethod
    def square(cls, seqlen: int, heads: int = 8, head_dim: int = 64, batch: int = 1) -> Shape:
        return cls(batch, heads, heads, seqlen, seqlen, head_dim)

    def __str__(self) -> str:
        heads = f"H{self.heads_q}" if self.heads_q == self.heads_kv else f"H{self.heads_q}/{self.heads_kv}"
        length = f"S{self.seqlen_q}" if self.seqlen_q == self.seqlen_k else f"S{self.seqlen_q}x{self.seqlen_k}"
        return f"B{self.batch} {heads} {length} D{self.head_dim}"


@dataclass(frozen=True)
class Case:
    """One thing to time. kind: forward, backward, mask (building a block mask), documents or decode (``sequences.py``).

    peers: names in ``peers.PEERS``, or of the calls of a case of sequences, besides anyattn.

    dtype: a torch dtype's name, empty for masks. device: where it runs, which also decides the clock.
    """

    group: str
    kind: str
    variant: str
    peers: tuple[str, ...]
    shape: Shape = field(default_factory=Shape)
    dtype: str = "float32"
    device: str = "cpu"
    rounds: int | None = None  # fewer for the long ones

    def __post_init__(self) -> None:
        if self.kind not in _PRODUCTS:
            raise ValueError(f"kind={self.kind!r} is not one of {', '.join(_PRODUCTS)}")

    @property
    def name(self) -> str:
        """group/variant/S/dtype: what filters and bars look for."""
        length = str(self.shape.seqlen_q)
        return "/".join(p for p in (self.group, self.variant, length, self.dtype) if p)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def flops(self, pairs: int) -> int:
        """Floating-point operations of the matrix products over ``pairs`` unmasked (query, key) pairs of all batch entries and heads.

        Forward: two products; backward: five (the scores again, dV, dP, dQ, dK), as FlashAttention counts.
        """
        return _PRODUCTS[self.kind] * 2 * self.shape.head_dim * pairs


@dataclass(frozen=True)
class Timing:
    """Seconds per call, one number a round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a part of the median."""
        if len(self.seconds) < 4:
            return (max(self.seconds) - min(self.seconds)) / 2 / self.median
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / 2 / self.median


@dataclass
class Record:
    """What came of a case. budget: contender -> share of its error budget. refused: why nothing was timed. extra: other figures."""

    case: str
    group: str
    kind: str
    variant: str
    dtype: str
    shape: str
    timings: dict[str, Timing] = field(default_factory=dict)
    budget: dict[str, float] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    refused: str | None = None
    flops: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, case: Case) -> Record:
        return cls(case.name, case.group, case.kind, case.variant, case.dtype, str(case.shape))

    @classmethod
    def from_json(cls, figures: dict[str, Any]) -> Record:
        """The record that ``as_json`` gave ``figures`` of."""
        plain = dict(figures)
        contenders = plain.pop("contenders")
        return cls(**plain, timings={name: Timing(tuple(c["rounds_s"])) for name, c in contenders.items()})

    @property
    def is_quiet(self) -> bool:
        """Timed, and in rounds during which nothing else ran."""
        return bool(self.timings) and not self.extra.get("disturbed_used", False)

    def ratio(self, peer: str) -> float:
        """How many times as fast as ``peer`` anyattn was, in this run."""
        return self.timings[peer].median / self.timings[OURS].median

    def as_json(self) -> dict[str, Any]:
        contenders = {
            name: {
                "median_s": t.median,
                "spread": t.spread,
                "rounds_s": list(t.seconds),
                "gflops": self.flops / t.median / 1e9 if self.flops and name not in OTHER_JOB else None,
                "anyattn_is_times_as_fast": self.ratio(name) if OURS in self.timings else None,
            }
            for name, t in self.timings.items()
        }
        plain = {k: v for k, v in vars(self).items() if k not in ("timings",)}
        return {**plain, "contenders": contenders}
