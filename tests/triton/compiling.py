"""What a call would launch on a GPU that is not there, compiled: shared memory, registers and spills of each kernel, without a launch."""

from __future__ import annotations

import contextlib
import functools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton_ahead

from anyattn import hardware, plan, recall
from anyattn.backends.triton import backward_pass, config
from anyattn.backends.triton import run as forward_pass
from anyattn.testing import cases


class Made(NamedTuple):
    """One compiled kernel. shared: bytes. spilled: the share of spills among the operations of its worst loop; None if unknown.
    narrow: loads of a single 16-bit element."""

    kernel: str
    tile: tuple[int, int]
    warps: int
    stages: int
    shared: int
    registers: int
    spilled: float | None
    narrow: int


@contextlib.contextmanager
def on(capability: tuple[int, int]) -> Iterator[list[Made]]:
    """Inside, tensors of the CPU are taken for a GPU's, and what would be launched there is compiled instead."""
    made: list[Made] = []
    device = hardware.Hardware("cuda", "no such GPU", 0, frozenset((torch.float16, torch.bfloat16, torch.float32)), capability, 132)

    def compiled(kernel: Any, grid: Any, values: Any, captured: Any, at: Any, options: dict[str, Any]) -> None:
        numbers: list[Any] = []
        for read in captured:
            numbers += read.scalars
            tensors = (*read.tensors, *read.totals)
            numbers += [n for t in tensors for pair in zip(t.stride(), t.shape, strict=True) for n in pair]
            numbers += tensors
        made.append(_compiled(kernel, (*values, *numbers), options, capability))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware, "of", lambda *_: device)
        patch.setattr(plan, "_reason_against_triton", lambda *_: None)
        for module in (forward_pass, backward_pass):
            patch.setattr(module, "run_entry", compiled)
        patch.setattr(backward_pass, "capability_of", lambda _: capability)
        recall.clear()
        yield made
        recall.clear()


def _compiled(kernel: Any, arguments: tuple, options: dict[str, Any], capability: tuple[int, int]) -> Made:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, special, rest = bind(*arguments, **options)
    parsed, signature, constants, attributes = kernel._pack_args(backend, options, bound, special, rest)
    found = triton.compile(ASTSource(kernel, signature, constants, attributes), target=target, options=parsed.__dict__)
    registers, spilled = _resources(found.asm["cubin"])
    name = re.sub(r"_[0-9a-f]+$", "", kernel.fn.__code__.co_filename.strip("<>").split()[-1])
    tile = (options["TILE_M"], options.get("TILE_N", 0))
    narrow = len(re.findall(r"ld\.global\S*\.b16", found.asm["ptx"]))
    return Made(name, tile, options["num_warps"], options["num_stages"], found.metadata.shared, registers, spilled, narrow)


@functools.lru_cache(maxsize=1)
def _reader() -> str | None:
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return str(path) if path.exists() else None


def _resources(cubin: bytes) -> tuple[int, float | None]:
    """Registers of a thread, and the share of spills."""
    reader = _reader()
    if reader is None:
        return 0, None
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([reader, "-res-usage", file.name], capture_output=True, text=True, check=True)
    usage = re.search(r"Function \w*entry\w*:\s*REG:(\d+) STACK:(\d+)", said.stdout + said.stderr)
    assert usage, said.stdout
    return int(usage[1]), triton_ahead.spilled(cubin)


def call(
    capability: tuple[int, int], d: int, dv: int, dtype: torch.dtype, variant: str = "causal", backward: bool = True, rows: int = 300
) -> list[Made]:
    """The kernels of one call: the forward's, and unless told otherwise those of its backward pass."""
    import anyattn

    shape = cases.Shape(1, 2, 1, rows, 300, d, dv)
    q, k, v, dout = cases.inputs("normal", shape, dtype, 0)
    drawn = cases.VARIANTS[variant].make(shape, torch.Generator().manual_seed(0))
    tensors = tuple(t.float().requires_grad_(backward) if t.is_floating_point() else t for t in drawn)
    mods = cases.VARIANTS[variant].mods(tensors, shape)
    leaves = [t.requires_grad_(backward) for t in (q, k, v)]
    with on(capability) as made:
        out, _ = anyattn.flex_attention(*leaves, mods["score"], mask_mod=mods["mask"], enable_gqa=True, return_lse=True, backend="triton")
        if backward:
            torch.autograd.grad(out, leaves, dout, materialize_grads=True)
    return made


def check(made: list[Made], capability: tuple[int, int], label: str, most_spilled: float = triton_ahead.MOST_SPILLED) -> None:
    room = config.shared_memory(capability)
    for one in made:
        assert one.shared <= room, f"{label}: {one} takes more than the device's {room} bytes of shared memory"
        assert not one.narrow, f"{label}: {one} loads rows element by element"
        assert one.spilled is None or one.spilled <= most_spilled, f"{label}: {one} spills registers"
