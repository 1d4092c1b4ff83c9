"""What a person reads who asks the Triton backend for what it has not: which argument, what came, what was wanted, and a way out."""

from __future__ import annotations

import importlib.util

import pytest

from tests.support.processes import python

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

# Each in one process: (what is called, the words that its message has). t(...) is a tensor of zeros.
SCRIPT = """
import torch
import anyattn
from anyattn import BackendError, ModError, flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, flex_attention

def t(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)

def flex(heads=2, rows=16, dim=16, dim_v=None, dtype=torch.float32, keys=None, **options):
    keys = rows if keys is None else keys
    q, k, v = t(1, heads, rows, dim, dtype=dtype), t(1, 1, keys, dim, dtype=dtype), t(1, 1, keys, dim_v or dim, dtype=dtype)
    return flex_attention(q, k, v, enable_gqa=True, backend="triton", **options)

ends, far = torch.tensor([0, 7, 16], dtype=torch.int32), torch.tensor([0, 7, 99], dtype=torch.int32)
cache = lambda **more: flash_attn_with_kvcache(t(2, 1, 2, 16), t(2, 32, 1, 16), t(2, 32, 1, 16), backend="triton", **more)
packed = lambda a, b, **more: flash_attn_varlen_func(
    t(16, 2, 16), t(16, 1, 16), t(16, 1, 16), cu_seqlens_q=a, cu_seqlens_k=b, backend="triton", **more)
ALWAYS = [  # refused before a backend is asked
    (lambda: flex(kernel_options={"tile_n": 0}), ValueError, "kernel_options['tile_n']=0", "positive int"),
    (lambda: flex(kernel_options={"tiles": 64}), ValueError, "'tiles'", "wanted tile_m, tile_n"),
    (lambda: flex(kernel_options=[64]), TypeError, "kernel_options is a list", "a dict such as"),
    (lambda: flex(mask_mod=lambda b, h, i, j: i - j), ModError, "mask_mod", "torch.int64", "return a bool"),
    (lambda: flex(score_mod=lambda s, b, h, i, j: s + t(3)[j]), ValueError, "score_mod", "(3,)", "torch.clamp"),
    (lambda: packed(ends.float(), ends), TypeError, "cu_seqlens_q has dtype torch.float32", "int32 or int64"),
    (lambda: packed(far, ends), ValueError, "cu_seqlens_q[2]=99", "at most 16"),
    (lambda: packed(ends, ends, max_seqlen_q=3), ValueError, "max_seqlen_q=3", "at least 9"),
    (lambda: cache(cache_seqlens=40), ValueError, "cache_seqlens=40", "at most 32"),
    (lambda: cache(cache_seqlens=torch.tensor([40, 3])), ValueError, "cache_seqlens[0]=40", "at most 32"),
    (lambda: cache(k=t(2, 1, 1, 16), cache_seqlens=3), ValueError, "v is None", "wanted both, or neither"),
    (lambda: flex(scale=float("nan")), ValueError, "scale=nan", "finite"),
    (lambda: flex(sink=t(3)), ValueError, "sink", "(3,)", "(2,)"),
    (lambda: flash_attn_func(*[t(1, 4, 2, 8)] * 3, num_splits=-1, backend="triton"), ValueError, "num_splits=-1", "0"),
    (lambda: flex_attention(t(1, 1, 4, 8), t(1, 1, 4, 8), t(1, 1, 4, 8), backend="Triton"), ValueError, "backend='Triton'", "'triton'"),
]
HERE = [  # what the backend itself has not
    (lambda: flex(dtype=torch.float64), BackendError, "float64", "float32, bfloat16 and float16", "backend=None"),
    (lambda: flex(dim=584), BackendError, "head_dim is 584", "up to 576", "backend=None"),
    (lambda: flex(dim=8, dim_v=520), BackendError, "v's 520", "up to 512", "backend=None"),
    (lambda: flex(rows=0), BackendError, "q has shape (1, 2, 0, 16)", "nothing to multiply", "backend=None"),
    (lambda: flex(kernel_options={"tile_m": 100}), ValueError, "tile_m=100", "kernel_options", "power of two", "such as 128"),
    (lambda: flex(kernel_options={"tile_m": 2048, "tile_n": 1024}), ValueError, "tile_m=2048", "65536", "wanted smaller"),
    (lambda: flex(dim=256, kernel_options={"tile_m": 256, "tile_n": 256}), ValueError, "tile_m=256", "KiB", "wanted smaller"),
    (lambda: flash_attn_func(*[t(1, 1, 66000, 8)] * 3, backend="triton"), BackendError, "66000 query heads", "65535", "on parts"),
]
interprets = %s
for call, error, *words in ALWAYS + HERE:
    if not interprets and (call, error, *words) in [tuple(x) for x in HERE] and "backend='triton'" not in words:
        error, words = BackendError, ["backend='triton' cannot run here", "needs a GPU", "TRITON_INTERPRET=1", "backend=None"]
    try:
        call()
    except Exception as found:
        assert isinstance(found, error), (words, type(found), found)
        assert all(word in str(found) for word in words), (words, str(found))
    else:
        raise AssertionError(f"not refused: {words}")
print(len(ALWAYS + HERE), "refused")
"""


@pytest.mark.parametrize("interprets", [True, False])
def test_messages(interprets: bool) -> None:
    """With the interpreter, and on a machine that has no GPU for it."""
    done = python("-W", "ignore", "-c", SCRIPT % interprets, TRITON_INTERPRET=str(int(interprets)), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0 and "23 refused" in done.stdout, done.stdout + done.stderr[-3000:]
