"""Padded shards, marked rows, started exchanges and bfloat16 on the wire: the bits of the plain way, for documents as sequences too."""

from __future__ import annotations

import pytest

from tests.distributed import options
from tests.support.ranks import new_ranks


@pytest.mark.parametrize("has_documents", [False, True])
def test_options_give_the_bits_of_the_plain_way(has_documents: bool) -> None:
    with new_ranks(2) as ranks:  # processes of their own, where documents run as sequences on a CPU
        for found in ranks.run(options.same_bits, has_documents):
            assert found == dict.fromkeys(found, True)
