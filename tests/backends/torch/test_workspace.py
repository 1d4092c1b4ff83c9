"""Buffers of the torch backend, by poisoned memory: what is read before it is written, and what is written where it must not be."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest
import torch

import anyattn
from anyattn.backends.torch import workspace
from tests.support import poison

UNINITIALISED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided", "resize_"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.int64, torch.bool])
def test_buffers_start_as_garbage(dtype):
    with poison.enabled() as log:
        buffer = workspace.empty((3, 5), dtype, torch.device("cpu"))
        assert buffer.shape == (3, 5) and buffer.is_contiguous()
        if dtype.is_floating_point:
            assert buffer.isnan().all()
        elif dtype is torch.bool:
            assert buffer.all()
        else:
            assert (buffer.view(torch.uint8) == 0x7F).all()
        assert not workspace.zeros((3, 5), dtype, torch.device("cpu")).any()
    assert log.count == 2 and log.total_bytes == 2 * 15 * buffer.element_size()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.bool])
@pytest.mark.parametrize("offset", [-1, 15])
def test_a_write_outside_is_caught(dtype, offset):
    def write() -> None:
        with poison.enabled():
            buffer = workspace.empty((3, 5), dtype, torch.device("cpu"))
            buffer.as_strided((1,), (1,), buffer.storage_offset() + offset).zero_()

    with pytest.raises(AssertionError, match=f"memory {'before' if offset < 0 else 'after'} a buffer of 15"):
        write()


def test_outputs_come_from_poisoned_memory_and_the_hook_is_taken_back():
    q = torch.randn(1, 2, 40, 8, requires_grad=True)
    with poison.enabled() as log:
        out = anyattn.flex_attention(q, q, q, mask_mod=lambda b, h, i, j: i >= j)
        out.sum().backward()
    assert log.count > 0 and out.isfinite().all() and q.grad.isfinite().all()
    before = log.count
    anyattn.flex_attention(q, q, q)
    assert log.count == before


def test_only_one_place_allocates_uninitialised_memory():
    """Anything else would escape the poison."""
    folder = Path(importlib.import_module("anyattn.backends.torch").__file__).parent
    found = [
        f"{path.name}:{node.lineno} {node.func.attr}"
        for path in folder.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in UNINITIALISED
    ]
    assert not found, found
