"""The contestants. Each is a function from a case's inputs to the call that is timed and the layout of its result (``Inputs.comparable``).

One whose package is not there, or that has no name for a variant, raises and is left out of the case with its reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.case import OURS
from benchmarks.gpu.inputs import Inputs, intervals
from benchmarks.gpu.variants import VARIANTS, Setting
from benchmarks.peers import Unavailable

__all__ = ["CONTESTANTS", "Entry", "backend_of"]

Entry = tuple[Callable[[], Any], str]


def _anyattn(inputs: Inputs) -> Entry:
    call, layout = _our_door(inputs)
    return (lambda: call(backend=None)) if inputs.case.door != "mask" else call, layout


def _our_door(inputs: Inputs) -> tuple[Callable[..., Any], str]:
    """anyattn's function for a case, open for ``backend``."""
    import anyattn

    door, native, mods = inputs.case.door, inputs.variant.native, inputs.mods
    if door == "mask":
        mask = mods.mask
        assert mask is not None
        return lambda: anyattn.create_block_mask(mask, *inputs.grid, device=inputs.device), "mask"
    if door == "flash":
        return lambda backend: anyattn.flash_attn_func(*inputs.bshd, **native or {}, backend=backend), "bshd"
    if door == "varlen":
        qkv, ends, longest = inputs.packed, inputs.cu_seqlens, max(inputs.lengths)
        options: dict[str, Any] = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}
        return lambda backend: anyattn.flash_attn_varlen_func(*qkv, **options, **native or {}, validate=False, backend=backend), "packed"
    qkv, block_mask = inputs.bhsd, inputs.block_mask
    return lambda backend: anyattn.flex_attention(*qkv, mods.score, block_mask, backend=backend), "bhsd"


def backend_of(inputs: Inputs) -> tuple[str, str]:
    """Which of anyattn's backends computes the case, and, if it is torch's, why none of the others does."""
    import anyattn
    from anyattn import plan

    door, reasons = inputs.case.door, []
    if door == "mask":
        return "", ""
    if door in ("flex", "host"):
        chosen = anyattn.explain(*inputs.bhsd, inputs.mods.score, inputs.block_mask).plan
        return chosen.backend, "; ".join(chosen.why) if chosen.backend == "torch" else ""
    call, _ = _our_door(inputs)  # explain() does not know this door: insist on one backend after the other
    for name in sorted(set(plan.BACKENDS) - {"torch"}, key=lambda name: name != "hopper"):
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
    """anyattn's plain causal attention at the same sizes, another job: what score mods are measured against."""
    import anyattn

    shape, qkv = inputs.case.shape, inputs.bhsd
    mask = VARIANTS["causal"].mods(Setting(shape.seqlen_k, shape.heads_q, inputs.device)).mask
    assert mask is not None
    block_mask = anyattn.create_block_mask(mask, *inputs.grid, device=inputs.device)
    return lambda: anyattn.flex_attention(*qkv, block_mask=block_mask), "other"


def _anyattn_flash(inputs: Inputs) -> Entry:
    import anyattn

    qkv = inputs.bshd
    return lambda: anyattn.flash_attn_func(*qkv), "bshd"


def _anyattn_mods(inputs: Inputs) -> Entry:
    """A call with library mods, another job: what looking up mods and handing over what they capture costs the host."""
    import anyattn

    qkv, mask = inputs.bhsd, anyattn.masks.causal()
    score = anyattn.scores.alibi(anyattn.scores.alibi_slopes(inputs.case.shape.heads_q).to(inputs.device))
    return lambda: anyattn.flex_attention(*qkv, score, mask_mod=mask), "other"


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as missing:
        raise Unavailable(f"{name} cannot be imported: {missing}") from missing


def _native(module: str, lacks: str = "") -> Callable[[Inputs], Entry]:
    """FlashAttention's functions of one package. lacks: the option that this build was compiled without."""

    def prepare(inputs: Inputs) -> Entry:
        options, flash = inputs.variant.native, _module(module)
        if options is None:
            raise Unavailable("it has no name for this variant")
        if lacks in options:
            raise Unavailable(f"this build has no {lacks}")
        if not inputs.variant.is_packed:
            qkv = inputs.bshd
            return lambda: flash.flash_attn_func(*qkv, **options), "bshd"
        qkv, ends, longest = inputs.packed, inputs.cu_seqlens, max(inputs.lengths)
        lengths = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}
        return lambda: flash.flash_attn_varlen_func(*qkv, **lengths, **options), "packed"

    return prepare


def _cudnn(inputs: Inputs) -> Entry:
    """torch's SDPA, told to use cuDNN."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if inputs.case.variant not in ("full", "causal"):
        raise Unavailable("SDPA has no name for this mask")
    qkv, shape = inputs.bhsd, inputs.case.shape
    options = {"is_causal": inputs.case.variant == "causal", "enable_gqa": shape.heads_q != shape.heads_kv}

    def call() -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(*qkv, **options)

    return call, "bhsd"


def _sdpa(inputs: Inputs) -> Entry:
    """torch's SDPA with the backend of its own choice."""
    qkv = inputs.bhsd
    return lambda: F.scaled_dot_product_attention(*qkv), "bhsd"


def _flex(backend: str | None) -> Callable[[Inputs], Entry]:
    def prepare(inputs: Inputs) -> Entry:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        if backend == "FLASH":
            _module("flash_attn.cute")  # without it torch would say so after half a minute of compiling
        compiled = torch.compile(flex_attention, dynamic=False)
        qkv, mods = inputs.bhsd, inputs.mods
        mask = None if mods.mask is None else create_block_mask(mods.mask, *inputs.grid, device=inputs.device)
        options: dict[str, Any] = {} if backend is None else {"kernel_options": {"BACKEND": backend}}
        return lambda: compiled(*qkv, score_mod=mods.score, block_mask=mask, **options), "bhsd"

    return prepare


def _flex_mask(inputs: Inputs) -> Entry:
    from torch.nn.attention.flex_attention import create_block_mask

    compiled, mask = torch.compile(create_block_mask), inputs.mods.mask
    return lambda: compiled(mask, *inputs.grid, device=inputs.device), "mask"


def _cudnn_frontend(inputs: Inputs) -> Entry:
    """cuDNN's interval masks; the plan is made beforehand, as block masks are."""
    flex = _module("cudnn.flex_attention")
    if inputs.mods.score is not None:
        raise Unavailable("it has no score mods")
    shape, qkv = inputs.case.shape, inputs.bshd
    ends = intervals(inputs.mods.mask, shape.seqlen_q, shape.seqlen_k, inputs.device)
    plan = flex.create_mask_plan(ends.repeat(1, shape.batch)[None].contiguous(), *qkv, build_backward=False)
    return lambda: flex.flex_attn_func(*qkv, mask_plan=plan), "bshd"


CONTESTANTS: dict[str, Callable[[Inputs], Entry]] = {
    OURS: _anyattn,
    "anyattn-mod": _anyattn_mod,
    "anyattn-causal": _anyattn_causal,
    "anyattn-flash": _anyattn_flash,
    "anyattn-mods": _anyattn_mods,
    "fa3": _native("fa3_fwd_interface", lacks="window_size"),
    "fa3-pages": _native("flash_attn_interface", lacks="softcap"),
    "fa4": _native("flash_attn.cute.interface"),
    "cudnn": _cudnn,
    "sdpa": _sdpa,
    "flex": _flex(None),
    "flex-triton": _flex("TRITON"),
    "flex-flash": _flex("FLASH"),
    "flex-mask": _flex_mask,
    "cudnn-fe": _cudnn_frontend,
}
