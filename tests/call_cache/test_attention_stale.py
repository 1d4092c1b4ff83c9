"""A remembered call is never stale: whatever changes between two calls, the later one is what a first call would be."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import anyattn
from anyattn import masks, planner, scores
from anyattn.call_cache import attention, calls, rebind
from anyattn.mods.analysis import visible_loads
from anyattn.mods.analysis.evaluate import evaluate
from anyattn.sparsity import read_lists
from anyattn.validate import flash
from anyattn.validate import flex as check
from tests.support.warm_calls import LENGTH, K, Q, V, call, flex, follows, made, narrow, wide


@pytest.fixture(autouse=True)
def _forgotten():
    attention.clear()
    yield
    attention.clear()


def test_rebound_cells():
    factor, table, helper, right = 0.5, torch.randn(LENGTH), narrow, 0

    def score(s, b, h, i, j):
        return s * factor + table[j]

    def mask(b, h, i, j):
        return helper(b, h, i, j) | (i + right == j)

    def rebind(**new):
        nonlocal factor, table, helper, right
        factor, table, helper = new.get("factor", factor), new.get("table", table), new.get("helper", helper)
        right = new.get("right", right)

    both = functools.partial(call, score_mod=score, mask_mod=mask)
    for new in (
        {"factor": 2.0}, {"factor": 3}, {"factor": torch.tensor(1.5)}, {"table": torch.randn(LENGTH)},
        {"table": torch.randn(LENGTH, dtype=torch.float64)}, {"helper": wide}, {"right": 5}, {"helper": masks.sliding_window(4, 1)},
        {"helper": masks.sliding_window(7, 1)},
    ):  # fmt: skip
        follows(both, lambda new=new: rebind(**new))


LIMIT, HELPER = 3, narrow


def by_globals(b, h, i, j):
    return HELPER(b, h, i, j) | (i + LIMIT == j)


@pytest.mark.parametrize(("name", "value"), [("LIMIT", 9), ("LIMIT", 2.0), ("HELPER", wide), ("abs", lambda x: x * 0)])
def test_rebound_globals(name, value, monkeypatch):
    mask = by_globals if name != "abs" else _by_distance
    follows(lambda: call(mask_mod=mask), lambda: monkeypatch.setitem(globals(), name, value))


def _by_distance(b, h, i, j):
    return abs(i - j) < LIMIT


def test_defaults():
    def mask(b, h, i, j, left=3, *, right=0):
        return (i - j < left) & (j - i <= right)

    once = functools.partial(call, mask_mod=mask)
    follows(once, lambda: setattr(mask, "__defaults__", (9,)))
    follows(once, lambda: mask.__kwdefaults__.update(right=4))
    follows(once, lambda: setattr(mask, "__kwdefaults__", {"right": 7}))
    follows(once, lambda: setattr(mask, "__code__", (lambda b, h, i, j, left=3, *, right=0: i - j < left + right).__code__))


@pytest.mark.parametrize("wrap", [list, tuple, lambda x: dict(enumerate(x))], ids=["list", "tuple", "dict"])
def test_containers(wrap):
    kept = [wrap([3, 5])]
    if wrap is list:
        follows(lambda: call(mask_mod=lambda b, h, i, j: i - j < kept[0][0]), lambda: kept[0].__setitem__(0, 9))
    else:
        follows(lambda: call(mask_mod=lambda b, h, i, j: i - j < kept[0][0]), lambda: kept.__setitem__(0, wrap([9, 5])))


def test_a_list_of_mods():
    """torch's ``and_masks`` keeps a tuple; a list can change under the call."""
    parts = [wide, narrow]

    def joined(b, h, i, j):
        return functools.reduce(lambda x, y: x & y, [p(b, h, i, j) for p in parts])

    follows(lambda: call(mask_mod=joined), lambda: parts.pop())
    follows(lambda: call(mask_mod=joined), lambda: parts.append(masks.sliding_window(2, 0)))
    follows(lambda: call(mask_mod=joined), lambda: parts.__setitem__(1, masks.sliding_window(1, 0)))


class Owner:
    left = 3

    def __call__(self, b, h, i, j):
        return (i >= j) & (i - j < self.left)


@pytest.mark.parametrize("make", [lambda o: o, lambda o: o.__call__, lambda o: lambda *p: o(*p[:4])], ids=["object", "method", "inside"])
def test_attributes(make, monkeypatch):
    owner = Owner()
    if make(owner) is not owner and getattr(make(owner), "__name__", "") == "<lambda>":
        mod = lambda b, h, i, j: owner(b, h, i, j)
    else:
        mod = make(owner)
    follows(lambda: call(mask_mod=mod), lambda: setattr(owner, "left", 9))
    del owner.left
    follows(lambda: call(mask_mod=mod), lambda: monkeypatch.setattr(Owner, "left", 15))


def test_a_wrapped_mod_with_another_function():
    mask = masks.causal()
    follows(lambda: call(mask_mod=mask), lambda: setattr(mask, "fn", narrow))


def test_function_attributes():
    def mask(b, h, i, j):
        return i - j < mask.left

    mask.left = 3
    follows(lambda: call(mask_mod=mask), lambda: setattr(mask, "left", 9))


def test_an_attribute_that_comes_later():
    follows(lambda: call(mask_mod=narrow), lambda: setattr(narrow, "__wrapped__", wide) or setattr(narrow, "__code__", wide.__code__))
    narrow.__code__, narrow.__dict__ = (lambda b, h, i, j: (i >= j) & (i - j < 3)).__code__, {}


def test_tensors_written_in_place():
    table = torch.randn(LENGTH)
    once = functools.partial(call, score_mod=lambda s, b, h, i, j: s + table[j])
    follows(once, lambda: table.mul_(3))
    follows(once, lambda: table.data.fill_(0)[:7].fill_(2.0))
    follows(once, lambda: table.set_(torch.randn(LENGTH + 9)))


def test_a_tensor_that_shrinks_is_refused():
    table = torch.randn(LENGTH)
    once = functools.partial(call, score_mod=lambda s, b, h, i, j: s + table[j])
    once(), once()
    table.resize_(LENGTH - 1)
    with pytest.raises(ValueError, match=f"reads dimension 0 of a captured tensor of shape .{LENGTH - 1},."):
        once()


def test_numbers_on_which_a_check_hangs():
    table, shift = torch.randn(2 * LENGTH), 0

    def score(s, b, h, i, j):
        return s + table[j + shift]

    once = functools.partial(call, score_mod=score)
    for shift in (0, 0, LENGTH):  # noqa: B007
        once()
    follows(once, lambda: table.mul_(2))
    shift = LENGTH + 1
    with pytest.raises(ValueError, match="reads dimension 0"):
        once()


def test_a_number_that_must_be_a_constant():
    times = 2

    def score(s, b, h, i, j):
        for _ in range(times):
            s = s * 0.5
        return s

    def set_times(n):
        nonlocal times
        times = n

    for n in (5, 1, 2, 5):
        follows(lambda: call(score_mod=score), lambda n=n: set_times(n))


def test_requires_grad_that_comes_and_goes():
    table, q = torch.randn(LENGTH), Q.clone()
    once = lambda: flex(q, K, V, score_mod=lambda s, b, h, i, j: s + table[j])
    for tensor in (table, q):
        once(), once()
        assert not once().requires_grad
        tensor.requires_grad_()
        for _ in range(2):
            once().sum().backward()
            assert tensor.grad is not None
            tensor.grad = None
        with torch.no_grad():
            assert not once().requires_grad
        assert once().requires_grad
        tensor.requires_grad_(False)


def test_under_autocast_and_inference_mode():
    first = call(mask_mod=narrow)
    with torch.autocast("cpu", torch.bfloat16):
        warm = call(mask_mod=narrow)
        attention.clear()
        assert torch.equal(warm, call(mask_mod=narrow)) and warm.dtype is torch.bfloat16
        with torch.autocast("cpu", enabled=False):
            assert torch.equal(call(mask_mod=narrow), first)
    assert torch.equal(call(mask_mod=narrow), first)
    with torch.inference_mode():
        inside = [call(mask_mod=narrow) for _ in range(2)]
        assert all(t.is_inference() and torch.equal(t, first) for t in inside)
        lists = torch.nn.attention.flex_attention.create_block_mask(narrow, 1, 1, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)
        assert torch.equal(call(block_mask=lists), call(block_mask=lists))
    assert not call(mask_mod=narrow).is_inference()


def test_the_default_dtype():
    step = 3
    once = lambda: call(score_mod=lambda s, b, h, i, j: s + torch.sin((i * j) / step * 1e3))
    once(), once()
    torch.set_default_dtype(torch.float64)
    try:
        warm = once()
        attention.clear()
        assert torch.equal(warm, once())
    finally:
        torch.set_default_dtype(torch.float32)


# ---- block masks


@pytest.mark.parametrize("make", [anyattn.create_block_mask, torch.nn.attention.flex_attention.create_block_mask], ids=["ours", "torch's"])
def test_another_block_mask(make):
    kept = [made(narrow, make)]
    once = lambda: call(block_mask=kept[0])
    follows(once, lambda: kept.__setitem__(0, made(wide, make)))
    follows(once, lambda: setattr(kept[0], "mask_mod", narrow))  # the lists stay
    follows(once, lambda: setattr(kept[0], "mask_mod", wide))
    fewer = made(narrow, make)

    def assign():
        for name in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
            setattr(kept[0], name, getattr(fewer, name))

    follows(once, assign)


def test_lists_written_in_place():
    mask = made(wide, torch.nn.attention.flex_attention.create_block_mask)
    follows(lambda: call(block_mask=mask), lambda: mask.kv_num_blocks.fill_(1))


def test_a_block_mask_of_other_lengths_is_refused():
    mask = made(wide)
    call(block_mask=mask), call(block_mask=mask)
    mask.seq_lengths = (LENGTH, LENGTH - 1)
    with pytest.raises(ValueError, match="block_mask was made for lengths"):
        call(block_mask=mask)


def test_what_changes_during_the_checks_is_not_remembered(monkeypatch):
    """As another thread might: the plan of one window must not stand for the other."""
    width, original = 3, check.flex_problem

    def meanwhile(*arguments):
        nonlocal width
        found = original(*arguments)
        width = 9
        return found

    once = lambda: call(mask_mod=lambda b, h, i, j: i - j < width)
    with monkeypatch.context() as patched:
        patched.setattr(check, "flex_problem", meanwhile)
        once()
    assert attention.size() == 0
    once()
    assert attention.size() == 1


def changed_lists(mask, what):
    if what == "a field":
        mask.kv_indices = mask.kv_indices.clone()
    elif what == "a write":
        mask.full_kv_num_blocks.add_(0)
    elif what == "the mask":
        mask.mask_mod = wide
    elif what == "a size":
        mask.BLOCK_SIZE = [16, 16]
    elif what == "a list that comes":
        mask.full_kv_num_blocks = mask.full_kv_indices = None


@pytest.mark.parametrize("what", ["a field", "a write", "the mask", "a size", "a list that comes"])
@pytest.mark.parametrize("make", [anyattn.create_block_mask, torch.nn.attention.flex_attention.create_block_mask], ids=["ours", "torch's"])
def test_what_was_read_of_a_block_mask_is_read_again(make, what):
    mask = made(narrow, make)
    first = read_lists.read_lists(mask)
    kept = read_lists.kept_lists(mask)
    assert kept.blocks is first is read_lists.read_lists(mask) and kept.facts == read_lists.lists_facts(mask)
    changed_lists(mask, what)
    assert read_lists.kept_lists(mask) is None
    assert read_lists.read_lists(mask) is not first
    assert what == "a size" or read_lists.kept_lists(mask).facts == read_lists.lists_facts(mask)


@pytest.mark.parametrize("mask", [narrow, lambda b, h, i, j: (i * 7 + j * 5) % 3 == 0], ids=["row ranges", "asked in every tile"])
def test_lists_of_an_exact_block_mask_that_are_written_to(mask):
    """The lists say less than the mask then: what they leave out is not seen."""
    for edit in (
        lambda m: m.kv_num_blocks.zero_(),
        lambda m: m.full_kv_num_blocks.zero_(),
        lambda m: m.kv_indices[0, 0, 1].copy_(m.kv_indices[0, 0, 1].flip(-1)),
    ):
        ours = anyattn.create_block_mask(mask, 1, 1, LENGTH, LENGTH, "cpu", 16)
        lists = [t.clone() for t in (ours.kv_num_blocks, ours.kv_indices, ours.full_kv_num_blocks, ours.full_kv_indices)]
        call(block_mask=ours), call(block_mask=ours)
        edit(ours)
        other = anyattn.BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=16, mask_mod=mask, seq_lengths=(LENGTH, LENGTH))
        edit(other)
        for _ in range(2):
            assert torch.equal(call(block_mask=ours), call(block_mask=other))


def test_a_block_mask_that_is_no_longer_exact():
    mask = made(narrow, anyattn.create_block_mask)
    read_lists.read_lists(mask)
    assert read_lists.kept_lists(mask).facts[3] is True
    mask.mask_mod = wide
    read_lists.read_lists(mask)
    assert read_lists.kept_lists(mask).facts[3] is False


# ---- contents that decide whether a mod reads inside its tensors, on a device that the host would have to wait for


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """CPU tensors are taken for a device's; one entry for each time that the bounds checks read contents."""
    made: list[int] = []
    checked = visible_loads._checked
    monkeypatch.setattr(visible_loads, "_checked", lambda *a, **kw: made.append(1) or checked(*a, **kw))
    monkeypatch.setattr(visible_loads, "_results", {})
    for module in (visible_loads, rebind):
        monkeypatch.setattr(module, "reading_waits", lambda mods: any(m.tensors for m in mods))
    return made


GATHERS = {
    "score_mod": lambda q, t, i: anyattn.flex_attention(q, q, q, lambda s, b, h, x, y: s + t[h, i[y]]),
    "both": lambda q, t, i: anyattn.flex_attention(
        q, q, q, lambda s, b, h, x, y: s + t[h, i[y]], mask_mod=lambda b, h, x, y: (i[x] == i[y]) & (x >= y)
    ),
    "mask_mod": lambda q, t, i: anyattn.flex_attention(q, q, q, mask_mod=lambda b, h, x, y: t[h, i[x]] >= t[h, i[y]]),
    "aux_tensors": lambda q, t, i: anyattn.flex_attention(q, q, q, lambda s, b, h, x, y, aux: s + aux[0][h, aux[1][y]], aux_tensors=[t, i]),
    "flash": lambda q, t, i: anyattn.flash_attn_func(q, q, q, causal=True, score_mod=lambda s, b, h, x, y: s + t[h, i[y]]),
}


@pytest.mark.parametrize("name", GATHERS)
def test_calls_that_gather_are_warm_until_a_write(name: str, checks: list[int]) -> None:
    q, table = torch.randn(1, 2, 24, 8), torch.tensor([[0.0, 1.0, 2.0, 3.0], [3.0, 2.0, 1.0, 0.0]])
    q = q.transpose(1, 2) if name == "flash" else q
    ids, others = torch.arange(24) % 4, torch.arange(24) // 8
    call = lambda i: GATHERS[name](q, table, i)
    first, of_others = call(ids), call(others)
    plans_by_contents = name in ("both", "mask_mod")  # the torch backend's plan reads a mask's tensors
    assert len(checks) == 2 and attention.size() == (not plans_by_contents)
    for _ in range(2):  # layers with ids of their own stay warm side by side
        assert torch.equal(call(ids), first) and torch.equal(call(others), of_others)
    assert len(checks) == 2
    ids[5] = 2
    rewritten = call(ids)
    assert len(checks) == 3 and torch.equal(call(ids), rewritten) and not torch.equal(rewritten, first)
    ids[5] = 99
    with pytest.raises(ValueError, match=r"index 99 \(at"):
        call(ids)


# ---- indices in a new tensor at every call, as where a model makes its mod in every layer


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The plans that are made."""
    made: list[Any] = []
    planned = planner.planned
    monkeypatch.setattr(planner, "planned", lambda *a, **kw: made.append(planned(*a, **kw)) or made[-1])
    return made


@pytest.mark.parametrize("name", ["score_mod", "aux_tensors", "flash"])
def test_new_index_tensors_cost_their_checks_and_no_plan(name: str, checks: list[int], plans: list[Any]) -> None:
    q, table = torch.randn(1, 2, 24, 8), torch.randn(2, 4)
    q = q.transpose(1, 2) if name == "flash" else q
    ids = [(torch.arange(24) + n) % 4 for n in range(4)]
    found = [GATHERS[name](q, table, i) for i in ids]
    assert len(checks) == 4 and len(plans) == 1 and attention.size() == 1
    for i, out in zip(ids, found, strict=True):  # all of them are checked
        assert torch.equal(GATHERS[name](q, table, i), out)
    assert len(checks) == 4 and len(plans) == 1
    for i, out in zip(ids, found, strict=True):
        attention.clear()
        assert torch.equal(GATHERS[name](q, table, i.clone()), out)
    with pytest.raises(ValueError, match=r"index 99 \(at"):
        GATHERS[name](q, table, torch.full((24,), 99))


def test_checks_that_come_to_another_program_plan_again(checks: list[int], plans: list[Any]) -> None:
    """Where a mask hides an index outside, that index is clamped first: not the program of the call before."""
    q, table, ids = torch.randn(1, 2, 24, 8), torch.randn(4), torch.arange(12) % 4

    def call(order: torch.Tensor, limit: int) -> torch.Tensor:
        return anyattn.flex_attention(
            q, q, q, lambda s, b, h, x, y: s + table[ids[order[y]]], mask_mod=lambda b, h, x, y: y < limit
        )  # fmt: skip

    inside, outside = torch.arange(24) % 12, torch.arange(24) * 3 // 4
    of_inside, of_outside = call(inside, 16), call(outside, 16)
    assert len(plans) == 2 and torch.equal(of_outside, call(outside.clamp(max=11), 16))
    assert torch.equal(call(inside, 16), of_inside) and torch.equal(call(outside, 16), of_outside)
    with pytest.raises(ValueError, match=r"index 12 \(at"):
        call(outside, 17)


def test_what_a_mask_hides_is_seen_by_another_mask(checks: list[int], plans: list[Any]) -> None:
    q, table, outside = torch.randn(1, 2, 24, 8), torch.randn(4), torch.arange(24) // 4
    call = lambda i, limit: anyattn.flex_attention(q, q, q, lambda s, b, h, x, y: s + table[i[y]], mask_mod=lambda b, h, x, y: y < limit)
    expected = call(outside.clamp(max=3), 16)
    assert torch.equal(call(outside, 16), expected) and len(plans) == 1
    with pytest.raises(ValueError, match=r"index 4 \(at"):
        call(outside, 17)
    outside[3] = 4
    with pytest.raises(ValueError, match=r"index 4 \(at"):
        call(outside, 16)


def test_a_variable_that_is_rebound_during_the_checks_is_checked_again(checks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors of the signature are others than those that the checks have read."""
    q, table, ids = torch.randn(1, 2, 24, 8), torch.randn(4), torch.arange(24) % 4
    wrong = torch.full((24,), 99)

    def call() -> torch.Tensor:
        return anyattn.flex_attention(q, q, q, lambda s, b, h, x, y: s + table[ids[y]])

    def rebound_before(*a: Any, **kw: Any) -> Any:
        nonlocal ids
        ids = torch.arange(24) // 8
        return problem_of(*a, **kw)

    for _ in range(2):  # a first call, and one that is checked again
        ids, problem_of = wrong, check.flex_problem
        with monkeypatch.context() as rebound:
            rebound.setattr(check, "flex_problem", rebound_before)
            call()
        ids = wrong
        with pytest.raises(ValueError, match="index 99"):
            call()
        ids = torch.arange(24) % 4
        call()


def test_a_number_that_keeps_an_index_inside_belongs_to_the_key(checks: list[int]) -> None:
    """The contents may change after the check; the number may not."""
    q, table, ids = torch.randn(1, 2, 24, 8), torch.randn(4), torch.full((24,), 99)
    call = lambda most: anyattn.flex_attention(q, q, q, lambda s, b, h, x, y: s + table[torch.clamp(ids[y], 0, most)])
    last, other = (anyattn.flex_attention(q, q, q, lambda s, b, h, x, y, n=n: s + table[(y * 0 + n)]) for n in (3, 1))
    checks.clear()
    for contents in (99, 2**40, 3):
        ids.fill_(contents)
        assert all(torch.equal(call(most), expected) for most, expected in ((3, last), (1, other), (3, last)))
    assert len(checks) == 2  # one for each number
    ids.fill_(4)
    with pytest.raises(ValueError, match=r"index 4 \(at"):
        call(4)


def test_disentangled_scores_of_every_layer_are_warm(checks: list[int], plans: list[Any]) -> None:
    layers = [(torch.randn(1, 2, 24, 8), *torch.randn(2, 1, 2, 24, 8)) for _ in range(3)]
    attend = lambda q, c2p, p2c: anyattn.flex_attention(q, q, q, scores.disentangled(c2p, p2c, 9))
    for _ in range(2):  # the first call finds that the mod's numbers belong to the key
        attend(*layers[0])
    checks.clear(), plans.clear()
    found = [attend(*layer) for layer in layers]
    assert not checks and not plans
    for layer, out in zip(layers, found, strict=True):
        attention.clear()
        assert torch.equal(attend(*layer), out)


def test_a_call_under_capture_is_not_taken_for_a_checked_one(checks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    q, table, wrong = torch.randn(1, 2, 24, 8), torch.randn(2, 4), torch.full((24,), 99)
    with monkeypatch.context() as captured:
        for module in (visible_loads, calls):
            captured.setattr(module, "is_captured", lambda: True)
        clamped = GATHERS["score_mod"](q, table, wrong)
        assert not checks and torch.equal(clamped, GATHERS["score_mod"](q, table, torch.full((24,), 3)))
    with pytest.raises(ValueError, match="index 99"):
        GATHERS["score_mod"](q, table, wrong)


def test_a_call_that_reads_no_captured_tensor_is_not_taken_for_a_checked_one(checks: list[int], plans: list[Any]) -> None:
    """Operators on a GPU clamp instead: they are warm with any contents, and other calls still check them."""
    q, table, wrong = torch.randn(1, 24, 2, 8), torch.randn(2, 4), torch.full((24,), 99)
    unread = flash.Options(score_mod=lambda s, b, h, x, y: s + table[h, wrong[y]], reads_captured=False)

    def operator() -> torch.Tensor:
        problem, _ = attention.flash_call(q, q, q, unread, None, is_operator=True)
        return evaluate(problem.score, 0, torch.arange(2)[:, None, None], 0, torch.arange(24), score=torch.zeros(()))

    clamped = operator()
    assert torch.equal(clamped, table[:, 3:].expand(2, 24)[:, None]) and not checks
    for _ in range(2):
        with pytest.raises(ValueError, match="index 99"):
            attention.flash_call(q, q, q, unread._replace(reads_captured=True), None)
        assert torch.equal(operator(), clamped) and len(plans) == 1
    wrong = torch.zeros(24, dtype=torch.int64)
    assert torch.equal(operator(), table[:, :1].expand(2, 24)[:, None]) and len(plans) == 1
