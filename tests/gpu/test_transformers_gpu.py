"""On a GPU: Transformers models with ``attn_implementation="anyattn"`` beside eager attention; decoding that never waits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("transformers")

from anyattn.integrations.transformers import NAME, attention_forward, describe_mask
from anyattn.mods.tracing.trace import trace
from anyattn.testing.rounding import Noise, rounding
from tests.support.gpu.waiting import no_waiting
from tests.support.transformers_models import (
    DECODERS,
    DEFINITION,
    check_attention,
    check_like_eager,
    check_packed,
    decoder,
    gradients,
    packed,
    padded,
    tokens,
)

pytestmark = pytest.mark.gpu

WIDTHS = {"head_dim": 64, "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
MODELS = list(DECODERS)


def _model(name: str, dtype: torch.dtype) -> Any:
    return decoder(name, dtype, **WIDTHS).cuda()


@pytest.mark.parametrize("side", [None, "left", "right"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients(name: str, side: str | None) -> None:
    ids = tokens(3, 75).cuda()
    mask = torch.ones_like(ids) if side is None else padded(3, 75, [75, 40, 9], side).cuda()
    check_like_eager(lambda how, dtype: gradients(_model(name, dtype), how, keep=mask, input_ids=ids, attention_mask=mask, use_cache=False))


@pytest.mark.parametrize("name", MODELS)
def test_packed_positions(name: str) -> None:
    lengths = (40, 1, 70, 19)
    check_packed(lambda dtype: _model(name, dtype), lengths, **{key: t.cuda() for key, t in packed(lengths).items()})


@pytest.mark.parametrize("cache", [None, "static"])  # a static cache's step is compiled, with CUDA graphs
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_generated_tokens_are_likely(name: str, is_padded: bool, cache: str | None) -> None:
    """Every token is, by the definition in float64 and given those before it, within rounding of the likeliest."""
    ids = tokens(3, 40).cuda()
    mask = padded(3, 40, [40, 21, 5]).cuda() if is_padded else torch.ones_like(ids)
    model = _model(name, torch.float32)
    model.set_attn_implementation(NAME)
    with torch.no_grad():
        found = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=24, cache_implementation=cache)
    judge = _model(name, torch.float64)
    judge.set_attn_implementation(DEFINITION)
    whole = torch.cat((mask, mask.new_ones(3, 24)), 1)
    places = (whole.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        scores = judge(input_ids=found, attention_mask=whole, position_ids=places, use_cache=False).logits[:, 39:-1]
    chosen = scores.gather(2, found[:, 40:, None])[..., 0]
    assert bool((scores.amax(-1) - chosen <= 1e-3 * scores.abs().amax()).all())


def _step(width: int, window: int | None, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(0)
    made = [torch.randn(*shape, width, generator=generator, device="cuda", dtype=dtype) for shape in ((2, 8, 1), (2, 2, 300), (2, 2, 300))]
    return tuple(made)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("has_holes", [False, True])
@pytest.mark.parametrize("window", [None, 33])
def test_a_decoding_step_does_not_wait(window: int | None, has_holes: bool, dtype: torch.dtype) -> None:
    from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

    query, key, value = _step(64, window, dtype)
    mask = padded(2, 201, [201, 90]).bool().cuda()
    if has_holes:
        mask[0, 170:180] = False
    offset = torch.tensor(200, device="cuda")
    function = causal_mask_function if window is None else sliding_window_causal_mask_function(window)

    def step() -> Tensor:
        described = describe_mask(
            batch_size=2, q_length=1, kv_length=300, q_offset=offset, mask_function=function, attention_mask=mask, device="cuda"
        )
        return attention_forward(torch.nn.Module(), query, key, value, described, scaling=0.2)[0]

    with torch.no_grad():
        step()  # compiles
        with no_waiting():
            out = step()
    at = torch.arange(300, device="cuda")
    seen = torch.nn.functional.pad(mask, (0, 99)) & (at <= 200)
    if window is not None:
        seen = seen & (at > 200 - window)
    noise = rounding(query, key, value, mask=trace(lambda b, h, i, j: seen[b, j], "mask"), scale=0.2).out
    check_attention(out, query, key, value, seen[:, None, None], Noise(*(t.transpose(1, 2) for t in noise)), scaling=0.2)
