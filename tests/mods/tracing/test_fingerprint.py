"""Reading a mod by a pattern finds what describing it anew finds, and a mod that has changed is described anew."""

from __future__ import annotations

import functools
import gc
import types
import weakref

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks

from anyattn import masks, scores
from anyattn.mods.analysis.evaluate import evaluate
from anyattn.mods.tracing import closure, fingerprint
from anyattn.mods.tracing.trace import trace

one, two, table = 1, 2.5, torch.arange(9)


def by_globals(b, h, q, k):
    return (q - k < one) & (k > two) & (table[q] == 0)


def make(n, m=4, text="a"):
    def helper(x, by=5, *, extra=6):
        return x * n + by + extra if text == "a" else x

    def f(x, b, h, q, k, limit=7):
        return (helper(q) < m) & (helper(k) > one) & (torch.abs(q) < x) & (k < limit)

    return f


def recursive():
    def f(b, h, q, k):
        return f is None or q > k

    return f


def unfilled():
    f = lambda b, h, q, k: (q > k) if True else later
    if f is None:
        later = 3
    return f


KINDS = {
    "globals": lambda: by_globals,
    "closure": lambda: make(3),
    "other_numbers": lambda: make(5, 6),
    "other_kinds": lambda: make(5.0, True),
    "a_tensor": lambda: make(torch.ones(3)),
    "text": lambda: make(3, text="b"),
    "partial": lambda: functools.partial(make(3), 9),
    "partial_of_a_tensor": lambda: functools.partial(make(3), torch.ones(2)),
    "keyword_partial": lambda: functools.partial(make(3), 9, limit=8),
    "partial_of_partial": lambda: functools.partial(functools.partial(make(3), 9), limit=8),
    "and_masks": lambda: and_masks(functools.partial(make(3), 9), by_globals, functools.partial(make(10, 11), 12)),
    "and_masks_of_two": lambda: and_masks(by_globals, masks.causal()),
    "shared": lambda: and_masks(by_globals, by_globals),
    "causal": lambda: masks.causal(3),
    "wrapped": lambda: masks.causal(3) & masks.sliding_window(5, 6),
    "wrapped_otherwise": lambda: masks.causal(3) & ~masks.sliding_window(5, 6),
    "wrapped_deeply": lambda: (masks.causal(3) | masks.sliding_window(5, 6)) & masks.causal(1),
    "scores": lambda: scores.alibi(torch.ones(3)).then(scores.softcap(3.0)),
    "recursive": recursive,
    "unfilled": unfilled,
    "dtype": lambda: functools.partial(lambda d, b, h, q, k: q.to(d) > 0, torch.float32),
}


def agrees(fn):
    """Twice: the first reading may be the description itself."""
    want = closure.walk(fn)
    for _ in range(2):
        found = fingerprint.recognise(fn)
        if want is None:
            assert found is None
        else:
            assert found.pattern.structure == want.structure
            assert list(map(repr, found.numbers)) == list(map(repr, want.numbers))
            assert len(found.tensors) == len(want.tensors) and all(a is b for a, b in zip(found.tensors, want.tensors))
    return found


def test_readings_agree_with_descriptions():
    """One after the other, so that a reading has every earlier pattern to be mistaken for."""
    for _ in range(2):
        patterns = {name: agrees(make_one()).pattern for name, make_one in KINDS.items()}
    assert patterns["closure"] is patterns["other_numbers"] is not patterns["text"]
    assert patterns["keyword_partial"] is patterns["partial_of_partial"]  # Python flattens these
    assert len({id(p) for p in patterns.values()}) == len(KINDS) - 2


CHANGES = [
    lambda f: setattr(f, "__defaults__", (1, 2)), lambda f: setattr(f, "__defaults__", None), lambda f: setattr(f, "__defaults__", (8.5,)),
    lambda f: setattr(f, "__kwdefaults__", {"more": 1}), lambda f: setattr(f, "__kwdefaults__", {"other": 1}),
    lambda f: setattr(f, "__kwdefaults__", {"other": "text"}), lambda f: f.__kwdefaults__.update(other=torch.ones(1)),
    lambda f: setattr(f, "__kwdefaults__", None),
    lambda f: setattr(f, "__module__", "somebody.else"), lambda f: setattr(f, "attribute", 3), lambda f: f.__dict__.clear(),
    lambda f: setattr(f.__closure__[0].cell_contents, "__defaults__", (torch.ones(2),)),
    lambda f: setattr(f.__closure__[0].cell_contents, "attribute", 1), lambda f: f.__closure__[0].cell_contents.__dict__.clear(),
    lambda f: setattr(f.__closure__[1], "cell_contents", "text"), lambda f: setattr(f.__closure__[1], "cell_contents", True),
    lambda f: setattr(f.__closure__[1], "cell_contents", torch.ones(2)), lambda f: setattr(f.__closure__[1], "cell_contents", [1, 2]),
    lambda f: setattr(f.__closure__[1], "cell_contents", [f, f]), lambda f: f.__closure__[1].cell_contents.pop(),
    lambda f: f.__closure__[1].cell_contents.append(by_globals), lambda f: setattr(f.__closure__[1], "cell_contents", (f, by_globals)),
    lambda f: setattr(f.__closure__[1], "cell_contents", (1, (2.5, f))), lambda f: setattr(f.__closure__[1], "cell_contents", (1, (2, f))),
    lambda f: setattr(f.__closure__[1], "cell_contents", types), lambda f: setattr(f.__closure__[1], "cell_contents", torch.float64),
    lambda f: f.__closure__[1].__delattr__("cell_contents"), lambda f: setattr(f.__closure__[1], "cell_contents", f),
    lambda f: setattr(f.__closure__[1], "cell_contents", torch.abs), lambda f: setattr(f.__closure__[1], "cell_contents", torch.sin),
    lambda f: setattr(f.__closure__[0], "cell_contents", by_globals), lambda f: setattr(f, "__code__", make(1).__code__),
]  # fmt: skip


def neighbours(near, by=(1, (2.0, "text"))):
    return lambda b, h, q, k, of=(near, by): ((q - k).abs() * of[1][0] <= near[0]) & (k < near[-1][0]) & (q < sum(pair) + len(near))


pair = (3, 5)


def test_tuples_of_numbers(monkeypatch):
    """Their items are numbers of a call: others of the same kinds have the same pattern, and no other code."""
    first = fingerprint.recognise(neighbours((4, True, (60,))))
    again = fingerprint.recognise(neighbours((7, True, (50,))))
    assert first is not None and again is not None and first.pattern is again.pattern
    assert first.numbers == [4, 60, 3, 5, 4, 60, 1, 2.0] and again.numbers == [7, 50, 3, 5, 7, 50, 1, 2.0]
    for other in ((7, False, (50,)), (7, True, (50.0,)), (7, True, (50, 1)), [7, True, (50,)], (7, True, [50])):
        found = fingerprint.recognise(neighbours(other))
        assert found is None or found.pattern is not first.pattern
    rows, keys, seen = torch.arange(90)[:, None], torch.arange(70), []
    for near, items in (
        ((4, True, (60,)), (3, 5)),
        ((7, True, (50,)), (3, 5)),
        ((7, True, (50,)), (30, 51)),
        ((7, False, (50,)), (3, 5.5)),
    ):
        monkeypatch.setitem(globals(), "pair", items)
        mask = neighbours(near)
        traced = trace(mask, "mask")
        seen.append(traced.expr)
        assert torch.equal(evaluate(traced, 0, 0, rows, keys), mask(0, 0, rows, keys))
    assert seen[0] is seen[1]


def levels(n):
    def same(q, k, names):
        return (q == k) if not names else ((q // n == k // n) | same(q // n, k // n, names[1:]))

    return lambda b, h, q, k: same(q, k, ("a", "b"))


def again(n):
    def f(b, h, q, k, is_first=True):
        return f(b, h, q, k, False) if is_first else q - k < n

    return f


def by_tuple(n):
    def f(b, h, q, k):
        return q - k < both[1]

    both = (f, n)
    return f


@pytest.mark.parametrize("make_one", [levels, again, by_tuple])
def test_functions_that_reach_themselves_have_the_numbers_of_each_call(make_one):
    """A copy's own reference to itself is the original: such mods are traced at every call."""
    rows, keys = torch.arange(60)[:, None], torch.arange(50)
    for n in (3, 9, 3, 5):
        mask = make_one(n)
        assert fingerprint.recognise(mask) is None
        assert torch.equal(torch.as_tensor(evaluate(trace(mask, "mask"), 0, 0, rows, keys)).expand(60, 50), mask(0, 0, rows, keys))


def test_a_function_that_is_changed_again_and_again():
    f = make(3)
    for change in CHANGES:
        agrees(f)
        change(f)
        agrees(f)


def test_globals_that_come_and_go(monkeypatch):
    fn = lambda b, h, q, k: abs(q - k) < one
    agrees(fn)
    for name, value in (("one", 4), ("one", 2.0), ("abs", lambda x: x), ("abs", torch.abs), ("one", torch.ones(()))):
        with monkeypatch.context() as changed:
            changed.setitem(globals(), name, value)
            agrees(fn)
        agrees(fn)
    monkeypatch.delitem(globals(), "one")
    agrees(fn)


def test_a_wrapped_mod_with_another_function():
    mask = masks.causal()
    agrees(mask)
    for fn in (by_globals, masks.sliding_window(1, 2)):
        mask.fn = fn
        agrees(mask)


@pytest.mark.parametrize(
    "fn",
    [3, None, len, torch.abs, types.SimpleNamespace(), object, [].append, "text"],
    ids=lambda x: getattr(x, "__name__", type(x).__name__),
)
def test_what_is_no_function_of_python(fn):
    assert fingerprint.recognise(fn) is None


def test_equal_code_of_other_namespaces():
    """The same lines run in two places are two functions with their own globals."""
    spaces = [{"limit": 1, "__name__": "first"}, {"limit": torch.ones(1), "__name__": "second"}, {"__name__": "third"}]
    for space in spaces:
        exec("def f(b, h, q, k):\n    return q - k < limit", space)
    for _ in range(2):
        for space in spaces:
            agrees(space["f"])


def test_patterns_are_bounded():
    def nested(n):
        mask = masks.causal()
        for i in range(7):
            mask = mask & (masks.causal() if n >> i & 1 else masks.sliding_window(1, 1))
        return mask

    for n in range(128):
        agrees(nested(n))
    assert max(map(len, fingerprint._patterns.values())) <= fingerprint._MOST_PATTERNS
    for n in range(fingerprint._MOST_CODE + 50):
        space = {}
        exec(f"def f{n}(b, h, q, k):\n    return q > k", space)
        agrees(space[f"f{n}"])
    assert len(fingerprint._patterns) <= fingerprint._MOST_CODE


def test_no_function_or_tensor_is_kept():
    kept = torch.ones(3)
    fn = functools.partial(lambda t, b, h, q, k: t[q] > 0, kept)
    inner = fn.func
    trace(fn, "mask"), trace(fn, "mask")
    gone = [weakref.ref(kept), weakref.ref(inner)]
    del kept, fn, inner
    gc.collect()
    assert [r() for r in gone] == [None, None]
