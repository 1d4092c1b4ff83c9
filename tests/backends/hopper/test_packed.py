"""Launches through tvm-ffi's C interface: functions get what tvm-ffi itself would pass them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn.backends.hopper.compile import launch, packed
from anyattn.call_cache import attention
from anyattn.validate import sequences
from tests.backends.hopper.test_varlen_replays import RECIPES, batch
from tests.support.hopper.pretended import COUNTER, Launch, count_in_one_tensor
from tests.support.replayed import replayed_and_first

tvm_ffi = pytest.importorskip("tvm_ffi")


def seen(x: Any) -> Any:
    """An argument as a function of tvm-ffi sees it."""
    if isinstance(x, tvm_ffi.Tensor):
        device = (x.device.dlpack_device_type(), x.device.index)
        return x.data_ptr(), tuple(x.shape), tuple(x.strides), str(x.dtype), device
    return [seen(item) for item in x] if isinstance(x, tvm_ffi.Array) else (type(x), x)


def noting(found: list[list[Any]]) -> Any:
    return tvm_ffi.convert(lambda *given: found.append([*map(seen, given)]))


DTYPES = (
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.float16, torch.float32, torch.float64, torch.bfloat16,
)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arguments_arrive_as_by_tvm_ffi(dtype: torch.dtype) -> None:
    found: list[list[Any]] = []
    function = noting(found)
    tensors = [torch.zeros(3, 4, 5, 8).to(dtype).transpose(1, 2), torch.zeros(7, dtype=dtype), torch.zeros(2, 0, dtype=dtype)]
    x, y, z = tensors
    arguments = (x, y, None, z, 1.5, -(2**31), 7, (3, -4, 2.5), (), float("-inf"))
    made = packed.packed_launch(function, arguments)
    assert made is not None
    made.launch((), [t.data_ptr() for t in tensors])
    function(*arguments)
    other = [torch.empty_like(t) for t in tensors]
    made.launch((), [t.data_ptr() for t in other])
    ours, ordinary, moved = found
    assert ours == ordinary
    assert [a[0] for a in moved if len(a) == 5] == [t.data_ptr() for t in other]
    assert [a[1:] for a in moved if len(a) == 5] == [a[1:] for a in ours if len(a) == 5]


@pytest.mark.parametrize(
    "arguments", [(torch.zeros(2, dtype=torch.bool),), (torch.zeros(2, device="meta"),), ((torch.zeros(2),),), ("a",), (True,)], ids=str
)
def test_other_arguments_are_passed_by_tvm_ffi(arguments: tuple) -> None:
    assert packed.packed_launch(noting([]), arguments) is None


def test_other_functions_are_called_as_they_are() -> None:
    assert packed.packed_launch(lambda *given: None, (torch.zeros(2),)) is None


def test_a_library_of_another_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    packed._is_as_known.cache_clear()
    try:
        with monkeypatch.context() as patched:
            patched.setattr(packed, "_WORDS", 6)
            patched.setattr(packed, "_INT", 3)  # numbers would arrive as others
            assert not packed._is_as_known()
        packed._is_as_known.cache_clear()
        with monkeypatch.context() as patched:
            patched.setattr(tvm_ffi, "__version__", "0.2.0")
            assert packed.packed_launch(noting([]), (torch.zeros(2),)) is None
    finally:
        packed._is_as_known.cache_clear()


@pytest.mark.parametrize(("raised", "wanted"), [(ValueError, ValueError), (TypeError, TypeError), (KeyboardInterrupt, RuntimeError)])
def test_errors_of_a_launch(raised: Any, wanted: Any) -> None:
    def refuse(x: Any) -> None:
        raise raised(f"not for {x.shape[0]} rows")

    made = packed.PackedLaunch(tvm_ffi.convert(refuse), (torch.zeros(3, 2),))
    for _ in range(2):
        with pytest.raises(wanted, match="not for 3 rows"):
            made.launch((), [torch.zeros(3, 2).data_ptr()])


def test_the_stream_is_torchs_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set for the launch only, and on the tensors' device."""
    library, current = packed._library(), [0]
    noted: list[Any] = []
    made = packed.PackedLaunch(tvm_ffi.convert(lambda x: noted.append(library.get_stream(2, 1))), (torch.zeros(3),))
    made._device = torch.device("cuda", 1)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: current[index - 1], raising=False)
    for stream in (0, 4096, 8192, 0):
        current[0] = stream
        made.launch((), [64])
        assert (noted[-1] or 0) == stream and not library.get_stream(2, 1) and not library.get_stream(2, 0)
    failing = packed.PackedLaunch(tvm_ffi.convert(lambda x: [][1]), (torch.zeros(3),))
    failing._device, current[0] = made._device, 4096
    with pytest.raises(IndexError):
        failing.launch((), [64])
    assert not library.get_stream(2, 1)


def test_threads_do_not_mix_their_addresses() -> None:
    found: list[Any] = []
    made = packed.PackedLaunch(tvm_ffi.convert(lambda x, y: found.append((x.data_ptr(), y.data_ptr()))), (torch.zeros(2), torch.zeros(3)))

    def work(address: int) -> None:
        for _ in range(300):
            made.launch((), [address, address])

    threads = [threading.Thread(target=work, args=(64 * i,)) for i in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 900 and all(a == b for a, b in found)


@pytest.mark.parametrize("name", RECIPES)
def test_replays_pass_what_first_calls_pass(name: str, launched: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the library's function, by addresses; tables that only kernels read are no tensors of their own."""
    found: list[list[Any]] = []
    monkeypatch.setattr(sequences, "skips_device_reads", lambda device, validate: validate is not True)
    monkeypatch.setattr(launch, "_found_or_made", lambda config, kinds: noting(found))
    count_in_one_tensor(monkeypatch)

    def call(seed: int) -> list[Any]:
        arguments, before = batch(seed, **RECIPES[name](seed)), len(found)
        results = anyattn.flash_attn_varlen_func(**arguments)
        results = (results,) if isinstance(results, Tensor) else results
        names: dict[int, Any] = {t.data_ptr(): n for n, t in arguments.items() if isinstance(t, Tensor)}
        names |= {t.data_ptr(): f"result {i}" for i, t in enumerate(results)} | {COUNTER.data_ptr(): "counter"}
        return [[(names.setdefault(a[0], len(names)), *a[1:]) if len(a) == 5 else a for a in given] for given in found[before:]]

    launch.forget()
    attention.clear()
    warm, first = replayed_and_first(call, [0, 1] * 6, 1, monkeypatch)
    assert warm == first and len(warm) == 2
    launch.forget()
    attention.clear()


def test_a_replay_of_hopper_allocates_results_and_one_workspace(launched: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    from anyattn.triton_tools import replay

    made: list[replay.Replay] = []
    own: Callable[..., Any] = replay.replay_of
    monkeypatch.setattr("anyattn.triton_tools.recording.replay_of", lambda *given: (made.append(own(*given)), made[-1])[1])
    monkeypatch.setattr(sequences, "skips_device_reads", lambda device, validate: validate is not True)
    monkeypatch.setattr(launch, "_found_or_made", lambda config, kinds: noting([]))
    count_in_one_tensor(monkeypatch)
    launch.forget()
    attention.clear()
    for _ in range(8):
        anyattn.flash_attn_varlen_func(**batch(0, causal=True))
    assert made and len(made[-1].kept) == 1 and made[-1].workspace and not made[-1].views and not made[-1].constants
    launch.forget()
    attention.clear()
