"""Shared code of the tests of the call cache."""

from __future__ import annotations

import torch

import anyattn
from anyattn.call_cache import attention

flex, flash = anyattn.flex_attention, anyattn.flash_attn_func
LENGTH = 40


def qkv(batch=1, heads=2, length=LENGTH, dim=16, dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    return tuple(torch.randn(batch, heads, length, dim, generator=g).to(dtype) for _ in range(3))


Q, K, V = qkv()


def call(**options):
    return flex(Q, K, V, **options)


def follows(do, change, *, twice=True):
    """The result of ``do`` changes with ``change``, and is then the one of a first call, bit for bit."""
    before = [do() for _ in range(1 + twice)][-1]
    change()
    warm = do()
    attention.clear()
    assert torch.equal(warm, do()), "stale"
    assert not torch.equal(warm, before), "the change changes nothing: this test shows nothing"


def wide(b, h, i, j):
    return (i >= j) & (i - j < 20)


def narrow(b, h, i, j):
    return (i >= j) & (i - j < 3)


def made(mask, make=anyattn.create_block_mask):
    return make(mask, 1, 1, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=16)
