"""Time of calls with ``dropout_p=0.1`` relative to calls without dropout, in turns in one process: ``python -m benchmarks.gpu.dropout``.

Prints for each case the medians in milliseconds of the forward pass and of both passes, and their ratios; 1.25 is the bar.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

import anyattn

P = 0.1
BAR = 1.25
ROUNDS, CALLS = 15, 5
CASES = [(d, s, mask) for d in (64, 128) for s in (2048, 8192) for mask in ("full", "causal")]


def _milliseconds(run: Callable[[], None]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(CALLS):
        run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / CALLS


def measured(head_dim: int, seqlen: int, mask: str, backend: str | None) -> dict[str, tuple[float, float]]:
    """(without, with dropout) of each pass, medians over rounds in which both take turns."""
    shape = (16_384 // seqlen, seqlen, 2048 // head_dim, head_dim)
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = [t.requires_grad_() for t in (q, k, v)]

    def forward(p: float) -> None:
        with torch.no_grad():
            anyattn.flash_attn_func(q, k, v, causal=mask == "causal", dropout_p=p, backend=backend)

    def both(p: float) -> None:
        out = anyattn.flash_attn_func(q, k, v, causal=mask == "causal", dropout_p=p, backend=backend)
        torch.autograd.grad(out, leaves, dout)

    found = {}
    for name, run in (("forward", forward), ("both passes", both)):
        times: dict[float, list[float]] = {0.0: [], P: []}
        for n in range(ROUNDS + 2):
            for p, kept in times.items():
                taken = _milliseconds(lambda run=run, p=p: run(p))  # type: ignore[misc]
                if n >= 2:
                    kept.append(taken)
        found[name] = statistics.median(times[0.0]), statistics.median(times[P])
    return found


def main() -> None:
    print(torch.cuda.get_device_name(), torch.__version__)
    for backend in (None, "triton"):
        for case in CASES:
            for name, (without, dropped) in measured(*case, backend).items():
                ratio = dropped / without
                verdict = "" if ratio <= BAR else f"  above {BAR}"
                print(f"{backend or 'chosen':<7} D{case[0]:<4} S{case[1]:<6} {case[2]:<7} {name:<12} "
                      f"{without:8.3f} {dropped:8.3f} ms  {ratio:.3f}{verdict}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
