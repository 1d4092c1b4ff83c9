"""Cross-compilation of kernels with CuTe functions for sm_90a; prints {name: bytes of local memory}.

Arguments: folder, and optionally "all" for the covered cases too. Runs in a separate process, as ``cross_compile.py``, whose functions it
uses.
"""

from __future__ import annotations

import json
import operator
import sys
from pathlib import Path

import cutlass
import cutlass.cute as cute
import torch

from anyattn import masks
from anyattn.backends.hopper.config import Ask, Config, tiles_for
from anyattn.mods.analysis.row_ranges import row_ranges
from anyattn.mods.compose import chained
from anyattn.mods.tracing.cute_mod import native_mod
from anyattn.mods.tracing.trace import trace
from tests.support.hopper.cross_compile import compile


@cute.jit
def doubled(score, b, h, q_idx, kv_idx, aux_tensors):
    return score * cute.full_like(score, 2.0)


@cute.jit
def relative(score, b, h, q_idx, kv_idx, aux_tensors):
    return score + aux_tensors[0][h[0], cutlass.max(q_idx[0] - kv_idx[0], 0)]


@cute.jit
def alone(score, b, h, q_idx, kv_idx, aux_tensors):
    """One value instead of a vector of one."""
    return score[0] - cutlass.Float32(q_idx[0] - kv_idx[0]) * 0.5


@cute.jit
def causal(b, h, q_idx, kv_idx, aux_tensors):
    return operator.ge(q_idx, kv_idx)


@cute.jit
def same_document(b, h, q_idx, kv_idx, aux_tensors):
    ids = aux_tensors[0]
    return ids[q_idx[0]] == ids[kv_idx[0]]


@cute.jit
def everything(b, h, q_idx, kv_idx, aux_tensors):
    return True


def cases() -> dict[str, tuple[list, dict]]:  # type: ignore[type-arg]
    """As in ``cross_compile.py``."""
    table, ids = torch.rand(4, 100), torch.arange(10) // 3
    scores = {f.__name__: native_mod(f, "score", [table] if f is relative else None) for f in (doubled, relative, alone)}
    asked = {f.__name__: native_mod(f, "mask", [ids] if f is same_document else None) for f in (causal, same_document, everything)}
    band = row_ranges(trace(masks.causal(), "mask"))
    capped = chained(trace(lambda s, b, h, q, k: 30.0 * torch.tanh(s / 30.0), "score"), scores["relative"])
    assert band is not None and all(scores.values()) and all(asked.values())
    ends, entries = {"bands": (band.expr,)}, {"has_entries": True, "has_order": True, "spread": "heads"}
    found: dict[str, tuple[list, dict]] = {name: ([mod, band], {"score": mod.expr, **ends}) for name, mod in scores.items()}  # type: ignore
    found |= {f"{name} everywhere": ([mod], {"always": (Ask(mod.expr, False),)}) for name, mod in asked.items()}  # type: ignore
    document, hidden = (Ask(asked[name].expr, False) for name in ("same_document", "causal"))  # type: ignore
    return found | {
        "capped": ([capped, band], {"score": capped.expr, **ends}),
        "listed": ([asked["same_document"]], {"lists": "dense", "partial": document, "has_order": True}),
        "band and mask": ([band, asked["same_document"]], {**ends, "always": (document,), "has_sink": True}),
        "ragged": ([scores["relative"], asked["causal"]], {"score": scores["relative"].expr, "always": (hidden,), **entries}),  # type: ignore
        "ragged and capped": ([capped, asked["causal"]], {"score": capped.expr, "always": (hidden,), **entries}),
    }


# a mask that is asked in the tiles of lists, and both kinds of mods, of which one is a function of another one's score, on a ragged batch;
# the others are compiled only where all are (``make test-long``)
QUICK = {"listed", "ragged and capped"}


def main(folder: Path, which: str = "") -> dict[str, list[int]]:
    result = {}
    for i, (name, (mods, fields)) in enumerate(cases().items()):
        if name not in QUICK and which != "all":
            continue
        head_dim = (128, 64)[i % 2]
        tiles = tiles_for(head_dim, head_dim, fields.get("score"), 128 if "lists" in fields or "always" in fields else None)
        cut = (1, 128 // tiles.tile_n) if "lists" in fields else (1, 1)
        config = Config(head_dim, head_dim, i % 2 == 0, tiles, list_cut=cut, has_lse=True, **fields)
        result[name] = compile(config, mods, folder / str(i))
    return result


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), *sys.argv[2:])))
