"""Capture of the Triton backend's launches, and their compilation for a GPU that need not be present."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch

import anyattn
from anyattn import hardware, planner
from anyattn.backends.triton import tile_config
from anyattn.backends.triton.codegen import assumptions
from anyattn.call_cache import attention
from anyattn.plan import Plan
from anyattn.problem import Problem
from anyattn.validate import flex
from tests.support import cases
from tests.support.sass import of_cubin
from tests.support.triton.built import compiling_until
from tests.support.triton.uniform_registers import unwritten

MOST_SPILLED = 0.08  # of a loop's operations


class Launch(NamedTuple):
    """kernel: Triton's. given: its arguments in order. options: constants, warps and stages by name."""

    kernel: Any
    grid: tuple[int, ...]
    given: tuple[Any, ...]
    options: dict[str, Any]


class Made(NamedTuple):
    """One compiled kernel of a call. shared: bytes. spilled: ``spilled``. narrow: loads of a single 16-bit element."""

    kernel: str
    tile: tuple[int, int]
    warps: int
    stages: int
    shared: int
    registers: int
    spilled: float
    narrow: int


class Resources(NamedTuple):
    """registers and stack (bytes, where what has no register goes) of a thread; shared: bytes of a block."""

    registers: int
    stack: int
    shared: int


@contextlib.contextmanager
def as_amd() -> Iterator[None]:
    """Inside, torch is taken for a build for AMD's GPUs; open it outside of what catches launches."""
    with mock.patch.object(torch.version, "hip", "6.4"):
        yield


@contextlib.contextmanager
def caught(capability: tuple[int, int]) -> Iterator[list[Launch]]:
    """The launches made meanwhile, as if the CPU were a GPU of this capability: NVIDIA's, or AMD's ``as_amd``."""
    from triton.runtime.jit import JITFunction

    made: list[Launch] = []

    def run(self: Any, *given: Any, grid: Any, warmup: bool, **options: Any) -> None:
        made.append(Launch(self, grid, given, options))

    patches = (
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(assumptions, "is_nvidia", lambda device_type: torch.version.hip is None),
        mock.patch.object(tile_config, "capability_of", lambda device: capability),
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield made


def compiled(launch: Launch, gpu: tuple[int, int] | str, until: str = "cubin") -> Any:
    """The launch's kernel, specialised as Triton's own launcher does. gpu: NVIDIA's compute capability, or an architecture of AMD's. until:
    the last stage (``compiling_until``)."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    if isinstance(gpu, str):
        target = GPUTarget("hip", gpu, 64 if gpu.startswith("gfx9") else 32)
    else:
        target = GPUTarget("cuda", 10 * gpu[0] + gpu[1], 32)
    kernel = launch.kernel
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    options, signature, constants, attributes = kernel._pack_args(backend, launch.options, *bind(*launch.given, **launch.options))
    with compiling_until(until):
        made = triton.compile(ASTSource(kernel, signature, constants, attributes), target=target, options=options.__dict__)
    if gpu == (9, 0) and until == "cubin":
        assert not (lost := unwritten_registers(made)), f"ptxas reads uniform registers {lost} before it writes them"
    return made


def unwritten_registers(kernel: Any) -> list[int]:
    """See ``uniform_registers.unwritten``."""
    return unwritten(of_cubin("nvdisasm", kernel.asm["cubin"], "-c"))


def resources(kernel: Any) -> Resources:
    found = re.search(r"REG:(\d+) STACK:(\d+)", of_cubin("cuobjdump", kernel.asm["cubin"], "-res-usage"))
    assert found is not None
    return Resources(int(found[1]), int(found[2]), kernel.metadata.shared)


def loops(kernel: Any) -> list[list[str]]:
    """The PTX instructions of each innermost loop."""
    lines = [line.strip() for line in kernel.asm["ptx"].splitlines()]
    labels = {line.split(":")[0]: at for at, line in enumerate(lines) if line.startswith("$L__BB")}
    jumps = [(labels[found[1]], at) for at, line in enumerate(lines) if (found := re.search(r"bra(?:\.uni)?\s+(\$L__BB\w+)", line))]
    return [[line for line in lines[to:at] if line and line[0] not in "$/."] for to, at in _innermost(jumps)]


def _machine_code(cubin: bytes) -> list[tuple[int, str]]:
    """The address and the text of each instruction."""
    text = of_cubin("cuobjdump", cubin, "-sass")
    return [(int(m[1], 16), m[2]) for m in re.finditer(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", text)]


def products_and_waits(cubin: bytes) -> tuple[int, int]:
    """How many products of warp groups a kernel has, and how many of them are the last before a wait."""
    products = [line for _, line in _machine_code(cubin) if "HGMMA" in line]
    return len(products), sum("gsb0" in line for line in products)


def machine_loops(cubin: bytes) -> list[list[str]]:
    """The machine's operations in each innermost loop."""
    found = _machine_code(cubin)
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


def spilled(kernel: Any) -> float:
    """The share of operations that move registers to and from memory, in the worst loop with a product, the tensor cores' or float32's.
    What is put away before a loop and fetched after it costs nothing that counts."""
    return max(_spilled_shares(kernel.asm["cubin"]), default=0.0)


def _spilled_shares(cubin: bytes) -> list[float]:
    """Of each loop with a product, in the order of their addresses."""
    found = [ops for ops in machine_loops(cubin) if any("MMA" in op for op in ops) or sum(op.startswith("FFMA") for op in ops) > 100]
    return [sum(op.startswith(("LDL", "STL")) for op in ops) / len(ops) for ops in found]


def problem_of(
    score_mod: Any = None, mask_mod: Any = None, *, dim: int = 128, dtype: torch.dtype = torch.bfloat16, length: int = 256, **more: Any
) -> Problem:
    """A problem of self-attention, of one number spread over all shapes: nothing is computed. more: dim_v, block_mask, sink, has_grad."""
    shape = (1, 4, length, dim)
    q, v = torch.zeros(shape, dtype=dtype), torch.zeros((*shape[:3], more.get("dim_v", dim)), dtype=dtype)
    k = q.clone()
    for t in (q, k, v):
        t.requires_grad_(more.get("has_grad", False))
    return flex.flex_problem(
        q, k, v, score_mod, more.get("block_mask"), mask_mod, None, None, False, more.get("sink"), True, False, False
    )  # fmt: skip


def planned(problem: Problem, capability: tuple[int, int], options: dict[str, Any] | None = None) -> Plan:
    machine = hardware.Hardware("cuda", "a GPU", 0, frozenset(), capability, 132)
    return planner._plan_of("triton", problem, machine, "asked for", options or {})


def launches(problem: Problem, capability: tuple[int, int], options: dict[str, Any] | None = None, backward: bool = False) -> list[Launch]:
    """What a call would launch: the forward pass, or the three kernels of the backward."""
    from anyattn.backends.triton import Repeater

    repeater = Repeater(problem, planned(problem, capability, options))
    with caught(capability) as made:
        found = repeater.forward(problem)
        if backward:
            made.clear()
            repeater.backward(problem, found.out, found.lse, torch.zeros_like(found.out), None)  # type: ignore[arg-type]
    return made


@contextlib.contextmanager
def on(capability: tuple[int, int]) -> Iterator[list[Launch]]:
    """``caught``, of calls of the front doors: the CPU's tensors are planned for as if they were on that GPU."""
    machine = hardware.Hardware("cuda", "a GPU", 0, frozenset((torch.float16, torch.bfloat16, torch.float32)), capability, 132)
    attention.clear()
    with caught(capability) as made, mock.patch.object(hardware, "of", lambda *about: machine):
        yield made
    attention.clear()


def call(
    capability: tuple[int, int], d: int, dv: int, dtype: torch.dtype, variant: str = "causal", backward: bool = True, rows: int = 300,
    **options: Any,
) -> list[Made]:  # fmt: skip
    """The kernels of one call of a variant of ``tests.support.cases``, compiled: the forward's, and unless told otherwise those of its
    backward pass."""
    shape = cases.Shape(1, 2, 1, rows, 300, d, dv)
    q, k, v, dout = cases.inputs("normal", shape, dtype, 0)
    drawn = cases.VARIANTS[variant].make(shape, torch.Generator().manual_seed(0))
    tensors = tuple(t.float().requires_grad_(backward) if t.is_floating_point() else t for t in drawn)
    mods = cases.VARIANTS[variant].mods(tensors, shape)
    leaves = [t.requires_grad_(backward) for t in (q, k, v)]
    options = {"enable_gqa": True, "return_lse": True, "backend": "triton", "mask_mod": mods["mask"], **options}
    with on(capability) as launched:
        out, _ = anyattn.flex_attention(*leaves, mods["score"], **options)
        if backward:
            torch.autograd.grad(out, leaves, dout, materialize_grads=True)
    return [_made(launch, capability) for launch in launched]


def _made(launch: Launch, capability: tuple[int, int]) -> Made:
    kernel, options = compiled(launch, capability), launch.options
    name = re.sub(r"_[0-9a-f]+$", "", launch.kernel.fn.__code__.co_filename.strip("<>").split()[-1])
    found, narrow = resources(kernel), _narrow(kernel)
    tile = (options["TILE_M"], options.get("TILE_N", 0))
    in_loops = spilled(kernel)
    return Made(name, tile, options["num_warps"], options["num_stages"], found.shared, found.registers, in_loops, narrow)


def _narrow(kernel: Any) -> int:
    """Loads of single 16-bit elements."""
    return len(re.findall(r"ld\.global\S*\.b16", kernel.asm["ptx"]))


def judge(made: list[Made], capability: tuple[int, int], label: str) -> None:
    """That each finds its shared memory, loads rows in wide pieces, and spills next to nothing in a loop."""
    room = tile_config.shared_memory(capability)
    for one in made:
        assert one.shared <= room, f"{label}: {one} takes more than the device's {room} bytes of shared memory"
        assert not one.narrow, f"{label}: {one} loads rows element by element"
        assert one.spilled <= MOST_SPILLED, f"{label}: {one} spills registers"
