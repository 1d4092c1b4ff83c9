"""Writes the table of backends in README.md from what the planner and the backends' plans answer: ``make docs``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from anyattn import planner
from anyattn.errors import BackendError
from anyattn.hardware import Hardware
from anyattn.plan import Plan
from anyattn.problem import Problem
from anyattn.validate import flash, flex, kvcache

README = Path(__file__).resolve().parents[1] / "README.md"
BEGIN, END = "<!-- support: written by make docs -->", "<!-- end of support -->"
H200 = Hardware("cuda", "an H200", 0, frozenset((torch.float16, torch.bfloat16, torch.float32)), (9, 0), 132)
CPU = Hardware("cpu", "a CPU", 2, frozenset((torch.float32,)))
BACKENDS = {
    "torch": ("`torch`", "CPU, and any device of torch's", CPU),
    "triton": ("`triton`", "GPUs, compute capability 8.0 on", H200),
    "hopper": ("`hopper`", "H100, H200", H200),
}
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
HEAD_DIMS = (1, 8, 20, 64, 72, 128, 192, 256, 264, 512, 520)
PASSES = ("gradients", "captured gradients", "deterministic")
COLUMNS = ("backend", "runs on", "dtypes", "head dims", "varlen", "paged", "decoding", *PASSES, "compile")


def inputs(dtype: torch.dtype = torch.bfloat16, head_dim: int = 64, learns: bool = False, seqlen: int = 256) -> tuple[Tensor, ...]:
    return tuple(torch.randn(1, 2, seqlen, head_dim).to(dtype).requires_grad_(learns) for _ in range(3))


def flex_problem(qkv: tuple[Tensor, ...], score: Callable | None = None, deterministic: bool = False) -> Problem:
    return flex.flex_problem(*qkv, score, None, lambda b, h, q, k: q >= k, None, None, False, None, False, False, deterministic)


def varlen_problem(paged: bool) -> Problem:
    options = flash.Options(causal=True)
    ends = torch.tensor([0, 100, 256], dtype=torch.int32)
    q = torch.randn(256, 2, 64, dtype=torch.bfloat16)
    if not paged:
        return flash.varlen_problem(q, q, q, ends, ends, None, None, None, None, None, None, options)
    pool = torch.randn(8, 64, 2, 64, dtype=torch.bfloat16)
    used, table = torch.tensor([100, 156], dtype=torch.int32), torch.arange(8, dtype=torch.int32).reshape(2, 4)
    return flash.varlen_problem(q, pool, pool, ends, None, None, None, None, used, table, None, options)


def plan(backend: str, problem: Problem) -> Plan | None:
    """What the planner says where the backend is named; None where it refuses."""
    try:
        return planner.choose(problem, BACKENDS[backend][2], backend)
    except BackendError:
        return None


def runs(backend: str, problem: Problem) -> bool:
    return plan(backend, problem) is not None


def gradients(backend: str, learns_captured: bool = False, deterministic: bool = False) -> str:
    """Which backend computes the gradients after this one's forward pass, if it is another."""
    table = torch.randn(2, 512, requires_grad=True)
    score = (lambda s, b, h, q, k: s + table[h, q - k + 256]) if learns_captured else None
    made = plan(backend, flex_problem(inputs(learns=True), score, deterministic))
    if made is None:
        return "no"
    return "yes" if made.backward in ("", backend) else f"by {made.backward.capitalize()}"


def decoding(backend: str) -> str:
    """Which backend computes a step of decoding on this one's machine."""
    cache = torch.randn(2, 256, 2, 64, dtype=torch.bfloat16)
    given = kvcache.CacheArguments(
        q=cache[:, :1], k_cache=cache, v_cache=cache.clone(), cache_seqlens=torch.tensor([100, 256], dtype=torch.int32)
    )
    problem = kvcache.cache_call(given, flash.Options(causal=True)).problem
    return "yes" if runs(backend, problem) else f"by {planner.choose(problem, BACKENDS[backend][2]).backend.capitalize()}"


def compiles(backend: str) -> bool:
    """Whether a call that names the backend is captured whole by ``torch.compile``."""
    import anyattn

    graphs = []

    def keep(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable:
        graphs.append(graph)
        return lambda *values: (values[0],)

    torch.compiler.reset()
    q, k, v = inputs(torch.float32, seqlen=64)
    torch.compile(lambda *qkv: anyattn.flex_attention(*qkv, backend=backend), fullgraph=True, backend=keep)(q, k, v)
    return len(graphs) == 1 and any("anyattn" in str(node.target) for node in graphs[0].graph.nodes)


def widths(backend: str) -> str:
    """The head dimensions of ``HEAD_DIMS`` that run, in words."""
    taken = [d for d in HEAD_DIMS if runs(backend, flex_problem(inputs(head_dim=d)))]
    if taken == list(HEAD_DIMS):
        return "any"
    step = "" if 20 in taken else ", multiples of 8"
    assert taken == [d for d in HEAD_DIMS if d <= max(taken) and (not step or d % 8 == 0)], taken
    return f"up to {max(taken)}{step}"


def row(backend: str) -> list[str]:
    name, where, _ = BACKENDS[backend]
    dtypes = [said for said, dtype in DTYPES.items() if runs(backend, flex_problem(inputs(dtype)))]
    packed = ["yes" if runs(backend, varlen_problem(paged)) else "no" for paged in (False, True)]
    passes = [gradients(backend), gradients(backend, learns_captured=True), gradients(backend, deterministic=True)]
    return [name, where, ", ".join(dtypes), widths(backend), *packed, decoding(backend), *passes, "yes" if compiles(backend) else "no"]


def table() -> str:
    rows = [COLUMNS, ["---"] * len(COLUMNS), *(row(backend) for backend in BACKENDS)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def with_table(readme: str) -> str:
    """The page with today's table between its two marks."""
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


def main() -> None:
    README.write_text(with_table(README.read_text()))


if __name__ == "__main__":
    main()
