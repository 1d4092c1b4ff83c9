"""``python -m benchmarks.host_time``: microseconds that a warm eager call spends in the doors, on a machine without the GPU.

The call is planned as if for a Hopper GPU, whose backend is replaced by one that returns tensors made beforehand: what is left is our own
Python. Each line is the least mean of several runs, since everything that disturbs a run makes it longer.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import timeit
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import click
import torch
from torch import Tensor

import anyattn
from anyattn import autograd, check, check_flash, hardware, plan, recall
from anyattn.check_flash import Options
from anyattn.mods.trace import trace

__all__ = ["measured", "microseconds", "stubbed"]

_HOPPER = hardware.Hardware("cuda", "a Hopper GPU", 0, frozenset((torch.bfloat16,)), (9, 0), 132)
_SHAPE = (1, 2, 128, 64)


@contextlib.contextmanager
def stubbed() -> Iterator[None]:
    """Calls on CPU tensors are planned for Hopper, and its kernel does nothing."""
    run = importlib.import_module("anyattn.backends.hopper.run")
    door = importlib.import_module("anyattn.backends.hopper")
    made: dict[Any, Any] = {}

    def forward(problem: Any, chosen: Any) -> Any:
        key = (problem.q.shape, problem.wants_lse)
        if key not in made:
            lse = torch.empty(problem.q.shape[:3]) if problem.wants_lse else None
            made[key] = run.Result(torch.empty_like(problem.q), lse, None)
        return made[key]

    recall.clear()
    with mock.patch.object(hardware, "of", lambda *a: _HOPPER), mock.patch.object(door, "forward", forward):
        yield
    recall.clear()


def _tensors(heads_first: bool = True, grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, length, dim = _SHAPE
    shape = _SHAPE if heads_first else (batch, length, heads, dim)
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16).requires_grad_(grad) for _ in range(3))
    return q, k, v


def _flex(grad: bool = False, **options: Any) -> Callable[[], Any]:
    q, k, v = _tensors(grad=grad)
    return lambda: anyattn.flex_attention(q, k, v, **options)


def _fresh_closures() -> Callable[[], Any]:
    q, k, v = _tensors()
    numbers = iter(range(1, 10**9))

    def call() -> Any:
        window = float(next(numbers))
        return anyattn.flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s - (i - j) * window)

    return call


def _calls() -> dict[str, Callable[[], Any]]:
    q, k, v = _tensors(heads_first=False)
    slopes = anyattn.scores.alibi_slopes(_SHAPE[1])
    causal = anyattn.create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 128, 128, device="cpu")
    return {
        "flex, no mod": _flex(),
        "flex, score mod": _flex(score_mod=lambda s, b, h, i, j: s + (j - i)),
        "flex, score mod of the library": _flex(score_mod=anyattn.scores.alibi(slopes)),
        "flex, a new closure each time": _fresh_closures(),
        "flex, block mask": _flex(block_mask=causal),
        "flex, mask mod": _flex(mask_mod=lambda b, h, i, j: i >= j),
        "flex, score mod, gradients": _flex(True, score_mod=lambda s, b, h, i, j: s + (j - i)),
        "flash, causal": lambda: anyattn.flash_attn_func(q, k, v, causal=True),
        "flash, causal, softcap, ALiBi": lambda: anyattn.flash_attn_func(q, k, v, causal=True, softcap=30.0, alibi_slopes=slopes),
    }


def _stages() -> dict[str, Callable[[], Any]]:
    """What the rooms behind the doors cost where a call is not remembered: of a flex call with a block mask, and of a causal flash."""
    from anyattn.backends.hopper import run, supports

    q, k, v = _tensors()
    causal = anyattn.create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 128, 128, device="cpu")
    door = (q, k, v, None, causal, None, None, None, False, None, False, False, False)
    problem = check.flex_problem(*door)
    chosen = plan.choose(problem, _HOPPER)
    q4, k4, v4 = _tensors(heads_first=False)
    return {
        "flex checks": lambda: check.flex_problem(*door),
        "  tensors": lambda: check.tensors(q, k, v, False),
        "  block mask": lambda: check.check_block_mask(causal, q, k),
        "  trace, seen before": lambda: trace(causal.mask_mod, "mask"),
        "  lists": lambda: check.lists_of(causal, problem.predicates[0]),
        "flash checks": lambda: check_flash.dense_problem(q4, k4, v4, Options(causal=True)),
        "plan": lambda: plan.choose(problem, _HOPPER),
        "  available": lambda: plan.available(_HOPPER),
        "  supports": lambda: supports.reason_against(problem),
        "  config": lambda: run.config_of(problem),
        "autograd": lambda: autograd.compute(problem, chosen),
    }


def microseconds(call: Callable[[], Any], repeat: int = 7, number: int = 300) -> float:
    for _ in range(20):
        call()
    return min(timeit.repeat(call, repeat=repeat, number=number)) / number * 1e6


def measured() -> dict[str, float]:
    """Microseconds by name: the doors, then the rooms behind them."""
    with stubbed():
        return {name: microseconds(call) for name, call in {**_calls(), **_stages()}.items()}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
def main(as_json: bool) -> None:
    """Host time of warm eager calls on a stand-in for a Hopper GPU."""
    torch.set_num_threads(1)
    found = measured()
    if as_json:
        click.echo(json.dumps(found))
        return
    for name, time in found.items():
        click.echo(f"{name:<36}{time:8.1f} us")


if __name__ == "__main__":
    main()
