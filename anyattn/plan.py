"""``Plan``: how a problem is computed. The planner makes it, backends read it, ``explain`` prints it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

__all__ = ["BACKENDS", "BY_DOCUMENT", "Backward", "Plan", "Repeater"]

BACKENDS = ("torch", "triton", "hopper")
BY_DOCUMENT = "documents: each is run as a sequence of its own; by block lists where one id is at several places, or many are short"


class Backward(NamedTuple):
    """The backend of the backward pass. why: lines for people; after a Hopper forward pass the first names the
    backend, and the reasons against those that are passed over."""

    backend: str
    why: tuple[str, ...] = ()


class Repeater:
    """Computes the calls of one plan, and keeps what they share, such as prepared launches: a backend's ``Repeater(problem, plan)``, made
    from the first of the calls. problem: a ``Problem`` with the first one's signature.

    reports_launches: all launches of ``forward`` are reported to a recorder (``triton_tools.recording``), so that calls can be replayed.
    reports_numbers: with the scale and the score mod's numbers marked among their arguments, so that calls of other numbers can be too.
    """

    reports_launches = reports_numbers = False

    def forward(self, problem: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """``backends.result.Result``: (out, lse, max_scores). out is in q's stride order (``tensors.strides.empty_in_order``), lse and
        max_scores are None unless ``problem.wants_lse``, ``wants_max``."""
        raise NotImplementedError

    def backward(self, problem: Any, out: Tensor, lse: Any, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients in the order of ``problem.grad_inputs``, None where ``requires_grad`` is False; those of k and v in
        ``problem.kv_grad_dtype``, which may differ from call to call. dout has any strides. lse is None if the plan did not need it."""
        raise NotImplementedError

    def key_sums(self, problem: Any, lse: Tensor, first: int) -> Tensor:
        """(B, Hq, Sk) in ``stat_dtype``: the sums of the probabilities over the queries from ``first`` on, from a call's log-sum-exp."""
        raise NotImplementedError

    def block_reductions(
        self, problem: Any, lse: Tensor, block: tuple[int, int], wants_sums: bool, wants_max: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """(B, Hq, M, N) in ``stat_dtype``, None if not wanted: the sums of the probabilities, and the greatest scores (-inf where nothing
        is visible), of each block of (queries, keys)."""
        raise NotImplementedError

    def reads_lists(self, problem: Any) -> bool:
        """Whether ``forward`` reads the problem's block lists; the same for all calls of the plan."""
        raise NotImplementedError

    def again(self, problem: Any) -> Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple | None] | None:
        """A function that repeats ``forward(problem)`` with other q, k, v and sink of the same shapes, strides and device; it returns None
        if it no longer can. None if there is nothing faster than ``forward``."""
        return None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The decision for one call, as far as all backends have it in common; each backend's own plan adds its fields.

    backend: of the forward pass. backward: backend of the backward pass. why: one line per decision, for people.

    tile_m, tile_n: query rows and keys of one tile. num_splits: number of parts of each row tile's keys (split-KV).
    heads_per_tile: query heads that share a row tile. needs_lse: the backward pass reads the forward pass's log-sum-exp.
    is_reusable: valid for every call of the same signature (shapes, strides, programs, masks' numbers), for any contents of its tensors.
    is_tuned: kernel_options ask for measured tiles (Triton).
    gathers: the forward pass is over gathered keys (``backends.triton.gathered_keys``), of a cache often; the tiles are those of that call.

    repeater: of the calls that share this plan, once there is one (``backends.repeater_of``). backward_plan: the plan of their backward
    pass where another backend computes it, once there is one. reduction_plan: the same for reductions of the probabilities.
    """

    backend: str
    backward: str
    tile_m: int
    tile_n: int
    num_splits: int = 1
    heads_per_tile: int = 1
    needs_lse: bool = True
    why: tuple[str, ...] = ()
    is_reusable: bool = True
    is_tuned: bool = False
    gathers: bool = False
    repeater: Repeater | None = field(default=None, init=False, compare=False, repr=False)
    backward_plan: Plan | None = field(default=None, init=False, compare=False, repr=False)
    reduction_plan: Plan | None = field(default=None, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"backend={self.backend!r} is not one of {', '.join(map(repr, BACKENDS))}")
        for name in ("tile_m", "tile_n", "num_splits"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    @property
    def tiles(self) -> str:
        """The tiles, for people."""
        return f"{self.tile_m} query rows x {self.tile_n} keys to a tile"

    def keep(self, **parts: Any) -> None:
        """Sets ``repeater``, ``backward_plan`` or ``reduction_plan``, which the calls of a plan share and its value does not have."""
        assert parts.keys() <= {"repeater", "backward_plan", "reduction_plan"}
        vars(self).update(parts)
