"""Slots of new rows and their writing against a dictionary that plays the cache, bit for bit, and every refusal."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from anyattn.kvcache.append import append, check_apart, check_append, check_disjoint, check_pages, slots

Slot = tuple[int, int]


@dataclass
class Case:
    """One batch: Python lists, from which both the model and the tensors are made."""

    leftpad: list[int]
    cached: list[int]  # cache_seqlens, the padding included
    new: list[int]
    cache_rows: list[int]
    table: list[list[int]] | None
    shape: tuple[int, int]  # leading dimensions of the cache

    @property
    def page_size(self) -> int:
        return self.shape[1]

    def rows(self) -> tuple[Tensor, Tensor]:
        """The first new row of each entry, and their number."""
        return torch.tensor(self.cached), torch.tensor(self.new)

    def tensors(self, table_dtype: torch.dtype = torch.int32) -> tuple[Tensor, Tensor | None]:
        return torch.tensor(self.cache_rows), None if self.table is None else torch.tensor(self.table, dtype=table_dtype)

    def model(self) -> list[Slot]:
        """Where each new row goes, one at a time."""
        found = []
        for b, count in enumerate(self.new):
            for j in range(count):
                row = self.cached[b] + j
                if self.table is None:
                    found.append((self.cache_rows[b], row))
                else:
                    found.append((self.table[b][row // self.page_size], row % self.page_size))
        return found

    def check(self) -> None:
        check_append(torch.tensor(self.leftpad), *self.rows(), *self.tensors(), self.shape[1], self.shape[0])


def random_case(seed: int, paged: bool) -> Case:
    rng = random.Random(seed)
    batch, page_size = rng.choice((1, 2, 3, 7)), rng.choice((1, 2, 3, 16)) if paged else 23
    width = -(-23 // page_size)
    leftpad = [rng.choice((0, 0, 1, 5)) for _ in range(batch)]
    cached = [rng.randint(pad, 17) for pad in leftpad]
    same = rng.choice((None, 0, 1, 6))
    new = [rng.choice((0, 1, 2, 6)) if same is None else same for _ in range(batch)]
    if not paged:
        places = batch + rng.randrange(3)
        return Case(leftpad, cached, new, rng.sample(range(places), batch), None, (places, 23))
    pool = batch * width + rng.randrange(5)
    order = rng.sample(range(pool), batch * width)
    table = [order[b * width : (b + 1) * width] for b in range(batch)]
    for pages, rows in zip(table, (c + n for c, n in zip(cached, new))):
        pages[-(-rows // page_size) :] = [rng.choice((-1, 0, pool, 10**9)) for _ in pages[-(-rows // page_size) :]]  # not in use
    return Case(leftpad, cached, new, list(range(batch)), table, (pool, page_size))


CASES = [(seed, paged) for seed in range(40) for paged in (False, True)]


@pytest.mark.parametrize(("seed", "paged"), CASES)
def test_slots_equal_one_row_at_a_time(seed: int, paged: bool) -> None:
    case = random_case(seed, paged)
    case.check()
    for dtype in (torch.int32, torch.int64):
        first, second = slots(*case.rows(), *case.tensors(dtype), case.page_size)
        assert list(zip(first.tolist(), second.tolist())) == case.model()
        assert first.dtype is second.dtype is torch.int64 and first.shape == second.shape == (sum(case.new),)


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> tuple[Tensor, Tensor]:
    """(memory, cache): the cache is a view of memory full of NaN, with more memory before, between and behind its rows."""
    a, b, heads, width = shape
    if layout == "heads outside":
        memory = torch.full((a + 2, heads, b, width), math.nan, dtype=dtype)
        return memory, memory[1:-1].transpose(1, 2)
    if layout == "gaps":
        memory = torch.full((a + 2, b + 3, heads + 1, 2 * width), math.nan, dtype=dtype)
        return memory, memory[1:-1, 2:-1, 1:, ::2]
    memory = torch.full((a + 2, b, heads, width), math.nan, dtype=dtype)
    return memory, memory[1:-1]


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("layout", ["contiguous", "heads outside", "gaps"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_append_writes_the_new_rows_and_nothing_else(dtype: torch.dtype, layout: str) -> None:
    for seed, paged in CASES[::3]:
        case = random_case(seed, paged)
        memory, cache = poisoned((*case.shape, 2, 3), dtype, layout)
        expected_memory, expected = poisoned((*case.shape, 2, 3), dtype, layout)
        rows = torch.randn(2, sum(case.new), 3).to(dtype).transpose(0, 1)  # strided, as rows out of a projection are
        before = rows.clone()
        for row, (i, j) in zip(rows, case.model()):
            expected[i, j] = row
        append(cache, rows, *slots(*case.rows(), *case.tensors(), case.page_size))
        assert torch.equal(bits(memory), bits(expected_memory)), (seed, paged)
        assert torch.equal(rows, before)


def test_appending_step_by_step() -> None:
    """A dictionary keeps what each entry was given; after any number of steps the cache holds that, in order."""
    rng = random.Random(3)
    page_size, table = 4, [[5, 0, 3, 8], [1, 9, 2, 7]]
    cache, held = torch.full((10, page_size, 2, 3), math.nan), [0, 0]
    kept: dict[int, list[Tensor]] = {0: [], 1: []}
    while max(held) < 12:
        case = Case([0, 0], list(held), [rng.randrange(4), rng.randrange(4)], [0, 1], table, (10, page_size))
        case.check()
        rows = torch.randn(sum(case.new), 2, 3)
        append(cache, rows, *slots(*case.rows(), *case.tensors(), page_size))
        for b, part in enumerate(rows.split(case.new)):
            kept[b] += list(part)
            held[b] += len(part)
    for b in kept:
        stored = cache[torch.tensor(table[b])].flatten(0, 1)
        assert torch.equal(stored[: held[b]], torch.stack(kept[b])) and bool(stored[held[b] :].isnan().all())
    assert bool(cache[[4, 6]].isnan().all())  # pages of nobody


def test_a_pool_past_2_to_the_31_elements() -> None:
    """Reliability's case 5; the pool's memory is mapped, but only the pages that are written become real."""
    page_size, width = 16, 128
    num_pages = (1 << 31) // (page_size * width) + 3
    pool = torch.empty(num_pages, page_size, 1, width, dtype=torch.uint8)
    case = Case([0, 0], [14, 2], [4, 1], [0, 1], [[1, num_pages - 1], [num_pages - 2, 0]], (num_pages, page_size))
    case.check()
    for page in (1, num_pages - 1, num_pages - 2):
        pool[page] = 0
    rows = torch.arange(1, 6, dtype=torch.uint8)[:, None, None].expand(5, 1, width)
    append(pool, rows, *slots(*case.rows(), *case.tensors(), page_size))
    assert pool[1, :, 0, 5].tolist() == [0] * 14 + [1, 2]
    assert pool[num_pages - 1, :, 0, 5].tolist() == [3, 4] + [0] * 14
    assert pool[num_pages - 2, :, 0, 5].tolist() == [0, 0, 5] + [0] * 13


def test_nothing_to_append() -> None:
    for table in (None, [[-1, 99], [7, -5]]):
        case = Case([0, 0], [0, 0], [0, 0], [1, 1], table, (4, 8))
        case.check()  # no row is in use, so no page is looked at; a cache row may be read twice
        cache = torch.full((4, 8, 1, 1), math.nan)
        append(cache, torch.empty(0, 1, 1), *slots(*case.rows(), *case.tensors(), 8))
        assert bool(cache.isnan().all())
    empty = torch.arange(0)
    for none in (None, torch.empty(0, 3, dtype=torch.int32), torch.empty(0, 0, dtype=torch.int32)):
        check_append(empty, empty, empty, empty, none, 8, 4)
        assert [len(x) for x in slots(empty, empty, empty, none, 8)] == [0, 0]


# ---- what is accepted and what is not


def test_exactly_full_is_accepted_and_one_more_is_not() -> None:
    Case([0, 3], [7, 5], [1, 3], [0, 1], None, (2, 8)).check()
    with pytest.raises(
        ValueError, match=r"append 4 rows to the 5 of entry 1 \(cache_seqlens\[1\]\), 9 in all, but each row of k_cache holds 8"
    ):
        Case([0, 3], [7, 5], [1, 4], [0, 1], None, (2, 8)).check()
    Case([0, 0], [7, 5], [1, 3], [0, 1], [[0, 1], [2, 3]], (4, 4)).check()
    with pytest.raises(
        ValueError, match=r"2 rows to the 7 of entry 0 .*, 9 in all, but page_table\[0\] has 2 pages of 4 rows, 8 in all.*pages"
    ):
        Case([0, 0], [7, 5], [2, 3], [0, 1], [[0, 1], [2, 3]], (4, 4)).check()


@pytest.mark.parametrize("value", [-1, 6, 10**9])
@pytest.mark.parametrize(("cached", "new"), [(8, 1), (9, 0), (1, 8)], ids=["appended to", "read", "both"])
@pytest.mark.parametrize("unused", [0, 9])
def test_pages_in_use_must_be_in_the_pool(value: int, cached: int, new: int, unused: int) -> None:
    pages = "the 3 pages that rows 0 to 8 of entry 1 are in"
    with pytest.raises(ValueError, match=rf"page_table\[1, 2\]={value}, but the pool has 6 pages; wanted 0 to 5 for {pages}"):
        Case([0, 0], [3, cached], [1, new], [0, 1], [[0, unused, unused], [1, 2, value]], (6, 4)).check()


def test_the_first_bad_page_is_named() -> None:
    with pytest.raises(ValueError, match=r"page_table\[0, 1\]=8"):
        Case([0, 0], [7, 7], [0, 0], [0, 1], [[0, 8], [9, 9]], (8, 4)).check()


def test_pages_not_in_use_hold_anything() -> None:
    table = [[-7, 1, 99], [99, -1, 99]]
    Case([4, 0], [7, 0], [1, 0], [0, 1], table, (6, 4)).check()  # entry 0: the first page is all padding, the third not reached
    with pytest.raises(ValueError, match=r"page_table\[0, 0\]=-7.*rows 3 to 7 of entry 0"):
        Case([3, 0], [7, 0], [1, 0], [0, 1], table, (6, 4)).check()
    Case([6, 0], [6, 0], [0, 0], [0, 1], [[9, 9], [9, 9]], (6, 4)).check()  # nothing but padding


def test_check_pages_alone() -> None:
    table = torch.tensor([[0, 5], [1, 2]])
    check_pages(table, torch.tensor([0, 0]), torch.tensor([4, 8]), 4, 5)
    with pytest.raises(ValueError, match=r"page_table\[0, 1\]=5, but the pool has 5 pages; wanted 0 to 4"):
        check_pages(table, torch.tensor([0, 0]), torch.tensor([5, 8]), 4, 5)
    with pytest.raises(ValueError, match=r"but the pool has 0 pages"):
        check_pages(table, torch.tensor([0, 0]), torch.tensor([0, 1]), 4, 0)


def test_one_cache_row_appended_to_twice() -> None:
    with pytest.raises(ValueError, match=r"cache_batch_idx\[1\] and cache_batch_idx\[3\] are both 5, so k and v would be appended"):
        Case([0] * 4, [1, 2, 3, 9], [1] * 4, [4, 5, 6, 5], None, (8, 16)).check()
    Case([0] * 4, [1, 2, 3, 9], [1, 0, 1, 1], [4, 5, 6, 5], None, (8, 16)).check()  # entry 1 only reads


@pytest.mark.parametrize("cached", [(5, 5), (5, 6), (4, 7)], ids=str)
def test_one_page_appended_to_twice(cached: tuple[int, int]) -> None:
    """Different rows of one page are as bad: each entry overwrites what the other has, or will have, there."""
    rows = rf"rows from {cached[0]} of entry 0, from {cached[1]} of entry 2"
    with pytest.raises(ValueError, match=rf"page_table\[0, 1\] and page_table\[2, 1\] are both page 3, and .* for both \({rows}\).*copy"):
        Case([0] * 3, [cached[0], 2, cached[1]], [1, 1, 1], [0, 1, 2], [[0, 3], [1, 9], [0, 3]], (6, 4)).check()
    # a shared beginning is fine where nobody writes, and so is sharing with an entry that only reads
    Case([0] * 3, [cached[0], 2, cached[1]], [1, 1, 1], [0, 1, 2], [[0, 3], [1, 9], [0, 4]], (6, 4)).check()
    Case([0] * 3, [cached[0], 2, cached[1]], [1, 1, 0], [0, 1, 2], [[0, 3], [1, 9], [0, 3]], (6, 4)).check()


def test_one_page_twice_in_one_entry() -> None:
    with pytest.raises(ValueError, match=r"page_table\[0, 0\] and page_table\[0, 2\] are both page 4"):
        Case([0], [3], [7], [0], [[4, 1, 4]], (6, 4)).check()


@pytest.mark.parametrize("dim", range(4))
def test_expanded_caches(dim: int) -> None:
    shape = [3, 4, 2, 5]
    shape[dim] = 1
    expanded = torch.zeros(shape).expand(3, 4, 2, 5)
    with pytest.raises(ValueError, match=rf"v_cache has shape \(3, 4, 2, 5\) and strides .* dimension {dim} is expanded.*\.contiguous"):
        check_apart("v_cache", expanded)
    check_apart("v_cache", expanded.contiguous())
    one = torch.zeros(shape)
    check_apart("v_cache", one.as_strided(shape, [0 if n == 1 else s for n, s in zip(shape, one.stride())]))  # size 1: any stride will do


def overlapping(a: Tensor, b: Tensor) -> bool:
    """By marking every element of a."""
    a.zero_(), b.zero_()
    a.fill_(1)
    return bool(b.any())


def test_caches_that_share_an_element_are_told_from_those_that_interleave() -> None:
    """Views of one tensor cut in every way: refused exactly where a write through one shows in the other."""
    rng, seen = random.Random(3), {True: 0, False: 0}
    for _ in range(600):
        pool = torch.zeros(4, 2, 6, 2, 3, 4)
        views = []
        for _ in range(2):
            kind, at = rng.choice(["pages", "places", "heads", "dims"]), rng.randrange(2)
            if kind == "dims":
                view = pool[:, at, ..., 0, at * 2 : at * 2 + 2]
            else:
                view = pool[:, at, ..., 0, :] if kind != "heads" else pool[:, 0, :, at, :, :]
            first, step, last = rng.randrange(3), rng.randint(1, 2), rng.randint(3, 4)
            views.append(view[first:last:step, rng.randrange(2) :: rng.randint(1, 3)])
        wanted = overlapping(*views)
        seen[wanted] += 1
        try:
            check_disjoint(*views)
        except ValueError:
            assert wanted
        else:
            assert not wanted
    assert min(seen.values()) > 100


def test_caches_of_other_memory_sizes_and_steps() -> None:
    flat = torch.zeros(1000)
    for a, b, wanted in [
        ((0, (3, 5), (7, 2)), (1, (3, 5), (7, 2)), True),  # 1 + 2 * 3 = 7
        ((0, (3, 3), (7, 2)), (1, (3, 3), (7, 2)), False),
        ((0, (4, 4), (9, 1)), (5, (4, 4), (9, 1)), False),
        ((0, (4, 4), (9, 1)), (5, (4, 5), (9, 1)), True),
        ((0, (4, 4), (6, 4)), (1, (4, 4), (10, 2)), False),  # even against odd
        ((0, (4, 0), (6, 4)), (0, (4, 4), (10, 2)), False),
    ]:
        one, other = (torch.as_strided(flat, size, stride, start) for start, size, stride in (a, b))
        assert overlapping(one, other) == wanted or 0 in one.shape
        if wanted:
            with pytest.raises(ValueError, match=r"k_cache and v_cache share memory .*so v would be written over k"):
                check_disjoint(one, other)
        else:
            check_disjoint(one, other)
