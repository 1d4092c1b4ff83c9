"""Warm calls of ``create_block_mask`` launch what a first call would, and check what it would check."""

from __future__ import annotations

import copy
import functools
import gc
import importlib.util
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention
from torch.utils import _pytree as pytree

from anyattn import create_block_mask, masks
from anyattn.call_cache import block_mask as calls_of_masks
from anyattn.call_cache import calls, signature
from anyattn.mods.tracing.trace import trace
from anyattn.sparsity.arguments import may_have_kernels
from anyattn.sparsity.block_mask import LISTS, BlockMask
from tests.support.triton.pretended_lists import Launches, as_on_a_gpu

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

LENGTH = 300
IDS = torch.arange(LENGTH, dtype=torch.int32) // 70


@pytest.fixture
def gpu() -> Iterator[Launches]:
    calls.clear()
    with as_on_a_gpu() as launches:
        yield launches
    calls.clear()


def made(mask: Callable, B: Any = 1, H: Any = 1, q: Any = LENGTH, kv: Any = LENGTH, size: Any = 32, **options: Any) -> BlockMask:
    return create_block_mask(mask, B, H, q, kv, "cpu", size, **options)


def causal(b, h, q, k):
    return q >= k


def documents(ids: torch.Tensor) -> Callable:
    return lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k)


def window(left: float) -> Callable:
    return lambda b, h, q, k: (q >= k) & (q - k < left)


def told(gpu: Launches, do: Callable[[], BlockMask]) -> tuple[bool, list[tuple], dict[str, Any]]:
    """Whether a call was a warm one, what it launched, and all fields of its block mask: of lists all but the values, of its function the
    code."""
    gpu.made.clear()
    mask = do()
    assert type(mask) is BlockMask and gpu.made
    fields = {
        n: (x.shape, x.stride(), x.dtype, x._version, x._is_view()) if n in LISTS and x is not None else x for n, x in vars(mask).items()
    }
    fields["mask_mod"] = getattr(mask.mask_mod, "__code__", mask.mask_mod)
    return all(x.is_warm for x in gpu.made), gpu.told(mask), fields


def as_first(gpu: Launches, do: Callable[[], BlockMask], *, is_warm: bool = True) -> Any:
    """``do()`` does what a first call does; whether it is a warm call is as said."""
    now = told(gpu, do)
    calls.clear()
    first = told(gpu, do)
    assert not first[0] and now[1:] == first[1:]
    assert now[0] is is_warm, "a warm call" if now[0] else "not a warm call"
    return first[1:]


def warmed(gpu: Launches, do: Callable[[], BlockMask]) -> None:
    """A first call, or two: the first of a mask may find that more of its numbers belong to the key."""
    do()
    do()
    assert told(gpu, do)[0]


def follows(gpu: Launches, do: Callable[[], BlockMask], change: Callable[[], Any], *, is_warm: bool) -> None:
    """After ``change`` a call does what a first one does, and not what the one before did."""
    warmed(gpu, do)
    before = told(gpu, do)[1:]
    change()
    assert as_first(gpu, do, is_warm=is_warm) != before, "the change changes nothing: this test shows nothing"


# ---- the same launches


@pytest.mark.parametrize("name", ["causal", "window", "document", "prefix", "several leaves", "clamped", "broadcast", "partial", "library"])
@pytest.mark.parametrize("separate", [True, False])
def test_a_warm_call_launches_what_a_first_one_does(gpu: Launches, name: str, separate: bool) -> None:
    x, y, z, short = *torch.randint(9, (3, LENGTH)), torch.zeros(LENGTH - 10)
    mask = {
        "causal": causal,
        "window": window(50),
        "document": documents(IDS),
        "prefix": masks.prefix_lm(torch.tensor([5, 9])),
        "several leaves": lambda b, h, q, k: (x[q] == x[k]) | (y[q] == y[k]) & (z[q] == z[k]),
        "clamped": lambda b, h, q, k: (q >= 10) & (short[q - 10] >= 0.0),
        "broadcast": masks.document(IDS) & masks.causal(),
        "partial": functools.partial(lambda b, h, q, k, left: q - k < left, left=50),
        "library": masks.sliding_window(40, 3),
    }[name]
    for lengths in ((LENGTH, LENGTH), (LENGTH, LENGTH - 50)):
        do = functools.partial(made, mask, 2, 3, *lengths, separate_full_blocks=separate)
        warmed(gpu, do)
        as_first(gpu, do)
    if name == "several leaves":
        assert len(told(gpu, do)[1]) == 2, "no scratch memory"


def test_closures_made_anew(gpu: Launches) -> None:
    """Other numbers, and other tensors of the same kind."""
    warmed(gpu, lambda: made(window(5)))
    found = [as_first(gpu, lambda n=n: made(window(n))) for n in (9, 7, 100)]
    assert len({str(launches) for launches, _ in found}) == 3
    warmed(gpu, lambda: made(documents(IDS)))
    for ids in (IDS.clone(), torch.zeros_like(IDS), IDS):
        mask = documents(ids)
        as_first(gpu, functools.partial(made, mask))
        assert made(mask).mask_mod is mask and gpu.made[-1].is_warm


@pytest.mark.parametrize(
    "given",
    [{"B": 2}, {"H": 2}, {"q": LENGTH + 1}, {"kv": 200}, {"size": 64}, {"size": (32, 64)}, {"separate_full_blocks": False}],
    ids=str,
)
def test_other_arguments(gpu: Launches, given: dict[str, Any]) -> None:
    warmed(gpu, lambda: made(causal))
    as_first(gpu, lambda: made(causal, **given), is_warm=False)


@pytest.mark.skipif(not hasattr(flex_attention, "_compute_dq_write_order_from_block_mask"), reason="came with torch 2.13")
def test_a_write_order_is_computed(gpu: Launches) -> None:
    warmed(gpu, lambda: made(causal))
    gpu.run = lambda kernel, grid, given, options: [t.zero_() for t in given[:8]]
    assert made(causal, compute_dq_write_order=True).dq_write_order is not None


def test_the_same_of_other_types(gpu: Launches) -> None:
    """Python takes 1, 1.0 and True for the same, and ``create_block_mask`` does not."""
    for size in (32, (32, 32)):
        warmed(gpu, lambda size=size: made(causal, size=size))
    for given in ({"B": True}, {"H": 1.0}, {"q": 300.0}, {"kv": "300"}, {"size": 32.0}, {"size": (32, 32.0)}, {"size": (32, 32, 32)}):
        with pytest.raises((TypeError, ValueError), match="wanted"):
            made(causal, **given)
    as_first(gpu, lambda: made(causal, size=[32, 32]))
    one = torch.tensor(1)
    for count in (1, 2):  # whose number may change is read anew
        one.fill_(count)
        assert made(causal, B=one).kv_num_blocks.shape[0] == count


def test_what_a_mask_captures(gpu: Launches) -> None:
    ids, left = IDS, 20

    def mask(b, h, q, k):
        return (ids[q] == ids[k]) & (q - k < left)

    def rebind(**new: Any) -> None:
        nonlocal ids, left
        ids, left = new.get("ids", ids), new.get("left", left)

    for new, is_warm in (
        ({"left": 21}, True), ({"left": 22.0}, False), ({"left": 2**31}, False), ({"left": 25}, False), ({"ids": IDS + 1}, True),
        ({"ids": IDS.to(torch.int64)}, False), ({"ids": torch.zeros(2 * LENGTH, dtype=torch.int64)[::2]}, False),
        ({"ids": torch.zeros(LENGTH + 5, dtype=torch.int64)}, False), ({"ids": torch.zeros(LENGTH + 5)}, False),
    ):  # fmt: skip
        warmed(gpu, lambda: made(mask)) if abs(left) < 2**29 else made(mask)
        before = told(gpu, lambda: made(mask))[1:]
        rebind(**new)
        assert as_first(gpu, lambda: made(mask), is_warm=is_warm) != before


LEFT, INNER = 30, causal


def by_globals(b, h, q, k):
    return INNER(b, h, q, k) & (q - k < LEFT)


@pytest.mark.parametrize(("name", "value", "is_warm"), [("LEFT", 31, True), ("LEFT", 9.0, False), ("INNER", window(3), False)])
def test_rebound_globals(gpu: Launches, name: str, value: Any, is_warm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    follows(gpu, lambda: made(by_globals), lambda: monkeypatch.setitem(globals(), name, value), is_warm=is_warm)


def test_the_default_dtype_counts(gpu: Launches) -> None:
    scale = 0.1
    mask = lambda b, h, q, k: q * scale > k
    try:
        follows(gpu, lambda: made(mask), lambda: torch.set_default_dtype(torch.float64), is_warm=False)
    finally:
        torch.set_default_dtype(torch.float32)


def test_another_device_is_current(gpu: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device without a number is the current one."""
    follows_device = functools.partial(made, documents(IDS))
    warmed(gpu, follows_device)
    monkeypatch.setattr(signature, "_current_device", lambda: 1)
    as_first(gpu, follows_device, is_warm=False)


@pytest.mark.parametrize(
    ("device", "is_asked"),
    [
        ("cuda", True),
        ("cuda:1", True),
        (torch.device("cuda", 0), True),
        ("cpu", False),
        (torch.device("cpu"), False),
        (None, False),
        (0, False),
    ],
)
def test_which_devices_may_have_kernels(device: Any, is_asked: bool) -> None:
    assert may_have_kernels(device) is is_asked or (device is None and torch.cuda.is_available())


def test_a_mask_that_reads_the_world_is_never_warm(gpu: Launches) -> None:
    state = {"left": 3}
    mask = lambda b, h, q, k: q - k < state["left"]
    for left in (3, 4, 5):
        state["left"] = left
        as_first(gpu, lambda: made(mask), is_warm=False)


# ---- the same checks


def test_an_index_outside_by_a_number(gpu: Launches) -> None:
    table = torch.zeros(LENGTH)
    mask = lambda shift: lambda b, h, q, k: table[q + shift] == 0
    for _ in range(3):
        made(mask(0))
    with pytest.raises(ValueError, match="reads dimension 0 of a captured tensor"):
        made(mask(1))
    table = torch.zeros(LENGTH + 1)
    made(mask(1))
    as_first(gpu, lambda: made(mask(0)), is_warm=False)


def test_an_index_outside_hidden_by_a_number(gpu: Launches) -> None:
    """The index does not hang on the number, but whether the mask hides the rows that leave the table does."""
    table = torch.zeros(LENGTH)
    mask = lambda first: lambda b, h, q, k: (q < first) & (table[q + 10] == 0)
    hidden = LENGTH - 10
    warmed(gpu, lambda: made(mask(hidden)))
    as_first(gpu, lambda: made(mask(hidden)))
    with pytest.raises(ValueError, match="reads dimension 0 of a captured tensor"):
        made(mask(hidden + 1))
    as_first(gpu, lambda: made(mask(hidden - 1)), is_warm=False)


def test_a_table_that_is_too_short(gpu: Launches) -> None:
    for _ in range(3):
        made(documents(IDS))
    with pytest.raises(ValueError, match="reads dimension 0 of a captured tensor"):
        made(documents(IDS[:-1]))


def test_numbers_that_the_body_needs(gpu: Launches) -> None:
    """They are constants of the traced program."""

    def steps(count: int) -> Callable:
        def mask(b, h, q, k):
            found = q == k
            for i in range(count):
                found = found | (q - k == i * i)
            return found

        return mask

    for count in (2, 3):
        warmed(gpu, lambda count=count: made(steps(count)))
    for count in (2, 3, 4):
        as_first(gpu, lambda count=count: made(steps(count)), is_warm=count == 2)  # ``as_first`` forgets the others


@pytest.mark.parametrize("count", [3, 2**40 + 1, -(2**40)])
@pytest.mark.parametrize("make", [lambda n: lambda b, h, q, k: q + n >= k, lambda n: lambda b, h, q, k: q < n])
def test_far_numbers_are_never_warm(gpu: Launches, make: Callable, count: int) -> None:
    """The kernels have no room for some of them."""
    for _ in range(3):
        made(make(2**39))
    gpu.made.clear()
    found = made(make(count))
    assert bool(gpu.made) == (count == 3) and found.kv_num_blocks.shape == (1, 1, 10)


def test_what_changes_during_the_checks_is_not_remembered(gpu: Launches, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread may rebind what a mask captures."""
    ids, original, wider = IDS, calls_of_masks.build_block_mask, IDS.to(torch.int64)
    mask = lambda b, h, q, k: ids[q] == ids[k]

    def build(*about: Any) -> BlockMask:
        nonlocal ids
        found = original(*about)
        ids = wider
        return found

    for known in (wider, IDS):  # both kernels
        ids = known
        warmed(gpu, lambda: made(mask))
    calls.clear()
    monkeypatch.setattr(calls_of_masks, "build_block_mask", build)
    made(mask)
    monkeypatch.undo()
    ids = IDS
    as_first(gpu, lambda: made(mask), is_warm=False)


def test_a_table_without_values(gpu: Launches) -> None:
    """Where one of two tables is on the meta device, and no device is given, lists are made without values and no kernel runs."""
    mask = lambda x, y: lambda b, h, q, k: x[q] == y[k]
    for _ in range(3):
        create_block_mask(mask(IDS, IDS.clone()), 1, 1, LENGTH, LENGTH)
    gpu.made.clear()
    for _ in range(3):
        create_block_mask(mask(IDS, IDS.to("meta")), 1, 1, LENGTH, LENGTH)
    assert not gpu.made


def test_what_listens_to_operations_is_asked(gpu: Launches) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Listener(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    warmed(gpu, lambda: made(documents(IDS)))
    with Listener():
        as_first(gpu, lambda: made(documents(IDS)), is_warm=False)
    assert not seen  # lists are no part of what a mode may save or count
    warmed(gpu, lambda: made(documents(IDS)))
    with torch.autograd.forward_ad.dual_level():
        as_first(gpu, lambda: made(documents(IDS)), is_warm=False)


def test_tensors_without_plain_memory_are_refused(gpu: Launches) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Own(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(func)

    warmed(gpu, lambda: made(documents(IDS)))
    own = torch.Tensor._make_subclass(Own, IDS)
    for ids in (own, torch._neg_view(IDS.double())):
        with pytest.raises(TypeError, match="memory"):
            made(documents(ids))
    with pytest.raises(TypeError, match="a tensor of torch"):
        torch.func.grad(lambda x: (made(lambda b, h, q, k: x > k), x)[1])(torch.tensor(1.0))
    gpu.made.clear()
    with FakeTensorMode() as mode:
        found = made(documents(mode.from_tensor(IDS)))
    assert not gpu.made and type(found.kv_indices).__name__ == "FakeTensor"
    for fn in (lambda b, h: b, lambda b, h, q, k: None, 3):
        with pytest.raises((TypeError, ValueError)):
            made(fn)  # type: ignore[arg-type]


def test_inference_mode(gpu: Launches) -> None:
    """torch counts no writes to inference tensors: the lists are other tensors than the allocated ones."""
    warmed(gpu, lambda: made(causal))
    for _ in range(3):
        gpu.made.clear()
        with torch.inference_mode():
            mask = made(causal)
        assert not gpu.made[0].is_warm and mask.is_exact and not mask.kv_indices.is_inference()


def test_a_traced_mask_is_never_warm(gpu: Launches) -> None:
    traced = trace(window(9), "mask")
    for _ in range(3):
        as_first(gpu, lambda: made(traced), is_warm=False)  # type: ignore[arg-type]


# ---- what is made


def filled(mask: BlockMask, like: BlockMask) -> BlockMask:
    """The lists are those that kernels would have made, without a write that torch counts."""
    for name in LISTS:
        getattr(mask, name).data.copy_(getattr(like, name))
    return mask


def test_it_is_a_block_mask_like_any_other(gpu: Launches) -> None:
    mask = masks.document(IDS) & masks.causal()
    warmed(gpu, lambda: made(mask))
    gpu.made.clear()
    ours = made(mask)
    assert gpu.made[0].is_warm and ours.is_exact
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("anyattn.sparsity.compute.runs_kernels", lambda device: False)
        patch.setattr("anyattn.block_masks.may_have_kernels", lambda device: False)
        theirs = made(mask)
    filled(ours, theirs)
    assert list(vars(ours)) == list(vars(theirs))
    leaves, spec = pytree.tree_flatten(ours)
    for copied in (
        ours, pickle.loads(pickle.dumps(ours)), copy.copy(ours), copy.deepcopy(ours), ours.to("cpu"), ours.contiguous(), ours[:, :, :],
        ours._adjust(LENGTH, LENGTH), pytree.tree_unflatten(leaves, spec),
    ):  # fmt: skip
        assert isinstance(copied, flex_attention.BlockMask) and copied.shape == theirs.shape
        for a, b in zip(copied.as_tuple(), theirs.as_tuple(), strict=True):
            assert torch.equal(a, b) if isinstance(b, torch.Tensor) else callable(b) or a == b
    assert torch.equal(ours[:, :, 2:].to_dense(), theirs[:, :, 2:].to_dense()) and ours.sparsity() == theirs.sparsity()
    assert str(ours) == str(theirs) and repr(ours) == repr(theirs)


def test_writes_and_assignments_are_noticed(gpu: Launches) -> None:
    warmed(gpu, lambda: made(causal))
    for name in LISTS[:4]:
        mask, other = made(causal), made(causal)
        assert mask.is_exact
        getattr(mask, name).zero_()
        assert not mask.is_exact and other.is_exact, name
    mask = made(causal)
    mask.seq_lengths = (LENGTH, LENGTH)
    assert not mask.is_exact and made(causal).is_exact


def test_lists_that_stand_for_all_heads_are_told(gpu: Launches) -> None:
    mask = lambda b, h, q, k: (q >= k) & (q - k < 8 * (h + 1))
    warmed(gpu, lambda: made(mask))
    assert not made(mask).is_exact and made(mask)._told_apart == ("H",)
    warmed(gpu, lambda: made(mask, H=4))
    assert made(mask, H=4).is_exact and made(mask, H=4)._told_apart == ()


def test_masks_of_two_calls_share_nothing(gpu: Launches) -> None:
    warmed(gpu, lambda: made(documents(IDS)))
    one, other = made(documents(IDS)), made(documents(IDS))
    memory = [{getattr(m, name).untyped_storage().data_ptr() for name in LISTS} for m in (one, other)]
    assert not memory[0] & memory[1]
    one.BLOCK_SIZE = (7, 7)
    assert other.BLOCK_SIZE == made(documents(IDS)).BLOCK_SIZE == (32, 32)


def test_nothing_of_the_users_is_kept(gpu: Launches) -> None:
    ids = IDS.clone()
    mask = documents(ids)
    warmed(gpu, functools.partial(made, mask))
    gone = weakref.ref(ids), weakref.ref(mask)
    del ids, mask
    gc.collect()
    assert [r() for r in gone] == [None, None]


def test_torch_takes_it(gpu: Launches) -> None:
    """torch's own ``flex_attention``, compiled, and as an argument of a compiled function."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("anyattn.sparsity.compute.runs_kernels", lambda device: False)
        like = made(causal)
    calls.clear()
    warmed(gpu, lambda: made(causal))
    mask = filled(made(causal), like)
    q = torch.randn(1, 1, LENGTH, 16)
    compiled = torch.compile(flex_attention.flex_attention, backend="aot_eager")
    assert torch.equal(compiled(q, q, q, block_mask=mask), compiled(q, q, q, block_mask=like))
