"""examples/invariant.py: a server's and a trainer's log probabilities, equal inside the context and not by default."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.support.examples import example


@pytest.fixture(scope="module")
def invariant() -> ModuleType:
    return example("invariant")


def test_the_bits_agree_inside_the_context_alone(invariant: ModuleType) -> None:
    assert invariant.differing(is_invariant=True) == (0, 0.0)
    count, most = invariant.differing(is_invariant=False)
    assert count > 0
    assert most > 0
