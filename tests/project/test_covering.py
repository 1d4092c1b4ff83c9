"""What ``make test`` runs of a product of parameters: all values, or all pairs of values, in few cases."""

from __future__ import annotations

import itertools

import pytest

from tests.support.covering import covering, few

PRODUCT = [list(enumerate(values)) for values in itertools.product("abcde", "wxyz", "12")]


@pytest.mark.parametrize(("strength", "most"), [(1, 5), (2, 24), (3, 40)])
def test_few_cases_hold_all_combinations(strength: int, most: int) -> None:
    kept = covering(PRODUCT, strength)
    assert len(kept) <= most < len(PRODUCT) + 1
    of_all, of_kept = (
        {c for case in cases for c in itertools.combinations(case, strength)} for cases in (PRODUCT, [PRODUCT[i] for i in kept])
    )
    assert of_all == of_kept
    assert kept == covering(PRODUCT, strength)


def test_values_are_met_equally_often() -> None:
    kept = covering([list(enumerate(values)) for values in itertools.product("abcdef", "xyz")], 1)
    assert sorted(i % 3 for i in kept) == [0, 0, 1, 1, 2, 2]


def test_a_value_that_stands_in_one_case_keeps_it() -> None:
    assert covering([[(0, "a")], [(0, "a")], [(0, "b")]], 2) == {0, 2}


@pytest.mark.covering(1, of=lambda left, right: (left, right > 3))
@pytest.mark.parametrize("right", range(6))
@pytest.mark.parametrize("left", ["a", "b"])
def test_what_the_marker_leaves_is_slow(left: str, right: int, request: pytest.FixtureRequest) -> None:
    is_slow = request.node.get_closest_marker("slow") is not None
    assert is_slow is ((left, right) not in (("a", 0), ("b", 4)))


def test_representatives_have_to_be_there() -> None:
    assert [case if isinstance(case, str) else case.values for case in few("abc", "a", "c")] == ["a", ("b",), "c"]
    with pytest.raises(AssertionError, match="'d'"):
        few("abc", "d")


def test_a_slow_value_keeps_its_marks() -> None:
    skipped = pytest.param("c", marks=pytest.mark.skip(reason="none here"))
    plain, slow, both = few(["a", "b", skipped], "a")
    assert plain == "a" and slow.values == ("b",) and both.values == ("c",)
    assert [mark.name for mark in slow.marks] == ["slow"] and [mark.name for mark in both.marks] == ["skip", "slow"]
