"""Keys or values of a group as a batch of matrices, whole or in runs of keys, from dense, cached or paged storage."""

from __future__ import annotations

import torch
from torch import Tensor

from anyattn.backends.torch.workspace import Workspace

__all__ = ["KeyRows", "PoolRows"]

_GAP = 64  # padding in bytes between tokens, one cache line: without it p @ v takes 1.6 times as long in float32, for 8 heads of 128


class KeyRows:
    """(count, keys, D) for one group: one matrix per (batch entry, K/V head).

    x: (batch entries, K/V heads, keys, D), a view of storage; with ``pool_rows`` a page pool (pages, K/V heads of the call, page_size, D).
    is_read_once: each key is read once, so copies are made run by run, in memory that stays in the CPU's cache. A copied run is laid out
    head by head: matrix products read that layout faster than a KV cache's, which pays for the copy. An exception are products of 32 bits
    and more with pages of a single sequence: they read the pool's layout, token by token, equally fast if tokens are not a power of two
    apart. So tokens are gathered with all heads at once, which takes 0.6 of the time.
    factors: of 8-bit keys (count, keys or 1), by which they are multiplied in ``dtype``.
    """

    def __init__(
        self,
        x: Tensor,
        dtype: torch.dtype,
        workspace: Workspace,
        name: str,
        is_read_once: bool,
        pool_rows: PoolRows | None = None,
        factors: Tensor | None = None,
    ):
        self.dtype, self.workspace, self.name, self._factors = dtype, workspace, name, factors
        self._rows: Tensor | None = None
        self._tokens: Tensor | None = None
        if pool_rows is not None and is_read_once and dtype.itemsize > 2:
            self._tokens = pool_rows.tokens(x)
        if self._tokens is not None:
            assert pool_rows is not None and len(pool_rows.storage_rows) == 1
            heads = pool_rows.kv_heads.stop - pool_rows.kv_heads.start
            self._rows, self.shape = pool_rows.storage_rows[0], (heads, pool_rows.storage_rows.shape[1], x.shape[3])
            is_direct = False
        elif pool_rows is None:
            self._view = x if x.stride(-1) == 1 else x.contiguous()
            self.shape = (x.shape[0] * x.shape[1], x.shape[2], x.shape[3])
            is_direct = x.dtype == dtype
        else:
            self._view, self._rows = pool_rows.of(x)
            self.shape = (self._rows.shape[0], self._rows.shape[1], x.shape[3])
            is_direct = False
        self._whole = None
        if is_direct:
            self._whole = self._view.reshape(self.shape)
        elif not is_read_once:
            copied = self._view if self._rows is None else self._view.index_select(0, self._rows.reshape(-1))
            self._whole = self._scaled(copied.to(dtype).reshape(self.shape), 0, self.shape[1])

    def run(self, lo: int, hi: int) -> Tensor:
        """(count, hi - lo, D) in the dtype of the products; the memory of a copied run is reused by the next run."""
        return self._copy(lo, hi) if self._whole is None else self._whole[:, lo:hi]

    def whole(self) -> Tensor:
        """All keys at once."""
        return self.run(0, self.shape[1])

    def _scaled(self, copied: Tensor, lo: int, hi: int) -> Tensor:
        """The keys ``lo:hi``, converted into memory that is this object's, times their factors."""
        if self._factors is None:
            return copied
        return copied.mul_((self._factors if self._factors.shape[1] == 1 else self._factors[:, lo:hi])[..., None])

    def _copy(self, lo: int, hi: int) -> Tensor:
        count, _, width = self.shape
        if self._tokens is not None:
            return self._scaled(self._copy_tokens(lo, hi), lo, hi)
        if self._rows is None:
            part = self._view[:, :, lo:hi]
            out = self.workspace.take(f"run of {self.name}", tuple(part.shape), self.dtype)
            return self._scaled(out.copy_(part).view(count, hi - lo, width), lo, hi)
        rows = (self._rows if hi - lo == self.shape[1] else self._rows[:, lo:hi]).reshape(-1)
        taken = self.workspace.take(f"rows of {self.name}", (len(rows), width), self._view.dtype)
        torch.index_select(self._view, 0, rows, out=taken)
        if taken.dtype != self.dtype:
            taken = self.workspace.take(f"run of {self.name}", tuple(taken.shape), self.dtype).copy_(taken)
        return self._scaled(taken.view(count, hi - lo, width), lo, hi)

    def _copy_tokens(self, lo: int, hi: int) -> Tensor:
        assert self._tokens is not None and self._rows is not None
        heads, _, width = self.shape

        def lent(name: str, dtype: torch.dtype) -> Tensor:
            shape = (hi - lo, heads * width + _GAP // dtype.itemsize)
            return self.workspace.take(f"{name} of {self.name}", shape, dtype)[:, : heads * width]

        taken = torch.index_select(self._tokens, 0, self._rows[lo:hi], out=lent("tokens", self._tokens.dtype))
        if taken.dtype != self.dtype:
            taken = lent("run", self.dtype).copy_(taken)
        return taken.unflatten(1, (heads, width)).transpose(0, 1)


class PoolRows:
    """The rows of a group's keys in the call's page pools: (batch entries x K/V heads, keys), for a pool seen as (rows, D).

    storage_rows: int64 (batch entries, keys), each key's row in a pool seen as (pages x page_size). kv_heads: the heads of the group.
    is_joint: the group may have several batch entries; the layout is then the same for any number of them.
    """

    def __init__(self, storage_rows: Tensor, kv_heads: slice, is_joint: bool):
        self.storage_rows, self.kv_heads, self.is_joint = storage_rows, kv_heads, is_joint
        self._by_token: Tensor | None = None

    def tokens(self, pool: Tensor) -> Tensor | None:
        """``pool`` (pages, K/V heads, page_size, D) as (rows, K/V heads of the group x D); None if that is not a view or is not used."""
        if self.is_joint or pool.device.type != "cpu":
            return None
        by_token, (_, heads, _, width) = pool.transpose(1, 2), pool.shape
        if not by_token.is_contiguous():
            return None
        return by_token.view(-1, heads * width)[:, self.kv_heads.start * width : self.kv_heads.stop * width]

    def of(self, pool: Tensor) -> tuple[Tensor, Tensor]:
        """``pool`` (pages, K/V heads, page_size, D) as (rows, D), and the group's rows."""
        _, heads, page_size, width = pool.shape
        by_token = pool.transpose(1, 2)  # the usual storage order of a pool: (pages, page_size, heads, D)
        if self._by_token is not None and by_token.is_contiguous():  # shared by keys and values
            return by_token.view(-1, width), self._by_token
        head = torch.arange(self.kv_heads.start, self.kv_heads.stop, device=pool.device)[:, None]
        rows = self.storage_rows[:, None]
        if by_token.is_contiguous():
            self._by_token = torch.add(head, rows, alpha=heads).flatten(0, 1)
            return by_token.view(-1, width), self._by_token
        if pool.is_contiguous():
            page, slot = rows // page_size, rows % page_size
            return pool.view(-1, width), ((page * heads + head) * page_size + slot).flatten(0, 1)
        # other strides: gathers the tokens in use first, since the pool may be much larger
        found = by_token[self.storage_rows // page_size, self.storage_rows % page_size]  # (entries, keys, heads, D)
        token = torch.arange(rows.numel(), device=pool.device).view(len(rows), 1, -1)
        return found.reshape(-1, width), (token * heads + head).flatten(0, 1)
