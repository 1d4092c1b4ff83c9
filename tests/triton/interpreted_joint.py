"""dq, dk and dv by one kernel, in five products, by Triton's interpreter. Run by ``test_interpreted.py`` in a process of its own, in which
all memory holds NaN first."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "end_to_end"))

from calls import judge

import anyattn
from anyattn import masks
from anyattn.backends.triton import backward_pass, config
from anyattn.testing import cases

CAUSAL, SLOPE, CAP = masks.causal(), 0.125, 5.0
SCORES: dict[str, Any] = {
    "none": None,
    "distance": lambda s, b, h, i, j: s - SLOPE * (h + 1) * abs(i - j),
    "softcap": lambda s, b, h, i, j: CAP * torch.tanh(s / CAP),
}
MASKS = {
    "none": None,
    "causal": CAUSAL,
    "window": masks.sliding_window(19, 0),
    "sink and window": masks.sink_window(4, 19),
    "checks": lambda b, h, i, j: (i * j) % 7 < 3,
    "rows that see nothing": lambda b, h, i, j: (i >= j + 9 * h) & (i > 20),
}
SHAPES = ((1, 2, 1, 67, 67, 16, 16), (2, 3, 3, 33, 45, 40, 24), (1, 5, 1, 20, 70, 8, 64))


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every kernel that is launched; the joint one is chosen, with tiles of 32."""
    names: list[str] = []
    launch = backward_pass._launch

    def watched(name: str, *given: Any) -> None:
        names.append(name)
        launch(name, *given)

    monkeypatch.setattr(backward_pass, "joint_tiles", lambda shape, capability: config.Tiles(32, 32, 4, 2))
    monkeypatch.setattr(backward_pass, "_launch", watched)
    return names


def qkv(*shape: int, dtype: torch.dtype = torch.float32) -> Any:
    return cases.inputs("normal", cases.Shape(*shape), dtype, 0)[:3]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score", SCORES)
def test_joint(mask: str, score: str, launched: list[str]) -> None:
    place = list(MASKS).index(mask) + list(SCORES).index(score)
    dtype = (torch.float32, torch.bfloat16, torch.float16)[place % 3]
    judge(*qkv(*SHAPES[place % 3], dtype=dtype), mask=MASKS[mask], score=SCORES[score])
    assert launched == ["joint"]


@pytest.mark.parametrize("block", [32, 48, (20, 12), (100, 16)], ids=str)
def test_joint_by_lists(block: Any, launched: list[str]) -> None:
    mask = MASKS["checks"]
    made = anyattn.create_block_mask(mask, None, None, 90, 101, device="cpu", BLOCK_SIZE=block)
    judge(*qkv(1, 2, 1, 90, 101, 16, 16), mask=mask, block_mask=made)
    assert launched == ["joint"]


def test_joint_of_documents(launched: list[str]) -> None:
    """Sequences of one storage: no row of another gets anything."""
    ids = torch.repeat_interleave(torch.arange(4), torch.tensor([20, 1, 34, 15]))
    mask = lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j)
    judge(*qkv(1, 2, 1, 70, 70, 16, 16), mask=mask)
    q, k, v = (t[0].transpose(0, 1).contiguous() for t in qkv(1, 2, 1, 70, 70, 16, 16))
    ends = torch.tensor([0, 20, 21, 55, 70], dtype=torch.int32)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    got = {}
    for backend in ("triton", "torch"):
        out = anyattn.flash_attn_varlen_func(
            *leaves, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=34, max_seqlen_k=34, causal=True, backend=backend
        )
        got[backend] = torch.autograd.grad(out, leaves, torch.ones_like(out))
    for a, b in zip(got["triton"], got["torch"], strict=True):
        assert float((a - b).square().mean().sqrt()) <= 1e-6 * float(b.square().mean().sqrt())
    assert set(launched) == {"joint"}


def test_not_where_an_order_is_asked_for(launched: list[str]) -> None:
    q, k, v = (t.requires_grad_() for t in qkv(1, 2, 1, 40, 40, 16, 16))
    out = anyattn.flex_attention(q, k, v, mask_mod=CAUSAL, enable_gqa=True, deterministic=True)
    torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert launched == ["dq", "dkdv"]


def test_not_where_captured_tensors_are_added_up_as_well(launched: list[str]) -> None:
    bias = torch.linspace(-1, 1, 2, dtype=torch.float64)
    judge(*qkv(1, 2, 1, 40, 40, 16, 16), mask=CAUSAL, score=lambda s, b, h, i, j: s + bias[h] * (i - j), captured=[bias])
    assert launched == ["dq", "dkdv"]


def test_not_where_its_sums_are_too_large(launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward_pass, "MOST_SUMS", 4 * 2 * 40 * 16 - 1)
    judge(*qkv(1, 2, 1, 40, 40, 16, 16), mask=CAUSAL)
    monkeypatch.setattr(backward_pass, "MOST_SUMS", 4 * 2 * 40 * 16)
    judge(*qkv(1, 2, 1, 40, 40, 16, 16), mask=CAUSAL)
    assert launched == ["dq", "dkdv", "joint"]


@pytest.mark.parametrize(("wanted", "kernels"), [("q", ["dq"]), ("kv", ["dkdv"]), ("qv", ["joint"])])
def test_only_what_is_wanted(wanted: str, kernels: list[str], launched: list[str]) -> None:
    tensors = dict(zip("qkv", qkv(1, 2, 1, 40, 40, 16, 16), strict=True))
    leaves = [tensors[name].requires_grad_() for name in wanted]
    out = anyattn.flex_attention(*tensors.values(), mask_mod=CAUSAL, enable_gqa=True)
    torch.autograd.grad(out, leaves, torch.ones_like(out))
    assert launched == kernels
