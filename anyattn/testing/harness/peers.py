"""Table of the contestants of all devices: functions from a case's inputs to the call that is timed and its result's layout.

The layout is that of ``Inputs.comparable``. A contestant that does not run on the case's device, whose package is missing, or that cannot
compute a variant raises ``Unavailable`` and is left out of the case with its reason.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anyattn.testing.harness import decode, dense
from anyattn.testing.harness.case import OURS
from anyattn.testing.harness.inputs import Inputs, intervals
from anyattn.testing.harness.variants import VARIANTS, Setting

__all__ = [
    "INSISTED",
    "PAGED_SPLITS",
    "PEERS",
    "PRODUCT_SIZE",
    "SPLITS",
    "Entry",
    "Peer",
    "Unavailable",
    "backend_of",
    "backward_of",
    "module",
]

SPLITS = tuple(f"splits-{n}" for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32))
DENSE_BYTES = 2**33
_BLOCK_SIZE = 128  # of block masks where a variant names no other
PAGED_SPLITS = tuple(f"anyattn-paged-16-splits-{n}" for n in (1, 2, 4, 8, 16, 32))
Entry = tuple[Callable[[], Any], str]


class Unavailable(Exception):
    """This contestant cannot run this case here; the message gives the reason."""


@dataclass(frozen=True)
class Peer:
    """prepare: makes the call that is timed; raises ``Unavailable`` if it cannot. devices: where it exists.

    is_other_job: its result is not comparable with the case's. is_compiled: by a compiler whose kernels are worth making in advance.
    has_gradient: a backward case times the backward pass of the call, else the call itself.
    """

    prepare: Callable[[Inputs], Entry]
    devices: tuple[str, ...] = ("cpu", "cuda")
    is_other_job: bool = False
    is_compiled: bool = False
    has_gradient: bool = True

    def entry(self, name: str, inputs: Inputs) -> Entry:
        """The timed call, for a backward pass too."""
        if inputs.case.device not in self.devices:
            raise Unavailable(f"{name} does not run on {inputs.case.device}")
        entry = self.prepare(inputs)
        return backward_of(entry, inputs) if inputs.case.is_backward and self.has_gradient else entry


def _anyattn(backend: str | None = "", deterministic: bool | str = False) -> Callable[[Inputs], Entry]:
    """anyattn's function. backend: the required one, None for its own choice, and by default the case's."""

    def prepare(inputs: Inputs) -> Entry:
        insisted = inputs.case.backend if backend == "" else backend
        call, layout = _our_function(inputs)
        if inputs.case.kind == "mask":
            return call, layout
        more = {"deterministic": deterministic} if deterministic else {}
        return lambda: call(backend=insisted, **more), layout

    return prepare


def _our_function(inputs: Inputs) -> tuple[Callable[..., Any], str]:
    """anyattn's function for a case, which still accepts ``backend`` and ``deterministic``."""
    import anyattn

    kind, native, mods = inputs.case.kind, inputs.variant.native, inputs.mods
    if kind == "mask":
        mask = mods.mask
        assert mask is not None
        return lambda: anyattn.create_block_mask(mask, *inputs.grid, device=inputs.device), "mask"
    if kind == "decode":
        return decode.contiguous(inputs), "bshd"
    if kind == "flash":
        q, k, v = inputs.bshd
        return lambda **more: anyattn.flash_attn_func(q, k, v, **native or {}, **more), "bshd"
    if kind == "varlen":
        (q, k, v), ends, longest = inputs.packed, inputs.cu_seqlens, max(inputs.lengths)
        options: dict[str, Any] = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}
        return lambda **more: anyattn.flash_attn_varlen_func(q, k, v, **options, **native or {}, validate=False, **more), "packed"
    qkv, block_mask, gqa = inputs.bhsd, inputs.block_mask, inputs.enable_gqa
    return lambda **more: anyattn.flex_attention(*qkv, mods.score, block_mask, enable_gqa=gqa, **more), "bhsd"


def backward_of(entry: Entry, inputs: Inputs) -> Entry:
    """The backward pass of a contestant's forward pass, which runs here once. Tensors that take no part have no gradient."""
    call, layout = entry
    where = inputs.leaves(layout)
    with torch.enable_grad():
        found = call()
        out = found[0] if isinstance(found, (tuple, list)) else found
    wanted, gradient = [*where, *inputs.captured], inputs.gradient(layout)
    return lambda: torch.autograd.grad(out, wanted, gradient, retain_graph=True, allow_unused=True), layout


def backend_of(inputs: Inputs, backend: str | None) -> tuple[str, str]:
    """The backend of anyattn that computes the case if ``backend`` is passed, and, if it is torch's, the reasons against the others.

    For a backward pass "forward's + backward's", or the one that computes both.
    """
    import anyattn
    from anyattn.plan import BACKENDS

    kind, reasons = inputs.case.kind, []
    if kind == "mask":
        return "", ""
    if inputs.case.is_backward or kind == "flex":
        chosen = anyattn.explain(*inputs.bhsd, inputs.mods.score, inputs.block_mask, enable_gqa=inputs.enable_gqa, backend=backend).plan
        name = chosen.backend
        if inputs.case.is_backward and chosen.backward not in ("", name):
            name = f"{name} + {chosen.backward}"
        return name, "; ".join(chosen.why) if "torch" in name else ""
    if backend is not None:
        return backend, ""
    call, _ = _our_function(inputs)  # explain() does not cover this function: try one backend after the other
    for name in sorted(set(BACKENDS) - {"torch"}, key=lambda name: name != "hopper"):
        try:
            call(backend=name)
        except anyattn.BackendError as reason:
            reasons.append(str(reason))
        else:
            return name, ""
    return "torch", "; ".join(reasons)


def _anyattn_mod(inputs: Inputs) -> Entry:
    """The mask as a function only, without a block mask."""
    import anyattn

    if inputs.mods.mask is None:
        raise Unavailable("there is no mask")
    qkv, mods = inputs.bhsd, inputs.mods
    return lambda: anyattn.flex_attention(*qkv, mods.score, mask_mod=mods.mask), "bhsd"


def _anyattn_causal(inputs: Inputs) -> Entry:
    """anyattn's plain causal attention at the same sizes, the baseline of score mods."""
    import anyattn

    shape, qkv = inputs.case.shape, inputs.bhsd
    mask = VARIANTS[inputs.case.device]["causal"].mods(Setting(shape.seqlen_k, shape.heads_q, inputs.device)).mask
    assert mask is not None
    block_mask = anyattn.create_block_mask(mask, *inputs.grid, device=inputs.device)
    return lambda: anyattn.flex_attention(*qkv, block_mask=block_mask), "bhsd"


def _anyattn_full(inputs: Inputs) -> Entry:
    """anyattn over all keys at the same sizes, the baseline of masks."""
    import anyattn

    qkv = inputs.bhsd
    return lambda: anyattn.flex_attention(*qkv), "bhsd"


def _anyattn_with(inputs: Inputs, score: Any) -> Entry:
    import anyattn

    qkv, block_mask, backend, gqa = inputs.bhsd, inputs.block_mask, inputs.case.backend, inputs.enable_gqa
    return lambda: anyattn.flex_attention(*qkv, score, block_mask, enable_gqa=gqa, backend=backend), "bhsd"


def _anyattn_frozen(inputs: Inputs) -> Entry:
    """The same attention if the score mod's tensors need no gradient."""
    return _anyattn_with(inputs, inputs.variant.mods(replace(inputs.setting, learns=False, captured=[])).score)


def _anyattn_plain(inputs: Inputs) -> Entry:
    """The same mask without the score mod."""
    return _anyattn_with(inputs, None)


def _anyattn_flash(inputs: Inputs) -> Entry:
    import anyattn

    qkv = inputs.bshd
    return lambda: anyattn.flash_attn_func(*qkv), "bshd"


def _anyattn_mods(inputs: Inputs) -> Entry:
    """A call with library mods: the host time for looking up mods and passing captured values."""
    import anyattn

    qkv, mask = inputs.bhsd, anyattn.masks.causal()
    score = anyattn.scores.alibi(anyattn.scores.alibi_slopes(inputs.case.shape.heads_q).to(inputs.device))
    return lambda: anyattn.flex_attention(*qkv, score, mask_mod=mask), "bhsd"


def _per_document(inputs: Inputs) -> Entry:
    """One call of ``flash_attn_func`` per document."""
    import anyattn

    if inputs.variant.native is None or inputs.variant.documents is None:
        raise Unavailable("there are no documents")
    options, ends = inputs.variant.native, inputs.cu_seqlens.tolist()
    one_by_one = [[x[None, a:b] for x in inputs.packed] for a, b in pairwise(ends)]
    return lambda: [anyattn.flash_attn_func(*one, **options) for one in one_by_one], "per-document"


def module(name: str) -> Any:
    """A peer's package. Raises ``Unavailable`` if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as missing:
        raise Unavailable(f"{name} cannot be imported: {missing}") from missing


def _native(package: str, lacks: str = "") -> Callable[[Inputs], Entry]:
    """FlashAttention's functions of one package. lacks: the option that this build was compiled without."""

    def prepare(inputs: Inputs) -> Entry:
        options, flash = inputs.variant.native, module(package)
        if inputs.case.kind == "decode":
            return decode.fa3(lambda: flash)(inputs), "bshd"
        if options is None:
            raise Unavailable("it has no name for this variant")
        if lacks in options:
            raise Unavailable(f"this build has no {lacks}")
        if inputs.variant.documents is None:
            qkv = inputs.bshd
            return lambda: flash.flash_attn_func(*qkv, **options), "bshd"
        qkv, ends, longest = inputs.packed, inputs.cu_seqlens, max(inputs.lengths)
        lengths = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}
        return lambda: flash.flash_attn_varlen_func(*qkv, **lengths, **options), "packed"

    return prepare


def _sdpa_by(backend: str) -> Callable[[Inputs], Entry]:
    """torch's SDPA with one of its backends."""

    def prepare(inputs: Inputs) -> Entry:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        options, qkv, named = _sdpa_options(inputs), inputs.bhsd, getattr(SDPBackend, backend)

        def call() -> Any:
            with sdpa_kernel(named):
                return F.scaled_dot_product_attention(*qkv, **options)

        return call, "bhsd"

    return prepare


def _sdpa_options(inputs: Inputs) -> dict[str, Any]:
    """SDPA's options for the case's mask: none or ``is_causal``. Raises ``Unavailable``."""
    native, shape = inputs.variant.native, inputs.case.shape
    is_square = shape.seqlen_q == shape.seqlen_k
    if native not in ({}, {"causal": True}) or inputs.variant.documents is not None or (native and not is_square):
        raise Unavailable("SDPA has no name for this mask; see sdpa-mask")
    return {"is_causal": bool(native), "enable_gqa": inputs.enable_gqa}


def _sdpa(inputs: Inputs) -> Entry:
    """torch's SDPA with the backend that it chooses."""
    options, qkv = _sdpa_options(inputs), inputs.bhsd
    return lambda: F.scaled_dot_product_attention(*qkv, **options), "bhsd"


def _sdpa_mask(inputs: Inputs) -> Entry:
    """torch's SDPA with the mask as dense bools."""
    if inputs.mods.score is not None or inputs.mods.mask is None:
        raise Unavailable("a bool mask cannot say this variant")
    where = _dense_places(inputs, inputs.grid, matrices=2)
    mask, qkv, gqa = dense.visible(inputs.mods, where), inputs.bhsd, inputs.enable_gqa
    return lambda: F.scaled_dot_product_attention(*qkv, attn_mask=mask, enable_gqa=gqa), "bhsd"


def _sdpa_bias(inputs: Inputs) -> Entry:
    """torch's SDPA with a dense bias, made beforehand, that includes the mask. Tensors that learn get their gradients through it."""
    if not dense.is_additive(inputs.mods):
        raise Unavailable("the score mod is no bias that is added" if inputs.mods.score is not None else "there is no score mod")
    shape = inputs.case.shape
    where = _dense_places(inputs, (shape.batch, shape.heads_q, shape.seqlen_q, shape.seqlen_k), matrices=4)
    qkv, gqa = inputs.bhsd, inputs.enable_gqa
    if not inputs.case.learns:
        bias = dense.bias(inputs.mods, where, inputs.case.torch_dtype)
    elif inputs.variant.dense is None:
        raise Unavailable("the variant has no dense bias from tensors that learn")
    else:
        with torch.enable_grad():
            bias = inputs.variant.dense(inputs.setting, *inputs.captured)
    return lambda: F.scaled_dot_product_attention(*qkv, attn_mask=bias, enable_gqa=gqa), "bhsd"


def _eager(inputs: Inputs) -> Entry:
    """The plain formula in torch operations."""
    shape = inputs.case.shape
    where = _dense_places(inputs, (shape.batch, shape.heads_q, shape.seqlen_q, shape.seqlen_k), matrices=6)
    seen, score, qkv = dense.visible(inputs.mods, where), inputs.mods.score, inputs.bhsd
    return lambda: dense.formula(*qkv, score, where, seen), "bhsd"


def _dense_places(inputs: Inputs, grid: tuple[int, int, int, int], matrices: int) -> tuple[Tensor, ...]:
    """b, h, q_idx and kv_idx of every pair. Raises ``Unavailable`` if ``matrices`` dense float matrices of them would be too large."""
    needed = matrices * 4 * math.prod(grid)
    if needed > DENSE_BYTES:
        raise Unavailable(
            f"dense matrices of {' x '.join(map(str, grid))} pairs take {needed / 2**30:.0f} GiB; at most {DENSE_BYTES >> 30} are made"
        )
    return dense.places(inputs.case.shape.batch, inputs.case.shape.heads_q, *grid[2:], inputs.device)


def _sdpa_padded(inputs: Inputs) -> Entry:
    """torch's SDPA over a batch of the documents, padded to the longest."""
    if inputs.variant.native != {"causal": True} or inputs.variant.documents is None:
        raise Unavailable("there are no causal documents")
    longest, ends = max(inputs.lengths), inputs.cu_seqlens.tolist()
    rows = [[F.pad(x[a:b], (0, 0, 0, 0, 0, longest - b + a)) for a, b in pairwise(ends)] for x in inputs.packed]
    q, k, v = (torch.stack(documents).transpose(1, 2).contiguous() for documents in rows)
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), "padded"


def _sdpa_grouped(inputs: Inputs) -> Entry:
    """torch's SDPA over the cache in its own layout, with ``enable_gqa``."""
    q, k, v = (t.transpose(1, 2) for t in inputs.bshd)
    return lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), "bhsd"


def _flex(backend: str | None) -> Callable[[Inputs], Entry]:
    def prepare(inputs: Inputs) -> Entry:
        from torch.nn.attention.flex_attention import flex_attention

        if inputs.case.is_backward and inputs.case.device == "cpu":
            raise Unavailable("torch's flex_attention has no backward on the CPU")
        if backend == "FLASH":
            module("flash_attn.cute")  # else torch reports it missing after half a minute of compiling
        # a backward pass that may overwrite tensors saved by the forward pass runs only once
        importlib.import_module("torch._functorch.config").donated_buffer = False  # type: ignore[attr-defined]
        compiled = torch.compile(flex_attention, dynamic=False)
        qkv, mods = inputs.bhsd, inputs.mods
        mask = _torch_mask(inputs)
        options: dict[str, Any] = {} if backend is None else {"kernel_options": {"BACKEND": backend}}
        options["enable_gqa"] = inputs.enable_gqa
        return lambda: compiled(*qkv, score_mod=mods.score, block_mask=mask, **options), "bhsd"

    return prepare


def _torch_mask(inputs: Inputs) -> Any:
    """torch's block mask; with the lists of ours where torch, which evaluates every pair, has no memory for that."""
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask

    mask, ours = inputs.mods.mask, inputs.block_mask
    if mask is None or inputs.variant.block_size == _BLOCK_SIZE:
        return None if mask is None else create_block_mask(mask, *inputs.grid, device=inputs.device)
    lists = (ours.kv_num_blocks, ours.kv_indices, ours.full_kv_num_blocks, ours.full_kv_indices)
    return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=ours.BLOCK_SIZE, mask_mod=mask, seq_lengths=ours.seq_lengths)


def _flex_mask(inputs: Inputs) -> Entry:
    from torch.nn.attention.flex_attention import create_block_mask

    compiled, mask = torch.compile(create_block_mask), inputs.mods.mask
    assert mask is not None
    return lambda: compiled(mask, *inputs.grid, device=inputs.device), "mask"


def _cudnn_frontend(inputs: Inputs) -> Entry:
    """cuDNN's interval masks; the plan is made beforehand, as block masks are."""
    flex = module("cudnn.flex_attention")
    if inputs.mods.score is not None:
        raise Unavailable("it has no score mods")
    shape, qkv = inputs.case.shape, inputs.bshd
    ends = intervals(inputs.mods.mask, shape.seqlen_q, shape.seqlen_k, inputs.device)
    plan = flex.create_mask_plan(ends.repeat(1, shape.batch)[None].contiguous(), *qkv, build_backward=inputs.case.is_backward)
    return lambda: flex.flex_attn_func(*qkv, mask_plan=plan), "bshd"


def _cudnn_blocks(inputs: Inputs) -> Entry:
    """cuDNN's attention over lists of blocks of 64 or 128. Its backward pass is a call of its own."""
    lists = module("cudnn.block_sparse_attention")
    mask, (q, k, v) = inputs.block_mask, inputs.bhsd
    if inputs.mods.score is not None or mask is None or mask.BLOCK_SIZE not in ((64, 64), (128, 128)):
        raise Unavailable("it has blocks of 64 or 128, and no score mods")
    if int(mask.kv_num_blocks.sum()):
        raise Unavailable("it has no mask inside blocks")
    counts = mask.full_kv_num_blocks
    indices = mask.full_kv_indices[..., : int(counts.max())].contiguous()
    options = {"q2k_block_nums": counts, "sparse_block_size": mask.BLOCK_SIZE[0]}
    if not inputs.case.is_backward:
        return lambda: lists.block_sparse_attention_forward(q, k, v, indices, **options)["o_tensor"], "bhsd"
    found, dout = lists.block_sparse_attention_forward(q, k, v, indices, **options), inputs.gradient("bhsd")
    passed = (dout, q, k, v, found["o_tensor"], found["lse_tensor"], indices)
    return lambda: tuple(lists.block_sparse_attention_backward(*passed, **options).values()), "bhsd"


def _ffpa(inputs: Inputs) -> Entry:
    """ffpa-attn's kernels for Hopper, of head dimensions from 257 to 512."""
    attend, native, qkv, gqa = module("ffpa_attn").ffpa_attn_func, inputs.variant.native, inputs.bhsd, inputs.enable_gqa
    if native not in ({}, {"causal": True}):
        raise Unavailable("it has no name for this mask")
    return lambda: attend(*qkv, is_causal=bool(native), enable_gqa=gqa, backend="cutedsl"), "bhsd"


def _flash_mla(inputs: Inputs) -> Entry:
    if inputs.case.shape.head_dim != _MLA_DIM:
        raise Unavailable(f"it has head dimension {_MLA_DIM}")
    return decode.flash_mla(lambda: module(_MLA))(inputs), "bshd"


def _matrix_product(inputs: Inputs) -> Entry:
    """A product of two square matrices of the case's dtype, which a device does at about the highest rate that it sustains."""
    a, b = (torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, device=inputs.device).to(inputs.bshd[0].dtype) for _ in range(2))
    result = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=result), "bshd"


def _at_cache(prepare: Callable[[Inputs], Callable[[], Any]]) -> Callable[[Inputs], Entry]:
    return lambda inputs: (prepare(inputs), "bshd")


_PAGES = "flash_attn_interface"
_MLA = "flash_mla" if find_spec("flash_mla") else "sgl_kernel.flash_mla"
PRODUCT_SIZE = 8192  # rows and columns
_MLA_DIM = 576
_CPU, _CUDA = ("cpu",), ("cuda",)
PEERS: dict[str, Peer] = {
    OURS: Peer(_anyattn()),
    "anyattn-auto": Peer(_anyattn(None), _CUDA),
    "anyattn-triton": Peer(_anyattn("triton"), _CUDA),
    "anyattn-deterministic": Peer(_anyattn(deterministic=True)),
    "anyattn-batch": Peer(_anyattn(deterministic="batch")),
    "anyattn-one-kv": Peer(_at_cache(decode.one_kv), is_other_job=True),
    "anyattn-mod": Peer(_anyattn_mod),
    "anyattn-full": Peer(_anyattn_full, _CPU, is_other_job=True),
    "anyattn-causal": Peer(_anyattn_causal, is_other_job=True),
    "anyattn-frozen": Peer(_anyattn_frozen),
    "anyattn-plain": Peer(_anyattn_plain, is_other_job=True),
    "anyattn-flash": Peer(_anyattn_flash),
    "anyattn-mods": Peer(_anyattn_mods, is_other_job=True),
    "per-document": Peer(_per_document, _CPU),
    "anyattn-alibi": Peer(_at_cache(decode.alibi), is_other_job=True),
    "anyattn-append": Peer(_at_cache(decode.append), is_other_job=True),
    "paged-128": Peer(_at_cache(decode.paged(128)), _CPU),
    "paged-16": Peer(_at_cache(decode.paged(16)), _CPU),
    "anyattn-paged-64": Peer(_at_cache(decode.paged(64)), _CUDA),
    "anyattn-paged-16": Peer(_at_cache(decode.paged(16)), _CUDA),
    **{name: Peer(_at_cache(decode.splits(int(name.removeprefix("splits-"))))) for name in SPLITS},
    **{name: Peer(_at_cache(decode.paged(16, int(name.rpartition("-")[2])))) for name in PAGED_SPLITS},
    **{name: Peer(_at_cache(decode.eight_bits(name)), is_other_job=True) for name in decode.EIGHT_BITS | decode.PREFILL_8_BITS},
    "anyattn-paged-16-triton": Peer(_at_cache(decode.paged(16, backend="triton")), _CUDA),
    "copy": Peer(_at_cache(decode.copy), is_other_job=True),
    "flash-mla": Peer(_flash_mla, _CUDA, is_other_job=True),
    "ffpa-attn": Peer(_ffpa, _CUDA, is_compiled=True),
    "matrix-product": Peer(_matrix_product, _CUDA, is_other_job=True, has_gradient=False),
    "flash-attn": Peer(_native("flash_attn"), _CUDA),
    "fa3": Peer(_native("fa3_fwd_interface", lacks="window_size"), _CUDA),
    "fa3-pages": Peer(_native(_PAGES, lacks="softcap"), _CUDA),
    "fa3-paged-64": Peer(_at_cache(decode.fa3(lambda: module(_PAGES), 64)), _CUDA),
    "fa4": Peer(_native("flash_attn.cute.interface"), _CUDA, is_compiled=True),
    "cudnn": Peer(_sdpa_by("CUDNN_ATTENTION"), _CUDA),
    "fa2": Peer(_sdpa_by("FLASH_ATTENTION"), _CUDA),
    "sdpa": Peer(_sdpa),
    "sdpa-mask": Peer(_sdpa_mask),
    "sdpa-bias": Peer(_sdpa_bias),
    "eager": Peer(_eager),
    "sdpa-padded": Peer(_sdpa_padded, _CPU),
    "sdpa-gqa": Peer(_sdpa_grouped, _CPU),
    "flex": Peer(_flex(None), is_compiled=True),
    "flex-triton": Peer(_flex("TRITON"), _CUDA, is_compiled=True),
    "flex-flash": Peer(_flex("FLASH"), _CUDA, is_compiled=True),
    "flex-mask": Peer(_flex_mask, is_compiled=True),
    "cudnn-fe": Peer(_cudnn_frontend, _CUDA),
    "cudnn-blocks": Peer(_cudnn_blocks, _CUDA, has_gradient=False),
}
# The backend that each contestant with anyattn's own choice of backend requires; "" is the case's, None any.
INSISTED = {
    OURS: "",
    "anyattn-deterministic": "",
    "anyattn-frozen": "",
    "anyattn-plain": "",
    "anyattn-auto": None,
    "anyattn-triton": "triton",
}
