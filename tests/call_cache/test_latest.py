"""A call that repeats a latest one is served without its signature; one that differs in any property is not."""

from __future__ import annotations

import ast
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import anyattn
from anyattn.call_cache import attention, latest
from anyattn.triton_tools import launch_log
from tests.mutants.mutant import Mutant
from tests.support.inside import InsideMode
from tests.support.pretended_launches import Launched, batch, described, noted_by_address, step

pytest.importorskip("triton")

WARM = 10
BASES: dict[str, Callable[[int], dict[str, Any]]] = {
    "decode": lambda seed: step(seed, False, False),
    "pages": lambda seed: step(seed, True, False),
    "appends": lambda seed: step(seed, False, True),
    "varlen": batch,
}


class Served:
    """noted: for every latest call that a call was compared with, whether it served it."""

    def __init__(self, launched: list[Launched]) -> None:
        self.launched, self.noted = launched, []

    def call(self, arguments: dict[str, Any], **more: Any) -> tuple[bool, Any]:
        """Whether a call was served, and what it launched and returned."""
        function = anyattn.flash_attn_varlen_func if "cu_seqlens_q" in arguments else anyattn.flash_attn_with_kvcache
        given = {"return_lse": True, "backend": "triton", "num_splits": 2, "softmax_scale": 0.375, **arguments, **more}
        before, tried = len(self.launched), len(self.noted)
        results = function(**given)
        results = results if isinstance(results, tuple) else (results,)
        launches = described(self.launched[before:], given, results)
        return any(self.noted[tried:]), (launches, [(t.shape, t.stride(), t.dtype) for t in results])

    def warm(self, name: str) -> dict[str, Any]:
        """The arguments of a call of this kind that would be served."""
        for seed in range(WARM):
            self.call(BASES[name](seed))
        assert self.call(BASES[name](WARM))[0]
        return BASES[name](WARM + 1)

    def check_other(self, arguments: dict[str, Any]) -> None:
        """That a call is not served, and launches what it would as a first call."""
        was_served, found = self.call(arguments)
        assert not was_served
        attention.clear()
        assert self.call(arguments)[1] == found


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    own = latest.LatestCall.results
    with noted_by_address(monkeypatch) as launched:
        found = Served(launched)

        monkeypatch.setattr(latest.LatestCall, "results", lambda *given: note_served(found, own, *given))
        yield found


def note_served(served: Served, own: Callable[..., Any], *given: Any) -> Any:
    served.noted.append(False)
    results = own(*given)
    served.noted[-1] = results is not None
    return results


@pytest.mark.parametrize("name", BASES)
def test_a_repeated_call_launches_what_a_first_call_does(name: str, served: Served) -> None:
    arguments = served.warm(name)
    was_served, warm = served.call(arguments, softmax_scale=float("0.375"))  # an equal number, not the same object
    assert was_served
    attention.clear()
    was_served, first = served.call(arguments)
    assert not was_served and first == warm


def wider(x: Tensor) -> Tensor:
    """x with other strides."""
    return torch.cat((x, x), -1)[..., : x.shape[-1]]


def shifted(x: Tensor) -> Tensor:
    """x, one element behind a multiple of 16 bytes."""
    return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)


def slopes() -> Tensor:
    return torch.full((8,), 0.5)


OTHER: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "more entries": lambda a: {n: torch.cat((x, x)) if isinstance(x, Tensor) else x for n, x in a.items()},
    "other strides of q": lambda a: {"q": wider(a["q"])},
    "other strides of a cache": lambda a: {"v_cache": wider(a["v_cache"])},
    "other alignment of q": lambda a: {"q": shifted(a["q"])},
    "other alignment of a cache": lambda a: {"k_cache": shifted(a["k_cache"])},
    "other alignment of lengths": lambda a: {"cache_seqlens": shifted(a["cache_seqlens"])},
    "lengths of 64 bits": lambda a: {"cache_seqlens": a["cache_seqlens"].long()},
    "lengths as a number": lambda a: {"cache_seqlens": 20},
    "no lengths": lambda a: {"cache_seqlens": None},
    "one dtype for another": lambda a: {n: x.half() if isinstance(x, Tensor) and x.dtype is torch.bfloat16 else x for n, x in a.items()},
    "caches of 8 bits": lambda a: {n: a[n].to(torch.float8_e4m3fn) for n in ("k_cache", "v_cache")},
    "a sign outside of memory": lambda a: {"q": torch._neg_view(a["q"])},
    "one tensor twice": lambda a: {"v_cache": a["k_cache"]},
    "values in keys": lambda a: {"v_cache": a["k_cache"].view(a["k_cache"].shape)},
    "not causal": lambda a: {"causal": False},
    "a flag of another type": lambda a: {"causal": 1},
    "a window": lambda a: {"window_size": (20, 0)},
    "a window of other numbers' types": lambda a: {"window_size": (-1.0, -1)},
    "a cap": lambda a: {"softcap": 20.0},
    "another scale": lambda a: {"softmax_scale": 0.25},
    "no scale": lambda a: {"softmax_scale": None},
    "a scale that is no number": lambda a: {"softmax_scale": float("nan")},
    "other splits": lambda a: {"num_splits": 3},
    "heads apart": lambda a: {"pack_gqa": False},
    "no lse": lambda a: {"return_lse": False},
    "a sink": lambda a: {"sink": slopes()},
    "slopes": lambda a: {"alibi_slopes": slopes()},
    "a score": lambda a: {"score_mod": lambda s, b, h, i, j: s * 2},
    "a mask": lambda a: {"mask_mod": lambda b, h, i, j: j < 7},
    "any backend": lambda a: {"backend": None},
}


@pytest.mark.parametrize("name", OTHER)
def test_a_changed_argument_is_noticed(name: str, served: Served) -> None:
    arguments = served.warm("decode")
    changed, tried = arguments | OTHER[name](arguments), len(served.noted)
    try:
        served.check_other(changed)
    except (TypeError, ValueError) as error:  # a refused call is refused, and by the same words as a first call
        assert not any(served.noted[tried:])
        attention.clear()
        with pytest.raises(type(error)) as first:
            served.call(changed)
        assert str(first.value) == str(error)


OTHER_BATCHES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "fewer rows": lambda a: {n: a[n][:599] for n in "qkv"},
    "lengths of q and k": lambda a: {"cu_seqlens_k": a["cu_seqlens_k"].clone()},
    "a greatest length": lambda a: {"max_seqlen_q": 499},
    "no greatest length": lambda a: {"max_seqlen_k": None},
    "used rows": lambda a: {"seqused_k": torch.tensor([3, 4], dtype=torch.int32)},
    "keys are values": lambda a: {"v": a["k"]},
    "values in keys": lambda a: {"v": a["k"].view(a["k"].shape)},
    "tables that are read": lambda a: {"validate": True},
    "not causal": lambda a: {"causal": True},
    "deterministic": lambda a: {"deterministic": True},
}


def test_values_apart_from_keys_are_noticed(served: Served) -> None:
    """A kernel for values in keys would not load them."""
    apart = step(0, False, False)
    for seed in range(WARM):
        arguments = step(seed, False, False)
        was_served, _ = served.call(arguments | {"v_cache": arguments["k_cache"].view(arguments["k_cache"].shape)})
    assert was_served
    served.check_other(apart)


@pytest.mark.parametrize("name", OTHER_BATCHES)
def test_a_changed_argument_of_a_batch_is_noticed(name: str, served: Served) -> None:
    arguments = served.warm("varlen")
    served.check_other(arguments | OTHER_BATCHES[name](arguments))


class Subclass(Tensor):
    pass


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("number", [0, 1, 3])
def test_tensors_of_other_kinds_are_noticed(number: int, served: Served) -> None:
    arguments = served.warm("appends")
    name = [n for n, x in arguments.items() if isinstance(x, Tensor)][number]
    x = arguments[name]
    others = (x.as_subclass(Subclass), x.to("meta"), x.float().to_sparse(), torch.nested.nested_tensor([x[0], x[0]]), x.tolist(), None)
    for other in others:
        tried = len(served.noted)
        with contextlib.suppress(Exception):  # most are refused
            served.call(arguments | {name: other})
        assert not any(served.noted[tried:]), type(other)


def test_gradients_are_refused_where_autograd_records(served: Served) -> None:
    arguments, tried = served.warm("decode"), len(served.noted)
    for name in ("q", "k_cache"):
        wanting = arguments | {name: arguments[name].clone().requires_grad_()}
        with pytest.raises(ValueError, match=f"{name}.* requires grad"):
            served.call(wanting)
        with torch.no_grad():
            served.call(wanting)
        assert not any(served.noted[tried:])


def test_gradients_of_a_batch_are_recorded(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = served.warm("varlen")
    planned: list[bool] = []
    own = anyattn.autograd.compute
    monkeypatch.setattr(anyattn.autograd, "compute", lambda problem, *more: (planned.append(problem.needs_grad), own(problem, *more))[1])
    for name in "qkv":
        with contextlib.suppress(Exception):
            served.call(arguments | {name: arguments[name].clone().requires_grad_()})
        assert not served.noted[-1] and planned[-1], name


class Function(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Dispatch(InsideMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


STATES: dict[str, Callable[[], Any]] = {
    "no grad": torch.no_grad,
    "inference": torch.inference_mode,
    "a function mode": Function,
    "a dispatch mode": Dispatch,
    "a profiler": lambda: torch.autograd.profiler.profile(),
    "a log of launches": launch_log.noting,
    "a default dtype": default_dtype,
}


@pytest.mark.parametrize("base", ["decode", "varlen"])
@pytest.mark.parametrize("name", STATES)
def test_the_state_of_the_thread_is_noticed(name: str, base: str, served: Served) -> None:
    arguments = served.warm(base)
    tried = len(served.noted)
    with STATES[name]():
        served.call(arguments)
    assert not any(served.noted[tried:])
    assert served.call(arguments)[0]


@pytest.mark.parametrize("base", ["decode", "varlen"])
def test_an_open_context_of_batch_invariance_is_noticed(base: str, served: Served) -> None:
    """Which these calls cannot have: a served one would not say so."""
    arguments = served.warm(base)
    tried = len(served.noted)
    with anyattn.batch_invariant(), pytest.raises(ValueError, match='deterministic="batch" is given beside num_splits=2'):
        served.call(arguments)
    assert not any(served.noted[tried:])
    assert served.call(arguments)[0]


def test_transforms_are_noticed(served: Served) -> None:
    arguments = served.warm("decode")
    tried = len(served.noted)
    with contextlib.suppress(Exception):
        torch.func.vmap(lambda q: served.call(arguments | {"q": q})[1] and q)(arguments["q"][None])
    assert not any(served.noted[tried:])


def test_memory_that_a_step_writes_is_its_own(served: Served) -> None:
    """Also where keys and values alternate in one pool, whose distances are looked at once."""
    arguments = served.warm("appends")
    for name, cache in (("q", "k_cache"), ("k", "v_cache")):
        inside = arguments[cache].view(-1)[: arguments[name].numel()].view(arguments[name].shape)
        with pytest.raises(ValueError, match=f"{cache} and {name} share memory"):
            served.call(arguments | {name: inside})
    with pytest.raises(ValueError, match="k_cache and v_cache share memory"):
        served.call(arguments | {"v_cache": arguments["k_cache"].view(arguments["k_cache"].shape)})
    assert served.call(arguments)[0]


def test_alternating_memory_is_checked_once_for_a_distance(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    pools = [torch.zeros(3, 2, 256, 2, 64, dtype=torch.bfloat16) for _ in range(4)]
    base = step(0, False, True)
    give = lambda pool: base | {"k_cache": pool[:, 0], "v_cache": pool[:, 1]}
    for i in range(WARM):
        served.call(give(pools[i % 4]))
    checked: list[Any] = []
    own = latest.Written.check
    monkeypatch.setattr(latest.Written, "check", lambda self, a, check: own(self, a, lambda: (checked.append(1), check())))
    for pool in pools:
        assert served.call(give(pool))[0]
    assert not checked
    moved = torch.zeros(3, 2, 256, 2, 64, dtype=torch.bfloat16)
    assert served.call(base | {"k_cache": moved[:, 1], "v_cache": moved[:, 0]})[0] and len(checked) == 1
    pool = pools[0]
    with pytest.raises(ValueError, match="share memory"):
        served.call(base | {"k_cache": pool[:, 0], "v_cache": pool[:, 0]})


def test_scales_that_a_step_writes_are_its_own(served: Served) -> None:
    base = step(0, False, True)
    base |= {n: torch.zeros(base[n].shape, dtype=torch.int8) for n in ("k_cache", "v_cache")}
    scales = [torch.ones(3, 256, 2) for _ in range(2)]
    given = base | dict(zip(("k_descale", "v_descale"), scales, strict=True))
    for _ in range(WARM):
        served.call(given)
    assert served.call(given)[0]
    with pytest.raises(ValueError, match="k_descale and v_descale share memory"):
        served.call(given | {"v_descale": scales[0].view(3, 256, 2)})
    bytes_of_keys = base["k_cache"].view(-1)[: scales[0].numel() * 4].view(torch.float32).view(3, 256, 2)
    with pytest.raises(ValueError, match="k_cache share memory"):
        served.call(given | {"v_descale": bytes_of_keys})


def test_two_kinds_of_layers_are_both_served(served: Served) -> None:
    kinds: list[dict[str, Any]] = [{}, {"window_size": (30, 0)}]
    for seed in range(2 * WARM):
        served.call(BASES["decode"](seed) | kinds[seed % 2])
    for seed in range(4):
        assert served.call(BASES["decode"](seed) | kinds[seed % 2])[0]


def test_no_tensor_outlives_its_call(served: Served) -> None:
    import gc
    import weakref

    arguments = served.warm("appends")
    assert served.call(arguments)[0]
    kept = [weakref.ref(x) for x in arguments.values() if isinstance(x, Tensor)]
    del arguments
    gc.collect()
    assert not any(ref() is not None for ref in kept)


_CALL = "call_cache.latest:LatestCall"
BUGS = {  # what each test below notices
    "alignments": Mutant("", f"{_CALL}.results", "[x & 15 for x in addresses] != self._alignments", "False", "other alignment of q"),
    "strides": Mutant("", f"{_CALL}.results", "self._are_alike(*unique)", "True", "other strides of a cache"),
    "numbers": Mutant("", f"{_CALL}.results", "_are_equal(x, other)", "True", "another scale"),
    "types": Mutant("", "call_cache.latest:_are_equal", "type(x) is not type(y)", "False", "a flag of another type"),
    "modes": Mutant("", f"{_CALL}.results", "self._mode != _mode()", "False", "state"),
    "addresses": Mutant("", f"{_CALL}.results", "len({*addresses}) != self._distinct", "False", "values in keys"),
    "objects": Mutant("", f"{_CALL}.results", "arguments[i] is not arguments[j]", "False", "objects"),
    "memory": Mutant("", "call_cache.latest:Written.check", "addresses[j] < addresses[i] + of_i", "False", "memory"),
    "distances": Mutant("", "call_cache.latest:Written.check", "addresses[j] - addresses[i]", "0", "distances"),
    "out's alignment": Mutant("", f"{_CALL}._takes", "start & 15", "False", "out's alignment"),
    "out's memory": Mutant("", f"{_CALL}._takes", "x + reach <= start", "True", "out's memory"),
    "out's strides": Mutant("", "call_cache.latest:_Out.is_like", "any(__)", "False", "out's strides"),
}


def planted(bug: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the module's functions and methods the bug."""
    source = Path(str(latest.__file__)).read_text()
    tree = bug.edited(ast.parse(source))
    scope = dict(vars(latest))
    exec(compile(tree, "<mutant>", "exec"), scope)
    for name in ("LatestCall", "Written", "_Out"):
        for method, function in vars(scope[name]).items():
            if callable(function) and not method.startswith("__"):
                monkeypatch.setattr(getattr(latest, name), method, function)


def noticed(killer: str, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A check that fails under the bug of this name."""
    if killer in OTHER:
        arguments = served.warm("decode")
        with contextlib.suppress(TypeError):
            assert not served.call(arguments | OTHER[killer](arguments))[0]
    elif killer == "objects":
        arguments, tried = served.warm("varlen"), len(served.noted)
        with contextlib.suppress(TypeError):  # another tensor at the same address
            served.call(arguments | {"cu_seqlens_k": arguments["cu_seqlens_q"].view(torch.float32)})
        assert not served.noted[tried]
    elif killer == "state":
        arguments = served.warm("decode")
        with default_dtype():
            assert not served.call(arguments)[0]
    elif killer == "memory":
        arguments = served.warm("appends")
        with pytest.raises(ValueError, match="share memory"):
            served.call(arguments | {"q": arguments["k_cache"].view(-1)[64:][: arguments["q"].numel()].view(arguments["q"].shape)})
    elif killer == "distances":
        pool, base = torch.zeros(3, 2, 256, 2, 64, dtype=torch.bfloat16), step(0, False, True)
        for _ in range(WARM):
            served.call(base | {"k_cache": pool[:, 0], "v_cache": pool[:, 1]})
        with pytest.raises(ValueError, match="share memory"):
            served.call(base | {"k_cache": pool[:, 0], "v_cache": pool[:, 0].as_strided(pool[:, 0].shape, pool[:, 0].stride(), 64)})
    else:
        arguments = served.warm("decode")
        q = arguments["q"]
        out = {"out's alignment": shifted(q), "out's strides": wider(q), "out's memory": q.view(q.shape)}[killer]
        taken: list[bool] = []
        own = latest.LatestCall._takes
        monkeypatch.setattr(latest.LatestCall, "_takes", lambda *given: (taken.append(own(*given)), taken[-1])[1])
        with contextlib.suppress(ValueError):
            served.call(arguments, out=out)
        assert taken == [False]


@pytest.mark.parametrize("name", BUGS)
def test_bugs_are_noticed(name: str, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        noticed(BUGS[name].killer, served, patched)
    attention.clear()
    with monkeypatch.context() as patched, pytest.raises((AssertionError, pytest.fail.Exception)):
        planted(BUGS[name], patched)
        own = latest.LatestCall.results
        patched.setattr(latest.LatestCall, "results", lambda *given: note_served(served, own, *given))
        noticed(BUGS[name].killer, served, patched)
