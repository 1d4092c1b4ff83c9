"""``flash_attn_with_kvcache`` and split keys by the Triton backend, in Triton's interpreter on the CPU.

Run by test_triton_cache.py in a process of its own, for the interpreter has to be chosen before Triton is imported.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "end_to_end"))

import flash_calls as calls
import test_flash_cache as cache_tests
from flash_calls import RECIPES

from anyattn import check_lengths

assert os.environ.get("TRITON_INTERPRET") == "1"

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FITS = {
    name: s for name, s in cache_tests.SETTINGS.items()
}  # fmt: skip


@pytest.fixture(params=["looked at", "unread"])
def reading(request, monkeypatch):  # type: ignore[no-untyped-def]
    """As on a CPU, where tables are looked at, and as on a GPU, where nobody does."""
    if request.param == "unread":
        monkeypatch.setattr(check_lengths, "takes_their_word", lambda device, validate: validate is not True)
    return request.param


def cases():  # type: ignore[no-untyped-def]
    for i, (name, setting, turn) in enumerate(cache_tests.MATRIX):
        yield name, setting, turn, i


@pytest.mark.parametrize(("name", "setting", "turn", "i"), cases(), ids=str)
def test_against_the_reference(name, setting, turn, i, reading):  # type: ignore[no-untyped-def]
    s = replace(cache_tests.SETTINGS[setting], dtype=DTYPES[i % 3], seed=turn)
    cache_tests.check(s, RECIPES[name], num_splits=(0, 1, 2, 3, 5)[turn], backend="triton")
