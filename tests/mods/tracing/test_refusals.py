"""What cannot be traced is refused at the user's line: random numbers, custom gradients, NumPy tables, and whatever fails in a body."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import secrets
import types
import uuid

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_mask

from anyattn import ModError
from anyattn.mods.analysis.evaluate import evaluate
from anyattn.mods.tracing.trace import trace


def message_of(fn, kind: str = "score") -> str:
    with pytest.raises(ModError) as error:
        trace(fn, kind)
    return str(error.value)


# ---- random numbers

drawing = random.Random(0)
numpys = np.random.default_rng(0)
place = 2
draw_one, numpys_draw = random.random, np.random.rand
dropout = nn.Dropout(0.5)


def helper(x):
    return x + random.gauss(0.0, 1.0)


class Noisy:
    def __init__(self):
        self.numbers = np.random.default_rng(0)

    def score(self, s, b, h, q, k):
        return s + random.random()

    def of_numpy(self, s, b, h, q, k):
        return s + np.random.rand()

    def __call__(self, s, b, h, q, k):
        return s + self.numbers.random()


outside = types.ModuleType("outside")
exec(
    "import numpy, random\ndef noise(x):\n    return x + random.random()\ndef of_numpy(x):\n    return x + numpy.random.rand()",
    outside.__dict__,
)
urandom, random_class, default_rng = os.urandom, random.SystemRandom, np.random.default_rng

RANDOM = {
    "torch.rand": lambda s, b, h, q, k: s + torch.rand(()),
    "torch.rand_of_captured": lambda s, b, h, q, k: s + torch.rand(place, place)[0, 0],
    "torch.randn": lambda s, b, h, q, k: s + torch.randn(8)[q],
    "torch.randint": lambda s, b, h, q, k: s + torch.randint(0, 3, ()),
    "torch.randperm": lambda s, b, h, q, k: s + torch.randperm(4)[h],
    "torch.rand_like": lambda s, b, h, q, k: s + torch.rand_like(s),
    "torch.bernoulli": lambda s, b, h, q, k: torch.bernoulli(s),
    "torch.seed": lambda s, b, h, q, k: s + torch.seed() % 7,
    "torch.ops": lambda s, b, h, q, k: s + torch.ops.aten.rand.default([1])[0],
    "torch.normal": lambda s, b, h, q, k: s + torch.normal(0.0, 1.0, ()),
    "method": lambda s, b, h, q, k: s.bernoulli(),
    "in_place": lambda s, b, h, q, k: s + torch.empty(()).uniform_(),
    "dropout": lambda s, b, h, q, k: F.dropout(s, 0.1),
    "dropout_module": lambda s, b, h, q, k: dropout(s),
    "random": lambda s, b, h, q, k: s + random.random(),
    "random_function": lambda s, b, h, q, k: s + draw_one(),
    "random_method": lambda s, b, h, q, k: s + drawing.gauss(0, 1),
    "random_helper": lambda s, b, h, q, k: helper(s),
    "numpy.random": lambda s, b, h, q, k: s + np.random.rand(),
    "numpy_function": lambda s, b, h, q, k: s + numpys_draw(),
    "numpy_generator": lambda s, b, h, q, k: s + numpys.random(),
    "fresh_generator": lambda s, b, h, q, k: s + np.random.default_rng().random(),
    "secrets": lambda s, b, h, q, k: s + secrets.randbelow(3),
    "object": Noisy(),
    "method_of_object": Noisy().score,
    "numpy_in_a_method": Noisy().of_numpy,
    "other_module": lambda s, b, h, q, k: outside.noise(s),
    "numpy_of_another_module": lambda s, b, h, q, k: outside.of_numpy(s),
    "numpy_maker": lambda s, b, h, q, k: s + default_rng(3).random(),
    "urandom": lambda s, b, h, q, k: s + os.urandom(1)[0],
    "urandom_function": lambda s, b, h, q, k: s + urandom(1)[0],
    "uuid4": lambda s, b, h, q, k: s + uuid.uuid4().int % 7,
    "uuid1": lambda s, b, h, q, k: s + uuid.uuid1().int % 7,
    "system_random": lambda s, b, h, q, k: s + random.SystemRandom().random(),
    "system_random_class": lambda s, b, h, q, k: s + random_class().random(),
    "token": lambda s, b, h, q, k: s + secrets.token_bytes(1)[0],
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_are_refused_with_the_way_out(name):
    message = message_of(RANDOM[name])
    assert "random" in message and "hash of a captured seed" in message, message
    assert __file__ in message, message


def test_what_modules_hold_beside_random_numbers_is_itself():
    def score(s, b, h, q, k):
        return s + np.sign(3.0) + uuid.UUID(int=1).int + os.path.sep.count("/")

    assert evaluate(trace(score, "score"), *[torch.tensor(0)] * 4, score=torch.tensor(0.0)) == 2.0 + (os.sep == "/")


# ---- exceptions that a mod handles itself


class Swallowing(nn.Module):
    def __init__(self, window: int = 0):
        super().__init__()
        self.window = window

    def forward(self, s, b, h, q, k):
        try:
            return s + random.random()
        except Exception:
            return s


def swallowing(read):
    def score(s, b, h, q, k):
        try:
            s = s + read(s, q, k)
        except:  # noqa: E722
            s = s * 2
        return s

    return score


def suppressing(s, b, h, q, k):
    with contextlib.suppress(Exception):
        s = s + random.random()
    return s


def returning(s, b, h, q, k):
    try:
        s = s + random.random()
    finally:
        return s  # noqa: B012


SWALLOWED = {
    "random numbers": (swallowing(lambda s, q, k: random.random()), "random number"),
    "random numbers in an object": (Swallowing(), "random number"),
    "numpy's": (swallowing(lambda s, q, k: np.random.rand()), "random number"),
    "torch's": (swallowing(lambda s, q, k: torch.rand(())), "random number"),
    "suppress": (suppressing, "random number"),
    "finally": (returning, "random number"),
    "a function": (swallowing(lambda s, q, k: torch.sort(s)[0]), "torch.sort has no meaning"),
    "a branch": (swallowing(lambda s, q, k: 1.0 if q > k else 2.0), "a truth value"),
    "a number of an index": (swallowing(lambda s, q, k: int(q)), "int() needs one Python number"),
    "another mod": (swallowing(lambda s, q, k: trace(lambda b, h, q, k: q if q else k, "mask").expr.outputs[0]), "a truth value"),
}


@pytest.mark.parametrize("name", SWALLOWED)
def test_a_refusal_that_the_mod_swallows_is_raised_again(name):
    fn, wanted = SWALLOWED[name]
    first, again = message_of(fn), message_of(fn)
    assert wanted in first and first == again and __file__ in first, first


class Fallback:
    """Python's own answers to numbers: what is caught is what the number itself raises."""

    def __init__(self, width):
        self.width = width

    def __call__(self, s, b, h, q, k):
        try:
            scale = 1 / self.width
        except ZeroDivisionError:
            scale = 8.0
        return s * scale


def falling_back(width):
    def score(s, b, h, q, k):
        try:
            places = "%d" % width  # noqa: UP031 - a symbol's is another error
            return s * (len(places) + [10, 20, 30][width])
        except (IndexError, TypeError):
            return s * 7

    return score


def converting(width):
    def score(s, b, h, q, k):
        try:
            return s * int(width)
        except Exception:
            return s * 7

    return score


@pytest.mark.parametrize("make", [Fallback, falling_back, converting])
def test_what_a_mod_catches_of_captured_numbers_is_pythons(make):
    for width in (2, 0, 4, 2):
        fn, s = make(width), torch.tensor(3.0)
        assert evaluate(trace(fn, "score"), *[torch.tensor(0)] * 4, score=s) == fn(s, *[torch.tensor(0)] * 4), width


def test_an_error_of_the_users_own_stands_beside_a_swallowed_one():
    def score(s, b, h, q, k):
        try:
            return s + random.random()
        except ModError as error:
            raise KeyError("mine") from error

    with pytest.raises(KeyError, match="mine"):
        trace(score, "score")


def test_reflected_and_is_no_random_number():
    assert trace(lambda b, h, q, k: torch.tensor(True) & (q >= k), "mask").expr.output.op in ("and", "ge")


def test_the_way_out_of_random_numbers_works():
    seed = 7

    def drop(b, h, q_idx, kv_idx):
        x = ((seed + b) * 1000003 + h) * 1000003 + q_idx
        x = x * 1000003 + kv_idx
        x = (x ^ (x >> 15)) * 2146121005
        x = (x ^ (x >> 13)) & 0xFFFFFF
        return x.to(torch.float64) / 2**24 >= 0.25

    i = torch.arange(256)
    kept = evaluate(trace(drop, "mask"), torch.tensor(1), torch.tensor(2), i[:, None], i)
    assert torch.equal(kept, drop(torch.tensor(1), torch.tensor(2), i[:, None], i))
    assert 0.74 < kept.double().mean() < 0.76 and kept.double().mean(0).std() < 0.03 and kept.double().mean(1).std() < 0.03


def test_a_mod_beside_threads_that_draw_is_traced(monkeypatch):
    from anyattn.mods.tracing import random_numbers

    states = iter([(1,), (2,), (3,), (3,)])  # another thread drew during the first call, none during the second
    monkeypatch.setattr(random_numbers, "generators_state", lambda: next(states))
    monkeypatch.setattr("anyattn.mods.tracing.trace.generators_state", lambda: next(states))
    assert trace(types.MethodType(lambda self, b, h, q, k: q >= k, object()), "mask").expr.output.op == "ge"
    assert next(states, None) is None


# ---- custom gradients and grad modes


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 100


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return {}[x]

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass


class Reversed(Doubled):
    """Records no step but a copy."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()


class Enabled(Doubled):
    """Computes under the grad mode of the caller."""

    @staticmethod
    def forward(ctx, x):
        with torch.enable_grad():
            return x * 2


class Partial(Doubled):
    forward = functools.partial(lambda factor, ctx, x: x * factor, 2)


doubled = Doubled.apply


@pytest.mark.parametrize("wants_grad", [False, True, None])
@pytest.mark.parametrize(
    "fn",
    [
        lambda s, b, h, q, k: Doubled.apply(s),
        lambda s, b, h, q, k: doubled(s) + 1,
        lambda s, b, h, q, k: Failing.apply(s),
        lambda s, b, h, q, k: Reversed.apply(s),
        lambda s, b, h, q, k: Enabled.apply(s),
        lambda s, b, h, q, k: Partial.apply(s),
    ],
    ids=["class", "function", "failing", "copy", "enabled", "partial"],
)
def test_an_autograd_function_is_refused_at_the_users_line(fn, wants_grad):
    with torch.inference_mode() if wants_grad is None else torch.set_grad_enabled(wants_grad):
        message = message_of(fn)
    assert "torch.autograd.Function" in message and __file__ in message, message


def test_a_mod_may_be_traced_inside_an_autograd_function():
    traced = []

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            traced.append(trace(types.MethodType(lambda self, b, h, q, k: q >= k, x), "mask"))
            return x * 1

        @staticmethod
        def backward(ctx, g):
            return g

    Attention.apply(torch.ones(1, requires_grad=True))
    assert traced[0].expr.output.op == "ge"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_another_grad_mode_inside_a_mod_is_refused(mode):
    def score(s, b, h, q, k):
        with mode():
            return s * 2

    assert "grad mode" in message_of(score)


# ---- NumPy

array, small = np.arange(12.0), np.zeros((3, 3))


class Holder:
    def __init__(self):
        self.array = np.arange(9)

    def mask(self, b, h, q, k):
        return self.array[q] >= k


NUMPY = {
    "table": lambda b, h, q, k: array[q] >= k,
    "two_indices": lambda b, h, q, k: small[q, k] > 0,
    "attribute": Holder().mask,
    "arithmetic": lambda b, h, q, k: array * q > k,
    "reflected": lambda b, h, q, k: q * array > k,
    "comparison": lambda b, h, q, k: q > array,
    "function": lambda b, h, q, k: np.where(q > k, True, False),
    "ufunc": lambda b, h, q, k: np.minimum(q, 3) > k,
    "list_of_rows": lambda b, h, q, k: np.stack([array])[0, q] > k,
}


@pytest.mark.parametrize("name", NUMPY)
def test_a_numpy_table_is_refused_with_from_numpy(name):
    message = message_of(NUMPY[name], "mask")
    assert "torch.from_numpy" in message and __file__ in message, message


def test_constants_of_a_numpy_table_and_its_torch_view_are_fine():
    i = torch.arange(6)
    wrapped = torch.from_numpy(array)
    for fn in (lambda b, h, q, k: q >= k + array[place], lambda b, h, q, k: wrapped[q] >= k + 2, lambda b, h, q, k: q >= k + array[2]):
        got = evaluate(trace(fn, "mask"), torch.tensor(0), torch.tensor(0), i[:, None], i)
        assert torch.equal(got, i[:, None] >= i + 2)


# ---- indices of dtypes that torch does not take for indices

steps, square = torch.arange(6) % 3, torch.arange(36).view(6, 6) % 5


def by_index_of(dtype):
    """Mods that index by a captured value, by a computed one, by both in turn, and beside others."""
    ids = (torch.arange(6) % 2).to(dtype)
    one = torch.tensor(1).to(dtype)
    return {
        "captured": lambda b, h, q, k: steps[ids[q]] >= k,
        "computed": lambda b, h, q, k: steps[(q % 2).to(dtype)] >= k,
        "beside": lambda b, h, q, k: square[q, ids[k]] >= k,
        "first": lambda b, h, q, k: square[ids[q]][k] >= k,
        "after": lambda b, h, q, k: square[:, ids[q]][k] >= k,
        "of rank 0": lambda b, h, q, k: square[q, one] >= k,
    }


def by_vmap(fn):
    return create_mask(fn, 1, 1, 6, 6, device="cpu")[0, 0]


@pytest.mark.parametrize("way", by_index_of(torch.int64))
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_indices_of_32_and_64_bits_are_torchs(dtype, way):
    fn, i = by_index_of(dtype)[way], torch.arange(6)
    got = evaluate(trace(fn, "mask"), torch.tensor(0), torch.tensor(0), i[:, None], i)
    assert torch.equal(got.expand(6, 6), by_vmap(fn))


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("way", by_index_of(torch.int64))
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.uint32, torch.bool, torch.float32], ids=str)
def test_an_index_that_torch_refuses_or_reads_as_a_mask_is_refused(dtype, way):
    fn = by_index_of(dtype)[way]
    try:
        is_torchs = by_vmap(fn).shape == (6, 6)
    except (RuntimeError, IndexError, SystemError):
        is_torchs = False
    assert not is_torchs
    message = message_of(fn, "mask")
    assert f"is indexed with a {dtype} value" in message and "table[x.long()]" in message and __file__ in message, message
    assert ("reads as a mask" in message) == (dtype in (torch.uint8, torch.bool))


def test_narrow_indices_may_be_converted_or_computed_with():
    narrow, i = torch.tensor([0, 2, 1, 0, 2, 1], dtype=torch.uint8), torch.arange(6)
    for fn in (lambda b, h, q, k: steps[narrow[q].long()] >= k, lambda b, h, q, k: square[narrow[q] + 0 * q, k] >= narrow[k]):
        got = evaluate(trace(fn, "mask"), torch.tensor(0), torch.tensor(0), i[:, None], i)
        assert torch.equal(got, by_vmap(fn))


# ---- whatever else fails while a body runs


def no_name(b, h, q, k):
    return q >= unknown_name  # noqa: F821


def raises(b, h, q, k):
    raise LookupError("mine")


def asserts(b, h, q, k):
    assert array.size == 3, "too long"
    return q >= k


FAILING = {
    "transform": (lambda s, b, h, q, k: torch.func.grad(lambda x: x * x)(s), "torch.func.grad"),
    "vmap": (lambda s, b, h, q, k: torch.vmap(lambda x: x * x)(s), "torch.vmap"),
    "key": (lambda s, b, h, q, k: s + {0: 1.0}[q], "KeyError"),
    "zero": (lambda s, b, h, q, k: s + 1 // (len(array) - 12), "ZeroDivisionError"),
    "captured_bounds": (lambda s, b, h, q, k: s + torch.arange(3)[7], "IndexError"),
    "attribute": (lambda s, b, h, q, k: s + array.nothing, "AttributeError"),
    "name": (lambda s, b, h, q, k: no_name(b, h, q, k), "NameError"),
    "unknown": (lambda s, b, h, q, k: torch.linalg.matrix_exp(s), "torch.linalg.matrix_exp(s)"),
    "formatted": (lambda s, b, h, q, k: s + float(f"{q:.2f}"), "TypeError"),
}


@pytest.mark.parametrize("name", FAILING)
def test_what_fails_in_a_body_is_told_at_the_users_line(name):
    fn, words = FAILING[name]
    message = message_of(fn)
    assert words in message and __file__ in message, message


@pytest.mark.parametrize(("fn", "kind"), [(raises, LookupError), (asserts, AssertionError)])
def test_what_a_body_raises_itself_stays_its_own(fn, kind):
    with pytest.raises(kind) as error:
        trace(fn, "mask")
    assert error.type is kind and error.traceback[-1].path.name == "test_refusals.py"
