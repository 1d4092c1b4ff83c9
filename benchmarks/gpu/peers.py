"""The contestants. Each is a function from a case's inputs to the call that is timed and the layout of its result (``Inputs.comparable``).

One whose package is not there, or that has no name for a variant, raises and is left out of the case with its reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.case import OURS
from benchmarks.gpu import decode
from benchmarks.gpu.cases import PAGED_SPLITS, SPLITS
from benchmarks.gpu.inputs import Inputs, intervals
from benchmarks.gpu.variants import VARIANTS, Setting
from benchmarks.peers import Unavailable

__all__ = ["CONTESTANTS", "INSISTED", "OTHER_JOBS", "Entry", "backend_of", "backward_of"]

Entry = tuple[Callable[[], Any], str]


def _anyattn(backend: str | None = "", deterministic: bool = False) -> Callable[[Inputs], Entry]:
    """anyattn's door. backend: to insist on, None for its own choice, and by default what the case says."""

    def prepare(inputs: Inputs) -> Entry:
        insisted = inputs.case.backend if backend == "" else backend
        call, layout = _our_door(inputs)
        if inputs.case.door == "mask":
            return call, layout
        more = {"deterministic": True} if deterministic else {}
        return lambda: call(backend=insisted, **more), layout

    return prepare


def _our_door(inputs: Inputs) -> tuple[Callable[..., Any], str]:
    """anyattn's function for a case, open for ``backend`` and ``deterministic``."""
    import anyattn

    door, native, mods = inputs.case.door, inputs.variant.native, inputs.mods
    if door == "mask":
        mask = mods.mask
        assert mask is not None
        return lambda: anyattn.create_block_mask(mask, *inputs.grid, device=inputs.device), "mask"
    if door == "decode":
        return decode.contiguous(inputs), "bshd"
    if door == "flash":
        return lambda **more: anyattn.flash_attn_func(*inputs.bshd, **native or {}, **more), "bshd"
    if door == "varlen":
        qkv, ends, longest = inputs.packed, inputs.cu_seqlens, max(inputs.lengths)
        options: dict[str, Any] = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}
        return lambda **more: anyattn.flash_attn_varlen_func(*qkv, **options, **native or {}, validate=False, **more), "packed"
    qkv, block_mask, gqa = inputs.bhsd, inputs.block_mask, inputs.enable_gqa
    return lambda **more: anyattn.flex_attention(*qkv, mods.score, block_mask, enable_gqa=gqa, **more), "bhsd"


def backward_of(entry: Entry, inputs: Inputs) -> Entry:
    """The backward pass of a contestant's forward pass, which is run here, once. What does not take part in it has no gradient."""
    call, layout = entry
    where = inputs.leaves(layout)
    with torch.enable_grad():
        found = call()
        out = found[0] if isinstance(found, (tuple, list)) else found
    wanted, gradient = [*where, *inputs.captured], inputs.gradient(layout)
    return lambda: torch.autograd.grad(out, wanted, gradient, retain_graph=True, allow_unused=True), layout


def backend_of(inputs: Inputs, backend: str | None) -> tuple[str, str]:
    """Which of anyattn's backends computes the case if it is told ``backend``, and, if it is torch's, why none of the others does.

    Of a backward pass: "forward's + backward's", or the one that does both.
    """
    import anyattn
    from anyattn.plan import BACKENDS

    door, reasons = inputs.case.door, []
    if door == "mask":
        return "", ""
    if inputs.case.is_backward or door in ("flex", "host"):
        chosen = anyattn.explain(*inputs.bhsd, inputs.mods.score, inputs.block_mask, enable_gqa=inputs.enable_gqa, backend=backend).plan
        name = chosen.backend
        if inputs.case.is_backward and chosen.backward not in ("", name):
            name = f"{name} + {chosen.backward}"
        return name, "; ".join(chosen.why) if "torch" in name else ""
    if backend is not None:
        return backend, ""
    call, _ = _our_door(inputs)  # explain() does not know this door: insist on one backend after the other
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
    """anyattn's plain causal attention at the same sizes: what score mods are measured against."""
    import anyattn

    shape, qkv = inputs.case.shape, inputs.bhsd
    mask = VARIANTS["causal"].mods(Setting(shape.seqlen_k, shape.heads_q, inputs.device)).mask
    assert mask is not None
    block_mask = anyattn.create_block_mask(mask, *inputs.grid, device=inputs.device)
    return lambda: anyattn.flex_attention(*qkv, block_mask=block_mask), "bhsd"


def _anyattn_with(inputs: Inputs, score: Any) -> Entry:
    import anyattn

    qkv, block_mask, backend, gqa = inputs.bhsd, inputs.block_mask, inputs.case.backend, inputs.enable_gqa
    return lambda: anyattn.flex_attention(*qkv, score, block_mask, enable_gqa=gqa, backend=backend), "bhsd"


def _anyattn_frozen(inputs: Inputs) -> Entry:
    """The same attention where the score mod's tensors want no gradient."""
    return _anyattn_with(inputs, inputs.variant.mods(replace(inputs.setting, learns=False, captured=[])).score)


def _anyattn_plain(inputs: Inputs) -> Entry:
    """The same mask without the score mod."""
    return _anyattn_with(inputs, None)


def _anyattn_flash(inputs: Inputs) -> Entry:
    import anyattn

    qkv = inputs.bshd
    return lambda: anyattn.flash_attn_func(*qkv), "bshd"


def _anyattn_mods(inputs: Inputs) -> Entry:
    """A call with library mods: what looking up mods and handing over what they capture costs the host."""
    import anyattn

    qkv, mask = inputs.bhsd, anyattn.masks.causal()
    score = anyattn.scores.alibi(anyattn.scores.alibi_slopes(inputs.case.shape.heads_q).to(inputs.device))
    return lambda: anyattn.flex_attention(*qkv, score, mask_mod=mask), "bhsd"


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as missing:
        raise Unavailable(f"{name} cannot be imported: {missing}") from missing


def _native(module: str, lacks: str = "") -> Callable[[Inputs], Entry]:
    """FlashAttention's functions of one package. lacks: the option that this build was compiled without."""

    def prepare(inputs: Inputs) -> Entry:
        options, flash = inputs.variant.native, _module(module)
        if inputs.case.door == "decode":
            return decode.fa3(lambda: flash)(inputs), "bshd"
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


def _sdpa_by(backend: str) -> Callable[[Inputs], Entry]:
    """torch's SDPA, told to use one of its backends."""

    def prepare(inputs: Inputs) -> Entry:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        if inputs.case.variant not in ("full", "causal"):
            raise Unavailable("SDPA has no name for this mask")
        qkv, named = inputs.bhsd, getattr(SDPBackend, backend)
        options = {"is_causal": inputs.case.variant == "causal", "enable_gqa": inputs.enable_gqa}

        def call() -> Any:
            with sdpa_kernel(named):
                return F.scaled_dot_product_attention(*qkv, **options)

        return call, "bhsd"

    return prepare


def _sdpa(inputs: Inputs) -> Entry:
    """torch's SDPA with the backend of its own choice."""
    qkv = inputs.bhsd
    return lambda: F.scaled_dot_product_attention(*qkv), "bhsd"


def _flex(backend: str | None) -> Callable[[Inputs], Entry]:
    def prepare(inputs: Inputs) -> Entry:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        if backend == "FLASH":
            _module("flash_attn.cute")  # without it torch would say so after half a minute of compiling
        # a backward pass that may overwrite what the forward pass kept runs only once
        importlib.import_module("torch._functorch.config").donated_buffer = False  # type: ignore[attr-defined]
        compiled = torch.compile(flex_attention, dynamic=False)
        qkv, mods = inputs.bhsd, inputs.mods
        mask = None if mods.mask is None else create_block_mask(mods.mask, *inputs.grid, device=inputs.device)
        options: dict[str, Any] = {} if backend is None else {"kernel_options": {"BACKEND": backend}}
        options["enable_gqa"] = inputs.enable_gqa
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


def _at_cache(prepare: Callable[[Inputs], Callable[[], Any]]) -> Callable[[Inputs], Entry]:
    return lambda inputs: (prepare(inputs), "bshd")


_PAGES = "flash_attn_interface"
CONTESTANTS: dict[str, Callable[[Inputs], Entry]] = {
    OURS: _anyattn(),
    "anyattn-auto": _anyattn(None),
    "anyattn-triton": _anyattn("triton"),
    "anyattn-deterministic": _anyattn(deterministic=True),
    "anyattn-mod": _anyattn_mod,
    "anyattn-causal": _anyattn_causal,
    "anyattn-frozen": _anyattn_frozen,
    "anyattn-plain": _anyattn_plain,
    "anyattn-flash": _anyattn_flash,
    "anyattn-mods": _anyattn_mods,
    "anyattn-alibi": _at_cache(decode.alibi),
    "anyattn-paged-64": _at_cache(decode.paged(64)),
    "anyattn-paged-16": _at_cache(decode.paged(16)),
    "anyattn-append": _at_cache(decode.append),
    **{name: _at_cache(decode.splits(int(name.removeprefix("splits-")))) for name in SPLITS},
    **{name: _at_cache(decode.paged(16, int(name.rpartition("-")[2]))) for name in PAGED_SPLITS},
    "copy": _at_cache(decode.copy),
    "fa3": _native("fa3_fwd_interface", lacks="window_size"),
    "fa3-pages": _native(_PAGES, lacks="softcap"),
    "fa3-paged-64": _at_cache(decode.fa3(lambda: _module(_PAGES), 64)),
    "fa4": _native("flash_attn.cute.interface"),
    "cudnn": _sdpa_by("CUDNN_ATTENTION"),
    "fa2": _sdpa_by("FLASH_ATTENTION"),
    "sdpa": _sdpa,
    "flex": _flex(None),
    "flex-triton": _flex("TRITON"),
    "flex-flash": _flex("FLASH"),
    "flex-mask": _flex_mask,
    "cudnn-fe": _cudnn_frontend,
}
# Their results are not to be compared with the case's.
OTHER_JOBS = ("anyattn-causal", "anyattn-plain", "anyattn-mods", "anyattn-alibi", "anyattn-append", "copy")
# What the contestants that stand or fall with anyattn's choice of a backend insist on; "" is the case's.
INSISTED = {
    OURS: "",
    "anyattn-deterministic": "",
    "anyattn-frozen": "",
    "anyattn-plain": "",
    "anyattn-auto": None,
    "anyattn-triton": "triton",
}
