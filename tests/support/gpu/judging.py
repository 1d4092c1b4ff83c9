"""Shared code of the GPU suite: the device, inputs by seed, calls, and their judgement by the error budget on the device itself.

``ANYATTN_GPU_SUITE`` selects what a run of ``tests/gpu`` does:

gpu (default)   the kernel on a Hopper GPU, judged there
cpu             the same calls on the torch backend of the CPU: tests the inputs, masks, oracles and budgets of the suite itself
compile         no call runs: the kernels that it would launch are compiled into the disk cache, several at a time (``conftest.py``)
list            the same without compiling: lists the kernels, and checks that the backend takes every call

``ANYATTN_GPU_BACKEND=triton`` replaces the Hopper kernel by the Triton kernels, for backward passes too.
``ANYATTN_GPU_JUDGE=0`` runs calls without judging them, for profilers and other tools.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn import oracle
from anyattn.mods.dropout import Dropout, dropout_of, seeded
from anyattn.testing import budget
from anyattn.testing.rounding import Noise, rounding

MODE = os.environ.get("ANYATTN_GPU_SUITE", "gpu")
RUNS = MODE in ("gpu", "cpu")
DEVICE = "cuda" if MODE == "gpu" else "cpu"
SUBJECT = os.environ.get("ANYATTN_GPU_BACKEND", "hopper")  # whom the tests are about
BACKEND = "torch" if MODE == "cpu" else SUBJECT
KINDS = ("normal", "peaky", "coded")
NAN = float("nan")

not_on_the_cpu = pytest.mark.skipif(MODE == "cpu", reason="about the hopper backend")
hopper_alone = pytest.mark.skipif(SUBJECT != "hopper", reason="about the hopper backend")
where_calls_run = pytest.mark.skipif(not RUNS, reason="compiles nothing that the other tests do not")
on_the_gpu_alone = pytest.mark.skipif(MODE != "gpu", reason="about the device itself")

# the yardstick is the plain formula, not the plain formula with partial sums kept in 16 bits
torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def needs_the_backend(only: str | None = None) -> None:
    """Skips a module where its calls cannot be run or, in the other modes, cannot be made. only: the backend that it is about."""
    assert MODE in ("gpu", "cpu", "compile", "list"), f"ANYATTN_GPU_SUITE={MODE!r}; wanted gpu, cpu, compile or list"
    assert SUBJECT in ("hopper", "triton"), f"ANYATTN_GPU_BACKEND={SUBJECT!r}; wanted hopper or triton"
    if only not in (None, SUBJECT):
        pytest.skip(f"about the {only} backend", allow_module_level=True)
    if SUBJECT == "triton":
        if not RUNS:
            pytest.skip("Triton compiles when it launches", allow_module_level=True)
        if MODE == "gpu" and not (torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)):
            pytest.skip("needs a GPU of compute capability 8.0 or newer", allow_module_level=True)
        return
    if MODE != "cpu" and importlib.util.find_spec("cutlass") is None:
        pytest.skip("needs nvidia-cutlass-dsl", allow_module_level=True)
    if MODE == "gpu" and not (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)):
        pytest.skip("needs a Hopper GPU", allow_module_level=True)


# ---- inputs


def qkv(
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    sq: int = 300,
    sk: int = 333,
    d: int = 128,
    dv: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    kind: str = "normal",
    seed: int = 0,
) -> list[Tensor]:
    """(B, H, S, D). normal: standard normal. peaky: scores four times as large. coded: zero scores, each value names its key."""
    dv = d if dv is None else dv
    g = torch.Generator().manual_seed(seed)
    shapes = ((batch, heads, sq, d), (batch, kv_heads, sk, d), (batch, kv_heads, sk, dv))
    q, k, v = (torch.randn(shape, generator=g) for shape in shapes)
    if kind == "peaky":
        q = q * 4
    if kind == "coded":
        key, dim = torch.arange(sk)[:, None], torch.arange(dv)
        q, v = q * 0, ((key * (2 * dim + 1)) % 127 / 127 - 0.5).expand(v.shape)
    return [t.to(dtype).to(DEVICE) for t in (q, k, v)]


def random(*shape: int, seed: int = 7) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def surrounded(x: Tensor, fill: float = NAN, rows: int = 128) -> Tensor:
    """``x`` as a view into a larger tensor that holds ``fill`` before, after and, past its last dimension, beside it.

    A kernel that reads outside what it was given computes with ``fill``.
    """
    batch, heads, length, dim = x.shape
    whole = torch.full((batch + 2, heads + 2, length + 2 * rows, dim + 64), fill, dtype=x.dtype, device=x.device)
    view = whole[1:-1, 1:-1, rows : rows + length, 32 : 32 + dim]
    view.copy_(x)
    return view


# ---- mods, for the library and for the oracle

Make = Callable[[Callable[[Tensor], Tensor]], Any]  # from what brings captured tensors to the device, and to the dtype that is wanted


def for_library(t: Tensor) -> Tensor:
    return t.to(DEVICE)


def for_oracle(t: Tensor) -> Tensor:
    return t.to(DEVICE).double() if t.is_floating_point() else t.to(DEVICE)


def both(make: Any) -> tuple[Any, Any]:
    """(for the library, for the oracle). make: None, a mod that captures no tensor, ``Capturing`` or ``AsOnCpu``."""
    if isinstance(make, Capturing):
        return make.make(for_library), make.make(for_oracle)
    if isinstance(make, AsOnCpu):
        return make.mod, make.for_oracle
    return make, make


class Capturing:
    """A mod over captured tensors: ``Capturing(lambda to: lambda ...)``, where ``to(tensor)`` is what it captures."""

    def __init__(self, make: Make) -> None:
        self.make = make


class AsOnCpu:
    """A mod without captured tensors that the oracle evaluates on the CPU: there ``x / number`` is the rounded quotient. On a GPU torch
    multiplies by the number's reciprocal, which is rounded too."""

    def __init__(self, mod: Callable[..., Tensor]) -> None:
        self.mod = mod

    def for_oracle(self, *indices: Tensor) -> Tensor:
        return self.mod(*(i.cpu() for i in indices)).to(indices[0].device)


def hole(after: int, before: int, least: int) -> Any:
    """A mask that shows nothing, or one key; its numbers are captured, so that both are one kernel's."""
    return lambda b, h, i, j: (j > after) & (j < before) & (i + j > least)


# ---- calls and their judgement


def same(a: Any, b: Any) -> bool:
    """Whether two results are the same bits; nothing is known where nothing ran."""
    if not RUNS:
        return True
    pairs = zip(*(x if isinstance(x, (tuple, list)) else (x,) for x in (a, b)), strict=True)
    return all(torch.equal(x, y) for x, y in pairs)


def flex(q: Tensor, k: Tensor, v: Tensor, score: Any = None, mask: Any = None, **options: Any) -> Any:
    """``flex_attention`` with mods as they are for the library."""
    if "block_mask" not in options:
        options["mask_mod"] = mask
    return anyattn.flex_attention(q, k, v, score, **{"enable_gqa": True, "backend": BACKEND} | options)


def poisoned(*sizes: int) -> None:
    """Leaves NaN in the memory that the next allocations of these many bytes are likely to get."""
    if DEVICE == "cuda":
        held = [torch.full((max(1, size // 4),), NAN, device=DEVICE) for size in sizes for _ in range(2)]
        del held


def check(label: str, got: dict[str, Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None = None, **mods: Any) -> None:
    """Judges what there is of out, lse, max, max of products, dq, dk and dv, computed on q, k, v (B, H, S, D) with the oracle's mods."""
    if not RUNS or os.environ.get("ANYATTN_GPU_JUDGE") == "0":
        return
    exact, plain = oracle.attention(q, k, v, **mods), oracle.same_dtype(q, k, v, **mods)
    noise = rounding(q, k, v, dout, **mods)
    if "max" in got:
        # one score's rounding: of the order of LSE's, which is a mean over several
        slack = Noise(noise.lse.sigma * 2, noise.lse.row_sigma * 2)
        budget.check(f"{label} max_scores", got.pop("max"), exact.max_scores, plain.max_scores, slack)
    if "max of products" in got:
        check_products(label, got.pop("max of products"), exact.max_scores, q, k, v, mods.get("mask"), mods.get("scale"))
    back = [] if dout is None else [f(q, k, v, dout, **mods) for f in (oracle.gradients, oracle.same_dtype_gradients)]
    for name, value in got.items():
        reference = (exact, plain) if name in ("out", "lse") else back
        budget.check(f"{label} {name}", value, *(getattr(r, name) for r in (*reference, noise)))


SUM_ERROR = 2.0**-17  # of a sum of products in float32, as a part of the sum of their sizes


def check_products(
    label: str, got: Tensor, exact: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, scale: float | None = None
) -> None:
    """Judges the greatest scores of rows, (B, H, Sq), that no score mod has changed, as sums in float32 of exact products.

    The plain formula rounds scores to 16 bits, so a budget by its error lets pass what float32 would never leave. exact: in float64.
    """
    sizes = oracle.attention(q.abs(), k.abs(), v, mask=mask, scale=None if scale is None else abs(scale)).max_scores
    empty = exact == -torch.inf
    assert torch.equal(got == -torch.inf, empty), f"{label} max_scores: -inf elsewhere than in the rows that see nothing"
    over = torch.where(empty, 0.0, (got.double() - exact).abs() - SUM_ERROR * sizes)
    assert bool((over <= 0).all()), f"{label} max_scores: {float(over.max()):.3g} more than the error of a sum in float32"


def drawn(seed: int, p: float) -> Dropout:
    """The dropout of a call after ``torch.manual_seed(seed)``."""
    torch.manual_seed(seed)
    found = dropout_of(seeded(p, torch.empty(0, device=DEVICE)))
    assert found is not None
    return found


def judge(
    qkv: Sequence[Tensor],
    *,
    score: Any = None,
    mask: Any = None,
    sink: Tensor | None = None,
    scale: float | None = None,
    meant: Sequence[Tensor] | None = None,
    has_max: bool = False,
    backward: bool = SUBJECT == "triton",
    label: str = "",
    dropout_p: float = 0.0,
    **options: Any,
) -> Tensor:
    """Calls ``flex_attention`` in poisoned memory and judges out, lse and what else is asked for; the output.

    score, mask: see ``both``. meant: what the oracle gets instead of ``qkv``. A block mask in ``options`` stands for the library's mask.
    """
    (score, exact_score), (mask, exact_mask) = both(score), both(mask)
    leaves = [t.detach().requires_grad_(backward) for t in qkv]
    sink = None if sink is None else sink.to(DEVICE)
    out_bytes = 2 * leaves[0].numel() // leaves[0].shape[-1] * leaves[2].shape[-1]
    of_gradients = [t.numel() * t.element_size() for t in leaves] if backward else []
    poisoned(out_bytes, 4 * out_bytes // (2 * leaves[2].shape[-1]), *of_gradients)
    asked = {"return_aux": anyattn.AuxRequest(lse=True, max_scores=True)} if has_max else {"return_lse": True}
    dropout = None
    if dropout_p:
        dropout, options["dropout_p"] = drawn(0, dropout_p), dropout_p
        torch.manual_seed(0)
    out, rest = flex(*leaves, score, mask, sink=sink, scale=scale, **asked, **options)
    got = {"out": out.detach(), **({"lse": rest.lse, "max": rest.max_scores} if has_max else {"lse": rest.detach()})}
    if has_max and score is None:
        got["max of products"] = rest.max_scores
        if MODE == "cpu":  # whose scores of 16-bit inputs have 16 bits; of the same inputs in float32 they are such sums
            widened = [t.detach().float() for t in leaves]
            got["max of products"] = flex(*widened, None, mask, sink=sink, scale=scale, **asked, **options)[1].max_scores
    dout = None
    if backward and RUNS:
        dout = random(*out.shape, seed=1).to(out.dtype).to(DEVICE)
        got |= dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, dout), strict=True))
    if backward and not RUNS:  # what it would launch is noted
        torch.autograd.grad(out, leaves, torch.zeros_like(out))
    mods = {"score": exact_score, "mask": exact_mask, "sink": sink, "scale": scale, "dropout": dropout}
    check(label, got, *(qkv if meant is None else meant), dout, **mods)
    return out.detach()


@contextlib.contextmanager
def without_a_gpu(note: Callable[[Any, tuple], Any] | None = None) -> Iterator[None]:
    """Inside, the CPU is taken for a Hopper GPU, and what would be launched is noted, or else compiled into the disk cache."""
    from anyattn import hardware
    from anyattn.backends.hopper.compile import launch
    from anyattn.sparsity.read_lists import read_lists
    from anyattn.validate import flex as check
    from anyattn.validate import sequences

    h200 = hardware.Hardware("cuda", "Hopper", 0, frozenset((torch.bfloat16, torch.float16, torch.float32)), (9, 0), 132)
    with pytest.MonkeyPatch.context() as patch, launch.compiling_only():
        patch.setattr(hardware, "of", lambda *_: h200)
        # on a CPU alone are lists left aside for a mask's row ranges
        patch.setattr(check, "lists_of", lambda lists, mask: (read_lists(lists), getattr(lists, "is_exact", False)))
        # what a GPU's tables hold is not looked at, and kernels read them
        patch.setattr(sequences, "skips_device_reads", lambda device, validate: validate is not True)
        if note is not None:
            patch.setattr(launch, "warm", note)
        if importlib.util.find_spec("triton") is not None:  # whose kernels beside Hopper's are compiled where they run
            patch.setattr("anyattn.triton_tools.launch._launched", lambda *_: None)
        yield


def compiled(config: Any, kinds: tuple) -> float:
    """Seconds that it took to bring a kernel into the disk cache, in a process of its own (``conftest.py``)."""
    from anyattn.backends.hopper.compile import launch

    started = time.perf_counter()
    torch.set_num_threads(1)
    launch.warm(config, kinds)
    return time.perf_counter() - started
