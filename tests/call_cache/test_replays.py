"""Replays of decoding steps and varlen calls by Triton pass its kernels what calls that are not replayed pass, by addresses.

With a GPU pretended: launches are noted, none is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import anyattn
from tests.support.pretended_launches import Launched, batch, described, noted_by_address, step
from tests.support.replayed import replayed_and_first

pytest.importorskip("triton")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launched]]:
    with noted_by_address(monkeypatch) as found:
        yield found


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

    warm, first = replayed_and_first(call, range(10), 11, monkeypatch)
    assert warm == first
    assert len(warm[0]) == 1 + (splits > 1) + ("appends" in name or name == "varlen")
