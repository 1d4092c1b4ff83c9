"""Which calls of a mod are watched for clocks: the first of an object, or of a function of the same code and captures."""

from __future__ import annotations

import gc
import time
import types
import weakref

import pytest
import torch

from anyattn import ModError
from anyattn.mods.tracing import random_numbers
from anyattn.mods.tracing.trace import trace

clock = time.time


def message_of(fn, kind: str = "score") -> str:
    with pytest.raises(ModError) as error:
        trace(fn, kind)
    return str(error.value)


class Weighted:
    """Compared by its tensor, as torch compares: a truth value that asks for one element."""

    def __init__(self, reads: bool):
        self.weights, self.reads = torch.ones(3), reads

    def __eq__(self, other):
        return self.weights == other.weights

    def __hash__(self):
        return 3

    def __call__(self, score, b, h, q, k):
        return score + (time.time() if self.reads else hash(0))


def test_mods_are_watched_one_by_one_whatever_their_equality_is():
    quiet = Weighted(False)
    for _ in range(2):
        assert trace(quiet, "score").expr.uses_score
    assert "reads a clock" in message_of(Weighted(True))


def test_functions_of_the_same_parts_are_watched_once(monkeypatch):
    watched, refuse = [], random_numbers._refuse_reads

    def watch(frame, event, called):
        watched.append(event)
        refuse(frame, event, called)

    class Layer:
        window = 4

        def mod(self, bias, late=False, read=None):
            def inner(q):
                return hash(0) if read is None else read()

            return lambda s, b, h, q, k: s + bias[q] * self.window + (clock() if late else inner(q))

    monkeypatch.setattr(random_numbers, "_refuse_reads", watch)
    layer = Layer()
    counts = []
    for bias, options in (
        (torch.ones(4), {}),
        (torch.ones(4), {}),
        (torch.zeros(5), {}),
        (torch.ones(4), {"read": lambda: 1}),
    ):
        watched.clear()
        assert trace(layer.mod(bias, **options), "score").expr.uses_score
        counts.append(bool(watched))
    assert counts == [True, False, False, True]
    names, counts = {"w": 2}, []
    listed = lambda s, b, h, q, k: s + hash(0) * names["w"]
    for _ in range(2):  # a dictionary has no weak references: then it is the function that is known again
        watched.clear()
        assert trace(listed, "score").expr.uses_score
        counts.append(bool(watched))
    assert counts == [True, False]
    for options in ({"late": True}, {"read": clock}, {"read": lambda: time.time()}):
        assert "reads a clock" in message_of(layer.mod(torch.ones(4), **options))


def test_watched_methods_are_not_kept_alive():
    class Owner:
        pass

    owner = Owner()
    made = [types.MethodType(lambda self, b, h, q, k: q >= k + hash(0), owner) for _ in range(2)]
    closed_over = weakref.ref(owner)
    for method in made:
        method.__func__.of = owner  # as a closure over the object has it
        assert trace(method, "mask").expr.output.op == "ge"
    first = weakref.ref(made[0].__func__)
    del made, method
    gc.collect()
    assert first() is None
    del owner
    gc.collect()
    assert closed_over() is None
