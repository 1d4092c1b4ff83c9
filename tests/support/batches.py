"""Random batches: one sequence among neighbours, in every form of storage, and alone; its rows' bits are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from anyattn import flash_attn_func, flash_attn_with_kvcache
from tests.support import batch_forms
from tests.support.batch_forms import MOST, PAGES, SHORT_FORMS, ByPlace, Found, Scene, Sequence, number, placed

__all__ = ["OPTIONS", "PAGES", "Sequence", "alone", "differing", "draw", "packed", "ways"]


def _table(values: Tensor) -> Callable[..., Any]:
    return lambda s, b, h, q, kv: s * 0.5 + values[h, kv]


def _flags(g: torch.Generator) -> Callable[..., Any]:
    flags = torch.rand(MOST, generator=g, device=g.device) < 0.7
    return lambda b, h, q, kv: flags[kv] | (q - kv < 3)


def _documents(g: torch.Generator) -> Callable[..., Any]:
    ids = (torch.rand(MOST, generator=g, device=g.device) < 0.02).cumsum(0)
    return lambda b, h, q, kv: ids[q] == ids[kv]


def _tables(values: Tensor) -> ByPlace:
    """Each sequence's own table; values: (sequences, MOST)."""

    def made(order: list[int]) -> Callable[..., Any]:
        own = values.detach()[order].requires_grad_()
        return lambda s, b, h, q, kv: s + own[b, kv]

    return ByPlace(made)


def _everything(heads: int, g: torch.Generator) -> dict[str, Any]:
    values = _random(g, heads, MOST)
    return {
        **{"window_size": (150, 0), "softcap": 5.0, "softmax_scale": 0.3, "sink": _random(g, heads), "alibi_slopes": _random(g, heads) / 9},
        "score_mod": lambda s, b, h, q, kv: s * 0.75 + values[h, q] * 0.1,
        "mask_mod": lambda b, h, q, kv: (q + kv) % 5 != 0,
    }


def _random(g: torch.Generator, *shape: int) -> Tensor:
    """A leaf that wants a gradient: it has one where a batch is trained."""
    return torch.randn(shape, generator=g, device=g.device).requires_grad_()


MOST_SEQUENCES = 16
# by name, the options of a call whose mods see positions in the sequence. made from the number of query heads and a generator
OPTIONS: dict[str, Callable[[int, torch.Generator], dict[str, Any]]] = {
    "causal": lambda heads, g: {},
    "window": lambda heads, g: {"window_size": (number(g, 0, 90), 0)},
    "sink": lambda heads, g: {"sink": _random(g, heads), "window_size": (37, 0)},
    "softcap": lambda heads, g: {"softcap": 4.0},
    "alibi": lambda heads, g: {"alibi_slopes": torch.rand(heads, generator=g, device=g.device)},
    "first and last": lambda heads, g: {"mask_mod": lambda b, h, q, kv: (kv < 3) | (q - kv < 50)},
    "thirds": lambda heads, g: {"mask_mod": lambda b, h, q, kv: (q + 2 * kv + h) % 3 != 0},
    "waves": lambda heads, g: {"score_mod": lambda s, b, h, q, kv: s + torch.sin(kv * 0.37) * torch.cos(q * 0.11)},
    "table": lambda heads, g: {"score_mod": _table(_random(g, heads, MOST))},
    "blind": lambda heads, g: {"mask_mod": lambda b, h, q, kv: (q % 5 != 2) & (kv % 64 > 20)},
    "flags": lambda heads, g: {"mask_mod": _flags(g)},
    "documents": lambda heads, g: {"mask_mod": _documents(g)},
    "table of each": lambda heads, g: {"score_mod": _tables(_random(g, MOST_SEQUENCES, MOST))},
    "alibi of each": lambda heads, g: _slopes(torch.rand(MOST_SEQUENCES, heads, generator=g, device=g.device)),
    "everything": _everything,
}


def _slopes(values: Tensor) -> dict[str, Any]:
    return {"alibi_slopes": ByPlace(lambda order: values[order])}


def draw(
    g: torch.Generator,
    length: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    in_keys: bool = False,
    stored: torch.dtype | None = None,
) -> Sequence:
    """On the generator's device, as all that follows. in_keys: values are the keys' first dimensions. stored: of 8-bit keys and values,
    which have a factor for each key and head."""
    shapes = (heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1])
    q, k, v = (torch.randn(1, length, *shape, generator=g, device=g.device).to(dtype) for shape in shapes)
    if in_keys:
        v = k[..., : dims[1]]
    if stored is None:
        return Sequence(q, k, v)
    unit = 40.0 if stored is torch.int8 else 1.0
    k, v = ((x.float() * unit).clamp(-127, 127).to(stored) for x in (k, v))
    scales = (torch.rand(1, length, heads[1], generator=g, device=g.device) / unit + 2**-9 for _ in range(2))
    return Sequence(q, k, v, tuple(scales))


def alone(s: Sequence, call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """out (length, Hq, Dv) and lse (Hq, length) of a sequence that is the whole batch."""
    own, more = placed(call, [0]), {"causal": True, "return_lse": True}
    with torch.no_grad():
        if s.scales is None:
            out, lse = flash_attn_func(s.q, s.k, s.v, **more, **own)
        else:
            out, lse = flash_attn_with_kvcache(s.q, s.k, s.v, k_descale=s.scales[0], v_descale=s.scales[1], **more, **own)
    return out[0], lse[0]


def packed(batch: list[Sequence], place: int, call: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """out and lse of one sequence of a packed batch, as ``alone`` has them."""
    scene = Scene(torch.Generator(batch[0].q.device).manual_seed(0), batch, place, list(range(len(batch))), call)
    found = batch_forms.packed(scene)
    return found.out, found.lse


def ways(
    g: torch.Generator,
    batch: list[Sequence],
    call: dict[str, Any],
    page_sizes: tuple[int, ...] = PAGES,
    forms: tuple[str, ...] = SHORT_FORMS,
) -> Iterator[Found]:
    """The first sequence of a batch, computed in forms of ``batch_forms.FORMS``, with the sequences in a random order."""
    order = torch.randperm(len(batch), generator=g, device=g.device).tolist()
    scene = Scene(g, [batch[i] for i in order], order.index(0), order, call, page_sizes)
    for form in forms:
        yield batch_forms.FORMS[form](scene)


def differing(
    g: torch.Generator,
    batch: list[Sequence],
    call: dict[str, Any],
    page_sizes: tuple[int, ...] = PAGES,
    forms: tuple[str, ...] = SHORT_FORMS,
    between: Callable[[], None] = lambda: None,
) -> list[str]:
    """The ways in which a row of the batch's first sequence has other bits than alone. between: called before each way."""
    out, lse = alone(batch[0], call)
    found, computed = [], ways(g, batch, call, page_sizes, forms)
    for _ in forms:
        between()
        way = next(computed)
        if not torch.equal(way.out, out[way.rows]) or not torch.equal(way.lse, lse[:, way.rows]):
            found.append(way.name)
        elif not way.repeats:
            found.append(f"gradients of a second backward pass: {way.name}")
    return found
