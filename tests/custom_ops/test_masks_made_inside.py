"""``~mask`` and ``masks.document_from_cu_seqlens`` inside ``torch.compile`` and ``torch.export``: the bits and errors of eager calls."""

from __future__ import annotations

import pytest
import torch

import anyattn
from anyattn import masks
from tests.support.compiling import fresh, same
from tests.support.covering import few
from tests.support.processes import python

H, S, D = 2, 64, 16
OUTSIDE = masks.sliding_window(3, 5)
IDS = torch.arange(S) // 10


def inputs(seed: int = 0) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(1, H, S, D, generator=g).requires_grad_() for _ in range(3)]


def ends(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


INVERTED = {
    "made inside": lambda: ~masks.sliding_window(2, 0),
    "made outside": lambda: ~OUTSIDE,
    "a capture": lambda: masks.causal() & ~masks.document(IDS),
    "of a join, twice": lambda: ~(masks.causal() | ~masks.document(IDS)) | masks.sliding_window(0, 0),
    "of a function": lambda: ~anyattn.mod(lambda b, h, i, j: (i + j) % 3 == 0),
}


@pytest.mark.parametrize("name", INVERTED)
def test_masks_are_inverted_inside(name: str) -> None:
    def call(q, k, v):
        return anyattn.flex_attention(q, k, v, mask_mod=INVERTED[name]())

    given = inputs()
    assert same(fresh(call)[0], call, given, given)


def test_integers_and_tensors_are_inverted_as_without_anyattn() -> None:
    def call(x, n):
        return ~x + ~n, ~(x > 3)

    assert same(fresh(call)[0], call, (torch.arange(9), 4))


def test_other_objects_are_left_to_dynamo() -> None:
    class Other:
        def __invert__(self):
            return 2

    try:
        found = fresh(lambda x: x * ~Other())[0](torch.ones(2))
    except torch._dynamo.exc.Unsupported as refusal:  # up to torch 2.13
        assert "invert" in str(refusal)
    else:
        assert found.tolist() == [2, 2]


_FIRST = """
import sys
import torch
import anyattn
from anyattn import masks

MADE = MADE_BEFORE

def call(q):
    return anyattn.flex_attention(q, q, q, mask_mod=~(MADE or masks.causal()))

q = torch.randn(1, 1, 20, 8)
assert "torch._dynamo" not in sys.modules
assert torch.equal(torch.compile(call, fullgraph=True, backend="eager")(q), call(q))
"""


@pytest.mark.parametrize("made_before", few(["None", "masks.causal()"], "masks.causal()"))
def test_an_inversion_may_be_the_first_thing_of_ours_that_dynamo_traces(made_before: str) -> None:
    """Also of a mask that was made before Dynamo was imported."""
    done = python("-W", "ignore", "-c", _FIRST.replace("MADE_BEFORE", made_before))
    assert done.returncode == 0, done.stderr[-3000:]


def listed(q, k, v, cu):
    mask = masks.document_from_cu_seqlens(cu) & masks.causal()
    return anyattn.flex_attention(q, k, v, block_mask=anyattn.create_block_mask(mask, 1, 1, S, S, device="cpu", BLOCK_SIZE=32))


def unlisted(q, k, v, cu):
    return anyattn.flex_attention(q, k, v, mask_mod=~masks.document_from_cu_seqlens(cu))


@pytest.mark.parametrize("call", [listed, unlisted])
def test_documents_of_cu_seqlens_are_made_inside(call) -> None:
    """One graph, whatever the lengths of the documents are; longer than the sequence is allowed, as in eager calls."""
    compiled, graphs = fresh(call)
    for step, cu in enumerate((ends(0, 20, 45, S), ends(0, 1, 2, S), ends(0, 0, S, S), ends(0, 20, 45, S + 26))):
        given = inputs(step)
        assert same(compiled, call, (*given, cu), given)
    assert graphs.frame_count == 1


@pytest.mark.parametrize("call", [listed, unlisted])
@pytest.mark.parametrize("cu", [ends(1, 20, S), ends(0, 50, 45, S), ends(0, 20, 45, S - 4)], ids=["start", "falls", "short"])
def test_wrong_cu_seqlens_raise_what_eager_calls_raise(call, cu: torch.Tensor) -> None:
    messages = []
    for one in (call, fresh(call)[0]):
        with pytest.raises(ValueError) as caught:
            one(*inputs(), cu)
        messages.append(str(caught.value).split("reads dimension")[-1].split("(at b=")[0])  # compiled, a mask has no name
    assert messages[0] == messages[1]


@pytest.mark.parametrize("strict", [True, False])
def test_documents_of_cu_seqlens_are_exported(strict: bool) -> None:
    class Model(torch.nn.Module):
        def forward(self, q, k, v, cu):
            return unlisted(q, k, v, cu)

    given = [x.detach() for x in inputs()]
    program = torch.export.export(Model(), (*given, ends(0, 20, 45, S)), strict=strict).module()
    for cu in (ends(0, 20, 45, S), ends(0, 9, 9, S)):
        assert torch.equal(program(*given, cu), unlisted(*given, cu))


def test_the_operator_keeps_its_contract() -> None:
    from anyattn.custom_ops.document_ids import document_ids

    torch.library.opcheck(document_ids, (ends(0, 3, 3, 8),), test_utils=("test_schema", "test_faketensor"))
