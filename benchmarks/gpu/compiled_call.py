"""Host time of a warm compiled call with one attention in it, and of flex calls that anyattn takes over: small, without synchronising."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention

from anyattn.testing.harness.timing import HostClock, Limits, measure

__all__ = ["host_times"]

_SHAPE = (1, 2, 128, 64)
_LIMITS = Limits()
_Calls = dict[str, Callable[[], Any]]


def _causal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return q_idx >= kv_idx


def host_times(device: str = "cuda", backend: str = "inductor", limits: Limits = _LIMITS) -> dict[str, Any]:
    """microseconds: by call; plus the figures of the bars: ratios and differences, as medians of those within rounds."""
    import anyattn

    qkv = tuple(torch.randn(_SHAPE, device=device, dtype=torch.bfloat16) for _ in range(3))
    errors: dict[str, str] = {}
    with torch.no_grad():
        compiled = {name: call for name, call in _flex(qkv, device, backend).items() if "compiled" in name}
        calls = {**_ours(qkv, anyattn.create_block_mask, device, backend), **compiled}
        rounds = _rounds(calls, limits, errors)
        figures = _versus_flex(rounds)
        if (replace := getattr(anyattn, "replace_flex_attention", None)) is not None:
            with replace():
                # compiled again: Dynamo's graph with torch's function is another one; direct calls get torch's block mask too
                replaced = {f"replaced {name}": call for name, call in _flex(qkv, device, backend).items()}
                again = _rounds({**_ours(qkv, flex_attention.create_block_mask, device, backend), **replaced}, limits, errors)
            figures |= _replaced(again)
            rounds |= {name: taken for name, taken in again.items() if name.startswith("replaced")}
    figures["microseconds"] = {name: statistics.median(taken) * 1e6 for name, taken in rounds.items()}
    return {**figures, **({"errors": errors} if errors else {})}


def _ours(qkv: tuple[Tensor, ...], create: Callable[..., Any], device: str, backend: str) -> _Calls:
    """Our calls. create: the ``create_block_mask`` that makes the block mask."""
    import anyattn

    block_mask = create(_causal, 1, 1, _SHAPE[2], _SHAPE[2], device=device)
    compiled = torch.compile(lambda q, k, v: anyattn.flex_attention(q, k, v), fullgraph=True, backend=backend)
    masked = torch.compile(lambda q, k, v, mask: anyattn.flex_attention(q, k, v, block_mask=mask), fullgraph=True, backend=backend)
    return {
        "anyattn compiled": lambda: compiled(*qkv),
        "anyattn compiled, block mask": lambda: masked(*qkv, block_mask),
        "anyattn": lambda: anyattn.flex_attention(*qkv),
        "anyattn, block mask": lambda: anyattn.flex_attention(*qkv, block_mask=block_mask),
    }


def _flex(qkv: tuple[Tensor, ...], device: str, backend: str) -> _Calls:
    """Calls of torch's function, or of its replacement."""
    function = flex_attention.flex_attention
    block_mask = flex_attention.create_block_mask(_causal, 1, 1, _SHAPE[2], _SHAPE[2], device=device)
    compiled = torch.compile(lambda q, k, v: function(q, k, v), fullgraph=True, backend=backend)
    masked = torch.compile(lambda q, k, v, mask: function(q, k, v, block_mask=mask), fullgraph=True, backend=backend)
    return {
        "flex compiled": lambda: compiled(*qkv),
        "flex compiled, block mask": lambda: masked(*qkv, block_mask),
        "flex": lambda: function(*qkv),
        "flex, block mask": lambda: function(*qkv, block_mask=block_mask),
    }


def _rounds(calls: _Calls, limits: Limits, errors: dict[str, str]) -> dict[str, tuple[float, ...]]:
    def failed(name: str, error: Exception) -> None:
        errors[name] = f"{type(error).__name__}: {str(error)[:300]}"

    return {name: timing.seconds for name, timing in measure(calls, HostClock(), limits, failed).items()}


def _versus_flex(rounds: dict[str, tuple[float, ...]]) -> dict[str, float]:
    found = {}
    for key, tail in (("over_flex", ""), ("mask_over_flex", ", block mask")):
        mine, theirs = rounds.get(f"anyattn compiled{tail}"), rounds.get(f"flex compiled{tail}")
        if mine and theirs:
            found[key] = statistics.median(a / b for a, b in zip(mine, theirs))
    return found


def _replaced(rounds: dict[str, tuple[float, ...]]) -> dict[str, float]:
    """The extra time of replaced calls, the larger one of the call without a mask and the one with a block mask."""
    found = {}
    for key, how in (("replaced_extra_us", ""), ("compiled_replaced_extra_us", " compiled")):
        pairs = [(rounds.get(f"replaced flex{how}{tail}"), rounds.get(f"anyattn{how}{tail}")) for tail in ("", ", block mask")]
        if all(a and b for a, b in pairs):
            found[key] = max(statistics.median(x - y for x, y in zip(a or (), b or ())) * 1e6 for a, b in pairs)
    return found
