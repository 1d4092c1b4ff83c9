"""Call cache of ``flex_attention`` and FlashAttention's functions: calls of one signature share their checks and their plan.

The signature is everything that checks and plan depend on: shapes, strides, dtypes, devices, alignment and requires_grad of every tensor,
the patterns of the mods (``mods/tracing/fingerprint.py``) and those of their numbers on which more than a score depends, the block mask's
sizes, and the options with their types. Captured values are read again on every call and become the problem's run-time values. A call is
not cached where its checks or its plan depend on the contents of tensors, where a mod can be understood only by tracing it, and where
something intercepts torch's operations (functorch, dispatch modes, tracing).

No user's tensor and no user's function is kept, except CuTe functions, which are their own programs; at most ``2 * _MOST`` calls are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from anyattn import hardware, planner
from anyattn.call_cache.rebind import Recipe, Unfit
from anyattn.call_cache.varlen import Places, facts_of_places, seen_rows
from anyattn.mods.analysis.load_bounds import doubt, hangs_on_masks, plainly_inside
from anyattn.mods.tracing.cute_mod import native_reading
from anyattn.mods.tracing.fingerprint import Reading, recognise
from anyattn.mods.tracing.trace import TracedMod, is_native
from anyattn.mods.tracing.weak_captures import NEAR_NUMBER
from anyattn.plan import Plan
from anyattn.problem import Problem
from anyattn.sequences.unread_varlen import LengthTables, StoredSequences, StoredSizes
from anyattn.tensors import kinds
from anyattn.validate import flash, flex
from anyattn.validate.flash import Options

__all__ = [
    "PLAIN",
    "UNREADABLE",
    "FlexCall",
    "Places",
    "Unfit",
    "clear",
    "fields_of",
    "flash_call",
    "flex_call",
    "is_listened_to",
    "remember",
    "remembered",
    "scale_fact",
    "size",
    "varlen_call",
]

_MOST = 512
PLAIN = frozenset((Tensor, torch.nn.Parameter))  # a subclass may mean anything by an operation
UNREADABLE = (AttributeError, TypeError, ValueError, RuntimeError)  # what asking a wrong argument for its facts can raise


# looked up once: a call that nothing listens to asks all of them
_are_transforms_active, _count_modes = torch._C._are_functorch_transforms_active, torch._C._len_torch_dispatch_stack  # type: ignore
_is_traced, _is_grad_enabled, _default_dtype = torch._C._is_tracing, torch.is_grad_enabled, torch.get_default_dtype  # type: ignore


class FlexCall(NamedTuple):
    """The arguments of one ``flex_attention`` call; lse and max_scores as they are wanted, whichever way was asked."""

    query: Any
    key: Any
    value: Any
    score_mod: Any
    block_mask: Any
    mask_mod: Any
    aux_tensors: Any
    scale: Any
    enable_gqa: Any
    sink: Any
    wants_lse: bool
    wants_max: bool
    deterministic: Any
    listed: TracedMod | None = None  # the mask of a block mask that is given as lists alone


class _Facts(NamedTuple):
    """key: all facts of a call. What was read on the way: the score mod, the masks in order, the tensors passed along for them, the
    sizes of sequences, which may be no facts, and block lists, if they were kept."""

    key: tuple
    score: Reading | None
    masks: tuple[Reading, ...]
    aux: tuple[Tensor, ...]
    sizes: StoredSizes | None = None
    blocks: Any = None


class _Remembered(NamedTuple):
    """fields: the problem's, but for its tensors and mods. shares_keys: key and value of batch 1 stand for every query batch entry.

    band: which of a call's tables the last mask reads.
    """

    plan: Plan
    fields: dict[str, Any]
    score: Recipe | None
    masks: tuple[Recipe, ...]
    has_lists: bool
    shares_keys: bool
    band: tuple[int, ...] = ()


class _Store:
    """The latest calls: a full ``young`` becomes ``old``, and what is asked of the old becomes young again."""

    def __init__(self) -> None:
        self.young: dict[tuple, Any] = {}
        self.old: dict[tuple, Any] = {}

    def get(self, key: tuple) -> Any:
        found = self.young.get(key)
        if found is None:
            found = self.old.get(key)
            if found is not None:
                self.put(key, found)
        return found

    def put(self, key: tuple, value: Any) -> None:
        if len(self.young) >= _MOST:
            self.old, self.young = self.young, {}
        with contextlib.suppress(TypeError):  # a key that cannot be hashed
            self.young[key] = value


_store = _Store()


def clear() -> None:
    """Forgets every call; for tests and measurements, which look at what a first call does."""
    _store.young, _store.old = {}, {}


def size() -> int:
    """How many calls are remembered."""
    return len(_store.young) + len(_store.old)


# ---- facts


def is_listened_to() -> bool:
    """Whether something sees torch's operations before they run; then they are all made, as on a first call."""
    return bool(_are_transforms_active() or _count_modes() or forward_ad._current_level >= 0 or _is_traced())


def _seen(x: Any) -> tuple:
    """The facts of a tensor; the last 4 bits of its address say how it is aligned, and its sign may be one that memory does not have."""
    if type(x) not in PLAIN:
        raise Unfit
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15, x.requires_grad, x.is_neg()


def _maybe_seen(x: Any) -> tuple | None:
    return None if x is None else _seen(x)


def _aux_of(given: Any) -> tuple[Tensor, ...]:
    if given is None:
        return ()
    if type(given) not in (list, tuple):
        raise Unfit
    return tuple(given)


def _read(mod: Any) -> Reading:
    if type(mod) is TracedMod:
        if mod.source is None:
            raise Unfit
        return Reading(mod.source.pattern, list(mod.scalars), list(mod.tensors))
    reading = native_reading(mod) if is_native(mod) else recognise(mod)
    if reading is None:
        raise Unfit
    return reading


def _mod_facts(reading: Reading, is_mask: bool) -> tuple:
    """A mask's numbers decide which keys are seen, so they are facts; a score mod's are not, but for those its pattern names. Whether one
    is far away is a fact, too: not every backend has room for it."""
    pattern, numbers, tensors = reading
    if is_mask:
        settled: tuple = tuple(numbers)
    else:
        settled = tuple([numbers[s] for s in pattern.fixed]) if pattern.fixed else ()
        for number in numbers:
            if type(number) is int and not -NEAR_NUMBER < number < NEAR_NUMBER:
                settled = (*settled, "far")
                break
    if not tensors:
        return pattern, settled
    return pattern, settled, tuple([_seen(t) for t in tensors]), _identical(tensors)


def _identical(tensors: Any) -> tuple[int, ...]:
    """Which of the tensors are the same one."""
    return tuple([next(j for j, u in enumerate(tensors) if u is t) for t in tensors]) if len(tensors) > 1 else ()


def scale_fact(scale: Any) -> bool:
    """Whether a scale is given; a usable number is no fact, it goes into the problem as it comes."""
    if scale is None:
        return False
    if type(scale) not in (float, int) or not abs(scale) <= flex.FLOAT32_MAX:
        raise Unfit
    return True


def _flex_facts(call: FlexCall, backend: Any, options: Any) -> _Facts | None:
    """None for a call that cannot be remembered."""
    (
        query, key, value, score_mod, block_mask, mask_mod, aux_tensors, scale, enable_gqa, sink, wants_lse, wants_max, deterministic,
        listed,
    ) = call  # fmt: skip
    try:
        flags = (
            bool(enable_gqa), wants_lse, wants_max, bool(deterministic), backend, scale is not None and scale_fact(scale),
            None if options is None else tuple([(name, type(value), value) for name, value in options.items()]),
            mask_mod is None, aux_tensors is None, _is_grad_enabled(), _default_dtype(),
        )  # fmt: skip
        tensors = (_seen(query), _seen(key), _seen(value), None if sink is None else _seen(sink))
        if score_mod is None and block_mask is None and mask_mod is None and aux_tensors is None:
            return _Facts(("flex", tensors, flags), None, (), ())
        aux = _aux_of(aux_tensors)
        lists, blocks = None, None
        score, score_facts = None, None
        masks: tuple[Reading, ...] = ()
        if score_mod is not None:
            score = _read(score_mod)
            score_facts = _mod_facts(score, False)
        if block_mask is not None:
            kept = flex.kept_lists(block_mask)
            lists, blocks = (flex.lists_facts(block_mask), None) if kept is None else (kept.facts, kept.blocks)
            masks = (_read(listed or block_mask.mask_mod),)
        if mask_mod is not None:
            masks += (_read(mask_mod),)
        extra = (*[_seen(t) for t in aux], _identical(aux)) if aux else ()
        mods = (score_facts, lists, *[_mod_facts(m, True) for m in masks])
        return _Facts(("flex", tensors, flags, extra, mods), score, masks, aux, None, blocks)
    except (Unfit, *UNREADABLE):
        return None


def _flash_facts(q: Any, k: Any, v: Any, given: Options, backend: Any, seen: Callable[[Any], tuple] = _seen) -> _Facts | None:
    """None for a call that cannot be remembered. seen: the facts of q, k, v."""
    try:
        if given.block_sparse_tensors is not None:
            return None
        aux = _aux_of(given.aux_tensors)
        score = None if given.score_mod is None else _read(given.score_mod)
        masks = () if given.mask_mod is None else (_read(given.mask_mod),)
        tensors: tuple = (seen(q), seen(k), seen(v), _maybe_seen(given.sink), _maybe_seen(given.alibi_slopes))
        if aux:
            tensors += (*[_seen(t) for t in aux], _identical(aux))
        window = given.window_size
        numbers = (given.causal, *window, given.softcap, given.num_splits, given.pack_gqa)
        flags = (
            numbers, tuple(map(type, numbers)), type(window), bool(given.return_lse), bool(given.deterministic), backend,
            scale_fact(given.softmax_scale), given.aux_tensors is None, _is_grad_enabled(), _default_dtype(),
        )  # fmt: skip
        mods = (None if score is None else _mod_facts(score, False), *[_mod_facts(m, True) for m in masks])
        return _Facts(("flash", tensors, flags, mods), score, masks, aux)
    except (Unfit, *UNREADABLE):
        return None


def _varlen_facts(q: Any, k: Any, v: Any, places: Places, given: Options, backend: Any) -> _Facts | None:
    """None for a call that cannot be remembered, such as one whose tables are looked at."""
    if type(q) not in PLAIN or type(k) not in PLAIN or type(v) not in PLAIN:
        return None
    try:
        of_places = facts_of_places(q, k, v, places, given)
        found = None if of_places is None else _flash_facts(q, k, v, given, backend, seen_rows)
    except UNREADABLE:
        return None
    if of_places is None or found is None:
        return None
    return found._replace(key=("varlen", found.key, of_places[0]), sizes=of_places[1])


# ---- calls


def remembered(key: tuple) -> Any:
    """What was remembered under ``key``, None if nothing was."""
    try:
        return _store.young.get(key) or _store.get(key)
    except TypeError:  # an argument that cannot be hashed, and so is a wrong one
        return None


def remember(key: tuple, value: Any) -> None:
    """For doors with facts of their own; ``value`` may hold no tensor."""
    _store.put(key, value)


def flex_call(call: FlexCall, backend: str | None, options: Any, is_operator: bool = False) -> tuple[Problem, Plan] | None:
    """The problem and the plan of a ``flex_attention`` call; None where it should be its operator's (``tensor_kinds``).

    options: ``kernel_options``. Raises as ``check.flex_problem`` and the plan.
    """
    facts = None if is_listened_to() else _flex_facts(call, backend, options)
    known: _Remembered | None = None if facts is None else remembered(facts.key)
    if known is None or facts is None:
        named = {"query": call.query, "key": call.key, "value": call.value, "sink": call.sink}
        if not is_operator and kinds.belong_to_operators(named):
            return None
        problem = flex.flex_problem(*call, not (is_operator and call.query.is_cuda))
        chosen = planner.choose(problem, hardware.of(problem.q.device.type), backend, flex.kernel_options(options))
        if facts is not None:
            _remember_flex(call, backend, options, facts, problem, chosen)
        return problem, chosen
    key, value = call.key, call.value
    if known.shares_keys:
        key, value = (t.expand(call.query.shape[0], *t.shape[1:]) for t in (key, value))
    fields = dict(known.fields)
    fields["q"], fields["k"], fields["v"], fields["sink"] = call.query, key, value, call.sink
    if call.scale is not None:
        fields["scale"] = float(call.scale)
    if known.score is not None:
        fields["score"] = known.score.made(facts.score, facts.aux)
    if known.masks:
        fields["predicates"] = tuple([r.made(m, facts.aux) for r, m in zip(known.masks, facts.masks, strict=True)])
    if known.has_lists:
        fields["blocks"] = flex.read_lists(call.block_mask) if facts.blocks is None else facts.blocks
    return Problem.of_fields(fields), known.plan


def flash_call(q: Any, k: Any, v: Any, given: Options, backend: str | None, is_operator: bool = False) -> tuple[Problem, Plan] | None:
    """The problem and the plan of a ``flash_attn_func`` call; None as ``flex_call``. Raises as the checks and the plan."""
    facts = None if is_listened_to() else _flash_facts(q, k, v, given, backend)
    known: _Remembered | None = None if facts is None else remembered(facts.key)
    if known is None or facts is None:
        if not is_operator and kinds.belong_to_operators(_named(q, k, v, given)):
            return None
        problem = flash.dense_problem(q, k, v, given)
        chosen = planner.choose(problem, hardware.of(problem.q.device.type), backend)
        if facts is not None:
            _remember_flash(given, lambda: _flash_facts(q, k, v, given, backend), facts, problem, chosen)
        return problem, chosen
    fields = dict(known.fields)
    fields["q"], fields["k"], fields["v"] = torch.transpose(q, 1, 2), torch.transpose(k, 1, 2), torch.transpose(v, 1, 2)
    fields["sink"] = given.sink
    if given.softmax_scale is not None:
        fields["scale"] = float(given.softmax_scale)
    if known.score is not None:
        leading = () if given.alibi_slopes is None else (given.alibi_slopes,)
        fields["score"] = known.score.made(facts.score, facts.aux, leading)
    if known.masks:
        read = (*facts.masks, None)  # the band of causal and window_size comes last
        fields["predicates"] = tuple([r.made(m, facts.aux) for r, m in zip(known.masks, read, strict=False)])
    return Problem.of_fields(fields), known.plan


def _named(q: Any, k: Any, v: Any, given: Options) -> dict[str, Any]:
    return {"q": q, "k": k, "v": v, "sink": given.sink, "alibi_slopes": given.alibi_slopes}


def varlen_call(
    q: Any, k: Any, v: Any, places: Places, given: Options, backend: str | None, is_operator: bool = False
) -> tuple[Problem, Plan] | None:
    """``flash_call`` of a ``flash_attn_varlen_func`` call. Raises as ``check_flash.varlen_problem`` and the plan."""
    facts = None if is_listened_to() else _varlen_facts(q, k, v, places, given, backend)
    known: _Remembered | None = None if facts is None else remembered(facts.key)
    tables = places.tables
    if known is None or facts is None or facts.sizes is None:
        of_tables = zip(("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "page_table"), tables, strict=True)
        if not is_operator and kinds.belong_to_operators(_named(q, k, v, given) | dict(of_tables)):
            return None
        problem = flash.varlen_problem(q, k, v, *tables[:2], *places.most, *tables[2:], places.validate, given)
        chosen = planner.choose(problem, hardware.of(problem.q.device.type), backend)
        if facts is not None:
            _remember_flash(given, lambda: _varlen_facts(q, k, v, places, given, backend), facts, problem, chosen, tables)
        return problem, chosen
    fields = dict(known.fields)
    fields["q"], fields["k"], fields["v"], fields["sink"] = _heads_first(q), _heads_first(k), _heads_first(v), given.sink
    fields["sequences"] = StoredSequences(LengthTables(*tables[:4]), facts.sizes, tables[4], q.device)
    if given.softmax_scale is not None:
        fields["scale"] = float(given.softmax_scale)
    if known.score is not None:
        fields["score"] = known.score.made(facts.score, facts.aux, () if given.alibi_slopes is None else (given.alibi_slopes,))
    if known.masks:
        users = [r.made(m, facts.aux) for r, m in zip(known.masks, facts.masks, strict=False)]
        bands = [r.made(None, (), tuple([tables[i] for i in known.band])) for r in known.masks[len(users) :]]
        fields["predicates"] = (*users, *bands)
    return Problem.of_fields(fields), known.plan


def _heads_first(x: Tensor) -> Tensor:
    """(B, S, H, D) or packed (total, H, D) as (B or 1, H, S, D), a view."""
    return torch.transpose(x if x.ndim == 4 else x.unsqueeze(0), 1, 2)


# ---- remembering


# The facts are read once more behind the checks, and a call during which they changed is not remembered: another thread may have
# rebound what a mod captures, and the first trace of a mod's code may find more of its numbers to be facts.


def _remember_flex(call: FlexCall, backend: Any, options: Any, facts: _Facts, problem: Problem, chosen: Plan) -> None:
    if not chosen.is_reusable:
        return
    asked = [problem.score, *problem.predicates]
    if not _settle([m for m in asked if m is not None], problem):
        return
    still = _flex_facts(call, backend, options)
    if still is None or still.key != facts.key:
        return
    try:
        score = None if problem.score is None else Recipe.of(problem.score)
        masks = tuple(Recipe.of(p) for p in problem.predicates)
        shares = call.key.shape[0] != call.query.shape[0]
        _store.put(facts.key, _Remembered(chosen, fields_of(problem), score, masks, problem.blocks is not None, shares))
    except Unfit:
        return


def _remember_flash(
    given: Options, again: Callable[[], _Facts | None], facts: _Facts, problem: Problem, chosen: Plan, tables: tuple[Any, ...] = ()
) -> None:
    """again: reads the call's facts once more. tables: of a call with sequences."""
    if not chosen.is_reusable:
        return
    aux = None if given.aux_tensors is None else list(given.aux_tensors)
    own = None if given.score_mod is None else flex.traced(given.score_mod, "score", problem.q, aux)
    users = [m for m in (own, None if given.mask_mod is None else problem.predicates[0]) if m is not None]
    if not _settle(users, problem):
        return
    still = again()
    if still is None or still.key != facts.key:
        return
    try:
        score = None if problem.score is None else _chained_recipe(problem.score, own, given.alibi_slopes)
        count, bands = int(given.mask_mod is not None), problem.predicates[int(given.mask_mod is not None) :]
        # the band of causal and window_size comes last; the facts settle its numbers
        masks = (*[Recipe.of(p) for p in problem.predicates[:count]], *map(_settled, bands))
        band = _places_among(tables, bands[0].tensors) if bands else ()
        _store.put(facts.key, _Remembered(chosen, fields_of(problem), score, masks, False, False, band))
    except Unfit:
        return


def _places_among(tables: tuple[Any, ...], read: tuple[Tensor, ...]) -> tuple[int, ...]:
    """Which of the call's tables are these."""
    found = tuple(next((i for i, t in enumerate(tables) if t is x), -1) for x in read)
    if -1 in found:  # computed from the tables
        raise Unfit
    return found


def _settled(mod: TracedMod) -> Recipe:
    return Recipe(mod.kind, mod.expr, mod.scalars, (), (), mod.name, None if mod.tensors else mod)


def _chained_recipe(score: TracedMod, own: TracedMod | None, slopes: Tensor | None) -> Recipe:
    """The recipe of ``softcap then alibi_slopes then`` the user's own: the first two bring settled numbers, and the slopes."""
    if own is not None and own.source is None:
        raise Unfit
    own_scalars, own_tensors = ((), ()) if own is None or own.source is None else (own.source.scalars, own.source.tensors)
    before = score.scalars[: len(score.scalars) - len(own_scalars)]
    if len(score.tensors) - len(own_tensors) != (slopes is not None):
        raise Unfit
    fixed = score if own is None and not score.tensors else None
    return Recipe("score", score.expr, before, own_scalars, own_tensors, score.name, fixed)


def _settle(mods: list[TracedMod], problem: Problem) -> bool:
    """Whether the checks of these mods hold for calls of the same facts; makes facts of the numbers on which they hang."""
    for mod in mods:
        if mod.source is None:
            return False
        sizes = (problem.batch, problem.heads_q, problem.bound_q, problem.bound_k)
        if problem.sequences is not None and not plainly_inside(mod, *sizes):
            return False  # then the lengths were looked at
        hangs = doubt(mod, *sizes)
        if hangs.of_values or (hangs_on_masks(mod, *sizes) and (problem.blocks is not None or any(p.tensors for p in problem.predicates))):
            return False
        if hangs.of_numbers:
            mod.source.pattern.fix(mod.source.scalars)
    return True


def fields_of(problem: Problem) -> dict[str, Any]:
    """All fields, the tensors and what the mods captured left out."""
    return {
        "q": None, "k": None, "v": None, "scale": problem.scale, "score": None, "predicates": (), "blocks": None, "sink": None,
        "wants_lse": problem.wants_lse, "wants_max": problem.wants_max, "deterministic": problem.deterministic, "sequences": None,
        "num_splits": problem.num_splits, "blocks_follow": problem.blocks_follow,
        "packs": problem.packs,
    }  # fmt: skip
