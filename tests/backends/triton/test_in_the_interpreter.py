"""The Triton kernels by Triton's interpreter, on a CPU: every variant, the tests of all entry points, and mutants.

The interpreter is chosen when Triton is imported, so the parts run in processes of their own; there the tests of other folders, which name
no backend, run on this one (``tests/conftest.py``). ``make test`` runs their tests that are not slow, in two processes (``PROCESSES``),
``make test-long`` the rest too, a process for each part.
"""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

import pytest

from tests.support.processes import Run, all_in_the_interpreter

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


class Part(NamedTuple):
    """files: below tests/. chosen: pytest's ``-k``. tiles: of calls that name none. fills: memory holds garbage first (not
    where a test reserves gigabytes that it never touches). few: of the chosen ones those that are not slow here, again as a ``-k``.
    has_slow: whether some of its tests are slow. insists: whether calls that name no backend run on this one."""

    files: tuple[str, ...]
    chosen: str = ""
    tiles: str = "32x16"
    fills: bool = True
    few: str = ""
    has_slow: bool = True
    insists: bool = True


# of the edge cases those that are small enough; the others, at a smaller size, are among the variants
EDGES = """test_01_everything or test_02 or (test_03 and float32) or test_04_window_of or test_04_an_empty or test_05 or test_06_expanded
    or test_06_gradients or test_06_dimensions or test_06_one or test_09_a_mask or test_09_lists or test_10 or test_11
    or (test_13 and float32-32) or test_16 or test_17 or test_18_a_new or test_21 or test_22 or test_23
    or (test_24 and (one or blocks or dims))
    or test_gradient_through or test_only_the"""
# each function of triton_tools/device_math.py; rows that are products, distances, looked up and counted; a mask of many operations
OPERATIONS = (
    *("silu", "softplus", "erfinv", "atan", "sinh", "frac", "nan_to", "detach"),
    *("rope_dot", "distance", "neighbours", "counts", "tiles_3d"),
)
KERNELS = "backends/triton/kernels"
PARTS = {
    "mutants": Part(("mutants/test_triton_mutants_interpreted.py",), has_slow=False),
    "variants, documents, sequences, frozen": Part(
        tuple(f"{KERNELS}/test_{name}_interpreted.py" for name in ("every_variant", "documents", "sequences", "unasked_gradients"))
    ),
    "edges and sums": Part(
        tuple(
            f"{KERNELS}/test_{name}_interpreted.py"
            for name in ("edge_cases", "even_tables", "far_sides", "distance_bands", "deterministic_sum", "privatized_sum", "pair_tile")
        )
    ),
    "strides and operators": Part(
        ("tensors/test_strides.py", "custom_ops/test_strided_operators.py", "custom_ops/test_block_sparse_operands.py"),
        """(test_strides and ((test_flex and score_mod) or remembered or packed or pages or decoding)) or (custom_ops and
        ((test_attend and all) or pages or packed or decode) and not opcheck)""",
    ),
    "kernels alone": Part(
        (
            *(f"{KERNELS}/test_forward_interpreted.py", "backends/triton/codegen/test_assumptions_interpreted.py"),
            *("documents/test_kernels_interpreted.py", "sequences/test_tile_order_interpreted.py"),
            *("distributed/test_row_moves_interpreted.py", f"{KERNELS}/test_eight_bits_interpreted.py"),
            f"{KERNELS}/test_wrapped_rows_interpreted.py",
            f"{KERNELS}/test_gathered_keys_interpreted.py",
            *(f"sparsity/kernels/test_{name}_interpreted.py" for name in ("block_lists", "varlen_lists", "topk")),
        ),
        insists=False,
    ),
    "batches of vLLM": Part(
        ("integrations/vllm/test_forward.py", "integrations/vllm/test_tables_interpreted.py"),
        "captured or prefill_and_decoding or options or tree or images or quantised",
        has_slow=False,
    ),
    "layouts": Part((f"{KERNELS}/test_layouts_interpreted.py",), has_slow=False, insists=False),
    # its slow tests take so long that they have a limit of their own (test_decoding.py)
    "decoding": Part(
        (
            *(f"{KERNELS}/test_{name}_interpreted.py" for name in ("append_rotary", "append_quantise", "combine")),
            *("backends/triton/test_decoding_interpreted.py", "backends/triton/test_even_shares_interpreted.py"),
            "call_cache/test_replays_interpreted.py",
        ),
        has_slow=False,
        insists=False,
    ),
    "batch invariance": Part(("backends/triton/test_batch_invariance_interpreted.py",), has_slow=False, insists=False),
    "8-bit caches": Part(
        ("entry_points/test_8_bit_caches.py",),
        "oracle or far_apart or varlen or matter or without_scales",
        few="(oracle and (plain or padding_in)) or (far_apart and key) or (varlen and 16 and inline)",
    ),
    "appending to 8-bit caches": Part(
        ("entry_points/test_8_bit_append.py",),
        "(written_and_attended and (wide or head)) or (packed_rows and 16 and inline) or (oracle and 16) or out_of_range or of_nan",
        has_slow=False,
    ),
    "wide gradients of keys": Part(("backends/test_wide_kv_grads.py",), has_slow=False),
    "operations": Part(
        ("entry_points/test_operations.py",),
        "test_float32 or (test_rows_of_64 and float32)",
        few=" or ".join(("rows_of_64", *OPERATIONS)),
    ),
    "reductions": Part(
        ("entry_points/test_reductions.py", "entry_points/test_skipping.py"),
        "equal_the_oracles or other_sizes or divide_no_tile or (last and causal) or (skipping and not compiled)",
        has_slow=False,
    ),
    "wide heads": Part(("entry_points/test_wide_heads.py",), has_slow=False),
    "tiles of wide heads": Part((f"{KERNELS}/test_wide_tiles_interpreted.py",), has_slow=False, insists=False),
    "dropout": Part(("entry_points/test_dropout.py",), "(oracle and (causal or pairs or splits or odd)) or packed", has_slow=False),
    "edge cases": Part(("entry_points/test_edge_cases.py",), f"({EDGES}) and not float64", "64x32", fills=False),
}


# those that compile graphs share a process: Dynamo takes seconds to import. Mutants, which import the backend anew, come last
PROCESSES = {
    "large parts": ("variants, documents, sequences, frozen", "edges and sums", "strides and operators", "layouts", "batches of vLLM"),
    "small parts": (
        "kernels alone",
        "decoding",
        "batch invariance",
        "operations",
        "edge cases",
        "dropout",
        "wide heads",
        "tiles of wide heads",
        "8-bit caches",
        "appending to 8-bit caches",
        "wide gradients of keys",
        "reductions",
        "mutants",
    ),
}


def run_of(part: Part, marked: str) -> Run:
    """marked: which of its tests, by pytest's ``-m``, where the part does not name the few itself."""
    chosen = part.chosen
    if part.few:
        chosen, marked = f"({chosen}) and {'not ' * (marked == 'slow')}({part.few})", ""
    options = ["-k", " ".join(chosen.split())] if chosen else []
    backend: dict[str, str | None] = dict.fromkeys(("ANYATTN_TEST_BACKEND", "ANYATTN_TEST_TILES", "ANYATTN_TEST_FILL"))
    if part.insists:
        backend = {"ANYATTN_TEST_BACKEND": "triton", "ANYATTN_TEST_TILES": part.tiles, "ANYATTN_TEST_FILL": str(int(part.fills))}
    return Run(part.files, ("--durations=5", "-m", marked, *options), backend)


@pytest.mark.parametrize("process", PROCESSES)
def test_parts(process: str) -> None:
    print(all_in_the_interpreter([run_of(PARTS[name], "not slow") for name in PROCESSES[process]]))


def test_every_part_has_its_process() -> None:
    assert sorted(name for names in PROCESSES.values() for name in names) == sorted(PARTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, part in PARTS.items() if part.has_slow])
def test_rest_of_part(name: str) -> None:
    print(all_in_the_interpreter([run_of(PARTS[name], "slow")]))
