"""Calls with a threshold on the Hopper backend: their kernels' configs, their launches, and the comparison that skips a tile."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import anyattn
from anyattn import AuxRequest, masks, scores
from anyattn.backends.hopper.config import Config, Tiles
from anyattn.backends.hopper.make_config import forward_spec
from anyattn.backends.hopper.plan import reason_against
from anyattn.mods.dropout import Seeded, dropout_of
from anyattn.mods.tracing.trace import trace
from anyattn.problem import Problem, Skip
from tests.support.hopper.pretended import Launch
from tests.support.hopper.role_source import compiled
from tests.support.skipping import kept_pairs, tiered

SKIP = Skip(torch.full((4,), 0.1), None)


def problem(d: int = 64, **changes: Any) -> Problem:
    q = torch.zeros(1, 4, 256, d, dtype=torch.bfloat16)
    return Problem(**({"q": q, "k": q, "v": q, "scale": 0.1, "skip": SKIP} | changes))


def test_what_the_kernel_takes_and_what_it_leaves_to_others() -> None:
    assert reason_against(problem()) is None and reason_against(problem(d=256)) is None
    assert "skip_below" in str(reason_against(problem(d=320))) and reason_against(problem(d=320, skip=None)) is None
    assert anyattn.explain(*[torch.zeros(1, 4, 256, 64, dtype=torch.bfloat16)] * 3, skip_below=0.1).plan.backend != "hopper"  # on a CPU


def test_the_threshold_is_captured_before_the_seed() -> None:
    dropout = dropout_of(Seeded(torch.tensor([5, -6], dtype=torch.int32), 0.4))
    assert dropout is not None
    counts = torch.zeros(1, 4, 2, dtype=torch.int32)
    for given, wanted in (
        (problem(), (SKIP.below,)),
        (problem(skip=Skip(SKIP.below, counts)), (SKIP.below, counts)),
        (problem(skip=Skip(SKIP.below, counts), dropout=dropout), (SKIP.below, counts, dropout.captured[1][0])),
    ):
        spec = forward_spec(given)
        _, tensors = spec.captured(given)
        assert len(tensors) == len(wanted) and all(a is b for a, b in zip(tensors, wanted, strict=True))
        assert spec.config.has_skip and spec.config.counts_skips is (len(wanted) > 1)


def test_bounded_scores_keep_their_maxima() -> None:
    capped = trace(lambda s, b, h, i, j: 20.0 * torch.tanh(s / 20.0), "score")
    bounded, compared = (problem(score=capped, skip=skip) for skip in (None, SKIP))
    assert forward_spec(bounded).config_for(bounded).is_bounded and not forward_spec(compared).config_for(compared).is_bounded


def test_documents_are_not_run_as_sequences(launched: list[Launch]) -> None:
    ids = torch.arange(512) // 100
    q = torch.zeros(1, 4, 512, 64, dtype=torch.bfloat16)
    lists = anyattn.create_block_mask(masks.document(ids) & masks.causal(), None, None, 512, 512, device="cpu")
    for below in (None, 0.1):
        launched.clear()
        anyattn.flex_attention(q, q, q, block_mask=lists, skip_below=below, backend="hopper")
        assert any(config.has_entries for config, _ in launched if isinstance(config, Config)) is (below is None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head_dim": 512, "head_dim_v": 512, "tiles": Tiles(64, 64, 1, False)}, "has_skip at head_dim 512"),
        ({"has_entries": True, "has_order": True}, "has_skip at head_dim 128"),
        ({"has_skip": False, "counts_skips": True}, "counts_skips without has_skip"),
    ],
    ids=["wide", "entries", "counts"],
)
def test_configs_that_no_kernel_has(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Config(**({"head_dim": 128, "head_dim_v": 128, "is_bf16": True, "tiles": Tiles(128, 128, 2), "has_skip": True} | changes))


@pytest.mark.parametrize("counts", [False, True], ids=["plain", "counted"])
def test_calls_launch_again_with_their_own_thresholds(counts: bool, launched: list[Launch]) -> None:
    q = torch.zeros(1, 4, 256, 64, dtype=torch.bfloat16)
    below = [torch.full((4,), x) for x in (0.1, 0.2)]

    def call(t: Any) -> Any:
        given = {"mask_mod": masks.causal(), "score_mod": scores.softcap(3.0), "backend": "hopper"}
        return anyattn.flex_attention(q, q, q, skip_below=t, return_aux=AuxRequest(skipped=counts), **given)

    for t in (*below, below[0]):
        call(t)
        config, arguments = launched[-1]
        assert config.has_skip and config.counts_skips is counts
        captured = arguments[-1]
        assert [x.data_ptr() for x in captured[: 1 if not counts else -1]] == [t.data_ptr()]
        assert not counts or (captured[-1].shape, captured[-1].dtype) == ((1, 4, 2), torch.int32)
    call(0.0)
    assert launched[-1][0].has_skip is counts


class _Kernel:
    """``MultipliesSkipping`` of one thread with two rows, as Python."""

    def __init__(self) -> None:
        number = SimpleNamespace(inf=math.inf)
        fmax = lambda a, b: b if math.isnan(a) else a if math.isnan(b) else max(a, b)
        names: dict[str, Any] = {
            "Multiplies": object, "Boolean": bool, "Float32": number, "const_expr": bool, "rows_and_columns": lambda x: x,
            "cute": SimpleNamespace(size=lambda x: len(x), arch=SimpleNamespace(fmax=fmax)), "NamedTuple": tuple,
        }  # fmt: skip
        exec(*compiled(("skipping/mma",))[0], names)
        self.kernel = names["MultipliesSkipping"]()
        self.kernel.highest_of = lambda s, r, lifts, held: max(s[r]) + (0.0 if lifts is None else lifts[r])
        self.tops = SimpleNamespace(rows=[-math.inf, -math.inf], of_tile=[0.0, 0.0], below=[-3.0])

    def is_low(self, *rows: list[float], rate: float = 1.0) -> bool:
        return bool(self.kernel._are_low(self.tops, rows, None, rate))


def test_a_tile_is_low_if_all_of_its_rows_are() -> None:
    made = _Kernel()
    assert not made.is_low([5.0], [1.0])  # nothing came before
    assert made.is_low([1.9, -math.inf], [-math.inf]) and made.tops.rows == [5.0, 1.0]
    assert not made.is_low([2.0], [-9.0]) and not made.is_low([-9.0], [-2.0])  # below, and not at the threshold
    assert made.is_low([3.0], [-1.0], rate=2.0)
    assert not made.is_low([-9.0], [4.0]) and made.tops.rows == [5.0, 4.0]


def test_rows_that_see_nothing_keep_a_tile_and_rows_that_are_not_stored_do_not() -> None:
    made = _Kernel()
    assert not made.is_low([5.0], [-math.inf])
    assert not made.is_low([-9.0], [-math.inf])
    made.tops.rows = [5.0, math.inf]
    assert made.is_low([-9.0], [100.0]) and made.is_low([-9.0], [-math.inf])
    made.tops.below[0] = -math.inf  # a threshold of 0
    assert not made.is_low([-9.0], [-math.inf])


def test_the_reference_of_the_gpu_suite_skips_what_is_low_alone() -> None:
    q, k, _ = tiered(1, 2, 1, 200, 300, 16, torch.float32, low=0.5)
    found = q.double() @ k.double().repeat_interleave(2, 1).mT / 4
    visible = torch.ones(2, 200, 300, dtype=torch.bool)
    kept, share = kept_pairs(found, torch.tensor([1e-3, 0.0]), visible, 2, (128, 64, 1))
    assert kept[:, 1].all() and share[0, 1] == 0 and 0 < share[0, 0] < 1
    hidden = ~kept[0, 0]
    assert (found[0, 0].masked_fill(~hidden, -torch.inf).amax(-1) < found[0, 0].amax(-1) + math.log(1e-3)).all()
    assert bool(hidden.any()) and not hidden[:, 256:].any()  # the last key tile is visited first
