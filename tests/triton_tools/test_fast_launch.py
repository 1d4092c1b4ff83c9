"""Known kernels go past Triton's launcher only where Triton passes on what we do; else it is asked the ordinary way."""

from __future__ import annotations

from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from anyattn.triton_tools import fast_launch

STREAM, DEVICE = 77, torch.device("cuda", 0)

known_launcher = pytest.mark.skipif(
    tuple(map(int, version("triton").split(".")[:2])) >= (3, 8),
    reason="this Triton's launcher takes a kernel's arguments as one tuple, and makes every launch",
)


@pytest.fixture
def triton_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Triton's own classes with a driver that there is not; what would reach the GPU is noted."""
    from triton import knobs
    from triton.backends.nvidia import driver
    from triton.compiler import compiler

    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: STREAM)
    monkeypatch.setattr(compiler, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)
    return SimpleNamespace(driver=driver, compiler=compiler, knobs=knobs, monkeypatch=monkeypatch)


def compiled(gpu: Any, sent: list, signature: dict[str, str] | None = None, described: list | None = None, *, ways: int = 0) -> Any:
    """A compiled kernel as Triton makes it, but for what is compiled."""
    launcher = object.__new__(gpu.driver.CudaLauncher)
    wrapped = gpu.driver.wrap_handle_tensordesc(lambda *passed: sent.append(passed), signature or {}, described)
    sizes = dict.fromkeys(("global_scratch_align", "profile_scratch_size", "profile_scratch_align"), 0)
    vars(launcher).update(launch=wrapped, num_ctas=1, global_scratch_size=ways, launch_cooperative_grid=False, launch_pdl=False, **sizes)
    found = object.__new__(gpu.compiler.CompiledKernel)
    vars(found).update(module=1, function=5, packed_metadata=(4, 1, 0), _run=launcher, name="x", src=None)
    return found


@known_launcher
def test_the_same_arguments_arrive(triton_of_a_gpu: Any) -> None:
    sent: list = []
    kernel = compiled(triton_of_a_gpu, sent)
    given = (torch.zeros(3), 4, 0.5)
    handle = fast_launch.handle_of(kernel, (16, "ieee"), DEVICE, (7, 2, 1), given, False)
    assert handle.takes_addresses and handle.spread is None and not sent
    kernel[(7, 2, 1)](*given, 16, "ieee")
    handle.send((7, 2, 1), given)
    ordinary, ours = sent
    assert fast_launch._inner(kernel._run) == (kernel._run.launch, ordinary[5:9]) and ordinary[5:9] == (False, False, None, None)
    # nobody watches, and nobody is told
    assert ours == (*ordinary[:10], None, None, None, *ordinary[13:]) and ours[:5] == (7, 2, 1, STREAM, 5)
    assert ordinary[13:] == (*given, 16, "ieee")


@known_launcher
def test_who_watches_launches_sees_them(triton_of_a_gpu: Any) -> None:
    sent: list = []
    runtime = triton_of_a_gpu.knobs.runtime
    handle = fast_launch.handle_of(compiled(triton_of_a_gpu, sent), (), DEVICE, (1, 1, 1), (3,), False)
    watch = lambda about: None
    runtime.launch_enter_hook.add(watch)
    try:
        handle.send((1, 1, 1), (3,))
    finally:
        runtime.launch_enter_hook.remove(watch)
    assert sent[0][11] is runtime.launch_enter_hook and sent[0][10].get()["name"] == "x"


DESCRIPTOR = {"swizzle": 3, "elem_size": 2, "elem_type": 1, "block_size": [1, 1, 64, 64], "fp4_padded": False}


class Encoded:
    """As ``PyCUtensorMap``, which compares with nothing."""


@pytest.fixture
def encoder(triton_of_a_gpu: Any) -> list:
    """The addresses that were encoded."""
    import triton

    made: list = []
    encode = lambda address, *facts: (made.append(address), Encoded())[1]
    active = SimpleNamespace(utils=SimpleNamespace(fill_tma_descriptor=encode))
    triton_of_a_gpu.monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=active))
    return made


def described(x: torch.Tensor) -> Any:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, 64, 64])


@known_launcher
def test_descriptors_are_encoded_outside(triton_of_a_gpu: Any, encoder: list) -> None:
    sent: list = []
    signature = {"a": "*bf16", "b": "tensordesc<bf16[1,1,64,64]>", "c": "i32", "d": "tensordesc<bf16[1,1,64,64]>"}
    kernel = compiled(triton_of_a_gpu, sent, signature, [DESCRIPTOR, DESCRIPTOR])
    x, y = torch.zeros(2, 2, 64, 64, dtype=torch.bfloat16), torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16)
    given = (x, described(x), 9, described(y))
    handle = fast_launch.handle_of(kernel, ("constant",), DEVICE, (1, 1, 1), given, False)
    assert handle.takes_addresses and handle.spread is not None and not sent
    kernel[(1, 1, 1)](*given, "constant")
    handle.again((1, 1, 1), given)
    spread = handle.spread(given[1], 0)
    assert isinstance(spread[0], Encoded) and spread[1:] == [2, 2, 64, 64, *x.stride()] and encoder[-1] == x.data_ptr()
    handle.send((1, 1, 1), (x, *spread, 9, *handle.spread(given[3], 1)))
    kinds = [[type(a) if isinstance(a, Encoded) else a for a in passed[13:]] for passed in sent]
    assert kinds[0] == kinds[1] == kinds[2] and kinds[0].count(Encoded) == 2


def _another_order(gpu: Any) -> None:
    def own(self: Any, grid: Any) -> Any:
        return lambda *given: self.run(*grid, self.function, STREAM, self.packed_metadata, None, None, None, *given)

    gpu.monkeypatch.setattr(gpu.compiler.CompiledKernel, "__getitem__", own)


def _another_name(gpu: Any) -> None:
    gpu.monkeypatch.setattr(gpu.compiler.CompiledKernel, "__getitem__", lambda self, grid: lambda *given: self.start(*grid, *given))


def _one_more(gpu: Any) -> None:
    own = gpu.compiler.CompiledKernel.__getitem__
    gpu.monkeypatch.setattr(gpu.compiler.CompiledKernel, "__getitem__", lambda self, grid: lambda *given: own(self, grid)(*given, None))


def _no_property(gpu: Any) -> None:
    gpu.monkeypatch.setattr(gpu.compiler.CompiledKernel, "run", property(lambda self: lambda *a: None))


@pytest.mark.parametrize("change", (_another_order, _another_name, _one_more, _no_property))
def test_other_internals_are_asked_the_ordinary_way(triton_of_a_gpu: Any, change: Any) -> None:
    """Planted versions of Triton that pass on something else, or by another name."""
    change(triton_of_a_gpu)
    sent: list = []
    kernel = compiled(triton_of_a_gpu, sent)
    asked: list = []
    handle = fast_launch.handle_of(kernel, (16,), DEVICE, (1, 2, 3), (4, 5), False)
    triton_of_a_gpu.monkeypatch.setattr(type(kernel), "__getitem__", lambda self, grid: lambda *given: asked.append((grid, given)))
    handle.send((1, 2, 3), (4, 5))
    assert asked == [((1, 2, 3), (4, 5, 16))] and not handle.takes_addresses and not sent


def _other_cell(gpu: Any) -> None:
    own = gpu.driver.wrap_handle_tensordesc
    gpu.monkeypatch.setattr(gpu.driver, "wrap_handle_tensordesc", lambda *a: (lambda inner: lambda *passed: inner(*passed))(own(*a)))


def _other_encoding(gpu: Any) -> None:
    own = gpu.driver.make_tensordesc_arg
    numbers = iter(range(1000))
    gpu.monkeypatch.setattr(gpu.driver, "make_tensordesc_arg", lambda *a: [*own(*a), next(numbers)])


@known_launcher
@pytest.mark.parametrize("change", (_other_cell, _other_encoding))
def test_other_descriptors_are_asked_the_ordinary_way(triton_of_a_gpu: Any, encoder: list, change: Any) -> None:
    change(triton_of_a_gpu)
    sent: list = []
    kernel = compiled(triton_of_a_gpu, sent, {"b": "tensordesc<bf16[1,1,64,64]>"}, [DESCRIPTOR])
    given = (described(torch.zeros(2, 2, 64, 64, dtype=torch.bfloat16)),)
    handle = fast_launch.handle_of(kernel, (), DEVICE, (1, 1, 1), given, False)
    assert not handle.takes_addresses and handle.spread is None and not sent
    handle.again((1, 1, 1), given)
    assert len(sent) == 1


@pytest.mark.parametrize(
    "call",
    (
        lambda self, *given: self.launch(*given[1:], given[0]),
        lambda self, *given: self.launch(*given[:5], torch.zeros(1), *given[5:]),
        lambda self, *given: self.launch(*given[:5], False, False, *given[5:9], None, None, b"", [], given[9:]),  # Triton 3.8's
        lambda self, *given: self.start(*given),
        lambda self, *given: None,
    ),
    ids=("order", "memory", "tuple", "name", "nothing"),
)
def test_another_launcher_is_called_whole(triton_of_a_gpu: Any, monkeypatch: pytest.MonkeyPatch, call: Any) -> None:
    monkeypatch.setattr(triton_of_a_gpu.driver.CudaLauncher, "__call__", call)
    launcher = compiled(triton_of_a_gpu, [])._run
    assert fast_launch._inner(launcher) == (launcher, ())


@known_launcher
def test_memory_asked_for_at_a_launch(triton_of_a_gpu: Any) -> None:
    """A kernel that asks for memory finds who gives it, and is asked the ordinary way."""
    sent: list = []
    kernel = compiled(triton_of_a_gpu, sent, ways=64)
    handle = fast_launch.handle_of(kernel, (), torch.device("cpu"), (2, 1, 1), (3,), True)
    handle.send((2, 1, 1), (3,))
    assert not handle.takes_addresses and sent[0][7].shape == (128,) and sent[0][7].dtype is torch.int8


@known_launcher
def test_launched_on_the_tensors_own_device(triton_of_a_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list = []
    handle = fast_launch.handle_of(compiled(triton_of_a_gpu, sent), (), DEVICE, (1, 1, 1), (3,), False)
    current = [1]

    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            current.append(self.index)

        def __exit__(self, *error: Any) -> None:
            current.pop()

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[-1], raising=False)
    monkeypatch.setattr(torch.cuda, "device", Device)
    handle.send((1, 1, 1), (3,))
    assert current == [1] and len(sent) == 1
