"""A remembered call is the call that a first one would have been: never stale, with the same errors, in bounded memory, quickly."""

from __future__ import annotations

import functools
import gc
import sys
import threading
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import anyattn
from anyattn import autograd, masks, scores
from anyattn.call_cache import attention, calls
from anyattn.mods.tracing.trace import trace
from anyattn.validate import flash as check_flash
from anyattn.validate import flex as check
from tests.support.warm_calls import LENGTH, K, Q, V, call, flash, flex, follows, made, narrow, qkv, wide


@pytest.fixture(autouse=True)
def _forgotten():
    attention.clear()
    yield
    attention.clear()


@pytest.fixture
def checked(monkeypatch):
    """How often a call was not remembered."""
    count = []
    for module, name in ((check, "flex_problem"), (check_flash, "dense_problem")):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, original=original: (count.append(1), original(*a))[1])
    return count


# ---- what is remembered


MODS = {
    "nothing": lambda: {},
    "score": lambda: {"score_mod": lambda s, b, h, i, j: s + (j - i)},
    "a table": lambda: {"score_mod": functools.partial(lambda table, s, b, h, i, j: s + table[j], torch.randn(LENGTH))},
    "mask": lambda: {"mask_mod": narrow},
    "library": lambda: {"mask_mod": masks.causal() & ~masks.sliding_window(2, 0), "score_mod": scores.softcap(3.0)},
    "alibi": lambda: {"score_mod": scores.alibi(torch.tensor([0.5, 0.25]))},
    "block mask": lambda: {"block_mask": anyattn.create_block_mask(wide, 1, 1, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)},
    "lists": lambda: {"block_mask": torch.nn.attention.flex_attention.create_block_mask(wide, 1, 1, LENGTH, LENGTH, device="cpu")},
    "aux": lambda: {"score_mod": lambda s, b, h, i, j, aux_tensors: s * aux_tensors[0][h], "aux_tensors": [torch.tensor([1.0, 3.0])]},
    "sink": lambda: {"sink": torch.tensor([0.5, -1.0])},
    "scale": lambda: {"scale": 0.3},
    "options": lambda: {"kernel_options": {"tile_m": 8}, "mask_mod": narrow},
}


def _by_two_numbers(first, second):
    return lambda b, h, i, j: (i - j < second) & (i - j >= -first)


def _score_of_two_numbers(first, second):
    return lambda s, b, h, i, j: s - (j % second) * 0.3 + (j % first) * 0.5


def _by_one_of_two(first, second):
    def mask(b, h, i, j):
        first  # noqa: B018 - captured and unused
        return i - j < second

    return mask


def _by_steps(count, left):
    def mask(b, h, i, j):
        found = i - j < left
        for n in range(count):
            found = found & (i - j != 5 * n + 1)
        return found

    return mask


@pytest.mark.parametrize("make", [_by_two_numbers, _score_of_two_numbers, _by_one_of_two, _by_steps])
def test_a_traced_mod_is_the_same_in_every_call(make):
    """A program takes its numbers in the order of their use, a function in that of its captures, where some are not used or constants."""
    kind = "score" if make is _score_of_two_numbers else "mask"
    for numbers in ((2, 7), (3, 9)):
        plain, traced = make(*numbers), trace(make(*numbers), kind)
        attention.clear()
        want = call(**{f"{kind}_mod": plain})
        for mod in (traced, plain, traced, traced, plain):
            assert torch.equal(call(**{f"{kind}_mod": mod}), want)


@pytest.mark.parametrize("name", MODS)
def test_a_second_call_is_not_checked_again_and_gives_the_same(name, checked):
    first = call(**(options := MODS[name]()), return_lse=True)
    assert len(checked) == 1
    again = call(**options, return_lse=True)
    assert len(checked) == 1 and all(map(torch.equal, first, again))
    torch.manual_seed(0)
    fresh = MODS[name]()  # new functions, tensors and masks of the same kinds
    if name not in ("block mask", "lists"):
        call(**fresh, return_lse=True)
        assert len(checked) == 1


FLASH = {
    "causal": {"causal": True},
    "window": {"window_size": (5, 2)},
    "softcap": {"causal": True, "softcap": 2.0},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25])},
    "everything": {
        "causal": True, "softcap": 2.0, "alibi_slopes": torch.tensor([0.5, 0.25]), "sink": torch.tensor([1.0, 2.0]),
        "score_mod": functools.partial(lambda by, table, s, b, h, i, j: s * by + table[j], 0.5, torch.randn(LENGTH)), "mask_mod": wide,
        "softmax_scale": 0.3,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FLASH)
def test_a_second_flash_call(name, checked):
    q, k, v = (t.transpose(1, 2) for t in (Q, K, V))
    first = flash(q, k, v, **FLASH[name], return_lse=True)
    again = flash(q, k, v, **FLASH[name], return_lse=True)
    assert len(checked) == 1 and all(map(torch.equal, first, again))
    slopes = FLASH[name].get("alibi_slopes")
    if slopes is not None:
        follows(lambda: flash(q, k, v, **FLASH[name]), lambda: slopes.mul_(2))
        assert len(checked) == 3  # without the LSE it is another call, and `follows` has everything forgotten


def test_gradients_of_a_second_call(checked):
    table = torch.randn(LENGTH, requires_grad=True)
    found = []
    for _ in range(2):
        leaves = [t.clone().requires_grad_() for t in (Q, K, V)]
        flex(*leaves, score_mod=lambda s, b, h, i, j: s + table[j]).square().sum().backward()
        found.append([*(t.grad for t in leaves), table.grad.clone()])
        table.grad = None
    assert len(checked) == 1 and all(map(torch.equal, *found))


def test_shared_keys_stay_shared(checked):
    q, k, v = qkv(batch=3)
    results = [flex(q, k[:1], v[:1], mask_mod=narrow) for _ in range(2)]
    assert len(checked) == 1 and torch.equal(*results)
    assert torch.equal(results[0], flex(q, k[:1].expand_as(k), v[:1].expand_as(v), mask_mod=narrow))


def test_values_that_decide_are_looked_at_every_time(checked):
    table, ids = torch.randn(LENGTH), torch.arange(LENGTH)
    for _ in range(2):
        call(score_mod=lambda s, b, h, i, j: s + table[ids[j]])
    assert len(checked) == 2
    ids[7] = LENGTH
    with pytest.raises(ValueError, match="reads dimension 0"):
        call(score_mod=lambda s, b, h, i, j: s + table[ids[j]])


# ---- errors stay what they are


def message(do):
    try:
        do()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


WRONG = [
    {"scale": float("nan")}, {"scale": True}, {"scale": "big"}, {"scale": [1]}, {"backend": "nope"}, {"backend": ["torch"]}, {"sink": 3},
    {"sink": torch.zeros(3)}, {"sink": torch.zeros(2, dtype=torch.int64)}, {"kernel_options": {"tile_m": True}}, {"kernel_options": 3},
    {"kernel_options": {"tile_m": 0}}, {"kernel_options": {"nope": 1}}, {"aux_tensors": torch.zeros(2)}, {"aux_tensors": [3]},
    {"score_mod": 3}, {"mask_mod": 3}, {"block_mask": 3}, {"block_mask": narrow}, {"mask_mod": lambda b, h: b}, {"query": Q[0]},
    {"mask_mod": lambda b, h, i, j, aux_tensors: aux_tensors[0][i] > 0}, {"query": Q.double()}, {"query": 3},
    {"query": Q.to_sparse()},
    {"key": K[:, :1], "value": V[:, :1]}, {"query": Q.to("meta")}, {"query": Q.int()}, {"query": Q[..., :0], "key": K[..., :0]},
    {"mask_mod": lambda b, h, i, j: i - j}, {"score_mod": lambda s, b, h, i, j: None}, {"backend": "hopper"}, {"backend": 1},
]  # fmt: skip


@pytest.mark.parametrize("options", WRONG, ids=[f"{i}-{next(iter(o))}" for i, o in enumerate(WRONG)])
def test_errors_of_flex(options):
    right = {"kernel_options": {"tile_m": 1}, "sink": torch.zeros(2), "mask_mod": narrow, "backend": "torch", "aux_tensors": [Q]}
    for name in ({}, right):
        for _ in range(2):
            flex(Q, K, V, **name)
    wrong = lambda: flex(**({"query": Q, "key": K, "value": V} | right | options))
    warm = message(wrong), message(wrong)
    attention.clear()
    first = message(wrong)
    assert warm == (first, first) and first is not None


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ({"causal": True}, {"causal": 1}), ({"causal": False}, {"causal": 0}), ({"window_size": (1, 0)}, {"window_size": (True, 0)}),
        ({"window_size": (1, 0)}, {"window_size": (1.0, 0)}), ({"softcap": 0.0}, {"softcap": False}), ({"softcap": 1.0}, {"softcap": True}),
        ({"num_splits": 1}, {"num_splits": True}), ({"num_splits": 1}, {"num_splits": 1.0}),
        ({"softmax_scale": 1}, {"softmax_scale": True}),
        ({"window_size": (1, 0)}, {"window_size": {1, 0}}), ({"window_size": (1, 0)}, {"window_size": 1}),
    ],
    ids=str,
)  # fmt: skip
def test_what_python_calls_equal(right, wrong):
    q, k, v = (t.transpose(1, 2) for t in (Q, K, V))
    flash(q, k, v, **right), flash(q, k, v, **right)
    warm = message(lambda: flash(q, k, v, **wrong))
    attention.clear()
    assert warm == message(lambda: flash(q, k, v, **wrong)) and warm is not None


def test_a_list_as_window(checked):
    q, k, v = (t.transpose(1, 2) for t in (Q, K, V))
    assert torch.equal(flash(q, k, v, window_size=[3, 0]), flash(q, k, v, window_size=(3, 0)))


# ---- who listens


class Subclass(torch.Tensor):
    pass


def test_where_nothing_is_remembered(checked):
    for _ in range(2):
        flex(Q.as_subclass(Subclass), K, V)
    assert len(checked) == 2 and attention.size() == 0
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (Q, K, V)]
        assert all(isinstance(flex(*fakes), FakeTensor) for _ in range(2))  # by the operator
    assert len(checked) == 2 and attention.size() == 0


class Listening(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_whoever_listens_hears_a_first_call(checked):
    call()
    with Listening():
        call()
    torch.func.vmap(lambda x: (call(), x)[1])(torch.ones(2))
    assert len(checked) == 3
    call()
    assert len(checked) == 3


def planned(q):
    return attention.flex_call(attention.FlexCall(q, K, V, None, None, None, None, None, False, None, False, False, False), None, None)[1]


def test_other_strides_and_alignments_have_plans_of_their_own():
    """For what a kernel prepares once for a plan may hang on them."""
    turned = Q.transpose(1, 2).contiguous().transpose(1, 2)
    shifted = torch.empty(Q.numel() + 1)[1:].view(Q.shape)
    assert len({id(planned(q)) for q in (Q, Q.clone(), turned, shifted)}) == 3


def test_calls_with_and_without_gradients_have_plans_of_their_own():
    bare, leaf = Q.clone(), Q.clone().requires_grad_()
    with torch.no_grad():
        inside = planned(leaf)
    assert planned(bare) is planned(bare) is not planned(leaf) is planned(leaf) is not inside


def test_functorch_gives_the_same_error():
    call()
    many = torch.stack([Q, 2 * Q])
    found = message(lambda: torch.func.vmap(lambda q: flex(q, K, V))(many))
    attention.clear()
    assert found == message(lambda: torch.func.vmap(lambda q: flex(q, K, V))(many))


# ---- memory


def test_bounded_memory():
    for length in range(1, 3 * calls.MOST):
        q = torch.empty(1, 1, length, 1)
        problem, _ = attention.flex_call(
            attention.FlexCall(q, q, q, None, None, None, None, None, False, None, False, False, False), None, None
        )
        assert problem.q is q
    assert calls.MOST <= attention.size() <= 2 * calls.MOST


def test_the_latest_calls_are_kept(checked):
    call()
    for length in range(1, 2 * calls.MOST, 2):
        q = torch.empty(1, 1, length, 1)
        attention.flex_call(attention.FlexCall(q, q, q, None, None, None, None, None, False, None, False, False, False), None, None)
        if length % 99 == 0:
            before = len(checked)
            call()
            assert len(checked) == before


def _called_with_their_own() -> list[weakref.ref]:
    table, sink, bias = torch.randn(LENGTH), torch.zeros(2), torch.ones(2)
    q, k, v = (t.clone().requires_grad_() for t in (Q, K, V))

    def own_mask(b, h, i, j):
        return i - j < 5

    def own_score(s, b, h, i, j, aux_tensors):
        return s + table[j] * aux_tensors[0][h]

    block_mask = made(own_mask, torch.nn.attention.flex_attention.create_block_mask)
    for _ in range(3):
        out = flex(q, k, v, score_mod=own_score, block_mask=block_mask, mask_mod=own_mask, sink=sink, aux_tensors=[bias])
        out.sum().backward()
    assert attention.size() == 1
    kept = [q, k, v, table, sink, bias, own_mask, own_score, block_mask, block_mask.kv_indices, out]
    assert all(x is not None for x in kept)
    return [weakref.ref(x) for x in kept]


def test_nothing_of_the_users_is_kept_alive():
    gone = _called_with_their_own()
    gc.collect()
    assert [r() for r in gone] == [None] * len(gone)


# ---- threads


def test_threads_do_not_mix_their_captures():
    wrong = []

    def work(seed):
        g = torch.Generator().manual_seed(seed)
        table, factor = torch.randn(LENGTH, generator=g), float(seed)
        for _ in range(30):
            found = call(score_mod=lambda s, b, h, i, j: s * factor + table[j])
            if not torch.equal(found, want[seed]):
                wrong.append(seed)

    want = {}
    for seed in range(4):
        g = torch.Generator().manual_seed(seed)
        table, factor = torch.randn(LENGTH, generator=g), float(seed)
        want[seed] = call(score_mod=functools.partial(lambda f, t, s, b, h, i, j: s * f + t[j], factor, table))
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


# ---- host time


def python_calls(do):
    """How many Python functions one call enters, which is what its host time is made of, and no noise moves."""
    count = 0

    def watch(frame, event, arg):
        nonlocal count
        count += event == "call"

    do(), do()
    sys.setprofile(watch)
    try:
        do()
    finally:
        sys.setprofile(None)
    return count


HEADS_LAST = tuple(t.transpose(1, 2) for t in (Q, K, V))
SLOPES = torch.tensor([0.5, 0.25])
BUDGETS = {
    "no mod": (24, lambda: call()),
    "score mod": (34, lambda: call(score_mod=lambda s, b, h, i, j: s + (j - i))),
    "mask mod": (34, lambda: call(mask_mod=narrow)),
    "captures": (41, lambda: call(score_mod=lambda s, b, h, i, j: s + SLOPES[h] * (j - i))),
    "flash causal": (24, lambda: flash(*HEADS_LAST, causal=True)),
    "flash alibi": (28, lambda: flash(*HEADS_LAST, causal=True, alibi_slopes=SLOPES)),
}


@pytest.fixture
def computing_nothing(monkeypatch):
    repeater = type("Repeater", (), {"forward": staticmethod(lambda problem: (Q, None, None))})
    monkeypatch.setattr(autograd, "repeater_of", lambda problem, plan: repeater)


@pytest.mark.parametrize("name", BUDGETS)
def test_a_warm_call_enters_few_functions(name, computing_nothing):
    most, do = BUDGETS[name]
    entered = python_calls(do)
    assert entered <= most


def test_a_block_mask_enters_few_functions(computing_nothing):
    mask = made(wide)
    assert python_calls(lambda: call(block_mask=mask)) <= 46
