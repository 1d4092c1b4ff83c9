"""The Hopper backward kernel over packed and padded sequences and over documents, judged sequence by sequence. Rows of none hold NaN."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import anyattn
from anyattn import masks
from tests.support.gpu import judging, ragged
from tests.support.gpu.judging import DEVICE, Capturing, both, judge, qkv, random
from tests.support.gpu.ragged import FORMS, LENGTHS, drawn

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]  # a kernel that hangs is a failure
judging.needs_the_backend(only="hopper")

RERUNS = 100 if judging.MODE == "gpu" else 2
EDGES = [0, 1, 63, 64, 65, 127, 128, 129, 1000]
EDGES_BOTH = (EDGES, [130, 0, 64, 65, 1, 200, 128, 127, 999])
SAME = (EDGES, EDGES)
IDS = (torch.rand(9, 1000, generator=torch.Generator().manual_seed(21)) < 0.01).long().cumsum(1)
SLOPES = torch.rand(4, generator=torch.Generator().manual_seed(22)) * 0.15

OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (90, 20)},
    "causal window": {"causal": True, "window_size": (70, 5), "softmax_scale": 0.2},
    "left": {"window_size": (64, -1)},
    "empty band": {"window_size": (2, -4)},
    "softcap and alibi": {"causal": True, "softcap": 5.0, "alibi_slopes": SLOPES},
    "sink": {"causal": True, "sink": torch.linspace(-2, 3, 4)},
    "square": {"score_mod": lambda s, b, h, i, j: s * s * 0.1 + b * 0.01},
    "document": {"mask_mod": Capturing(lambda to: masks.document(to(IDS)))},
    "causal document": {"causal": True, "mask_mod": Capturing(lambda to: masks.document(to(IDS)))},
    "prefix": {"mask_mod": masks.prefix_lm(70)},
    "by head": {"mask_mod": lambda b, h, i, j: (j < 20 + 40 * h + 10 * b) | ((j - i).abs() < 10)},
    "blind": {"mask_mod": lambda b, h, i, j: (i >= j) & (i % 5 != 0)},
}


@pytest.fixture(autouse=True)
def _finished() -> Iterator[None]:
    yield
    if judging.MODE == "gpu":
        torch.cuda.synchronize()


def given(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(the library's options, those that the oracle gets otherwise)."""
    options, exact = dict(OPTIONS[name]), {}
    for key, value in options.items():
        if isinstance(value, torch.Tensor):
            options[key] = judging.for_library(value)
        elif isinstance(value, Capturing):
            options[key], exact[key] = both(value)
    return options, exact


def judged(
    name: str, form: str, lengths: tuple[list[int], list[int]] = LENGTHS, more: dict[str, Any] | None = None, **drawing: Any
) -> None:
    options, exact = given(name)
    batch = drawn(lengths, **drawing)
    ragged.judge_gradients(batch, FORMS[form](batch), options | (more or {}), f"{name}, {form}", exact)


def test_first_one_sequence() -> None:
    """The smallest cases, to be run before all others: a whole tile, then one that the end cuts."""
    judged("full", "packed", ([64], [128]), heads=1, kv_heads=1, d=64)
    judged("full", "packed", ([3], [5]), heads=1, kv_heads=1, d=64)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", ["full", "causal", "window"])
def test_lengths_at_the_edges_of_tiles(name: str, d: int) -> None:
    judged(name, "packed", SAME, d=d)
    judged(name, "packed", EDGES_BOTH, d=d)


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str) -> None:
    judged(name, "packed")
    judged(name, "partly used")


@pytest.mark.parametrize("form", ["packed int64", "tail", "partly used", "padded", "packed q, padded k"])
def test_forms(form: str) -> None:
    for name in ("full", "causal", "window"):
        judged(name, form)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (3, 1), (5, 1), (14, 2)])
def test_grouped_heads(heads: int, kv_heads: int) -> None:
    judged("causal", "packed", heads=heads, kv_heads=kv_heads)
    judged("causal", "packed", more={"deterministic": True}, heads=heads, kv_heads=kv_heads)


@pytest.mark.parametrize(("d", "dv"), [(8, 8), (72, 40), (64, 128), (128, 64), (192, 128), (136, 40), (104, 192)])
def test_head_dims(d: int, dv: int) -> None:
    judged("causal", "partly used", d=d, dv=dv)


@pytest.mark.parametrize("name", ["full", "causal", "window", "empty band", "sink"])
def test_wide_heads(name: str) -> None:
    for form in ("packed", "partly used", "padded"):
        judged(name, form, EDGES_BOTH if form == "packed" else LENGTHS, d=192, dv=128)
    judged(name, "packed", SAME, {"deterministic": True}, d=192, dv=128)


@pytest.mark.parametrize("kind", judging.KINDS)
@pytest.mark.parametrize(("d", "dv"), [(128, 128), (192, 128)])
def test_float16(kind: str, d: int, dv: int) -> None:
    judged("causal", "partly used", dtype=torch.float16, kind=kind, d=d, dv=dv)


@pytest.mark.parametrize(
    "lengths", [([0, 0, 5], [3, 0, 5]), ([1], [1]), ([1, 1, 1], [500, 1, 0]), ([128] * 5, [128] * 5), ([640], [1])], ids=str
)
def test_few_and_short(lengths: tuple[list[int], list[int]]) -> None:
    for form in ("packed", "padded"):
        judged("full", form, lengths)
        judged("causal", form, lengths)


def test_many_and_long() -> None:
    judged("causal", "packed", ([2048, 5, 2311], [2311, 2100, 2311]))
    judged("full", "packed", ([17, 40, 3, 90] * 40, [17, 40, 3, 90] * 40), d=64)


def test_more_entries_than_the_smaller_tables_hold() -> None:
    lengths = [i * 7 % 5 for i in range(2049)]
    judged("causal", "packed", (lengths, lengths), heads=1, kv_heads=1, d=64)


@pytest.mark.parametrize("name", ["full", "causal", "window"])
def test_deterministic(name: str) -> None:
    judged(name, "packed", SAME, {"deterministic": True}, d=64)


@judging.on_the_gpu_alone
@pytest.mark.parametrize("name", ["full", "causal", "window"])
def test_deterministic_reruns_agree_bitwise(name: str) -> None:
    options, _ = given(name)
    stored = ragged.partly_used(drawn(SAME, heads=8, kv_heads=4, d=64))
    leaves = [t.detach().requires_grad_() for t in (stored.q, stored.k, stored.v)]
    dout = random(*stored.q.shape, seed=1).to(leaves[0])

    def gradients() -> tuple[torch.Tensor, ...]:
        out, _ = ragged.call(stored._replace(q=leaves[0], k=leaves[1], v=leaves[2]), deterministic=True, **options)
        return torch.autograd.grad(out, leaves, dout)

    first = gradients()
    for _ in range(RERUNS):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(), strict=True))


@judging.on_the_gpu_alone
@pytest.mark.parametrize(("d", "dv"), [(64, 64), (128, 128), (192, 128)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_deterministic_reruns_of_long_sequences_agree_bitwise(is_causal: bool, d: int, dv: int) -> None:
    """Tiles of sequences and heads take turns on all multiprocessors at once."""
    stored = ragged.packed(drawn(([700, 4100, 90, 2500], [700, 4100, 90, 2500]), heads=16, kv_heads=16, d=d, dv=dv))
    leaves = [t.detach().requires_grad_() for t in (stored.q, stored.k, stored.v)]
    out, _ = ragged.call(stored._replace(q=leaves[0], k=leaves[1], v=leaves[2]), deterministic=True, causal=is_causal)
    dout = random(*out.shape, seed=1).to(out)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    for _ in range(RERUNS):
        again = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@judging.on_the_gpu_alone
def test_gradients_of_the_sink_and_through_the_log_sum_exp() -> None:
    """Against Triton's, which the budget has judged: the same terms by another kernel."""
    stored, found = ragged.partly_used(drawn()), []
    for backend in ("hopper", "triton"):
        leaves = [t.detach().requires_grad_() for t in (stored.q, stored.k, stored.v)]
        sink = random(4).to(DEVICE).requires_grad_()
        out, lse = ragged.call(stored._replace(q=leaves[0], k=leaves[1], v=leaves[2]), sink=sink, causal=True, backend=backend)
        given = random(*out.shape, seed=1).to(out), random(*lse.shape, seed=2).to(lse)
        found.append([t.float() for t in torch.autograd.grad((out, lse), [*leaves, sink], given)])
    for own, other in zip(*found, strict=True):
        assert (own - other).norm() <= 2**-7 * other.norm()


@judging.on_the_gpu_alone
def test_nothing_waits_for_the_device() -> None:
    stored = ragged.partly_used(drawn())
    leaves = [t.detach().requires_grad_() for t in (stored.q, stored.k, stored.v)]
    for _ in range(2):
        out, _ = ragged.call(stored._replace(q=leaves[0], k=leaves[1], v=leaves[2]), causal=True)
        dout = torch.ones_like(out)
        torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(out, leaves, dout)
    finally:
        torch.cuda.set_sync_debug_mode("default")


RUNS_OF_IDS = torch.repeat_interleave(torch.arange(5), torch.tensor([1, 300, 128, 64, 207]))
DOCUMENTS = {
    "documents": RUNS_OF_IDS,
    "of each entry": torch.stack([RUNS_OF_IDS, RUNS_OF_IDS.flip(0)]),
    "interleaved": torch.arange(700) // 50 % 2,
}


@pytest.mark.parametrize(("d", "dv"), [(64, 64), (128, 128), (192, 128)])
@pytest.mark.parametrize("rest", ["alone", "causal", "window"])
@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents(name: str, rest: str, d: int, dv: int) -> None:
    """As sequences where the ids are documents, by block lists where they are not; at first the host does not know which."""

    def make(to: Any) -> Any:
        mask = masks.document(to(DOCUMENTS[name]))
        return mask if rest == "alone" else mask & (masks.causal() if rest == "causal" else masks.sliding_window(100, 7))

    mask = Capturing(make)
    lists = anyattn.create_block_mask(make(judging.for_library), 2, None, 700, 700, device=DEVICE)
    for _ in range(2):
        judge(qkv(2, 4, 2, sq=700, sk=700, d=d, dv=dv), mask=mask, block_mask=lists, backward=True)
        if judging.MODE == "gpu":
            torch.cuda.synchronize()
