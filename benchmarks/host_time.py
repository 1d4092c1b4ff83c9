"""``python -m benchmarks.host_time``: host time of warm calls in microseconds.

On a machine without a GPU the call is planned as if for a Hopper GPU, whose backend is replaced by one that returns preallocated tensors:
the rest is our own Python; of a batch of sequences everything but the launches themselves. ``--device cuda`` makes real calls, launches
included, and does not wait for the kernels; torch's SDPA and installed builds of FlashAttention-3 make the same calls, where they have
them. Each line is the smallest mean of many short runs, since every disturbance makes a run longer.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import timeit
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest import mock

import click
import torch
from torch import Tensor

import anyattn
from anyattn import autograd, hardware, planner
from anyattn.call_cache import attention
from anyattn.mods.tracing.trace import trace
from anyattn.sparsity.read_lists import lists_of
from anyattn.triton_tools.recording import active_recorder
from anyattn.validate import flash, flex, sequences
from anyattn.validate.flash import Options

__all__ = ["SERVING_BARS", "measured", "microseconds", "serving_times", "stubbed"]

_HOPPER = hardware.Hardware("cuda", "a Hopper GPU", 0, frozenset((torch.bfloat16,)), (9, 0), 132)
_SHAPE = (1, 2, 128, 64)
_HAS_TRITON = importlib.util.find_spec("triton") is not None


@contextlib.contextmanager
def stubbed() -> Iterator[None]:
    """Plans calls on CPU tensors for Hopper, whose forward pass and kernels do nothing, and neither do Triton's."""
    run = importlib.import_module("anyattn.backends.hopper.api")
    launches = importlib.import_module("anyattn.backends.hopper.backward_launches")
    compiling = importlib.import_module("anyattn.backends.hopper.compile.launch")
    counter = torch.zeros(2, dtype=torch.int32)
    made: dict[Any, Any] = {}

    def counter_of(device: Any) -> Tensor:  # of a GPU's stream there is one
        recorder = active_recorder()
        if recorder is not None:
            recorder.outlives(counter, lambda: counter)
        return counter

    attended = run.ForwardLaunches.run
    nothing: Any = lambda *arguments: None
    if importlib.util.find_spec("tvm_ffi") is not None:  # whose part of a launch is the host's time too
        nothing = importlib.import_module("tvm_ffi").get_global_func("testing.nop")

    def forward(launches: Any, problem: Any) -> Any:
        if problem.sequences is not None:  # up to the kernels: the tables' one is launched too
            return attended(launches, problem)
        key = (problem.q.shape, problem.wants_lse)
        if key not in made:
            lse = torch.empty(problem.q.shape[:3]) if problem.wants_lse else None
            made[key] = run.Result(torch.empty_like(problem.q), lse, None)
        return made[key]

    attention.clear()
    pretended = (
        mock.patch.object(hardware, "of", lambda *a: _HOPPER),
        mock.patch.object(run.ForwardLaunches, "run", forward),
        mock.patch.object(run, "counter_of", counter_of),
        mock.patch.object(compiling, "_found_or_made", lambda config, kinds: nothing),
        mock.patch.object(compiling.build, "has_tvm_ffi", lambda: True),
        mock.patch.object(launches, "counter_of", counter_of),
        mock.patch.object(sequences, "skips_device_reads", lambda device, validate: validate is not True),
    )
    with contextlib.ExitStack() as stack:
        for patch in pretended:
            stack.enter_context(patch)
        if _HAS_TRITON:  # up to Triton's launcher, which would call a driver
            launch = importlib.import_module("anyattn.triton_tools.launch")
            handle = importlib.import_module("anyattn.triton_tools.fast_launch").Handle(lambda *a: None, True, lambda x, number: [x])
            stack.enter_context(mock.patch.object(launch, "_launched", lambda *a: handle))
            ordering = importlib.import_module("anyattn.sequences.tile_order_device")
            stack.enter_context(mock.patch.object(ordering, "_runs_kernels", lambda device: True))
        compiling.forget()
        yield
    attention.clear()
    compiling.forget()


def _tensors(device: str, heads_first: bool = True, grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, length, dim = _SHAPE
    shape = _SHAPE if heads_first else (batch, length, heads, dim)
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device=device).requires_grad_(grad) for _ in range(3))
    return q, k, v


def _flex(device: str, grad: bool = False, **options: Any) -> Callable[[], Any]:
    q, k, v = _tensors(device, grad=grad)
    return lambda: anyattn.flex_attention(q, k, v, **options)


def _fresh_closures(device: str) -> Callable[[], Any]:
    q, k, v = _tensors(device)
    numbers = iter(range(1, 10**9))

    def call() -> Any:
        window = float(next(numbers))
        return anyattn.flex_attention(q, k, v, score_mod=lambda s, b, h, i, j: s - (i - j) * window)

    return call


def _new_lengths(device: str) -> Callable[[], Any]:
    """A call that is new to the call cache every time: the cost if only the mods are cached."""
    lengths = iter(range(1, 10**9))

    def call() -> Any:
        length = 1 + next(lengths) % 4096
        longer = torch.empty_strided((1, length, 2, 64), (length * 128, 128, 64, 1), dtype=torch.bfloat16, device=device)
        return anyattn.flash_attn_func(longer, longer, longer, causal=True)

    return call


def _varlen(device: str, is_new: bool) -> Callable[[], Any]:
    """Packed sequences; is_new: with another number of rows in each call, as in training and serving."""
    most, rows = 1024, 256
    q = torch.randn(most, 2, 64, dtype=torch.bfloat16, device=device)
    packed = [q[: rows + i] for i in range(most - rows)] if is_new else [q]
    cu_q, cu_k = (torch.tensor([0, 100, rows], dtype=torch.int32, device=device) for _ in range(2))
    numbers = iter(range(10**9))

    def call() -> Any:
        x = packed[next(numbers) % len(packed)]
        given = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": rows, "max_seqlen_k": rows}
        return anyattn.flash_attn_varlen_func(x, x, x, causal=True, **given)

    return call


def _calls(device: str) -> dict[str, Callable[[], Any]]:
    q, k, v = _tensors(device, heads_first=False)
    slopes = anyattn.scores.alibi_slopes(_SHAPE[1]).to(device)
    causal = anyattn.create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 128, 128, device=device)
    return {
        "flex, no mod": _flex(device),
        "flex, score mod": _flex(device, score_mod=lambda s, b, h, i, j: s + (j - i)),
        "flex, score mod of the library": _flex(device, score_mod=anyattn.scores.alibi(slopes)),
        "flex, a new closure each time": _fresh_closures(device),
        "flex, block mask": _flex(device, block_mask=causal),
        "flex, mask mod": _flex(device, mask_mod=lambda b, h, i, j: i >= j),
        "flex, score mod, gradients": _flex(device, True, score_mod=lambda s, b, h, i, j: s + (j - i)),
        "flash, causal": lambda: anyattn.flash_attn_func(q, k, v, causal=True),
        "flash, causal, a new length each time": _new_lengths(device),
        "flash, causal, softcap, ALiBi": lambda: anyattn.flash_attn_func(q, k, v, causal=True, softcap=30.0, alibi_slopes=slopes),
        "varlen, causal": _varlen(device, False),
        "varlen, causal, other lengths each time": _varlen(device, True),
    }


def _both_passes(device: str, **options: Any) -> Callable[[], Any]:
    q, k, v = _tensors(device, grad=True)
    dout = torch.randn(_SHAPE, dtype=q.dtype, device=device)
    return lambda: torch.autograd.grad(anyattn.flex_attention(q, k, v, **options), (q, k, v), dout)


def _decode(device: str, **options: Any) -> Callable[[], Any]:
    """One token of each of four sequences, against their caches."""
    q = torch.randn(4, 1, 8, 128, dtype=torch.bfloat16, device=device)
    k, v = (torch.randn(4, 1024, 2, 128, dtype=torch.bfloat16, device=device) for _ in range(2))
    lengths = torch.full((4,), 500, dtype=torch.int32, device=device)
    return lambda: anyattn.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True, backend="triton", **options)


_DECODE = (1, 32, 8, 128, 4096)  # batch, query heads, K/V heads, head_dim, capacity


def _decoder(device: str, page_size: int = 0, appends: bool = False, has_8_bits: bool = False) -> dict[str, Any]:
    """The arguments of a decoding step, in names that FlashAttention-3 has too. has_8_bits: caches of float8 with scales of each row."""
    batch, heads, kv_heads, dim, capacity = _DECODE

    def rows(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=device)

    pool = (capacity // page_size, page_size) if page_size else (batch, capacity)
    given: dict[str, Any] = {"q": rows(batch, 1, heads, dim), "k_cache": rows(*pool, kv_heads, dim), "v_cache": rows(*pool, kv_heads, dim)}
    given |= {"cache_seqlens": torch.full((batch,), capacity // 2, dtype=torch.int32, device=device), "causal": True}
    if page_size:
        given["page_table"] = torch.randperm(pool[0], device=device).view(batch, -1).int()
    if appends:
        angles = torch.rand(capacity, dim // 2, device=device)
        given |= {"k": rows(batch, 1, kv_heads, dim), "v": rows(batch, 1, kv_heads, dim)}
        given |= {"rotary_cos": angles.cos().bfloat16(), "rotary_sin": angles.sin().bfloat16()}
    if has_8_bits:
        given |= {name: given[name].to(torch.float8_e4m3fn) for name in ("k_cache", "v_cache")}
        given |= {name: torch.ones(*pool, kv_heads, device=device) for name in ("k_descale", "v_descale")}
    return given


def _sequences(device: str) -> dict[str, Any]:
    """The arguments of a packed batch, in names that FlashAttention-3 has too."""
    _, heads, kv_heads, dim, _ = _DECODE
    lengths = (700, 30, 1100, 218)
    q, k, v = (torch.randn(sum(lengths), h, dim, dtype=torch.bfloat16, device=device) for h in (heads, kv_heads, kv_heads))
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
    longest = max(lengths)
    given = {"q": q, "k": k, "v": v, "cu_seqlens_q": ends, "cu_seqlens_k": ends}
    return given | {"max_seqlen_q": longest, "max_seqlen_k": longest, "causal": True}


_SERVING: dict[str, Callable[[str], tuple[str, dict[str, Any]]]] = {
    "decoding, contiguous cache": lambda device: ("flash_attn_with_kvcache", _decoder(device)),
    "decoding, pages of 64": lambda device: ("flash_attn_with_kvcache", _decoder(device, 64)),
    "decoding, appends, rotary": lambda device: ("flash_attn_with_kvcache", _decoder(device, 0, True)),
    "decoding, appends, rotary, pages of 64": lambda device: ("flash_attn_with_kvcache", _decoder(device, 64, True)),
    "decoding, appends to 8 bits": lambda device: ("flash_attn_with_kvcache", _decoder(device, 0, True, True)),
    "varlen, 4 sequences": lambda device: ("flash_attn_varlen_func", _sequences(device)),
}


def _serving(device: str, module: Any = anyattn) -> dict[str, Callable[[], Any]]:
    """Calls that an inference engine makes at batch 1; of another module that has functions of these names, if it has."""
    found = {name: make(device) for name, make in _SERVING.items()}
    return {name: partial(getattr(module, function), **given) for name, (function, given) in found.items() if hasattr(module, function)}


SERVING_BARS = {  # microseconds at most, and the aim, by figure and call
    "contiguous_us": ("decoding, contiguous cache", 60, 40),
    "pages_us": ("decoding, pages of 64", 60, 40),
    "append_us": ("decoding, appends, rotary", 60, 40),
    "append_pages_us": ("decoding, appends, rotary, pages of 64", 60, 40),
    "append_8_bits_us": ("decoding, appends to 8 bits", 60, 40),
    "varlen_us": ("varlen, 4 sequences", 45, None),
}


def serving_times(device: str = "cuda") -> dict[str, Any]:
    """The figures of ``SERVING_BARS``. microseconds: by call, of FlashAttention-3 and torch's SDPA too."""
    found = {name: microseconds(call) for name, call in {**_serving(device), **_peers(device)}.items()}
    return {**{figure: found[name] for figure, (name, *_) in SERVING_BARS.items()}, "microseconds": found}


def _by_triton(device: str) -> dict[str, Callable[[], Any]]:
    """Calls by Triton's kernels, and the backend's own part of one of them."""
    if not _HAS_TRITON:
        return {}
    q, k, v = _tensors(device)
    q4, k4, v4 = _tensors(device, heads_first=False)
    table, most = torch.zeros(_SHAPE[1], 2 * _SHAPE[2], device=device), _SHAPE[2]
    causal, relative = lambda b, h, i, j: i >= j, lambda s, b, h, i, j: s + table[h, i - j + most]
    listed = anyattn.create_block_mask(lambda b, h, i, j: (i - j) % 3 != 1, 1, 1, most, most, device=device)
    problem = flex.flex_problem(q, k, v, relative, None, causal, None, None, False, None, False, False, False)
    chosen = planner.choose(problem, hardware.of(device), "triton")
    cu = torch.tensor([0, 100, 256], dtype=torch.int32, device=device)
    ends = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 256, "max_seqlen_k": 256}
    packed = torch.randn(256, 2, 64, dtype=torch.bfloat16, device=device)
    by: dict[str, Any] = {"backend": "triton"}
    return {
        "flex, no mod, by triton": _flex(device, **by),
        "flex, score mod, by triton": _flex(device, score_mod=lambda s, b, h, i, j: s + (j - i), **by),
        "flex, block mask, by triton": _flex(device, block_mask=listed, **by),
        "flex, mask mod, by triton": _flex(device, mask_mod=causal, **by),
        "flex, relative bias, by triton": _flex(device, score_mod=relative, mask_mod=causal, **by),
        "  triton's backend alone": lambda: autograd.forward(problem, chosen),
        "flash, causal, by triton": lambda: anyattn.flash_attn_func(q4, k4, v4, causal=True, **by),
        "varlen, causal, by triton": lambda: anyattn.flash_attn_varlen_func(packed, packed, packed, causal=True, **ends, **by),
        "decode, keys in one piece, by triton": _decode(device, num_splits=1),
        "decode, keys in pieces, by triton": _decode(device),
        "both passes, no mod, by triton": _both_passes(device, **by),
        "both passes, relative bias, by triton": _both_passes(device, score_mod=relative, mask_mod=causal, **by),
        "both passes, block mask, by triton": _both_passes(device, block_mask=listed, **by),
        "both passes, mask mod, by hopper": _both_passes(device, mask_mod=causal),
    }


@contextlib.contextmanager
def listing() -> Iterator[None]:
    """Context for CPU tensors inside ``stubbed()``: ``create_block_mask`` takes them for a GPU's, and its kernels list nothing."""
    compute, block_lists, prepared_lists, entry_point = (
        importlib.import_module(f"anyattn.{name}")
        for name in ("sparsity.compute", "sparsity.kernels.block_lists", "sparsity.kernels.prepared_lists", "block_masks")
    )
    handle = importlib.import_module("anyattn.triton_tools.fast_launch").Handle(lambda *a: None, True)
    pretended = (
        (compute, "runs_kernels", True),
        (entry_point, "may_have_kernels", True),
        (block_lists, "launch", handle),
        (prepared_lists, "known_handle", handle),
    )
    with contextlib.ExitStack() as stack:
        for module, name, answer in pretended:
            stack.enter_context(mock.patch.object(module, name, lambda *a, answer=answer: answer))
        yield


def _block_masks(device: str) -> dict[str, Callable[[], Any]]:
    """``create_block_mask`` at S 8,192, as in the cases masks-host; of documents by a new closure each time."""
    if not _HAS_TRITON:
        return {}
    ids = (torch.arange(8192, device=device) // 1024).to(torch.int32)

    def documents(ids: Tensor) -> Callable:
        return lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j)

    def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
        return i >= j

    return {
        "block mask, causal": lambda: anyattn.create_block_mask(causal, 1, 1, 8192, 8192, device=device),
        "block mask, documents, causal": lambda: anyattn.create_block_mask(documents(ids), 1, 1, 8192, 8192, device=device),
    }


def _compiled(device: str) -> dict[str, Callable[[], Any]]:
    """Calls inside Inductor's graphs; for one of them also the operator, and the function that Inductor's code calls instead."""
    attend = importlib.import_module("anyattn.custom_ops.flex").attend
    q, k, v = _tensors(device)
    causal = anyattn.create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 128, 128, device=device)
    plain = torch.compile(lambda q, k, v: anyattn.flex_attention(q, k, v), fullgraph=True)
    masked = torch.compile(lambda q, k, v, mask: anyattn.flex_attention(q, k, v, block_mask=mask), fullgraph=True)
    no_mod: Any = ("", [0], [])
    operands = (q, k, v, None, *no_mod, *no_mod, [], [0, 0], False, 0.125, False, False, "", "")
    return {
        "flex, no mod, compiled": lambda: plain(q, k, v),
        "flex, block mask, compiled": lambda: masked(q, k, v, causal),
        "  the operator": lambda: attend(*operands),
        "  called directly": lambda: attend.direct(*operands),
    }


_FA3 = ("fa3_fwd_interface", "flash_attn_interface")  # builds of FlashAttention-3


def _peers(device: str) -> dict[str, Callable[[], Any]]:
    q, k, v = _tensors(device)
    batch, heads, kv_heads, dim, capacity = _DECODE
    one = torch.randn(batch, heads, 1, dim, dtype=torch.bfloat16, device=device)
    keys, values = (torch.randn(batch, kv_heads, capacity // 2, dim, dtype=torch.bfloat16, device=device) for _ in range(2))
    attend = torch.nn.functional.scaled_dot_product_attention
    found: dict[str, Callable[[], Any]] = {
        "torch's SDPA, causal": lambda: attend(q, k, v, is_causal=True),
        "torch's SDPA, one query": lambda: attend(one, keys, values, enable_gqa=True),
    }
    for module in _FA3:
        if importlib.util.find_spec(module) is not None:
            calls = _serving(device, importlib.import_module(module))
            found |= {f"{name}, {module}": _without_grad(call) for name, call in calls.items()}
    return {name: call for name, call in found.items() if _runs(name, call)}


def _without_grad(call: Callable[[], Any]) -> Callable[[], Any]:
    return torch.no_grad()(call)


def _runs(name: str, call: Callable[[], Any]) -> bool:
    """Whether a peer's build has this call."""
    try:
        call()
    except (NotImplementedError, RuntimeError, TypeError) as error:
        click.echo(f"{name}: {error}", err=True)
        return False
    return True


def _stages(device: str) -> dict[str, Callable[[], Any]]:
    """Stages of calls that miss the call cache: a flex call with a block mask, and a causal flash call."""
    from anyattn.backends.hopper import api as run
    from anyattn.backends.hopper import plan as backend_plan

    q, k, v = _tensors(device)
    machine = hardware.of(device)
    causal = anyattn.create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 128, 128, device=device)
    call = (q, k, v, None, causal, None, None, None, False, None, False, False, False)
    problem = flex.flex_problem(*call)
    chosen = planner.choose(problem, machine)
    q4, k4, v4 = _tensors(device, heads_first=False)
    return {
        "flex checks": lambda: flex.flex_problem(*call),
        "  tensors": lambda: flex.tensors(q, k, v, False),
        "  block mask": lambda: flex.check_block_mask(causal, q, k),
        "  trace, seen before": lambda: trace(causal.mask_mod, "mask", device=device),
        "  lists": lambda: lists_of(causal, problem.predicates[0]),
        "flash checks": lambda: flash.dense_problem(q4, k4, v4, Options(causal=True)),
        "plan": lambda: planner.choose(problem, machine),
        "  available": lambda: planner.available(machine),
        "  reason against": lambda: backend_plan.reason_against(problem),
        "  config": lambda: run.config_of(problem),
        "autograd and backend": lambda: autograd.compute(problem, chosen),
    }


def microseconds(call: Callable[[], Any], repeat: int = 60, number: int = 40) -> float:
    for _ in range(20):
        call()
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    return min(timeit.repeat(call, wait, repeat=repeat, number=number)) / number * 1e6


def measured(device: str, only: str = "") -> dict[str, float]:
    """Microseconds by name, of names that contain ``only``: entry points, then the stages of a call."""

    def times(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
        return {name: microseconds(call) for name, call in calls.items() if only in name}

    if device == "cpu":
        with stubbed():
            found = times(_ours(device))
            with listing() if _HAS_TRITON else contextlib.nullcontext():
                return found | times(_block_masks(device))
    return times({**_ours(device), **_block_masks(device), **_peers(device)})


def _ours(device: str) -> dict[str, Callable[[], Any]]:
    return {**_calls(device), **_serving(device), **_by_triton(device), **_compiled(device), **_stages(device)}


@click.command()
@click.option("--device", default="cpu", show_default=True, type=click.Choice(["cpu", "cuda"]), help="cpu: with a stand-in for the GPU.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
@click.option("--only", default="", help="Calls whose names contain this, such as decoding, varlen or SDPA.")
def main(device: str, as_json: bool, only: str) -> None:
    """Host time of warm calls, eager and compiled."""
    torch.set_num_threads(1)
    found = measured(device, only)
    if as_json:
        click.echo(json.dumps(found))
        return
    for name, time in found.items():
        click.echo(f"{name:<44}{time:8.1f} us")


if __name__ == "__main__":
    main()
