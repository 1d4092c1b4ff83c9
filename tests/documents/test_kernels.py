"""The Triton kernels that find documents, compiled for Hopper without a GPU; what they find: ``test_kernels_interpreted.py``."""

from __future__ import annotations

import importlib.util

import pytest

from tests.support.triton.built import built

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


@pytest.mark.parametrize("ids", ["*u8", "*i32", "*i64"])
def test_documents_are_found_by_a_kernel_that_compiles(ids: str) -> None:
    from anyattn.documents.kernels import find_documents

    wide = {"ids": ids, "starts": "*i64", "lengths": "*i64"}
    types = {p.name: "constexpr" if p.is_constexpr else p.annotation_type or wide.get(p.name, "*i32") for p in find_documents.params}
    made = built(find_documents, types, {"BLOCK": 2048, "PAIRS": 64, "CHUNK": 1024})
    assert "cubin" in made.asm and "ld.local" not in made.asm["ptx"]


@pytest.mark.parametrize("ends_with_row", [False, True])
def test_documents_are_ordered_by_a_kernel_that_compiles(ends_with_row: bool) -> None:
    from anyattn.documents.kernels import order_documents

    wide = {"starts": "*i64", "lengths": "*i64"}
    types = {p.name: "constexpr" if p.is_constexpr else p.annotation_type or wide.get(p.name, "*i32") for p in order_documents.params}
    made = built(order_documents, types, {"ENDS_WITH_ROW": ends_with_row, "TILES": 64, "ENTRIES": 64})
    assert "cubin" in made.asm and "ld.local" not in made.asm["ptx"]
