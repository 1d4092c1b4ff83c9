"""The Triton backend's launches caught instead of made, and compiled for a GPU that need not be there."""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from anyattn import check, hardware, plan
from anyattn.backends.triton import config, styles
from anyattn.plan import Plan
from anyattn.problem import Problem

_POINTERS = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float64: "*fp64", torch.int32: "*i32",
    torch.int64: "*i64", torch.bool: "*i1", torch.int8: "*i8", torch.uint8: "*u8", torch.int16: "*i16",
}  # fmt: skip

MOST_SPILLED = 0.08  # of a loop's operations


class Launch(NamedTuple):
    """kernel: Triton's. given: its arguments in order. options: constants, warps and stages by name."""

    kernel: Any
    grid: tuple[int, ...]
    given: tuple[Any, ...]
    options: dict[str, Any]


class Resources(NamedTuple):
    """registers and stack (bytes, where what has no register goes) of a thread; shared: bytes of a block."""

    registers: int
    stack: int
    shared: int


@contextlib.contextmanager
def caught(capability: tuple[int, int]) -> Iterator[list[Launch]]:
    """The launches made meanwhile, as if the CPU were an NVIDIA GPU of this capability."""
    from triton.runtime.jit import JITFunction

    made: list[Launch] = []

    def run(self: Any, *given: Any, grid: Any, warmup: bool, **options: Any) -> None:
        made.append(Launch(self, grid, given, options))

    patches = (
        mock.patch.object(JITFunction, "run", run), mock.patch.object(styles, "is_nvidia", lambda device_type: True),
        mock.patch.object(config, "capability_of", lambda device: capability),
        mock.patch("anyattn.backends.triton.backward_pass.capability_of", lambda device: capability),
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield made


def compiled(launch: Launch, capability: tuple[int, int]) -> Any:
    """The launch's kernel, compiled for a GPU of this capability."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types, constants, aligned = {}, {}, {}
    for at, parameter in enumerate(launch.kernel.params):
        name = parameter.name
        if parameter.is_constexpr:
            types[name], constants[name] = "constexpr", launch.options[name]
        elif hasattr(launch.given[at], "block_shape"):
            block = launch.given[at]
            types[name] = f"tensordesc<{_POINTERS[block.base.dtype][1:]}{list(block.block_shape)}>"
        elif isinstance(launch.given[at], torch.Tensor):
            types[name] = _POINTERS[launch.given[at].dtype]
            if not parameter.do_not_specialize_on_alignment and launch.given[at].data_ptr() % 16 == 0:
                aligned[at,] = [["tt.divisibility", 16]]
        else:
            types[name] = parameter.annotation_type
    options = {name: value for name, value in launch.options.items() if name not in constants}
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    return triton.compile(ASTSource(launch.kernel, types, constants, aligned), target=target, options=options)


def _tool(name: str, *arguments: str) -> str:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    return subprocess.run([str(path), *arguments], capture_output=True, text=True, check=True).stdout


def resources(kernel: Any) -> Resources:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        found = re.search(r"REG:(\d+) STACK:(\d+)", _tool("cuobjdump", "-res-usage", file.name))
    assert found is not None
    return Resources(int(found[1]), int(found[2]), kernel.metadata.shared)


def loops(kernel: Any) -> list[list[str]]:
    """The PTX instructions of each innermost loop."""
    lines = [line.strip() for line in kernel.asm["ptx"].splitlines()]
    labels = {line.split(":")[0]: at for at, line in enumerate(lines) if line.startswith("$L__BB")}
    jumps = [(labels[found[1]], at) for at, line in enumerate(lines) if (found := re.search(r"bra(?:\.uni)?\s+(\$L__BB\w+)", line))]
    return [[line for line in lines[to:at] if line and line[0] not in "$/."] for to, at in _innermost(jumps)]


def machine_loops(cubin: bytes) -> list[list[str]]:
    """The machine's operations in each innermost loop."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = _tool("cuobjdump", "-sass", file.name)
    found = [(int(m[1], 16), m[2]) for m in re.finditer(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", text)]
    places = {address: at for at, (address, _) in enumerate(found)}
    jumps = [
        (places[int(m[1], 16)], at)
        for at, (_, line) in enumerate(found)
        if (m := re.search(r"\bBRA\b.*?\b0x([0-9a-f]+)", line)) and int(m[1], 16) in places
    ]
    operations = [re.sub(r"^@\S+\s+", "", line).split()[0] for _, line in found]
    return [operations[to : at + 1] for to, at in _innermost(jumps)]


def _innermost(jumps: list[tuple[int, int]]) -> list[tuple[int, int]]:
    back = [(to, at) for to, at in jumps if to < at]
    return [b for b in back if not any(b != c and b[0] <= c[0] and c[1] <= b[1] for c in back)]


def spilled(cubin: bytes) -> float:
    """The share of operations that move registers to and from memory, in the worst loop with a product, the tensor cores' or float32's.
    What is put away before a loop and fetched after it costs nothing that counts."""
    worst = 0.0
    for loop in machine_loops(cubin):
        if any("MMA" in operation for operation in loop) or sum(operation.startswith("FFMA") for operation in loop) > 100:
            worst = max(worst, sum(operation.startswith(("LDL", "STL")) for operation in loop) / len(loop))
    return worst


def problem_of(
    score_mod: Any = None, mask_mod: Any = None, *, dim: int = 128, dtype: torch.dtype = torch.bfloat16, length: int = 256, **more: Any
) -> Problem:
    """A problem of self-attention, of one number spread over all shapes: nothing is computed. more: dim_v, block_mask, sink, has_grad."""
    shape = (1, 4, length, dim)
    q, v = torch.zeros(shape, dtype=dtype), torch.zeros((*shape[:3], more.get("dim_v", dim)), dtype=dtype)
    k = q.clone()
    for t in (q, k, v):
        t.requires_grad_(more.get("has_grad", False))
    return check.flex_problem(
        q, k, v, score_mod, more.get("block_mask"), mask_mod, None, None, False, more.get("sink"), True, False, False
    )  # fmt: skip


def planned(problem: Problem, capability: tuple[int, int], options: dict[str, Any] | None = None) -> Plan:
    machine = hardware.Hardware("cuda", "a GPU", 0, frozenset(), capability, 132)
    return plan._triton_plan(problem, machine, "asked for", options or {})


def launches(problem: Problem, capability: tuple[int, int], options: dict[str, Any] | None = None, backward: bool = False) -> list[Launch]:
    """What a call would launch: the forward pass, or the three kernels of the backward."""
    from anyattn.backends.triton import backward_pass, run

    chosen = planned(problem, capability, options)
    with caught(capability) as made:
        found = run.forward(problem, chosen)
        if backward:
            made.clear()
            backward_pass.backward(problem, chosen, found.out, found.lse, torch.zeros_like(found.out), None)  # type: ignore[arg-type]
    return made
