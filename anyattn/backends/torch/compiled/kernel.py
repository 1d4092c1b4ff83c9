"""C++ text that both passes share: arguments, conversions, products of a few rows, and the mods and masks of one row.

``modify`` is generated (``emit.py``); the rest of the text is the same for all variants.
"""

from __future__ import annotations

__all__ = ["COMMON", "ENTRY", "FIELDS", "GROUP", "PRELUDE", "RECORD"]

# 64-bit numbers of ``Args``, in order. Addresses are numbers; strides are in elements. kind: 0 float32, 1 bfloat16, 2 float16;
# grad_kind: of grad_k and grad_v.
FIELDS = (
    "parallel", "threads", "items", "next_item", "pack_items", "next_pack", "next_thread", "bad", "states",
    "q", "k", "v", "out", "lse", "highest", "sink", "kind",
    "q_b", "q_h", "q_s", "q_d", "k_b", "k_h", "k_s", "k_d", "v_b", "v_h", "v_s", "v_d", "out_b", "out_h", "out_s", "out_d",
    "stat_b", "stat_h", "d", "dv", "ratio", "heads_kv", "scale", "packed_k", "packed_v", "scratch", "scratch_size", "own_size",
    "entries", "records", "record_count", "segments", "ranges", "predicates", "leaves", "tables",
    # of the backward pass alone
    "dout", "grad_q", "grad_k", "grad_v", "row_lse", "net", "total_k", "total_v", "key_rows", "groups", "group_count", "splits",
    "split_keys", "sums", "dout_b", "dout_h", "dout_s", "dout_d", "grad_q_b", "grad_q_h", "grad_q_s", "grad_q_d", "grad_q_split",
    "grad_k_b", "grad_k_h", "grad_k_s", "grad_k_d", "grad_v_b", "grad_v_h", "grad_v_s", "grad_v_d", "grad_kind",
)  # fmt: skip
# of each batch entry: its place in storage, its positions, and its first key and number of keys among the copied keys
ENTRY = (
    "q_row", "q_start", "k_row", "k_start", "keys", "q_first", "row_base", "key_base", "asked", "packed_first", "packed_keys",
)  # fmt: skip
# of each row tile of a group: the number of items before it, its batch entries, heads, rows, and segments (lo, hi, predicates as bits)
RECORD = ("first", "b_lo", "b_hi", "h_lo", "h_hi", "q_lo", "q_hi", "segment", "segment_count")
# of each group: its batch entries, heads and records
GROUP = ("b_lo", "b_hi", "h_lo", "h_hi", "record", "record_count")


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
    + _struct("Group", GROUP)
    + r"""
struct Segment { i64 lo, hi, asked; };
struct Range { i64 count, address, b, h, n; };
struct Leaf { i64 address, b, h, s; };
// the place of a row: its batch entry, the entry's own number for mods, head, position and row in hoisted rows
struct Place { i64 b, asked, h, q_idx, row, key_base; };
"""
)

COMMON = r"""
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

template <int KIND> static void panel_of(f32 *to, const void *from, i64 at, i64 row_step, i64 step, i64 d, i64 count) {
  for (i64 x = 0; x < d; ++x)
    for (i64 c = 0; c < NR; ++c) to[x * NR + c] = c < count ? element<KIND>(from, at + c * row_step + x * step) : 0.0f;
}

// `count` rows as panels of NR rows, (panels, d, NR), 0 after the last
static void panels_of(f32 *to, i64 kind, i64 from, i64 at, i64 row_step, i64 step, i64 d, i64 count) {
  for (i64 j = 0; j < count; j += NR) {
    const i64 rest = count - j < NR ? count - j : NR, first = at + j * row_step;
    if (kind == 0) panel_of<0>(to + j * d, (const void *)from, first, row_step, step, d, rest);
    else if (kind == 1) panel_of<1>(to + j * d, (const void *)from, first, row_step, step, d, rest);
    else panel_of<2>(to + j * d, (const void *)from, first, row_step, step, d, rest);
  }
}

// `count` rows of `width` floats, 0 from column d on
static void rows_of(f32 *to, i64 width, i64 kind, i64 from, i64 at, i64 row_step, i64 step, i64 d, i64 count) {
  for (i64 j = 0; j < count; ++j) {
    row_of(to + j * width, kind, from, at + j * row_step, step, d);
    for (i64 x = d; x < width; ++x) to[j * width + x] = 0.0f;
  }
}

// rows from `from` as groups of TALL, (groups, d, TALL)
static void interleave(f32 *to, const f32 *from, i64 line, i64 d, i64 count) {
  for (i64 r = 0; r < count; ++r)
    for (i64 x = 0; x < d; ++x) to[r / TALL * TALL * d + x * TALL + r % TALL] = from[r * line + x];
}

// a number to a tensor of a kind
INLINE void put(i64 kind, i64 to, i64 at, f32 x) {
  if (kind == 0) ((f32 *)to)[at] = x;
  else ((u16 *)to)[at] = kind == 1 ? to_bfloat16(x) : to_float16(x);
}

// `count` numbers, times a factor
static void put_row(i64 kind, i64 to, i64 at, i64 step, const f32 *from, i64 count, f32 factor) {
  if (kind == 0 && step == 1) for (i64 x = 0; x < count; ++x) ((f32 *)to)[at + x] = from[x] * factor;
  else for (i64 x = 0; x < count; ++x) put(kind, to, at + x * step, from[x] * factor);
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

// o = rescale o + p v for T rows and NR columns, or o + p v without rescale. P_ROW, P_STEP: floats from row to row of p and from term to
// term; width, line: from row to row of o and v
template <int T, int P_ROW, int P_STEP>
INLINE void accumulate(const f32 *p, i64 count, const f32 *v, f32 *o, i64 width, i64 line, const f32 *rescale) {
  vf acc[T][2];
#pragma GCC unroll 8
  for (int r = 0; r < T; ++r) {
    acc[r][0] = load(o + r * width);
    acc[r][1] = load(o + r * width + VL);
    if (rescale) acc[r][0] *= rescale[r], acc[r][1] *= rescale[r];
  }
  for (i64 j = 0; j < count; ++j) {
    vf v0 = load(v + j * line), v1 = load(v + j * line + VL);
    IN_REGISTER(v0);
    IN_REGISTER(v1);
#pragma GCC unroll 8
    for (int r = 0; r < T; ++r) {
      const vf y = all(p[r * P_ROW + j * P_STEP]);
      acc[r][0] = fma(y, v0, acc[r][0]);
      acc[r][1] = fma(y, v1, acc[r][1]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < T; ++r) {
    store(o + r * width, acc[r][0]);
    store(o + r * width + VL, acc[r][1]);
  }
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

// scores s[j] of one row, lo <= j < hi, with mods applied in base 2, -inf where a predicate of `asked` hides them; by: their derivatives
static void visit(Args *a, const Place *p, f32 *s, f32 *by, i64 lo, i64 hi, i64 asked) {
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
  if (HAS_SCORE || evaluated) modify(a, p, s, by, begin, end, evaluated);
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
static void visit_segments(Args *a, const Place *start, i64 r, f32 *s, f32 *by, i64 from, i64 to, const Segment *segments, i64 count) {
  Place place = *start;
  place.q_idx += r;
  place.row += r;
  for (i64 x = 0; x < count; ++x) {
    const i64 lo = segments[x].lo > from ? segments[x].lo : from, hi = segments[x].hi < to ? segments[x].hi : to;
    if (lo < hi && (HAS_SCORE || segments[x].asked)) visit(a, &place, s, by, lo, hi, segments[x].asked);
  }
}

typedef void (*Parallel)(void (*)(void *), void *, u32, u32);
"""
