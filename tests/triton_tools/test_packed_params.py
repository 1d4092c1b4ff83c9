"""Packed launches: the driver is passed what Triton's launcher would pass it, and only for kernels whose parameters it confirms."""

from __future__ import annotations

import ctypes
import re
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import anyattn
from anyattn.triton_tools import packed_params
from anyattn.triton_tools.recording import Recorder, active_recorder
from anyattn.triton_tools.replay import SCALE, Number
from tests.support.pretended_launches import step
from tests.support.triton import ahead

STREAM, FUNCTION = 77, 5
SIGNATURE = {
    "q": "*bf16", "rows": "i32", "out": "*bf16", "none": "*fp32", "scale": "fp32", "far": "i64", "one": "constexpr", "factor": "fp32",
    "flag": "i1", "TILE": "constexpr",
}  # fmt: skip
FORMS = {"*": "q", "fp32": "f", "i32": "i", "i64": "q", "i1": "b", "i16": "h"}
Passed = tuple[tuple[int, ...], int, list[Any]]


def size(kind: str) -> int:
    return ctypes.sizeof({"q": ctypes.c_int64, "f": ctypes.c_float, "i": ctypes.c_int32, "b": ctypes.c_int8}[form(kind)])


def form(kind: str) -> str:
    return FORMS["*" if kind.startswith("*") else kind]


class Gpu:
    """A driver that notes launches as C would see them. sizes: of the kernel's parameters."""

    def __init__(self, kinds: list[str], scratches: int) -> None:
        self.kinds = kinds + ["*i8"] * scratches
        self.sizes = [size(kind) for kind in self.kinds]
        self.noted: list[Passed] = []
        self.status = 0

    def launch(self, config: int, function: int, parameters: int, extra: None) -> int:
        assert function == FUNCTION and extra is None
        found = []
        for i, kind in enumerate(self.kinds):
            at = ctypes.c_void_p.from_address(parameters + 8 * i).value
            assert at is not None
            found.append(memoryview(ctypes.string_at(at, size(kind))).cast(form(kind))[0])
        facts = memoryview(ctypes.string_at(config, 56))
        numbers, attributes = facts[:28].cast("I"), facts[40:].cast("Q")
        assert not any(attributes)
        self.noted.append((tuple(numbers), facts[32:40].cast("Q")[0], found))
        return self.status


def compiled(signature: dict[str, Any] = SIGNATURE, **facts: Any) -> Any:
    plain = {"num_warps": 4, "num_ctas": 1, "shared": 1024, "global_scratch_size": 0, "profile_scratch_size": 0}
    metadata = SimpleNamespace(**{**plain, "launch_cooperative_grid": False, "launch_pdl": False, **facts})
    packed = (metadata.num_warps, metadata.num_ctas, metadata.shared)
    return SimpleNamespace(metadata=metadata, packed_metadata=packed, src=SimpleNamespace(signature=signature), function=FUNCTION)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes a device with a kernel of this signature: (device, what it packs, what went to Triton's launcher, watching hooks)."""
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: STREAM, raising=False)

    def make(kernel: Any = None, scratches: int = 2, sizes: list[int] | None = None) -> Any:
        kernel = kernel or compiled()
        kinds = [kind for kind in SIGNATURE.values() if kind != "constexpr"]
        device, sent, watching = Gpu(kinds, scratches), [], []
        known = device.sizes if sizes is None else sizes
        driver = packed_params._Driver(device.launch, lambda f, i: known[i] if i < len(known) else None, lambda status: f"status {status}")
        monkeypatch.setattr(packed_params, "_driver", lambda: driver)
        pack = packed_params.packing_of(
            kernel, torch.device("cuda", 0), lambda grid, given: sent.append((grid, given)), lambda: bool(watching)
        )
        return SimpleNamespace(device=device, pack=pack, sent=sent, watching=watching)

    return make


GRID = (7, 2, 1)
GIVEN = (1 << 40, 9, 2 << 40, None, 0.1, -3, 1, 2.5, True)
VARIES = (True, False, True, False, True, True, False, False, False)


@pytest.mark.parametrize("scratches", [0, 1, 2])
def test_the_driver_is_passed_constants_and_what_varies(scratches: int, gpu: Any) -> None:
    made = gpu(scratches=scratches)
    launcher, order = made.pack(GRID, GIVEN, VARIES)
    assert sorted(order) == [0, 2, 4, 5]
    for turn in (1, 2):
        now = {0: turn, 2: 10 * turn, 4: 0.3 * turn, 5: -turn}
        launcher(GRID, tuple(now[i] for i in order))
    first, second = made.device.noted
    assert first[0] == (*GRID, 4 * 32, 1, 1, 1024) and first[1] == STREAM
    float32 = ctypes.c_float
    assert first[2] == [1, 9, 10, 0, float32(0.3).value, -1, 2.5, 1, *[0] * scratches]
    assert second[2] == [2, 9, 20, 0, float32(0.6).value, -2, 2.5, 1, *[0] * scratches] and not made.sent


def test_streams_and_devices_are_those_of_the_launch(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = gpu()
    launcher, order = made.pack(GRID, GIVEN, VARIES)
    values = tuple(GIVEN[i] for i in order)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 78, raising=False)
    launcher(GRID, values)
    assert made.device.noted[-1][1] == 78
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    launcher(GRID, values)
    assert made.sent == [(GRID, [*GIVEN])] and len(made.device.noted) == 1


def test_hooks_see_launches(gpu: Any) -> None:
    made = gpu()
    launcher, order = made.pack(GRID, GIVEN, VARIES)
    made.watching.append(1)
    launcher(GRID, tuple(GIVEN[i] for i in order))
    assert made.sent == [(GRID, [*GIVEN])] and not made.device.noted


def test_an_error_of_the_driver(gpu: Any) -> None:
    made = gpu()
    launcher, order = made.pack(GRID, GIVEN, VARIES)
    made.device.status = 700
    with pytest.raises(RuntimeError, match=r"Triton Error \[CUDA\]: status 700"):
        launcher(GRID, tuple(GIVEN[i] for i in order))


def test_a_thread_without_a_context_launches_by_triton(gpu: Any) -> None:
    """As a new thread is, until CUDA's runtime has run in it; the driver launches nothing then."""
    made = gpu()
    launcher, order = made.pack(GRID, GIVEN, VARIES)
    made.device.status = 201
    launcher(GRID, tuple(GIVEN[i] for i in order))
    assert made.sent == [(GRID, [*GIVEN])]


@pytest.mark.parametrize(
    "facts",
    [{"num_ctas": 2}, {"global_scratch_size": 8}, {"profile_scratch_size": 8}, {"launch_pdl": True}, {"launch_cooperative_grid": True}],
    ids=str,
)
def test_other_launches_are_tritons(facts: dict[str, Any], gpu: Any) -> None:
    assert gpu(compiled(**facts)).pack is None


@pytest.mark.parametrize("kind", ["tensordesc<bf16[64]>", "nvTmaDesc", "fp16", ("i32", "i32")], ids=str)
def test_kernels_with_other_parameters_are_tritons(kind: Any, gpu: Any) -> None:
    assert gpu(compiled({**SIGNATURE, "more": kind})).pack is None


def test_sizes_that_the_driver_does_not_confirm(gpu: Any) -> None:
    known = gpu().device.sizes
    wrong = [[*known[:1], 8, *known[2:]], known[:3], [*known, 8], [*known[:-2], 4], [*known[:-1], 4]]
    assert gpu(sizes=known).pack is not None and [gpu(sizes=sizes).pack for sizes in wrong] == [None] * len(wrong)


def test_what_is_compiled_in_does_not_vary(gpu: Any) -> None:
    assert gpu().pack(GRID, GIVEN, (*VARIES[:6], True, *VARIES[7:])) is None
    assert gpu().pack((0, 1, 1), GIVEN, VARIES) is None  # an empty grid is not launched


def test_threads_do_not_mix_their_arguments(gpu: Any) -> None:
    made = gpu()
    launcher, order = made.pack(GRID, GIVEN, VARIES)

    def work(mark: int) -> None:
        for _ in range(300):
            launcher(GRID, tuple({0: mark, 2: mark, 4: float(mark), 5: mark}[i] for i in order))

    threads = [threading.Thread(target=work, args=(mark,)) for mark in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made.device.noted) == 900 and all(len({found[i] for i in (0, 2, 4, 5)}) == 1 for _, _, found in made.device.noted)


def test_a_replay_writes_what_varies(gpu: Any) -> None:
    made = gpu()

    def call(q: torch.Tensor) -> tuple[torch.Tensor]:
        out = torch.empty_like(q)
        recorder = active_recorder()
        assert recorder is not None
        recorder.launched(lambda *given: pytest.fail("is packed"), GRID, [q, 9, out, None, SCALE, Number(0), 1, 2.5, True], pack=made.pack)
        return (out,)

    x = torch.zeros(3)
    with Recorder([x]) as recorder:
        results = call(x)
    replay = recorder.replay(results, 1)
    assert replay is not None and replay.constants == ()
    y = torch.ones(3)
    (out,) = replay.run([y], 0.25, (-9,))  # type: ignore[misc]
    assert out is not None and made.device.noted[-1][2] == [y.data_ptr(), 9, out.data_ptr(), 0, 0.25, -9, 2.5, 1, 0, 0]


def test_kernels_of_a_decoding_step_have_the_parameters_of_their_signatures() -> None:
    """And behind them two pointers: what a driver would confirm."""
    pytest.importorskip("triton")
    sizes = {"u64": 8, "u32": 4, "f32": 4, "u16": 2, "u8": 1}
    with ahead.on((9, 0)) as made:
        anyattn.flash_attn_with_kvcache(**step(0, True, True), backend="triton", num_splits=4)
    assert len(made) == 3
    for launch in made:
        kernel = ahead.compiled(launch, (9, 0), "ptx")
        (entry,) = re.findall(r"\.entry \w+\((.*?)\)", kernel.asm["ptx"], re.DOTALL)
        passed = [sizes[kind] for kind in re.findall(r"\.param \.(\w+)", entry)]
        driver = packed_params._Driver(lambda *given: 0, lambda f, i, passed=passed: passed[i] if i < len(passed) else None, str)
        kinds = tuple(kernel.src.signature.values())
        assert packed_params._has_sizes(driver, FUNCTION, kinds) and len(passed) == len([k for k in kinds if k != "constexpr"]) + 2
        assert kernel.packed_metadata == (kernel.metadata.num_warps, 1, kernel.metadata.shared)
