"""Dropout on a fragment of probabilities in 16 bits, by masks of pairs: the hash of ``mods.dropout``, whose words decide two keys each."""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from anyattn.backends.hopper.codegen.device_math import select
from anyattn.backends.hopper.kernel.fragment import narrowed, rows_and_columns
from anyattn.mods.dropout import BITS, COLUMN, FINE, FIRST, KEY_GROUPS, KEY_PLACES, KEY_STEP, ROW_PLACES, ROW_STEP, SPREAD, STATE

__all__ = ["Drops", "fold"]

_EACH = 0x01010101  # copies a number below 2^8 to the four bytes of a word
_FIELDS = (2**BITS - 1) * _EACH
_SIGN = (1 << 7, 1 << 15, 1 << 23, -(1 << 31))  # of each byte
# PRMT selectors with the sign bit of a byte in place of the byte: byte 0, 1, 2, 3 of each of two words, as 16 ones or zeros
_OF_BYTE = ("0xCC88", "0xDD99", "0xEEAA", "0xFFBB")
# the steps of the lattice to a word's four pairs: byte 1 is the key 8 on, byte 2 the row 8 on
_STEPS = sum((8 * (byte % 2 * KEY_STEP + byte // 2 * ROW_STEP) & 2**FINE - 1) << 8 * byte for byte in range(4))


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


@dsl_user_op
def _both(a: Any, b: Any, *, loc: Any = None, ip: Any = None) -> Any:
    """a & b, computed at this point of the code: before it, a product in flight may read the registers that the result takes."""
    operands, dialect = [Int32(x).ir_value(loc=loc, ip=ip) for x in (a, b)], llvm.AsmDialect.AD_ATT
    text = "and.b32 $0, $1, $2;"
    found = llvm.inline_asm(T.i32(), operands, text, "=r,r,r", has_side_effects=True, is_align_stack=False, asm_dialect=dialect)
    return Int32(found)


def _spread(counter: Any) -> Any:
    return fold(Int32(counter) * Int32(SPREAD), COLUMN)


def _odd(word: Any) -> Any:
    return word * Int32(STATE) + 1


def _mixed(state: Any, counter: Any) -> Any:
    return fold(_spread(counter) ^ state, _odd(state))


class Drops:
    """The dropout of ``HopperForward`` and ``HopperBackward``. The last captured numbers are p in units of 2^-14 and the factor of the kept
    weights; the last captured tensor is the seed. A word decides the pairs of rows r, r + 8 and keys k, k + 8 (``mods.dropout``)."""

    config: Any

    def factor(self, captured: Any) -> Any:
        """The factor of the weights that are kept."""
        return Float32(captured[0][-1])

    def of_head(self, b: Any, h: Any, captured: Any) -> tuple[Any, Any]:
        """The two words of a batch entry and query head."""
        seed = captured[1][-1]
        first, second = (_mixed(_mixed(Int32(seed[i]) ^ FIRST[i], b), h) for i in range(2))
        return first, second | 1

    def word_of_rows(self, head: tuple[Any, Any], sixteen: Any) -> Any:
        """The word of the 16 query rows from row 16 * ``sixteen`` on."""
        return fold(_spread(sixteen) ^ head[0], head[1])

    def words_of_visit(self, visit: Any, entry: Any, captured: Any) -> tuple[Any, ...]:
        """What the multiplying threads need of a visit: the first word of its head, and the word of every 16 rows of its row tile."""
        head, count = self.of_head(entry, visit.head, captured), self.config.tiles.tile_m // 16
        return (head[0], *(self.word_of_rows(head, visit.m_block * count + i) for i in range(count)))

    def least(self, of_head: Any, q_idx: Any, kv_idx: Any, captured: Any) -> Any:
        """The number that, added to the four fields of a word, sets the highest bit of each byte whose pair is kept. of_head: the head's
        first word. q_idx, kv_idx: the word's first row and key."""
        dropped = Int32(captured[0][-2])
        phase = (Int32(q_idx) * ROW_STEP + (Int32(kv_idx) & 15) * KEY_STEP + of_head) & Int32(2**FINE - 1)
        phases = phase * Int32(_EACH) + Int32(_STEPS)  # no byte reaches 256
        less = ((Int32(_FIELDS) & ~phases) + (dropped & Int32(2**FINE - 1)) * Int32(_EACH)) >> FINE & Int32(_EACH)
        return (Int32(2**BITS) - (dropped >> FINE)) * Int32(_EACH) - less

    def fields(self, x: Any, odd: Any, least: Any) -> Any:
        """A word in which the sign of each byte says whether its pair is kept. x: the words of rows and keys, combined by xor."""
        return (fold(x, odd) & Int32(_FIELDS)) + least

    def drop_gradients(self, p: Any, dp: Any, delta: Any, positions: Any, slots: Any, captured: Any) -> None:
        """Replaces dP by the scores' gradients divided by the factor, and P by the weights that are kept, without the factor, in place. The
        fragments are those of ``Scores``, whose two rows are keys 8 apart. slots: see ``MultipliesBack.read_slots``."""
        p, dp = rows_and_columns(p), rows_and_columns(dp)
        (visit, facts), (board, q_state, _) = self.read_slots(slots), slots  # type: ignore[attr-defined]
        row, key = (Int32(x) for x in self._first(positions, visit, facts))  # type: ignore[attr-defined]
        at_words: int = self.place_of_words  # type: ignore[attr-defined]
        of_head = board[1][at_words, q_state.index]
        of_keys = _spread((key >> 4) + KEY_GROUPS) ^ _spread((key & 7) + KEY_PLACES)
        of_pairs = [of_keys ^ _spread((row + i & 7) + ROW_PLACES) for i in range(2)]
        least = [self.least(of_head, row + i, key, captured) for i in range(2)]
        divided = cute.arch.rcp_approx(self.factor(captured))
        for sixteen in range(cute.size(p, mode=[1]) // 4):
            of_rows = board[1][at_words + 1 + sixteen, q_state.index]
            words = [self.fields(of_pairs[i] ^ of_rows, _odd(of_rows), least[i]) for i in range(2)]
            for at in range(4):  # two neighbouring rows, then the rows 8 on
                c = 4 * sixteen + at
                below = delta[c] * divided
                for r in range(2):
                    is_kept = (words[at % 2] & Int32(_SIGN[at // 2 * 2 + r])) != 0
                    weight = select(is_kept, p[r, c], Float32(0.0), "float")
                    dp[r, c] = weight * dp[r, c] - p[r, c] * below
                    p[r, c] = weight

    def words_of_rows(self, positions: Any, facts: Any, captured: Any) -> tuple[Any, ...]:
        """What a thread's rows hold in the forward pass: the words of its rows and of its two neighbouring keys among 8, combined by xor,
        the odd number of its rows and ``least`` of both keys."""
        key, q_idx = Int32(positions[0, 0][1]), Int32(self.first_row(positions, facts))  # type: ignore[attr-defined]
        head = self.of_head(facts.entry, self.head(positions, facts), captured)  # type: ignore[attr-defined]
        word = self.word_of_rows(head, q_idx >> 4)
        of_keys = [word ^ _spread((q_idx & 7) + ROW_PLACES) ^ _spread(key + i + KEY_PLACES) for i in range(2)]
        return (*of_keys, _odd(word), *(self.least(head[0], q_idx, key + i, captured) for i in range(2)))

    def words_of_keys(self, rows: tuple[Any, ...], n: Any, sixteen: int) -> list[Any]:
        """``fields`` of a thread's pairs in the forward pass: two neighbouring keys, among 16 keys of key tile ``n``."""
        of_group = _spread(n * (self.config.tiles.tile_n // 16) + (sixteen + KEY_GROUPS))
        return [self.fields(rows[i] ^ of_group, rows[2], rows[3 + i]) for i in range(2)]

    def words_ahead(self, rows: tuple[Any, ...], n: Any) -> Any:
        """All ``words_of_keys`` of key tile ``n``, computed while products are in flight and held until they are used; None with three warp
        groups, which lack the registers. One H100, relative to no dropout: 1.27 instead of 1.32 at head dimension 128 under a causal mask,
        but 1.42 instead of 1.33 with three warp groups at 64."""
        if self.config.tiles.warp_groups == 3:
            return None
        count = self.config.tiles.tile_n // 16
        words = cute.make_rmem_tensor(2 * count, Int32)
        for sixteen in range(count):
            words[2 * sixteen], words[2 * sixteen + 1] = self.words_of_keys(rows, n, sixteen)
        return words

    def narrowed_apart(self, powers: Any, dropping: tuple[Any, ...]) -> tuple[Any, Any]:
        """(probabilities in 16 bits, the pairs that are kept as ones), in ``fragment.narrowed``'s order and in registers of their own: a
        product in flight may still read the probabilities of the tile before. dropping: of ``words_of_rows``, the key tile and its
        ``words_ahead``."""
        rows, n, ahead = dropping
        pairs = cute.recast_tensor(narrowed(powers, self.dtype), Int32)  # type: ignore[attr-defined]
        masks = cute.make_rmem_tensor(cute.size(pairs), Int32)
        for sixteen in range(cute.size(pairs) // 4):
            words = self.words_of_keys(rows, n, sixteen) if ahead is None else [ahead[2 * sixteen + i] for i in range(2)]
            for at in range(4):  # both rows at two neighbouring keys, then at the keys 8 on
                masks[4 * sixteen + at] = _signs(*words, _OF_BYTE[at % 2 * 2 + at // 2])
        return pairs, masks

    def keep(self, p: Any, apart: tuple[Any, Any]) -> None:
        """Writes the probabilities that are kept, and zeros for the others, to ``p``. apart: of ``narrowed_apart``."""
        to = cute.recast_tensor(p, Int32)
        for at in range(cute.size(to)):
            to[at] = _both(apart[0][at], apart[1][at])
