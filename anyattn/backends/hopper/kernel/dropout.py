"""Dropout on a fragment of probabilities in 16 bits, by masks of pairs: the hash of ``mods.dropout``, whose words decide two keys each."""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from anyattn.backends.hopper.codegen.device_math import select
from anyattn.backends.hopper.kernel.fragment import rows_and_columns
from anyattn.mods.dropout import BITS, COLUMN, FIRST, SPREAD, STATE

__all__ = ["Drops", "fold"]

_BOTH = 1 << 16 | 1  # copies a number below 2^16 to both halves of a word
_FIELDS = (2**BITS - 1) * _BOTH
# PRMT selectors with the sign bit of a byte in place of the byte: of two words, the lower or the upper half of each, as 16 ones or zeros
_LOWER, _UPPER = "0xDD99", "0xFFBB"


@dsl_user_op
def fold(a: Any, b: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """The halves of the 64-bit product of two words without sign, combined by xor."""
    text = "{ .reg .b64 w; .reg .b32 l, h; mul.wide.u32 w, $1, $2; mov.b64 {l, h}, w; xor.b32 $0, l, h; }"
    operands, dialect = [Int32(x).ir_value(loc=loc, ip=ip) for x in (a, b)], llvm.AsmDialect.AD_ATT
    found = llvm.inline_asm(T.i32(), operands, text, "=r,r,r", has_side_effects=False, is_align_stack=False, asm_dialect=dialect)
    return Int32(found)


@dsl_user_op
def _signs(a: Any, b: Any, selector: Any, *, loc: Any = None, ip: Any = None) -> Any:
    text = f"prmt.b32 $0, $1, $2, {selector};"
    operands, dialect = [Int32(x).ir_value(loc=loc, ip=ip) for x in (a, b)], llvm.AsmDialect.AD_ATT
    found = llvm.inline_asm(T.i32(), operands, text, "=r,r,r", has_side_effects=False, is_align_stack=False, asm_dialect=dialect)
    return Int32(found)


def _spread(counter: Any) -> Any:
    return fold(Int32(counter) * Int32(SPREAD), COLUMN)


def _mixed(state: Any, counter: Any) -> Any:
    return fold(_spread(counter) ^ state, state * Int32(STATE) + 1)


class Drops:
    """The dropout of ``HopperForward`` and ``HopperBackward``. The last captured numbers are the least field that is kept and the factor of
    the kept weights; the last captured tensor is the seed. They are followed, in the role that multiplies, by the words of its rows."""

    config: Any

    def factor(self, captured: Any) -> Any:
        """The factor of the weights that are kept."""
        return Float32(captured[0][-1])

    def of_head(self, b: Any, h: Any, captured: Any) -> tuple[Any, Any]:
        """The two words of a batch entry and query head."""
        seed = captured[1][-1]
        first, second = (_mixed(_mixed(Int32(seed[i]) ^ FIRST[i], b), h) for i in range(2))
        return first, second | 1

    def of_row(self, head: tuple[Any, Any], q_idx: Any) -> Any:
        """The word of a query row."""
        return fold(_spread(q_idx) ^ head[0], head[1])

    def least(self, captured: Any) -> Any:
        """The number that, added to two fields of a word, sets the highest bit of each half whose key is kept."""
        return Int32((Int32(1 << BITS) - Int32(captured[0][-2])) * Int32(_BOTH))

    def fields(self, row: Any, spread: Any, least: Any) -> Any:
        """A word whose bits 15 and 31 say whether a row keeps a key and the key 8 after it. row: the row's word and the odd number made of
        it. spread: of the first key."""
        return (fold(spread ^ row[0], row[1]) & Int32(_FIELDS)) + least

    def drop_gradients(self, p: Any, dp: Any, delta: Any, positions: Any, said: Any, captured: Any) -> None:
        """Replaces dP by the scores' gradients divided by the factor, and P by the weights that are kept, without the factor, in place. The
        fragments are those of ``Scores``, whose two rows are keys 8 apart. said: see ``MultipliesBack.said_of``."""
        p, dp = rows_and_columns(p), rows_and_columns(dp)
        (visit, facts), least = self.said_of(said), self.least(captured)  # type: ignore[attr-defined]
        row, key = self._first(positions, visit, facts)  # type: ignore[attr-defined]
        head, spread = self.of_head(facts.entry, visit.head, captured), _spread(key)
        divided = cute.arch.rcp_approx(self.factor(captured))
        for c, apart in enumerate(self._offsets(positions)[0]):  # type: ignore[attr-defined]
            word = self.of_row(head, row + apart)
            bits, below = self.fields((word, word * Int32(STATE) + 1), spread, least), delta[c] * divided
            for r, is_kept in enumerate(((bits & Int32(1 << BITS)) != 0, bits < 0)):
                kept = select(is_kept, p[r, c], Float32(0.0), "float")
                dp[r, c] = kept * dp[r, c] - p[r, c] * below
                p[r, c] = kept

    def words_of_rows(self, positions: Any, facts: Any, captured: Any) -> list[tuple[Any, Any]]:
        """Per row of a thread in the forward pass: (hash word of the row, odd multiplier derived from that word)."""
        places = self._places(positions, Int32(0), facts, False)  # type: ignore[attr-defined]
        head = self.of_head(places["b"], places["h"], captured)
        words = [self.of_row(head, q) for q in places["q_idx"]]
        return [(word, word * Int32(STATE) + 1) for word in words]

    def drop(self, p: Any, positions: Any, n: Any, captured: Any) -> None:
        """Clears the dropped pairs of probabilities ``p`` of key tile ``n``, in ``fragment.narrowed``'s order: four neighbouring pairs are
        two rows at two neighbouring keys, then at the keys 8 after them."""
        pairs, least, rows = cute.recast_tensor(p, Int32), self.least(captured), captured[2]
        first = positions[0, 0][1] + n * self.config.tiles.tile_n
        count = len(rows)
        for sixteen in range(cute.size(pairs) // (2 * count)):
            spread = [_spread(first + (16 * sixteen + i)) for i in range(2)]
            for r, row in enumerate(rows):
                words = [self.fields(row, s, least) for s in spread]
                for i, half in enumerate((_LOWER, _UPPER)):
                    at = (2 * sixteen + i) * count + r
                    pairs[at] = pairs[at] & _signs(*words, half)
