"""C++ text of the compiled backward pass: probabilities from the log-sum-exp, five products to a tile, sums by key and by row.

A work item is a range of keys of one K/V head of one batch entry, with all query rows that see them: the sums for its keys are its own. A
call with few heads divides their keys among several items, by its sizes alone; their parts of dQ are added afterwards. ``captured`` is
generated (``emit.py``): it adds to the gradients of captured tensors.
"""

from __future__ import annotations

__all__ = ["BACKWARD"]

BACKWARD = r"""
struct Item {
  i64 number, b, g, split, k_lo, k_hi, wide, wide_v, line, line_k, line_v;  // lines: floats from row to row of the three below
  const Entry *e;
  f32 *keys, *values;
  const f32 *key_rows;
  f32 *total_k, *total_v;
};
struct Rows { f32 *q, *q_rows, *dout, *dout_rows, *s, *e, *by, *dq, *lse, *net; };

static Rows rows_in(const Args *a, f32 *at) {
  const i64 wide = padded(a->d), wide_v = padded(a->dv);
  Rows r;
  r.q = at, at += ROOM * a->d;
  r.q_rows = at, at += ROOM * wide;
  r.dout = at, at += ROOM * a->dv;
  r.dout_rows = at, at += ROOM * wide_v;
  r.s = at, at += ROOM * LINE;
  r.e = at, at += ROOM * LINE;
  r.by = at, at += ROOM * LINE;
  r.dq = at, at += ROOM * wide;
  r.lse = at, at += ROOM;
  r.net = at;
  return r;
}

static void load_rows(const Args *a, const Item *item, const Rows *to, i64 h, i64 q_lo, i64 rows) {
  const Entry *e = item->e;
  const i64 q_at = e->q_row * a->q_b + h * a->q_h + (e->q_start + q_lo) * a->q_s;
  const i64 dout_at = e->q_row * a->dout_b + h * a->dout_h + (e->q_start + q_lo) * a->dout_s;
  const i64 stat_at = e->q_row * a->stat_b + h * a->stat_h + e->q_start + q_lo;
  rows_of(to->q_rows, item->wide, a->kind, a->q, q_at, a->q_s, a->q_d, a->d, rows);
  rows_of(to->dout_rows, item->wide_v, a->kind, a->dout, dout_at, a->dout_s, a->dout_d, a->dv, rows);
  for (i64 x = rows * item->wide; x < ROOM * item->wide; ++x) to->q_rows[x] = 0.0f;
  for (i64 x = rows * item->wide_v; x < ROOM * item->wide_v; ++x) to->dout_rows[x] = 0.0f;
  interleave(to->q, to->q_rows, item->wide, a->d, (rows + TALL - 1) / TALL * TALL);
  interleave(to->dout, to->dout_rows, item->wide_v, a->dv, (rows + TALL - 1) / TALL * TALL);
  for (i64 r = 0; r < rows; ++r) {
    to->lse[r] = ((const f32 *)a->row_lse)[stat_at + r];
    to->net[r] = ((const f32 *)a->net)[stat_at + r];
  }
  for (i64 x = 0; x < ROOM * item->wide; ++x) to->dq[x] = 0.0f;
}

// probabilities in place of base-2 scores s, and P (dP + net) in place of dP; 0 where P is 0, whatever the value at a hidden key is
INLINE void differentiate(f32 *s, f32 *e, i64 count, f32 lse, f32 net) {
  for (i64 x = 0; x < count; x += VL) {
    const vf p = exp2_vector(load(s + x) - lse);
    store(s + x, p);
    store(e + x, (vf)((vi)(p * (load(e + x) + net)) & (p != 0.0f)));
  }
}

// P^T dO and dS^T Q of T keys from j on, for scores that begin at key t
template <int T> INLINE void add_to_keys(const Item *item, const Rows *x, i64 rows, i64 t, i64 j) {
  const i64 wide = item->wide, wide_v = item->wide_v;
  for (i64 c = 0; c < wide_v; c += NR)
    accumulate<T, 1, LINE>(x->s + j - t, rows, x->dout_rows + c, item->total_v + j * item->line_v + c, item->line_v, wide_v, nullptr);
  for (i64 c = 0; c < wide; c += NR)
    accumulate<T, 1, LINE>(x->e + j - t, rows, x->q_rows + c, item->total_k + j * item->line_k + c, item->line_k, wide, nullptr);
}

// one tile: the rows of an item's row tile and the keys from `from` to before `to`, computed from t to before t_end
static void tile(Args *a, const Item *item, const Rows *x, const Place *start, i64 rows, i64 t, i64 t_end, i64 from, i64 to,
                 const Segment *segments, i64 count, f32 scale) {
  const i64 n = t_end - t;
  for (i64 j = t; j < t_end; j += NR)
    for (i64 r = 0; r < rows; r += TALL) {
      products(x->q + r * a->d, a->d, item->keys + j * a->d, x->s + r * LINE + j - t, scale);
      products(x->dout + r * a->dv, a->dv, item->values + j * a->dv, x->e + r * LINE + j - t, 1.0f);
    }
  for (i64 r = 0; r < rows; ++r) {
    f32 *s = x->s + r * LINE - t, *e = x->e + r * LINE - t, *by = x->by + r * LINE - t;
    hide(s, t, from);
    hide(s, to, t_end);
    visit_segments(a, start, r, s, by, from, to, segments, count);
    differentiate(s + t, e + t, n, x->lse[r], x->net[r]);
    if (HAS_CAPTURED) {
      Place place = *start;
      place.q_idx += r;
      place.row += r;
      captured(a, &place, e, from, to, item->number);
    }
    if (HAS_DERIVATIVE) for (i64 j = from; j < to; ++j) e[j] = e[j] == 0.0f ? 0.0f : e[j] * by[j];
  }
  const i64 fours = from + (to - from) / 4 * 4;
  for (i64 j = from; j < fours; j += 4) add_to_keys<4>(item, x, rows, t, j);
  for (i64 j = fours; j < to; ++j) add_to_keys<1>(item, x, rows, t, j);
  for (i64 c = 0; c < item->wide; c += NR)
    for (i64 r = 0; r < rows; r += TALL)
      accumulate<TALL, LINE, 1>(x->e + r * LINE + from - t, to - from, item->key_rows + from * item->line + c, x->dq + r * item->wide + c,
                                item->wide, item->line, nullptr);
}

static void row_tile(Args *a, const Item *item, const Rows *x, i64 h, const Record *record, i64 q_lo) {
  const i64 rows = record->q_hi - q_lo < ROWS ? record->q_hi - q_lo : ROWS;
  const Entry *e = item->e;
  const f64 factor = *(const f64 *)&a->scale;
  const f32 scale = (f32)(HAS_SCORE ? factor : factor * LOG2E);
  load_rows(a, item, x, h, q_lo, rows);
  const Place start = {item->b, e->asked, h, e->q_first + q_lo, e->row_base + q_lo, e->key_base};
  const Segment *segments = (const Segment *)a->segments + record->segment;
  for (i64 n = 0; n < record->segment_count; ++n) {
    Segment one = narrowed(a, segments[n], &start, rows);
    const i64 lo = one.lo > item->k_lo ? one.lo : item->k_lo, hi = one.hi < item->k_hi ? one.hi : item->k_hi;
    for (i64 t = lo / NR * NR; t < hi && lo < hi; t += KEYS) {
      const i64 t_end = t + KEYS < padded(hi) ? t + KEYS : padded(hi), from = t > lo ? t : lo, to = t_end < hi ? t_end : hi;
      tile(a, item, x, &start, rows, t, t_end, from, to, segments + n, 1, scale);
    }
  }
  const i64 at = item->split * a->grad_q_split + e->q_row * a->grad_q_b + h * a->grad_q_h + (e->q_start + q_lo) * a->grad_q_s;
  const i64 kind = a->splits > 1 ? 0 : a->kind;
  for (i64 r = 0; r < rows; ++r) put_row(kind, a->grad_q, at + r * a->grad_q_s, a->grad_q_d, x->dq + r * item->wide, a->d, (f32)factor);
}

static void compute(Args *a, i64 number, f32 *scratch) {
  Item item;
  item.number = number, item.split = number % a->splits, number /= a->splits;
  item.g = number % a->heads_kv, item.b = number / a->heads_kv, item.wide = padded(a->d), item.wide_v = padded(a->dv);
  const Entry *e = item.e = (const Entry *)a->entries + item.b;
  item.k_lo = item.split * a->split_keys < e->keys ? item.split * a->split_keys : e->keys;
  item.k_hi = item.k_lo + a->split_keys < e->keys ? item.k_lo + a->split_keys : e->keys;
  const i64 first = e->packed_first * a->heads_kv + item.g * e->packed_keys, count = item.k_hi - item.k_lo;
  const i64 k_at = e->k_row * a->k_b + item.g * a->k_h + e->k_start * a->k_s;
  const i64 v_at = e->k_row * a->v_b + item.g * a->v_h + e->k_start * a->v_s;
  const i64 grad_k_at = e->k_row * a->grad_k_b + item.g * a->grad_k_h + e->k_start * a->grad_k_s;
  const i64 grad_v_at = e->k_row * a->grad_v_b + item.g * a->grad_v_h + e->k_start * a->grad_v_s;
  item.keys = (f32 *)a->packed_k + first * a->d, item.values = (f32 *)a->packed_v + first * a->dv;
  // without memory for copies the rows themselves are read, and the gradients' rows take the sums
  item.key_rows = a->key_rows ? (const f32 *)a->key_rows + first * item.wide : (const f32 *)a->k + k_at;
  item.total_k = a->total_k ? (f32 *)a->total_k + first * item.wide : (f32 *)a->grad_k + grad_k_at;
  item.total_v = a->total_v ? (f32 *)a->total_v + first * item.wide_v : (f32 *)a->grad_v + grad_v_at;
  item.line = a->key_rows ? item.wide : a->k_s;
  item.line_k = a->total_k ? item.wide : a->grad_k_s, item.line_v = a->total_v ? item.wide_v : a->grad_v_s;
  if (count > 0) {
    const i64 k_from = k_at + item.k_lo * a->k_s, v_from = v_at + item.k_lo * a->v_s;
    panels_of(item.keys + item.k_lo * a->d, a->kind, a->k, k_from, a->k_s, a->k_d, a->d, count);
    panels_of(item.values + item.k_lo * a->dv, a->kind, a->v, v_from, a->v_s, a->v_d, a->dv, count);
    if (a->key_rows) rows_of((f32 *)item.key_rows + item.k_lo * item.wide, item.wide, a->kind, a->k, k_from, a->k_s, a->k_d, a->d, count);
  }
  for (i64 j = item.k_lo; j < item.k_hi; ++j) {
    for (i64 x = 0; x < item.wide; ++x) item.total_k[j * item.line_k + x] = 0.0f;
    for (i64 x = 0; x < item.wide_v; ++x) item.total_v[j * item.line_v + x] = 0.0f;
  }
  const Rows rows = rows_in(a, scratch);
  for (i64 n = 0; n < a->group_count; ++n) {
    const Group *group = (const Group *)a->groups + n;
    if (item.b < group->b_lo || item.b >= group->b_hi) continue;
    for (i64 h = item.g * a->ratio; h < (item.g + 1) * a->ratio; ++h) {
      if (h < group->h_lo || h >= group->h_hi) continue;
      for (i64 m = 0; m < group->record_count; ++m) {
        const Record *record = (const Record *)a->records + group->record + m;
        for (i64 q_lo = record->q_lo; q_lo < record->q_hi; q_lo += ROWS) row_tile(a, &item, &rows, h, record, q_lo);
      }
    }
  }
  const f32 scale = (f32)*(const f64 *)&a->scale;
  for (i64 j = item.k_lo; j < item.k_hi; ++j) {
    put_row(a->grad_kind, a->grad_k, grad_k_at + j * a->grad_k_s, a->grad_k_d, item.total_k + j * item.line_k, a->d, scale);
    if (a->total_v) put_row(a->grad_kind, a->grad_v, grad_v_at + j * a->grad_v_s, a->grad_v_d, item.total_v + j * item.line_v, a->dv, 1.0f);
  }
}

static void compute_all(void *data) {
  Args *a = (Args *)data;
  f32 *scratch = (f32 *)a->scratch + __atomic_fetch_add(&a->next_thread, 1, __ATOMIC_RELAXED) * a->scratch_size;
  for (i64 item; (item = __atomic_fetch_add(&a->next_item, 1, __ATOMIC_RELAXED)) < a->items;) compute(a, item, scratch);
}

// the result: whether a captured tensor was indexed outside of its size
extern "C" i64 anyattn_pass(Args *a) {
  const Parallel parallel = (Parallel)a->parallel;
  parallel(compute_all, a, (u32)(a->threads < a->items ? a->threads : a->items), 0);
  return a->bad;
}
"""
