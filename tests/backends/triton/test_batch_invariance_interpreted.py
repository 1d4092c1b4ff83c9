"""``deterministic="batch"`` by the Triton backend, in Triton's interpreter on the CPU: random batches, and a program for each section.

Run by test_in_the_interpreter.py, for the interpreter has to be chosen before Triton is imported.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import anyattn
from anyattn import BackendError, masks, planner
from anyattn.backends.triton import launch_shape
from anyattn.call_cache import attention
from tests.entry_points.test_batch_invariance import (  # noqa: F401
    MODE,
    test_a_cache_that_is_appended_to,
    test_a_neighbour_that_grows,
    test_a_sequence_without_keys_beside_others,
    test_block_lists_that_do_not_follow_from_a_mask,
    test_dense_varlen_lists_and_mods_agree,
    test_eight_bits_in_pages_and_not,
    test_every_chunking_of_a_prefill,
    test_inside_the_context_every_call_is_in_the_mode,
    test_lists_of_sequences_shorter_than_a_block,
    test_random_batches,
    test_the_default_is_not_invariant,
    test_training_gives_the_bits_of_serving,
)
from tests.support import batches


@pytest.fixture(autouse=True)
def short_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few hundred keys are several sections."""
    monkeypatch.setattr(launch_shape, "SECTION", 128)


def _as_if(monkeypatch: pytest.MonkeyPatch, processors: int) -> None:
    machine = planner.machines.of
    monkeypatch.setattr(planner.machines, "of", lambda kind: replace(machine(kind), sm_count=processors))
    attention.clear()


@pytest.mark.parametrize("name", batches.OPTIONS)
def test_a_program_for_each_section(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of one program that visits all sections: with a program for each, for the first sequence alone and among others."""
    g = torch.Generator().manual_seed(3)
    batch = [batches.draw(g, n, (4, 2), (32, 32), torch.bfloat16) for n in (300, 140)]
    call = {**batches.OPTIONS[name](4, g), **MODE}
    out, lse = batches.alone(batch[0], call)
    _as_if(monkeypatch, 1000)
    plan = planner.choose
    divided = []
    monkeypatch.setattr(planner, "choose", lambda *given: divided.append(plan(*given)) or divided[-1])
    for way in batches.ways(g, batch, call):
        assert torch.equal(way.out, out[way.rows]), way.name
        assert torch.equal(way.lse, lse[:, way.rows]), way.name
    assert max(p.num_splits for p in divided) > 1


@pytest.mark.parametrize("processors", [1, 1000])
def test_maxima_that_lag_behind(processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is subtracted may be less than the greatest score, which is told all the same."""
    _as_if(monkeypatch, processors)
    g = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(1, heads, 300, 32, generator=g) for heads in (4, 2, 2))
    k = k * torch.linspace(0.1, 30, 300)[:, None]
    aux, cap = anyattn.AuxRequest(lse=True, max_scores=True), lambda s, b, h, i, j: 20 * torch.tanh(s / 20)
    for mask, score in ((masks.causal(), None), (masks.sliding_window(40, 9), cap), (None, cap)):
        options = {"mask_mod": mask, "score_mod": score, "enable_gqa": True, "return_aux": aux}
        out, found = anyattn.flex_attention(q, k, v, **options, **MODE)
        exact, wanted = anyattn.flex_attention(q.double(), k.double(), v.double(), backend="torch", **options)
        top = wanted.max_scores
        assert bool(((found.max_scores - top).abs() <= 2.0**-16 * (1 + top.abs())).all())
        assert bool(((found.lse - wanted.lse).abs() <= 2.0**-16 * (1 + top.abs())).all())
        assert bool(((out - exact).abs() <= 2.0**-16 * (1 + top.abs().amax()) * v.abs().max()).all())


def test_rows_of_no_sequence_with_a_program_for_each_section(monkeypatch: pytest.MonkeyPatch) -> None:
    _as_if(monkeypatch, 1000)
    g = torch.Generator().manual_seed(4)
    own = batches.draw(g, 300, (4, 2), (32, 32), torch.float32)
    ends, used = torch.tensor([0, 300]), torch.tensor([290])
    more: dict[str, Any] = {"causal": True, "return_lse": True, "sink": torch.randn(4), **MODE}
    out, lse = anyattn.flash_attn_varlen_func(own.q[0], own.k[0], own.v[0], ends, ends, seqused_q=used, seqused_k=used, **more)
    assert (out[290:] == 0).all()
    assert (lse[:, 290:] == -torch.inf).all()
    assert (out[:290] != 0).any()


def test_lists_of_other_blocks_are_refused() -> None:
    q = torch.randn(1, 2, 300, 32)
    lists = anyattn.BlockMask.from_topk(torch.zeros(1, 2, 10, 1, dtype=torch.int32), BLOCK_SIZE=(32, 24), seq_lengths=(300, 300))
    with pytest.raises(BackendError, match=r"its tiles have 64 keys, and the block lists' have 24: make them with blocks of a multiple"):
        anyattn.flex_attention(q, q, q, block_mask=lists, **MODE)


@pytest.mark.parametrize("length", [40, 100])
def test_lists_of_a_block_that_the_keys_do_not_fill(length: int) -> None:
    """They give the bits of the mask without lists."""
    mask = lambda b, h, i, j: (i * 3 + j * 5) % 7 != 0
    q, k, v = torch.randn(3, 1, 2, length, 32)
    lists = anyattn.create_block_mask(mask, None, None, length, length, device="cpu")
    found = [anyattn.flex_attention(q, k, v, **how, **MODE) for how in ({"block_mask": lists}, {"mask_mod": mask})]
    assert torch.equal(*found)
