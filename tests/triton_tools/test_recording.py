"""Recorded calls: what a replay launches, and which calls have none. Launches are noted, with addresses of CPU tensors."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from anyattn.triton_tools.recording import Recorder, active_recorder, unrecorded
from anyattn.triton_tools.replay import SCALE, Number

SENT: list[tuple[Any, ...]] = []


def send(grid: tuple[int, ...], values: Any) -> None:
    SENT.append((grid, *values))


@pytest.fixture(autouse=True)
def nothing_sent() -> None:
    SENT.clear()


def launched(*values: Any, takes_addresses: bool = True) -> None:
    recorder = active_recorder()
    assert recorder is not None
    recorder.launched(send, (1, 2, 3), values, takes_addresses)


def recorded(call: Callable[..., Any], *tensors: Tensor, numbers: int = 0) -> Any:
    """The recorder of a call, and its replay."""
    with Recorder(tensors) as recorder:
        results = call(*tensors)
    return recorder, recorder.replay(results, numbers)


def test_addresses_of_arguments_results_and_a_workspace() -> None:
    def call(q: Tensor, k: Tensor) -> tuple[Tensor | None, ...]:
        out, parts = torch.empty(4, 6), torch.empty(3, 4, 6)
        sums = torch.empty((5,), dtype=torch.float64)
        launched(q, k.view(-1), parts[0], parts[1], sums, 7, 0.5, None)
        launched(parts, out, q.detach())
        return out.t(), None

    _, replay = recorded(call, torch.zeros(3), torch.zeros(2, 2))
    q, k = torch.ones(3), torch.ones(2, 2)
    out, nothing = replay.run([q, k], 1.0)
    assert nothing is None and out.shape == (6, 4) and out.stride() == (1, 6) and out.is_contiguous() is False
    (grid, *first), (_, *second) = SENT
    parts, last, sums = first[2], first[3], first[4]
    assert grid == (1, 2, 3) and first[:2] == [q.data_ptr(), k.data_ptr()] and first[5:] == [7, 0.5, None]
    assert last - parts == 4 * 6 * 4 and sums - parts >= 3 * 4 * 6 * 4 and (sums - parts) % 256 == 0
    assert second == [parts, out.data_ptr(), q.data_ptr()]


def test_numbers_of_the_call() -> None:
    def call(q: Tensor) -> tuple[Tensor]:
        out = torch.empty_like(q)
        launched(q, out, SCALE, Number(1), 5, Number(0), 6)
        return (out,)

    _, replay = recorded(call, torch.zeros(3), numbers=2)
    (out,) = replay.run([q := torch.ones(3)], 0.25, (10, 20))
    assert [((1, 2, 3), q.data_ptr(), out.data_ptr(), 0.25, 20, 5, 10, 6)] == SENT


def test_filled_results() -> None:
    def call(q: Tensor) -> tuple[Tensor, ...]:
        out, lse, found = torch.empty(4, 2), torch.full((4,), -torch.inf), [torch.zeros(3), torch.empty(5, dtype=torch.int64)]
        out.zero_()
        found[1].fill_(7)
        found += [torch.zeros_like(q), q.new_zeros(2), q.new_full((2,), 3.0), torch.full_like(q, 4.0)]
        launched(q, out, lse, *found)
        return (out, lse, *found)

    _, replay = recorded(call, torch.zeros(3))
    found = replay.run([torch.ones(3)], 1.0)
    assert [set(t.flatten().tolist()) for t in found] == [{0.0}, {-torch.inf}, {0.0}, {7}, {0.0}, {0.0}, {3.0}, {4.0}]
    assert found[3].dtype == torch.int64


def test_tensors_where_launches_read_shapes() -> None:
    counter = torch.zeros(2)

    def call(q: Tensor, k: Tensor) -> tuple[Tensor]:
        recorder = active_recorder()
        assert recorder is not None
        recorder.outlives(counter, lambda: counter)
        out, order = torch.empty(6, 4), torch.empty(5)
        launched(q.unsqueeze(0).transpose(1, 2), k, out[2:], order, counter, takes_addresses=False)
        launched(k, out)
        return (out,)

    _, replay = recorded(call, torch.zeros(3, 2, 4), torch.zeros(2))
    q, k = torch.ones(3, 2, 4), torch.ones(2)
    (out,) = replay.run([q, k], 1.0)
    (_, rows, keys, part, order, found), (_, address, result) = SENT
    assert rows.shape == (1, 2, 3, 4) and rows.stride() == q.unsqueeze(0).transpose(1, 2).stride() and rows.data_ptr() == q.data_ptr()
    assert keys is k and found is counter and order.shape == (5,)
    assert part.shape == (4, 4) and part.data_ptr() == out[2:].data_ptr()
    assert (address, result) == (k.data_ptr(), out.data_ptr())


def test_tensors_at_one_address_have_to_stay_there() -> None:
    def call(q: Tensor, k: Tensor) -> tuple[Tensor]:
        out = torch.empty_like(q)
        launched(q, k, out)
        return (out,)

    _, replay = recorded(call, x := torch.zeros(3), x)
    assert replay.run([y := torch.ones(3), y.view(3)], 1.0) is not None and SENT[0][1:3] == (y.data_ptr(),) * 2
    assert replay.run([torch.ones(3), torch.ones(3)], 1.0) is None and len(SENT) == 1


def test_copies_of_arguments() -> None:
    def call(sink: Tensor, table: Tensor) -> tuple[Tensor]:
        out = torch.empty(3)
        launched(sink.detach().float(), table.t().contiguous(), table.int(), out, takes_addresses=False)
        launched(sink)
        return (out,)

    _, replay = recorded(call, torch.zeros(3, dtype=torch.bfloat16), torch.zeros(2, 4))
    replay.run([sink := torch.ones(3, dtype=torch.bfloat16), table := torch.arange(8.0).view(2, 4)], 1.0)
    (_, floats, columns, integers, _), (_, address) = SENT
    assert torch.equal(floats, sink.float()) and floats.dtype is torch.float32 and address == sink.data_ptr()
    assert torch.equal(columns, table.t()) and columns.is_contiguous()
    assert torch.equal(integers, table.int()) and integers.dtype is torch.int32


def wrong(name: str) -> Callable[[Tensor], tuple[Tensor, ...]]:
    elsewhere = torch.zeros(3)

    def call(q: Tensor) -> tuple[Tensor, ...]:
        out = torch.empty(3)
        if name == "an operation":
            q = q + 1
        if name == "a copy of an allocation":
            launched(out.double())
        if name == "a copy after a launch":
            launched(q)
            launched(q.double(), out)
        if name == "a tensor of before":
            launched(elsewhere, out)
        if name == "a part of an argument":
            launched(q[1:], out)
        if name == "no launch":
            return (out,)
        if name == "an object":
            launched(object())
        launched(q, out)
        if name == "filled later":
            out.zero_()
        if name == "a part of a result":
            return (out[:2],)
        return (q,) if name == "an argument returned" else (out,)

    return call


REASONS = {
    "an operation": "neither an allocation nor a view", "a copy of an allocation": "no argument of the call",
    "a copy after a launch": "after a launch with it", "a tensor of before": "neither an argument nor an allocation",
    "a part of an argument": "neither an argument nor an allocation", "no launch": "nothing is launched", "an object": "passed a object",
    "filled later": "after a launch", "a part of a result": "not all of an allocation", "an argument returned": "not all of an allocation",
}  # fmt: skip


@pytest.mark.parametrize("name", REASONS)
def test_calls_that_have_no_replay(name: str) -> None:
    recorder, replay = recorded(wrong(name), torch.zeros(3))
    assert replay is None and REASONS[name] in recorder.reason


def test_the_interpreters_operations_are_not_the_calls() -> None:
    def call(q: Tensor) -> tuple[Tensor]:
        out = torch.empty(3)
        with unrecorded():
            out.copy_(q + 1)
        launched(q, out)
        return (out,)

    assert recorded(call, torch.zeros(3))[1] is not None


def test_another_thread_is_not_recorded() -> None:
    seen = []
    with Recorder([torch.zeros(3)]):
        assert active_recorder() is not None
        thread = threading.Thread(target=lambda: seen.append(active_recorder()))
        thread.start()
        thread.join()
    assert seen == [None] and active_recorder() is None


def test_an_error_ends_the_recording() -> None:
    with pytest.raises(ValueError, match="wrong"), Recorder([torch.zeros(3)]):
        raise ValueError("wrong")
    assert active_recorder() is None


def test_no_tensor_of_the_call_is_kept() -> None:
    gc.collect()
    gc.disable()
    try:
        q = torch.zeros(3)
        _, replay = recorded(lambda q: (launched(q, out := torch.empty(3)), (out,))[1], q)
        alive = weakref.ref(q)
        del q, _
        assert replay is not None and alive() is None
    finally:
        gc.enable()
