"""Random batches for ``deterministic="batch"``: printable recipes, and whether a sequence has the same bits in them as alone."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random
from typing import Any, NamedTuple

import pytest
import torch

from anyattn import planner
from anyattn.call_cache import attention
from anyattn.errors import BackendError
from tests.support import batches
from tests.support.batch_forms import FORMS, PAGES, WITHOUT_8_BITS

__all__ = ["DIMS", "Batch", "Limits", "check", "drawn", "of_threads", "on_machines", "or_refused"]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STORED = (None, None, None, None, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
# D and Dv; a D above Dv may have values in the keys
DIMS = ((64, 64), (80, 80), (128, 128), (192, 128), (256, 256), (512, 512), (576, 512), (64, 128), (40, 24), (33, 16), (16, 16))
HEADS = ((1, 1), (4, 2), (8, 1), (3, 1), (2, 2), (10, 2), (6, 6), (16, 1))
LENGTHS = ((1, 10), (1, 10), (60, 70), (120, 135), (10, 300), (250, 600), (500, 1100), (1000, 3000))
WORK = (2**27, 2**29, 2**29, 2**32)


class Limits(NamedTuple):
    """lengths: of a sequence, drawn from one of these ranges. work: most query-key pairs of all sequences times heads and dimensions, drawn
    from these; above it the longest sequence is halved.
    forms: how many of ``FORMS`` a batch is computed in."""

    lengths: tuple[tuple[int, int], ...] = LENGTHS
    dims: tuple[tuple[int, int], ...] = DIMS
    heads: tuple[tuple[int, int], ...] = HEADS
    neighbours: int = 7
    work: tuple[int, ...] = WORK
    forms: int = 4


@dataclass(frozen=True)
class Batch:
    """One random batch, whose first sequence is compared. Its repr is all that is needed to repeat it."""

    option: str
    lengths: tuple[int, ...]
    heads: tuple[int, int]
    dims: tuple[int, int]
    dtype: torch.dtype
    in_keys: bool
    stored: torch.dtype | None
    forms: tuple[str, ...]
    page_sizes: tuple[int, ...]
    seed: int


def drawn(random: Random, limits: Limits, **fixed: Any) -> Batch:
    """fixed: fields of the batch that are not drawn."""
    dims, heads = fixed.get("dims") or random.choice(limits.dims), random.choice(limits.heads)
    lengths = [random.randint(*random.choice(limits.lengths)) for _ in range(random.randint(1, 1 + limits.neighbours))]
    work = random.choice(limits.work)
    while sum(n * n for n in lengths) * heads[0] * sum(dims) > work:
        longest = lengths.index(max(lengths))
        lengths[longest] = (lengths[longest] + 1) // 2
    stored = fixed.get("stored", random.choice(STORED))
    in_keys = dims[1] <= dims[0] and random.random() < (0.8 if dims == (576, 512) else 0.2)
    possible = [form for form in FORMS if stored is None or form not in WITHOUT_8_BITS]
    fields: dict[str, Any] = {
        "option": random.choice(list(batches.OPTIONS)),
        **{"lengths": tuple(lengths), "heads": heads, "dims": dims, "dtype": random.choice(DTYPES), "in_keys": in_keys, "stored": stored},
        "forms": tuple(random.sample(possible, min(limits.forms, len(possible)))),
        "page_sizes": PAGES if random.random() < 0.5 else (random.choice((2, 5, 32, 128, 256)),),
        "seed": random.randint(0, 2**31 - 1),
    }
    return Batch(**fields | fixed)


def check(batch: Batch, device: str = "cpu", between: Callable[[torch.Generator], None] = lambda g: None, **more: Any) -> None:
    """Raises ``AssertionError`` if a row of the first sequence has other bits in the batch than alone. more: further options of the calls.
    between: called before each computation, with a generator for what it draws."""
    g, other = torch.Generator(device).manual_seed(batch.seed), torch.Generator("cpu").manual_seed(batch.seed)
    made = [batches.draw(g, n, batch.heads, batch.dims, batch.dtype, batch.in_keys, batch.stored) for n in batch.lengths]
    call = {**batches.OPTIONS[batch.option](batch.heads[0], g), "deterministic": "batch", **more}
    between(other)
    found = batches.differing(g, made, call, batch.page_sizes, batch.forms, lambda: between(other))
    assert not found, f"other bits than alone: {found}; {batch}"


@contextmanager
def on_machines(section: int | None = None) -> Iterator[Callable[[torch.Generator], None]]:
    """Yields what a check calls between computations: the device then has 1, some or very many processors, so that the sections of a
    sequence's keys have one program or one each. section: keys of a section, if not the Triton backend's own number."""
    launch_shape = importlib.import_module("anyattn.backends.triton.launch_shape")
    machine, counts = planner.machines.of, (1, 132, 10**6)

    def another(g: torch.Generator) -> None:
        count = counts[int(torch.randint(len(counts), (1,), generator=g))]
        patch.setattr(planner.machines, "of", lambda *about: replace(machine(*about), sm_count=count))
        attention.clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch_shape, "SECTION", section or launch_shape.SECTION)
        yield another
    attention.clear()


@contextmanager
def or_refused(in_mode: bool) -> Iterator[None]:
    """A call in the mode, which the torch backend may refuse by name: for an operation or a captured tensor that its loops lack."""
    try:
        yield
    except BackendError as error:
        reasons = ("such loops have no ", "a captured tensor is smaller than the positions")
        if not in_mode or not any(f'deterministic="batch" cannot have this call: {reason}' in str(error) for reason in reasons):
            raise


def of_threads(g: torch.Generator) -> None:
    """The number of torch's threads, before each computation of a batch."""
    torch.set_num_threads((1, 2, 3, 5)[int(torch.randint(4, (1,), generator=g))])
