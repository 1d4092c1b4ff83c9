"""Random mods: mask trees and score chains as printable recipes, and the functions that these describe."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import strategies as st
from torch import Tensor

from anyattn import masks, scores

LONGEST = 600  # tables are as long, so that any index of any case is in range
DEVICE = "cpu"  # where tables are

small = st.integers(-3, 40)
atoms = st.one_of(
    st.tuples(st.just("causal"), small),
    st.tuples(st.just("window"), small, small),
    st.tuples(st.just("prefix"), st.integers(0, 60)),
    st.tuples(st.just("documents"), st.integers(0, 3)),
    st.tuples(st.just("dilated"), st.integers(1, 5), st.integers(0, 4)),
    st.tuples(st.just("by_head"), st.integers(1, 4)),
    st.tuples(st.just("chunks"), st.integers(1, 50)),
    st.tuples(st.just("keys_of_batch"), st.integers(0, 3)),
    st.tuples(st.just("flags"), st.integers(0, 3)),
    st.tuples(st.just("rows"), st.integers(0, 70)),
    st.tuples(st.just("bits"), st.integers(1, 7)),
    st.tuples(st.just("slanted"), st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.just("all"), st.booleans()),
    st.tuples(st.just("diffusion"), st.integers(1, 70), st.integers(1, 20)),
    st.tuples(st.just("neighborhood"), st.integers(1, 9), st.integers(1, 6)),
    st.tuples(st.just("video_tiles"), st.integers(1, 4), st.integers(1, 3)),
)


def trees(depth: int = 4) -> st.SearchStrategy:
    if depth == 0:
        return atoms
    below = trees(depth - 1)
    return st.one_of(
        atoms,
        st.tuples(st.just("not"), below),
        st.tuples(st.sampled_from(("and", "or", "xor")), below, below),
    )


steps = st.one_of(
    st.tuples(st.just("scale"), st.sampled_from((-1.5, 0.5, 1.0, 2.0))),
    st.tuples(st.just("alibi"), st.sampled_from((0.01, 0.2))),
    st.tuples(st.just("softcap"), st.sampled_from((0.7, 5.0))),
    st.tuples(st.just("distance_table"), st.integers(0, 3)),
    st.tuples(st.just("key_table"), st.integers(0, 3)),
    st.tuples(st.just("row_gate"), st.integers(0, 3)),
    st.tuples(st.just("head_bias"), st.integers(0, 3)),
    st.tuples(st.just("pair"), st.integers(0, 3)),
    st.tuples(st.just("forget_gate"), st.integers(0, 3)),
    st.tuples(st.just("disentangled"), st.integers(0, 3)),
    st.tuples(st.just("sometimes"), st.integers(1, 5)),
    st.tuples(st.just("hidden"), st.integers(2, 6)),
)
chains = st.lists(steps, max_size=3)


def _table(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(DEVICE)


def _ids(seed: int) -> Tensor:
    return (torch.rand(4, LONGEST, generator=torch.Generator().manual_seed(seed)) < 0.04).long().cumsum(1).to(DEVICE)


def mask_of(tree: tuple) -> Callable:
    """The mask that a recipe stands for."""
    name, *args = tree
    if name == "not":
        inner = mask_of(args[0])
        return lambda b, h, q, k: ~inner(b, h, q, k)
    if name in ("and", "or", "xor"):
        left, right = mask_of(args[0]), mask_of(args[1])
        return {
            "and": lambda b, h, q, k: left(b, h, q, k) & right(b, h, q, k),
            "or": lambda b, h, q, k: left(b, h, q, k) | right(b, h, q, k),
            "xor": lambda b, h, q, k: left(b, h, q, k) ^ right(b, h, q, k),
        }[name]
    n, m = (*args, 0)[:2]
    if name in ("diffusion", "neighborhood", "video_tiles"):
        return {
            "diffusion": lambda: masks.block_diffusion(n, m),
            "neighborhood": lambda: masks.neighborhood_3d((LONGEST, n, 3), (2, m, 3)),
            "video_tiles": lambda: masks.sliding_tiles((LONGEST, 2 * n, 4), (3, 2, 2), (3, m, 1)),
        }[name]()
    ids, flags = _ids(int(n)), _ids(int(n) + 9)[0] % 2 == 0
    return {
        "causal": lambda b, h, q, k: q + n >= k,
        "window": lambda b, h, q, k: (q - k <= n) & (k - q <= m),
        "prefix": lambda b, h, q, k: (k < n) | (q >= k),
        "documents": lambda b, h, q, k: ids[b, q] == ids[b, k],
        "dilated": lambda b, h, q, k: (q - k) % n == m % n,
        "by_head": lambda b, h, q, k: (k + h) % n == 0,
        "chunks": lambda b, h, q, k: q // n == k // n,
        "keys_of_batch": lambda b, h, q, k: k < 30 * (b + 1) + 7 * n,
        "flags": lambda b, h, q, k: flags[k],
        "rows": lambda b, h, q, k: q < n,
        "bits": lambda b, h, q, k: (q ^ k) & n == 0,
        "slanted": lambda b, h, q, k: n * q >= m * k,
        "all": lambda b, h, q, k: (q >= 0) == bool(n),
    }[name]


def score_of(chain: list[tuple], heads: int) -> tuple[Callable | None, list[Tensor]]:
    """The score mod that a recipe stands for, and the float tensors that it captures."""
    if not chain:
        return None, []
    captured: list[Tensor] = []
    parts = []
    for name, n in sorted(chain, key=lambda step: step[0] == "hidden"):  # last, or a negative scale would make it +inf
        part, tensors = _step(name, n, heads)
        parts.append(part)
        captured += tensors

    def score(s, b, h, q, k):  # type: ignore[no-untyped-def]
        for part in parts:
            s = part(s, b, h, q, k)
        return s

    return score, captured


def _step(name: str, n, heads: int) -> tuple[Callable, list[Tensor]]:  # type: ignore[no-untyped-def]
    if name == "scale":
        return lambda s, b, h, q, k: s * n, []
    if name == "alibi":
        return lambda s, b, h, q, k: s - n * abs(q - k), []
    if name == "softcap":
        return lambda s, b, h, q, k: n * torch.tanh(s / n), []
    if name == "sometimes":
        return lambda s, b, h, q, k: torch.where((q + k) % n == 0, s * 0.5, s + 0.25), []
    if name == "hidden":
        return lambda s, b, h, q, k: torch.where((q * 3 + k) % n == 0, -float("inf"), s), []
    if name == "forget_gate":
        gates = -_table(n, 4, heads, LONGEST).abs().cumsum(-1)
        return scores.forget_gate(gates), [gates]
    if name == "disentangled":
        tables = [_table(n + i, 4, heads, LONGEST, 6) for i in range(2)]
        return scores.disentangled(tables[0], tables[1], 7 if n % 2 else None), tables
    table = {
        "distance_table": _table(n, heads, 21),
        "key_table": _table(n, LONGEST),
        "row_gate": _table(n, LONGEST),
        "head_bias": _table(n, heads),
        "pair": _table(n, 5, 7),
    }[name]
    step = {
        "distance_table": lambda s, b, h, q, k: s + table[h, torch.clamp(q - k, -10, 10) + 10],
        "key_table": lambda s, b, h, q, k: s + table[k],
        "row_gate": lambda s, b, h, q, k: s * torch.sigmoid(table[q]),
        "head_bias": lambda s, b, h, q, k: s + table[h] * (k % 3),
        "pair": lambda s, b, h, q, k: s + table[q % 5, k % 7],
    }[name]
    return step, [table]
