"""The operator of calls with ``skip_below``: in compiled and exported graphs, under dispatch modes and ``torch.func``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import anyattn
from anyattn import AuxRequest
from tests.custom_ops.test_reductions import same
from tests.support.compiling import fresh

OPTIONS = {"tile_m": 32, "tile_n": 16}


def operands() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, and the bias of each head; keys 0 to 15 have scores far above all others."""
    g = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(2, 4, 70, 16, generator=g), torch.randn(2, 2, 90, 16, generator=g), torch.randn(2, 2, 90, 16, generator=g)
    q[..., 0], k[..., 0] = 4.0, 0.0
    k[:, :, :16, 0] = 8.0
    return q, k, v, torch.linspace(-0.01, 0.01, 4)


def attended(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, below: Any, **more: Any) -> tuple[Tensor, Any]:
    request = AuxRequest(lse=True, max_scores=True, skipped=True, **more)
    return anyattn.flex_attention(
        q, k, v, lambda s, b, h, i, j: s + bias[h] * i, mask_mod=lambda b, h, i, j: i + 60 >= j, enable_gqa=True, return_aux=request,
        kernel_options=OPTIONS, skip_below=below,
    )  # type: ignore[no-any-return]  # fmt: skip


THRESHOLDS: dict[str, Callable[[], Any]] = {
    "a number": lambda: 1e-2,
    "0": lambda: 0.0,
    "of each head": lambda: torch.tensor([1e-2, 0.0, 0.5, 1e-2]),
}


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("name", THRESHOLDS)
def test_compiled_calls_give_the_eager_results(name: str, backend: str) -> None:
    given, below = operands(), THRESHOLDS[name]()
    wanted = attended(*given, below)
    assert bool((wanted[1].skipped > 0).any()) is (name != "0")
    compiled, graphs = fresh(attended, backend)
    same(compiled(*given, below), wanted)
    assert graphs.frame_count == 1


def test_thresholds_on_the_device_change_between_calls_of_one_graph() -> None:
    given = operands()
    compiled, graphs = fresh(lambda below: attended(*given, below))
    for size in (0.0, 1e-3, 0.3):
        below = torch.full((4,), size)
        same(compiled(below), attended(*given, below))
    assert graphs.frame_count == 1


def test_reductions_beside_skipped_tiles() -> None:
    given = operands()
    compiled, _ = fresh(attended)
    same(compiled(*given, 1e-2, key_sums=True, block_max=(16, 16)), attended(*given, 1e-2, key_sums=True, block_max=(16, 16)))


def test_calls_with_block_masks() -> None:
    mask = anyattn.create_block_mask(lambda b, h, i, j: (i - j).abs() < 40, None, None, 70, 90, device="cpu", BLOCK_SIZE=16)

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return anyattn.flex_attention(q, k, v, block_mask=mask, enable_gqa=True, skip_below=0.1) + 1

    given = operands()[:3]
    assert torch.equal(fresh(f)[0](*given), f(*given))


def test_chosen_blocks_with_sums_at_the_choice() -> None:
    """A layer as it is trained: the choice, the mask of it, the sums at the chosen blocks, and tiles left out, in one graph."""

    def layer(q: Tensor, k: Tensor, v: Tensor, indices: Tensor) -> tuple[Tensor, Any]:
        mask = anyattn.BlockMask.from_topk(indices, BLOCK_SIZE=16, seq_lengths=(70, 90), causal=True)
        request = AuxRequest(listed_sums=(indices, (16, 16)), skipped=True)
        return anyattn.flex_attention(q, k, v, block_mask=mask, enable_gqa=True, return_aux=request, skip_below=1e-3)  # type: ignore[no-any-return]

    given = operands()[:3]
    compiled, graphs = fresh(layer)
    for seed in range(3):
        indices = torch.randint(-1, 6, (2, 2, 5, 3), generator=torch.Generator().manual_seed(seed))
        same(compiled(*given, indices), layer(*given, indices))
    assert graphs.frame_count == 1


def test_a_graph_without_a_threshold_is_what_it_was() -> None:
    """0 is no threshold: the operator is ``anyattn::attend``."""

    def f(q: Tensor, k: Tensor, v: Tensor, below: Any) -> Tensor:
        return anyattn.flex_attention(q, k, v, enable_gqa=True, skip_below=below)

    class Model(torch.nn.Module):
        def __init__(self, below: Any) -> None:
            super().__init__()
            self.below = below

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return f(q, k, v, self.below)

    given, names = operands()[:3], []
    for below in (None, 0.0, 0.1):
        exported = torch.export.export(Model(below), given)
        names.append([str(n.target) for n in exported.graph.nodes if "anyattn" in str(n.target)])
        assert torch.equal(exported.module()(*given), f(*given, below))
    assert names == [["anyattn.attend.default"]] * 2 + [["anyattn.attend_skipping.default"]]


def test_gradients_are_refused() -> None:
    q, k, v, bias = operands()
    f = fresh(attended)[0]
    for wanting in ((q.clone().requires_grad_(), k, v, bias), (q, k, v, bias.clone().requires_grad_())):
        for call in (attended, f):
            with pytest.raises(Exception, match=r"skip_below is given and an input requires grad.*torch\.no_grad"):
                call(*wanting, 1e-2)
            with torch.no_grad():
                assert not call(*wanting, 1e-2)[0].requires_grad


def test_wrong_thresholds_are_named() -> None:
    given = operands()
    for below in (-1.0, 2.0, torch.zeros(3), torch.zeros(4, dtype=torch.float64)):
        with pytest.raises(Exception, match=r"skip_below.*wanted"):
            fresh(attended)[0](*given, below)


def test_dispatch_modes_fake_tensors_and_functions() -> None:
    given = operands()
    wanted = attended(*given, 1e-2)
    counter = FlopCounterMode(display=False)
    with counter:
        same(attended(*given, 1e-2), wanted)
    assert counter.get_total_flops() == 2 * 2 * 4 * 70 * 90 * 32
    with torch._subclasses.FakeTensorMode() as mode:
        out, aux = attended(*(mode.from_tensor(t) for t in given), 1e-2)
    assert (out.shape, aux.skipped.shape, aux.lse.shape) == (wanted[0].shape, (2, 4), (2, 4, 70))

    def beside(x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        out, aux = attended(*given, 1e-2)
        return x.sum(), (out, aux.skipped)

    _, (out, skipped) = torch.func.grad(beside, has_aux=True)(torch.ones(2))
    assert torch.equal(out, wanted[0]) and torch.equal(skipped, wanted[1].skipped)
    with pytest.raises(ValueError, match="no gradients"):
        torch.func.grad(lambda q: attended(q, *given[1:], 1e-2)[0].sum())(given[0])


def test_the_operator_keeps_its_contract() -> None:
    from anyattn.custom_ops import skipping

    noted: list[tuple] = []
    q, k, v, _ = operands()
    with pytest.MonkeyPatch.context() as patch, torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        patch.setattr(skipping, "called", lambda *records: noted.append(records) or (q, q, q, q))
        anyattn.flex_attention(q, k, v, enable_gqa=True, skip_below=0.1)
    ((operator, of_call, of_skip),) = noted
    torch.library.opcheck(operator, (*of_call[:4], *of_call.score, *of_call.masks, *of_call[6:], torch.full((4,), 0.1), True))
    assert isinstance(of_skip.skip_below, Tensor)
