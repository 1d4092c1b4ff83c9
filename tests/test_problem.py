"""Row ranges of a problem's masks: those of equal tables are one object, and every write to a table is seen."""

from dataclasses import replace

import torch

from anyattn.mods.analysis.row_ranges import limits, row_ranges
from anyattn.mods.tracing.trace import trace
from anyattn.problem import Problem


def padded(padding, ids):
    return trace(lambda b, h, q, k: ~padding[b, k] & (q >= k) & (ids[q] == ids[k]), "mask")


def tables(first=2, dtype=torch.int64):
    return torch.arange(9) < torch.tensor([[0], [first]]), torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2], dtype=dtype)


def problem(mask):
    q = torch.zeros(2, 3, 9, 4)
    return Problem(q, q, q, 1.0, predicates=(mask,))


def are_right(mask):
    """Whether the problem's limits are those of a new derivation."""
    (found,) = problem(mask).row_limits
    return all(map(torch.equal, found, limits(row_ranges(mask), 9, 9, 2, 3)))


def test_equal_tables_have_the_same_ranges_and_limits():
    one, other = (problem(padded(*tables())) for _ in range(2))
    assert one.row_ranges[0] is other.row_ranges[0]
    assert one.row_ranges[0].is_constant
    assert one.row_limits[0] is other.row_limits[0]
    for others in (tables(3), tables(dtype=torch.int32), (tables()[0], tables()[1] * 2)):
        mask = padded(*others)
        assert problem(mask).row_ranges[0] is not one.row_ranges[0]
        assert are_right(mask)


def test_writes_that_torch_does_not_count_change_the_ranges():
    """numpy shares the memory; ranges that were derived before have copies of their own."""
    padding, ids = tables()
    mask = padded(padding, ids)
    (before,) = problem(mask).row_ranges
    wanted = [t.clone() for t in limits(before, 9, 9, 2)]
    ids.numpy()[:] = range(9)
    assert are_right(mask)
    assert not torch.equal(problem(mask).row_limits[0][0], wanted[0].expand(-1, -1, 3, -1))
    assert all(map(torch.equal, limits(before, 9, 9, 2), wanted))
    padding.numpy()[1, 4] = True
    assert problem(mask).row_ranges[0] is None  # padding and text have two runs each


def test_large_tables_and_tensors_of_other_kinds_are_read_again():
    class Own(torch.Tensor):
        pass

    padding, ids = tables()
    mask = padded(padding, ids)
    for changed in (torch.cat([ids, torch.full((2**13,), 3)]), ids.as_subclass(Own)):
        assert not problem(replace(mask, tensors=(padding, changed))).row_ranges[0].is_constant
