"""Packed, padded and paged sequences each judged by itself. Whatever row belongs to no sequence holds NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import anyattn
from anyattn import masks
from tests.support.gpu import judging, ragged
from tests.support.gpu.judging import DEVICE, KINDS, Capturing, both, for_library, random, same
from tests.support.gpu.ragged import EQUAL, FORMS, LENGTHS, drawn

pytestmark = pytest.mark.gpu
judging.needs_the_backend()

_g = torch.Generator().manual_seed(21)
IDS = (torch.rand(9, 700, generator=_g) < 0.01).long().cumsum(1)
KEYS = random(9, 4, 700, seed=22)
SLOPES = torch.rand(4, generator=_g) * 0.15
SLOPES_BY_ENTRY = torch.rand(9, 4, generator=_g) * 0.15
PREFIXES = torch.randint(0, 200, (9,), generator=_g)

OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (90, 20)},
    "causal window": {"causal": True, "window_size": (70, 5), "softmax_scale": 0.2},
    "left": {"window_size": (64, -1)},
    "right": {"window_size": (None, 3)},
    "shifted": {"window_size": (110, -30)},
    "empty band": {"window_size": (2, -4)},
    "softcap and alibi": {"causal": True, "softcap": 5.0, "alibi_slopes": SLOPES},
    "alibi by entry": {"alibi_slopes": SLOPES_BY_ENTRY},
    "sink": {"causal": True, "sink": torch.linspace(-2, 3, 4)},
    "bias": {"score_mod": Capturing(lambda to: (lambda t: lambda s, b, h, i, j: s + t[b, h, j])(to(KEYS)))},
    "document": {"mask_mod": Capturing(lambda to: masks.document(to(IDS)))},
    "causal document": {"causal": True, "mask_mod": Capturing(lambda to: masks.document(to(IDS)))},
    "prefix": {"mask_mod": Capturing(lambda to: masks.prefix_lm(to(PREFIXES)))},
    "by head": {"mask_mod": lambda b, h, i, j: (j < 20 + 40 * h + 10 * b) | ((j - i).abs() < 10)},
    "band of the mask": {"mask_mod": lambda b, h, i, j: (j <= i + 20 * h) & (j > i - 100 - 5 * b)},
}


def given(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the library's options, those that the oracle gets otherwise)."""
    options, exact = dict(OPTIONS[name]), {}
    for key, value in options.items():
        if isinstance(value, torch.Tensor):
            options[key] = for_library(value)
        elif isinstance(value, Capturing):
            options[key], exact[key] = both(value)
    return options, exact


def judged(name: str, form: str, lengths: tuple[list[int], list[int]] = LENGTHS, **drawing: Any) -> None:
    options, exact = given(name)
    batch = drawn(lengths, **drawing)
    ragged.judge(batch, FORMS[form](batch), options, f"{name}, {form}", exact)


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str) -> None:
    judged(name, "packed")
    judged(name, "tail", kind="coded")


# a page's size makes a tile and its pieces, and a table's dtype and kind how a band is read: other kernels, each with masks enough
SOME: dict[str, tuple[str, ...]] = {
    "packed int64": ("causal",),
    "packed q, padded k": ("full", "causal", "document"),
    "pages of 1": ("causal", "document"),
    "pages of 2": ("full",),
    "pages of 7": ("window",),
    "pages of 8": ("causal",),
    "pages of 16": ("full", "causal", "document", "softcap and alibi"),
    "pages of 24": ("causal",),
    "pages of 48": ("window", "document"),
    "pages of 64": ("causal",),
    "pages of 100": ("causal",),
    "pages of 128": ("full", "causal"),
    "pages of 256": ("full", "causal"),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms(form: str) -> None:
    for name in SOME.get(form, ("full", "causal", "window", "document")):
        judged(name, form)
        judged(name, form, kind="coded")


@pytest.mark.parametrize("kind", KINDS)
def test_long(kind: str) -> None:
    lengths = ([2048, 5, 2311], [2311, 2100, 2311])
    for name in ("full", "causal", "window"):
        judged(name, "packed", lengths, kind=kind)
    judged("causal", "pages of 64", lengths, kind=kind)
    judged("causal", "pages of 16", lengths, kind=kind)
    judged("full", "pages of 256", lengths, kind=kind)


@pytest.mark.parametrize("d,dv", [(64, 64), (256, 256), (192, 128), (72, 40), (128, 64), (88, 88)])
def test_head_dims(d: int, dv: int) -> None:
    """V's wiped rows have another width than K's, and rows of pieces another swizzle."""
    judged("causal", "partly used", d=d, dv=dv)
    for form in PAGES[d]:
        judged("causal", form, d=d, dv=dv)


PAGES = {
    64: ("pages of 16", "pages of 1"),
    128: ("pages of 2",),
    192: ("pages of 7",),
    256: ("pages of 64", "pages of 16", "pages of 1"),
    72: ("pages of 8", "pages of 7"),
    88: ("pages of 16",),
}


def test_pieces_in_float16() -> None:
    judged("causal", "pages of 16", dtype=torch.float16)


@judging.where_calls_run
def test_pages_give_the_bits_of_packed_keys() -> None:
    """The tiles are the same and what fills them is; how they are filled is not."""
    batch = drawn()
    for name, d in (("causal", 128), ("document", 128), ("full", 64)):
        options, _ = given(name)
        batch = drawn(d=d)
        packed = ragged.call(ragged.packed(batch), **options)
        for size in (16, 64, 128):
            assert same(packed, ragged.call(ragged.paged(batch, size), **options)), (name, size)


def test_lists_of_head_dim_256_are_cut() -> None:
    judged("document", "partly used", d=256)


@pytest.mark.parametrize("heads,kv_heads", [(1, 1), (3, 1), (5, 1), (14, 2)])
def test_grouped_heads(heads: int, kv_heads: int) -> None:
    judged("causal", "packed", heads=heads, kv_heads=kv_heads)
    judged("causal", "pages of 128", heads=heads, kv_heads=kv_heads)


def test_float16() -> None:
    for kind in KINDS:
        for form in ("packed", "tail"):
            judged("causal", form, dtype=torch.float16, kind=kind)


@pytest.mark.parametrize(
    "lengths", [([0, 0, 5], [3, 0, 5]), ([1], [1]), ([1, 1, 1], [500, 1, 0]), ([128] * 5, [128] * 5), ([640], [1])], ids=str
)
def test_few_and_short(lengths: tuple[list[int], list[int]]) -> None:
    for form in ("packed", "padded"):
        for name in ("full", "causal", "document"):
            judged(name, form, lengths)
    for name in ("causal", "document"):
        judged(name, "pages of 16", lengths)


LISTS = [  # (mask, layout, tile, further options)
    ("document", "flat", (128, 128), {}),
    ("document", "flat", (128, 128), {"causal": True}),
    ("document", "flat", (128, 64), {}),
    ("document", "flat", (256, 128), {}),
    ("document", "padded", (128, 128), {}),
    ("document", "padded", (64, 64), {}),
    ("by head", "flat", (64, 128), {}),
    ("prefix", "flat", (128, 128), {}),
    ("by head", "flat", (128, 128), {}),
    ("by head", "padded", (128, 128), {}),
]


@pytest.mark.parametrize("name,layout,tile,more", LISTS, ids=str)
def test_lists(name: str, layout: str, tile: tuple[int, int], more: dict[str, Any]) -> None:
    options, exact = given(name)
    heads = 4 if name == "by head" else None
    for kind in ("normal", "coded"):
        batch = drawn(kind=kind)
        stored = ragged.packed(batch)
        lists = anyattn.compute_varlen_block_sparsity(*tile, heads, options["mask_mod"], layout=layout, device=DEVICE, **stored.where)
        ragged.judge(batch, stored, options | more, kind, exact, block_sparse_tensors=lists)


def test_lists_for_head_dim_256() -> None:
    options, exact = given("document")
    batch = drawn(d=256)
    stored = ragged.packed(batch)
    lists = anyattn.compute_varlen_block_sparsity(128, 128, None, options["mask_mod"], layout="flat", device=DEVICE, **stored.where)
    ragged.judge(batch, stored, options, "flat", exact, block_sparse_tensors=lists)


def test_packed_is_one_by_one_bit_by_bit() -> None:
    """A sequence gives the bits that it gives alone, and that other forms of storage give."""
    batch = drawn(EQUAL)
    for name in ("full", "causal", "window"):
        options, _ = given(name)
        found = ragged.call(ragged.packed(batch), **options)[0]
        for b, one in enumerate(batch):
            if len(one[0]):
                alone = ragged.packed([one])
                assert same(ragged.of(found, ragged.packed(batch), b), ragged.of(ragged.call(alone, **options)[0], alone, 0)), (name, b)
        for form in ("partly used", "padded"):
            other = FORMS[form](batch)
            result = ragged.call(other, **options)[0]
            for b in range(len(batch)):
                assert same(ragged.of(found, ragged.packed(batch), b), ragged.of(result, other, b)), (name, form, b)


def test_where_pages_lie_changes_no_bit() -> None:
    batch = drawn()
    for name, size in (("full", 256), ("causal", 64), ("document", 16), ("window", 7), ("causal", 1)):
        options, _ = given(name)
        first = ragged.call(ragged.paged(batch, size), **options)
        for seed in (2, 3, 4):
            assert same(first, ragged.call(ragged.paged(batch, size, seed), **options)), name


def test_a_batch_in_another_order() -> None:
    batch = drawn()
    there = ragged.packed(batch)
    back = ragged.packed(batch[::-1])
    one, other = (ragged.call(s, causal=True)[0] for s in (there, back))
    for b in range(len(batch)):
        assert same(ragged.of(one, there, b), ragged.of(other, back, len(batch) - 1 - b)), b


@judging.where_calls_run
@pytest.mark.parametrize("name", ["causal", "sink", "document"])
def test_gradients(name: str) -> None:
    options, exact = given(name)
    batch = drawn(EQUAL)
    stored = ragged.packed(batch)
    leaves = [t.detach().requires_grad_() for t in (stored.q, stored.k, stored.v)]
    out, lse = ragged.call(stored._replace(q=leaves[0], k=leaves[1], v=leaves[2]), **options)
    dout = random(*out.shape, seed=1).to(out.dtype).to(DEVICE)
    grads = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, dout), strict=True))
    for b, one in enumerate(batch):
        q, k, v, incoming = (t.transpose(0, 1)[None] for t in (*one, dout[stored.q_at[b]]))
        got = {"out": ragged.of(out.detach(), stored, b), "lse": ragged.of(lse.detach(), stored, b, True)}
        got |= {n: g[stored.q_at[b] if n == "dq" else stored.k_at[b]].transpose(0, 1)[None] for n, g in grads.items()}
        judging.check(f"{name} sequence {b}", got, q, k, v, incoming, **ragged.meant(options | exact, b, q.shape[2], k.shape[2]))


@pytest.mark.parametrize("name", ["full", "causal", "window", "sink"])
def test_many_short_sequences(name: str) -> None:
    """Several row tiles for each thread block, many with one visit, some with none."""
    lengths = torch.randint(0, 200, (120 if judging.MODE == "gpu" else 6,), generator=torch.Generator().manual_seed(5)).tolist()
    judged(name, "packed", (lengths, lengths[::-1]))
