"""What ``explain`` says is what will be done, and it changes nothing."""

from __future__ import annotations

import pytest
import torch

import anyattn
from anyattn import ModError, masks, scores
from anyattn.explanation import ModExplanation
from anyattn.mods.tracing.trace import trace

q = torch.randn(1, 2, 64, 16)


def explained(mod, kind="mask", aux_tensors=None):
    return str(ModExplanation(trace(mod, kind, aux_tensors=aux_tensors)))


def test_a_mask():
    window = 5
    text = explained(lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx <= window))
    for words in ("mask_mod <lambda>", "scalar 0 = 5", "other values compile nothing", "ranges    1 per query row", "# q - kv", "ge %"):
        assert words in text, text


def test_a_mask_without_ranges():
    text = explained(lambda b, h, q_idx, kv_idx: (q_idx ^ kv_idx) & 1 == 0)
    assert "captures  nothing" in text and "ranges    none" in text


@pytest.mark.parametrize(
    ("mod", "form"), [(scores.softcap(3.0), "general"), (scores.alibi(torch.ones(2, requires_grad=True)), "score + bias")]
)
def test_a_score(mod, form):
    text = explained(mod, "score")
    assert f"form      {form}" in text and mod.name in text and trace(mod, "score").key in text
    if form == "score + bias":
        assert "tensor 0: float32 (2,) on cpu, receives a gradient" in text


def test_names_are_not_mixed_up():
    texts = [explained(masks.sliding_window(n, 0)) for n in (3, 8)]
    assert "left=3" in texts[0] and " = 3\n" in texts[0] and "left=8" in texts[1] and " = 8\n" in texts[1]


def test_aux_tensors_and_kinds():
    text = explained(
        lambda b, h, q_idx, kv_idx, aux_tensors: aux_tensors[0][q_idx] == kv_idx, aux_tensors=[torch.zeros(4, dtype=torch.int32)]
    )
    assert "tensor 0: int32 (4,) on cpu" in text
    assert "score_mod" in explained(lambda a, b, h, q_idx, kv_idx: a, "score")
    with pytest.raises(ModError):
        explained(lambda b, h, q_idx, kv_idx: q_idx > kv_idx > 1)


def test_a_call():
    mask = anyattn.create_block_mask(masks.causal(), 1, 1, 64, 64, device="cpu", BLOCK_SIZE=16)
    explanation = anyattn.explain(q, q, q, scores.softcap(3.0), mask, mask_mod=masks.sliding_window(4, 4), sink=torch.zeros(2))
    text = str(explanation)
    assert explanation.plan.backend == "torch" and len(explanation.mods) == 3
    for words in ("plan      backend torch", "backends", "torch: available", "softcap(3.0)", "causal", "sliding_window"):
        assert words in text, text
    assert explanation.plan.why, "every plan says why"


def test_errors_are_those_of_the_call():
    for bad in ({"mask_mod": lambda q_idx: q_idx}, {"scale": "x"}, {"block_mask": 3}, {"sink": torch.zeros(5)}):
        said = []
        for door in (anyattn.explain, anyattn.flex_attention):
            with pytest.raises((TypeError, ValueError)) as error:
                door(q, q, q, **bad)
            said.append(str(error.value))
        assert said[0] == said[1]
