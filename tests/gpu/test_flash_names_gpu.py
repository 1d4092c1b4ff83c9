"""Programs that import FlashAttention's modules, on a GPU: in bfloat16, eager and compiled."""

from __future__ import annotations

import pytest
import torch

import anyattn
from anyattn.testing import budget
from tests.support import plain_flash
from tests.support.flash_programs import PROGRAMS, results

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
DTYPES = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("program", PROGRAMS)
def test_program(program: str, is_compiled: bool, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    with torch.device("cuda"):
        with plain_flash.provided():
            wanted, plain = (results(program, d) for d in (torch.float64, dtype))
        with anyattn.replace_flash_attention():
            found = results(program, dtype, torch.compile if is_compiled else lambda f: f)
    for name, got in found.items():
        budget.check(f"{program} {name}", *(t.flatten()[None] for t in (got, wanted[name], plain[name])))


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_transformers(side: str | None) -> None:
    """As a user calls it: Transformers' own checks find FlashAttention."""
    pytest.importorskip("transformers")
    from tests.support.transformers_models import DEFINITION, decoder, generated, logits, padded, tokens

    ids = tokens(3, 19).cuda()
    mask = torch.ones_like(ids) if side is None else padded(3, 19, [19, 11, 4], side).cuda()
    models = [decoder("mistral", dtype).cuda() for dtype in (torch.float64, torch.bfloat16)]
    wanted, plain = (logits(model, DEFINITION, input_ids=ids, attention_mask=mask)[mask.bool()] for model in models)
    before = anyattn.replaced().taken
    with anyattn.replace_flash_attention():
        got = logits(models[1], "flash_attention_2", input_ids=ids, attention_mask=mask)[mask.bool()]
        assert generated(models[1], "flash_attention_2", ids, mask if side != "right" else None).shape == (3, 31)
    assert anyattn.replaced().taken > before
    budget.check("logits", *(t.flatten()[None] for t in (got, wanted, plain)))
