"""Tiles of wide heads by architecture, and what the compiler makes of their first products on Hopper."""

from __future__ import annotations

import importlib.util
from collections import Counter
from typing import Any, Literal

import pytest
import torch

import anyattn
from anyattn import masks
from tests.support.triton.pinned import judged_with_the_pinned_triton

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

Found = list[tuple[str, tuple[int, int], bool]]


def kernels(
    capability: tuple[int, int], d: int, is_one: bool = False, deterministic: Literal["batch"] | None = None, **options: int
) -> list[Any]:
    """The launches (``ahead.Launch``) of both passes that multiply tiles."""
    from tests.support.triton import ahead

    q, k = (torch.zeros(1, h, 256, d, dtype=torch.bfloat16, requires_grad=True) for h in (4, 2))
    v = k[..., :512] if is_one else torch.zeros(1, 2, 256, min(d, 512), dtype=torch.bfloat16, requires_grad=True)
    with ahead.on(capability) as launches:
        more: dict[str, Any] = {"backend": "triton", "kernel_options": options, "deterministic": deterministic}
        out = anyattn.flex_attention(q, k, v, mask_mod=masks.causal(), enable_gqa=True, **more)
        torch.autograd.grad(out, (q, k) if is_one else (q, k, v), torch.zeros_like(out))
    return [launch for launch in launches if "IS_DIVIDED" in launch.options]


def launched(*given: Any, **more: Any) -> Found:
    """(kernel, tile, whether first products are divided) of ``kernels``."""
    found = []
    for launch in kernels(*given, **more):
        o = launch.options
        name = "forward" if "HAS_LSE" in o else "dq" if "HAS_DQ" in o else "dk" if o["HAS_DK"] else "dv"
        found.append((name, (o["TILE_M"], o["TILE_N"]), o["IS_DIVIDED"]))
    return found


@pytest.mark.parametrize("d", [512, 576])
def test_hopper_divides_products_of_64_rows(d: int) -> None:
    apart = [("forward", (64, 64), False), ("dq", (64, 16), True), ("dk", (32, 32), False), ("dv", (32, 64), True)]
    assert launched((9, 0), d) == apart
    shared = [("forward", (64, 64), True), ("dq", (64, 32), True), ("dk", (32, 64), True), ("dv", (32, 64), True)]
    assert launched((9, 0), d, is_one=True) == shared


@pytest.mark.parametrize("is_one", [False, True])
def test_the_mode_of_every_batch_has_one_forward_kernel_wherever_values_are(is_one: bool) -> None:
    assert launched((9, 0), 512, is_one, deterministic="batch")[0] == ("forward", (64, 32), False)


def test_asked_tiles_are_those_of_every_launch() -> None:
    assert launched((9, 0), 512, tile_m=32, tile_n=32) == [(name, (32, 32), False) for name in ("forward", "dq", "dk", "dv")]


@pytest.mark.parametrize(("capability", "d"), [((8, 0), 512), ((10, 0), 512), ((9, 0), 256)])
def test_no_other_products_are_divided(capability: tuple[int, int], d: int) -> None:
    found = launched(capability, d)
    assert len(found) >= 3 and not any(is_divided for _, _, is_divided in found)


def compiled(is_one: bool) -> list[bytes]:
    """The machine code of both passes' products at D 512."""
    from tests.support.triton import ahead

    launches = kernels((9, 0), 512, is_one)
    return [ahead.compiled(launch, (9, 0)).asm["cubin"] for launch in launches]


@judged_with_the_pinned_triton
def test_each_warp_group_computes_half_of_the_scores() -> None:
    """32 products of 32 columns for 64 keys, where both groups would compute all of them by 64; a group has half of the output."""
    from tests.support.triton import ahead

    loops = [Counter(op for op in ops if "HGMMA" in op) for ops in ahead.machine_loops(compiled(is_one=True)[0])]
    counts = [{op.split(".")[1]: n for op, n in loop.items()} for loop in loops if loop]
    assert counts and all(count == {"64x32x16": 32, "64x256x16": 4} for count in counts), counts


@judged_with_the_pinned_triton
@pytest.mark.parametrize("is_one", [False, True])
def test_products_do_not_wait_for_one_another(is_one: bool) -> None:
    """ptxas makes each wait for the one before where it finds that something else writes to their registers meanwhile."""
    from tests.support.triton import ahead

    found = [ahead.products_and_waits(cubin) for cubin in compiled(is_one)]
    assert any(products for products, _ in found) and all(waits * 8 <= products for products, waits in found), found
