"""``walk`` and ``rebuild`` see the same numbers in the same order, and walking answers None when it cannot know."""

from __future__ import annotations

import functools
import types

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks

from anyattn import masks
from anyattn.mods.tracing import closure

one, two = 1, 2.5


def uses_globals(b, h, q, k):
    return (q - k < one) & (k > two)


def make(n, m=4):
    def helper(x, by=5, *, extra=6):
        return x * n + by + extra

    def f(x, b, h, q, k, limit=7):
        return (helper(q) < m) & (helper(k) > one) & (q < x) & (k < limit)

    return f


MODS = {
    "globals": uses_globals,
    "closure": make(3),
    "partial": functools.partial(make(3), 9),
    "keyword_partial": functools.partial(make(3), 9, limit=8),
    "partial_of_partial": functools.partial(functools.partial(make(3), 9), limit=8),
    "and_masks": and_masks(functools.partial(make(3), 9), uses_globals, functools.partial(make(10, 11), 12)),
    "shared": and_masks(uses_globals, uses_globals),
    "wrapped": masks.causal(3) & masks.sliding_window(5, 6),
    "mask_inside": and_masks(masks.sliding_window(2, 3), uses_globals),
}


@pytest.mark.parametrize("name", MODS)
def test_same_numbers_in_the_same_order(name):
    lifted: list = []
    closure.rebuild(MODS[name], lambda n: lifted.append(n) or n)
    found = closure.walk(MODS[name])
    assert found is not None and list(found.numbers) == lifted and lifted
    assert hash(found.structure) == hash(closure.walk(MODS[name]).structure)


def test_the_copy_has_the_lifted_numbers_and_the_original_keeps_its_own():
    f = functools.partial(make(3), 9)
    copy = closure.rebuild(f, lambda n: n + 100)
    assert copy is not f and copy.args == (109,) and f.args == (9,)
    assert copy.func.__closure__[1].cell_contents == 104 and f.func.__closure__[1].cell_contents == 4
    assert copy.func.__defaults__ == (107,) and copy.func.__globals__["one"] == 101 and one == 1


def test_what_captures_no_number_stays_the_object_that_it_is():
    """A program may know its objects by identity: a copy would not be found in its registry."""
    mods = (MODS["wrapped"].fn, make(True, None), Owner().method, functools.partial(print, "x"), and_masks(print, print))
    assert all(closure.rebuild(f, lambda n: n) is f for f in mods)


def test_structures():
    same = [closure.walk(make(3)).structure, closure.walk(make(4, 5)).structure]
    assert same[0] == same[1] != closure.walk(make(3.0)).structure
    tensors = [closure.walk(functools.partial(make(3), torch.zeros(n))) for n in (1, 2)]
    assert tensors[0].structure == tensors[1].structure and tensors[0].tensors[0].shape == (1,)


def test_a_function_that_captures_itself():
    def f(b, h, q, k):
        return f is None or q > k

    assert closure.walk(f) is not None and closure.rebuild(f, lambda n: n) is f


class Owner:
    n = 3

    def method(self, b, h, q, k):
        return q > self.n


settings = types.ModuleType("settings")
settings.n = 3
UNKNOWN = {
    "object": lambda b, h, q, k, owner=Owner(): q > owner.n,  # noqa: B008
    "method": Owner().method,
    "class": lambda b, h, q, k: q > Owner.n,
    "module": lambda b, h, q, k: q > settings.n,
    "list": lambda b, h, q, k, box=[1, 2]: q > box[0],
    "method_of_dict": lambda b, h, q, k, get={0: 1}.get: q > get(0),
    "nn_module": torch.nn.Linear(1, 1),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_could_change_unseen_is_not_recognised(name):
    assert closure.walk(UNKNOWN[name]) is None
