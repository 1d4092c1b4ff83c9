"""``plan`` and ``ContextPlan``: which rank computes which rows of a sequence, and what it needs from the others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.attention import flex_attention as torch_flex

from anyattn.distributed import batches
from anyattn.distributed.by_documents import prefetch_ids
from anyattn.distributed.channel import Channel, channel_of
from anyattn.distributed.head_share import HeadShare
from anyattn.distributed.layout import Layout
from anyattn.distributed.overlap import Demand, demand_of, overlap_pays
from anyattn.distributed.placement import CostModel, Placement, chunk_of, costs_of, digest_of, prefetch, work_of
from anyattn.distributed.plan_arguments import BLOCK, ONE, chosen_chunk, group_of, mask_of, masks_of, node_size_of, weights_of
from anyattn.distributed.relay import arrivals_of
from anyattn.distributed.rows import sharding
from anyattn.distributed.rows.local_captures import marked
from anyattn.distributed.sharded_mask import ShardedMask, sharded
from anyattn.distributed.share import Share
from anyattn.distributed.transport import HEADS, Layer, placed_rows
from anyattn.mods.tracing.default_device import without_default_device
from anyattn.sparsity.block_mask import BlockMask

__all__ = ["ContextPlan", "plan", "reduced"]

_CHOICES = (True, False, "auto")
_WIRES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@without_default_device
def plan(
    mask: Any,
    where: Any = None,
    *,
    S: int | None = None,
    ranks: int | None = None,
    chunk: int | None = None,
    heads: tuple[int, int] | None = None,
    head_dim: int = 128,
    weights: Mapping[str, float] | None = None,
    transport: str = "auto",
    overlap: bool | str = "auto",
    keep_kv: bool | str = "auto",
    wire: str = "float32",
    head_offset: int = 0,
    node_size: int | None = None,
    device: torch.device | str | None = None,
    costs: Any = None,
    check: bool = True,
) -> ContextPlan:
    """Distributes the rows of a sequence over the ranks of a group, so that each has as many rows and as much attention as the others, and
    few keys travel. Every rank calls it with the same arguments and computes the same plan.

    mask: a ``BlockMask`` of the whole sequence (``anyattn.create_block_mask``), a mask_mod, or None for no mask (both with ``S``); or a
        dict of these by name, for a model whose layers have several: one placement serves all, balanced by ``weights``, layers of each.
    where: the ranks: a ``DeviceMesh`` of one dimension or a ``ProcessGroup``. ranks: instead, their number, for a plan that a data loader's
        worker makes, or a simulation; ``ContextPlan.to(mesh)`` gives it its group.
    S: the length of the sequence. chunk: rows that stay together; by default about S / (32 * ranks), a multiple of the mask's blocks.
    heads: query and K/V heads of the calls, and head_dim, for the cost model, by default (16, 4) and 128.
    transport: "keys": the keys that a rank's rows see travel. "heads" (Ulysses): each rank gets all rows of its part of the query heads and
        their keys, and sends the results back; the ranks must divide the query heads, and be a multiple or a divisor of the K/V heads.
        "auto": what is expected to take less time; "keys" unless ``heads`` is passed, since a plan for heads refuses calls with others.
    overlap: whether rows that need no other rank's keys have calls of their own, which run while messages travel; "auto": where that is
        expected to take less time.
    keep_kv: whether what is received is kept for the backward pass or sent again; "auto" keeps at most as many positions as a rank has.
    wire: how sums of keys' gradients travel, where keys do: "float32", or "bfloat16", half as many bytes, rounded once; at home they are
        added in float32.
    head_offset: added to h, for tensor parallelism: the global head of this rank's query head 0. device: of masks made here.
    node_size: how many ranks, neighbours in the group, share a node: a key that several of them need then crosses the network once, to
        one of them. By default what torchrun's LOCAL_WORLD_SIZE says, if the group has as many ranks on each node and they are neighbours;
        else, and with ``ranks``, every key goes straight to the ranks that need it.
    costs: what placements are valued by: the path of a file that ``anyattn bench --context --json`` has written, a
        ``placement.CostModel``, or None for an H100's. check: compares the plans of the ranks, through the group's store.

    Raises ``TypeError`` or ``ValueError`` that names the argument, on every rank alike.

    >>> import anyattn
    >>> mask = anyattn.create_block_mask(lambda b, h, q, k: q >= k, None, None, 1024, 1024, device="cpu", BLOCK_SIZE=64)
    >>> placement = plan(mask, ranks=2)
    >>> [placement.rows_of(rank) for rank in range(2)]
    [((0, 256), (768, 1024)), ((256, 768),)]
    """
    group, size = group_of(where, ranks)
    reporting: Any = nullcontext() if group is None else channel_of(group).reporting_failure(0, check and size > 1)
    with reporting:
        masks = masks_of(mask, S, size, device)
        length = next(iter(masks.values())).seq_lengths[0]
        unit = math.lcm(*[n for m in masks.values() for n in m.BLOCK_SIZE])
        chunk = chosen_chunk(chunk, unit, length, size)
        weights = weights_of(weights, masks)
        works = {name: work_of([m], [1.0], chunk) for name, m in masks.items()}
        costs = costs_of(costs, heads or HEADS, head_dim, size, node_size_of(node_size, size, group))
        row_bytes = 2 * (heads or HEADS)[0] * head_dim
        demands = {n: demand_of(w, costs) for n, w in works.items()}
        layers = [Layer(masks[n], works[n], demands[n], weights[n]) for n in works]
        placement = placed_rows(layers, size, costs, heads, transport, overlap, row_bytes)
        options = _Options(costs, row_bytes, overlap, keep_kv, wire, head_offset, bool(check))
        made = ContextPlan(masks, demands, placement, size, chunk, options)
        return made if group is None else made.to(group)


class _Options(NamedTuple):
    """Arguments of ``plan`` that calls need. row_bytes: of a row of the output."""

    costs: CostModel
    row_bytes: int
    overlap: bool | str
    keep_kv: bool | str
    wire: str
    head_offset: int
    check: bool


class ContextPlan:
    """Who computes which rows of a sequence. Made by ``plan``; the same on every rank, but for what names this rank.

    mask: what the model passes as ``block_mask`` to every ``flex_attention``, with the rows of its rank: a ``BlockMask``, or a dict of them
        as ``plan`` was given one. On one rank it is the mask itself.
    positions: int64 (rows of this rank,), their global positions, ascending, without padding. all_positions: int64 (1, S), to be sharded
        with the tokens.
    transport: what travels, "keys" or "heads". stats: the plan in numbers: rows, load, received keys, pieces of each rank, the bound of
        received keys, predicted efficiency.

    A plan without a group can be pickled, as the masks of it can.
    """

    def __init__(
        self,
        masks: dict[str, BlockMask],
        demands: dict[str, Demand],
        placement: Placement,
        ranks: int,
        chunk: int,
        options: _Options,
        channel: Channel | None = None,
    ):
        for name, value in (("overlap", options.overlap), ("keep_kv", options.keep_kv)):
            if value not in _CHOICES:
                raise ValueError(f"{name}={value!r}; wanted True, False or 'auto'")
        if options.wire not in _WIRES:
            raise ValueError(f"wire={options.wire!r}; wanted one of {list(_WIRES)}, of gradients that travel")
        self._masks, self._demands, self._placement, self._options = masks, demands, placement, options
        self.ranks, self.chunk = ranks, chunk
        self._channel = channel
        self._calls: set[tuple] = set()
        self._made: dict[str, ShardedMask] | None = self._sharded()

    def _sharded(self) -> dict[str, ShardedMask]:
        """The masks of the plan, with this rank's share of each if the plan has a group.

        They know a plan that does not know them: in a cycle their lists would stay on the GPU until Python collects garbage, those of a
        training loop that plans every step by the dozen.
        """
        known = object.__new__(ContextPlan)
        known.__dict__.update(vars(self), _made=None)
        has_group = self._channel is not None
        return {n: sharded(m, known, self._share(m, self._demands[n]) if has_group else None) for n, m in self._masks.items()}

    @property
    def _shards(self) -> dict[str, ShardedMask]:
        if self._made is None:
            self._made = self._sharded()
        return self._made

    # ---- the group

    def to(self, where: Any) -> ContextPlan:
        """The plan for this process's rank in a group. where: as in ``plan``; its size must be the plan's number of ranks."""
        group, size = group_of(where, None)
        if size != self.ranks:
            raise ValueError(
                f"the group has {size} ranks but the plan was made for {self.ranks}; wanted a group of {self.ranks}, or a new plan"
            )
        channel = channel_of(group)
        made = ContextPlan(self._masks, self._demands, self._placement, self.ranks, self.chunk, self._options, channel)
        if made.checks_calls:
            channel.agree("the plan", made.digest, "plan() with the same mask and arguments on every rank")
        return made

    @property
    def channel(self) -> Channel:
        if self._channel is None:
            raise ValueError("the plan has no process group (ranks=...); wanted plan.to(mesh['cp'])")
        return self._channel

    @property
    def rank(self) -> int:
        return 0 if self.ranks == 1 else self.channel.rank

    @property
    def transport(self) -> str:
        """What travels: "keys" or "heads"."""
        return self._placement.stats.transport

    @property
    def digest(self) -> int:
        """A 64-bit number of the plan's inputs and result, the same in every process."""
        chosen = [_CHOICES.index(x) for x in (self._options.overlap, self._options.keep_kv)] + [self.transport == "heads"]
        chosen.append(list(_WIRES).index(self._options.wire))
        masks = [part for n, demand in self._demands.items() for part in (np.frombuffer(n.encode(), np.uint8), demand.needs)]
        return digest_of(self.length, self.ranks, self.node_size, self.chunk, chosen, self._placement.owner, *masks)

    # ---- masks

    @property
    def mask(self) -> Any:
        masks = self._masks if self.ranks == 1 else self._shards
        return masks[ONE] if ONE in masks else dict(masks)

    def also(self, mask: Any) -> BlockMask:
        """Another mask of the same sequence, for rows that lie where this plan's do. mask: as in ``plan``, but no dict."""
        other = mask_of("mask", mask, self.length, math.gcd(BLOCK, self.chunk), self._device)
        if other.seq_lengths[0] != self.length:
            raise ValueError(f"mask covers {other.seq_lengths[0]} positions, but the plan {self.length}; wanted a mask of these")
        if self.chunk % math.lcm(*other.BLOCK_SIZE):
            raise ValueError(
                f"mask has blocks of {tuple(other.BLOCK_SIZE)}, which do not divide the plan's chunks of {self.chunk}; wanted "
                f"plan(chunk=...) with a multiple of both"
            )
        if self.ranks == 1:
            return other
        demand = demand_of(work_of([other], [1.0], self.chunk), self._options.costs)
        return sharded(other, self, self._share(other, demand))

    def prefetch(self, mask: Any) -> Any:
        """Starts to copy to the host what ``plan`` reads of the next mask, if that is on a GPU: ``plan`` of it then does not wait for the
        device. Returns ``mask``, as block masks.

        mask: as in ``plan``, for as many ranks as this plan's. On a CPU nothing is copied.

        >>> from anyattn import masks
        >>> first = plan(masks.causal(), ranks=2, S=64, device="cpu")
        >>> later = first.prefetch(masks.sliding_window(8, 0))
        >>> plan(later, ranks=2).rows_of(0)
        ((0, 32),)
        """
        is_made = all(isinstance(m, torch_flex.BlockMask) for m in (mask.values() if isinstance(mask, dict) else (mask,)))
        masks = masks_of(mask, None if is_made else self.length, self.ranks, self._device)
        length = next(iter(masks.values())).seq_lengths[0]
        unit = math.lcm(*[n for m in masks.values() for n in m.BLOCK_SIZE])
        chunk = self.chunk if length == self.length and not self.chunk % unit else chunk_of(length, self.ranks, unit)
        for m in masks.values():
            prefetch(m, chunk)
            prefetch_ids(m)
        return masks if isinstance(mask, dict) else masks[ONE]

    def keeps_keys(self, share: Share | HeadShare) -> bool:
        """Whether what is received is kept for the backward pass; the same on every rank."""
        if self._options.keep_kv != "auto":
            return bool(self._options.keep_kv)
        return share.most_received <= -(-self.length // self.ranks)

    def _share(self, mask: BlockMask, demand: Demand) -> Share | HeadShare:
        layout, options = self._layout(demand), self._options
        if self.transport == "heads":
            return HeadShare(mask, layout, self.rank, options.head_offset)
        overlaps = options.overlap
        if overlaps == "auto":
            overlaps = overlap_pays(layout, demand, options.costs, options.row_bytes)
        return Share(mask, layout, demand.needs, self.rank, options.head_offset, bool(overlaps))

    def _layout(self, demand: Demand) -> Layout:
        return Layout.of(self.length, self.chunk, self._placement.owner, self.ranks, demand.needs, self.node_size)

    # ---- rows

    @property
    def node_size(self) -> int:
        """The number of ranks of a node; all of them if there is one."""
        return self._options.costs.node_size or self.ranks

    @property
    def length(self) -> int:
        """The length of the sequence."""
        return int(next(iter(self._masks.values())).seq_lengths[0])

    @cached_property
    def _rows(self) -> Layout:
        return self._layout(next(iter(self._demands.values())))

    @property
    def _device(self) -> torch.device:
        return next(iter(self._masks.values())).kv_indices.device

    def rows_of(self, rank: int) -> tuple[tuple[int, int], ...]:
        """The intervals of global positions of a rank's rows."""
        return self._rows.rows_of(rank)

    @property
    def positions(self) -> Tensor:
        return self.shard(torch.arange(self.length, device=self._device), dim=0)

    @property
    def all_positions(self) -> Tensor:
        return torch.arange(self.length, device=self._device)[None]

    def shard(self, *tensors: Tensor, dim: int = 1, pad: Any = None) -> Any:
        """This rank's rows of tensors that hold the whole sequence in ``dim``: one tensor for one, else a tuple.

        pad: a number that fills further rows behind them, or a tuple with one for each tensor (ids 0, labels -100): then every rank has as
            many, and plans of other masks of the same length and blocks too, so that compiled code meets one shape. Attention leaves padded
            rows out: their output and gradients are 0, their lse is -inf, and no row sees their keys. ``unshard`` and ``gather`` drop them.
        """
        pads = sharding.pads_of(pad, tensors)
        found = tuple([sharding.shard_of(t, self._rows, self.rank, dim, p) for t, p in zip(tensors, pads)])
        return found[0] if len(found) == 1 else found

    def shard_batch(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's rows of a batch of Transformers, for a model inside ``anyattn.distributed.active(plan)``.

        batch: of the whole sequence: ``input_ids`` (B, S) or ``inputs_embeds`` (B, S, hidden), and if they are there ``position_ids``
            (B or 1, S), by default 0 to S - 1, ``token_type_ids`` and ``labels`` (B, S).

        Returns these rows; ``labels`` as ``shift_labels``, each row's next label, shifted before it is sharded, with labels that do not
        count beside them; ``num_items_in_batch``, the number of labels of all ranks, unless the batch has one, so that the ranks' losses
        add up to that of the batch; ``use_cache=False``. What the masks contain (``attention_mask``, ``cu_seq_lens_*``,
        ``max_length_*``) is left out; anything else is kept.

        Raises ``ValueError`` for a tensor of another length, and for an unknown one that may have the sequence's rows.
        """
        return batches.shard_batch(self, batch)

    def unshard(self, t: Tensor, dim: int = 1) -> Tensor:
        """The rows of all ranks in global order, on every rank, without padding. Gradients are summed over the ranks, as those of a loss
        that is the sum of the ranks' losses."""
        return t if self.ranks == 1 else sharding.gathered(t, self._rows, self.channel, dim)

    def gather(self, t: Tensor, dim: int = 0) -> Tensor:
        """``unshard``, for a tensor that holds a number for each of this rank's rows and that a mod captures: mods index it by global
        positions."""
        return self.unshard(t, dim)

    def rows(self, t: Tensor, dim: int = 0) -> Tensor:
        """``t``, marked: its dimension ``dim`` holds this rank's rows, and a mod that captures it indexes that by ``q_idx`` itself.

        t: such as a bias (rows, S) or a temperature (rows,) that the model computes from its rows; nothing is sent, and its gradient is
        complete on this rank. What is computed from the result has no mark; in compiled code ``rows`` is called there.

        Raises ``ValueError`` for another number of rows; a call whose mod indexes the dimension otherwise raises ``ModError``.
        """
        if self.ranks == 1:
            return t
        rows = None
        if not is_compiling():
            rows = self.rows_of(self.rank)
            sharding.check_rows(t, self._rows, self.rank, dim)
        return marked(t, dim % t.ndim, rows)

    # ---- for people

    @property
    def stats(self) -> Any:
        return self._placement.stats

    def explain(self) -> str:
        """The plan in words: who has which rows, how even the load is, what travels."""
        lines = [str(self.stats)]
        if self.transport == "heads":
            lines.append(
                "transport: heads; every rank receives all rows of its part of the query heads and of the K/V heads that these see"
            )
            return "\n".join([*lines, *[f"rows of rank {r}: {a}:{b}" for r in range(self.ranks) for a, b in self.rows_of(r)]])
        lines.append(f"transport: keys; every rank receives the keys that its rows see; their gradients travel in {self._options.wire}")
        for name, m in self._shards.items():
            layout = self._layout(self._demands[name])
            received = [layout.received(r) for r in range(self.ranks)]
            label = f"mask {name!r}: " if name else ""
            lines.append(f"{label}keys received by rank: {', '.join(map(str, received))}")
            if self.node_size < self.ranks and self.transport == "keys":
                across = arrivals_of(layout).across.tolist()
                lines.append(f"{label}keys received from other nodes by rank, some to pass them on: {', '.join(map(str, across))}")
            if isinstance(m.share, Share):
                for s in m.share.segments:
                    rows = " and ".join(f"{a}:{b}" for a, b in s.rows)
                    when = "while messages travel" if s.is_local else "after the messages"
                    lines.append(f"{label}rank {self.rank}: rows {rows} see keys {s.keys[0]}:{s.keys[1]}, {when}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        where = f"rank {self._channel.rank} of {self.ranks}" if self._channel else f"{self.ranks} ranks, no group"
        return f"ContextPlan({self.length} positions, {where}, {self._placement.name}, chunks of {self.chunk})"

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_channel": None, "_made": None, "_calls": set()}

    # ---- calls

    @property
    def wire(self) -> torch.dtype:
        """The dtype of keys' gradients in messages."""
        return _WIRES[self._options.wire]

    @property
    def checks_calls(self) -> bool:
        """Whether ranks compare their plans and the first of calls that are alike."""
        return self.ranks > 1 and self._options.check

    @property
    def asks_first(self) -> bool:
        """Whether the next call begins with such a comparison."""
        return self.checks_calls and not self._calls

    def agree_on_call(self, query: Tensor, key: Tensor, value: Tensor, facts: tuple) -> None:
        """Raises on every rank, before the first message of such a call, if what its tensors have in common differs between the ranks."""
        shapes = (query.shape[:2], key.shape[:2], query.shape[3], value.shape[3], query.dtype, facts)
        cure = "the same batch, heads, head_dim, dtype, mods, scale and need of gradients on every rank"
        self.agree_once("flex_attention's call", shapes, cure)

    def agree_once(self, what: str, facts: tuple, cure: str) -> None:
        """Raises on every rank unless all have the same facts; they are compared once."""
        if self.checks_calls and facts not in self._calls:
            self.channel.agree(what, digest_of(np.frombuffer(repr(facts).encode(), np.uint8)), cure)
            self._calls.add(facts)


def reduced(t: Tensor, where: Any) -> Tensor:
    """``t`` itself, whose gradient is summed over the ranks of ``where``, in float32.

    The gradient of a captured tensor is this rank's share. Data parallelism sums those of a model's parameters; ``reduced`` sums that of
    another tensor, such as one that a program updates itself. where: as in ``plan``.
    """
    group, _ = group_of(where, None)
    return sharding.reduced(t, channel_of(group))
