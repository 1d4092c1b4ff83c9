"""The cache of what is derived from block lists."""

from __future__ import annotations

import gc
import weakref

import torch

import anyattn
from anyattn import masks
from anyattn.sparsity.derived import derived


def lists_of_causal() -> anyattn.BlockSparseTensors:
    return anyattn.compute_block_sparsity(16, 16, 1, 2, 64, 64, masks.causal())


def test_what_is_derived_is_kept_until_a_write() -> None:
    lists, others = lists_of_causal(), lists_of_causal()
    derived(lists)["key"] = "made"
    assert derived(lists) == {"key": "made"} and derived(others) == {}
    assert lists.full_block_cnt is not None
    lists.full_block_cnt.zero_()
    assert derived(lists) == {}


def test_what_is_derived_goes_with_the_lists() -> None:
    lists, value = lists_of_causal(), lists_of_causal()
    derived(lists)["key"] = value
    gone = weakref.ref(value)
    del lists, value
    gc.collect()
    assert gone() is None


def test_nothing_is_kept_of_tensors_whose_writes_torch_does_not_count() -> None:
    with torch.inference_mode():
        lists = lists_of_causal()
        derived(lists)["key"] = "made"
        assert derived(lists) == {}
