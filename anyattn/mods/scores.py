"""Library of score mods, each written once in the mod language. Every function returns a ``Score``, which chains with ``then``.

The score that a mod receives is already scaled. Float tensors given here receive gradients.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from anyattn.mods.algebra import Score
from anyattn.mods.float32_scores import check_held
from anyattn.mods.kept_tables import kept_table
from anyattn.mods.tracing.pickling import remade_by_call
from anyattn.mods.tracing.pure_names import add_pure_names

__all__ = [
    "alibi",
    "alibi_slopes",
    "disentangled",
    "forget_gate",
    "head_bias",
    "pair_bias",
    "relative_bias",
    "softcap",
    "t5_bias",
    "temperature",
]
add_pure_names(__all__)


def _floats(name: str, value: Any, ranks: tuple[int, ...], shape: str) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} is a {type(value).__name__}; wanted a float tensor of shape {shape}")
    if value.ndim not in ranks or not value.is_floating_point():
        raise ValueError(f"{name} has shape {tuple(value.shape)} and dtype {value.dtype}; wanted a float tensor of shape {shape}")
    return value


def _divisor(name: str, value: Any) -> float | Tensor:
    if isinstance(value, Tensor):
        return _floats(name, value, (0,), "()")
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; wanted a positive number")
    if not 0 < value <= 1.7976931348623157e308:  # the largest float64
        raise ValueError(f"{name}={value!r}; wanted a positive finite number")
    check_held(name, float(value), is_divisor=True, way_out="for inputs of float64 a tensor of that dtype and rank 0")
    return float(value)


def alibi_slopes(num_heads: int, device: torch.device | str | None = None) -> Tensor:
    """ALiBi's slopes, float32 (num_heads,): the geometric series 2^(-8/n), 2^(-16/n), ... for n a power of two.

    For other counts, the slopes of the next smaller power of two n, then every second one of 2n. device: as of ``torch.tensor``.
    Source: ALiBi (arXiv:2108.12409).

    >>> alibi_slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    if isinstance(num_heads, bool) or not isinstance(num_heads, int):
        raise TypeError(f"num_heads={num_heads!r} is a {type(num_heads).__name__}; wanted an int")
    if num_heads < 1:
        raise ValueError(f"num_heads={num_heads}; wanted at least 1")
    power = 2 ** int(math.log2(num_heads))

    def series(n: int) -> list[float]:
        return [2.0 ** (-8.0 * (i + 1) / n) for i in range(n)]

    return torch.tensor(series(power) + series(2 * power)[0::2][: num_heads - power], dtype=torch.float32, device=device)


@remade_by_call
def alibi(slopes: Tensor, offset: int | Tensor = 0) -> Score:
    """Linear bias by distance, ``score - slopes[h] * |q_idx + offset - kv_idx|``. slopes: (Hq,) or (B, Hq), see ``alibi_slopes``.

    offset: the first query's position among the keys, one int or an integer tensor (B,) with one per batch entry.
    Source: ALiBi (arXiv:2108.12409); the absolute value extends it to keys after the query, as in FlashAttention.
    """
    _floats("slopes", slopes, (1, 2), "(Hq,) or (B, Hq)")
    if isinstance(offset, Tensor):
        if slopes.ndim == 2:
            return Score(lambda score, b, h, q_idx, kv_idx: score - slopes[b, h] * (q_idx + offset[b] - kv_idx).abs(), "alibi")
        return Score(lambda score, b, h, q_idx, kv_idx: score - slopes[h] * (q_idx + offset[b] - kv_idx).abs(), "alibi")
    if slopes.ndim == 2:
        return Score(lambda score, b, h, q_idx, kv_idx: score - slopes[b, h] * (q_idx + offset - kv_idx).abs(), "alibi")
    if offset:
        return Score(lambda score, b, h, q_idx, kv_idx: score - slopes[h] * (q_idx + offset - kv_idx).abs(), "alibi")
    return Score(lambda score, b, h, q_idx, kv_idx: score - slopes[h] * (q_idx - kv_idx).abs(), "alibi")


@remade_by_call
def relative_bias(table: Tensor) -> Score:
    """A learned bias per clipped distance: ``score + table[h, clamp(q_idx - kv_idx, -m, m) + m]``.

    table: (2m + 1,) or (Hq, 2m + 1). Source: Shaw et al. (arXiv:1803.02155), as a bias on the score.
    """
    _floats("table", table, (1, 2), "(2m + 1,) or (Hq, 2m + 1)")
    if table.shape[-1] % 2 == 0:
        raise ValueError(f"table has {table.shape[-1]} distances; wanted an odd number 2m + 1, from -m to m")
    reach = table.shape[-1] // 2
    if table.ndim == 1:
        return Score(lambda score, b, h, q_idx, kv_idx: score + table[torch.clamp(q_idx - kv_idx, -reach, reach) + reach], "relative_bias")
    return Score(lambda score, b, h, q_idx, kv_idx: score + table[h, torch.clamp(q_idx - kv_idx, -reach, reach) + reach], "relative_bias")


@remade_by_call
def t5_bias(table: Tensor, bidirectional: bool = True, max_distance: int = 128) -> Score:
    """T5's bucketed relative bias: near distances have a bucket each, far ones share buckets that grow geometrically to ``max_distance``.

    table: (buckets, Hq), as in T5's checkpoints. bidirectional: half the buckets for keys after the query (encoder); otherwise keys after
    the query share bucket 0 (decoder). Source: T5 (arXiv:1910.10683), section 2.1.
    """
    _floats("table", table, (2,), "(buckets, Hq)")
    buckets = table.shape[0] // 2 if bidirectional else table.shape[0]
    exact = buckets // 2
    if exact < 1:
        raise ValueError(f"table has {table.shape[0]} buckets; wanted at least {4 if bidirectional else 2}")
    if isinstance(max_distance, bool) or not isinstance(max_distance, int) or max_distance <= exact:
        raise ValueError(f"max_distance={max_distance!r}; wanted an int above {exact}, the distances with a bucket of their own")
    growth = (buckets - exact) / math.log(max_distance / exact)
    inverse = 1.0 / exact if exact & (exact - 1) == 0 else None  # of a power of two: the same product, and cheaper

    def biased(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        behind = q_idx - kv_idx  # positive: the key lies before the query
        distance = behind.abs() if bidirectional else torch.clamp(behind, min=0)
        relative = torch.clamp(distance, min=1).to(torch.float32)
        relative = relative / exact if inverse is None else relative * inverse
        far = exact + (torch.log(relative) * growth).to(torch.int64)
        bucket = torch.where(distance < exact, distance, torch.clamp(far, max=buckets - 1))
        if bidirectional:
            bucket = bucket + torch.where(behind < 0, buckets, 0)
        return score + table[bucket, h]

    return Score(biased, "t5_bias")


@remade_by_call
def forget_gate(cumulative: Tensor) -> Score:
    """Data-dependent decay by forget gates, ``score + (c[b, h, q_idx] - c[b, h, kv_idx])``: the sum of log gates from key to query.

    cumulative: c, float (B, Hq, S) over queries and keys of one sequence, the running sum of the logarithm of a gate in (0, 1) for each
    position: ``torch.nn.functional.logsigmoid(gates).cumsum(-1)``. Keep it in float32: it grows with the position, and the difference of
    two entries is what counts. It receives gradients. Meant for a causal mask; later keys would gain. Raises ``TypeError`` or
    ``ValueError`` for other than a float tensor of three dimensions. Source: Forgetting Transformer (arXiv:2503.02130).

    >>> c = torch.nn.functional.logsigmoid(torch.zeros(1, 2, 8)).cumsum(-1)  # every gate is 1/2
    >>> round(float(forget_gate(c)(torch.tensor(0.0), 0, 0, 5, 2) / math.log(0.5)), 4)
    3.0
    """
    c = _floats("cumulative", cumulative, (3,), "(B, Hq, S)")
    return Score(lambda score, b, h, q_idx, kv_idx: score + (c[b, h, q_idx] - c[b, h, kv_idx]), "forget_gate")


@remade_by_call
def disentangled(c2p: Tensor, p2c: Tensor, max_distance: int | None = None, p2c_by_query: bool = False) -> Score:
    """DeBERTa's disentangled attention: adds content-to-position and position-to-content products, chosen by the relative position.

    ``score + c2p[b, h, q_idx, place(q_idx - kv_idx)] + p2c[b, h, kv_idx, place(kv_idx - q_idx)]``, where ``place(d)`` is ``d + k`` clamped
    to 0 <= place < 2k. c2p: float (B, Hq, Sq, 2k), the queries times the projected relative positions; p2c: float (B, Hq, Sk, 2k), the keys
    times theirs; both multiplied by the scale, 1/sqrt(3D) in DeBERTa, which is passed to the call too. Both receive gradients.

    max_distance: None: every distance below k has a place of its own. An int: DeBERTa-v2's and v3's buckets; distances up to k // 2 have
    a place of their own, and farther ones share places that grow geometrically up to ``max_distance`` (k is ``position_buckets``,
    max_distance ``max_relative_positions``). p2c_by_query: reads ``p2c[b, h, kv_idx, place(q_idx - kv_idx)]``, as DeBERTa's published code
    does, and so what its checkpoints were trained with; the default is the paper's equation. Raises ``TypeError`` or ``ValueError`` naming
    the argument. Source: DeBERTa (arXiv:2006.03654), equation 4, and DeBERTaV3 (arXiv:2111.09543).

    >>> c2p, p2c = torch.arange(4.0).expand(1, 1, 9, 4), torch.zeros(1, 1, 9, 4)
    >>> disentangled(c2p, p2c)(0, 0, 0, torch.tensor(4), torch.arange(9)).int().tolist()  # distances 4, 3, ... -4, and k = 2
    [3, 3, 3, 3, 2, 1, 0, 0, 0]
    """
    for name, table in (("c2p", c2p), ("p2c", p2c)):
        _floats(name, table, (4,), "(B, Hq, S, 2k)")
    width = c2p.shape[-1]
    if width < 2 or width % 2 or p2c.shape[-1] != width:
        raise ValueError(f"c2p has {width} places and p2c {p2c.shape[-1]}; wanted the same even number 2k, at least 2")
    if not isinstance(p2c_by_query, bool):
        raise TypeError(f"p2c_by_query={p2c_by_query!r} is a {type(p2c_by_query).__name__}; wanted True or False")
    reach = width // 2
    of_key = (lambda distance: distance) if p2c_by_query else (lambda distance: -distance)
    if max_distance is None:

        def near(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            distance = q_idx - kv_idx
            to_position = c2p[b, h, q_idx, torch.clamp(distance + reach, 0, width - 1)]
            return score + to_position + p2c[b, h, kv_idx, torch.clamp(of_key(distance) + reach, 0, width - 1)]

        return Score(near, "disentangled")
    exact = reach // 2
    if isinstance(max_distance, bool) or not isinstance(max_distance, int) or exact < 1 or max_distance - 1 <= exact:
        raise ValueError(f"max_distance={max_distance!r}; wanted an int above {exact + 1} and tables of at least 4 places, or None")
    buckets = kept_table(_deberta_buckets, exact, max_distance, device=c2p.device)

    def far(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        bucket = buckets[torch.clamp(q_idx - kv_idx, -max_distance, max_distance) + max_distance]
        to_position = c2p[b, h, q_idx, torch.clamp(bucket + reach, 0, width - 1)]
        return score + to_position + p2c[b, h, kv_idx, torch.clamp(of_key(bucket) + reach, 0, width - 1)]

    return Score(far, "disentangled(buckets)")


def _deberta_buckets(exact: int, max_distance: int, *, device: torch.device) -> Tensor:
    """The bucket of every distance from -max_distance to max_distance, int32; that of -d is minus that of d. A table, so that all devices
    agree at the edges of buckets."""
    distance = torch.arange(-max_distance, max_distance + 1, dtype=torch.int64, device=device)
    size = distance.abs().clamp(min=exact).to(torch.float32) / exact
    growth = torch.log(torch.full_like(size[:1], (max_distance - 1) / exact))  # in float32, as DeBERTa computes it
    bucket = torch.ceil(torch.log(size) / growth * (exact - 1)).to(torch.int64) + exact
    return torch.where(distance.abs() <= exact, distance, distance.sign() * bucket).to(torch.int32)


@remade_by_call
def head_bias(bias: Tensor) -> Score:
    """One number per query head, added to its scores. bias: (Hq,). (It shifts the LSE; with a sink it changes the output too.)"""
    _floats("bias", bias, (1,), "(Hq,)")
    return Score(lambda score, b, h, q_idx, kv_idx: score + bias[h], "head_bias")


@remade_by_call
def pair_bias(bias: Tensor) -> Score:
    """A bias for every pair: ``score + bias[b, h, q_idx, kv_idx]``; a dimension of size 1 in B or H is shared.

    bias: (B or 1, Hq or 1, Sq, Sk). Source: AlphaFold's pair representation (Jumper et al., 2021, supplement 1.6).
    """
    _floats("bias", bias, (4,), "(B or 1, Hq or 1, Sq, Sk)")
    if bias.shape[0] == 1 and bias.shape[1] == 1:
        return Score(lambda score, b, h, q_idx, kv_idx: score + bias[0, 0, q_idx, kv_idx], "pair_bias")
    if bias.shape[0] == 1:
        return Score(lambda score, b, h, q_idx, kv_idx: score + bias[0, h, q_idx, kv_idx], "pair_bias")
    if bias.shape[1] == 1:
        return Score(lambda score, b, h, q_idx, kv_idx: score + bias[b, 0, q_idx, kv_idx], "pair_bias")
    return Score(lambda score, b, h, q_idx, kv_idx: score + bias[b, h, q_idx, kv_idx], "pair_bias")


@remade_by_call
def softcap(cap: float | Tensor) -> Score:
    """Soft limit ``cap * tanh(score / cap)``. cap: a positive number, or a tensor of rank 0, which may be learned.

    Source: Gemma 2 (arXiv:2408.00118).
    """
    return capped(_divisor("cap", cap))


def capped(cap: float | Tensor) -> Score:
    """``softcap`` with a number that was already checked for the dtype of the scores."""
    return Score(
        lambda score, b, h, q_idx, kv_idx: cap * torch.tanh(score / cap), f"softcap({cap if not isinstance(cap, Tensor) else 'tensor'})"
    )


@remade_by_call
def temperature(t: float | Tensor) -> Score:
    """``score / t``. t: a positive number, or a tensor of rank 0, which may be learned."""
    t = _divisor("t", t)
    return Score(lambda score, b, h, q_idx, kv_idx: score / t, f"temperature({t if not isinstance(t, Tensor) else 'tensor'})")
