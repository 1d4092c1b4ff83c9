"""Time of ``AuxRequest``'s reductions and of skipped tiles beside the forward pass, in turns: ``python -m benchmarks.gpu.reductions``.

Each call is timed in a CUDA graph. Prints for each case the medians in milliseconds: of the forward pass, of each reduction alone (the call
with it minus the call), and of calls with ``skip_below``, where a first part of the keys draws most of the weight, so that about half of
the tiles are skipped, beside the same backend's forward pass without a threshold. Bars: 1.3 of the forward pass for a reduction; skipping
1.3 times faster; a threshold that skips nothing is printed too. On other GPUs than Hopper's there is Triton alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
import torch

import anyattn
from anyattn import AuxRequest, masks
from benchmarks.graphs import medians

BAR = 1.3
ROUNDS, CALLS = 11, 5
CASES = [(d, s, mask) for d in (64, 128, 256) for s in (2048, 8192, 32768) for mask in ("full", "causal")]
REQUESTS: dict[str, AuxRequest] = {
    "lse": AuxRequest(lse=True),
    "key_sums": AuxRequest(key_sums=True),
    "last 64 queries": AuxRequest(key_sums=True, last_queries=64),
    "block_sums 64": AuxRequest(block_sums=(64, 64)),
    "block_max 64": AuxRequest(block_max=(64, 64)),
    "both 64": AuxRequest(block_sums=(64, 64), block_max=(64, 64)),
    "block_sums 128": AuxRequest(block_sums=(128, 128)),
    "block_sums 1, 64": AuxRequest(block_sums=(1, 64)),
}


def _medians(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Milliseconds of each call."""
    return {name: us / 1e3 for name, us in medians(calls, ROUNDS, CALLS).items()}


def _qkv(head_dim: int, seqlen: int) -> tuple[torch.Tensor, ...]:
    shape = (max(1, 16_384 // seqlen), 2048 // head_dim, seqlen, head_dim)
    return tuple(torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))


def reductions(head_dim: int, seqlen: int, mask: str) -> None:
    q, k, v = _qkv(head_dim, seqlen)
    more: dict[str, Any] = {"mask_mod": masks.causal()} if mask == "causal" else {}
    found = _medians({name: lambda r=r: anyattn.flex_attention(q, k, v, return_aux=r, **more) for name, r in REQUESTS.items()})  # type: ignore[misc]
    forward = found.pop("lse")
    print(f"D{head_dim:<4} S{seqlen:<6} {mask:<7} forward {forward:8.3f} ms", flush=True)
    for name, time in found.items():
        ratio = (time - forward) / forward
        print(
            f"    {name:<18} + {time - forward:8.3f} ms  {ratio:.2f} of the forward pass{'' if ratio <= BAR else f', above {BAR}'}",
            flush=True,
        )


def skipping(head_dim: int, seqlen: int, mask: str) -> None:
    q, k, v = _qkv(head_dim, seqlen)
    q[..., 0] = 4.0
    k[..., 0] = 0.0
    k[:, :, : seqlen // 2, 0] = 2.0 * head_dim**0.5  # 8 in the exponent: the second half has e^-8 of the first half's weight
    more: dict[str, Any] = {"mask_mod": masks.causal()} if mask == "causal" else {}
    options = [{}, *({"tile_m": 128, "tile_n": n} for n in (64, 128))]

    def call(below: Any, backend: str | None, kernel_options: dict[str, int]) -> Callable[[], Any]:
        return lambda: anyattn.flex_attention(q, k, v, skip_below=below, backend=backend, kernel_options=kernel_options, **more)

    none, some = torch.zeros(q.shape[1], device="cuda"), torch.full((q.shape[1],), 0.05, device="cuda")
    backends = ["hopper", "triton"] if torch.cuda.get_device_capability() == (9, 0) else ["triton"]
    calls = {backend: call(None, backend, {}) for backend in backends}
    if "hopper" in backends:
        calls |= {"nothing skipped, hopper": call(none, "hopper", {}), "skipping, hopper": call(some, "hopper", {})}
    for o in options:
        label = "x".join(map(str, o.values())) or "default"
        calls |= {f"nothing skipped, triton {label}": call(none, "triton", o), f"skipping, triton {label}": call(some, "triton", o)}
    found, request = _medians(calls), AuxRequest(skipped=True)
    shares = [
        f"{b} {float(anyattn.flex_attention(q, k, v, skip_below=some, return_aux=request, backend=b, **more)[1].skipped.mean()):.2f}"
        for b in backends
    ]
    print(f"D{head_dim:<4} S{seqlen:<6} {mask:<7} share of skipped tiles: {', '.join(shares)}", flush=True)
    for name, time in found.items():
        speeds = " and ".join(f"{found[b] / time:.2f} times {b}'s" for b in backends)
        print(f"    {name:<32} {time:8.3f} ms  {speeds} speed", flush=True)


@click.command()
@click.option("--only", default="", help="Cases whose names, such as D128-S8192-causal, contain this.")
def main(only: str) -> None:
    """Times reductions of the probabilities, and calls that skip tiles."""
    click.echo(f"{torch.cuda.get_device_name()} {torch.__version__}")
    cases = [case for case in CASES if only in "D{}-S{}-{}".format(*case)]
    with torch.no_grad():
        for measure in (reductions, skipping):
            for case in cases:
                measure(*case)


if __name__ == "__main__":
    main()
