"""Small judged calls, each of which fails under some mutant (``hopper_mutants.py``), and under the sanitizer is clean.

``python -m tests.mutants.hopper_killers NAME...`` runs some and prints a line of JSON for each: its name, and what an assertion said, or
null.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from typing import Any

import torch

import anyattn
from anyattn import masks, scores
from tests.support.gpu import judging, ragged
from tests.support.gpu.judging import DEVICE, Capturing, check, flex, judge, qkv

SINK = torch.linspace(-1, 3, 4)
IDS = (torch.rand(2, 640, generator=torch.Generator().manual_seed(8)) < 0.01).long().cumsum(1)
LENGTHS = ([150, 17, 300, 70], [160, 300, 290, 70])
SLOPES = torch.tensor([0.02, 0.04, 0.06, 0.08])
ALIBI = Capturing(lambda to: (lambda sl: lambda s, b, h, i, j: s - sl[h] * (i - j).abs())(to(SLOPES)))


def rising(most: float) -> None:
    """Key tiles are visited from the last to the first, and each has far greater scores than the one before."""
    q, k, v = qkv(1, 4, 2)
    judge((q, k * torch.linspace(most, 0.5, 333, device=DEVICE)[:, None].to(k.dtype), v))


def lists() -> None:
    """Random lists, others for each entry and head; what a partial tile shows has holes that a full one does not."""
    classes = torch.randint(0, 3, (2, 4, 4, 4), generator=torch.Generator().manual_seed(4))
    classes[0, 1, 2] = 0
    tables = []
    for wanted in (1, 2):
        at = (classes == wanted).to(DEVICE)
        tables += [at.sum(-1, dtype=torch.int32), at.int().argsort(dim=-1, descending=True, stable=True).int()]
    shown = lambda b, h, i, j: (i + j > 300) & (j < 480)
    made = anyattn.BlockMask.from_kv_blocks(*tables, BLOCK_SIZE=128, mask_mod=shown, seq_lengths=(450, 500))
    inputs, at = qkv(sq=450, sk=500), classes.to(DEVICE)
    out, lse = flex(*inputs, block_mask=made, return_lse=True)

    def meant(b: Any, h: Any, i: Any, j: Any) -> Any:
        kind = at[b, h, i // 128, j // 128]
        return (kind == 2) | ((kind == 1) & shown(b, h, i, j))

    check("lists", {"out": out, "lse": lse}, *inputs, mask=meant)


def cut_lists() -> None:
    """Tiles of lists that hold two of the kernel's, the last with one of them past the last key."""
    mask = masks.sink_window(4, 60)
    made = anyattn.create_block_mask(mask, None, None, 300, 300, device=DEVICE, BLOCK_SIZE=(128, 256))
    judge(qkv(sq=300, sk=300), mask=mask, block_mask=made)


def beside_lists() -> None:
    ids = torch.zeros_like(IDS).to(DEVICE)
    made = anyattn.create_block_mask(masks.document(ids), 2, 1, 450, 500, device=DEVICE)
    inputs = qkv(sq=450, sk=500)
    out, lse = flex(*inputs, block_mask=made, mask_mod=masks.causal(), return_lse=True)
    check("beside lists", {"out": out, "lse": lse}, *inputs, mask=masks.causal())


def ragged_lists() -> None:
    mask = masks.document(IDS.repeat(2, 1).to(DEVICE))
    batch = ragged.drawn(LENGTHS)
    stored = ragged.packed(batch)
    for layout in ("flat", "padded"):
        made = anyattn.compute_varlen_block_sparsity(128, 128, None, mask, layout=layout, device=DEVICE, **stored.where)
        ragged.judge(batch, stored, {"mask_mod": mask}, layout, block_sparse_tensors=made)


def stored_as(form: str) -> Callable[[], None]:
    def judged() -> None:
        batch = ragged.drawn(LENGTHS)
        for options in ({}, {"causal": True}):
            ragged.judge(batch, ragged.FORMS[form](batch), options, form)

    return judged


def twice() -> None:
    """More row tiles than multiprocessors, launch after launch, into memory that holds NaN."""
    inputs = qkv(2, 16, 4, 650, 200)
    for _ in range(3):
        judge(inputs)


KILLERS: dict[str, Callable[[], Any]] = {
    "full": lambda: judge(qkv()),
    "causal": lambda: judge(qkv(), mask=masks.causal()),
    "window": lambda: judge(qkv(), mask=masks.sliding_window(100, 20)),
    "peaky": lambda: rising(12.0),
    "steep": lambda: rising(100.0),  # by more powers of 2 than a float has
    "capped": lambda: judge(qkv(kind="peaky"), score=scores.softcap(5.0)),
    "sink": lambda: judge(qkv(), sink=SINK),
    "score": lambda: judge(qkv(), score=ALIBI),
    "lists": lists,
    "cut_lists": cut_lists,
    "beside_lists": beside_lists,
    "ragged_lists": ragged_lists,
    "packed": stored_as("tail"),
    "pages": stored_as("pages of 256"),
    "pieces": stored_as("pages of 16"),
    "gathered": stored_as("pages of 1"),
    "twice": twice,
}


def main(names: list[str]) -> None:
    for name in names:
        said = None
        try:
            KILLERS[name]()
        except AssertionError as error:
            said = str(error)[:300] or "an assertion"
        if judging.MODE == "gpu":
            torch.cuda.synchronize()
        print(json.dumps({"name": name, "said": said, "package": anyattn.__file__}), flush=True)


if __name__ == "__main__":
    with judging.without_a_gpu() if judging.MODE == "compile" else contextlib.nullcontext():
        main(sys.argv[1:])
