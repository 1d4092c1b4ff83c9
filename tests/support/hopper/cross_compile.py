"""Cross-compilation of forward kernels by head dimension for sm_90a; prints {name: bytes of local memory} for each.

Arguments: folder, head_dim, head_dim_v, and optionally the cases; after "and" those of another head dimension.

Runs in a separate process: the architecture is an environment variable that CuTe DSL reads once.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import struct
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

warnings.simplefilter("ignore")

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from anyattn import masks
from anyattn.backends.hopper.compile.build import kernel_of
from anyattn.backends.hopper.config import (
    LEAST_PIECE,
    LEAST_SHARED_PIECE,
    WIDE,
    Ask,
    Config,
    ModsOfConfig,
    slots,
    tiles_for,
)
from anyattn.backends.hopper.make_config import TILES_IN_ORDER
from anyattn.mods.analysis.row_ranges import ranges_unread, row_ranges
from anyattn.mods.tracing.trace import trace
from tests.support.hopper.loads_before_release import late_loads
from tests.support.hopper.masks import MASKS
from tests.support.sass import of_cubin

TYPES = {torch.float32: Float32, torch.int64: cutlass.Int64, torch.bool: cutlass.Uint8}


def fake(dtype, rank: int, divisible: int = 1, alignment: int = 4):  # type: ignore[no-untyped-def]
    strides = (*(cute.sym_int64(divisibility=divisible) for _ in range(rank - 1)), 1)
    return make_fake_tensor(dtype, tuple(cute.sym_int() for _ in range(rank)), strides, assumed_align=alignment)


def frame_sizes(cubin: Path) -> list[int]:
    """Bytes of local memory of each kernel, from the ELF sections .nv.info (attribute 0x11): what is spilled lies there."""
    data = cubin.read_bytes()
    start, (size, count) = struct.unpack_from("<Q", data, 40)[0], struct.unpack_from("<HH", data, 58)
    sections = [struct.unpack_from("<IIQQQQ", data, start + size * i) for i in range(count)]
    found = []
    for *_, at, length in (s for s in sections if s[1] == 0x70000000):
        end = at + length
        while at < end:
            kind, attribute, extent = struct.unpack_from("<BBH", data, at)
            if kind == 4 and attribute == 0x11:
                found.append(struct.unpack_from("<II", data, at + 4)[1])
            at += 4 + (extent if kind == 4 else 0)
    return found


def products_and_waits(cubin: Path) -> tuple[int, int]:
    """Instructions that multiply, and those that wait for one another around them: the low 12 bits of an instruction's 16 bytes say which.

    Where the compiler is not sure who writes the accumulators it waits before and after each product, and says so to nobody.
    """
    data = cubin.read_bytes()
    codes = [struct.unpack_from("<H", data, at)[0] & 0xFFF for at in range(0, len(data) - 15, 16)]  # sections of code are aligned
    return sum(code in (0xDF0, 0x9F0) for code in codes), codes.count(0x9C5)


def cubin_of(kernel: Any, given: tuple, folder: Path) -> Path:  # type: ignore[type-arg]
    """Compiles a kernel into a new folder. Lines of the source change no machine code."""
    folder.mkdir(parents=True)
    cute.compile(kernel, *given, options=f"--keep-cubin --keep-ptx --generate-line-info --dump-dir={folder}")
    (cubin,) = folder.glob("*.cubin")
    text = of_cubin("nvdisasm", cubin.read_bytes(), "-c", "-hex", "-g", "-ndf")
    late = late_loads(text)
    assert not late, f"{kernel.config}: " + "; ".join(map(str, late))
    waits, accesses = (re.search(rf"\b({names})\b", text) for names in ("ACQBULK", "LDG|STG|RED|ATOMG|UTMALDG|UTMAPF|UTMASTG"))
    waits_first = waits is not None and accesses is not None and waits.start() < accesses.start()
    assert waits_first is getattr(kernel, "waits", False) and (waits is None or waits_first), f"{kernel.config}: tables are read too early"
    return cubin


def captured(config: ModsOfConfig, mods: list) -> tuple[tuple, tuple]:  # type: ignore[type-arg]
    """The numbers and tensors that the mods of a config capture, and those of dropout."""
    scalars, tensors = [], []
    for mod, expr in zip(mods, config.exprs, strict=True):
        numbers, count = slots(expr)
        scalars += [Float32(1.0) if isinstance(x, float) else Int32(0) for x in mod.scalars[:numbers]]
        tensors += [fake(TYPES[t.dtype], t.ndim, alignment=t.element_size()) for t in mod.tensors[:count]]
    if getattr(config, "has_skip", False):
        tensors += [fake(Float32, 1), *([fake(Int32, 3)] if config.counts_skips else [])]
    if config.has_dropout:
        scalars += [Int32(0), Float32(1.0)]
        tensors += [fake(Int32, 1)]
    if getattr(config, "in_order", False) and config.sums.in_global:
        tensors += [fake(Float32, 2)]
    return tuple(scalars), tuple(tensors)


def compile(config: Config, mods: list, folder: Path) -> list[int]:  # type: ignore[type-arg]
    kernel = kernel_of(config)
    big = [*(fake(kernel.dtype, 4, 8, 16) for _ in range(3)), fake(Float32, 4) if config.is_split else fake(kernel.dtype, 4, 8, 16)]
    statistics = [fake(Float32, 3) if wanted else None for wanted in (config.has_lse, config.has_max)]
    sink = fake(Float32, 1) if config.has_sink else None
    ranks = {None: (), "dense": (3, 4, 3, 4), "ragged": (2, 3, 2, 3), "flat": (2, 2, 2, 2)}[config.lists]
    lists = [fake(Int32, rank) for rank in ranks] or [None] * 4
    wanted = config.has_order, config.has_entries, config.is_paged
    tables = [fake(Int32, rank) if has else None for has, rank in zip(wanted, (2, 1 + config.has_order, 2), strict=True)]
    sizes = (Float32(1.0), Int32(1), Int32(1), Int32(1), Int32(1))
    given = (*big, *statistics, sink, *lists, *tables, fake(Int32, 1), *sizes, *captured(config, mods), make_fake_stream())
    cubin = cubin_of(kernel, given, folder)
    products, waits = products_and_waits(cubin)
    assert waits < products, f"{config}: {products} products wait for one another {waits} times"
    return frame_sizes(cubin)


def cases() -> dict[str, tuple[list, dict]]:  # type: ignore[type-arg]
    """name: the mods in the order of ``Config.exprs``, and the config's fields."""
    slopes, table, ids = torch.rand(4), torch.rand(4, 100), torch.arange(10) // 3
    alibi = trace(lambda s, b, h, q, k: s - slopes[h] * (q - k).abs(), "score")
    straight = trace(lambda s, b, h, q, k: s + table[h, q - k], "score")
    relative = trace(lambda s, b, h, q, k: s + table[h, torch.clamp(q - k, -49, 49) + 49], "score")
    by_token = trace(lambda s, b, h, q, k: s + table[ids[q], ids[k]], "score")
    capped = trace(lambda s, b, h, q, k: 30.0 * torch.tanh(s / 30.0), "score")
    causal, window, sinks = (row_ranges(trace(m, "mask")) for m in (masks.causal(), masks.sliding_window(9, 0), masks.sink_window(4, 9)))
    document, tree = trace(masks.document(ids), "mask"), trace(masks.tree(torch.zeros(9, 3, dtype=torch.int64)), "mask")
    names = ("neighbourhood", "strided", "captured image", "random blocks", "video")
    near, strided, image, blocks, video = (trace(MASKS[name], "mask") for name in names)
    rounded = trace(lambda s, b, h, q, k: s + torch.round(s) % 3 - torch.sign(s) * ((q - k) // 3 ^ k) + torch.log1p(s.abs()), "score")
    powers = trace(lambda s, b, h, q, k: torch.fmod(s**3, 7) + s.abs() ** 1.7 - 0.9 ** (q - k).abs(), "score")
    hashed = trace(lambda b, h, q, k: ((q * 1103515245 + k * 2654435761).to(torch.int32) >> (k.to(torch.int8) & 7)) % 7 < 3, "mask")
    until = ranges_unread(trace(lambda b, h, q, k: k - q <= ids[b], "mask"))  # int64, and so perhaps far away
    assert causal is not None and window is not None and sinks is not None and until is not None
    ends = {"bands": (causal.expr,)}
    short = {"lists": "dense", "has_order": True, "rows": 64}
    skipping = {"has_skip": True}
    each, entries = Ask(document.expr, False), {"has_entries": True, "has_order": True, "spread": "heads"}
    return {
        "full": ([], {"has_sink": True}),
        "causal": ([causal], ends),
        "window": ([window], {"bands": (window.expr,), "has_max": True}),
        "dropout": ([], {"has_dropout": True}),
        "dropout causal": ([causal], {**ends, "has_dropout": True}),
        "dropout alibi": ([alibi, causal], {"score": alibi.expr, **ends, "has_dropout": True}),
        "dropout tree": ([tree], {"always": (Ask(tree.expr, False),), "has_dropout": True}),
        "highest": ([], {"has_max": True, "has_sink": True}),
        "highest of alibi": ([alibi, causal], {"score": alibi.expr, **ends, "has_max": True}),
        "alibi": ([alibi, causal], {"score": alibi.expr, **ends}),
        "straight": ([straight, causal], {"score": straight.expr, **ends}),
        "relative": ([relative], {"score": relative.expr}),
        "by_token": ([by_token, causal], {"score": by_token.expr, **ends}),
        "capped": ([capped, window], {"score": capped.expr, "bands": (window.expr,), "is_bounded": True}),
        "sinks": ([sinks], {"lists": "dense", "partial": Ask(sinks.expr, True), "has_order": True}),
        "document": ([document], {"lists": "dense", "partial": each, "has_order": True, "has_sink": True}),
        "document and causal": ([document, causal], {"lists": "dense", "partial": each, "always": (Ask(causal.expr, True),)}),
        "tree": ([tree], {"lists": "dense", "partial": Ask(tree.expr, False), "has_order": True}),
        "neighbourhood": ([near], {"lists": "dense", "partial": Ask(near.expr, False), "has_order": True}),
        "strided": ([strided], {"lists": "dense", "partial": Ask(strided.expr, False), "has_order": True}),
        "image": ([image], {"lists": "dense", "partial": Ask(image.expr, False), "has_order": True}),
        "video": ([video], {"lists": "dense", "partial": Ask(video.expr, False), "has_order": True}),
        "blocks": ([blocks], {"lists": "dense", "partial": Ask(blocks.expr, False), "has_order": True}),
        "rounded": ([rounded], {"score": rounded.expr}),
        "whole numbers": ([hashed, until], {"lists": "dense", "partial": Ask(hashed.expr, False), "always": (Ask(until.expr, True),)}),
        "powers": ([powers, causal], {"score": powers.expr, **ends}),
        "ragged": ([causal], {**ends, **entries}),
        "documents": ([alibi, causal], {"score": alibi.expr, **ends, **entries, "has_count": True}),
        "documents or lists": ([document], {"lists": "dense", "partial": each, "has_order": True, "has_count": True, "spread": "heads"}),
        "ragged lists": ([document], {"lists": "ragged", "partial": each, **entries}),
        "pages of 16": ([causal], {**ends, **entries, "page": 16}),
        "pages of 1": ([causal], {**ends, **entries, "page": 1}),
        "pages of 256": ([causal], {**ends, **entries, "page": 256}),
        "pages and lists": ([document], {"lists": "ragged", "partial": each, **entries, "page": 48}),
        "packed": ([causal], {**ends, "heads_per_tile": 8, "has_sink": True}),
        "packed alibi": ([alibi, window], {"score": alibi.expr, "bands": (window.expr,), "heads_per_tile": 4}),
        "packed relative": ([relative], {"score": relative.expr, "heads_per_tile": 8}),
        "packed straight": ([straight, causal], {"score": straight.expr, "heads_per_tile": 8, **ends}),
        "packed lists": ([document], {"lists": "dense", "partial": each, "has_order": True, "heads_per_tile": 8}),
        "packed ragged": ([causal], {**ends, **entries, "heads_per_tile": 4}),
        "short": ([], {**short, "per_head": True, "spread": "none"}),
        "short tree": ([tree], {**short, "partial": Ask(tree.expr, False)}),
        "short document and causal": ([document, causal], {**short, "partial": each, "always": (Ask(causal.expr, True),)}),
        "short alibi": ([alibi, causal], {**short, "score": alibi.expr, "always": (Ask(causal.expr, True),), "has_max": True}),
        "short straight": ([straight, document], {**short, "score": straight.expr, "partial": each}),
        "short ragged": ([document], {**short, "lists": "ragged", "partial": each, **entries, "page": 48}),
        "highest of capped": ([capped, window], {"score": capped.expr, "bands": (window.expr,), "is_bounded": True, "has_max": True}),
        "short of key heads": ([], {**short, "per_head": True, "by_kv_head": True, "spread": "none"}),
        "packed lists of key heads": (
            [document],
            {
                "lists": "dense",
                "partial": each,
                "has_order": True,
                "heads_per_tile": 8,
                "per_head": True,
                "by_kv_head": True,
                "spread": "none",
            },
        ),
        "ragged lists of key heads": ([document], {"lists": "ragged", "partial": each, **entries, "per_head": True, "by_kv_head": True}),
        "skipping": ([], skipping),
        "skipping causal": ([causal], {**ends, **skipping, "counts_skips": True}),
        "skipping window": ([window], {"bands": (window.expr,), **skipping, "has_max": True}),
        "skipping alibi": ([alibi, causal], {"score": alibi.expr, **ends, **skipping}),
        "skipping straight": ([straight, causal], {"score": straight.expr, **ends, **skipping}),
        "skipping relative": ([relative], {"score": relative.expr, **skipping}),
        "skipping capped": ([capped, window], {"score": capped.expr, "bands": (window.expr,), **skipping}),
        "skipping document": ([document], {"lists": "dense", "partial": each, "has_order": True, **skipping, "counts_skips": True}),
        "skipping tree": ([tree], {"lists": "dense", "partial": Ask(tree.expr, False), "has_order": True, **skipping}),
        "skipping document and causal": (
            [document, causal],
            {"lists": "dense", "partial": each, "always": (Ask(causal.expr, True),), **skipping, "counts_skips": True},
        ),
        "skipping dropout": ([causal], {**ends, "has_dropout": True, **skipping, "counts_skips": True}),
        "skipping packed": ([causal], {**ends, "heads_per_tile": 8, **skipping, "counts_skips": True}),
        "skipping packed alibi": ([alibi, window], {"score": alibi.expr, "bands": (window.expr,), "heads_per_tile": 4, **skipping}),
        "skipping short": ([], {**short, "per_head": True, "spread": "none", **skipping, "counts_skips": True}),
        "skipping short tree": ([tree], {**short, "partial": Ask(tree.expr, False), **skipping}),
    }


def decoding() -> dict[str, tuple[list, dict]]:  # type: ignore[type-arg]
    """Cases of wide heads that share row tiles, with split keys and without."""
    causal, window = (row_ranges(trace(m, "mask")) for m in (masks.causal(), masks.sliding_window(9, 0)))
    assert causal is not None and window is not None
    capped = trace(lambda s, b, h, q, k: 30.0 * torch.tanh(s / 30.0), "score")
    entries = {"has_entries": True, "has_order": True, "spread": "heads", "has_one_kv": True}
    split = {**entries, "is_split": True}
    return {
        "decoding": ([causal], {"bands": (causal.expr,), **entries, "page": 64, "heads_per_tile": 128, "has_sink": True}),
        "decoding alone": ([], {**entries, "page": 2, "heads_per_tile": 64, "has_sink": True, "rows": 64, "keys": 32}),
        "decoding split": ([causal], {"bands": (causal.expr,), **split, "page": 64, "heads_per_tile": 128}),
        "decoding split alone": ([window], {"bands": (window.expr,), **split, "heads_per_tile": 32, "rows": 64, "keys": 32}),
        "decoding split capped": ([capped], {"score": capped.expr, **split, "page": 16, "heads_per_tile": 128}),
        "decoding split rows": ([], {**split, "has_one_kv": False}),
        "decoding split lengths": ([], {**split, "has_order": False, "heads_per_tile": 16, "rows": 64, "keys": 32}),
        "decoding lengths": ([causal], {"bands": (causal.expr,), **entries, "has_order": False, "page": 64, "heads_per_tile": 128}),
    }


def in_order(head_dim: int) -> dict[str, tuple[list, dict]]:  # type: ignore[type-arg]
    """Cases of ``TILES_IN_ORDER`` whose rows have the same bits in every batch."""
    causal, window = (row_ranges(trace(m, "mask")) for m in (masks.causal(), masks.sliding_window(9, 0)))
    assert causal is not None and window is not None
    entries = {"has_entries": True, "has_order": True, "spread": "heads"}
    name = f"in order of {head_dim}" if head_dim in (96, 256) else "in order"
    return {
        name: ([], {"has_sink": True}),
        f"{name} causal": ([causal], {"bands": (causal.expr,), "heads_per_tile": 4}),
        f"{name} window": ([window], {"bands": (window.expr,), **entries, "has_sink": True, "has_max": True}),
        f"{name} packed": ([causal], {"bands": (causal.expr,), **entries, "has_sink": True}),
    }


def rare() -> dict[str, tuple[list, dict]]:  # type: ignore[type-arg]
    """Cases that are compiled only when they are named."""
    rows = torch.rand(100, 8), torch.rand(100, 8)
    near = trace(lambda s, b, h, q, k: torch.tan(s) + torch.atan(s) + torch.sinh(s) + torch.erfinv(s) + torch.hypot(s, s * 2), "score")
    other = trace(lambda s, b, h, q, k: torch.cosh(s) + torch.atan2(s, s + 1.0) + torch.nan_to_num(s), "score")
    products = trace(lambda s, b, h, q, k: s + torch.dot(rows[0][q], rows[1][k]), "score")
    small, large = torch.rand(100), torch.rand(100)
    floats = trace(lambda b, h, q, k: torch.floor(q / 41.0) + large[k] / 3 * 0.3 < torch.maximum(torch.sqrt(small[q]), large[k]), "mask")
    found = {f"functions {i}": ([mod], {"score": mod.expr}) for i, mod in enumerate((near, other, products))}
    return found | {"floats": ([floats], {"always": (Ask(floats.expr, False),)})}


def of_each(folder: Path, arguments: list[str], compiled: Callable[..., dict[str, Any]]) -> list[dict[str, Any]]:
    """What ``compiled`` finds for each head dimension: one process imports the compiler once."""
    found = []
    for is_and, part in itertools.groupby(arguments, lambda word: word == "and"):
        if not is_and:
            head_dim, head_dim_v, *only = part
            place = folder / f"{head_dim}_{head_dim_v}"
            place.mkdir()
            found.append(compiled(place, int(head_dim), int(head_dim_v), *only))
    return found


def main(folder: Path, head_dim: int, head_dim_v: int, *only: str) -> dict[str, list[int]]:
    """Compiles the cases of these names or of these first words; all, but for the rare ones, if none is given. For wide heads V is the
    first columns of K in every other case, and thread blocks share keys where they can in two of four."""
    result, known, is_wide = {}, cases() | (rare() if only else {}), (head_dim, head_dim_v) in WIDE
    known |= decoding() if is_wide else {}
    known |= in_order(head_dim) if (head_dim, head_dim_v) in TILES_IN_ORDER else {}
    chosen = [name for name in known if not only or any(name == wanted or name.startswith(f"{wanted} ") for wanted in only)]
    for i, (name, (mods, fields)) in enumerate(known.items()):
        if name not in chosen:
            continue
        rows, page = fields.pop("rows", 128), fields.pop("page", 0)
        divided = fields.pop("keys", rows if "lists" in fields else None)  # lists have tiles of as many keys as rows
        asks = tuple(ask for ask in (fields.get("partial"), *fields.get("always", ())) if ask is not None)
        packs = "heads_per_tile" in fields
        if is_wide and "has_skip" in fields:
            continue
        if is_wide:
            fields.setdefault("has_one_kv", i % 2 == 1)
        of_kv = fields.get("has_one_kv", False)
        tiles = tiles_for(
            head_dim, head_dim_v, fields.get("score"), divided, asks, page, packs, fields.get("has_dropout", False), rows, of_kv
        )
        if name.startswith("in order"):
            fields, tiles = {**fields, "in_order": True}, TILES_IN_ORDER[head_dim, head_dim_v]
            if tiles.warp_groups == 4 and "has_max" in fields:
                tiles = replace(tiles, tile_m=192)
        piece, is_bf16 = math.gcd(page, tiles.tile_n) if page else 0, i % 2 == 0 or "is_bounded" in fields
        may_share = is_wide and piece in (0, *range(LEAST_SHARED_PIECE, 65)) and rows % 128 == 0
        if may_share and (i // 2 % 2 == 0 or name.startswith("decoding")):
            fields |= {"pairs": True}
        cut = (rows // (tiles.tile_m * (1 + ("pairs" in fields))), rows // tiles.tile_n) if "lists" in fields else (1, 1)
        if is_wide and 0 < piece < LEAST_PIECE:
            continue  # its pieces are copied by TMA
        if 0 < piece < LEAST_PIECE:
            fields |= {"gathers": True}
            tiles, piece = tiles_for(head_dim, head_dim_v, fields.get("score"), divided, asks, 1), 1
        config = Config(head_dim, head_dim_v, is_bf16, tiles, list_cut=cut, has_lse=True, piece=piece, **fields)
        result[name] = compile(config, mods, folder / str(i))
    return result


if __name__ == "__main__":
    print(json.dumps(of_each(Path(sys.argv[1]), sys.argv[2:], main)))
