"""Cross-compilation of backward kernels for sm_90a; prints {name: [bytes of local memory, whether a loop with products accesses it]}.

Arguments: those of ``cross_compile``; "rows" names the kernels of row statistics and of dq. Runs in a separate process for the same reason.
"""

from __future__ import annotations

import json
import struct
import sys
import warnings
from dataclasses import replace
from pathlib import Path

warnings.simplefilter("ignore")

import torch
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_stream

from anyattn import masks, scores
from anyattn.backends.hopper.backward_config import (
    BackwardConfig,
    RowsConfig,
    backward_tiles_for,
    fits_halved,
    short_tiles_for,
    tall_tiles_for,
)
from anyattn.backends.hopper.captured_sums import with_derivatives
from anyattn.backends.hopper.compile.build import kernel_of
from anyattn.backends.hopper.config import Ask
from anyattn.backends.hopper.kernel.backward.rows import RowsAfter, RowsBefore
from anyattn.mods.analysis.row_ranges import row_ranges
from anyattn.mods.tracing.trace import trace
from tests.support.hopper.cross_compile import captured, cubin_of, fake, frame_sizes, of_each, products_and_waits
from tests.support.hopper.masks import MASKS

_CODE_BYTES = 16
_EXECUTABLE = 4
_LOCAL = (0x983, 0x387)  # LDL, STL
_PRODUCTS = (0xDF0, 0x9F0)


def local_memory_among_products(cubin: Path) -> int:
    """Accesses of local memory between the first and the last instruction that multiplies: the loop over row tiles lies there."""
    data = cubin.read_bytes()
    start, (size, count) = struct.unpack_from("<Q", data, 40)[0], struct.unpack_from("<HH", data, 58)
    sections = [struct.unpack_from("<IIQQQQ", data, start + size * i) for i in range(count)]
    places = [at for _, _, flags, _, first, length in sections if flags & _EXECUTABLE for at in range(first, first + length, _CODE_BYTES)]
    codes = [int.from_bytes(data[at : at + 2], "little") & 0xFFF for at in places]
    at = [i for i, code in enumerate(codes) if code in _PRODUCTS]
    return sum(code in _LOCAL for code in codes[at[0] : at[-1]])


def compile_backward(config: BackwardConfig, mods: list, folder: Path, has_order: bool = False) -> tuple[int, int]:  # type: ignore[type-arg]
    kernel = kernel_of(config)
    big, statistics = [fake(kernel.dtype, 4, 8, 16) for _ in range(6)], [fake(Float32, 4) for _ in range(3)]
    if config.stores_float32:
        big[4:] = [fake(Float32, 4) for _ in range(2)]
    if config.stores_dq:
        statistics[2] = fake(kernel.dtype, 4, 8, 16)
    turns = fake(Int32, 3) if config.is_deterministic else None
    ranks = {None: (), "dense": (3, 4, 3, 4), "ragged": (2, 3, 2, 3), "flat": (2, 2, 2, 2)}[config.lists]
    lists = [fake(Int32, rank) for rank in ranks] or [None] * 4
    lists = [*lists[:2], None, None, fake(Int32, 4)] if config.has_ranks else [*lists, None]
    lists += [fake(Int32, 2), fake(Int32, 2)] if config.has_entries else [fake(Int32, 2) if has_order else None, None]
    totals = tuple(fake(Float32, rank) for rank in _ranks(config))
    numbers = (Float32(1.0), Float32(1.0), Int32(1), Int32(1), Int32(1), Int32(1))
    given = (*big, *statistics, turns, *lists, fake(Int32, 1), *numbers, *captured(config, mods), totals, make_fake_stream())
    cubin = cubin_of(kernel, given, folder)
    products, waits = products_and_waits(cubin)
    assert waits < products, f"{config}: {products} products wait for one another {waits} times"
    return max(frame_sizes(cubin)), local_memory_among_products(cubin)


def _ranks(config: BackwardConfig) -> list[int]:
    """The dimensions of the totals."""
    found = {s.total: (1 if s.place is None else len(s.place.outputs)) + s.has_copies for s in config.sums}
    return [found[i] for i in sorted(found)]


def compile_rows(config: RowsConfig, folder: Path, has_sums: bool = True, is_wide: bool = False) -> tuple[int, int]:
    kernel = RowsAfter(config) if config.is_after else RowsBefore(config)
    wide, floats = fake(kernel.dtype, 4, 8, 16), [fake(Float32, 4) for _ in range(3)]
    entries = fake(Int32, 2) if config.has_entries else None
    if config.is_after:
        parts = [None] * 4
        if config.divides_heads:
            parts = [fake(Float32, 4) for _ in range(4 if is_wide else 2)] + [
                fake(kernel.dtype, 4, 8, 16) for _ in range(0 if is_wide else 2)
            ]
        of_dq = (floats[0], wide) if has_sums else (None, None)
        given = (*of_dq, entries, None if config.has_entries else fake(Int32, 1), Float32(1.0), *parts)
    else:
        dlse, delta = (fake(Float32, 3) if config.has_dlse else None for _ in range(2))
        sums = floats[2] if has_sums else None
        given = (wide, fake(kernel.dtype, 4, 8, 16), fake(Float32, 3), dlse, delta, entries, *floats[:2], sums)
    return max(frame_sizes(cubin_of(kernel, (*given, make_fake_stream()), folder))), 0


def cases(head_dim: int) -> dict[str, tuple[list, dict]]:  # type: ignore[type-arg]
    """name: the mods in the order of ``BackwardConfig.exprs``, and the config's fields."""
    slopes, table, ids = torch.rand(4), torch.rand(4, 100), torch.arange(10) // 3
    capped = trace(lambda s, b, h, q, k: 30.0 * torch.tanh(s / 30.0), "score")
    alibi = trace(lambda s, b, h, q, k: s - slopes[h] * (q - k).abs(), "score")
    relative = trace(lambda s, b, h, q, k: s + table[h, torch.clamp(q - k, -49, 49) + 49], "score")
    causal, window, sinks = (row_ranges(trace(m, "mask")) for m in (masks.causal(), masks.sliding_window(9, 0), masks.sink_window(4, 9)))
    document = trace(masks.document(ids), "mask")
    strided, image, video = (trace(MASKS[name], "mask") for name in ("strided", "captured image", "video"))
    assert causal is not None and window is not None and sinks is not None
    ends, lists, packed = {"bands": (causal.expr,)}, {"lists": "dense", "list_cut": (2, 1)}, {"has_entries": True}
    short = {"lists": "dense", "list_cut": (1, 1)}  # of tiles of 64 rows and keys
    return {
        "full": ([], {}),
        "causal": ([causal], ends),
        "deterministic": ([causal], {**ends, "is_deterministic": True}),
        "capped": ([capped, causal], {"score": with_derivatives(capped.expr)[0], **ends}),
        "dropout": ([], {"has_dropout": True}),
        "dropout causal": ([causal], {**ends, "has_dropout": True}),
        "dropout document": ([document], {**lists, "partial": Ask(document.expr, False), "has_dropout": True}),
        "dropout packed": ([causal], {**packed, **ends, "has_dropout": True}),
        "window": ([window], {"bands": (window.expr,), "is_deterministic": True}),
        "alibi": ([alibi, causal], {"score": with_derivatives(alibi.expr)[0], **ends}),
        "relative": ([relative], {"score": with_derivatives(relative.expr)[0]}),
        "document": ([document], {**lists, "partial": Ask(document.expr, False)}),
        "sinks": ([sinks], {**lists, "partial": Ask(sinks.expr, True)}),
        "document and causal": ([document, causal], {**lists, "partial": Ask(document.expr, False), "always": (Ask(causal.expr, True),)}),
        "strided": ([strided], {"lists": "dense", "list_cut": (128 // _rows(head_dim), 1), "partial": Ask(strided.expr, False)}),
        "image": ([image], {**lists, "partial": Ask(image.expr, False)}),
        "video": ([video], {**lists, "partial": Ask(video.expr, False)}),
        "packed": ([], packed),
        "packed causal": ([causal], {**packed, **ends}),
        "packed deterministic": ([causal], {**packed, **ends, "is_deterministic": True}),
        "packed window": ([window], {**packed, "bands": (window.expr,), "is_deterministic": True}),
        "packed capped": ([capped, causal], {**packed, "score": with_derivatives(capped.expr)[0], **ends}),
        "packed alibi": ([alibi, causal], {**packed, "score": with_derivatives(alibi.expr)[0], **ends}),
        "packed lists": ([document], {**packed, "lists": "flat", "list_cut": (2, 1), "partial": Ask(document.expr, False)}),
        "packed sinks": ([sinks], {**packed, "always": (Ask(sinks.expr, True),)}),
        "deterministic lists": ([document], {**lists, "partial": Ask(document.expr, False), "is_deterministic": True}),
        "one tile": ([], {"stores_dq": True}),
        "one tile, alibi": ([alibi, causal], {"score": with_derivatives(alibi.expr)[0], **ends, "stores_dq": True}),
        "parts": ([], {"stores_float32": True}),
        "causal parts": ([causal], {**ends, "stores_float32": True}),
        "packed parts": ([causal], {**packed, **ends, "stores_float32": True}),
        "alibi parts": ([alibi], {"score": with_derivatives(alibi.expr)[0], "stores_float32": True}),
        "document parts": ([document], {**lists, "partial": Ask(document.expr, False), "stores_float32": True}),
        "short": ([], {**short, "per_head": True}),
        "short document": ([document], {**short, "partial": Ask(document.expr, False)}),
        "short alibi": ([alibi, causal], {**short, "score": with_derivatives(alibi.expr)[0], "always": (Ask(causal.expr, True),)}),
        "short capped": ([capped], {**short, "score": with_derivatives(capped.expr)[0], "is_deterministic": True}),
        "short parts": ([], {**short, "stores_float32": True}),
        "one tile, sinks": ([sinks], {**lists, "partial": Ask(sinks.expr, True), "stores_dq": True}),
        "short of key heads": ([], {**short, "per_head": True, "by_kv_head": True}),
        "parts of key heads": ([], {**lists, "per_head": True, "by_kv_head": True, "stores_float32": True}),
    } | summed(head_dim)


def _rows(head_dim: int) -> int:
    """Of a tile where a predicate is words of bits."""
    return backward_tiles_for(head_dim, head_dim, is_plain=True).tile_m


def summed(head_dim: int) -> dict[str, tuple[list, dict]]:  # type: ignore[type-arg]
    """Score mods whose captured tensors get gradients: one of each kind of sum that the kernel takes at the head dimension."""
    flat, table, pairs = torch.rand(4), torch.rand(100, 100), torch.rand(2, 4, 9, 9)
    ids = torch.arange(100) // 3
    mods = {
        "by head": lambda s, b, h, q, k: s + flat[h],
        "by row": lambda s, b, h, q, k: s + table[h, q],
        "by key": lambda s, b, h, q, k: s + table[h, k],
        "slopes": lambda s, b, h, q, k: s + flat[h] * (q - k),
        "distance": lambda s, b, h, q, k: s + table[h, torch.clamp(q - k, -49, 49) + 49],
        "buckets": scores.t5_bias(table[:32, :4]),
        "pairs": lambda s, b, h, q, k: s + pairs[0, h, q, k],
        "each pair": lambda s, b, h, q, k: s + pairs[b, h, q, k],
        "looked up": lambda s, b, h, q, k: s + table[ids[q], ids[k]],
        "factor": lambda s, b, h, q, k: s * flat[h],
    }
    if head_dim == 64:
        mods["capped"] = lambda s, b, h, q, k: 30.0 * torch.tanh(s / 30.0) + table[h, q]
    found = {}
    for name, mod in mods.items():
        own = trace(mod, "score")
        wanted = tuple(i for i, t in enumerate(own.tensors) if t.is_floating_point())
        score, sums = with_derivatives(own.expr, wanted, wanted if name == "each pair" else ())
        found[f"summed {name}"] = ([own], {"score": score, "sums": sums})
    return found


def main(folder: Path, head_dim: int, head_dim_v: int, *only: str) -> dict[str, tuple[int, int]]:
    result: dict[str, tuple[int, int]] = {}
    own, heights = backward_tiles_for(head_dim, head_dim_v), set[int]()
    for i, (name, (mods, fields)) in enumerate(cases(head_dim).items()):
        is_bare, is_fixed = not fields.keys() & {"score", "lists", "always", "has_dropout"}, bool(fields.get("is_deterministic"))
        is_packed, packs = "has_entries" in fields, is_bare and fits_halved(head_dim, head_dim_v)
        if max(head_dim, head_dim_v) > 128 and (
            "sums" in fields or "has_dropout" in fields or (is_packed and not packs)
        ):  # which are another backend's
            continue
        short = short_tiles_for(head_dim, head_dim_v) if name.startswith("short") else None
        if name.startswith("short") and short is None:
            continue
        forms = {name: backward_tiles_for(head_dim, head_dim_v, name == "strided" or is_bare, is_bare, is_packed)}
        forms = forms if short is None else {name: short}
        if is_bare and "stores_dq" not in fields and (tall := tall_tiles_for(head_dim, head_dim_v, is_packed)) is not None:
            forms[f"tall {name}"] = tall
        for form, tiles in forms.items():
            tiles = replace(tiles, delta="behind") if "has_dropout" in fields else tiles
            if not only or form in only:
                config = BackwardConfig(head_dim, head_dim_v, i % 2 == 0, tiles, **fields)
                result[form] = compile_backward(config, mods, folder / form.replace(" ", "_"), has_order="lists" in fields and not is_fixed)
                heights.add(tiles.tile_m if form != name else own.tile_m)
    for tile_m in sorted(heights) if not only or "rows" in only else ():
        for is_after in (False, True):
            for has_entries in (False, True):
                config = RowsConfig(head_dim, head_dim_v, True, tile_m, is_after, not is_after, has_entries)
                name = f"{tile_m} rows {'packed ' if has_entries else ''}{'after' if is_after else 'before'}"
                result[name] = compile_rows(config, folder / name.replace(" ", "_"))
        for has_sums in (False, True):
            config = RowsConfig(head_dim, head_dim_v, True, tile_m, True, divides_heads=True)
            name = f"{tile_m} rows {'and parts' if has_sums else 'parts alone'}"
            result[name] = compile_rows(config, folder / name.replace(" ", "_"), has_sums)
        config = RowsConfig(head_dim, head_dim_v, True, tile_m, True, divides_heads=True)
        result[f"{tile_m} rows and wide parts"] = compile_rows(config, folder / f"{tile_m}_rows_and_wide_parts", is_wide=True)
        config = RowsConfig(head_dim, head_dim_v, True, tile_m, False)
        result[f"{tile_m} rows without sums"] = compile_rows(config, folder / f"{tile_m}_rows_without_sums", has_sums=False)
    return result


if __name__ == "__main__":
    print(json.dumps(of_each(Path(sys.argv[1]), sys.argv[2:], main)))
