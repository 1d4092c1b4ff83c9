"""``KernelOfConfig``: the parts of the forward and the backward kernel's class that follow from their configs alike."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import BFloat16, Float16, pipeline

from anyattn.backends.hopper.config import ModsOfConfig, sides
from anyattn.backends.hopper.kernel.paged_gather import ARRIVALS

__all__ = ["KernelOfConfig", "rows_first"]


class KernelOfConfig:
    """A kernel for one config. band_sides: (number among ``config.exprs``, ``sides``) of each band. asked: (number, ``Ask``) of each other
    predicate."""

    def __init__(self, config: ModsOfConfig):
        self.config: Any = config
        self.dtype = BFloat16 if config.is_bf16 else Float16
        at = 1 if config.score is not None else 0
        self.band_sides = [(at + i, sides(band)) for i, band in enumerate(config.bands)]
        self.asked = [(at + len(config.bands) + i, ask) for i, ask in enumerate(config.asks)]

    def _pipe(
        self, barriers: Any, stages: int, transaction_bytes: int, is_gathered: bool = False, groups: int | None = None, cluster: int = 1
    ) -> Any:
        """A pipeline whose stages are filled by one thread, or by the loader's whole warp, and released by one thread per consumer warp.
        groups: consumer warp groups, all if None. cluster: thread blocks whose consumers release a stage, filled for all of them."""
        agent = pipeline.Agent.Thread
        return pipeline.PipelineTmaAsync.create(
            barrier_storage=barriers,
            num_stages=stages,
            producer_group=pipeline.CooperativeGroup(agent, ARRIVALS if is_gathered else 1),
            consumer_group=pipeline.CooperativeGroup(agent, 4 * (self.config.consumers if groups is None else groups) * cluster),
            tx_count=0 if is_gathered else transaction_bytes,
            cta_layout_vmnk=cute.make_layout((1, cluster, 1, 1)),
        )

    def _work_pipe(self, barriers: Any) -> Any:
        """The pipeline of the board's two slots, which the loader's warp fills and all consumer threads release."""
        agent = pipeline.Agent.Thread
        return pipeline.PipelineAsync.create(
            barrier_storage=barriers,
            num_stages=2,
            producer_group=pipeline.CooperativeGroup(agent, 32),
            consumer_group=pipeline.CooperativeGroup(agent, 128 * self.config.consumers),
        )


def rows_first(x: Any) -> Any:
    """(B, H, S, D) as (S, D, H, B)."""
    return cute.make_tensor(x.iterator, cute.select(x.layout, mode=[2, 3, 1, 0]))
