"""Kinds of tensors without plain memory (fake, meta, transformed, subclasses): which are refused, and which calls go through operators.

A kernel takes addresses. A fake or meta tensor has none, a tensor of a function transform (``torch.func``) hides its own, and a subclass
may redefine any operation: a call with such tensors goes through the operators of ``custom_ops``, whose fake kernels, gradients and
dispatch are torch's. Tensors that torch could not run there either are refused here. Only calls that are not in the call cache are checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

if TYPE_CHECKING:
    from anyattn.mods.tracing.trace import TracedMod

__all__ = [
    "are_fake",
    "belong_to_operators",
    "count_modes",
    "has_memory",
    "is_recorded",
    "not_scriptable",
    "outside_transforms",
    "refuse",
    "refuse_batched",
    "refuse_forward_mode",
    "refuse_hidden",
    "refuse_hidden_captures",
    "refuse_mixed",
    "refuse_torchscript",
    "transforms",
    "unwrapped",
]

count_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack  # type: ignore[attr-defined]
_functorch = torch._C._functorch  # type: ignore[attr-defined]
_PLAIN_DISPATCH = torch._C._disabled_torch_dispatch_impl  # type: ignore[attr-defined]
_DENSE = "attention wants dense memory"
_BATCHED = (
    "a tensor of torch.vmap, which attention does not support (nor jacrev, hessian and is_grads_batched, which use it): fold the mapped "
    "dimension into the batch, or call once for each entry"
)
_FORWARD_MODE = (
    "attention has no forward-mode derivative (torch.func.jvp, jacfwd, linearize, forward_ad); wanted a reverse-mode one: backward(), "
    "torch.autograd.grad, torch.func.grad, vjp"
)
_TORCHSCRIPT = (
    "anyattn is called inside torch.jit.{}, which cannot hold attention that is written in Python; wanted torch.export.export, which "
    "records it as one operator and which AOTInductor compiles for C++, or torch.compile"
)
_Function = TypeVar("_Function", bound=Callable)


def belong_to_operators(tensors: Mapping[str, Any]) -> bool:
    """Whether the call must run as its operator, judged by its named tensors and the active modes; other arguments are ignored.

    A dispatch mode (a FLOP counter, selective checkpointing) gets one operator for a call instead of what a backend is made of.

    Raises as ``refuse``, ``refuse_mixed`` and ``refuse_torchscript``.
    """
    refuse_torchscript()
    are_plain = True
    for name, t in tensors.items():
        if isinstance(t, Tensor):
            refuse(name, t)
            are_plain = are_plain and _is_plain(t)
    if not are_plain or _is_traced():
        refuse_mixed(tensors)
        return True
    active = transforms()  # a mod may capture a tensor of a transform
    return bool(active or count_modes()) and "jvp" not in active and "vmap" not in active


def refuse(name: str, t: Tensor) -> None:
    """Raises ``TypeError``, with the way out, for a tensor that neither a kernel nor an operator can take."""
    reason = _reason_against(t)
    if reason is not None:
        raise TypeError(f"{name} is {reason}")


def refuse_torchscript() -> None:
    """Raises ``NotImplementedError`` inside ``torch.jit.trace``, which would record the work of a backend, without its kernels, for the
    example's shapes and mods."""
    if torch._C._is_tracing():
        raise NotImplementedError(_TORCHSCRIPT.format("trace (or torch.onnx.export with dynamo=False)"))


def not_scriptable(fn: _Function) -> _Function:
    """``fn``, whose compilation by ``torch.jit.script`` raises ``NotImplementedError`` instead of an error about its source."""

    def refuse() -> NoReturn:
        raise NotImplementedError(_TORCHSCRIPT.format("script"))

    fn.__prepare_scriptable__ = refuse  # type: ignore[attr-defined]
    return fn


def refuse_mixed(tensors: Mapping[str, Any]) -> None:
    """Raises ``TypeError`` for fake tensors together with other tensors, or with those of another mode, unless their mode accepts both."""
    from torch._subclasses import fake_tensor

    given = {name: unwrapped(t) for name, t in tensors.items() if isinstance(t, Tensor)}
    fakes = {name: t for name, t in given.items() if isinstance(t, fake_tensor.FakeTensor)}
    mode, because = _mode("FAKE"), "a FakeTensorMode is active"
    if mode is None:
        if not fakes:
            return
        first, fake = next(iter(fakes.items()))
        mode, because = fake.fake_mode, f"{first} is a FakeTensor"
    for name, fake in fakes.items():
        if fake.fake_mode is not mode:
            raise TypeError(f"{name} is a FakeTensor of another mode, but {because}; wanted one FakeTensorMode for all tensors of a call")
    override = fake_tensor.fake_tensor_tls.allow_non_fake_inputs_override
    if mode.allow_non_fake_inputs if override is None else override:
        return
    for name, t in given.items():
        if name not in fakes and (_is_plain(t) or t.is_meta):
            kind = "meta" if t.is_meta else "real"
            raise TypeError(f"{name} is a {kind} tensor, but {because}; wanted all tensors fake (fake_mode.from_tensor({name})) or none")


def unwrapped(t: Tensor) -> Tensor:
    """The tensor that function transforms have wrapped."""
    while _functorch.is_functorch_wrapped_tensor(t):
        t = _functorch.get_unwrapped(t)
    return t


def refuse_hidden(name: str, t: Any) -> None:
    """Raises ``TypeError`` for a tensor without memory of its own, in calls that have no operator."""
    if not isinstance(t, Tensor):
        return
    refuse(name, t)
    if not _is_plain(t):
        raise TypeError(f"{name} is {_kind_of(t)}, which has no memory that a kernel could read; wanted a plain tensor")


def refuse_hidden_captures(mod: TracedMod, name: str = "") -> None:
    """``refuse_hidden`` for every tensor that a mod captures. name: of the argument, if it differs from the mod's kind."""
    for t in mod.tensors:
        refuse_hidden(f"a tensor that {name or mod.kind + '_mod'} {mod.name!r} captures", t)


def has_memory(t: Tensor) -> bool:
    """Whether ``t`` is plain memory that can be passed to a kernel."""
    return _is_plain(t) and _reason_against(t) is None and not _is_traced()


def _is_plain(t: Tensor) -> bool:
    kind = type(t)
    if kind is not Tensor and kind.__torch_dispatch__ is not _PLAIN_DISPATCH:
        return False
    return not (t.is_meta or _functorch.is_functorch_wrapped_tensor(t))


def are_fake(tensors: Sequence[Any]) -> bool:
    """Whether there are no values to read: one of the tensors is fake or meta, or a fake mode is active."""
    if _mode("FAKE") is not None:
        return True
    if not tensors:
        return False
    from torch._subclasses.fake_tensor import FakeTensor

    return any(isinstance(t, Tensor) and (isinstance(t, FakeTensor) or t.is_meta) for t in tensors)


def refuse_forward_mode() -> None:
    """Raises for forward-mode tangents; for operators, in which torch does not reveal tangents and would drop them silently."""
    if forward_ad._current_level >= 0:
        raise NotImplementedError(_FORWARD_MODE)


def transforms() -> list[str]:
    """The names of the active function transforms, outermost first."""
    if not torch._C._are_functorch_transforms_active():  # type: ignore[attr-defined]
        return []
    from torch._functorch.pyfunctorch import retrieve_all_functorch_interpreters

    return [interpreter.key().name.lower() for interpreter in retrieve_all_functorch_interpreters()]


@contextmanager
def outside_transforms() -> Iterator[None]:
    """Context without function transforms (``torch.func.grad``) and dispatch modes, for code that none of their tensors enters
    (``refuse_hidden``). Modes that record or fake calls stay."""
    without_modes = torch._C._DisableTorchDispatch if count_modes() and not _is_traced() else nullcontext  # type: ignore[attr-defined]
    with torch._C._DisableFuncTorch(), without_modes():  # type: ignore[attr-defined]
        yield


def _reason_against(t: Tensor) -> str | None:
    if t.is_nested:
        cure = "pass q.values(), k.values(), v.values() and their offsets() as cu_seqlens_q and cu_seqlens_k to flash_attn_varlen_func"
        return f"a nested tensor; {_DENSE}: {cure} (of nested tensors with layout=torch.jagged)"
    if t.layout is not torch.strided:
        return f"a tensor of layout {str(t.layout).removeprefix('torch.')}; {_DENSE}: pass .to_dense()"
    if any(c.__name__ == "DTensor" and c.__module__.startswith("torch.distributed") for c in type(t).__mro__):
        return (
            "a DTensor; attention runs on one device's part: pass .to_local(), or wrap the call in "
            "torch.distributed.tensor.experimental.local_map"
        )
    if _functorch.is_functorch_wrapped_tensor(t):
        return _reason_against_transform(t)
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(t).tangent is not None:
        return f"a dual tensor; {_FORWARD_MODE}"
    if t.is_neg():
        return f"a view whose sign is not applied yet (of a conjugated tensor); {_DENSE}: pass .resolve_neg()"
    return None


def _reason_against_transform(t: Tensor) -> str | None:
    if "jvp" in transforms():
        return f"a dual tensor; {_FORWARD_MODE}"
    while _functorch.is_functorch_wrapped_tensor(t):
        if _functorch.is_batchedtensor(t):
            return _BATCHED
        t = _functorch.get_unwrapped(t)
    return None


def refuse_batched(name: str, t: Tensor | None) -> None:
    """Raises ``TypeError`` for a tensor of the older vmap, which ``torch.autograd.grad(is_grads_batched=True)`` uses."""
    if t is not None and "Batched" in str(torch._C._dispatch_keys(t)):
        raise TypeError(f"{name} is {_BATCHED}")


def _kind_of(t: Tensor) -> str:
    if _functorch.is_functorch_wrapped_tensor(t):
        return f"a tensor of torch.func.{transforms()[-1] if transforms() else 'grad'}"
    return "a meta tensor" if t.is_meta else f"a {type(t).__name__}"


def _is_traced() -> bool:
    """Whether calls are being faked, or recorded into a graph."""
    return _mode("FAKE") is not None or _mode("PROXY") is not None or _mode("FUNCTIONAL") is not None


def is_recorded() -> bool:
    """Whether calls are being recorded into a graph."""
    return _mode("PROXY") is not None


def _mode(name: str) -> Any:
    keys = torch._C._TorchDispatchModeKey  # type: ignore[attr-defined]
    return torch._C._get_dispatch_mode(getattr(keys, name))  # type: ignore[attr-defined]
