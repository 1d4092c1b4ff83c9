"""Fast launches of compiled Triton kernels, without Triton's own launcher, which inspects every argument on each call.

Arguments of known kinds go directly to the compiled kernel, tensors as addresses. The launcher ABI is private to Triton: the first launch
of each kernel records what Triton passes; if it differs from ours, Triton's launcher is used, for this launch and all later ones.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CellType, FunctionType
from typing import Any, NamedTuple

import torch

from anyattn.triton_tools.packed_params import Pack, packing_of

__all__ = ["Handle", "handle_of", "scratch"]


class Handle(NamedTuple):
    """A launched kernel, for more launches with arguments of the same kinds.

    send: launches; takes a grid of three numbers and all arguments except the constants. takes_addresses: pointers may be passed as
    numbers.
    spread: returns the arguments that replace a tensor descriptor, given the descriptor and its number in the launch; None if descriptors
    are passed unchanged. pack: prepares launches that differ in some arguments only, None if they cannot be.
    """

    send: Callable[[tuple[int, ...], Sequence[Any]], None]
    takes_addresses: bool = False
    spread: Callable[[Any, int], list[Any]] | None = None
    pack: Pack | None = None

    def again(self, grid: tuple[int, ...], given: Sequence[Any]) -> None:
        """Launches the kernel with arguments in the form that Triton takes."""
        self.send(grid, given if self.spread is None else _without_descriptors(given, self.spread))


def handle_of(
    compiled: Any, constants: tuple, device: torch.device, grid: tuple[int, ...], given: Sequence[Any], is_scratched: bool
) -> Handle:
    """The handle of a compiled kernel that was launched with ``given``. is_scratched: its launches need ``scratch`` memory."""

    def plainly(grid: tuple[int, ...], given: Sequence[Any]) -> None:
        if is_scratched:
            with scratch(device):
                compiled[grid](*given, *constants)
        else:
            compiled[grid](*given, *constants)

    if is_scratched or not _asks_as_known(compiled, grid, (*given, *constants), device):
        return Handle(plainly)
    if not any(_is_descriptor(x) for x in given):
        send = _direct(compiled, compiled.run, constants, device, plainly)
        return Handle(send, True, pack=packing_of(compiled, device, send, _watching()))
    found = _undescribed(compiled.run, (*given, *constants))
    if found is None:
        return Handle(plainly)
    run, spread = found
    return Handle(_direct(compiled, run, constants, device, None), True, spread)


@contextmanager
def scratch(device: torch.device) -> Iterator[None]:
    """Context that gives Triton scratch memory at a launch, to which kernels write the tensor descriptors that they create."""
    from triton.runtime._allocation import _allocator

    before = _allocator.set(lambda size, alignment, stream: torch.empty(size, dtype=torch.int8, device=device))
    try:
        yield
    finally:
        _allocator.reset(before)


def _direct(compiled: Any, run: Any, constants: tuple, device: torch.device, hooked: Callable[..., None] | None) -> Callable[..., None]:
    """A function that launches without Triton's launcher. hooked: used instead where launch hooks
    are set; if None, the hooks are called here."""
    from triton import knobs

    function, metadata, index = compiled.function, compiled.packed_metadata, device.index
    run, between = _inner(run)
    current, stream_of = torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream

    def send(grid: tuple[int, ...], given: Sequence[Any]) -> None:
        if current() != index:
            with torch.cuda.device(index):
                send(grid, given)
            return
        runtime, stream = knobs.runtime, stream_of(index)
        enter, leave, about = runtime.launch_enter_hook, runtime.launch_exit_hook, None
        if getattr(enter, "calls", enter) or getattr(leave, "calls", leave):
            if hooked is not None:
                hooked(grid, given)
                return
            about = compiled.launch_metadata(grid, stream)
        else:
            enter = leave = None
        run(*grid, stream, function, *between, metadata, about, enter, leave, *given, *constants)

    return send


def _watching() -> Callable[[], bool]:
    """A function that returns whether hooks are told of launches."""
    from triton import knobs

    def are_watched() -> bool:
        runtime = knobs.runtime
        enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))

    return are_watched


# ---- comparison with the arguments that Triton passes


def _asks_as_known(compiled: Any, grid: tuple[int, ...], arguments: tuple, device: torch.device) -> bool:
    """Whether Triton calls a compiled kernel as ``_direct`` does. Nothing is launched: a recorder replaces the kernel's run function."""
    noted: list[tuple] = []
    try:
        from triton import knobs

        probe = copy.copy(compiled)
        probe._run = note = lambda *passed: noted.append(passed)
        probe.function = nothing = object()
        if probe.run is not note:
            return False
        probe[grid](*arguments)
        (passed,) = noted
        known = (*grid, torch._C._cuda_getCurrentRawStream(device.index), nothing, compiled.packed_metadata)
        rest = (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook, *arguments)
        return passed[:6] == known and len(passed) == 7 + len(rest) and all(a is b for a, b in zip(passed[7:], rest, strict=True))
    except (AttributeError, TypeError, ValueError):
        return False


def _inner(run: Any) -> tuple[Any, tuple]:
    """The function that ``run`` forwards its arguments to, and the values it inserts after the
    metadata; ``run`` itself if that is unknown."""
    noted: list[tuple] = []
    try:
        probe = copy.copy(run)
        probe.launch = lambda *passed: noted.append(passed)
        marks = [object() for _ in range(10)]  # 3 of a grid, a stream, a function, 2 of metadata, 2 hooks and an argument
        probe(*marks)
        (passed,) = noted
        between = passed[5:-5]
        is_same = len(passed) >= 10 and all(a is b for a, b in zip((*passed[:5], *passed[-5:]), marks, strict=True))
        if is_same and all(x is None or isinstance(x, int) for x in between):
            return run.launch, between
    except (AttributeError, RuntimeError, TypeError, ValueError):
        pass
    return run, ()


def _is_descriptor(x: Any) -> bool:
    return hasattr(x, "block_shape")


def _is_alike(a: Any, b: Any) -> bool:
    """Whether two arguments are equal; two encoded descriptors, which have no equality, count as equal."""
    return a is b or (type(a) is type(b) and (a == b or getattr(type(a), "__eq__", None) is object.__eq__))


def _without_descriptors(given: Sequence[Any], spread: Callable[[Any, int], list[Any]]) -> list[Any]:
    found: list[Any] = []
    described = 0
    for x in given:
        if _is_descriptor(x):
            found += spread(x, described)
            described += 1
        else:
            found.append(x)
    return found


def _undescribed(run: Any, arguments: tuple) -> tuple[Any, Callable[[Any, int], list[Any]]] | None:
    """The launch function of a kernel with tensor descriptors that takes encoded ones, and a function that encodes a descriptor.

    Triton's own launch function for such a kernel scans all arguments and encodes each descriptor again.
    """
    noted: list[tuple] = []
    try:
        wrapped = run.launch
        cells = dict(zip(wrapped.__code__.co_freevars, wrapped.__closure__, strict=True))
        inside, encode = cells["tensordesc_meta"].cell_contents, wrapped.__globals__["make_tensordesc_arg"]
        if any(m is None for m in inside):  # passed as an address and numbers, not as an encoded descriptor
            return None
        own = copy.copy(run)
        own.launch = cells["launcher"].cell_contents
        cells["launcher"] = CellType(lambda *passed: noted.append(passed))
        probe = copy.copy(run)
        code, names = wrapped.__code__, wrapped.__globals__
        probe.launch = FunctionType(code, names, wrapped.__name__, wrapped.__defaults__, tuple(cells[n] for n in code.co_freevars))

        def spread(descriptor: Any, number: int) -> list[Any]:
            return list(encode(descriptor, inside[number]))

        wanted = _without_descriptors(arguments, spread)
        probe(1, 1, 1, 0, None, None, None, None, None, *arguments)
        (passed,) = noted
        behind = passed[len(passed) - len(wanted) :]
        return (own, spread) if all(map(_is_alike, behind, wanted)) else None
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError):
        return None
