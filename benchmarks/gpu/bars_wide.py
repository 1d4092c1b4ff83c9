"""Bars of head dimensions above 256, and of calls whose rows have the same bits in every batch, on an H200."""

from __future__ import annotations

from anyattn.testing.harness.case import OURS, Case
from anyattn.testing.harness.peers import PRODUCT_SIZE
from benchmarks.bars import Bar, Found, one, some, versus
from benchmarks.gpu.cases import CASES, names_of

__all__ = ["BARS", "decoding_flops"]

_FORWARD, _BACKWARD, _DECODE = (names_of(f"wide-heads{part}") for part in ("", "-backward", "-decode"))
_FEW = [name for name in _DECODE if "-h16-" in name]
_MANY = [case for case in CASES if case.name in _DECODE and case.name not in _FEW]
_SDPA, _ONE = ("sdpa", "sdpa-mask"), "anyattn-one-kv"


def decoding_flops(case: Case) -> int:
    """Operations of the matrix products of a decoding step, which ``Case.flops`` does not count."""
    shape = case.shape
    return 2 * shape.batch * shape.seqlen_k * shape.heads_q * (shape.head_dim + shape.value_dim)


def _share_of_product(case: Case) -> Bar:
    def share(found: Found) -> float:
        return decoding_flops(case) / (2 * PRODUCT_SIZE**3) * versus(found, case.name, ["matrix-product"], _ONE)

    return Bar(f"{case.name} from one cache: rate over that of a matrix product", 0.7, share)


BARS: list[Bar] = [
    *some("D 512 vs SDPA", _FORWARD, _SDPA, 3.0),
    *some("D 512 backward vs SDPA", _BACKWARD, _SDPA, 3.0),
    *(one(f"{name} vs ffpa-attn", name, ("ffpa-attn",), 1.0, 1.2) for name in (_FORWARD[0], _BACKWARD[0])),
    *some("decode of 16 wide heads, share of the copy bandwidth", _FEW, ("copy",), 0.85),
    # a copy reads and writes the keys; one cache is read once
    *some("decode of 16 wide heads from one cache, twice the share of the copy bandwidth", _FEW, ("copy",), 1.7, mine=_ONE),
    *map(_share_of_product, _MANY),
    *some("values in keys, time over that without", [*_FORWARD, *_BACKWARD, *_DECODE], (OURS,), 1.0, mine=_ONE, is_time=True),
    *(
        bar
        for part, most in (("", 1.10), ("-backward", 1.10), ("-decode", 1.25))
        for bar in some(
            f"the same bits in every batch{part.replace('-', ', ')}, time over the default's",
            *(names_of(f"every-batch{part}"), (OURS,), most), mine="anyattn-batch", is_time=True,
        )
    ),
]  # fmt: skip
