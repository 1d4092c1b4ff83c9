"""What a mod is told of the types and the text of what it captures and computes with."""

import operator
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

import anyattn
from anyattn.mods.tracing.fingerprint import recognise
from anyattn.mods.tracing.pure_names import compares_identity

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
    q = torch.randn(1, 1, S, 16)
    wanted = torch.where(torch.ones(S, S).tril(-1).bool(), q @ q.mT / 4, 0.5).softmax(-1) @ q
    assert torch.allclose(anyattn.flex_attention(q, q, q, mod), wanted, atol=1e-5)
