"""Cross-compilation of the backward kernels of wide heads for sm_90a; prints {case: [bytes of local memory, those among products]}.

Arguments: folder, and the cases' first words, all if none is given. Runs in a separate process, as ``cross_compile``.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

import torch
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_stream

from anyattn import masks
from anyattn.backends.hopper.captured_sums import with_derivatives
from anyattn.backends.hopper.compile.build import kernel_of
from anyattn.backends.hopper.config import Ask
from anyattn.backends.hopper.wide_backward_config import WideBackwardConfig, wide_tiles_for
from anyattn.mods.analysis.row_ranges import row_ranges
from anyattn.mods.tracing.trace import trace
from tests.support.hopper.cross_compile import captured, cubin_of, fake, frame_sizes, products_and_waits
from tests.support.hopper.cross_compile_backward import local_memory_among_products

HEADS = {"512": (512, False), "512 one": (512, True), "576": (576, False), "576 one": (576, True)}


def cases() -> dict[str, tuple[list, dict]]:  # type: ignore[type-arg]
    """name: the mods in the order of ``WideBackwardConfig.exprs``, and the config's fields."""
    slopes, ids = torch.rand(4), torch.arange(10) // 3
    capped = trace(lambda s, b, h, q, k: 30.0 * torch.tanh(s / 30.0), "score")
    alibi = trace(lambda s, b, h, q, k: s - slopes[h] * (q - k).abs(), "score")
    causal, window = (row_ranges(trace(m, "mask")) for m in (masks.causal(), masks.sliding_window(9, 0)))
    document = trace(masks.document(ids), "mask")
    assert causal is not None and window is not None
    ends = {"bands": (causal.expr,)}
    return {
        "full": ([], {}),
        "causal": ([causal], ends),
        "window": ([window], {"bands": (window.expr,)}),
        "capped": ([capped, causal], {"score": capped.expr, **ends}),
        "alibi": ([alibi], {"score": alibi.expr}),
        "document": ([document], {"lists": "dense", "partial": Ask(document.expr, False)}),
        "always": ([document, causal], {"lists": "dense", "partial": Ask(document.expr, False), "always": (Ask(causal.expr, True),)}),
        "lists": ([], {"lists": "dense", "per_head": True}),
    }


def compiled(of: str, dims: str, is_bf16: bool, mods: list, fields: dict[str, Any], folder: Path) -> tuple[int, int, int, int]:  # type: ignore[type-arg]
    """(local memory, that of the loops, products, waits between them)."""
    head_dim, one = HEADS[dims]
    one = one and of != "dv"
    tiles = wide_tiles_for(of, head_dim, 512, one)
    if "lists" in fields:
        fields = {**fields, "list_cut": (128 // tiles.tile_m, 128 // tiles.tile_n), "has_order": of == "dq"}
        if of == "dq":
            fields["spread"] = "none" if fields.get("per_head") else "all"
    if of != "dv" and "score" in fields:
        fields = {**fields, "score": with_derivatives(fields["score"])[0]}
    config = WideBackwardConfig(of, head_dim, 512, is_bf16, tiles, has_one_kv=one, **fields)
    kernel = kernel_of(config)
    big = [fake(kernel.dtype, 4, 8, 16) for _ in range(5)]
    big[4] = fake(Float32, 4) if config.stores_float32 else big[4]
    big[2] = None if config.keeps_one or config.streams_one else big[2]
    lists = [fake(Int32, rank) for rank in ((3, 4, 3, 4) if config.lists else ())] or [None] * 4
    order = fake(Int32, 2) if config.lists else None
    numbers = (Float32(1.0), Float32(1.0), Int32(1), Int32(1), Int32(1), Int32(1))
    given = (*big, fake(Float32, 4), fake(Float32, 4), *lists, order, fake(Int32, 1), *numbers, *captured(config, mods), make_fake_stream())
    cubin = cubin_of(kernel, given, folder)
    products, waits = products_and_waits(cubin)
    return max(frame_sizes(cubin)), local_memory_among_products(cubin), products, waits


def main(folder: Path, *only: str) -> dict[str, tuple[int, int, int, int]]:
    found = {}
    for name, (mods, fields) in cases().items():
        for dims in HEADS:
            for of in ("dq", "dk", "dv"):
                case = f"{of} {dims}: {name}"
                if (not only or any(case.startswith(word) for word in only)) and not (HEADS[dims][1] and of == "dv"):
                    found[case] = compiled(of, dims, name != "capped", mods, fields, folder / case.replace(" ", "_").replace(":", ""))
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), *sys.argv[2:])))
