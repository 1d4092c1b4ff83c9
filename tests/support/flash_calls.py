"""Shared code of the tests of FlashAttention's functions: options, random sequences, storage forms, and a call with all gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.support import poison

NAN = math.nan
HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Recipe:
    """Options of a call. shapes: the float tensors that it is made from, by name, in terms of (heads, batch, longest)."""

    options: Callable[[dict[str, Tensor]], dict[str, Any]]
    shapes: Callable[[int, int, int], dict[str, tuple[int, ...]]] = lambda heads, batch, longest: {}

    def draw(self, heads: int, batch: int, longest: int, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
        """Leaves that want gradients: small slopes, all else normal; the sink in the inputs' dtype, the others at least float32.

        Steep slopes over long sequences would make probabilities that float32 has no normal numbers for, which the budget does not know.
        """
        g = torch.Generator().manual_seed(seed)
        found = {}
        for name, shape in self.shapes(heads, max(batch, 1), max(longest, 1)).items():
            x = torch.rand(shape, generator=g) * 0.15 if name == "alibi_slopes" else torch.randn(shape, generator=g)
            found[name] = x.to(dtype if name == "sink" else torch.promote_types(dtype, torch.float32)).requires_grad_()
        return found


def _sinks(heads: int, batch: int, longest: int) -> dict[str, tuple[int, ...]]:
    return {"sink": (heads,)}


def _everything(t: dict[str, Tensor]) -> dict[str, Any]:
    return {
        "causal": True,
        "window_size": (21, 0),
        "softcap": 5.0,
        "alibi_slopes": t["alibi_slopes"],
        "sink": t["sink"],
        "score_mod": lambda s, b, h, i, j, aux: s * 0.75 + aux[0][h, j],
        "mask_mod": lambda b, h, i, j: (i + j + b) % 5 != 0,
        "aux_tensors": [t["table"]],
        "softmax_scale": 0.3,
    }


RECIPES: dict[str, Recipe] = {
    "full": Recipe(lambda t: {}),
    "causal": Recipe(lambda t: {"causal": True}),
    "window": Recipe(lambda t: {"window_size": (9, 2)}),
    "causal_window": Recipe(lambda t: {"causal": True, "window_size": (5, 5), "softmax_scale": 0.2}),
    "left": Recipe(lambda t: {"window_size": (4, -1)}),
    "right": Recipe(lambda t: {"window_size": (None, 3)}),
    "shifted": Recipe(lambda t: {"window_size": (11, -3)}),
    "shifted_right": Recipe(lambda t: {"window_size": (-2, 6)}),
    "empty_band": Recipe(lambda t: {"window_size": (2, -4)}),
    "softcap": Recipe(lambda t: {"causal": True, "softcap": 2.0}),
    "alibi": Recipe(lambda t: {"alibi_slopes": t["alibi_slopes"]}, lambda h, b, n: {"alibi_slopes": (h,)}),
    "alibi_by_entry": Recipe(lambda t: {"causal": True, "alibi_slopes": t["alibi_slopes"]}, lambda h, b, n: {"alibi_slopes": (b, h)}),
    "alibi_softcap": Recipe(lambda t: {"softcap": 3.0, "alibi_slopes": t["alibi_slopes"]}, lambda h, b, n: {"alibi_slopes": (h,)}),
    "sink": Recipe(lambda t: {"causal": True, "sink": t["sink"]}, _sinks),
    "sink_empty_band": Recipe(lambda t: {"window_size": (2, -4), "sink": t["sink"]}, _sinks),
    "bias_key": Recipe(lambda t: {"score_mod": lambda s, b, h, i, j: s + t["table"][h, j]}, lambda h, b, n: {"table": (h, n)}),
    "bias_row": Recipe(
        lambda t: {"causal": True, "score_mod": lambda s, b, h, i, j: s + t["table"][h, i]}, lambda h, b, n: {"table": (h, n)}
    ),
    "bias_entry": Recipe(lambda t: {"score_mod": lambda s, b, h, i, j: s + t["table"][b] * (j % 5)}, lambda h, b, n: {"table": (b,)}),
    "distance": Recipe(
        lambda t: {"causal": True, "score_mod": lambda s, b, h, i, j: s + t["table"][h, torch.clamp(i - j, -10, 10) + 10]},
        lambda h, b, n: {"table": (h, 21)},
    ),
    "product": Recipe(
        lambda t: {"score_mod": lambda s, b, h, i, j: s * t["table"][h, i] + t["bias"][(i + j) % 5]},
        lambda h, b, n: {"table": (h, n), "bias": (5,)},
    ),
    "gate_entry_row": Recipe(
        lambda t: {"window_size": (12, 3), "score_mod": lambda s, b, h, i, j: s * torch.sigmoid(t["table"][b, i]) + t["bias"][h]},
        lambda h, b, n: {"table": (b, n), "bias": (h,)},
    ),
    "aux": Recipe(
        lambda t: {"score_mod": lambda s, b, h, i, j, aux: s + aux[0][b, h], "aux_tensors": [t["table"]]},
        lambda h, b, n: {"table": (b, h)},
    ),
    "mask": Recipe(lambda t: {"mask_mod": lambda b, h, i, j: (i * 3 + j * 5 + b + h) % 4 != 0}),
    "mask_or_prefix": Recipe(lambda t: {"mask_mod": lambda b, h, i, j: (j < 37 + b) | ((i * 3 + j * 5 + h) % 4 == 0)}),
    "mask_some_rows": Recipe(lambda t: {"mask_mod": lambda b, h, i, j: (i % 3 == 1) & (j % 4 != h)}),
    "everything": Recipe(_everything, lambda h, b, n: {"alibi_slopes": (b, h), "sink": (h,), "table": (h, n)}),
}


# ---- sequences and their storage


@dataclass
class Ragged:
    """Sequences as lists: q[b] (Sq, Hq, D), k[b] (Sk, Hkv, D), v[b] (Sk, Hkv, Dv), and what comes in for out and lse, dlse[b] (Sq, Hq)."""

    q: list[Tensor]
    k: list[Tensor]
    v: list[Tensor]
    dout: list[Tensor]
    dlse: list[Tensor]

    @property
    def lengths(self) -> tuple[list[int], list[int]]:
        return [len(t) for t in self.q], [len(t) for t in self.k]

    @property
    def longest(self) -> int:
        return max([0, *self.lengths[0], *self.lengths[1]])

    def permuted(self, order: Sequence[int]) -> Ragged:
        return Ragged(*([part[b] for b in order] for part in (self.q, self.k, self.v, self.dout, self.dlse)))


def ragged(
    lengths_q: Sequence[int],
    lengths_k: Sequence[int],
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float32,
    kind: str = "normal",
    seed: int = 0,
) -> Ragged:
    """kind: normal; peaky, scores four times as large; coded, scores of zero and values that name their key."""
    g = torch.Generator().manual_seed(seed)
    made = Ragged([], [], [], [], [])
    stretch = {"normal": 1.0, "peaky": 4.0, "coded": 0.0}[kind]
    for n_q, n_k in zip(lengths_q, lengths_k, strict=True):
        made.q.append((torch.randn(n_q, heads[0], dims[0], generator=g) * stretch).to(dtype))
        made.k.append(torch.randn(n_k, heads[1], dims[0], generator=g).to(dtype))
        v = torch.randn(n_k, heads[1], dims[1], generator=g)
        if kind == "coded":
            v = v * 0 + torch.arange(n_k)[:, None, None] * (2 * torch.arange(dims[1]) + 1) % 127 / 127 - 0.5
        made.v.append(v.to(dtype))
        made.dout.append(torch.randn(n_q, heads[0], dims[1], generator=g).to(dtype))
        made.dlse.append(torch.randn(n_q, heads[0], generator=g).to(torch.promote_types(dtype, torch.float32)))
    return made


def ends(lengths: Sequence[int], dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype)


def in_a_row(parts: Sequence[Tensor], room: Sequence[int] | None = None, tail: int = 0) -> Tensor:
    """(total, H, D), part b in the first rows of its ``room[b]``, and ``tail`` more rows; NaN where nothing belongs."""
    room = [len(p) for p in parts] if room is None else room
    out = parts[0].new_full((sum(room) + tail, *parts[0].shape[1:]), NAN)
    for start, part in zip(itertools.accumulate(room, initial=0), parts):
        out[start : start + len(part)] = part
    return out


def side_by_side(
    parts: Sequence[Tensor],
    capacity: int,
    rows: Sequence[int] | None = None,
    count: int | None = None,
    leftpad: Sequence[int] | None = None,
) -> Tensor:
    """(B or count, capacity, H, D), part b in row ``rows[b]`` from ``leftpad[b]`` on; NaN where nothing belongs."""
    out = parts[0].new_full((len(parts) if count is None else count, capacity, *parts[0].shape[1:]), NAN)
    for b, part in enumerate(parts):
        start = 0 if leftpad is None else leftpad[b]
        out[b if rows is None else rows[b], start : start + len(part)] = part
    return out


def pages_of(batch: int, each: int, seed: int | None, spare: int = 2, dtype: torch.dtype = torch.int32) -> tuple[Tensor, int]:
    """A page table (batch, each) over a pool, in order without a seed and else shuffled, and the number of the pool's pages."""
    count = batch * each + spare
    order = torch.arange(count) if seed is None else torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order[: batch * each].view(batch, each).to(dtype), count


def in_pages(parts: Sequence[Tensor], table: Tensor, count: int, page_size: int, leftpad: Sequence[int] | None = None) -> Tensor:
    """(count, page_size, H, D), row t of part b at storage row ``leftpad[b] + t`` of the pages in row b of the table; NaN elsewhere."""
    out = parts[0].new_full((count, page_size, *parts[0].shape[1:]), NAN)
    for b, part in enumerate(parts):
        for t, row in enumerate(part):
            at = t + (0 if leftpad is None else leftpad[b])
            out[int(table[b, at // page_size]), at % page_size] = row
    return out


# ---- calling


def call(
    door: Callable[..., Any],
    qkv: Sequence[Tensor],
    tensors: dict[str, Tensor],
    options: dict[str, Any],
    dout: Tensor | None = None,
    dlse: Tensor | None = None,
    with_lse: bool = True,
) -> dict[str, Tensor]:
    """out, lse and every gradient by name, computed in poisoned memory; no gradients without ``dout``."""
    leaves = [t.detach().requires_grad_(dout is not None) for t in qkv]
    with poison.enabled():
        found = door(*leaves, **options, return_lse=with_lse)
        out, lse = found if with_lse else (found, None)
        got = {"out": out.detach()} | ({} if lse is None else {"lse": lse.detach()})
        if dout is not None:
            wanted = dict(zip(("dq", "dk", "dv"), leaves)) | {"dsink" if n == "sink" else n: t for n, t in tensors.items()}
            outputs, incoming = [out], [dout]
            if dlse is not None:
                outputs, incoming = [out, lse], [dout, dlse]
            grads = torch.autograd.grad(outputs, list(wanted.values()), incoming)
            got |= dict(zip(wanted, grads))
    return got


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit, NaN included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return a.numel() == 0 or torch.equal(*(t.flatten().view(torch.uint8) for t in (a, b)))
