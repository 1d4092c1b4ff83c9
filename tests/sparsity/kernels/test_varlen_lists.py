"""Lists of ragged batches made on a GPU, without one: nothing on the way to the kernels waits, and there is room for every tile."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from anyattn import masks
from anyattn.mods.analysis.load_bounds import check_loads
from anyattn.mods.tracing.trace import trace
from anyattn.sequences.unread_varlen import LengthTables, StoredSequences, StoredSizes
from anyattn.sparsity import varlen_lists as ragged
from anyattn.sparsity.varlen_block_sparse import compute_varlen_block_sparsity
from anyattn.validate import flash
from anyattn.validate.flash import Options
from tests.support.triton.built import Waits

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels are not launched but noted: a fake tensor has no memory."""
    from anyattn.sparsity.kernels import block_lists as kernels

    made: list[str] = []
    store = type("Grid", (), {"__getitem__": lambda self, grid: lambda *args, **constants: made.append("places")})()
    monkeypatch.setattr(kernels, "_store_places", lambda: store)
    monkeypatch.setattr(kernels, "_launch", lambda *args: made.append("lists"))
    return made


@needs_triton
@pytest.mark.parametrize("form", ["packed", "used", "padded"])
def test_nothing_waits(form: str, launches: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """From the arguments of ``flash_attn_varlen_func`` to the Hopper kernel's tables, whatever the mask."""
    from anyattn.backends.hopper import tables
    from anyattn.backends.hopper.make_config import forward_spec

    monkeypatch.setattr(tables, "launch", lambda *args: launches.append("tables"))
    monkeypatch.setattr(flash, "refuse_hidden_captures", lambda mod: None)  # the fake tensors stand for tensors on a GPU
    with FakeTensorMode(allow_non_fake_inputs=True):
        rows = (2, 1000) if form == "padded" else (1900,)
        q = torch.zeros(*rows, 4, 64, dtype=torch.bfloat16, device="cuda")
        cu = None if form == "padded" else torch.zeros(3, dtype=torch.int32, device="cuda")
        used = None if form == "packed" else torch.zeros(2, dtype=torch.int32, device="cuda")
        ids, lengths = (torch.zeros(*shape, dtype=torch.int64, device="cuda") for shape in ((2, 1000), (2,)))
        for mask in (
            masks.document(ids), masks.prefix_lm(lengths), masks.sink_window(4, 100), lambda b, h, q, k: (q - k) % (h + 3) == 0
        ):  # fmt: skip
            options = Options(causal=True, mask_mod=mask)
            check_loads(trace(mask, "mask"), 2, 4, 1000, 1000, reads_values=False)
            for _ in range(2):
                with Waits():
                    problem = flash.varlen_problem(q, q, q, cu, cu, 1000, 1000, used, used, None, None, options)
                    spec = forward_spec(problem)
                    found = tables.visits_of(problem, spec, (torch.empty_like(q), None, None))
                assert sorted(launches) == ["lists", "places", "tables"]
                launches.clear()
                # the kernel's config says flat lists, with a head each or one for all
                assert spec.config.lists == "flat" and found.partial_index is not None and found.partial_index.ndim == 2
                assert len(found.partial_index) == (4 if spec.config.per_head else 1)
                assert found.entries is not None and found.entries.shape == (2, 9) and found.entries.device.type == "cuda"


def test_without_a_gpu_they_are_those_of_the_door() -> None:
    ends_q, ends_k = torch.tensor([0, 200, 200, 350]), torch.tensor([0, 130, 400, 900])
    s = StoredSequences(LengthTables(ends_q, ends_k, None, None), StoredSizes(3, 400, 1000, 300, 600))
    mask = lambda b, h, q, k: (q + 100 * h >= k) & (k % 7 != 3)
    found = ragged.ragged_lists(trace(mask, "mask"), s, (64, 128), 2)
    theirs = compute_varlen_block_sparsity(64, 128, 2, mask, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k)
    for name in ("mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx"):
        assert torch.equal(getattr(found, name), getattr(theirs, name)), name
    assert torch.equal(found.first_row, theirs.cu_block_cnt[:-1]) and torch.equal(found.first_entry, theirs.cu_block_idx[:-1])
    assert ragged.RaggedLists.of(theirs).mask_block_idx is theirs.mask_block_idx


@pytest.mark.parametrize("sizes", [(3, 400, 1000, 300, 600), (3, 350, 900, 150, 500), (1, 1, 1, 1, 1)], ids=str)
def test_there_is_room_for_every_tile(sizes: tuple[int, ...]) -> None:
    """Whatever packed sequences of these sizes are, they have no more tiles than is made room for."""
    g, s = torch.Generator().manual_seed(0), StoredSizes(*sizes)
    for _ in range(200):
        lengths = []
        for rows, bound in ((s.rows_q, s.bound_q), (s.rows_k, s.bound_k)):
            cuts = torch.randint(0, rows + 1, (s.batch - 1,), generator=g).sort().values
            found = torch.cat((torch.tensor([0]), cuts, torch.tensor([rows]))).diff().clamp(max=bound)
            lengths.append(found)
        ends = [torch.cat((torch.tensor([0]), n.cumsum(0))) for n in lengths]
        for tile in ((16, 48), (128, 128), (1, 1)):
            most = ragged._most_tiles(StoredSequences(LengthTables(*ends, None, None), s), tile)
            have = [int((-(-n // size)).sum()) for n, size in zip(lengths, tile, strict=True)]
            assert most[0] >= have[0] and most[1] >= have[1]
            padded = ragged._most_tiles(StoredSequences(LengthTables(None, None, *lengths), s), tile)
            assert padded[0] >= have[0] and padded[1] >= have[1]


def test_one_heads_lists_stand_for_all_where_another_predicate_sees_h() -> None:
    """The kernel then looks for its head's, as its config says."""
    from anyattn.backends.hopper.make_config import forward_spec
    from anyattn.backends.hopper.tables import visits_of

    q, ends = torch.zeros(500, 4, 64, dtype=torch.bfloat16), torch.tensor([0, 300, 500])
    problem = flash.varlen_problem(q, q, q, ends, ends, None, None, None, None, None, None, Options(mask_mod=masks.prefix_lm(40)))
    alone = visits_of(problem, forward_spec(problem))
    both = replace(problem, predicates=(*problem.predicates, trace(lambda b, h, q, k: (k + h) % 2 == 0, "mask")))
    found = visits_of(both, forward_spec(both))
    assert forward_spec(both).config.per_head and not forward_spec(problem).config.per_head
    for name in ("partial_count", "partial_index", "full_count", "full_index"):
        one, each = getattr(alone, name), getattr(found, name)
        assert len(one) == 1 and len(each) == 4 and torch.equal(each, one.expand(4, -1)), name
