"""The Hopper backward kernel on a GPU, judged by the budget against the fp64 oracle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import anyattn
from anyattn import hardware, masks
from tests.support.gpu import judging
from tests.support.gpu.judging import DEVICE, judge, qkv, random

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]  # a kernel that hangs is a failure
judging.needs_the_backend(only="hopper")

RERUNS = 300 if judging.MODE == "gpu" else 2
MASKS: dict[str, Any] = {
    "full": None,
    "causal": masks.causal(),
    "offset": masks.causal(33),
    "window": masks.sliding_window(100, 7),
    "left": masks.sliding_window(100, None),
    "prefix": masks.prefix_lm(150),
    "sinks": masks.sink_window(4, 90),
    "dilated": masks.dilated(3, 200),
    "blind": lambda b, h, i, j: (i >= j) & (i % 5 != 0),
    "by head": lambda b, h, i, j: i >= j + 3 * h,
}
SLOPES, TABLE = random(4), random(4, 99)
SCORES: dict[str, Any] = {
    "softcap": lambda s, b, h, i, j: 20 * torch.tanh(s / 20),
    "square": lambda s, b, h, i, j: s * s * 0.1,
    "alibi": judging.Capturing(lambda to: (lambda t: lambda s, b, h, i, j: s - t[h].abs() * (i - j).abs() * 0.01)(to(SLOPES))),
    "relative": judging.Capturing(lambda to: (lambda t: lambda s, b, h, i, j: s + t[h, torch.clamp(i - j, -49, 49) + 49])(to(TABLE))),
}


@pytest.fixture(autouse=True)
def _finished() -> Iterator[None]:
    yield
    if judging.MODE == "gpu":
        torch.cuda.synchronize()


def backed(*given: Any, **options: Any) -> None:
    judge(*given, backward=True, **options)


def test_first_one_tile() -> None:
    """The smallest case, to be run before all others: one tile of keys, one row tile."""
    backed(qkv(1, 1, 1, sq=64, sk=128, d=64))


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", judging.KINDS)
@pytest.mark.parametrize("name", ["full", "causal"])
def test_dense(name: str, kind: str, dtype: torch.dtype, d: int) -> None:
    backed(qkv(2, 4, 2, sq=300, sk=333, d=d, dtype=dtype, kind=kind), mask=MASKS[name])


@pytest.mark.parametrize(("sq", "sk"), [(1, 1), (1, 400), (63, 127), (64, 128), (65, 129), (257, 31), (1025, 1025), (2048, 2048)])
@pytest.mark.parametrize("name", ["full", "causal", "window"])
def test_lengths(name: str, sq: int, sk: int) -> None:
    backed(qkv(1, 4, 2, sq=sq, sk=sk, d=128), mask=MASKS[name])


@pytest.mark.parametrize(("d", "dv"), [(8, 8), (40, 40), (72, 72), (80, 80), (96, 96), (128, 64), (64, 128), (120, 88)])
def test_head_dims(d: int, dv: int) -> None:
    backed(qkv(1, 4, 2, d=d, dv=dv), mask=masks.causal(33))


@pytest.mark.parametrize(("d", "dv"), [(64, 64), (96, 96), (128, 128), (128, 64), (64, 128), (192, 128), (192, 192), (256, 256)])
@pytest.mark.parametrize("name", ["full", "causal", "offset", "window", "sinks", "blind", "by head"])
def test_keys_of_one_tile(name: str, d: int, dv: int) -> None:
    """dQ has no sums. Where warp groups share keys, a tile has 64."""
    backed(qkv(2, 6, 2, sq=333, sk=100 if max(d, dv) <= 128 else 60, d=d, dv=dv), mask=MASKS[name])


def test_keys_of_one_wide_tile() -> None:
    """Without predicates, a tile has 128 keys also at head dimension 192 with 128."""
    backed(qkv(2, 6, 2, sq=333, sk=100, d=192, dv=128), mask=MASKS["causal"])


@pytest.mark.parametrize(("sq", "sk"), [(1, 1), (5, 128), (64, 64), (257, 127), (4096, 128)])
@pytest.mark.parametrize("kind", judging.KINDS)
def test_lengths_with_keys_of_one_tile(kind: str, sq: int, sk: int) -> None:
    for d, keys in ((72, sk), (248, min(sk, 64))):
        backed(qkv(1, 4, 4, sq=sq, sk=keys, d=d, dtype=torch.float16, kind=kind), mask=masks.causal(keys - sq))


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("mask", ["full", "causal", "blind"])
def test_score_mods_with_keys_of_one_tile(mask: str, name: str) -> None:
    backed(qkv(2, 4, 2, sq=300, sk=128), score=SCORES[name], mask=MASKS[mask], deterministic=True)


@judging.on_the_gpu_alone
@pytest.mark.parametrize("d", [64, 256])
def test_reruns_with_keys_of_one_tile_agree_bitwise(d: int) -> None:
    """By default too: nothing is added."""
    leaves = [t.detach().requires_grad_() for t in qkv(2, 8, 4, sq=1025, sk=64, d=d)]
    dout = random(2, 8, 1025, d, seed=1).to(leaves[0])
    out = anyattn.flex_attention(*leaves, mask_mod=MASKS["offset"], enable_gqa=True, backend="hopper")
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    for _ in range(RERUNS):
        again = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        assert all(map(torch.equal, first, again))


@judging.on_the_gpu_alone
@pytest.mark.parametrize("name", ["full", "causal"])
def test_surroundings_of_rows_with_keys_of_one_tile(name: str) -> None:
    for d in (64, 136):
        tensors = [judging.surrounded(t) for t in qkv(1, 4, 2, sq=130, sk=60, d=d)]
        backed(tensors, meant=[t.clone() for t in tensors], mask=MASKS[name])


WIDE = [
    (136, 136),
    (192, 128),
    (128, 192),
    (192, 64),
    (104, 136),
    (160, 96),
    (192, 192),
    (256, 256),
    (256, 64),
    (64, 256),
    (248, 40),
    (256, 192),
]


def test_first_one_wide_tile() -> None:
    """The smallest wide cases: one tile of keys, one row tile; columns in whole patterns of 64, then in patterns of 32."""
    for d, dv in ((256, 256), (192, 128)):
        backed(qkv(1, 1, 1, sq=64, sk=64, d=d, dv=dv))


@pytest.mark.parametrize(("d", "dv"), WIDE)
@pytest.mark.parametrize("name", ["full", "causal"])
def test_wide_heads(name: str, d: int, dv: int) -> None:
    backed(qkv(2, 6, 2, sq=300, sk=333, d=d, dv=dv), mask=MASKS[name])


@pytest.mark.parametrize("kind", judging.KINDS)
@pytest.mark.parametrize(("d", "dv"), [(192, 128), (256, 256)])
def test_wide_heads_in_float16(kind: str, d: int, dv: int) -> None:
    backed(qkv(2, 4, 2, sq=300, sk=333, d=d, dv=dv, dtype=torch.float16, kind=kind), mask=masks.causal())


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_wide_heads(name: str) -> None:
    backed(qkv(2, 4, 2, sq=600, sk=700, d=192, dv=128), mask=MASKS[name])


@pytest.mark.parametrize(("d", "dv"), [(192, 128), (256, 256)])
@pytest.mark.parametrize(("sq", "sk"), [(1, 1), (1, 400), (63, 65), (257, 31), (1025, 1025), (2048, 2048)])
def test_lengths_of_wide_heads(sq: int, sk: int, d: int, dv: int) -> None:
    backed(qkv(1, 4, 2, sq=sq, sk=sk, d=d, dv=dv), mask=masks.causal())


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(("mask", "d", "dv"), [("causal", 256, 256), ("blind", 192, 128)])
def test_score_mods_of_wide_heads(mask: str, d: int, dv: int, score: str) -> None:
    backed(qkv(2, 4, 2, sq=300, sk=333, d=d, dv=dv), score=SCORES[score], mask=MASKS[mask])


@pytest.mark.parametrize("tile", [64, 128, 256])
def test_block_masks_of_wide_heads(tile: int) -> None:
    mask = masks.prefix_lm(150)
    block_mask = anyattn.create_block_mask(mask, None, None, 600, 700, device=DEVICE, BLOCK_SIZE=tile)
    backed(qkv(2, 4, 2, sq=600, sk=700, d=192, dv=128), mask=mask, block_mask=block_mask)


@pytest.mark.parametrize("is_fixed", [False, True], ids=["any order", "deterministic"])
@pytest.mark.parametrize("ratio", [1, 3, 8])
def test_grouped_heads(ratio: int, is_fixed: bool) -> None:
    backed(qkv(2, 2 * ratio, 2, sq=500, sk=500), mask=masks.causal(), deterministic=is_fixed)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, d: int) -> None:
    backed(qkv(2, 4, 2, sq=600, sk=700, d=d), mask=MASKS[name])


@pytest.mark.parametrize("tile", [64, 128, 256])
def test_block_masks(tile: int) -> None:
    mask = masks.prefix_lm(150)
    block_mask = anyattn.create_block_mask(mask, None, None, 600, 700, device=DEVICE, BLOCK_SIZE=tile)
    backed(qkv(2, 4, 2, sq=600, sk=700), mask=mask, block_mask=block_mask)


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("mask", ["full", "causal", "blind"])
def test_score_mods(name: str, mask: str) -> None:
    backed(qkv(2, 4, 2, sq=300, sk=333), score=SCORES[name], mask=MASKS[mask])


def test_sinks_and_scale() -> None:
    backed(qkv(2, 4, 2), sink=random(4), scale=0.3, mask=masks.causal())


@judging.on_the_gpu_alone
def test_gradients_of_the_sink_and_through_the_log_sum_exp() -> None:
    """Against Triton's, which the budget has judged: the same terms by another kernel."""
    found = []
    for backend in ("hopper", "triton"):
        leaves = [t.detach().requires_grad_() for t in qkv(1, 4, 2, sq=500, sk=500)]
        sink = random(4).to(DEVICE).requires_grad_()
        out, lse = anyattn.flex_attention(*leaves, sink=sink, return_lse=True, enable_gqa=True, backend=backend)
        given = random(*out.shape, seed=1).to(out), random(*lse.shape, seed=2).to(lse)
        found.append([t.float() for t in torch.autograd.grad((out, lse), [*leaves, sink], given)])
    for own, other in zip(*found, strict=True):
        assert (own - other).norm() <= 2**-7 * other.norm()


@judging.on_the_gpu_alone
@pytest.mark.parametrize(("d", "dv"), [(64, 64), (192, 128), (192, 192), (256, 256)])
@pytest.mark.parametrize("name", ["full", "causal", "window"])
def test_deterministic_reruns_agree_bitwise(name: str, d: int, dv: int) -> None:
    leaves = [t.detach().requires_grad_() for t in qkv(2, 8, 4, sq=1025, sk=1025, d=d, dv=dv)]
    dout = random(2, 8, 1025, dv, seed=1).to(leaves[0])

    def gradients() -> tuple[torch.Tensor, ...]:
        options = {"enable_gqa": True, "backend": "hopper", "deterministic": True, "mask_mod": MASKS[name]}
        return torch.autograd.grad(anyattn.flex_attention(*leaves, **options), leaves, dout)

    first = gradients()
    for _ in range(RERUNS):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(), strict=True))


@judging.on_the_gpu_alone
@pytest.mark.parametrize("kv_heads", [16, 4])
@pytest.mark.parametrize("name", ["full", "causal", "window"])
def test_deterministic_reruns_of_many_tiles_agree_bitwise(name: str, kv_heads: int) -> None:
    """With every multiprocessor at work, and tiles that wait for one another all the time."""
    leaves = [t.detach().requires_grad_() for t in qkv(2, 16, kv_heads, sq=8192, sk=8192, d=128)]
    dout = random(2, 16, 8192, 128, seed=1).to(leaves[0])
    options = {"backend": "hopper", "deterministic": True, "mask_mod": MASKS[name], "enable_gqa": True}
    out = anyattn.flex_attention(*leaves, **options)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    for _ in range(RERUNS):
        again = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@judging.on_the_gpu_alone
@pytest.mark.parametrize(("d", "dv"), [(64, 64), (136, 136), (160, 96), (256, 192)])
def test_surroundings_are_neither_read_nor_written(d: int, dv: int) -> None:
    tensors = [judging.surrounded(t) for t in qkv(1, 4, 2, sq=130, sk=150, d=d, dv=dv)]
    backed(tensors, meant=[t.clone() for t in tensors], mask=masks.causal())


@pytest.mark.parametrize("d", [64, 256])
def test_the_plan_says_so(d: int) -> None:
    if judging.MODE == "cpu":
        pytest.skip("about the hopper backend")
    leaves = [t.requires_grad_() for t in qkv(1, 4, 2, d=d)]
    assert hardware.of(leaves[0].device.type).capability == (9, 0)
    plan = anyattn.explain(*leaves, enable_gqa=True, backend="hopper").plan
    assert plan.backward == "hopper"


@judging.on_the_gpu_alone
@pytest.mark.parametrize("d", [64, 128, 256])
def test_the_only_key_of_a_row_weighs_one_under_a_cap(d: int) -> None:
    """The kernel without row maxima divides rounded weights by their own sum: out is V's row, dv dout's, and dq nothing but noise."""
    q, k, v, dout = (torch.randn(2, 4, 300, d, dtype=torch.bfloat16, device=DEVICE) for _ in range(4))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    for cap in (lambda s, b, h, i, j: 50.0 * torch.tanh(s / 50.0), lambda s, b, h, i, j: torch.cos(s * 0.3)):
        out = anyattn.flex_attention(*leaves, cap, mask_mod=lambda b, h, i, j: i == j)
        dq, _, dv = torch.autograd.grad(out, leaves, dout)
        assert torch.equal(out, v) and torch.equal(dv, dout)
        assert float(dq.abs().max()) < 1e-4
