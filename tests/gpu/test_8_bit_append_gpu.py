"""On a GPU: rows appended to 8-bit caches by the Triton backend have the CPU's bytes, scales and count; in CUDA graphs; no waits."""

from __future__ import annotations

import importlib.util
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn.kvcache.quantise import quantised
from tests.entry_points.test_8_bit_append import as_given, new_rows, same_bits, tables, written_memory
from tests.support import eight_bits
from tests.support.eight_bits import DTYPES, FORMS, ON_GPU, PLAIN_ON_GPU, Q_DTYPES, Case
from tests.support.gpu.graphs import captured
from tests.support.gpu.waiting import no_waiting
from tests.support.quantised_rows import every_rounding
from tests.support.sequences import Meaning

if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
    pytest.skip("needs a GPU and triton", allow_module_level=True)
pytestmark = pytest.mark.gpu

SETTINGS = ON_GPU | {
    "pages of 16": replace(ON_GPU["pages of 16"], queries=2),
    "pages of 64": replace(ON_GPU["pages of 64"], queries=40),
}
MATRIX = [
    (name, FORMS[i % 7], FORMS[(3 * i + i // 7) % 7], DTYPES[i % 3], Q_DTYPES[(i // 3) % 3])
    for i, name in enumerate(itertools.islice(itertools.cycle(SETTINGS), 63))
]


def appended(case: Case, rows: dict[str, Tensor], rotary: dict[str, Any], saturated: Tensor, **more: Any) -> Tensor:
    given = {name: t.to(saturated.device) if isinstance(t, Tensor) else t for name, t in {**rows, **rotary}.items()}
    return anyattn.flash_attn_with_kvcache(*case.args, **given, **case.options, saturated=saturated, **more)


@pytest.mark.parametrize("i", range(len(MATRIX)))
def test_the_bytes_of_the_cpu(i: int) -> None:
    name, k_form, v_form, dtype, q_dtype = MATRIX[i]
    s = replace(SETTINGS[name], k_form=k_form, v_form=v_form, dtype=dtype, q_dtype=q_dtype, seed=i)
    rows, rotary = new_rows(s, s.queries, i), tables(s, s.d // 2 - 4 * (i % 2))
    memory, counts = [], []
    for device in ("cpu", "cuda"):
        case, saturated = as_given(eight_bits.made(s, Meaning(causal=True), device)), torch.zeros(1, dtype=torch.int64, device=device)
        for _ in range(2):  # a first call, and a warm one that writes the same
            appended(case, rows, rotary, saturated)
        memory.append([t.cpu() for t in written_memory(case)])
        counts.append(int(saturated))
    assert same_bits(memory[1], memory[0]) and counts[1] == counts[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_rounding(dtype: torch.dtype) -> None:
    values = every_rounding(dtype)
    rows = torch.nn.functional.pad(values, (0, -len(values) % 64)).view(1, -1, 1, 64)
    caches = [torch.zeros(1, rows.shape[1], 1, 64, dtype=torch.uint8, device="cuda").view(dtype) for _ in range(2)]
    on_gpu, saturated = rows.cuda(), torch.zeros(1, dtype=torch.int32, device="cuda")
    anyattn.flash_attn_with_kvcache(on_gpu[:, :1], *caches, k=on_gpu, v=on_gpu, cache_seqlens=0, saturated=saturated, backend="triton")
    wanted = quantised(rows, 1.0, dtype)
    for cache in caches:
        assert same_bits([cache.cpu()], [wanted.rows])
    assert int(saturated) == 2 * int(wanted.saturated)


@pytest.mark.parametrize("form", FORMS)
def test_a_graph_counts_and_writes_at_each_replay(form: str) -> None:
    s = replace(PLAIN_ON_GPU, page_size=16, k_form=form, v_form=form)
    rows, rotary = new_rows(s, 1), tables(s, 32)
    case, expected = (as_given(eight_bits.made(s, Meaning(causal=True), "cuda")) for _ in range(2))
    rows, rotary = ({name: t.cuda() if isinstance(t, Tensor) else t for name, t in d.items()} for d in (rows, rotary))
    saturated, wanted = (torch.zeros(1, dtype=torch.int64, device="cuda") for _ in range(2))
    with no_waiting():
        appended(case, rows, rotary, saturated)
    graph, out = captured(lambda: appended(case, rows, rotary, saturated))
    saturated.zero_()
    for step in range(3):
        rows["k"].copy_(new_rows(s, 1, step)["k"])
        rows["v"].copy_(new_rows(s, 1, step)["v"])
        graph.replay()
        again = appended(expected, rows, rotary, wanted)
        assert torch.equal(out, again) and int(saturated) == int(wanted)
        case.options["cache_seqlens"] += 1
        expected.options["cache_seqlens"] += 1
    assert same_bits([t.cpu() for t in written_memory(case)], [t.cpu() for t in written_memory(expected)])


def test_a_paged_cache_and_its_quantised_copy() -> None:
    wide = anyattn.PagedKVCache(40, 16, 2, 64, num_layers=2, dtype=torch.bfloat16, device="cuda")
    a, b = wide.add_sequence(), wide.add_sequence()
    for layer in range(2):
        wide.append([a, b], *([torch.randn(n, 2, 64, device="cuda").bfloat16() for n in (100, 37)] for _ in "kv"), layer)
    for dtype in DTYPES:
        small = wide.quantised(dtype)
        small.reserve([a, b], 1)
        q, k, v = (torch.randn(2, 1, heads, 64, device="cuda").bfloat16() for heads in (8, 2, 2))
        for layer in range(2):
            out = anyattn.flash_attn_with_kvcache(
                q, small.k_cache(layer), small.v_cache(layer), k=k, v=v, k_descale=small.k_descale(layer),
                v_descale=small.v_descale(layer), cache_seqlens=small.seqlens([a, b]), page_table=small.page_table([a, b]),
                saturated=small.saturated, causal=True,
            )  # fmt: skip
            assert bool(out.isfinite().all())
        small.advance([a, b], 1)
        assert int(small.saturated) == 0
