"""Pointwise part of the backward pass on a transposed fragment: probabilities from the log-sum-exp, mods, masks, gradients of scores.

A thread's two rows of the fragment are keys, 8 apart; its columns are query rows.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from anyattn.arithmetic import LOG2E
from anyattn.backends.hopper.codegen.emit import emit, emit_rows, select
from anyattn.backends.hopper.codegen.mask_words import Line, alike, at_least, below, bit_of, both, holds_at
from anyattn.backends.hopper.codegen.score_analysis import NEAR_BOX, parts_of
from anyattn.backends.hopper.kernel.fragment import negative, rows_and_columns
from anyattn.backends.hopper.kernel.softmax import Softmax
from anyattn.mods.analysis.separated import separated

__all__ = ["Scores", "Seen"]

_NOTHING = -0.0  # the value of hidden pairs: it takes one select instruction, +0.0 a shift and an AND


class Scores:
    """The pointwise operations of ``HopperBackward`` on the scores of one tile."""

    config: Any
    asked: Any
    read_slots: Any

    _narrow, _see_words, _see_if_wide, _see_part = Softmax._narrow, Softmax._see_words, Softmax._see_if_wide, Softmax._see_part
    _see_each, _ask_rest = Softmax._see_each, Softmax._ask_rest

    def of_rows(self, statistic: Any, positions: Any, part: int = 0, parts: int = 1) -> Any:
        """The statistic of a thread's query rows, or of one of ``parts`` runs of them, read in pairs: a thread's columns are pairs of
        neighbours, 8 apart."""
        columns = cute.size(positions, mode=[1]) // parts
        found = cute.make_rmem_tensor(columns, Float32)
        first = positions[0, 0][1] // 2 + 2 * columns * part
        pairs = cute.logical_divide(statistic, cute.make_layout(2))
        for c in range(columns // 2):
            cute.autovec_copy(pairs[None, first + 4 * c], cute.make_tensor(found.iterator + 2 * c, cute.make_layout(2)))
        return found

    def probabilities(self, scores: Any, lse: Any, scale_log2: Any) -> None:
        """Replaces raw products by exp2(product * scale_log2 - lse), in place."""
        s = rows_and_columns(scores)
        for c in range(cute.size(s, mode=[1])):
            for r in range(cute.size(s, mode=[0])):
                s[r, c] = cute.math.exp2(cute.math.fma(s[r, c], scale_log2, -lse[c]), fastmath=True)

    def begin_dp(self, dp: Any, delta: Any) -> None:
        """Sets the accumulators of dP to -delta, to which the product then adds."""
        dp, between = rows_and_columns(dp), self.config.tiles.delta == "between"
        for c in range(cute.size(dp, mode=[1])):
            for r in range(cute.size(dp, mode=[0])):
                dp[r, c] = -delta[c] if between else negative(delta[c])

    def score_gradients(self, p: Any, dp: Any, delta: Any) -> None:
        """Replaces dP by the scores' gradients, P * (dP - delta), in place. delta: None if it is subtracted already."""
        p, dp = rows_and_columns(p), rows_and_columns(dp)
        for c in range(cute.size(p, mode=[1])):
            for r in range(cute.size(p, mode=[0])):
                dp[r, c] = p[r, c] * (dp[r, c] if delta is None else dp[r, c] - delta[c])

    def modified(
        self,
        scores: Any,
        dp: Any,
        lse: Any,
        delta: Any,
        positions: Any,
        slots: Any,
        scale: Any,
        captured: Any,
        late: tuple = (),
        seen: Any = None,
    ) -> None:
        """``probabilities`` and ``score_gradients`` with a score mod: its value gives the probability, and its derivative is a factor of
        the gradient. delta: see ``score_gradients``. late: for each further output of the mod, a fragment for P * (dP - delta) times this
        output, by key and query row. seen: None, or the visible pairs (``Seen``)."""
        s, grad = rows_and_columns(scores), rows_and_columns(dp)
        visit, facts = self.read_slots(slots)

        def read(r: int, c: int) -> Any:  # the emitter's rows are query rows, and its columns are keys
            return s[c, r] * scale

        def store(r: int, c: int, value: Any, derivative: Any, *factors: Any) -> None:
            p = cute.math.exp2(cute.math.fma(Float32(value), Float32(LOG2E), -lse[r]), fastmath=True)
            ds = p * (grad[c, r] if delta is None else grad[c, r] - delta[r])
            if seen is not None:
                p, ds = (select(seen.holds(c, r), x, Float32(0.0), "float") for x in (p, ds))
            for f, factor in zip(late, factors, strict=True):
                f[c, r] = select(p == 0.0, Float32(0.0), ds * Float32(factor), "float")
            if not (isinstance(derivative, (int, float)) and derivative == 1.0):
                # if the probability is 0, the derivative may be inf or NaN
                ds = select(p == 0.0, Float32(0.0), ds * Float32(derivative), "float")
            s[c, r], grad[c, r] = p, ds

        places = self._places(positions, visit, facts)
        emit(self.config.score, *self.captured(captured, 0), places, read, store)

    def _places(self, positions: Any, visit: Any, facts: Any) -> dict[str, Any]:
        """The positions of a thread's scores, as mods see them: rows and keys past the last are clamped, and their scores are not used."""
        apart, steps = self._offsets(positions)
        row, key = self._first(positions, visit, facts)
        q_idx = [cutlass.min(row + a, facts.seqlen_q - 1) for a in apart]
        kv_idx = [cutlass.min(key + s, facts.seqlen_k - 1) for s in steps]
        return {"b": facts.entry, "h": visit.head, "q_idx": q_idx, "kv_idx": kv_idx, "apart": apart, "steps": steps}

    def _offsets(self, positions: Any) -> tuple[list[int], list[int]]:
        """The distances of a thread's query rows from its first row, and of its keys from its first key."""
        columns, keys = cute.size(positions, mode=[1]), cute.size(positions, mode=[0])
        return [c // 2 * 8 + c % 2 for c in range(columns)], [8 * r for r in range(keys)]

    def _first(self, positions: Any, visit: Any, facts: Any) -> tuple[Any, Any]:
        """A thread's first query row and first key, as positions in their sequences."""
        tiles = self.config.tiles
        return positions[0, 0][1] + visit.m_block * tiles.tile_m, positions[0, 0][0] + facts.n_block * tiles.tile_n

    @cute.jit
    def hidden(self, fragments, positions, slots, captured):
        """Zeroes ``fragments`` at hidden pairs; in words (``Seen``), clears their bits. slots: see ``MultipliesBack.read_slots``."""
        visit, _ = self.read_slots(slots)
        if const_expr(self.config.always):
            self._hide(fragments, positions, slots, captured)
        elif const_expr(self.config.partial is not None):
            if (visit.is_masked | visit.asks) != 0:
                self._hide(fragments, positions, slots, captured)
        else:
            if visit.is_masked != 0:
                self._hide(fragments, positions, slots, captured)

    @cute.jit
    def _hide(self, fragments, positions, slots, captured):
        """Hides pairs by the sequences' ends and the bands, by the predicates of ``always``, and in a partial tile by ``partial``."""
        visit, facts = self.read_slots(slots)
        fragments = tuple(Seen(f) if f.element_type is Int32 else rows_and_columns(f) for f in fragments)
        line, places = self._line(positions, visit), self._places(positions, visit, facts)
        seen = cute.make_rmem_tensor(cute.size(positions, mode=[0]) * line.words, Int32)
        self._edges(seen, line, positions, visit, facts)
        self._see(seen, False, line, places, captured)
        if const_expr(self.config.partial is not None):
            if visit.asks != 0:
                self._see(seen, True, line, places, captured)
        self._keep(fragments, seen, line)
        self._ask(fragments, False, line, places, captured)
        if const_expr(self.config.partial is not None):
            if visit.asks != 0:
                self._ask(fragments, True, line, places, captured)

    def _keep(self, fragments: tuple, seen: Any, line: Line) -> None:
        for r in range(cute.size(seen) // line.words):
            words = tuple(seen[r * line.words + i] for i in range(line.words))
            for c in range(line.positions):
                for f in fragments:
                    f[r, c] = select(holds_at(words, c), f[r, c], Float32(_NOTHING), "float")

    def _line(self, positions: Any, visit: Any) -> Line:
        """The query rows of a tile as a ``Line``: a thread has many of them for each key."""
        tile_m = self.config.tiles.tile_m
        return Line("q_idx", visit.m_block * tile_m, positions[0, 0][1], cute.size(positions, mode=[1]), tile_m)

    def _edges(self, seen: Any, line: Line, positions: Any, visit: Any, facts: Any) -> None:
        """Overwrites ``seen`` with the pairs whose row and key exist and whose key is in the row's band."""
        ends = alike(True, line)
        if self.config.score is not None or self.config.has_entries:  # else rows past the last are zeros with an infinite log-sum-exp
            ends = below(facts.seqlen_q - line.origin, line)
        _, key = self._first(positions, visit, facts)
        for r, step in enumerate(self._offsets(positions)[1]):
            words, apart = alike(key + step < facts.seqlen_k, line), key + step - line.origin
            words = both(words, ends)
            if self.config.has_right:  # key < row + right
                words = both(words, at_least(apart - visit.right + 1, line))
            if self.config.has_left:
                words = both(words, below(apart - visit.left + 1, line))
            for i, word in enumerate(words):
                seen[r * line.words + i] = word

    def _parts(self, is_partial: bool, line: Line) -> list[tuple[int, Any, tuple, Any]]:
        """(place, ask, its part as words of bits, its per-pair part) of the partial predicate, or of the predicates of ``always``."""
        chosen = [(at, ask) for at, ask in self.asked if (ask is self.config.partial) is is_partial]
        return [(at, ask, *parts_of(ask.expr, ask.by_row, line.along, line.extent)) for at, ask in chosen]

    def _see(self, seen: Any, is_partial: bool, line: Line, places: dict[str, Any], captured: Any) -> None:
        """Clears the pairs in ``seen`` that the predicates' words of bits hide."""
        for at, ask, known, rest in self._parts(is_partial, line):
            self._see_words(seen, known, at, line, places, captured)
            if rest is not None and not ask.by_row:
                self._see_if_wide(seen, rest, at, line, places, captured)

    def _ask(self, fragments: tuple, is_partial: bool, line: Line, places: dict[str, Any], captured: Any) -> None:
        """Hides the pairs that the per-pair parts of predicates hide."""
        for at, ask, _, rest in self._parts(is_partial, line):
            if rest is not None and ask.by_row:
                self._hide_by_row(fragments, at, ask, places, captured)
            elif rest is not None:
                self._ask_rest(fragments, rest, at, line, places, captured)

    def _hide_by_row(self, fragments: tuple, at: int, ask: Any, places: dict[str, Any], captured: Any) -> None:
        """Hides pairs by a predicate with row ranges: lo, hi, lo, hi, ... of the keys that each row sees."""
        numbers, tensors = self.captured(captured, at)
        for c, q in enumerate(places["q_idx"]):
            limits = emit_rows(ask.expr, numbers, tensors, places["b"], places["h"], [q])[0]
            for r, key in enumerate(places["kv_idx"]):
                seen: Any = None
                for low, high in zip(limits[::2], limits[1::2], strict=True):
                    inside = (key >= low) & (key < high)
                    seen = inside if seen is None else seen | inside
                for f in fragments:
                    f[r, c] = select(seen, f[r, c], Float32(_NOTHING), "float")

    def _ask_each(self, fragments: tuple, at: int, expr: Any, places: dict[str, Any], captured: Any) -> None:
        def store(r: int, c: int, seen: Any) -> None:
            seen = Boolean(seen) if not isinstance(seen, bool) else seen
            for f in fragments:
                f[c, r] = select(seen, f[c, r], Float32(_NOTHING), "float")

        emit(separated(expr, NEAR_BOX, "kv_idx"), *self.captured(captured, at), places, None, store)


class Seen:
    """A thread's visible pairs, one bit each in words; used like a fragment of ones and zeros."""

    def __init__(self, words: Any):
        self.words = words

    def __getitem__(self, place: tuple[int, int]) -> Any:
        return Float32(1.0)

    def __setitem__(self, place: tuple[int, int], value: Any) -> None:
        word, bit = self._bit(*place)
        self.words[word] = select(value == 0.0, self.words[word] & ~bit, self.words[word], "int")

    def holds(self, key: int, row: int) -> Any:
        word, bit = self._bit(key, row)
        return (self.words[word] & bit) != 0

    def _bit(self, key: int, row: int) -> tuple[int, Any]:
        at = 2 * row + key  # a thread has two keys
        return at // 32, Int32(bit_of(at))
