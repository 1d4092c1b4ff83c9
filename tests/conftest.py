"""Shared by all tests: ``ANYATTN_MUTANT=name`` runs them with that planted bug (see ``anyattn.testing.mutants``)."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True, scope="session")
def _mutant():
    name = os.environ.get("ANYATTN_MUTANT")
    if not name:
        yield
        return
    from anyattn.testing import mutants

    with mutants.active(name):
        yield
