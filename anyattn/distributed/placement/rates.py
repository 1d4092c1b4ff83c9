"""What a machine does in a second, as ``anyattn bench --context`` measures it, for the cost model of plans."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from anyattn.distributed.placement.cost import CostModel

__all__ = ["Rates", "costs_of"]


class Rates(NamedTuple):
    """Rates of one machine. flops: of a forward pass, multiplications and additions a second. partial, call_seconds, bandwidth,
    fixed_seconds: as in ``CostModel``; the last two are None if they were measured without a group."""

    flops: float
    partial: float
    call_seconds: float
    bandwidth: float | None = None
    fixed_seconds: float | None = None

    def costs(self, heads: tuple[int, int], head_dim: int, ranks: int, element_bytes: int = 2, node_size: int | None = None) -> CostModel:
        """The cost model of these heads; what was not measured is as in ``CostModel.of``: so is the network between nodes.

        >>> Rates(1e12, 0.2, 5e-5).costs((16, 4), 128, 8).pair_seconds
        8.192e-09
        """
        measured = {n: x for n, x in self._asdict().items() if n != "flops" and x is not None}
        model = CostModel.of(heads, head_dim, ranks, element_bytes, node_size)
        if model.bandwidth == model.network:  # of more ranks than a node has
            measured.pop("bandwidth", None)
        return model._replace(pair_seconds=4 * head_dim * heads[0] / self.flops, **measured)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Rates:
        """The rates in a file that ``anyattn bench --context --json`` has written. Raises ``ValueError`` for another file."""
        try:
            rates = json.loads(Path(path).read_text())["rates"]
            found = cls(**{name: None if x is None else float(x) for name, x in rates.items()})  # type: ignore[arg-type]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"costs={str(path)!r} holds no rates ({error}); wanted a file of anyattn bench --context --json") from error
        if not (found.flops > 0 and min(found.partial, found.call_seconds, found.fixed_seconds or 0) >= 0 and (found.bandwidth or 1) > 0):
            raise ValueError(f"costs={str(path)!r} holds {found}; wanted positive rates, of anyattn bench --context --json")
        return found


def costs_of(costs: Any, heads: tuple[int, int], head_dim: int, ranks: int, node_size: int | None = None) -> CostModel:
    """The cost model that an argument ``costs`` means: one itself, a path of ``Rates``, or None for the defaults."""
    if costs is None:
        return CostModel.of(heads, head_dim, ranks, node_size=node_size)
    if isinstance(costs, CostModel):
        return costs if node_size is None else costs._replace(node_size=node_size)
    if isinstance(costs, (str, os.PathLike)):
        return Rates.read(costs).costs(heads, head_dim, ranks, node_size=node_size)
    raise TypeError(f"costs is a {type(costs).__name__}; wanted the path of a file of anyattn bench --context --json, a CostModel or None")
