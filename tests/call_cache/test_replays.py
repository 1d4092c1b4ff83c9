"""Replays of decoding steps and varlen calls by Triton pass its kernels what calls that are not replayed pass, by addresses.

With a GPU pretended: launches are noted, none is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn.call_cache import attention, replays
from anyattn.hardware import Hardware
from anyattn.sequences import tile_order_device
from tests.support.no_reading import pretend_unread

pytest.importorskip("triton")

from anyattn.triton_tools import launch
from anyattn.triton_tools.fast_launch import Handle

Launched = tuple[tuple[int, ...], list[Any]]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launched]]:
    found: list[Launched] = []

    def send(grid: tuple[int, ...], values: Any) -> None:
        found.append((tuple(grid), [x.data_ptr() if isinstance(x, Tensor) else x for x in values]))

    def first(kernel: Any, grid: tuple[int, ...], given: Any, *_: Any) -> Handle:
        send(grid, given)
        return Handle(send, True)

    pretend_unread(monkeypatch, Hardware("cuda", "a GPU", 0, frozenset((torch.bfloat16,)), (8, 0), 132))
    monkeypatch.setattr(launch, "_launched", first)
    monkeypatch.setattr(tile_order_device, "_runs_kernels", lambda device: True)
    attention.clear()
    yield found
    attention.clear()


def step(seed: int, pages: bool, appends: bool) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)

    def rows(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g).bfloat16()

    store = (12, 64) if pages else (3, 256)
    lengths = torch.randint(10, 200, (3,), generator=g, dtype=torch.int32)
    given = {
        "q": rows(3, 1, 8, 64),
        "k_cache": rows(*store, 2, 64),
        "v_cache": rows(*store, 2, 64),
        "cache_seqlens": lengths,
        "causal": True,
    }
    if pages:
        given["page_table"] = torch.randperm(12, generator=g).view(3, 4).int()
    if appends:
        angles = torch.rand(256, 32, generator=g)
        given |= {"k": rows(3, 1, 2, 64), "v": rows(3, 1, 2, 64), "rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
    return given


def batch(seed: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(600, h, 64, generator=g).bfloat16() for h in (4, 2, 2))
    ends = torch.tensor([0, 200 + seed, 600], dtype=torch.int32)
    return {"q": q, "k": k, "v": v, "cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 500, "max_seqlen_k": 500}


def described(launches: list[Launched], arguments: dict[str, Any], results: tuple[Tensor, ...]) -> list[Any]:
    """Launches' arguments, with addresses by what they are: of an argument, of a result, or of other memory by its first use."""
    names = {t.data_ptr(): name for name, t in arguments.items() if isinstance(t, Tensor)}
    names |= {t.data_ptr(): f"result {i}" for i, t in enumerate(results)}
    found = []
    for grid, values in launches:
        for x in values:
            if type(x) is int and x > 2**32:
                names.setdefault(x, f"memory {len(names)}")
        found.append((grid, [names.get(x, x) if type(x) is int else x for x in values]))
    return found


CALLS: dict[str, Callable[[int], dict[str, Any]]] = {
    "a cache": lambda seed: step(seed, False, False),
    "pages": lambda seed: step(seed, True, False),
    "appends": lambda seed: step(seed, False, True),
    "appends to pages": lambda seed: step(seed, True, True),
    "varlen": batch,
}


@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("name", CALLS)
def test_launches(name: str, splits: int, scale: float | None, launched: list[Launched], monkeypatch: pytest.MonkeyPatch) -> None:
    """The scale and a captured number are this call's."""
    function = anyattn.flash_attn_varlen_func if name == "varlen" else anyattn.flash_attn_with_kvcache

    def call(seed: int) -> tuple[list[Any], Any]:
        strength = 0.5 + seed
        arguments = CALLS[name](seed) | {"softmax_scale": None if scale is None else scale + seed, "num_splits": splits}
        mods = {"score_mod": lambda s, b, h, i, j: s * strength} if scale is None else {}
        before = len(launched)
        results = function(**arguments, **mods, return_lse=True, backend="triton")
        assert type(results) is tuple
        return described(launched[before:], arguments, results), [(t.shape, t.stride(), t.dtype) for t in results]

    for seed in range(10):
        call(seed)
    with monkeypatch.context() as patched:
        patched.setattr(replays.Replays, "made", None)  # a call that were not a replay would fail
        warm = call(11)
    attention.clear()
    assert warm == call(11)
    assert len(warm[0]) == 1 + (splits > 1) + ("appends" in name or name == "varlen")
