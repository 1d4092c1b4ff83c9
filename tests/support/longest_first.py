"""Test order, longest first: a worker that starts its longest test last keeps all others waiting; short tests then fill the gaps."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

__all__ = ["in_order"]

# Above ten seconds of one core, the longest first. A name that no test has any more does no harm; a long test that is missing here may only
# make the others wait.
_LONGEST = (
    "backends/triton/test_in_the_interpreter.py",
    "backends/hopper/test_families_compile.py",
    "backends/hopper/test_launch.py::test_what_one_process_compiled_another_loads_without_the_compiler",
    "custom_ops/test_aoti.py",
    "benchmarks/test_transformers_gpu.py",
    "fuzz/test_fuzz_triton.py",
    "examples/test_serve.py::test_the_command_answers",
    "cli/test_pictures.py::test_files_are_reproducible_and_show_their_counts",
    "backends/triton/test_privatized_sum.py",
    "benchmarks/test_gpt_benchmark.py",
    "fuzz/test_fuzz_flex.py",
    "kvcache/test_pages.py::TestHistories",
    "sparsity/test_varlen_block_sparse.py",
    "examples/test_finetune.py",
    "backends/hopper/test_tables.py",
)


def in_order(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The tests of ``_LONGEST``, by their places in it, then all others as they were."""

    def place(item: pytest.Item) -> int:
        name = item.nodeid.removeprefix("tests/")
        return next((i for i, long in enumerate(_LONGEST) if name.startswith(long)), len(_LONGEST))

    return sorted(items, key=place)
