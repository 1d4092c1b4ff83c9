"""C++ text of the compiled forward pass: copies of keys and values, products, online softmax, and the threads' loop over work items.

A work item is 64 query rows of one head with all keys that they see. Threads take items from a counter, so a busy core delays one item
only, and every item is computed by one thread in a fixed order, so results do not depend on the number of threads. ``modify`` and
``HAS_PAIRS`` are generated (``emit.py``); the rest of the text is the same for all variants.
"""

from __future__ import annotations

__all__ = ["ENTRY", "FIELDS", "KERNEL", "PRELUDE", "RECORD"]

# 64-bit numbers of ``Args``, in order. Addresses are numbers; strides are in elements. kind: 0 float32, 1 bfloat16, 2 float16.
FIELDS = (
    "parallel", "threads", "items", "next_item", "pack_items", "next_pack", "next_thread", "bad", "states",
    "q", "k", "v", "out", "lse", "highest", "sink", "kind",
    "q_b", "q_h", "q_s", "q_d", "k_b", "k_h", "k_s", "k_d", "v_b", "v_h", "v_s", "v_d", "out_b", "out_h", "out_s", "out_d",
    "stat_b", "stat_h", "d", "dv", "ratio", "heads_kv", "scale", "packed_k", "packed_v", "scratch", "scratch_size", "own_size",
    "entries", "records", "record_count", "segments", "ranges", "predicates", "leaves", "tables",
)  # fmt: skip
# of each batch entry: its place in storage, its positions, and its first key and number of keys among the copied keys
ENTRY = (
    "q_row", "q_start", "k_row", "k_start", "keys", "q_first", "row_base", "key_base", "asked", "packed_first", "packed_keys",
)  # fmt: skip
# of each row tile of a group: the number of items before it, its batch entries, heads, rows, and segments (lo, hi, predicates as bits)
RECORD = ("first", "b_lo", "b_hi", "h_lo", "h_hi", "q_lo", "q_hi", "segment", "segment_count")


def _struct(name: str, fields: tuple[str, ...]) -> str:
    return f"struct {name} {{ i64 {', '.join(fields)}; }};\n"


PRELUDE = (
    r"""
typedef __INT64_TYPE__ i64; typedef __UINT64_TYPE__ u64; typedef __INT32_TYPE__ i32; typedef __UINT32_TYPE__ u32;
typedef __INT16_TYPE__ i16; typedef __UINT16_TYPE__ u16; typedef __INT8_TYPE__ i8; typedef __UINT8_TYPE__ u8;
typedef float f32; typedef double f64;
#if defined(__AVX512F__)
#define VL 16
#else
#define VL 8
#endif
#define NR (2 * VL)
#define ROWS 64
#define TALL 6  // rows of a product in registers
#define ROOM ((ROWS + TALL - 1) / TALL * TALL + VL)
#define KEYS 128
#define LINE (KEYS + 16)  // floats from row to row of scores
#define LOWEST (-__FLT_MAX__ / 2)
#define INF __builtin_inff()
#define INLINE static inline __attribute__((always_inline))
typedef f32 vf __attribute__((vector_size(4 * VL), aligned(4), may_alias));
typedef i32 vi __attribute__((vector_size(4 * VL), aligned(4), may_alias));

template <typename T> INLINE T bits_to(u32 x) { T y; __builtin_memcpy(&y, &x, 4); return y; }
INLINE u32 bits_of(f32 x) { u32 y; __builtin_memcpy(&y, &x, 4); return y; }

INLINE f32 from_bfloat16(u16 x) { return bits_to<f32>((u32)x << 16); }
INLINE f32 from_float16(u16 x) {
  u32 sign = (u32)(x & 0x8000) << 16, rest = x & 0x7fff;
  f32 normal = bits_to<f32>((rest << 13) + (112u << 23)), tiny = (f32)(i32)rest * 0x1p-24f;
  u32 size = rest >= 0x7c00 ? (rest << 13) | 0x7f800000u : bits_of(rest < 0x400 ? tiny : normal);
  return bits_to<f32>(sign | size);
}
INLINE u16 to_bfloat16(f32 x) {
  u32 b = bits_of(x);
  return x != x ? (u16)0x7fc0 : (u16)((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}
INLINE u16 to_float16(f32 x) {
  u32 b = bits_of(x), sign = (b >> 16) & 0x8000, size = b & 0x7fffffff;
  if (size > 0x7f800000u) return (u16)(sign | 0x7e00);
  if (size >= 0x477ff000u) return (u16)(sign | 0x7c00);
  if (size < 0x38800000u) return (u16)(sign | (bits_of(bits_to<f32>(size) + 0.5f) - 0x3f000000u));
  return (u16)(sign | ((size - 0x38000000u + 0xfff + ((size >> 13) & 1)) >> 13));
}

INLINE f32 fma_(f32 x, f32 y, f32 z) {
#if defined(__FMA__) || defined(__AVX512F__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(x, y, z);
#else
  return x * y + z;
#endif
}

// 2^x to about 1 ulp; 0 below the least normal number, NaN for NaN
INLINE f32 exp2_(f32 x) {
  f32 y = x < -127.0f ? -127.0f : (x > 129.0f ? 129.0f : x);
  f32 shifted = y + 12582912.0f, whole = shifted - 12582912.0f, f = y - whole;
  f32 p = 1.535336188319500e-4f;
  p = fma_(p, f, 1.339887440266574e-3f);
  p = fma_(p, f, 9.618437357674640e-3f);
  p = fma_(p, f, 5.550332471162809e-2f);
  p = fma_(p, f, 2.402264791363012e-1f);
  p = fma_(p, f, 6.931472028550421e-1f);
  p = fma_(p, f, 1.0f);
  i32 n = (i32)bits_of(shifted) - 0x4b400000, half = n >> 1;
  f32 r = p * bits_to<f32>((u32)(half + 127) << 23) * bits_to<f32>((u32)(n - half + 127) << 23);
  return x < -126.0f ? 0.0f : r;
}
"""
    + _struct("Args", FIELDS)
    + _struct("Entry", ENTRY)
    + _struct("Record", RECORD)
    + r"""
struct Segment { i64 lo, hi, asked; };
struct Range { i64 count, address, b, h, n; };
struct Leaf { i64 address, b, h, s; };
// the place of a row: its batch entry, the entry's own number for mods, head, position and row in hoisted rows
struct Place { i64 b, asked, h, q_idx, row, key_base; };
"""
)

KERNEL = r"""
INLINE vf load(const f32 *p) { return *(const vf *)p; }
INLINE void store(f32 *p, vf x) { *(vf *)p = x; }
INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__) && defined(__clang__)
  return __builtin_elementwise_fma(a, b, c);
#elif defined(__AVX512F__)
  return (vf)__builtin_ia32_vfmaddps512_mask(a, b, c, (u16)-1, 4);
#elif defined(__AVX2__) && defined(__FMA__)
  return (vf)__builtin_ia32_vfmaddps256(a, b, c);
#else
  vf r;
  for (int l = 0; l < VL; ++l) r[l] = fma_(a[l], b[l], c[l]);
  return r;
#endif
}
INLINE vf all(f32 x) { return x - (vf){}; }
// the greater of two numbers; b if one is NaN
INLINE vf greater(vf a, vf b) {
#if defined(__AVX512F__) && !defined(__clang__)
  return (vf)__builtin_ia32_maxps512_mask(a, b, a, (u16)-1, 4);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return (vf)__builtin_ia32_maxps256(a, b);
#else
  const vi c = a > b;
  return (vf)((c & (vi)a) | (~c & (vi)b));
#endif
}

// 2^x for x <= 0 to about 1 ulp; 0 below the least normal number, NaN for NaN
INLINE vf exp2_vector(vf x) {
  const vf y = greater(all(-127.0f), x), shifted = y + 12582912.0f, f = y - (shifted - 12582912.0f);
  vf p = all(1.535336188319500e-4f);
  p = fma(p, f, all(1.339887440266574e-3f));
  p = fma(p, f, all(9.618437357674640e-3f));
  p = fma(p, f, all(5.550332471162809e-2f));
  p = fma(p, f, all(2.402264791363012e-1f));
  p = fma(p, f, all(6.931472028550421e-1f));
  p = fma(p, f, all(1.0f));
  return p * (vf)(((vi)shifted + 127) << 23);
}

template <int KIND> INLINE f32 element(const void *p, i64 at) {
  if (KIND == 0) return ((const f32 *)p)[at];
  return KIND == 1 ? from_bfloat16(((const u16 *)p)[at]) : from_float16(((const u16 *)p)[at]);
}

template <int KIND> static void widen(f32 *to, const void *from, i64 at, i64 step, i64 count) {
  if (step == 1) for (i64 x = 0; x < count; ++x) to[x] = element<KIND>(from, at + x);
  else for (i64 x = 0; x < count; ++x) to[x] = element<KIND>(from, at + x * step);
}

static void row_of(f32 *to, i64 kind, i64 from, i64 at, i64 step, i64 count) {
  if (kind == 0) widen<0>(to, (const void *)from, at, step, count);
  else if (kind == 1) widen<1>(to, (const void *)from, at, step, count);
  else widen<2>(to, (const void *)from, at, step, count);
}

static i64 padded(i64 width) { return (width + NR - 1) / NR * NR; }

// values in place: rows of vectors that need no copy
INLINE bool has_direct_values(const Args *a) { return a->kind == 0 && a->v_d == 1 && a->dv % NR == 0; }

template <int KIND> static void panel_of(f32 *to, const void *from, i64 at, i64 row_step, i64 step, i64 d, i64 count) {
  for (i64 x = 0; x < d; ++x)
    for (i64 c = 0; c < NR; ++c) to[x * NR + c] = c < count ? element<KIND>(from, at + c * row_step + x * step) : 0.0f;
}

// the keys of one K/V head of one entry as panels of NR keys, (panels, D, NR), and its values as rows of padded(Dv); 0 after the last
static void pack(const Args *a, i64 item, f32 *keys, f32 *values) {
  const Entry *e = (const Entry *)a->entries + item / a->heads_kv;
  const i64 g = item % a->heads_kv, width = padded(a->dv);
  const i64 k_at = e->k_row * a->k_b + g * a->k_h + e->k_start * a->k_s, v_at = e->k_row * a->v_b + g * a->v_h + e->k_start * a->v_s;
  for (i64 j = 0; j < e->keys; j += NR) {
    const i64 count = e->keys - j < NR ? e->keys - j : NR, at = k_at + j * a->k_s;
    if (a->kind == 0) panel_of<0>(keys + j * a->d, (const void *)a->k, at, a->k_s, a->k_d, a->d, count);
    else if (a->kind == 1) panel_of<1>(keys + j * a->d, (const void *)a->k, at, a->k_s, a->k_d, a->d, count);
    else panel_of<2>(keys + j * a->d, (const void *)a->k, at, a->k_s, a->k_d, a->d, count);
  }
  for (i64 j = 0; j < e->keys && !has_direct_values(a); ++j) {
    row_of(values + j * width, a->kind, a->v, v_at + j * a->v_s, a->v_d, a->dv);
    for (i64 x = a->dv; x < width; ++x) values[j * width + x] = 0.0f;
  }
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

// keeps a vector in a register; otherwise GCC loads it again for each of its uses
#if defined(__AVX2__) && defined(__GNUC__)
#define IN_REGISTER(x) asm("" : "+v"(x))
#else
#define IN_REGISTER(x)
#endif

// factor times the products of TALL rows, q[x * TALL + r], with the NR keys of a panel
INLINE void products(const f32 *q, i64 d, const f32 *panel, f32 *s, f32 factor) {
  vf acc[TALL][2] = {};
  for (i64 x = 0; x < d; ++x) {
    vf k0 = load(panel + x * NR), k1 = load(panel + x * NR + VL);
    IN_REGISTER(k0);
    IN_REGISTER(k1);
#pragma GCC unroll 8
    for (int r = 0; r < TALL; ++r) {
      const vf y = all(q[x * TALL + r]);
      acc[r][0] = fma(y, k0, acc[r][0]);
      acc[r][1] = fma(y, k1, acc[r][1]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < TALL; ++r) {
    store(s + r * LINE, acc[r][0] * factor);
    store(s + r * LINE + VL, acc[r][1] * factor);
  }
}

// o = rescale o + p v for TALL rows and NR columns; width, line: floats from row to row of o and v
INLINE void accumulate(const f32 *p, i64 count, const f32 *v, f32 *o, i64 width, i64 line, const f32 *rescale) {
  vf acc[TALL][2];
#pragma GCC unroll 8
  for (int r = 0; r < TALL; ++r) {
    acc[r][0] = load(o + r * width) * rescale[r];
    acc[r][1] = load(o + r * width + VL) * rescale[r];
  }
  for (i64 j = 0; j < count; ++j) {
    vf v0 = load(v + j * line), v1 = load(v + j * line + VL);
    IN_REGISTER(v0);
    IN_REGISTER(v1);
#pragma GCC unroll 8
    for (int r = 0; r < TALL; ++r) {
      const vf y = all(p[r * LINE + j]);
      acc[r][0] = fma(y, v0, acc[r][0]);
      acc[r][1] = fma(y, v1, acc[r][1]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < TALL; ++r) {
    store(o + r * width, acc[r][0]);
    store(o + r * width + VL, acc[r][1]);
  }
}

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

INLINE void hide(f32 *s, i64 lo, i64 hi) { for (i64 j = lo; j < hi; ++j) s[j] = -INF; }

INLINE const i32 *limits(const Range *r, const Place *p) { return (const i32 *)r->address + p->b * r->b + p->h * r->h + p->row; }

// the part of a segment that some row of the item sees, by single row ranges; `high` is the end of the range's other tensor
static Segment narrowed(const Args *a, Segment s, const Place *first, i64 rows) {
  for (i64 p = 0; p < a->predicates; ++p) {
    const Range *r = (const Range *)a->ranges + p;
    if (!(s.asked >> p & 1) || r->count != 1) continue;
    const i32 *lo = limits(r, first), *hi = lo + r->n;
    i64 least = s.hi, most = s.lo;
    for (i64 x = 0; x < rows; ++x) {
      if (lo[x] >= hi[x]) continue;
      least = lo[x] < least ? lo[x] : least;
      most = hi[x] > most ? hi[x] : most;
    }
    s.lo = least > s.lo ? least : s.lo;
    s.hi = most < s.hi ? most : s.hi;
  }
  return s;
}

// scores s[j] of one row, lo <= j < hi, with mods applied in base 2, -inf where a predicate of `asked` hides them
static void visit(Args *a, const Place *p, f32 *s, i64 lo, i64 hi, i64 asked) {
  i64 begin = lo, end = hi, evaluated = 0, several = 0;
  for (i64 n = 0; n < a->predicates; ++n) {
    if (!(asked >> n & 1)) continue;
    const Range *r = (const Range *)a->ranges + n;
    if (r->count == 0) evaluated |= (i64)1 << n;
    else if (r->count == 1) {
      const i32 *low = limits(r, p), *high = low + r->n;
      begin = *low > begin ? *low : begin;
      end = *high < end ? *high : end;
    } else several |= (i64)1 << n;
  }
  if (end <= begin) return hide(s, lo, hi);
  hide(s, lo, begin);
  hide(s, end, hi);
  if (HAS_SCORE || evaluated) modify(a, p, s, begin, end, evaluated);
  for (i64 n = 0; several >> n; ++n) {
    if (!(several >> n & 1)) continue;
    const Range *r = (const Range *)a->ranges + n;
    const i32 *low = limits(r, p);
    for (i64 j = begin; j < end; ++j) {
      i32 is_seen = 0;
      for (i64 x = 0; x < r->count; ++x) is_seen |= (low[2 * x * r->n] <= j) & (j < low[(2 * x + 1) * r->n]);
      if (!is_seen) s[j] = -INF;
    }
  }
}

// row r of an item: `visit` in the parts of segments from `from` to before `to`
static void visit_segments(Args *a, const Place *start, i64 r, f32 *s, i64 from, i64 to, const Segment *segments, i64 count) {
  Place place = *start;
  place.q_idx += r;
  place.row += r;
  for (i64 x = 0; x < count; ++x) {
    const i64 lo = segments[x].lo > from ? segments[x].lo : from, hi = segments[x].hi < to ? segments[x].hi : to;
    if (lo < hi && (HAS_SCORE || segments[x].asked)) visit(a, &place, s, lo, hi, segments[x].asked);
  }
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
      for (i64 j = t; j < t_end; j += NR)
        for (i64 r = 0; r < rows; r += TALL) products(q + r * a->d, a->d, keys + j * a->d, s + r * LINE + j - t, scale);
      for (i64 block = 0; block < rows; block += VL) {
        const i64 end = block + VL < rows ? block + VL : rows;
        f32 high[VL];
        store(high, load(row_max + block));
        for (i64 r = block; r < end; ++r) {
          f32 *row = s + r * LINE;
          hide(row - t, t, from);
          hide(row - t, to, t_end);
          if (HAS_SCORE || asked) visit_segments(a, &start, r, row - t, from, to, segments + n, last - n);
          high[r - block] = row_greatest(row, t_end - t, row_max[r]);
        }
        store(rescale + block, exp2_vector(load(row_max + block) - load(high)));
        store(row_max + block, load(high));
        for (i64 r = block; r < end; ++r) exponentials(s + r * LINE, t_end - t, row_max[r], sums + r * VL, rescale[r]);
      }
      for (i64 x = 0; x < width; x += NR)
        for (i64 r = 0; r < rows; r += TALL)
          accumulate(s + r * LINE + from - t, to - from, values + from * line + x, o + r * width + x, width, line, rescale + r);
    }
    n = last;
  }
  const i64 out_at = e->q_row * a->out_b + h * a->out_h + (e->q_start + q_lo) * a->out_s;
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
    const i64 to = out_at + r * a->out_s;
    if (a->kind == 0 && a->out_d == 1) for (i64 x = 0; x < a->dv; ++x) ((f32 *)a->out)[to + x] = from[x];
    else if (a->kind == 0) for (i64 x = 0; x < a->dv; ++x) ((f32 *)a->out)[to + x * a->out_d] = from[x];
    else if (a->kind == 1) for (i64 x = 0; x < a->dv; ++x) ((u16 *)a->out)[to + x * a->out_d] = to_bfloat16(from[x]);
    else for (i64 x = 0; x < a->dv; ++x) ((u16 *)a->out)[to + x * a->out_d] = to_float16(from[x]);
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

typedef void (*Parallel)(void (*)(void *), void *, u32, u32);

// the result: whether a captured tensor was indexed outside of its size
extern "C" i64 anyattn_forward(Args *a) {
  const Parallel parallel = (Parallel)a->parallel;
  if (a->pack_items) parallel(pack_all, a, (u32)(a->threads < a->pack_items ? a->threads : a->pack_items), 0);
  parallel(compute_all, a, (u32)(a->threads < a->items ? a->threads : a->items), 0);
  return a->bad;
}
"""
