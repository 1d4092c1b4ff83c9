"""Symbols answer questions about their types as the tensors and numbers of eager mode do, and none outlives its trace."""

import functools
import gc
import numbers
import operator
import re
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

import anyattn
from anyattn import oracle
from anyattn.mods.tracing.fingerprint import recognise
from anyattn.mods.tracing.pure_names import compares_identity
from anyattn.testing import budget

S = 24
NUMBER, RATE = 7, 2.5
SAME, OTHER = NUMBER, int("1000007")
TABLE = torch.arange(S)


def is_same(a: object, b: object) -> bool:
    return a is b


CHECKS = {
    "isinstance int": lambda q: isinstance(NUMBER, int),
    "isinstance float": lambda q: isinstance(RATE, (float, str)) and not isinstance(RATE, int),
    "isinstance no tensor": lambda q: not isinstance(NUMBER, torch.Tensor),
    "isinstance of an index": lambda q: isinstance(q, torch.Tensor) and not isinstance(q, int),
    "isinstance of a load": lambda q: isinstance(TABLE[q], torch.Tensor),
    "isinstance of a sum": lambda q: isinstance(NUMBER + 1, int) and isinstance(NUMBER * RATE, float),
    "is_tensor": lambda q: torch.is_tensor(q) and not torch.is_tensor(NUMBER),
    "type is": lambda q: type(NUMBER) is int and type(RATE) is float,
    "type of an index": lambda q: type(q) is torch.Tensor,
    "type of three arguments": lambda q: type("Made", (), {"there": True}).there,
    "hasattr": lambda q: hasattr(q, "dtype") and not hasattr(NUMBER, "dtype") and hasattr(NUMBER, "bit_length"),
    "getattr": lambda q: getattr(NUMBER, "dtype", None) is None and getattr(q, "dtype", None) is torch.int64,
    "key of a dict": lambda q: {7: True}.get(NUMBER, False),
    "element of a set": lambda q: NUMBER in {7, 8},
    "hash": lambda q: hash(NUMBER) == hash(7),
    "text": lambda q: str(NUMBER) == "7" and repr(RATE) == "2.5" and f"{NUMBER:03d}" == "007",
    "is": lambda q: NUMBER is SAME and NUMBER is not OTHER and NUMBER is not None,
    "is of a helper": lambda q: is_same(NUMBER, SAME) and not is_same(OTHER, int("1000007")),
    "is of operator": lambda q: operator.is_(NUMBER, SAME) and operator.is_not(NUMBER, OTHER),
    "id": lambda q: id(NUMBER) == id(SAME) != id(OTHER),
    "methods": lambda q: NUMBER.bit_length() == 3 and RATE.is_integer() is False and NUMBER.real == 7,
}


@pytest.mark.parametrize("name", CHECKS)
def test_functions(name: str) -> None:
    check = CHECKS[name]

    def mask(b, h, q, k):  # type: ignore[no-untyped-def]
        return q >= k if check(q) else q < k

    found, wanted = (make(mask, 1, 1, S, S, device="cpu") for make in (seen, create_mask))
    assert torch.equal(found, wanted)
    assert torch.equal(wanted[0, 0], torch.ones(S, S).tril().bool())


def seen(mask, *sizes: int, device: str) -> torch.Tensor:  # type: ignore[no-untyped-def]
    q = torch.zeros(1, 1, S, 16)
    return anyattn.flex_attention(q, q, torch.eye(S)[None, None], mask_mod=mask) > 0


# ---- questions asked in code that is not the mod's own


def by_match(x: Any) -> bool:
    match x:
        case torch.Tensor():
            return True
    return False


@functools.singledispatch
def dispatched(x: Any) -> bool:
    return False


@dispatched.register
def _(x: torch.Tensor) -> bool:
    return True


QUESTIONS: dict[str, Callable[[Any], bool]] = {  # True for an index, False for a captured int
    "isinstance": lambda x: isinstance(x, torch.Tensor),
    "isinstance of a type of integers": lambda x: isinstance(x, torch.LongTensor),
    "isinstance of int": lambda x: not isinstance(x, int),
    "isinstance of an abstract class": lambda x: not isinstance(x, numbers.Integral),
    "is_tensor": lambda x: torch.is_tensor(x),
    "type is": lambda x: type(x) is torch.Tensor,
    "type is int": lambda x: type(x) is not int,
    "type in a tuple": lambda x: type(x) in (torch.Tensor, torch.nn.Parameter),
    "type as a key": lambda x: {torch.Tensor: True, int: False}[type(x)],
    "name of the type": lambda x: type(x).__name__ == "Tensor",
    "issubclass": lambda x: issubclass(type(x), torch.Tensor),
    "__class__": lambda x: x.__class__ is torch.Tensor,
    "match": by_match,
    "singledispatch": dispatched,
    "hasattr": lambda x: hasattr(x, "dtype") and not hasattr(x, "bit_length"),
    "getattr": lambda x: getattr(x, "ndim", None) == 0,
    "try": lambda x: raises(lambda: x.bit_length()),
}


def raises(f: Callable[[], Any]) -> bool:
    try:
        f()
    except AttributeError:
        return True
    return False


def ways(ask: Callable[[Any], bool]) -> dict[str, Callable[[Any], bool]]:
    """Places in which the code that asks may stand."""
    module = ModuleType("helpers")
    module.ask = ask  # type: ignore[attr-defined]

    class Asking:
        static = staticmethod(ask)
        table: dict = {"ask": ask}  # noqa: RUF012

        def method(self, x: Any) -> bool:
            return ask(x)

    @functools.wraps(torch.nn.functional.relu)
    def decorated(x: Any) -> bool:
        return ask(x)

    def nested(x: Any) -> bool:
        return (lambda: ask(x))()

    asking, box = Asking(), [ask]
    return {
        "closure": lambda x: ask(x),
        "module": lambda x: module.ask(x),
        "method": asking.method,
        "static method": lambda x: Asking.static(x),
        "class": lambda x: Asking().method(x),
        "dict": lambda x: Asking.table["ask"](x),
        "list": lambda x: box[0](x),
        "default": lambda x, ask=ask: ask(x),
        "partial": functools.partial(lambda ask, x: ask(x), ask),
        "decorated": decorated,
        "nested": nested,
        "comprehension": lambda x: all([ask(y) for y in (x, x)]),  # noqa: C419 - a list of its own
        "map": lambda x: all(map(ask, (x,))),
    }


def masks_of(check: Callable[[Any], bool]) -> list[Callable[..., Any]]:
    """Mods that ask of an index, and of a captured number: a wrong answer makes each of them another mask."""
    number = NUMBER
    return [lambda b, h, q, k: q >= k if check(q) else q < k, lambda b, h, q, k: q < k if check(number) else q >= k]


@pytest.mark.parametrize("name", QUESTIONS)
def test_questions_in_other_code(name: str) -> None:
    wanted = torch.ones(S, S).tril().bool()
    for way, check in ways(QUESTIONS[name]).items():
        for mask in masks_of(check):
            assert torch.equal(seen(mask, device="cpu")[0, 0], wanted), way
            i = torch.tensor(3), torch.tensor(5)
            assert not mask(0, 0, *i) and mask(0, 0, *reversed(i)), way


@pytest.mark.parametrize("name", ["isinstance", "type is", "is_tensor", "match"])
def test_compiled_calls_give_the_same(name: str) -> None:
    check = ways(QUESTIONS[name])["module"]
    mask = masks_of(check)[0]
    q = torch.zeros(1, 1, S, 16)
    compiled = torch.compile(lambda: anyattn.flex_attention(q, q, torch.eye(S)[None, None], mask_mod=mask), backend="eager")
    assert torch.equal(compiled() > 0, seen(mask, device="cpu"))


def test_a_cache_that_keeps_a_value_is_refused_by_name() -> None:
    cached = functools.lru_cache(QUESTIONS["isinstance"])
    with pytest.raises(anyattn.ModError, match=r"its trace in check \(functools.lru_cache\)"):
        seen(masks_of(cached)[0], device="cpu")
    assert torch.equal(seen(masks_of(cached)[1], device="cpu")[0, 0], torch.ones(S, S).tril().bool())  # a number is a number


# ---- values that a mod stores

kept: Any = None
state: dict[str, Any] = {}


class Storing(torch.nn.Module):
    def __init__(self, window: int | None):
        super().__init__()
        self.window = window

    def mask(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        self.distance = q - k
        return self.distance >= (self.window or 0)


def storing(how: str) -> Callable[..., Any]:
    box: list = []
    width = 5
    last = None

    def in_list(b: Any, h: Any, q: Any, k: Any) -> Any:
        box.append(q)
        return q >= k

    def in_dict(b: Any, h: Any, q: Any, k: Any) -> Any:
        state["far"] = q - k > 8
        return q >= k

    def in_global(b: Any, h: Any, q: Any, k: Any) -> Any:
        global kept
        kept = q - k
        return kept >= 0

    def in_variable(b: Any, h: Any, q: Any, k: Any) -> Any:
        nonlocal last
        last = q - k
        return last >= 0

    def a_number(b: Any, h: Any, q: Any, k: Any) -> Any:
        box.append(width * 2)
        return q - k < width

    made = {f.__name__: f for f in (in_list, in_dict, in_global, in_variable, a_number)}
    return (made | {"attribute": Storing(None).mask, "attribute beside a number": Storing(3).mask})[how]


STORED = {
    "in_list": "box[0]", "in_dict": "state['far']", "in_global": "kept", "in_variable": "last", "a_number": "box[0]",
    "attribute": "self.distance", "attribute beside a number": "self.distance",
}  # fmt: skip


@pytest.mark.parametrize("how", STORED)
def test_a_value_that_a_mod_stores_is_refused_by_its_place(how: str) -> None:
    mask = storing(how)
    with pytest.raises(anyattn.ModError, match=f"keeps a value of its trace in {re.escape(STORED[how])}\n") as caught:
        seen(mask, device="cpu")
    assert __file__ in str(caught.value)
    with pytest.raises(anyattn.ModError, match=r"of its trace in|outside of that trace"):
        seen(mask, device="cpu")


def test_a_stored_value_is_dead() -> None:
    with pytest.raises(anyattn.ModError):
        seen(storing("in_dict"), device="cpu")
    number = storing("a_number")
    with pytest.raises(anyattn.ModError):
        seen(number, device="cpu")
    far, width = state["far"], number.__closure__[0].cell_contents[0]  # type: ignore[attr-defined]
    state["width"] = width
    uses = [
        lambda: far + 1, lambda: bool(far), lambda: far.shape, lambda: torch.where(far, 1, 0), lambda: torch.arange(8)[far],
        lambda: far.item(),
        lambda: width + 1, lambda: int(width), lambda: torch.ones(2) * width, lambda: width < 3, lambda: torch.arange(width),
    ]  # fmt: skip
    for use in uses:
        with pytest.raises(anyattn.ModError, match=r"outside of that trace[\s\S]*test_symbols"):
            use()
    mods = [
        lambda b, h, q, k: far, lambda b, h, q, k: far & (q >= k), lambda b, h, q, k: (q >= k) & state["far"],
        lambda b, h, q, k: q < state["width"],
        lambda b, h, q, k: q >= k if far else q < k, lambda b, h, q, k: q >= k if state["width"] > 3 else q < k,
        lambda b, h, q, k: q >= torch.arange(99)[width] + k,
    ]  # fmt: skip
    for mod in mods:
        with pytest.raises(anyattn.ModError, match="one mod's trace"):
            seen(mod, device="cpu")


def test_a_value_of_an_outer_trace_is_refused() -> None:
    def outer(b: Any, h: Any, q: Any, k: Any) -> Any:
        inner = anyattn.mod(lambda b, h, x, y: x >= q)
        return inner(b, h, q, k)

    with pytest.raises(anyattn.ModError, match="one mod's trace"):
        seen(outer, device="cpu")


def test_objects_in_a_cycle_are_no_containers() -> None:
    class Step:
        def __init__(self, x: Any):
            self.x, self.itself = x, self

    gc.collect()
    assert torch.equal(seen(lambda b, h, q, k: Step(q).x >= k, device="cpu")[0, 0], torch.ones(S, S).tril().bool())


# ---- writing into a value


def test_augmented_assignment_writes_as_in_torch() -> None:
    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        same = q
        same += 2
        other = q * 1
        other -= 1
        return (same == q) & (other + 1 == q) & (q - 2 >= k)

    assert torch.equal(seen(mask, device="cpu")[0, 0], torch.ones(S, S).tril().bool())


WRITES = {
    "into a view": lambda b, h, q, k: add(q.detach()) >= k + q,
    "into a value with a view": lambda b, h, q, k: (q[None], add(q))[0][0] >= k,
    "into a captured tensor": lambda b, h, q, k: add(TABLE[NUMBER]) + q >= k,
    "floats into integers": lambda b, h, q, k: operator.iadd(q, 0.5) >= k,
}


def add(x: Any) -> Any:
    x += 1
    return x


@pytest.mark.parametrize("name", WRITES)
def test_writing_that_another_tensor_would_see_is_refused(name: str) -> None:
    with pytest.raises(anyattn.ModError, match="use what add returns"):
        seen(WRITES[name], device="cpu")


# ---- numbers of instances


class Window:
    def __init__(self, window: object):
        self.window, self.state = window, SimpleNamespace()

    def __call__(self, b, h, q, k):  # type: ignore[no-untyped-def]
        return (q >= k) & self.near(b, h, q, k)

    def near(self, b, h, q, k):  # type: ignore[no-untyped-def]
        width = self.window if isinstance(self.window, int) else self.window[0]  # type: ignore[index]
        return q - k < width


class Inherited(Window):
    pass


@pytest.mark.parametrize("made", [Window, Inherited])
@pytest.mark.parametrize("window", [5, torch.tensor([3])])
@pytest.mark.parametrize("as_method", [False, True])
def test_methods_of_an_instance(made: type, window: object, as_method: bool) -> None:
    mask = made(window)
    given = mask.near if as_method else mask
    wanted = create_mask(lambda b, h, q, k: given(b, h, q, k), 1, 1, S, S, device="cpu")  # torch counts a method's self as an argument
    assert torch.equal(seen(given, device="cpu"), wanted)


def test_another_number_is_heard_of() -> None:
    """A trace of one number does not answer for another one where its text or its hash was read."""
    for number in (7, 8, 7):
        mask = lambda b, h, q, k, n=number: q >= k if {7: True}.get(n) else q < k
        assert torch.equal(seen(mask, device="cpu"), create_mask(mask, 1, 1, S, S, device="cpu"))


def test_objects_are_compared_anew() -> None:
    """Two numbers may be equal and one object, or two; a method's numbers stay numbers."""
    number = int("1000007")
    for other in (number, int("1000007"), 3, number):
        mask = lambda b, h, q, k, n=number, m=other: q >= k if n is m else q < k
        assert torch.equal(seen(mask, device="cpu"), create_mask(mask, 1, 1, S, S, device="cpu"))

    class Compared:
        def __init__(self, n: int):
            self.n = n

        def __call__(self, b, h, q, k):  # type: ignore[no-untyped-def]
            return q >= k if self.n is number else q < k

    for n in (number, 5):
        compared = Compared(n)
        wanted = create_mask(lambda b, h, q, k, c=compared: c(b, h, q, k), 1, 1, S, S, device="cpu")
        assert torch.equal(seen(compared, device="cpu"), wanted)


def test_none_is_no_reason_to_trace_again() -> None:
    compares = [f for f in (lambda n: n is None, lambda n: n is not None and n > 3, is_same) if compares_identity(f.__code__)]
    assert compares == [is_same]
    keys = {recognise(lambda b, h, q, k, n=n: q - k < n if n is not None else q >= k).pattern for n in (3, 4)}  # type: ignore[union-attr]
    assert len(keys) == 1


def test_c_code_is_handed_no_symbol_for_a_tensor() -> None:
    """A value that told ``isinstance`` in C that it was a tensor would have its memory read as one."""
    mod = lambda s, b, h, q, k: torch.nan_to_num(torch.where(q > k, s, float("nan")), nan=0.5)
    q = torch.randn(1, 1, S, 16, generator=torch.Generator().manual_seed(0))
    plain = lambda s, b, h, q, k: torch.where(q > k, s, 0.5)
    wanted, by_formula = (f(q, q, q, score=plain).out for f in (oracle.attention, oracle.same_dtype))
    budget.check("out", anyattn.flex_attention(q, q, q, mod), wanted, by_formula)
