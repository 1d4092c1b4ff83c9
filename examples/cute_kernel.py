"""Attention for users of CuTe: mods written as CuTe functions, and the kernel itself under ``cute.compile``.

Needs nvidia-cutlass-dsl (``pip install 'anyattn[cute]'``). ``python examples/cute_kernel.py`` compiles the kernel for Hopper wherever it
runs; on a Hopper GPU it also launches it on two batches of different shapes, and asks ``anyattn.flex_attention`` for the same.

A CuTe function gets the score and b, h, q_idx, kv_idx as TensorSSA vectors of one shape, and ``aux_tensors`` as a tuple of CuTe tensors.
Positions are those of plain Python mods: a row's or key's index in its own sequence, never past the end.
"""

import sys
import warnings
from pathlib import Path

import cutlass
import cutlass.cute as cute
import torch
from torch import Tensor

import anyattn
from anyattn.backends.hopper import HopperForward
from anyattn.backends.hopper.cute_api import Described, arguments, as_cute, describe, placeholders


@cute.jit
def table_bias(score, b, h, q_idx, kv_idx, aux_tensors):  # type: ignore[no-untyped-def]
    """A learned bias for each head and distance; the table is the first of aux_tensors, (heads, distances) float32.

    It is asked of hidden pairs too, so an index must be kept inside the table; a negative one does not count from the end here.
    """
    table = aux_tensors[0]
    return score + table[h[0], cutlass.max(q_idx[0] - kv_idx[0], 0)]


def plain_bias(score, b, h, q_idx, kv_idx, aux_tensors):  # type: ignore[no-untyped-def]
    """The same as plain Python, which every backend reads and differentiates."""
    return score + aux_tensors[0][h, q_idx - kv_idx]


@cute.jit
def causal(b, h, q_idx, kv_idx, aux_tensors):  # type: ignore[no-untyped-def]
    """The mask form returns a Boolean for each key. Of this one nothing is known but what it answers, so every tile is visited."""
    return kv_idx <= q_idx


def batch(size: int, seqlen: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and a table of biases, 8 query heads on 2 K/V heads of 128 dimensions."""
    shapes = ((size, 8, seqlen, 128), (size, 2, seqlen, 128), (size, 2, seqlen, 128))
    q, k, v = (torch.randn(shape, dtype=torch.bfloat16, device=device) for shape in shapes)
    return q, k, v, torch.randn(8, seqlen, device=device)


def described(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Described:
    """The kernel's config. A mask that anyattn can read, such as its own causal, needs no visit to the tiles above the diagonal."""
    return describe(q, k, v, table_bias, anyattn.masks.causal(), aux_tensors=[table])


def call(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> tuple[Tensor, tuple]:
    """out, and all arguments of the kernel but the stream."""
    out = torch.empty_like(q)
    counter = torch.zeros(2, dtype=torch.int32, device=q.device)
    return out, arguments(described(q, k, v, table), q, k, v, out, counter)


def compiled(options: str = "--gpu-arch sm_90a"):  # type: ignore[no-untyped-def]
    """The kernel for every length, batch and number of heads; no GPU is asked."""
    from cutlass.cute.runtime import make_fake_stream

    tensors = batch(1, 128, "cpu")
    _, given = call(*tensors)
    kernel = HopperForward(described(*tensors).config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # CuTe DSL's own, of deprecations and of tuples
        return cute.compile(kernel, *placeholders(given), make_fake_stream(), options=options)


def main() -> None:
    kernel = compiled()
    print(f"compiled {Path(__file__).name}'s kernel for sm_90a with CuTe DSL {cutlass.__version__}")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("no Hopper GPU here to launch it on")
        return
    import cuda.bindings.driver as cuda

    stream = cuda.CUstream(torch.cuda.current_stream().cuda_stream)
    for size, seqlen in ((2, 1000), (1, 4096)):
        q, k, v, table = batch(size, seqlen, "cuda")
        out, arguments_now = call(q, k, v, table)
        kernel(*as_cute(arguments_now), stream)
        # the same through the front door, with the mods as they are, and with the bias in plain Python
        given = {"aux_tensors": [table], "enable_gqa": True, "backend": "hopper"}
        same = anyattn.flex_attention(q, k, v, table_bias, mask_mod=causal, **given)
        plain = anyattn.flex_attention(q, k, v, plain_bias, mask_mod=anyattn.masks.causal(), **given)
        apart = max(float((out - other).abs().max()) for other in (same, plain))
        print(f"batch {size}, length {seqlen}: the three agree to {apart:.1e}")
        if not apart < 2**-4:  # two roundings of a bfloat16 between 4 and 8
            sys.exit("they disagree")


if __name__ == "__main__":
    main()
