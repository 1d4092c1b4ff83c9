"""CuTe API: compiles and launches ``HopperForward`` by ``cute.compile``, with its optional arguments filled in.

>>> import torch
>>> q = torch.zeros(1, 4, 256, 128, dtype=torch.bfloat16)
>>> described = describe(q, q, q, mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)
>>> described.config.has_right, described.config.head_dim
(True, 128)

Then ``given = arguments(described, q, k, v, out, counter)``, ``kernel = cute.compile(HopperForward(described.config),
*placeholders(given), stream)``, and ``kernel(*as_cute(given), stream)`` with any arguments: lengths, strides, scales and captured values
are run-time. ``examples/cute_kernel.py`` is a complete example.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn.arithmetic import LOG2E, ceil_div
from anyattn.backends.hopper.codegen.score_analysis import factored
from anyattn.backends.hopper.compile import build
from anyattn.backends.hopper.compile.launch import indexable, kinds_of
from anyattn.backends.hopper.config import HEAD_DIMS, MOST, Config, slots
from anyattn.backends.hopper.make_config import forward_spec, is_bounded
from anyattn.backends.hopper.pack_gqa import groups_of, why_apart
from anyattn.backends.hopper.plan import reason_against
from anyattn.backends.hopper.tables import CACHE_FOR_KEYS
from anyattn.errors import BackendError
from anyattn.mods.tracing.cute_mod import native_mod
from anyattn.mods.tracing.trace import TracedMod, trace
from anyattn.problem import Problem
from anyattn.sequences.l2_groups import heads_side_by_side

__all__ = ["Described", "arguments", "as_cute", "describe", "placeholders"]

_TABLES = ("partial_count", "partial_index", "full_count", "full_index", "order", "entries", "pages")


class Described(NamedTuple):
    """A kernel's config, and the numbers and tensors that its mods capture in this call."""

    config: Config
    scalars: tuple[int | float, ...]
    tensors: tuple[Tensor, ...]


def describe(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Callable | None = None,
    mask_mod: Callable | None = None,
    *,
    aux_tensors: Sequence[Tensor] | None = None,
    has_lse: bool = False,
    has_sink: bool = False,
    pack_gqa: bool = False,
) -> Described:
    """The config for dense attention with these mods, plain Python or CuTe functions, each as in ``flex_attention``.

    q: (B, Hq, Sq, D), k, v: (B, Hkv, Sk, D or Dv), bfloat16 or float16; the config depends on dtype and head dimensions, other sizes are
    run-time. pack_gqa: query heads that share K and V share row tiles, 4 of them if at most 4 share K and V in these tensors, else 8.
    Raises ``BackendError`` if heads that should share row tiles see different keys, and ``ValueError`` if no kernel can run this, or
    if the mask needs lists of tiles, which only a ``Config`` written by hand accepts.
    """

    def read(mod: Callable, kind: str) -> TracedMod:
        aux = None if aux_tensors is None else list(aux_tensors)
        return native_mod(mod, kind, aux) or trace(mod, kind, aux_tensors=aux, device=q.device)

    predicates = () if mask_mod is None else (read(mask_mod, "mask"),)
    sink = q.new_zeros(q.shape[1], dtype=torch.float32) if has_sink else None
    score = None if score_mod is None else read(score_mod, "score")
    with torch.no_grad():
        problem = Problem(q, k, v, 1.0, score, predicates, sink=sink, wants_lse=has_lse)
        reason = reason_against(problem)
    if reason is not None:
        raise ValueError(f"no Hopper kernel can run this: {reason}")
    spec = forward_spec(problem, pack_gqa)
    if spec.config.is_wide:
        wanted = f"wanted at most {HEAD_DIMS[-1]}, or call flex_attention"
        raise ValueError(f"heads of {q.shape[3]} and {v.shape[3]} dimensions have a kernel of their own, not HopperForward; {wanted}")
    if spec.listed is not None:
        name = predicates[spec.listed].name
        raise ValueError(f"mask_mod {name!r} needs lists of tiles; wanted a band such as causal, a CuTe function, or a Config(lists=...)")
    against = why_apart(spec.config, problem.qhead_per_kvhead) if pack_gqa else None
    if against:
        raise BackendError(f"pack_gqa=True cannot be had from the Hopper kernel: {against}; pass pack_gqa=False")
    return Described(spec.config_for(problem), *spec.captured(problem))


def arguments(
    described: Described | Config,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    counter: Any,
    *,
    scale: float | None = None,
    lse: Any = None,
    highest: Any = None,
    sink: Any = None,
    scalars: Sequence[int | float] | None = None,
    tensors: Sequence[Any] | None = None,
    workers: int | None = None,
    **tables: Any,
) -> tuple:
    """All arguments of ``HopperForward.__call__``, which documents them, in order and without the stream.

    described: the result of ``describe``, with this call's captured values unless ``scalars`` and ``tensors`` replace them, or a config.
    q, k, v, out, lse, highest, sink: torch's or CuTe's tensors. counter: two int32 zeros, left as zeros; launches that may overlap need
    separate ones. scale: default 1 / sqrt(D). workers: thread blocks, by default ``config.tiles.blocks`` for each of the 132
    multiprocessors, but no more than there are work items. tables: partial_count, partial_index, full_count, full_index, order, entries,
    pages, if the config has them.

    Raises ``ValueError`` if an argument that the config needs is missing, or one that it does not have is given.
    """
    config, *captured = described if isinstance(described, Described) else (described, (), ())
    scalars, tensors = (tuple(old if new is None else new) for old, new in zip(captured, (scalars, tensors), strict=True))
    factor = 1.0 / math.sqrt(q.shape[3]) if scale is None else scale
    _check(config, {"lse": lse, "highest": highest, "sink": sink}, tables, len(scalars), len(tensors))
    _check_signs(config, factor, scalars)
    order, entries = tables.get("order"), tables.get("entries")
    groups = groups_of(q.shape[1] // k.shape[1], config.heads_per_tile)
    heads = k.shape[1] * groups
    batch = q.shape[0] if entries is None else entries.shape[0]
    listed = entries if order is None else order
    rows = ceil_div(q.shape[2], config.tile_q) if listed is None else listed.shape[0]
    spread = {"all": batch * heads, "heads": heads, "none": 1}[config.spread]
    keys = k.shape[2] * (1 if tables.get("pages") is None else k.shape[0])
    section = min(spread, heads_side_by_side(keys * (q.shape[3] + v.shape[3]) * 2, groups, CACHE_FOR_KEYS))
    blocks = max(1, min(rows * spread, 132 * config.tiles.blocks if workers is None else workers))
    found = tuple(tables.get(name) for name in _TABLES)
    return (q, k, v, out, lse, highest, sink, *found, counter, factor * LOG2E, rows, spread, section, blocks, scalars, tensors)


def _check_signs(config: Config, scale: float, scalars: tuple[int | float, ...]) -> None:
    """Raises unless the factors that are applied after the row maximum are above 0."""
    if config.score is not None and not config.is_factored:
        return
    cure = "a number above 0, or a Config with a score and is_factored=False"
    if scale <= 0:
        raise ValueError(f"scale={scale!r}; wanted {cure}")
    for i in factored(config.score).positive if config.score is not None else ():
        if scalars[i] <= 0:
            raise ValueError(f"scalars[{i}]={scalars[i]!r}, which multiplies the scores; wanted {cure}")
    if config.is_bounded and not is_bounded(config, scalars[: slots(config.exprs[0])[0]]):
        raise ValueError(f"scalars={scalars!r} leave scores above {MOST:g}; wanted a lower bound, or a Config with is_bounded=False")


def _check(config: Config, statistics: dict[str, Any], tables: dict[str, Any], scalars: int, tensors: int) -> None:
    unknown = sorted(tables.keys() - set(_TABLES))
    if unknown:
        raise TypeError(f"arguments has no {', '.join(unknown)}; wanted some of {', '.join(_TABLES)}")
    if config.in_order:
        raise ValueError('in_order=True in the config; wanted False, or flex_attention(..., deterministic="batch"), whose scale it needs')
    has = {"lse": config.has_lse, "highest": config.has_max, "sink": config.has_sink, "order": config.has_order}
    has |= {"entries": config.has_entries, "pages": config.is_paged}
    has |= dict.fromkeys(("partial_count", "partial_index"), config.lists is not None)
    given = statistics | tables
    for name, wanted in has.items():
        if (given.get(name) is not None) != wanted:
            said = "is missing, and the config has it" if wanted else "is given, and the config has none"
            raise ValueError(f"{name} {said}; wanted arguments and config alike")
    if config.has_entries and len(tables["entries"].shape) != 1 + config.has_order:
        shape = "(B, 9) with an order of row tiles" if config.has_order else "(B,), numbers of keys, without an order"
        raise ValueError(f"entries has shape {tuple(tables['entries'].shape)}; wanted {shape}")
    counts = [slots(expr) for expr in config.exprs]
    for name, have, wants in (("scalars", scalars, sum(n for n, _ in counts)), ("tensors", tensors, sum(n for _, n in counts))):
        if have != wants:
            raise ValueError(f"{name} has {have} entries; wanted {wants}, what the config's expressions capture, in their order")


def placeholders(given: tuple) -> tuple:
    """Placeholders for ``arguments`` of torch tensors in ``cute.compile``: sizes and strides of any value, no memory, no GPU needed."""
    kinds, _ = kinds_of(indexable(given))
    # ``as_cute`` gives the last dimension stride 1, also if the tensor's is another
    return tuple(build.examples(tuple(abs(kind) if isinstance(kind, int) else kind for kind in kinds)))


def as_cute(given: tuple) -> tuple:
    """``arguments`` as CuTe's own types: torch tensors in the layout of ``placeholders``, 32-bit numbers; CuTe's own stay unchanged.

    Tensors are not copied, except captured ones whose last stride is not 1.
    """
    return tuple(_as_cute(item, is_nested=False) for item in indexable(given))


def _as_cute(item: Any, is_nested: bool) -> Any:
    if isinstance(item, tuple):
        return tuple(_as_cute(x, is_nested=True) for x in item)
    return build.wrapped(item, is_nested) if item is None or isinstance(item, (Tensor, int, float)) else item
