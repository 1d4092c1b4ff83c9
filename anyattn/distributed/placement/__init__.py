"""Placement of a sequence's rows over ranks: equal rows, equal attention, few keys that travel. Whole numbers on the host, no messages."""

from anyattn.distributed.placement.bound import bound_of
from anyattn.distributed.placement.choose import Placement, digest_of, place
from anyattn.distributed.placement.chunks import Chunks, chunks_of
from anyattn.distributed.placement.cost import CostModel, Load, load_of
from anyattn.distributed.placement.rates import Rates, costs_of
from anyattn.distributed.placement.stats import PlanStats
from anyattn.distributed.placement.work import Work, chunk_of, combined, prefetch, work_of

__all__ = [
    "Chunks",
    "CostModel",
    "Load",
    "Placement",
    "PlanStats",
    "Rates",
    "Work",
    "bound_of",
    "chunk_of",
    "chunks_of",
    "combined",
    "costs_of",
    "digest_of",
    "load_of",
    "place",
    "prefetch",
    "work_of",
]
