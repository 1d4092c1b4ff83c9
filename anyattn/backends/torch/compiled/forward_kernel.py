"""C++ text of the compiled forward pass: online softmax, and the threads' loop over work items.

A work item is 64 query rows of one head with all keys that they see. Threads take items from a counter, so a busy core delays one item
only, and every item is computed by one thread in a fixed order, so results do not depend on the number of threads.

``FORWARD`` begins its tiles of keys at the first key that some row of an item sees. In ``FORWARD_IN_ORDER`` they begin at multiples of
KEYS, each is visited once, and keys hidden from a row, with weight 0, change none of its bits: so these do not depend on the other rows.
"""

from __future__ import annotations

__all__ = ["FORWARD", "FORWARD_IN_ORDER"]

_BEFORE = r"""
#if VL == 8
INLINE f32 greatest(vf x) {
  x = greater(x, __builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3));
  x = greater(x, __builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5));
  return greater(x, __builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6))[0];
}
#else
INLINE f32 greatest(vf x) {
  f32 high = x[0];
  for (int l = 1; l < VL; ++l) high = x[l] > high ? x[l] : high;
  return high;
}
#endif

// the greatest of `least` and of a row's scores but NaN
INLINE f32 row_greatest(const f32 *s, i64 count, f32 least) {
  vf top = all(least), other = top;
  for (i64 x = 0; x < count; x += NR) {
    top = greater(load(s + x), top);
    other = greater(load(s + x + VL), other);
  }
  return greatest(greater(top, other));
}

// probabilities in place of base-2 scores; sum = rescale sum + their sums by lane
INLINE void exponentials(f32 *s, i64 count, f32 high, f32 *sum, f32 rescale) {
  vf total = load(sum) * rescale;
  for (i64 x = 0; x < count; x += NR) {
    const vf p0 = exp2_vector(load(s + x) - high), p1 = exp2_vector(load(s + x + VL) - high);
    store(s + x, p0);
    store(s + x + VL, p1);
    total += p0 + p1;
  }
  store(sum, total);
}

// values in place: rows of vectors that need no copy
INLINE bool has_direct_values(const Args *a) { return a->kind == 0 && a->v_d == 1 && a->dv % NR == 0; }

// the keys of one K/V head of one entry as panels, and its values as rows of padded(Dv)
static void pack(const Args *a, i64 item, f32 *keys, f32 *values) {
  const Entry *e = (const Entry *)a->entries + item / a->heads_kv;
  const i64 g = item % a->heads_kv, width = padded(a->dv);
  const i64 k_at = e->k_row * a->k_b + g * a->k_h + e->k_start * a->k_s, v_at = e->k_row * a->v_b + g * a->v_h + e->k_start * a->v_s;
  panels_of(keys, a->kind, a->k, k_at, a->k_s, a->k_d, a->d, e->keys);
  if (!has_direct_values(a)) rows_of(values, width, a->kind, a->v, v_at, a->v_s, a->v_d, a->dv, e->keys);
}

struct Packed { const f32 *keys, *values; };

static Packed shared_copy(const Args *a, i64 item) {
  const Entry *e = (const Entry *)a->entries + item / a->heads_kv;
  const i64 first = e->packed_first * a->heads_kv + item % a->heads_kv * e->packed_keys;
  return {(f32 *)a->packed_k + first * a->d, (f32 *)a->packed_v + first * padded(a->dv)};
}

// the memory of one thread; own: the pair of an entry and a K/V head that it has copied for itself, -1 without
struct Thread { f32 *scratch; i64 own; };

// The copies of a pair. The first thread that needs them makes them; another does not wait for it, which may have lost its core, but makes
// its own.
static Packed copies(const Args *a, i64 item, Thread *thread) {
  i32 *state = (i32 *)a->states + item, none = 0;
  const Packed shared = shared_copy(a, item);
  if (__atomic_load_n(state, __ATOMIC_ACQUIRE) == 2) return shared;
  if (__atomic_compare_exchange_n(state, &none, 1, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    pack(a, item, (f32 *)shared.keys, (f32 *)shared.values);
    __atomic_store_n(state, 2, __ATOMIC_RELEASE);
    return shared;
  }
  f32 *keys = thread->scratch, *values = keys + ((const Entry *)a->entries + item / a->heads_kv)->packed_keys * a->d;
  if (thread->own != item) pack(a, item, keys, values);
  thread->own = item;
  return {keys, values};
}

static void compute(Args *a, i64 item, Thread *thread) {
  const Record *record = (const Record *)a->records;
  i64 below = 0, above = a->record_count;
  while (above - below > 1) {
    const i64 middle = (below + above) / 2;
    if (record[middle].first <= item) below = middle; else above = middle;
  }
  record += below;
  const i64 parts = (record->q_hi - record->q_lo + ROWS - 1) / ROWS, heads = record->h_hi - record->h_lo;
  i64 at = item - record->first;
  const i64 q_lo = record->q_lo + at % parts * ROWS, rows = record->q_hi - q_lo < ROWS ? record->q_hi - q_lo : ROWS;
  at /= parts;
  const i64 h = record->h_lo + at % heads, b = record->b_lo + at / heads, g = h / a->ratio;
  const Entry *e = (const Entry *)a->entries + b;
  const i64 width = padded(a->dv);
  const Packed packed = copies(a, b * a->heads_kv + g, thread);
  const f32 *keys = packed.keys, *values = packed.values;
  i64 line = width;
  if (has_direct_values(a)) {
    values = (const f32 *)a->v + e->k_row * a->v_b + g * a->v_h + e->k_start * a->v_s;
    line = a->v_s;
  }
  f32 *q = thread->scratch + a->own_size, *s = q + ROOM * a->d, *o = s + ROOM * LINE, *row_max = o + ROOM * width, *sums = row_max + ROOM;
  f32 *rescale = sums + ROOM * VL, scale = (f32)*(const f64 *)&a->scale;
  if (!HAS_SCORE) scale = (f32)(*(const f64 *)&a->scale * LOG2E);
  const i64 q_at = e->q_row * a->q_b + h * a->q_h + (e->q_start + q_lo) * a->q_s;
  for (i64 r = 0; r < ROOM; ++r) {
    f32 *to = q + r / TALL * TALL * a->d + r % TALL;
    if (r < rows) row_of(s, a->kind, a->q, q_at + r * a->q_s, a->q_d, a->d);
    for (i64 x = 0; x < a->d; ++x) to[x * TALL] = r < rows ? s[x] : 0.0f;
    row_max[r] = LOWEST, rescale[r] = 1.0f;
    store(sums + r * VL, (vf){});
  }
  for (i64 x = 0; x < ROOM * width; ++x) o[x] = 0.0f;
  const Place start = {b, e->asked, h, e->q_first + q_lo, e->row_base + q_lo, e->key_base};
  const Segment *segments = (const Segment *)a->segments + record->segment;
"""

_BY_SEGMENTS = r"""
  for (i64 n = 0; n < record->segment_count;) {
    i64 last = n + 1;
    Segment one = narrowed(a, segments[n], &start, rows);
    const i64 lo = one.lo;
    i64 hi = one.hi, asked = segments[n].asked;
    for (; last < record->segment_count && lo < hi && segments[last].lo == hi; ++last) {
      one = narrowed(a, segments[last], &start, rows);
      if (one.lo != hi || one.hi <= one.lo) break;
      hi = one.hi;
      asked |= segments[last].asked;
    }
    for (i64 t = lo / NR * NR; t < hi && lo < hi; t += KEYS) {
      const i64 t_end = t + KEYS < padded(hi) ? t + KEYS : padded(hi), from = t > lo ? t : lo, to = t_end < hi ? t_end : hi;
"""

_IN_ORDER = r"""
  const i64 count = record->segment_count;
  for (i64 n = 0, t = count ? segments[0].lo / KEYS * KEYS : 0; n < count; t += KEYS) {
    while (n < count && segments[n].hi <= t) ++n;
    if (n == count) break;
    if (segments[n].lo >= t + KEYS) t = segments[n].lo / KEYS * KEYS;
    i64 last = n, from = t + KEYS, to = t, asked = 0;
    for (; last < count && segments[last].lo < t + KEYS; ++last) {
      const Segment one = narrowed(a, segments[last], &start, rows);
      asked |= one.asked;
      const i64 low = one.lo > t ? one.lo : t, high = one.hi < t + KEYS ? one.hi : t + KEYS;
      if (low >= high) continue;
      from = low < from ? low : from;
      to = high;
    }
    const i64 t_end = t + padded(to - t);
    if (from < to) {
"""

# of a row of a tile: the keys that are in no segment
_GAPS = r"""          i64 seen = t;
          for (i64 x = n; x < last; ++x) {
            hide(row - t, seen, segments[x].lo < t_end ? segments[x].lo : t_end);
            seen = segments[x].hi;
          }
"""

_TILE, _REST_OF_TILE = (
    r"""      for (i64 j = t; j < t_end; j += NR)
        for (i64 r = 0; r < rows; r += TALL) products(q + r * a->d, a->d, keys + j * a->d, s + r * LINE + j - t, scale);
      for (i64 block = 0; block < rows; block += VL) {
        const i64 end = block + VL < rows ? block + VL : rows;
        f32 high[VL];
        store(high, load(row_max + block));
        for (i64 r = block; r < end; ++r) {
          f32 *row = s + r * LINE;
          hide(row - t, t, from);
          hide(row - t, to, t_end);
""",
    r"""          if (HAS_SCORE || asked) visit_segments(a, &start, r, row - t, nullptr, from, to, segments + n, last - n);
          high[r - block] = row_greatest(row, t_end - t, row_max[r]);
        }
        store(rescale + block, exp2_vector(load(row_max + block) - load(high)));
        store(row_max + block, load(high));
        for (i64 r = block; r < end; ++r) exponentials(s + r * LINE, t_end - t, row_max[r], sums + r * VL, rescale[r]);
      }
      for (i64 x = 0; x < width; x += NR)
        for (i64 r = 0; r < rows; r += TALL)
          accumulate<TALL, LINE, 1>(s + r * LINE + from - t, to - from, values + from * line + x, o + r * width + x, width, line,
                                    rescale + r);
""",
)

_AFTER_SEGMENTS = r"""    }
    n = last;
  }
"""

_AFTER_TILES = r"""    }
  }
"""

_AFTER = r"""  const i64 out_at = e->q_row * a->out_b + h * a->out_h + (e->q_start + q_lo) * a->out_s;
  const i64 stat_at = e->q_row * a->stat_b + h * a->stat_h + e->q_start + q_lo;
  for (i64 r = 0; r < rows; ++r) {
    f32 row_sum = 0.0f;
    for (int l = 0; l < VL; ++l) row_sum += sums[r * VL + l];
    if (row_sum != row_sum && row_max[r] != INF) row_max[r] = row_sum;
    if (a->highest) ((f32 *)a->highest)[stat_at + r] = row_sum == 0.0f ? -INF : row_max[r] * LN2;
    f32 factor = 1.0f;
    if (a->sink) {
      const f32 logit = ((const f32 *)a->sink)[h] * LOG2E, high = row_max[r] >= logit ? row_max[r] : logit;
      const f32 top = row_max[r] != row_max[r] ? row_max[r] : high;
      factor = exp2_(row_max[r] - top);
      row_sum = row_sum * factor + exp2_(logit - top);
      row_max[r] = top;
    }
    if (a->lse) ((f32 *)a->lse)[stat_at + r] = row_max[r] * LN2 + __builtin_logf(row_sum);
    const f32 divisor = row_sum < __FLT_MIN__ ? __FLT_MIN__ : row_sum;
    f32 *from = o + r * width;
    for (i64 x = 0; x < a->dv; ++x) from[x] = from[x] * factor / divisor;
    put_row(a->kind, a->out, out_at + r * a->out_s, a->out_d, from, a->dv, 1.0f);
  }
}

static void pack_all(void *data) {
  Args *a = (Args *)data;
  for (i64 item; (item = __atomic_fetch_add(&a->next_pack, 1, __ATOMIC_RELAXED)) < a->pack_items;) {
    const Packed shared = shared_copy(a, item);
    pack(a, item, (f32 *)shared.keys, (f32 *)shared.values);
    ((i32 *)a->states)[item] = 2;
  }
}

// the last items come first: under a causal mask they are the longest
static void compute_all(void *data) {
  Args *a = (Args *)data;
  Thread thread = {(f32 *)a->scratch + __atomic_fetch_add(&a->next_thread, 1, __ATOMIC_RELAXED) * a->scratch_size, -1};
  for (i64 item; (item = __atomic_fetch_add(&a->next_item, 1, __ATOMIC_RELAXED)) < a->items;) compute(a, a->items - 1 - item, &thread);
}

// the result: whether a captured tensor was indexed outside of its size
extern "C" i64 anyattn_pass(Args *a) {
  const Parallel parallel = (Parallel)a->parallel;
  if (a->pack_items) parallel(pack_all, a, (u32)(a->threads < a->pack_items ? a->threads : a->pack_items), 0);
  parallel(compute_all, a, (u32)(a->threads < a->items ? a->threads : a->items), 0);
  return a->bad;
}
"""

FORWARD = _BEFORE + _BY_SEGMENTS[1:] + _TILE + _REST_OF_TILE + _AFTER_SEGMENTS + _AFTER
FORWARD_IN_ORDER = _BEFORE + _IN_ORDER[1:] + _TILE + _GAPS + _REST_OF_TILE + _AFTER_TILES + _AFTER
