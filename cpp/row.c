// One new token of each row through all blocks of the model, as codechat/models/fast/one_token.py computes it, so that Python
// makes one call a step. Products (product.c), keys and values are of bfloat16, the residual of float32. What a row becomes does
// not depend on the rows beside it.
//
// B rows, D width, H heads, K key-value heads, E head width, F hidden width; D, E and F are multiples of 16.
#include <immintrin.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define WIDE __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))

void product(const uint16_t* x, const uint16_t* w, const float* bias, uint16_t* y, long rows, long n_in, long n_out, int threads);

typedef struct {
  long depth, width, heads, kv_heads, head_width, hidden;
  int gated;  // SwiGLU, of which `up` makes h and gate; else squared ReLU
  float eps;
} Shape;

typedef struct {
  const float *attn_norm, *mlp_norm;      // (D)
  const float *gain, *bias;               // of normed queries and keys (H + K, E), of qkv ((H + 2 K) E); or none
  const uint16_t *qkv, *out, *up, *down;  // as product.c reads them
} Layer;

typedef struct {
  uint16_t* const* blocks;          // of each block: keys, then values, in each head E numbers a token
  long to_values, to_row, to_head;  // from keys to values, from a row to the next, from a head to the next
  const uint8_t* real;              // (rows, to_real) which tokens are attended to; or none = all
  long to_real;
} Kept;

typedef struct {
  long rows;
  const float *cos, *sin;  // (B, E) of the new tokens
  Kept own;                // of the rows
  const long* slots;       // (B) which of its rows each is: the tokens of a prompt are rows of one
  const long* columns;     // (B) where their new tokens are kept, behind those that they attend to
  Kept prefix;             // which rows continue and may share
  const long* owner;       // (B) the prefix of each row
  long n_prefix;           // tokens of a prefix, or 0
} Place;

// ---- 16 numbers

WIDE static __m512 widened(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

WIDE static __m256i narrowed(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }

WIDE static __m512 load(const uint16_t* x) { return widened(_mm256_loadu_si256((const __m256i*)x)); }

WIDE static void store(uint16_t* y, __m512 x) { _mm256_storeu_si256((__m256i*)y, narrowed(x)); }

WIDE static __m512 exponential(__m512 x) {  // to 2e-7 of it; e^-100 below that
  x = _mm512_max_ps(x, _mm512_set1_ps(-100.0f));
  const __m512 n = _mm512_roundscale_ps(x * _mm512_set1_ps(1.44269504f), _MM_FROUND_TO_NEAREST_INT);
  __m512 f = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);  // minus n ln(2), which is the sum of two floats
  f = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), f);
  static const float series[] = {1 / 120.0f, 1 / 24.0f, 1 / 6.0f, 0.5f, 1, 1};
  __m512 sum = _mm512_set1_ps(1 / 720.0f);
  for (int i = 0; i < 6; ++i) sum = _mm512_fmadd_ps(sum, f, _mm512_set1_ps(series[i]));
  return _mm512_scalef_ps(sum, n);
}

// ---- what stands between products

WIDE static float inverse_rms(const float* x, long n, float eps) {
  __m512 squares = _mm512_setzero_ps();
  for (long i = 0; i < n; i += 16) squares = _mm512_fmadd_ps(_mm512_loadu_ps(x + i), _mm512_loadu_ps(x + i), squares);
  return 1 / __builtin_sqrtf(_mm512_reduce_add_ps(squares) / n + eps);
}

WIDE static void norm(const float* x, const float* gain, uint16_t* y, long n, float eps) {
  const __m512 scale = _mm512_set1_ps(inverse_rms(x, n, eps));
  for (long i = 0; i < n; i += 16) store(y + i, _mm512_loadu_ps(x + i) * scale * _mm512_loadu_ps(gain + i));
}

WIDE static void add(float* x, const uint16_t* y, long n) {
  for (long i = 0; i < n; i += 16) _mm512_storeu_ps(x + i, _mm512_loadu_ps(x + i) + load(y + i));
}

// A query or key, normed where there is a gain, turned by its position, and rounded to bfloat16.
WIDE static void turn(const uint16_t* x, const float* gain, const float* cos, const float* sin, uint16_t* y, long n_e, float eps) {
  float wide[n_e], turned[n_e];
  const long half = n_e / 2;
  for (long e = 0; e < n_e; e += 16) _mm512_storeu_ps(wide + e, load(x + e));
  const float scale = gain ? inverse_rms(wide, n_e, eps) : 1;
  for (long e = 0; gain && e < n_e; ++e) wide[e] *= scale * gain[e];
  for (long e = 0; e < half; ++e) {
    turned[e] = wide[e] * cos[e] + wide[e + half] * sin[e];
    turned[e + half] = wide[e + half] * cos[e + half] + wide[e] * sin[e + half];
  }
  for (long e = 0; e < n_e; e += 16) store(y + e, _mm512_loadu_ps(turned + e));
}

// ---- attention

// The sums of each of four vectors.
WIDE static __m128 four_sums(const __m512 x[4]) {
  const __m512 first = _mm512_unpacklo_ps(x[0], x[1]) + _mm512_unpackhi_ps(x[0], x[1]);
  const __m512 second = _mm512_unpacklo_ps(x[2], x[3]) + _mm512_unpackhi_ps(x[2], x[3]);
  const __m512d a = _mm512_castps_pd(first), b = _mm512_castps_pd(second);
  const __m512 all = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)) + _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
  const __m256 half = _mm512_castps512_ps256(all) + _mm512_extractf32x8_ps(all, 1);
  return _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1);
}

// Which of the tokens t to t + 15 there are, of n, and are attended to.
WIDE static __mmask16 attended(const uint8_t* real, long t, long n) {
  const __mmask16 there = n - t < 16 ? (1u << (n - t)) - 1 : 0xffff;
  if (!real) return there;
  const __m128i flags = _mm_maskz_loadu_epi8(there, real + t);
  return _mm_test_epi8_mask(flags, flags);
}

// p (G, room): q k / root of G queries and n keys, four keys at once; minus infinity where a key is not attended to, and
// behind the last up to a multiple of 16.
WIDE static void score(const uint16_t* q, const uint16_t* k, const uint8_t* real, float* p, long n_g, long room, long n, long n_e) {
  const __m512 root = _mm512_set1_ps(1 / __builtin_sqrtf(n_e)), nothing = _mm512_set1_ps(-__builtin_inff());
  for (long t = 0; t < n; t += 4) {
    const uint16_t* keys[4];
    for (int i = 0; i < 4; ++i) keys[i] = k + (t + i < n ? t + i : n - 1) * n_e;
    for (long g = 0; g < n_g; ++g) {
      __m512 sums[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
      long e = 0;
      for (; e + 32 <= n_e; e += 32) {
        const __m512bh query = (__m512bh)_mm512_loadu_si512(q + g * n_e + e);
        for (int i = 0; i < 4; ++i) sums[i] = _mm512_dpbf16_ps(sums[i], query, (__m512bh)_mm512_loadu_si512(keys[i] + e));
      }
      for (int i = 0; i < 4 && e < n_e; ++i) sums[i] = _mm512_fmadd_ps(load(q + g * n_e + e), load(keys[i] + e), sums[i]);
      _mm_storeu_ps(p + g * room + t, four_sums(sums));
    }
  }
  for (long t = 0; t < n; t += 16) {
    const __mmask16 here = attended(real, t, n);
    for (float* to = p + t; to < p + n_g * room; to += room) {
      _mm512_storeu_ps(to, _mm512_mask_mul_ps(nothing, here, _mm512_loadu_ps(to), root));
    }
  }
}

// p (n): the softmax but for a factor, which is returned. Summed in double: where among the 16 lanes a token stands depends on
// the rows beside it, and must not change the sum.
WIDE static float softmax(float* p, long n) {
  const __m512 nothing = _mm512_set1_ps(-__builtin_inff());
  __m512 largest = nothing;
  __m512d total = _mm512_setzero_pd();
  for (long t = 0; t < n; t += 16) largest = _mm512_max_ps(largest, _mm512_loadu_ps(p + t));
  const __m512 most = _mm512_set1_ps(_mm512_reduce_max_ps(largest));
  for (long t = 0; t < n; t += 16) {
    const __m512 x = _mm512_loadu_ps(p + t);
    const __m512 mass = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, nothing, _CMP_GT_OQ), exponential(x - most));
    _mm512_storeu_ps(p + t, mass);
    total += _mm512_cvtps_pd(_mm512_castps512_ps256(mass)) + _mm512_cvtps_pd(_mm512_extractf32x8_ps(mass, 1));
  }
  return 1 / (float)_mm512_reduce_add_pd(total);
}

// sums (G, E) += p v of n tokens, in the order of memory; four at once, since the sums do not stay in registers.
WIDE static void add_values(const float* p, const uint16_t* v, float* sums, long n_g, long room, long n, long n_e) {
  for (long t = 0; t < n; t += 4) {
    const long there = n - t < 4 ? n - t : 4;
    for (long e = 0; e < n_e; e += 16) {
      __m512 values[4];
      for (int i = 0; i < 4; ++i) values[i] = i < there ? load(v + (t + i) * n_e + e) : _mm512_setzero_ps();
      for (long g = 0; g < n_g; ++g) {
        __m512 sum = _mm512_loadu_ps(sums + g * n_e + e);
        for (int i = 0; i < 4; ++i) sum = _mm512_fmadd_ps(_mm512_set1_ps(p[g * room + t + i]), values[i], sum);
        _mm512_storeu_ps(sums + g * n_e + e, sum);
      }
    }
  }
}

static long sixteens(long n) { return (n + 15) / 16 * 16; }

static const uint8_t* real_of(const Kept* kept, long row) { return kept->real ? kept->real + row * kept->to_real : 0; }

// y (G, E): the attention of G queries of row b, which share a key head, to its prefix and to its own tokens.
// p: room for G times the tokens of both, each up to a multiple of 16.
WIDE static void attend(const Shape* s, const Place* place, long block, long b, long head, long n_g, const uint16_t* q, float* p,
                        uint16_t* y) {
  const Kept *const own = &place->own, *const prefix = &place->prefix;
  const long E = s->head_width, n_prefix = place->n_prefix, n_own = place->columns[b] + 1;
  const long behind = sixteens(n_prefix), room = behind + sixteens(n_own), owner = n_prefix ? place->owner[b] : 0;
  const long slot = place->slots[b];
  const uint16_t* const k = own->blocks[block] + slot * own->to_row + head * own->to_head;
  float sums[n_g * E];
  for (long e = 0; e < n_g * E; e += 16) _mm512_storeu_ps(sums + e, _mm512_setzero_ps());
  const uint16_t* const past = n_prefix ? prefix->blocks[block] + owner * prefix->to_row + head * prefix->to_head : 0;
  if (past) score(q, past, real_of(prefix, owner), p, n_g, room, n_prefix, E);
  score(q, k, real_of(own, slot), p + behind, n_g, room, n_own, E);
  float shares[n_g];
  for (long g = 0; g < n_g; ++g) shares[g] = softmax(p + g * room, room);
  if (past) add_values(p, past + prefix->to_values, sums, n_g, room, n_prefix, E);
  add_values(p + behind, k + own->to_values, sums, n_g, room, n_own, E);
  for (long e = 0; e < n_g * E; e += 16) store(y + e, _mm512_loadu_ps(sums + e) * _mm512_set1_ps(shares[e / E]));
}

// ---- the MLP

// The hidden units (F) of what `up` made: of h and gate (2 F), or of h (F). Each step is rounded, as torch's are.
WIDE static void activate(const uint16_t* made, uint16_t* y, long n, int gated) {
  for (long i = 0; i < n; i += 16) {
    const __m512 h = load(made + i);
    if (gated) {
      const __m512 gate = load(made + n + i), zero = _mm512_setzero_ps();
      store(y + i, gate / (_mm512_set1_ps(1) + exponential(zero - gate)));
      store(y + i, load(y + i) * h);
    } else {
      const __m512 kept = _mm512_max_ps(h, _mm512_setzero_ps());
      store(y + i, kept * kept);
    }
  }
}

// ---- the rows

// What a row's products made of its token: turned queries, and keys and values where they are kept.
WIDE static void keep(const Shape* s, const Layer* layer, const Place* place, long block, long b, const uint16_t* made, uint16_t* q) {
  const long H = s->heads, K = s->kv_heads, E = s->head_width;
  const float *const cos = place->cos + b * E, *const sin = place->sin + b * E;
  const Kept* const own = &place->own;
  uint16_t* const keys = own->blocks[block] + place->slots[b] * own->to_row + place->columns[b] * E;
  for (long h = 0; h < H + K; ++h) {
    uint16_t* const to = h < H ? q + h * E : keys + (h - H) * own->to_head;
    turn(made + h * E, layer->gain ? layer->gain + h * E : 0, cos, sin, to, E, s->eps);
  }
  for (long k = 0; k < K; ++k) {
    memcpy(keys + own->to_values + k * own->to_head, made + (H + K + k) * E, E * sizeof *keys);
  }
}

// x (B, D): the embeddings of the tokens, then their states before the last norm. Their keys and values are stored.
WIDE void rows(const Shape* s, const Layer* layers, const Place* place, float* x, int threads) {
  const long B = place->rows, D = s->width, H = s->heads, K = s->kv_heads, E = s->head_width, F = s->hidden;
  const long n_up = s->gated ? 2 * F : F, n_qkv = (H + 2 * K) * E;
  const long n_made = n_qkv > n_up ? n_qkv : n_up, n_inner = H * E > F ? H * E : F;
  const int apart = threads > 1 && B > 1;  // whether threads share the rows
  long longest = 0;
  for (long b = 0; b < B; ++b) longest = place->columns[b] > longest ? place->columns[b] : longest;
  const long abreast = B * K < 2 * threads ? 1 : H / K;  // queries that read a key together
  const long room = abreast * (sixteens(place->n_prefix) + sixteens(longest + 1));
  float* const p = malloc(threads * room * sizeof(float));
  const long size = B * (2 * D + H * E + n_made + n_inner) * sizeof(uint16_t);
  // at a line of the cache: a tile that begins elsewhere is read from twice as many
  uint16_t* const normed = aligned_alloc(64, (size + 63) / 64 * 64);
  uint16_t *const y = normed + B * D, *const q = y + B * D, *const made = q + B * H * E, *const inner = made + B * n_made;
  for (long b = 0; b < B; ++b) norm(x + b * D, layers->attn_norm, normed + b * D, D, s->eps);
  for (long block = 0; block < s->depth; ++block) {
    const Layer* const layer = layers + block;
    product(normed, layer->qkv, layer->bias, made, B, D, n_qkv, threads);
#pragma omp parallel for num_threads(threads) if (apart)
    for (long b = 0; b < B; ++b) keep(s, layer, place, block, b, made + b * n_qkv, q + b * H * E);
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long i = 0; i < B * H / abreast; ++i) {  // head by head: rows side by side share a prefix
      const long h = i / B * abreast, b = i % B, at = (b * H + h) * E;
      float* const scores = p + omp_get_thread_num() * room;
      attend(s, place, block, b, h / (H / K), abreast, q + at, scores, inner + at);
    }
    product(inner, layer->out, 0, y, B, H * E, D, threads);
#pragma omp parallel for num_threads(threads) if (apart)
    for (long b = 0; b < B; ++b) {
      add(x + b * D, y + b * D, D);
      norm(x + b * D, layer->mlp_norm, normed + b * D, D, s->eps);
    }
    product(normed, layer->up, 0, made, B, D, n_up, threads);
#pragma omp parallel for num_threads(threads) if (apart)
    for (long b = 0; b < B; ++b) activate(made + b * n_up, inner + b * F, F, s->gated);
    product(inner, layer->down, 0, y, B, F, D, threads);
#pragma omp parallel for num_threads(threads) if (apart)
    for (long b = 0; b < B; ++b) {
      add(x + b * D, y + b * D, D);
      if (block + 1 < s->depth) norm(x + b * D, layer[1].attn_norm, normed + b * D, D, s->eps);
    }
  }
  free(normed);
  free(p);
}
