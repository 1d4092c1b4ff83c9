"""Masks that are no bands: lists of tiles, brought along or made for the call, and what is asked inside partial tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn import masks, scores
from tests.support.gpu import judging
from tests.support.gpu.judging import DEVICE, KINDS, Capturing, both, hole, judge, qkv, random, same

pytestmark = pytest.mark.gpu
judging.needs_the_backend()

SQ, SK = 450, 500
_g = torch.Generator().manual_seed(11)
IDS = (torch.rand(2, 700, generator=_g) < 0.008).long().cumsum(1)
PREFIXES = torch.tensor([37, 260])
ALLOWED = torch.rand(4, SQ, SK, generator=_g) < 0.1
KEEP = torch.rand(2, SK, generator=_g) < 0.5
ENDS = torch.randint(0, SK + 1, (SQ,), generator=_g)
KINDS_OF_KEY = torch.randint(0, 3, (2, SK), generator=_g)

BITS = torch.randint(-(2**63), 2**63 - 1, (SQ, -(-SK // 64)), generator=torch.Generator().manual_seed(6))
MASKS: dict[str, Any] = {
    "prefix by entry": Capturing(lambda to: masks.prefix_lm(to(PREFIXES))),
    "document by entry": Capturing(lambda to: masks.document(to(IDS))),
    "causal document": Capturing(lambda to: anyattn.and_masks(masks.causal(), masks.document(to(IDS)))),
    "sink and window": masks.sink_window(4, 100),
    "padding by entry": Capturing(lambda to: (lambda pad: lambda b, h, i, j: (j >= pad[b]) & (j <= i))(to(PREFIXES))),
    "ends by row": Capturing(lambda to: (lambda ends: lambda b, h, i, j: j < ends[i])(to(ENDS))),
    "keys": Capturing(lambda to: (lambda keep: lambda b, h, i, j: keep[b, j])(to(KEEP))),
    "any by head": Capturing(lambda to: (lambda t: lambda b, h, i, j: t[h, i, j])(to(ALLOWED))),
    "by head": lambda b, h, i, j: torch.where(h > 1, (j - i).abs() > 90, (j > i) & (j < 300)),
    "islands": lambda b, h, i, j: (i >= 150) & (i < 300) & ((j < 200) | (j >= 390) | (h == 0)),
    "nothing": hole(9, 5, 3),
    "one key": hole(498, 500, 502),
    "chunked": masks.chunked(96),
    "dilated": masks.dilated(40, 3),
    "tree": Capturing(lambda to: masks.tree(to(BITS))),
    "three ranges": lambda b, h, i, j: (j < 10) | ((j > 150) & (j < 170)) | ((j > i) & (j < i + 140)),
}


# where a mask's lists differ; the kernel for lists that are made for the call reads these as well
BY_ENTRY = ("prefix by entry", "document by entry", "causal document", "padding by entry", "keys")
BY_HEAD = ("any by head", "by head", "islands")
BY = {name: (2 if name in BY_ENTRY else 1, 4 if name in BY_HEAD else 1) for name in MASKS}


def block_mask(
    mask: Any, tile: Any = 128, by: tuple[int | None, int | None] = (None, None), sq: int = SQ, sk: int = SK, **more: Any
) -> Any:
    return anyattn.create_block_mask(both(mask)[0], *by, sq, sk, device=DEVICE, BLOCK_SIZE=tile, **more)


@pytest.mark.parametrize("name", MASKS)
def test_masks_without_lists(name: str) -> None:
    for kind in KINDS:
        judge(qkv(sq=SQ, sk=SK, kind=kind), mask=MASKS[name], label=kind)


@pytest.mark.parametrize(
    "name", ["prefix by entry", "document by entry", "sink and window", "any by head", "by head", "nothing", "one key"]
)
def test_block_masks(name: str) -> None:
    """Lists that are brought along give what the mask alone gives."""
    inputs, mask = qkv(sq=SQ, sk=SK), MASKS[name]
    alone, listed = judge(inputs, mask=mask), judge(inputs, mask=mask, block_mask=block_mask(mask, by=BY[name]))
    # on Hopper a tile without a mask is computed by a guess, and so does not give the bits of one whose mask shows everything
    assert judging.BACKEND == "hopper" or same(alone, listed)
    judge(qkv(sq=SQ, sk=SK, kind="coded"), mask=mask, block_mask=block_mask(mask, by=BY[name]))


@pytest.mark.parametrize("name", ["document by entry", "by head"])
def test_lists_for_each_entry_and_head(name: str) -> None:
    inputs, mask = qkv(sq=SQ, sk=SK), MASKS[name]
    by_all = judge(inputs, mask=mask, block_mask=block_mask(mask, by=(2, 4)))
    assert same(by_all, judge(inputs, mask=mask, block_mask=block_mask(mask, by=(2, 4))))


def test_lists_without_full_tiles() -> None:
    name = "document by entry"
    lists = block_mask(MASKS[name], by=BY[name], separate_full_blocks=False)
    for kind in ("normal", "coded"):
        judge(qkv(sq=SQ, sk=SK, kind=kind), mask=MASKS[name], block_mask=lists, label=kind)


TILES = [  # with masks that are asked by their values (documents), and by what a row sees
    ((128, 64), "islands"), ((128, 256), "document by entry"), ((128, 256), "sink and window"), ((256, 128), "document by entry"),
    ((384, 128), "islands"), ((64, 64), "document by entry"), ((32, 256), "sink and window"), ((64, 128), "islands"),
    ((128, 16), "document by entry"),
]  # fmt: skip


@pytest.mark.parametrize("tile,name", TILES, ids=str)
def test_tiles_of_lists(tile: tuple[int, int], name: str) -> None:
    """Tiles that the kernel reads as they are, in parts, or joined to larger ones."""
    for kind in KINDS:
        judge(qkv(sq=SQ, sk=SK, kind=kind), mask=MASKS[name], block_mask=block_mask(MASKS[name], tile, BY[name]), label=kind)


@pytest.mark.parametrize(
    "d,name", [(64, "sink and window"), (192, "sink and window"), (256, "document by entry"), (72, "document by entry")]
)
def test_head_dims(d: int, name: str) -> None:
    """The kernel's tiles are parts of the lists'."""
    for kind in ("normal", "coded"):
        judge(qkv(sq=SQ, sk=SK, d=d, kind=kind), mask=MASKS[name], block_mask=block_mask(MASKS[name], by=BY[name]), label=kind)


@pytest.mark.parametrize("name", ["document by entry", "sink and window", "causal document"])
def test_long(name: str) -> None:
    ids = (torch.rand(2, 2311, generator=torch.Generator().manual_seed(2)) < 0.004).long().cumsum(1)
    documents = Capturing(lambda to: masks.document(to(ids)))
    both_of = Capturing(lambda to: anyattn.and_masks(masks.causal(), masks.document(to(ids))))
    mask = {"document by entry": documents, "causal document": both_of}.get(name, masks.sink_window(4, 700))
    for kind in KINDS:
        inputs = qkv(2, 4, 2, 2311, 2311, kind=kind)
        judge(inputs, mask=mask, label=kind)
        judge(inputs, mask=mask, block_mask=block_mask(mask, by=BY[name], sq=2311, sk=2311), label=kind)


@pytest.mark.parametrize("sq,sk", [(1, 1), (1, 300), (300, 1), (128, 128), (129, 131), (2, 129), (257, 640)])
def test_lengths(sq: int, sk: int) -> None:
    for name in ("prefix by entry", "sink and window", "document by entry"):
        judge(qkv(2, 2, 1, sq, sk), mask=MASKS[name], block_mask=block_mask(MASKS[name], by=BY[name], sq=sq, sk=sk))


def test_tiles_larger_than_what_they_cut() -> None:
    mask = masks.sink_window(2, 50)
    judge(qkv(2, 2, 1, 129, 127), mask=mask, block_mask=block_mask(mask, sq=129, sk=127))


@pytest.mark.parametrize("group", [1, 3, 5])
def test_grouped_heads_and_sinks(group: int) -> None:
    heads = 2 * group
    mask = lambda b, h, i, j: (j < 20 + 30 * h) | ((j - i).abs() < 10)
    sink = torch.linspace(-2, 3, heads)
    judge(qkv(2, heads, 2, SQ, SK), mask=mask, sink=sink, block_mask=block_mask(mask, by=(1, heads)), has_max=True)
    judge(qkv(2, heads, 2, SQ, SK), mask=MASKS["nothing"], sink=sink)


def test_negative_scale() -> None:
    judge(qkv(sq=SQ, sk=SK), mask=MASKS["sink and window"], scale=-0.2)


def test_lists_that_say_more_than_the_mask() -> None:
    """Lists by hand, a row of tiles at a time: full tiles ask nothing, what is not listed is not seen."""
    generator = torch.Generator().manual_seed(4)
    classes = torch.randint(0, 3, (2, 4, 4, 4), generator=generator)
    classes[0, 1, 2] = 0
    classes[1, 2] = 2
    mask = lambda b, h, i, j: (i + j > 300) & (j < 480)
    for tile, shown in ((128, mask), (128, None)):
        lists = lists_of(classes, tile, shown)
        at = classes.to(DEVICE)

        def meant(b: Tensor, h: Tensor, i: Tensor, j: Tensor, at: Tensor = at, shown: Any = shown) -> Tensor:
            kind = at[b, h, i // 128, j // 128]
            return (kind == 2) | ((kind == 1) & (True if shown is None else shown(b, h, i, j)))

        for kind in KINDS:
            judge_meant(qkv(sq=SQ, sk=SK, kind=kind), meant, block_mask=lists)


def lists_of(classes: Tensor, tile: int, mask: Any) -> Any:
    tables: list[Tensor] = []
    for wanted in (1, 2):
        is_listed = classes == wanted
        tables += [is_listed.sum(-1, dtype=torch.int32), is_listed.int().argsort(dim=-1, descending=True, stable=True).int()]
    tables = [t.to(DEVICE) for t in tables]
    return anyattn.BlockMask.from_kv_blocks(*tables, BLOCK_SIZE=tile, mask_mod=mask, seq_lengths=(SQ, SK))


def judge_meant(inputs: list[Tensor], meant: Any, **options: Any) -> None:
    """As ``judge`` where the library's mask is in its lists."""
    out, lse = judging.flex(*inputs, return_lse=True, **options)
    judging.check("lists", {"out": out, "lse": lse}, *inputs, mask=meant)


@pytest.mark.parametrize("name,kind", [("softcap", "document by entry"), ("relative", "any by head"), ("token", "sink and window")])
def test_scores_on_lists(name: str, kind: str) -> None:
    table, mask = random(4, 1200), MASKS[kind]
    score = {
        "softcap": scores.softcap(5.0),
        "relative": Capturing(lambda to: (lambda t: lambda s, b, h, i, j: s + t[h, i - j + 600])(to(table))),
        "token": Capturing(lambda to: (lambda t: lambda s, b, h, i, j: torch.where(t[b, j] == 2, s * 0.25, s))(to(KINDS_OF_KEY))),
    }[name]
    for drawn in KINDS:
        judge(qkv(sq=SQ, sk=SK, kind=drawn), score=score, mask=mask, block_mask=block_mask(mask, by=BY[kind]), label=drawn)


def test_a_mask_beside_lists_holds_in_every_tile() -> None:
    """Predicates asked in full tiles too: by row, by comparison, by table."""
    lists = block_mask(MASKS["document by entry"], by=(2, 1))
    for other in (masks.causal(), masks.sink_window(4, 60), MASKS["keys"]):
        exact = both(other)[1]
        documents = both(MASKS["document by entry"])[1]
        meant = lambda b, h, i, j, f=exact, g=documents: f(b, h, i, j) & g(b, h, i, j)
        for kind in ("normal", "coded"):
            inputs = qkv(sq=SQ, sk=SK, kind=kind)
            out, lse = anyattn.flex_attention(
                *inputs, block_mask=lists, mask_mod=both(other)[0], enable_gqa=True, return_lse=True, backend=judging.BACKEND
            )
            judging.check(kind, {"out": out, "lse": lse}, *inputs, mask=meant)


@pytest.mark.parametrize(
    "name,tile,causal",
    [
        ("document by entry", (128, 128), False), ("document by entry", (128, 128), True), ("document by entry", (256, 128), False),
        ("by head", (128, 128), False), ("islands", (128, 64), False),
    ],
)  # fmt: skip
def test_lists_of_flash_attention(name: str, tile: tuple[int, int], causal: bool) -> None:
    """There a tile cut by the last key counts as full when all its keys are seen, as "by head" shows those of the last heads."""
    mask, exact = both(MASKS[name])
    lists = anyattn.compute_block_sparsity(*tile, *BY[name], SQ, SK, mask, device=DEVICE)
    for kind in KINDS:
        inputs = qkv(sq=SQ, sk=SK, kind=kind)
        out, lse = anyattn.flash_attn_func(
            *(t.transpose(1, 2) for t in inputs), mask_mod=mask, block_sparse_tensors=lists, causal=causal, return_lse=True,
            backend=judging.BACKEND,
        )  # fmt: skip
        meant = lambda b, h, i, j, c=causal: exact(b, h, i, j) & ((j <= i + SK - SQ) if c else (j >= 0))
        judging.check(f"{tile}", {"out": out.transpose(1, 2), "lse": lse}, *inputs, mask=meant)


def test_torchs_own_block_masks() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    mask, _ = both(MASKS["document by entry"])
    made = create_block_mask(mask, 2, 4, SQ, SK, device=DEVICE)
    judge(qkv(sq=SQ, sk=SK), mask=MASKS["document by entry"], block_mask=made)


def test_gradients_come_from_torch() -> None:
    for name in ("document by entry", "sink and window", "islands"):
        judge(qkv(sq=SQ, sk=SK), mask=MASKS[name], block_mask=block_mask(MASKS[name], by=BY[name]), backward=True, label=name)
