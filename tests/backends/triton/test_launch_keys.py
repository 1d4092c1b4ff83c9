"""How many kernels the Triton backend launches over many shapes: counted on the CPU, from what a launch compiles for, without compiling."""

from __future__ import annotations

import importlib.util
import random
from typing import Any

import pytest
import torch

from anyattn.validate import flex

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
if importlib.util.find_spec("triton") is not None:
    from tests.support.triton import ahead


def windowed(width: int) -> Any:
    return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < width)


def key_of(launch: Any) -> tuple:
    """What Triton compiles anew for: constants, warps, stages, and dtypes; the entry itself says the rest."""
    dtypes = tuple(t.dtype for t in launch.given if isinstance(t, torch.Tensor))
    return id(launch.kernel), tuple(sorted((n, str(v)) for n, v in launch.options.items())), dtypes


def keys_of(draws: int, capability: tuple[int, int], width: int, backward: bool = False) -> set[tuple]:
    """The draws of the probe ``compilations-triton`` of ``benchmarks.gpu``. backward: what launches gradients, with a score mod's."""
    from anyattn.backends.triton import Repeater

    pick, mask, found = random.Random(0), windowed(width), set()
    slopes = torch.full((12,), 0.01 * width, requires_grad=True)
    score = (lambda s, b, h, i, j: s - slopes[h] * (i - j) * width) if backward else None
    with ahead.caught(capability) as made:
        for _ in range(draws):
            ratio, heads_kv = pick.choice((1, 2, 4)), pick.randint(1, 3)
            sizes = [(heads_kv * ratio, pick.randint(1, 400)), *[(heads_kv, pick.randint(1, 400))] * 2]
            batch = pick.randint(1, 3)
            q, k, v = (torch.empty(batch, h, s, 128, dtype=torch.bfloat16, requires_grad=backward) for h, s in sizes)
            problem = flex.flex_problem(q, k, v, score, None, mask, None, None, ratio > 1, None, backward, False, False)
            chosen = ahead.planned(problem, capability)
            made.clear()
            repeater = Repeater(problem, chosen)
            result = repeater.forward(problem)
            if backward:
                assert result.lse is not None
                made.clear()
                repeater.backward(problem, result.out, result.lse, torch.empty_like(result.out), None)
            found |= {key_of(launch) for launch in made}
    return found


def test_shapes_share_their_kernels() -> None:
    """One for few queries, whatever number of heads share a tile, and one for the rest; a new closure brings none."""
    first = keys_of(1000, (9, 0), 100)
    assert len(first) <= 2, first
    assert keys_of(50, (9, 0), 37) <= first


def test_gradients_share_their_kernels() -> None:
    """One kernel for each of their three launches whatever the shape, and for dk and dv another where heads share keys; one for small
    problems; a new closure over other values brings none."""
    first = keys_of(200, (9, 0), 100, backward=True)
    assert len(first) == 5, first
    assert keys_of(20, (9, 0), 37, backward=True) <= first


def keys_of_sequences(draws: int, width: int, page_size: int = 0) -> set[tuple]:
    """Of packed sequences, forward and backward; or, with pages, of decoding steps."""
    import anyattn
    from anyattn.validate import sequences

    pick, found = random.Random(1), set()
    with ahead.on((9, 0)) as made, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sequences, "skips_device_reads", lambda device, validate: True)
        for _ in range(draws):
            made.clear()
            batch, ratio = pick.randint(1, 5), pick.choice((1, 2, 4))
            if page_size:
                pages = pick.randint(3, 40)
                q, kv = torch.empty(batch, 1, ratio, 128, dtype=torch.bfloat16), torch.empty(pages, page_size, 1, 128, dtype=torch.bfloat16)
                table, new = torch.zeros(batch, pages, dtype=torch.int32), torch.empty(batch, 1, 1, 128, dtype=torch.bfloat16)
                where = {"page_table": table, "cache_seqlens": torch.zeros(batch, dtype=torch.int32), "window_size": (width, 0)}
                anyattn.flash_attn_with_kvcache(q, kv, kv.clone(), k=new, v=new, **where, backend="triton")
            else:
                lengths = [pick.randint(100, 400) for _ in range(batch)]
                ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
                q, k, v = (torch.empty(sum(lengths), n, 128, dtype=torch.bfloat16, requires_grad=True) for n in (ratio, 1, 1))
                tables = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "window_size": (width, 0)}
                anyattn.flash_attn_varlen_func(q, k, v, **tables, backend="triton").backward(
                    torch.empty(sum(lengths), ratio, 128).bfloat16()
                )
            found |= {key_of(launch) for launch in made}
    return found


def test_packed_sequences_share_their_kernels() -> None:
    """One for each launch of both passes, and another for dk and dv where heads share keys."""
    first = keys_of_sequences(100, 100)
    assert len(first) == 5, first
    assert keys_of_sequences(10, 37) <= first


def test_steps_of_decoding_share_their_kernels() -> None:
    """What appends, what attends, with one piece of the keys and with several, and what merges the pieces: by how many there are."""
    first = keys_of_sequences(200, 100, 16)
    kinds = {kernel for kernel, *_ in first}
    assert len(kinds) <= 3 and len(first) <= 7, first
    assert keys_of_sequences(20, 37, 16) <= first


def test_the_counter_sees_what_differs() -> None:
    """Older GPUs have more row tiles for few queries."""
    assert len(keys_of(1000, (8, 0), 100)) > 2
