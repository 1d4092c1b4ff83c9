"""CuTe functions as mods on a Hopper GPU: through every door they give what the same mod in plain Python means."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import anyattn
from anyattn import masks, oracle
from anyattn.testing import budget
from anyattn.testing.rounding import rounding

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) and importlib.util.find_spec("cutlass") is not None
pytestmark = pytest.mark.gpu
if not HAS_HOPPER:
    pytest.skip("needs a Hopper GPU and nvidia-cutlass-dsl", allow_module_level=True)

cutlass, cute = pytest.importorskip("cutlass"), pytest.importorskip("cutlass.cute")

TABLE, IDS = torch.randn(4, 500, generator=torch.Generator().manual_seed(3)), torch.arange(500) // 70
FLAGS = torch.arange(500) % 3 == 0
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "cute_kernel.py"


@cute.jit
def softened(score, b, h, q_idx, kv_idx, aux_tensors):
    return score * cute.full_like(score, 0.5)


@cute.jit
def sloped(score, b, h, q_idx, kv_idx, aux_tensors):
    distance = (q_idx - kv_idx).to(cutlass.Float32)
    return score - distance * 0.01 * (h + 1).to(cutlass.Float32)


@cute.jit
def relative(score, b, h, q_idx, kv_idx, aux_tensors):
    return score + aux_tensors[0][h[0], cutlass.max(q_idx[0] - kv_idx[0], 0)]


@cute.jit
def hiding(score, b, h, q_idx, kv_idx, aux_tensors):
    return cute.where(kv_idx <= q_idx, score, cute.full_like(score, float("-inf")))


@cute.jit
def causal(b, h, q_idx, kv_idx, aux_tensors):
    return q_idx >= kv_idx


@cute.jit
def windowed(b, h, q_idx, kv_idx, aux_tensors):
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 40)


@cute.jit
def same_document(b, h, q_idx, kv_idx, aux_tensors):
    ids = aux_tensors[0]
    return ids[q_idx[0]] == ids[kv_idx[0]]


@cute.jit
def flagged(b, h, q_idx, kv_idx, aux_tensors):
    """A bool tensor comes as bytes."""
    return aux_tensors[0][kv_idx[0]] != 0


@cute.jit
def never(b, h, q_idx, kv_idx, aux_tensors):
    return kv_idx < 0


Given = tuple[Any, Callable, torch.Tensor | None]  # a CuTe function, the same over tables of any dtype and device, and its table
SCORES: dict[str, Given] = {
    "softened": (softened, lambda t: lambda s, b, h, i, j: s * 0.5, None),
    "sloped": (sloped, lambda t: lambda s, b, h, i, j: s - (i - j) * 0.01 * (h + 1), None),
    "relative": (relative, lambda t: lambda s, b, h, i, j: s + t[h, (i - j).clamp(min=0)], TABLE),
    "hiding": (hiding, lambda t: lambda s, b, h, i, j: torch.where(j <= i, s, -float("inf")), None),
}
MASKS: dict[str, Given] = {
    "causal": (causal, lambda t: lambda b, h, i, j: i >= j, None),
    "windowed": (windowed, lambda t: lambda b, h, i, j: (i >= j) & (i - j < 40), None),
    "document": (same_document, lambda t: lambda b, h, i, j: t[i] == t[j], IDS),
    "flags": (flagged, lambda t: lambda b, h, i, j: t[j], FLAGS),
    "never": (never, lambda t: lambda b, h, i, j: j < 0, None),
}


def qkv(batch=2, heads=4, kv_heads=2, sq=300, sk=333, d=128, dtype=torch.bfloat16):  # type: ignore[no-untyped-def]
    g = torch.Generator().manual_seed(0)
    return [torch.randn(batch, h, s, d, generator=g).to(dtype) for h, s in ((heads, sq), (kv_heads, sk), (kv_heads, sk))]


def plain(given: Given | None) -> Callable | None:
    """The mod for the oracle."""
    if given is None:
        return None
    table = given[2]
    return given[1](table.double() if table is not None and table.is_floating_point() else table)


def aux(*given: Given | None) -> list[torch.Tensor] | None:
    found = [g[2].cuda() for g in given if g is not None and g[2] is not None]
    return found or None


def judge(got, lse, q, k, v, score: Given | None = None, mask: Given | None = None, joint: Callable | None = None) -> None:  # type: ignore[no-untyped-def]
    """got, lse against the fp64 meaning. joint: the mask's meaning where there is more to it than ``mask``."""
    mods = {"score": plain(score), "mask": joint or plain(mask)}
    want, same, noise = oracle.attention(q, k, v, **mods), oracle.same_dtype(q, k, v, **mods), rounding(q, k, v, **mods)
    budget.check("out", got.cpu(), want.out, same.out, noise.out)
    budget.check("lse", lse.cpu(), want.lse, same.lse, noise.lse)


def flex(q, k, v, **options):  # type: ignore[no-untyped-def]
    cuda = [t.cuda() for t in (q, k, v)]
    return anyattn.flex_attention(*cuda, enable_gqa=True, return_lse=True, backend="hopper", **options)


HEAD_DIMS = ((64, torch.float16), (256, torch.bfloat16))


@pytest.mark.parametrize(
    "name,d,dtype", [*((name, 128, torch.bfloat16) for name in SCORES), *(("relative", d, dtype) for d, dtype in HEAD_DIMS)]
)
def test_score_mods(name: str, d: int, dtype: torch.dtype) -> None:
    given = SCORES[name]
    q, k, v = qkv(d=d, dtype=dtype)
    judge(*flex(q, k, v, score_mod=given[0], aux_tensors=aux(given)), q, k, v, given)
    band = masks.sliding_window(100, 0)
    judge(*flex(q, k, v, score_mod=given[0], mask_mod=band, aux_tensors=aux(given)), q, k, v, given, joint=band)


@pytest.mark.parametrize("sq,sk", [(300, 333), (1, 500), (129, 127), (500, 64)])
@pytest.mark.parametrize("name", MASKS)
def test_mask_mods(name: str, sq: int, sk: int) -> None:
    given = MASKS[name]
    q, k, v = qkv(sq=sq, sk=sk)
    judge(*flex(q, k, v, mask_mod=given[0], aux_tensors=aux(given)), q, k, v, mask=given)


def test_both_at_once_beside_plain_ones() -> None:
    q, k, v = qkv()
    block_mask = anyattn.create_block_mask(masks.prefix_lm(150), 1, 1, 300, 333, device="cuda")
    options = {"score_mod": sloped, "mask_mod": windowed, "block_mask": block_mask}
    joint = masks.prefix_lm(150) & anyattn.mod(MASKS["windowed"][1](None))
    judge(*flex(q, k, v, **options), q, k, v, SCORES["sloped"], joint=joint)


def test_whole_batches_with_block_lists() -> None:
    q, k, v = qkv(sq=400, sk=400)
    rows = [t.cuda().transpose(1, 2) for t in (q, k, v)]
    ids = IDS.cuda()
    lists = anyattn.compute_block_sparsity(128, 128, 1, 1, 400, 400, lambda b, h, i, j: ids[i] == ids[j], device="cuda")
    for sparse in (None, lists):
        options = {"mask_mod": same_document, "aux_tensors": [ids], "block_sparse_tensors": sparse, "softcap": 0.0}
        out, lse = anyattn.flash_attn_func(*rows, return_lse=True, backend="hopper", **options)
        judge(out.transpose(1, 2), lse, q, k, v, mask=MASKS["document"])
    out, lse = anyattn.flash_attn_func(
        *rows, score_mod=relative, causal=True, aux_tensors=[TABLE.cuda()], return_lse=True, backend="hopper"
    )
    judge(out.transpose(1, 2), lse, q, k, v, SCORES["relative"], joint=masks.causal())


def test_after_a_softcap() -> None:
    q, k, v = qkv(sq=200, sk=200)
    rows = [t.cuda().transpose(1, 2) for t in (q, k, v)]
    options = {"softcap": 5.0, "score_mod": relative, "aux_tensors": [TABLE.cuda()], "return_lse": True, "backend": "hopper"}
    out, lse = anyattn.flash_attn_func(*rows, **options)

    def made(t: torch.Tensor) -> Callable:
        return lambda s, b, h, i, j: 5.0 * torch.tanh(s / 5.0) + t[h, (i - j).clamp(min=0)]

    judge(out.transpose(1, 2), lse, q, k, v, (relative, made, TABLE))


@pytest.mark.parametrize("name", ["relative", "sloped"])
def test_sequences_of_different_lengths(name: str) -> None:
    given, lengths = SCORES[name], (200, 0, 1, 130, 333)
    ends = torch.tensor([0, *lengths]).cumsum(0)
    q, k, v = qkv(1, sq=int(ends[-1]), sk=int(ends[-1]))
    packed = [t.cuda()[0].transpose(0, 1) for t in (q, k, v)]
    options = {"score_mod": given[0], "mask_mod": causal, "aux_tensors": aux(given), "return_lse": True, "backend": "hopper"}
    out, lse = anyattn.flash_attn_varlen_func(*packed, cu_seqlens_q=ends.cuda(), cu_seqlens_k=ends.cuda(), **options)
    for start, length in zip(ends.tolist(), lengths, strict=False):
        if length:
            at = slice(start, start + length)
            mine = [t[:, :, at] for t in (q, k, v)]
            judge(out[at].transpose(0, 1)[None], lse[None, :, at], *mine, given, MASKS["causal"])


def test_tables_are_read_where_they_lie() -> None:
    """Any strides, and other values without another kernel."""
    q, k, v = qkv()
    turned = TABLE.cuda().t().contiguous().t()
    assert turned.stride(-1) != 1
    judge(*flex(q, k, v, score_mod=relative, aux_tensors=[turned]), q, k, v, SCORES["relative"])
    negative = (relative, SCORES["relative"][1], -TABLE)
    judge(*flex(q, k, v, score_mod=relative, aux_tensors=[-turned]), q, k, v, negative)


def test_gradients_are_refused() -> None:
    q, k, v = (t.cuda() for t in qkv())
    with pytest.raises(anyattn.BackendError, match="has no derivative"):
        anyattn.flex_attention(q.requires_grad_(), k, v, softened, enable_gqa=True)
    with torch.no_grad():
        assert anyattn.flex_attention(q, k, v, softened, enable_gqa=True).isfinite().all()


def test_the_example_runs(capsys: pytest.CaptureFixture) -> None:
    """``HopperForward`` compiled once by ``cute.compile`` and launched with arguments of two shapes."""
    spec = importlib.util.spec_from_file_location("cute_kernel", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main()
    assert capsys.readouterr().out.count("the three agree") == 2
