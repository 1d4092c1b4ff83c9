"""Mistakes that ranks make in the tests: each program returns the message of the error that it gets."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import anyattn
from anyattn import distributed as ad
from anyattn import masks
from anyattn.distributed import channel, share
from tests.distributed.uses import S, mask_of, tensors
from tests.support.ranks import message_of

__all__ = ["EVERY_RANK"]


def _plan(mesh: Any, **options: Any) -> Any:
    return ad.plan(mask_of(masks.causal()), mesh, **options)


def _attend(mesh: Any, plan: Any, mask: Any = None, **options: Any) -> Any:
    q, k, v = plan.shard(*tensors(), dim=2)
    return anyattn.flex_attention(q, k, v, None, plan.mask if mask is None else mask, enable_gqa=True, **options)


def whole_tensors(mesh: Any) -> Any:
    q, k, v = tensors()
    return anyattn.flex_attention(q, k, v, None, _plan(mesh).mask, enable_gqa=True)


def sharded_twice(mesh: Any) -> Any:
    plan = _plan(mesh)
    return plan.shard(plan.shard(tensors()[0], dim=2), dim=2)


def shard_without_plan(mesh: Any) -> Any:
    return _attend(mesh, _plan(mesh), mask_of(masks.causal()))


def no_group(mesh: Any) -> Any:
    return _attend(mesh, _plan(mesh), ad.plan(mask_of(masks.causal()), ranks=mesh.size()).mask)


def group_of_another_size(mesh: Any) -> Any:
    return ad.plan(mask_of(masks.causal()), ranks=mesh.size() + 1).to(mesh)


def mesh_of_two_dimensions(mesh: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return _plan(init_device_mesh("cpu", (mesh.size(), 1), mesh_dim_names=("dp", "cp")))


def written_lists(mesh: Any) -> Any:
    plan = _plan(mesh)
    plan.mask.kv_indices.add_(0)
    return _attend(mesh, plan)


def dropout(mesh: Any) -> Any:
    return _attend(mesh, _plan(mesh), dropout_p=0.1)


def assigned(mesh: Any) -> Any:
    plan = _plan(mesh)
    plan.mask.mask_mod = masks.sliding_window(3, 0)


def indexed(mesh: Any) -> Any:
    return _plan(mesh).mask[:, :, 0]


def oblong(mesh: Any) -> Any:
    return ad.plan(anyattn.create_block_mask(masks.causal(), None, None, S, 2 * S, device="cpu"), mesh)


def chunk_of_no_blocks(mesh: Any) -> Any:
    return _plan(mesh, chunk=24)


def mod_without_length(mesh: Any) -> Any:
    return ad.plan(masks.causal(), mesh)


def planned_twice(mesh: Any) -> Any:
    return ad.plan(_plan(mesh).mask, mesh)


def other_mask_on_a_rank(mesh: Any) -> Any:
    return ad.plan(mask_of(masks.sliding_window(30 + mesh.get_local_rank() * 50, 0)), mesh)


def other_scale_on_a_rank(mesh: Any) -> Any:
    return _attend(mesh, _plan(mesh), scale=0.5 + mesh.get_local_rank())


def heads_that_ranks_cannot_divide(mesh: Any) -> Any:
    plan = _plan(mesh, transport="heads")
    q, k, v = (t[:, :1] for t in plan.shard(*tensors(), dim=2))
    return anyattn.flex_attention(q, k, v, None, plan.mask)


def planned_heads_that_ranks_cannot_divide(mesh: Any) -> Any:
    return _plan(mesh, transport="heads", heads=(3 * mesh.size(), 3))


def unknown_transport(mesh: Any) -> Any:
    return _plan(mesh, transport="ring")


def mask_of_other_heads(mesh: Any) -> Any:
    mask = anyattn.create_block_mask(masks.causal(), None, 6, S, S, device="cpu", BLOCK_SIZE=16)
    return _attend(mesh, ad.plan(mask, mesh, transport="heads"))


def mask_of_other_entries(mesh: Any) -> Any:
    """With documents as sequences, which read no lists, on one of the ranks."""
    mask = anyattn.create_block_mask(masks.document(torch.arange(S, device="cpu") // 60), 3, None, S, S, device="cpu", BLOCK_SIZE=16)
    share.RUN_DOCUMENTS[1:] = ["cpu"] * mesh.get_local_rank()
    try:
        return _attend(mesh, ad.plan(mask, mesh))
    finally:
        del share.RUN_DOCUMENTS[1:]


def other_transport_on_a_rank(mesh: Any) -> Any:
    return _plan(mesh, transport=("keys", "heads")[mesh.get_local_rank()])


def lse_on_one_rank(mesh: Any) -> Any:
    return _attend(mesh, _plan(mesh, transport="heads"), return_lse=mesh.get_local_rank() == 1)


def gradients_on_one_rank(mesh: Any) -> Any:
    plan = _plan(mesh)
    q, k, v = plan.shard(*tensors(), dim=2)
    return anyattn.flex_attention(q.requires_grad_(mesh.get_local_rank() == 1), k, v, None, plan.mask, enable_gqa=True)


def started_for_fewer_entries(mesh: Any) -> Any:
    plan = _plan(mesh)
    q, k, v = plan.shard(*tensors(), dim=2)
    ad.start(k, v, plan)
    return anyattn.flex_attention(q.expand(2, -1, -1, -1), k, v, None, plan.mask, enable_gqa=True)


def second_derivative(mesh: Any) -> Any:
    plan = _plan(mesh)
    q, k, v = [t.detach().requires_grad_() for t in plan.shard(*tensors(), dim=2)]
    out = anyattn.flex_attention(q, k, v, None, plan.mask, enable_gqa=True)
    (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    return grad.sum().backward()


# the mistake -> the error's type and a part of its message, on every rank
EVERY_RANK: dict[Callable[[Any], Any], str] = {
    whole_tensors: "ValueError: query has 203 rows, but of the 203 positions of the plan rank",
    sharded_twice: "wanted the 203 of the plan: pass the whole sequence",
    shard_without_plan: "pass the mask of anyattn.distributed.plan",
    no_group: "ValueError: the plan has no process group",
    group_of_another_size: "ranks but the plan was made for",
    mesh_of_two_dimensions: "ValueError: where is a DeviceMesh of 2 dimensions ('dp', 'cp'); wanted one dimension, such as mesh['cp']",
    written_lists: "ValueError: the block mask's lists were written to",
    dropout: "NotImplementedError: dropout_p",
    assigned: "TypeError: mask_mod of a plan's mask cannot be assigned",
    indexed: "TypeError: a mask of a plan cannot be indexed",
    oblong: "ValueError: mask has 203 queries and 406 keys",
    chunk_of_no_blocks: "ValueError: chunk=24; wanted a multiple of 16",
    mod_without_length: "TypeError: mask is a mask_mod, and S is None",
    planned_twice: "TypeError: mask is the mask of a plan already",
    other_mask_on_a_rank: "ValueError: the plan differs between the",
    other_scale_on_a_rank: "ValueError: flex_attention's call differs between the",
    heads_that_ranks_cannot_divide: "ValueError: query has 1 heads and key 1, which a plan that sends heads cannot divide over 2 ranks",
    planned_heads_that_ranks_cannot_divide: "ValueError: transport='heads' and heads=(6, 3), which 2 ranks cannot divide",
    unknown_transport: "ValueError: transport='ring'; wanted 'auto', 'keys' or 'heads'",
    mask_of_other_heads: "ValueError: block_mask has heads 6 but query has 4",
    mask_of_other_entries: "ValueError: block_mask has batch 3 but query has 1",
    other_transport_on_a_rank: "ValueError: the plan differs between the",
    lse_on_one_rank: "ValueError: flex_attention's call differs between the",
    gradients_on_one_rank: "ValueError: flex_attention's call differs between the",
    started_for_fewer_entries: "ValueError: key has batch 1 but query has 2, and anyattn.distributed.start has sent one entry",
    second_derivative: "NotImplementedError: attention has no second derivative",
}


def message(mesh: Any, mistake: Callable[[Any], Any]) -> tuple[str, bool]:
    """The message of a mistake, and whether the ranks compute as before after it."""
    text = message_of(lambda: mistake(mesh))
    plan = _plan(mesh)
    return text, bool(torch.isfinite(plan.unshard(_attend(mesh, plan), dim=2)).all())


def one_rank_fails(mesh: Any) -> str:
    """Rank 1 passes tensors that are not its rows."""
    channel._PATIENCE = 0.5
    plan = _plan(mesh)
    q, k, v = plan.shard(*tensors(), dim=2)
    if mesh.get_local_rank() == 1:
        q, k, v = (t[:, :, :-1] for t in (q, k, v))
    return message_of(lambda: anyattn.flex_attention(q, k, v, None, plan.mask, enable_gqa=True))


def one_rank_fails_and_goes_on(mesh: Any) -> list[str]:
    """Rank 1 passes tensors that are not its rows, catches its error, and all ranks call again."""
    channel._PATIENCE = 0.5
    plan = _plan(mesh)
    _attend(mesh, plan)
    q, k, v = plan.shard(*tensors(), dim=2)
    cut = int(mesh.get_local_rank() == 1)
    bad = [t[:, :, : t.shape[2] - cut] for t in (q, k, v)]
    first = message_of(lambda: anyattn.flex_attention(*bad, None, plan.mask, enable_gqa=True))
    return [first, *[message_of(lambda: _attend(mesh, plan)) for _ in range(2)]]


def one_rank_fails_before(mesh: Any, last: int, keep_kv: bool) -> str:
    """Rank 1 fails before one of the exchanges of a forward and a backward pass, in a new group whose nodes of two pass keys on."""
    channel._PATIENCE = 0.5
    exchange, left = channel.Channel.exchange, [last]

    def failing(self: Any, *arguments: Any) -> Any:
        left[0] -= 1
        if self.rank == 1 and not left[0]:
            raise MemoryError(f"before exchange {last}")
        return exchange(self, *arguments)

    def both_ways() -> None:
        q, k, v = [t.detach().requires_grad_() for t in plan.shard(*tensors(), dim=2)]
        anyattn.flex_attention(q, k, v, None, plan.mask, enable_gqa=True).sum().backward()

    plan = _plan(dist.new_group(), node_size=2, keep_kv=keep_kv)
    channel.Channel.exchange = failing  # type: ignore[method-assign]
    try:
        return message_of(both_ways)
    finally:
        channel.Channel.exchange = exchange  # type: ignore[method-assign]


def one_rank_dies(mesh: Any) -> str:
    """The process of rank 1 is killed before its messages are sent."""
    plan = _plan(mesh)
    _attend(mesh, plan)
    if mesh.get_local_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return message_of(lambda: _attend(mesh, plan))
