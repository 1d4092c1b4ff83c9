"""vLLM for these tests, and what they use of it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tests.support.vllm import package


@pytest.fixture(scope="module")
def vllm() -> Iterator[SimpleNamespace]:
    """Modules of vLLM and of the back end. is_real: whether it is vLLM itself."""
    with package.provided() as is_real:
        theirs = {
            "api": "vllm.v1.attention.backend",
            "registry": "vllm.v1.attention.backends.registry",
            "cache": "vllm.v1.kv_cache_interface",
        }
        ours = {name: f"anyattn.integrations.vllm.{name}" for name in ("backend", "implementation", "metadata")}
        yield SimpleNamespace(is_real=is_real, **{name: importlib.import_module(path) for name, path in (theirs | ours).items()})
