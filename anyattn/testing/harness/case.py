"""Benchmark cases: shapes, cases, and records of their measurements."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["KINDS", "LARGEST_DIFFERENCE", "OTHER_FLOPS", "OURS", "Case", "Record", "Shape", "Timing"]

OURS = "anyattn"
KINDS = ("flex", "flash", "varlen", "decode", "mask")
OTHER_FLOPS = ("anyattn-full", "matrix-product")  # contestants that compute other products than the case
LARGEST_DIFFERENCE = 2e-2  # relative RMS up to which two bfloat16 results count as the same computation
_FORWARD_PRODUCTS = (1, 1)  # products with q's head dimension, and with v's
_BACKWARD_PRODUCTS = (3, 2)  # S again, dQ, dK; dP, dV: as FlashAttention counts


@dataclass(frozen=True)
class Shape:
    batch: int = 1
    heads_q: int = 8
    heads_kv: int = 8
    seqlen_q: int = 4096
    seqlen_k: int = 4096
    head_dim: int = 64
    head_dim_v: int | None = None  # None: equal to head_dim

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @classmethod
    def square(cls, seqlen: int, heads: int = 8, head_dim: int = 64, batch: int = 1) -> Shape:
        return cls(batch, heads, heads, seqlen, seqlen, head_dim)

    def __str__(self) -> str:
        heads = f"H{self.heads_q}" if self.heads_q == self.heads_kv else f"H{self.heads_q}/{self.heads_kv}"
        length = f"S{self.seqlen_q}" if self.seqlen_q == self.seqlen_k else f"S{self.seqlen_q}x{self.seqlen_k}"
        return f"B{self.batch} {heads} {length} D{self.width}"

    @property
    def width(self) -> str:
        """The head dimension, followed by v's if it differs."""
        return str(self.head_dim) if self.value_dim == self.head_dim else f"{self.head_dim}-{self.head_dim_v}"


@dataclass(frozen=True)
class Case:
    """One call to time.

    kind: the anyattn function that is timed: flex, flash, varlen, decode (``flash_attn_with_kvcache``) or mask (``create_block_mask``).
    variant: a name in ``variants.VARIANTS[device]``. peers: names in ``peers.PEERS``. backend: the one that anyattn's contestant requires,
    None for its own choice. is_backward: times the gradients of q, k and v after an untimed forward pass. learns: also those of the score
    mod's tensors. is_host_time: times how long the call takes to return, without the device's work.
    device: cpu or cuda, which decides the clock and the variant's sizes. dtype: a torch dtype's name, empty for masks. rounds: a smaller
    number for long cases. names_shape: the name has all sizes.
    """

    group: str
    kind: str
    variant: str
    shape: Shape = Shape()
    peers: tuple[str, ...] = ()
    backend: str | None = None
    is_backward: bool = False
    learns: bool = False
    is_host_time: bool = False
    device: str = "cpu"
    dtype: str = "float32"
    rounds: int | None = None
    names_shape: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind={self.kind!r} is not one of {', '.join(KINDS)}")
        if self.device not in ("cpu", "cuda"):
            raise ValueError(f"device={self.device!r} must be 'cpu' or 'cuda'")

    @property
    def name(self) -> str:
        """The name matched by ``--filter``, ``--only`` and bars. CPU: group/variant/S/dtype. GPU: group/variant/D/S, for decoding its
        sizes, with ``names_shape`` group/variant/ and all sizes, on the CPU followed by the dtype."""
        shape = self.shape
        if self.names_shape:
            sizes = str(shape).lower().replace(" ", "-").replace("/", "-")
            return "/".join((self.group, self.variant, sizes, *([self.dtype] if self.device == "cpu" else [])))
        if self.device == "cpu":
            return "/".join(part for part in (self.group, self.variant, str(shape.seqlen_q), self.dtype) if part)
        if self.kind == "decode":
            return f"{self.group}/b{shape.batch}-h{shape.heads_q}-{shape.heads_kv}-s{shape.seqlen_k}"
        width = f"d{shape.width}/" if not (self.kind == "mask" or self.is_host_time) else ""
        heads = "-gqa" if shape.heads_q != shape.heads_kv and self.group != "gqa" else ""
        return f"{self.group}/{self.variant}{heads}/{width}{shape.seqlen_q}"

    @property
    def contestants(self) -> tuple[str, ...]:
        return (OURS, *self.peers)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def products(self) -> tuple[int, int]:
        """Matrix products per visible pair: with q's head dimension, and with v's; (0, 0) if products do not dominate the time."""
        if self.kind == "mask" or self.is_host_time or self.bytes:
            return 0, 0
        return _BACKWARD_PRODUCTS if self.is_backward else _FORWARD_PRODUCTS

    @property
    def bytes(self) -> int:
        """Bytes of the keys and values to be read if reading them dominates the time, as in decoding on a GPU; else 0."""
        shape = self.shape
        if self.kind != "decode" or self.device == "cpu" or shape.seqlen_q > 1:
            return 0
        return self.torch_dtype.itemsize * shape.batch * shape.seqlen_k * shape.heads_kv * (shape.head_dim + shape.value_dim)

    def flops(self, pairs: int) -> int:
        """Operations of the matrix products over ``pairs`` visible (query, key) pairs of all batch entries and heads."""
        of_keys, of_values = self.products
        return 2 * (of_keys * self.shape.head_dim + of_values * self.shape.value_dim) * pairs


@dataclass(frozen=True)
class Timing:
    """Seconds per call, one number per round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the interquartile range, relative to the median."""
        if len(self.seconds) < 4:
            return (max(self.seconds) - min(self.seconds)) / 2 / self.median
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / 2 / self.median


@dataclass
class Record:
    """The measurements of a case.

    timings: the n-th numbers of all contestants come from one round. budget: contestant -> share of its error budget against float64.
    difference: contestant -> relative RMS between its result and anyattn's. refused: the reason if nothing was timed. extra: other figures.
    """

    case: str
    group: str
    kind: str
    variant: str
    dtype: str
    shape: str
    timings: dict[str, Timing] = field(default_factory=dict)
    budget: dict[str, float] = field(default_factory=dict)
    difference: dict[str, float] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    refused: str | None = None
    flops: int = 0
    extra: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, case: Case) -> Record:
        return cls(case.name, case.group, case.kind, case.variant, case.dtype, str(case.shape))

    @classmethod
    def from_json(cls, figures: dict[str, Any]) -> Record:
        """The record from the ``figures`` that ``as_json`` returned."""
        plain = dict(figures)
        contenders = plain.pop("contenders")
        return cls(**plain, timings={name: Timing(tuple(c["rounds_s"])) for name, c in contenders.items()})

    @property
    def is_quiet(self) -> bool:
        """Whether the case was timed in rounds without other busy processes."""
        return bool(self.timings) and not self.extra.get("disturbed_used", False)

    def differs(self, name: str) -> bool:
        """Whether a contestant's result differs from anyattn's, so that it did not compute the same thing."""
        return name in self.difference and not self.difference[name] <= LARGEST_DIFFERENCE

    def ratio(self, peer: str, mine: str = OURS) -> float:
        """anyattn's speed relative to ``peer``: the median over rounds of the ratio within a round."""
        rounds = zip(self.timings[mine].seconds, self.timings[peer].seconds)
        return statistics.median(theirs / ours for ours, theirs in rounds)

    def as_json(self) -> dict[str, Any]:
        contenders = {
            name: {
                "median_s": t.median,
                "spread": t.spread,
                "rounds_s": list(t.seconds),
                "gflops": self.flops / t.median / 1e9 if self.flops and name not in OTHER_FLOPS else None,
                "anyattn_is_times_as_fast": self.ratio(name) if OURS in self.timings else None,
            }
            for name, t in self.timings.items()
        }
        plain = {k: v for k, v in vars(self).items() if k not in ("timings",)}
        return {**plain, "contenders": contenders}
