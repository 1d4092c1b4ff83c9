"""Padded shards, marked rows, started exchanges and bfloat16 on the wire: the bits of the plain way, for documents as sequences too."""

from __future__ import annotations

import pytest

from tests.distributed import options
from tests.support.ranks import new_ranks


@pytest.mark.parametrize(("size", "has_documents", "node_size"), [(2, False, None), (2, True, None), (4, False, 2)])
def test_options_give_the_bits_of_the_plain_way(size: int, has_documents: bool, node_size: int | None) -> None:
    with new_ranks(size) as ranks:  # processes of their own, where documents run as sequences on a CPU
        for found in ranks.run(options.same_bits, has_documents, node_size):
            assert found == dict.fromkeys(found, True)
