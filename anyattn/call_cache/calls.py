"""Remembered calls: a two-generation cache from a call's key to its plan and to its problem without tensors.

It keeps at most ``2 * MOST`` calls, and no tensor or function of the user's except CuTe functions, which are their own programs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar
from weakref import WeakSet

from anyattn.call_cache.rebind import Recipe, checks_hold, decisive_tensors
from anyattn.call_cache.replays import Replays, Values
from anyattn.call_cache.signature import NotCacheable, Signature
from anyattn.mods.analysis.by_writes import ByWrites
from anyattn.mods.analysis.visible_loads import is_captured
from anyattn.mods.dropout import dropout_of
from anyattn.mods.tracing.trace import TracedMod
from anyattn.plan import Plan
from anyattn.problem import Problem
from anyattn.sequences.unread_kvcache import CacheSizes
from anyattn.validate import flex
from anyattn.validate.flash import Options

__all__ = [
    "MOST",
    "RememberedCall",
    "TwoGenerationCache",
    "clear",
    "emptied_with_calls",
    "known",
    "known_plan",
    "remember",
    "remember_again",
    "score_of_user",
    "size",
]

MOST = 512


class RememberedCall(NamedTuple):
    """The properties that calls of one key share.

    fields: of the problem, without its tensors and the captured values of its mods.
    has_lists, shares_keys (``flex_attention``): whether there are block lists; whether key and value have batch 1 for every query batch
    entry. extents, sizes, follows (``flash_attn_with_kvcache``): for ``append.check_step``, if the call appends; for ``CacheStep``.
    replays: of such calls, if their launches can be recorded.
    decisive, checked: ``rebind.decisive_tensors``, and the tensors in these places whose contents the bounds checks have read.
    """

    plan: Plan
    fields: dict[str, Any]
    score: Recipe | None
    masks: tuple[Recipe, ...]
    has_lists: bool = False
    shares_keys: bool = False
    extents: tuple[int, ...] = ()
    sizes: CacheSizes | None = None
    follows: bool = False
    replays: Replays | None = None
    decisive: tuple[tuple[int, int], ...] = ()
    checked: ByWrites | None = None

    def decisive_tensors(self, signature: Signature) -> list[Any]:
        return [(*signature.readings[reading].tensors, *signature.aux)[place] for reading, place in self.decisive]

    def note_checked(self, before: Signature, after: Signature) -> None:
        """Notes that the contents of the decisive tensors are checked, unless another thread has rebound a captured variable meanwhile:
        before, after: a call's signature, made before its checks and after them."""
        tensors = self.decisive_tensors(before)
        if self.checked is not None and all(a is b for a, b in zip(tensors, self.decisive_tensors(after), strict=True)):
            self.checked.put(tensors, True)

    def values(self, tensors: list[Any], scale: Any, signature: Signature, arguments: tuple[Any, ...]) -> Values:
        """What a replay of a warm call is given. tensors: of the call, without those of its mods. arguments: as in ``Recipe.mod``."""
        for reading in signature.readings:
            tensors += reading.tensors
        tensors += signature.aux
        numbers = () if self.score is None else self.score.captured(signature, arguments)[0]
        return Values(tensors, self.fields["scale"] if scale is None else float(scale), numbers)

    def filled(
        self, q: Any, k: Any, v: Any, sink: Any, scale: Any, signature: Signature, arguments: tuple[Any, ...] = ()
    ) -> dict[str, Any]:
        """The fields of a warm call's problem; the entry point adds block lists and sequences. arguments: as in ``Recipe.mod``."""
        fields = dict(self.fields)
        fields["q"], fields["k"], fields["v"], fields["sink"] = q, k, v, sink
        if signature.dropout is not None:
            fields["dropout"] = dropout_of(signature.dropout)
        if scale is not None:
            fields["scale"] = float(scale)
        if self.score is not None:
            fields["score"] = self.score.mod(signature, arguments)
        if self.masks:
            fields["predicates"] = tuple([mask.mod(signature, arguments) for mask in self.masks])
        return fields


emptied_with_calls: WeakSet[Any] = WeakSet()  # everything that ``clear`` clears
_Remembered = TypeVar("_Remembered")


class TwoGenerationCache(Generic[_Remembered]):
    """The latest calls: a full ``young`` becomes ``old``; a hit in ``old`` is copied to ``young``.

    A key that cannot be hashed contains a wrong argument; it is never found and never stored.
    """

    def __init__(self) -> None:
        self.young: dict[tuple, _Remembered] = {}
        self.old: dict[tuple, _Remembered] = {}
        emptied_with_calls.add(self)

    def clear(self) -> None:
        self.young, self.old = {}, {}

    def get(self, key: tuple) -> _Remembered | None:
        try:
            call = self.young.get(key)
        except TypeError:
            return None
        if call is None:
            call = self.old.get(key)
            if call is not None:
                self.put(key, call)
        return call

    def put(self, key: tuple, call: _Remembered) -> None:
        if len(self.young) >= MOST:
            self.old, self.young = self.young, {}
        with contextlib.suppress(TypeError):
            self.young[key] = call


_calls: TwoGenerationCache[RememberedCall] = TwoGenerationCache()


def clear() -> None:
    """Forgets all calls, for tests and measurements of first calls."""
    for cache in emptied_with_calls:
        cache.clear()


def size() -> int:
    """The number of remembered calls."""
    return len(_calls.young) + len(_calls.old)


def known(signature: Signature | None, reads_captured: bool = True) -> RememberedCall | None:
    """The remembered call with this signature; None if the contents of its captured tensors have to be checked again. reads_captured: as in
    ``flex.flex_problem``; without a check, indices that are computed from contents are clamped, as in every call that is ``checked``."""
    warm = None if signature is None else _calls.get(signature.key)
    if warm is None or signature is None or warm.checked is None or not reads_captured:
        return warm
    return None if warm.checked.get(warm.decisive_tensors(signature)) is None else warm


def remember(
    signature: Signature,
    recompute: Callable[[], Signature | None],
    problem: Problem,
    plan: Plan,
    score: TracedMod | None = None,
    arguments: tuple[Any, ...] = (),
    reads_captured: bool = True,
    **more: Any,
) -> None:
    """Remembers a first call, unless its checks or its plan depend on the contents of tensors.

    recompute: computes the signature once more. A call whose signature changed during the checks is not remembered: another thread may have
    rebound a captured variable, and the first trace of a mod may find that more of its numbers belong to the key.
    score: the user's part of ``problem.score``; the first predicates are the user's, too. arguments: as in ``Recipe.of``.
    reads_captured: as in ``known``. more: fields of ``RememberedCall``.
    """
    if not plan.is_reusable:
        return
    count = len(signature.readings) - (score is not None)
    if not checks_hold([m for m in (score, *problem.predicates[:count]) if m is not None], problem):
        return
    recomputed = recompute()
    if recomputed is None or recomputed.key != signature.key:
        return
    recipes = _recipes(signature, problem, score, arguments)
    if recipes is None:
        return
    decisive = decisive_tensors([score, *problem.predicates[:count]], problem)
    if decisive and is_captured():
        return  # whose check has not read them
    call = RememberedCall(plan, _without_tensors(problem), *recipes, decisive=decisive, checked=ByWrites() if decisive else None, **more)
    if reads_captured:
        call.note_checked(signature, recomputed)
    _calls.put(signature.key, call)


def known_plan(
    signature: Signature | None,
    recompute: Callable[[], Signature | None],
    problem: Problem,
    score: TracedMod | None = None,
    arguments: tuple[Any, ...] = (),
    reads_captured: bool = True,
) -> Plan | None:
    """The plan of the remembered call with this signature, after its captured tensors had to be checked again, if the checks have come to
    the same programs; None if there is none. So a mod that is made anew in every call, with indices in a new tensor, costs only its checks:
    no plan and no launches are made again. Its tensors count as checked from then on. recompute, problem, score, arguments, reads_captured:
    as in ``remember``."""
    warm = None if signature is None else _calls.get(signature.key)
    if warm is None or signature is None or warm.checked is None:
        return None
    recomputed = recompute()
    if recomputed is None or recomputed.key != signature.key:
        return None
    if _recipes(signature, problem, score, arguments) != (warm.score, warm.masks):
        return None
    if reads_captured and not is_captured():  # otherwise no contents have been read
        warm.note_checked(signature, recomputed)
    return warm.plan


def _recipes(
    signature: Signature, problem: Problem, score: TracedMod | None, arguments: tuple[Any, ...]
) -> tuple[Recipe | None, tuple[Recipe, ...]] | None:
    """``RememberedCall.score`` and ``masks`` of a call; None if they cannot be made again from a signature."""
    has_score, count = int(score is not None), len(signature.readings)
    try:
        whole = None if problem.score is None else Recipe.of(problem.score, score, 0, arguments)
        masks = [Recipe.of(p, p if i + has_score < count else None, i + has_score, arguments) for i, p in enumerate(problem.predicates)]
    except NotCacheable:
        return None
    return whole, tuple(masks)


def remember_again(signature: Signature, call: RememberedCall) -> None:
    """Remembers a warm call under its narrower signature too, with replays of its own, once two in a row have it: where every call has
    other sizes, nothing would be found again."""
    replays = call.replays
    if replays is not None and replays.comes_again(signature.key):
        _calls.put(signature.key, call._replace(replays=replays.apart()))


def score_of_user(options: Options, problem: Problem) -> TracedMod | None:
    """The user's part of the problem's score; softcap and ALiBi come before it."""
    if options.score_mod is None:
        return None
    return flex.traced(options.score_mod, "score", problem.q, None if options.aux_tensors is None else list(options.aux_tensors))


def _without_tensors(problem: Problem) -> dict[str, Any]:
    """All fields, with tensors and mods removed."""
    return {
        "q": None, "k": None, "v": None, "scale": problem.scale, "score": None, "predicates": (), "blocks": None, "sink": None,
        "wants_lse": problem.wants_lse, "wants_max": problem.wants_max, "deterministic": problem.deterministic, "sequences": None,
        "num_splits": problem.num_splits, "blocks_follow": problem.blocks_follow, "packs": problem.packs, "dropout": None,
        "wide_kv_grads": problem.wide_kv_grads, "kv_scales": None, "skip": None,
    }  # fmt: skip
