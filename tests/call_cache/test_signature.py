"""What enters the key of a warm call, kind by kind, and which calls have no signature."""

from __future__ import annotations

import warnings
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from anyattn.call_cache.signature import Kind, fields, signature, values_of


class Subclass(torch.Tensor):
    pass


def by(number: Any) -> Any:
    return lambda s, b, h, i, j: s * number


def within(number: Any) -> Any:
    return lambda b, h, i, j: i - j < number


def reading(table: torch.Tensor) -> Any:
    return lambda s, b, h, i, j: s + table[j]


X, HALF = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.float16)
SHIFTED = torch.zeros(7)[1:].view(2, 3)
LEAF = torch.zeros(2, 3, requires_grad=True)
NEGATED = torch.zeros(2, 3, dtype=torch.complex64).conj().imag
STRIDED = torch.zeros(2, 6)[:, ::2]
PACKED = torch.zeros(9, 2, 8)
SAME, OTHER, NONE = "same key", "another key", "no signature"

# kind, an argument, another one, and what the other one's key is
CASES: dict[str, tuple[str, Any, Any, str]] = {
    "contents": (Kind.TENSOR, X, X + 1, SAME),
    "parameter": (Kind.TENSOR, LEAF, torch.nn.Parameter(X), SAME),
    "shape": (Kind.TENSOR, X, torch.zeros(2, 4), OTHER),
    "strides": (Kind.TENSOR, NEGATED.resolve_neg(), STRIDED, OTHER),
    "dtype": (Kind.TENSOR, X, HALF, OTHER),
    "alignment": (Kind.TENSOR, X, SHIFTED, OTHER),
    "requires_grad": (Kind.TENSOR, X, LEAF, OTHER),
    "sign": (Kind.STORAGE, STRIDED, NEGATED, OTHER),
    "device": (Kind.TENSOR, X, X.to("meta"), OTHER),
    "no tensor": (Kind.TENSOR, X, None, OTHER),
    "subclass": (Kind.TENSOR, X, X.as_subclass(Subclass), NONE),
    "number for a tensor": (Kind.TENSOR, X, 3, NONE),
    "alignment, to torch": (Kind.STORAGE, X, SHIFTED, SAME),
    "shape, to torch": (Kind.STORAGE, X, torch.zeros(2, 4), OTHER),
    "packed rows": (Kind.PACKED_ROWS, PACKED, torch.zeros(5, 2, 8), SAME),
    "one packed row": (Kind.PACKED_ROWS, PACKED, torch.zeros(1, 2, 8), OTHER),
    "heads of packed rows": (Kind.PACKED_ROWS, PACKED, torch.zeros(9, 4, 8), OTHER),
    "padded rows": (Kind.PACKED_ROWS, PACKED[None], torch.zeros(1, 5, 2, 8), OTHER),
    "lengths": (Kind.LENGTHS, 3, 4, SAME),
    "lengths in a tensor": (Kind.LENGTHS, 3, torch.zeros(2), OTHER),
    "a flag for lengths": (Kind.LENGTHS, 3, True, NONE),
    "lengths in an unaligned tensor": (Kind.ALIGNED_LENGTHS, X, SHIFTED, OTHER),
    "greatest length": (Kind.INT_OR_NONE, 3, 4, OTHER),
    "greatest length in a tensor": (Kind.INT_OR_NONE, 3, torch.tensor(3), NONE),
    "tensors": (Kind.TENSORS, [X, HALF], (X + 1, HALF + 1), SAME),
    "one of the tensors": (Kind.TENSORS, [X, X + 1], [X, HALF], OTHER),
    "one tensor twice": (Kind.TENSORS, [X, X], [X, X + 1], OTHER),
    "no tensors": (Kind.TENSORS, [], None, OTHER),
    "a tensor of tensors": (Kind.TENSORS, [X], X, NONE),
    "value": (Kind.VALUE, 1, 2, OTHER),
    "type of a value": (Kind.VALUE, 1, True, OTHER),
    "values": (Kind.VALUES, (1, 0), (1, 2), OTHER),
    "types of values": (Kind.VALUES, (1, 0), (1.0, 0), OTHER),
    "type of the pair": (Kind.VALUES, (1, 0), [1, 0], OTHER),
    "no pair": (Kind.VALUES, (1, 0), 1, NONE),
    "named value": (Kind.NAMED_VALUES, {"tile_m": 8}, {"tile_m": 16}, OTHER),
    "type of a named value": (Kind.NAMED_VALUES, {"tile_m": 1}, {"tile_m": True}, OTHER),
    "no names": (Kind.NAMED_VALUES, {"tile_m": 1}, 3, NONE),
    "flag": (Kind.FLAG, True, False, OTHER),
    "what is true": (Kind.FLAG, True, 1, SAME),
    "scale": (Kind.SCALE, 0.5, 2, SAME),
    "no scale": (Kind.SCALE, 0.5, None, OTHER),
    "scale beyond float32": (Kind.SCALE, 0.5, 1e300, NONE),
    "scale nan": (Kind.SCALE, 0.5, float("nan"), NONE),
    "a flag for a scale": (Kind.SCALE, 1, True, NONE),
    "number of a score mod": (Kind.SCORE_MOD, by(2.0), by(3.0), SAME),
    "type of a number": (Kind.SCORE_MOD, by(2.0), by(2), OTHER),
    "far number": (Kind.SCORE_MOD, by(2), by(2**40), OTHER),
    "code": (Kind.SCORE_MOD, by(2), lambda s, b, h, i, j: s, OTHER),
    "table": (Kind.SCORE_MOD, reading(X[0]), reading(X[0] + 1), SAME),
    "length of a table": (Kind.SCORE_MOD, reading(X[0]), reading(X[0, :2]), OTHER),
    "gradient of a table": (Kind.SCORE_MOD, reading(X), reading(LEAF), OTHER),
    "table of a subclass": (Kind.SCORE_MOD, reading(X), reading(X.as_subclass(Subclass)), NONE),
    "no function": (Kind.SCORE_MOD, by(2), 3, NONE),
    "number of a mask": (Kind.MASK_MOD, within(2), within(3), OTHER),
    "a zero's sign, of a mask": (Kind.MASK_MOD, within(0.0), within(-0.0), OTHER),
    "a zero's sign, of a score": (Kind.SCORE_MOD, by(0.0), by(-0.0), SAME),
    "no mask": (Kind.MASK_MOD, within(2), None, OTHER),
    "what must not be there": (Kind.ABSENT, None, X, NONE),
    "what stands elsewhere": (Kind.ELSEWHERE, 1, 2, SAME),
}


@pytest.mark.parametrize("name", CASES)
def test_kinds(name: str) -> None:
    kind, one, other, outcome = CASES[name]
    made = signature("test", x=kind)
    first, again, found = made(one), made(one), made(other)
    assert first is not None and first.key == again.key and hash(first.key) == hash(again.key)
    assert outcome == (NONE if found is None else SAME if found.key == first.key else OTHER)


OPERANDS = Kind.OPERANDS.format(x="q, k, v")
APART = {"operands": (OPERANDS, Kind.ELSEWHERE), "arguments": (Kind.TENSOR, values_of(Kind.TENSOR, "k"))}
OF_TENSORS = {name: case for name, case in CASES.items() if case[0] == Kind.TENSOR}


@pytest.mark.parametrize("kinds", APART)
def test_values_in_keys_are_told_apart(kinds: str) -> None:
    """Equal shapes and strides, in one memory or in two."""
    first, of_values = APART[kinds]
    made = signature("test", q=first, k=Kind.ELSEWHERE if first is OPERANDS else first, v=of_values)
    q, k, v = torch.zeros(3, 2, 4, 8)
    for _ in range(3):
        one, two = made(q, k, k[:, :6]), made(q, k, v[:, :6])
        assert one is not None and two is not None and one.key != two.key
        assert made(q, k, k[:, :6]).key == one.key and made(q, v, k[:, :6]).key == two.key  # type: ignore[union-attr]


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("name", [*OF_TENSORS, "sign"])
def test_operands_are_told_apart_as_tensors_are(name: str, place: int) -> None:
    """Whichever calls came before: the other one thrice, none, this one."""
    _, one, other, outcome = CASES[name]
    outcome = NONE if other is None else outcome
    made = signature("test", q=OPERANDS, k=Kind.ELSEWHERE, v=Kind.ELSEWHERE)
    rest = [one.detach().clone().requires_grad_(one.requires_grad) if one.is_leaf and not one.is_neg() else one for _ in range(3)]
    changed = [other if i == place else t for i, t in enumerate(rest)]
    first = made(*rest)
    assert first is not None
    for given in (changed, changed, rest, rest, changed, changed, rest):
        found, wanted = made(*given), SAME if given is rest else outcome
        assert wanted == (NONE if found is None else SAME if found.key == first.key else OTHER)


def test_operands_in_any_order_and_state() -> None:
    made = signature("test", q=OPERANDS, k=Kind.ELSEWHERE, v=Kind.ELSEWHERE)
    calls = [[torch.zeros(1, n, 4) for _ in range(3)] for n in range(1, 6)] + [[X] * 3, [X.clone(), X, X]]
    keys = [made(*given).key for given in calls]
    assert len(set(keys[:5])) == 5 and keys[5] == keys[6]
    for _ in range(3):
        for i in (0, 0, 1, 0, 1, 2, 3, 4, 5, 5, 6, 2, 6, 5, 0):
            assert made(*calls[i]).key == keys[i]
    with torch.inference_mode():
        within = [made(*given).key for given in calls for _ in range(2)]
    with torch.no_grad():
        without = [made(*given).key for given in calls for _ in range(2)]
    assert within == without == [(*key[:1], False, *key[2:]) for key in keys for _ in range(2)]


def odd_tensors() -> dict[str, torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that their interfaces may change
        x = torch.eye(4)
        return {
            "nested": torch.nested.nested_tensor([X, X]),
            "jagged": torch.nested.nested_tensor([X, X], layout=torch.jagged),
            "COO": x.to_sparse(),
            "CSR": x.to_sparse_csr(),
            "BSC": x.to_sparse_bsc((2, 2)),
            "opaque": x.to_mkldnn(),
            "subclass": x.as_subclass(Subclass),
            "fake": FakeTensorMode().from_tensor(x),
        }


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("name", odd_tensors())
def test_operands_of_no_signature_are_told_from_others(name: str, place: int, recwarn: pytest.WarningsRecorder) -> None:
    made = signature("test", q=OPERANDS, k=Kind.ELSEWHERE, v=Kind.ELSEWHERE)
    plain, odd = [X, X.clone(), X.clone()], odd_tensors()[name]
    for _ in range(3):
        assert made(*plain) is not None
    for _ in range(2):
        assert made(*[odd if i == place else t for i, t in enumerate(plain)]) is None
    assert not [w for w in recwarn if "pointer" in str(w.message)]


def test_operands_live_as_long_as_their_keys() -> None:
    made = signature("test", q=OPERANDS, k=Kind.ELSEWHERE, v=Kind.ELSEWHERE)

    def key(width: int) -> tuple:
        return made(*[torch.zeros(1, width, 4) for _ in range(3)]).key

    held, others = key(77), [key(78), key(79)]
    of_key = weakref.ref(held[-1])
    assert key(77) == held and of_key() is not None
    assert [key(78), key(79)] == others  # the latest two
    del held
    assert of_key() is None


def test_what_was_read_goes_along() -> None:
    found = signature("test", score=Kind.SCORE_MOD, mask=Kind.MASK_MOD, aux=Kind.TENSORS)(reading(X), within(7), [HALF])
    assert [r.numbers for r in found.readings] == [[], [7]] and found.readings[0].tensors[0] is X and found.aux[0] is HALF


class Pair(NamedTuple):
    left: Any
    right: Any


def test_fields_of_a_tuple() -> None:
    made = signature("test", pair=fields(Pair, left=Kind.VALUE, right=Kind.ELSEWHERE), x=Kind.VALUE)
    assert made(Pair(1, 2), 3).key == made(Pair(1, 5), 3).key != made(Pair(2, 2), 3).key
    assert made(Pair(1, 2), 3).key != signature("other", pair=Kind.VALUE, x=Kind.VALUE)(1, 3).key
    with pytest.raises(AssertionError, match="Pair"):
        fields(Pair, left=Kind.VALUE)


def test_state_of_torch() -> None:
    made = signature("test", x=Kind.VALUE)
    plain = made(1).key
    with torch.no_grad():
        assert made(1).key != plain
    torch.set_default_dtype(torch.float64)
    try:
        assert made(1).key != plain
    finally:
        torch.set_default_dtype(torch.float32)
    assert made(1).key == plain


class Listening(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


def test_no_signature_where_something_listens_to_torch() -> None:
    made, seen = signature("test", x=Kind.VALUE), []
    noted = lambda x: (seen.append(made(1)), x)[1]
    with Listening():
        noted(X)
    with forward_ad.dual_level():
        noted(X)
    torch.func.vmap(noted)(X)
    torch.func.grad(lambda x: noted(x).sum())(X)
    torch.jit.trace(noted, X, check_trace=False)
    assert seen == [None] * 5 and made(1) is not None
