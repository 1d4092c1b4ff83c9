"""Batches of vLLM by the Triton kernels, in Triton's interpreter, with tables that nobody reads on the host, as on a GPU.

Run by tests/backends/triton/test_in_the_interpreter.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from anyattn.validate import sequences as check_lengths
from tests.integrations.vllm import test_forward
from tests.integrations.vllm.batches import HEAD_SIZE, batch_of, builder_of, empty_cache, judge, layer_of, step
from tests.integrations.vllm.test_forward import impl_of, run
from tests.support.sequences import Meaning


@pytest.fixture(autouse=True)
def _unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_lengths, "skips_device_reads", lambda device, validate: validate is not True)


@pytest.mark.parametrize(("layout", "page_size"), [("LBHNC", 16), ("BLNHC", 13)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_and_decoding_in_one_batch(vllm: Any, layout: str, page_size: int, dtype: torch.dtype) -> None:
    run(vllm, Meaning(causal=True), impl_of(vllm), layout=layout, page_size=page_size, dtype=dtype, left_over=1)


def test_options(vllm: Any) -> None:
    test_forward.test_options(vllm)


def test_a_tree_of_drafts(vllm: Any) -> None:
    test_forward.test_a_tree_of_drafts(vllm)


def test_as_captured(vllm: Any) -> None:
    """The bounds are far above the lengths: a query as long as all tokens, and a block table of the model's greatest length."""
    of = batch_of(vllm, left_over=1)
    common = of.common
    common.block_table_tensor = torch.nn.functional.pad(common.block_table_tensor, (0, 60), value=1)
    common.max_query_len, common.max_seq_len = common.num_actual_tokens, 1024
    metadata = builder_of(vllm).build_for_cudagraph_capture(common)
    assert metadata.block_table.shape[1] == 64
    kv_cache = empty_cache(vllm, of, "LBNHC", torch.float32, 2 * HEAD_SIZE)
    judge(step(impl_of(vllm), layer_of(), of, kv_cache, metadata), of, Meaning(causal=True))


@test_forward.needs_scales
@pytest.mark.parametrize("name", test_forward.QUANTISED)
def test_quantised_caches(vllm: Any, name: str) -> None:
    test_forward.test_quantised_caches(vllm, name, 16, "LBNHC")
