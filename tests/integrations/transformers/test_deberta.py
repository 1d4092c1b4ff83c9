"""``scores.disentangled`` in the attention layer of DeBERTa-v2 and v3, beside Transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.models.deberta_v2.modeling_deberta_v2 import DisentangledSelfAttention

import anyattn
from anyattn.testing import budget

HEADS, HEAD_DIM, LENGTH = 4, 16, 90
FORMS: dict[str, dict[str, int]] = {
    "clamped": {"position_buckets": -1, "max_relative_positions": 24},
    "buckets": {"position_buckets": 16, "max_relative_positions": 40},
}


def layer_of(form: str, dtype: torch.dtype) -> Any:
    config = transformers.DebertaV2Config(
        hidden_size=HEADS * HEAD_DIM, num_attention_heads=HEADS, intermediate_size=64, num_hidden_layers=1, relative_attention=True,
        pos_att_type=["c2p", "p2c"], share_att_key=True, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0, **FORMS[form],
    )  # fmt: skip
    torch.manual_seed(0)
    return DisentangledSelfAttention(config).to(dtype)


def attended(layer: Any, form: str, hidden: Tensor, positions: Tensor) -> Tensor:
    """The layer's output, through anyattn."""
    heads = lambda x: x.unflatten(-1, (HEADS, HEAD_DIM)).transpose(-2, -3)
    q, k, v = (heads(project(hidden)) for project in (layer.query_proj, layer.key_proj, layer.value_proj))
    scale = (3 * HEAD_DIM) ** -0.5
    c2p = q @ heads(layer.key_proj(positions)).mT * scale
    p2c = k @ heads(layer.query_proj(positions)).mT * scale
    farthest = FORMS[form]["max_relative_positions"] if form == "buckets" else None
    score = anyattn.scores.disentangled(c2p, p2c, farthest, p2c_by_query=True)
    return anyattn.flex_attention(q, k, v, score_mod=score, scale=scale).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("form", FORMS)
def test_its_layer(form: str) -> None:
    """Output and gradients, those of the projected positions among them."""
    g = torch.Generator().manual_seed(1)
    drawn = [
        torch.randn(2, LENGTH, HEADS * HEAD_DIM, generator=g),
        torch.randn(2 * layer_of(form, torch.float32).pos_ebd_size, 64, generator=g),
    ]
    dout = torch.randn(2, LENGTH, HEADS * HEAD_DIM, generator=g)

    def results(dtype: torch.dtype, is_ours: bool) -> list[Tensor]:
        layer = layer_of(form, dtype)
        hidden, positions = (t.to(dtype).requires_grad_() for t in drawn)
        if is_ours:
            out = attended(layer, form, hidden, positions)
        else:
            seen = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool)
            out = layer(hidden, seen, rel_embeddings=positions)[0]
        return [out, *torch.autograd.grad(out, [hidden, positions], dout.to(dtype))]

    found = (results(torch.float32, True), results(torch.float64, False), results(torch.float32, False))
    for name, got, want, plain in zip(("out", "hidden", "positions"), *found, strict=True):
        budget.check(name, got, want, plain)
