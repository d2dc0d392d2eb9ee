// What stands between the products of a training step in bfloat16 (codechat/models/fast/fused.py), a pass over memory each way:
// RMSNorm, the squared ReLU, SwiGLU, and attention: queries and keys normed and turned, scores, softmax and the weighted sum. Scores that no
// query sees are not computed, and no score leaves the cache.
//
// Sums are float32; queries, keys, weights and gradients are rounded to bfloat16 where they enter a product, as torch rounds them.
// A pair is two bfloat16 numbers that one instruction multiplies and adds: neighbours of a row, or of a column.
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define QUERIES 32  // of a tile
#define KEYS 32
#define LINES 64  // of a norm whose gain's gradient is summed apart, whatever the number of threads
#define INLINE static inline __attribute__((always_inline))

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")

typedef uint32_t __attribute__((may_alias)) Pair;

int training_runs_here(void) {
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq");
}

INLINE __m512 wide(const uint16_t* x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x)), 16));
}

INLINE __m256i rounded(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }

INLINE void store_rounded(uint16_t* to, __m512 x) { _mm256_storeu_si256((__m256i*)to, rounded(x)); }

INLINE __m512i paired(__m256i low, __m256i high) {
  return _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
}

INLINE float inverse_root(float x) { return 1.0f / _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x))); }

// exp(x) for x <= 0, to 2 units in the last place: 2^n times a polynomial
INLINE __m512 exponential(__m512 x) {
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 y = _mm512_set1_ps(1.9875691500e-4f);
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.3981999507e-3f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(8.3334519073e-3f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(4.1665795894e-2f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.6666665459e-1f));
  y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(5.0000001201e-1f));
  y = _mm512_fmadd_ps(_mm512_mul_ps(y, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
  return _mm512_scalef_ps(y, n);
}

// ---- norm and activation

typedef struct {
  const float* x;       // (lines, width)
  const float* gain;    // (width)
  float* y;             // as x
  float* scale;         // (lines): 1 / the root of the mean square
  const float* up;      // as x
  float* dx;            // as x
  float* d_gain;        // (lines / LINES, width), zeros
  int64_t lines, width, threads;
  float eps;
} Norm;

void norm_forward(const Norm* call) {
#pragma omp parallel for num_threads(call->threads) if (call->threads > 1)
  for (long line = 0; line < call->lines; ++line) {
    const float* x = call->x + line * call->width;
    __m512 squares = _mm512_setzero_ps();
    for (long e = 0; e < call->width; e += 16) squares = _mm512_fmadd_ps(_mm512_loadu_ps(x + e), _mm512_loadu_ps(x + e), squares);
    const float scale = inverse_root(_mm512_reduce_add_ps(squares) / call->width + call->eps);
    for (long e = 0; e < call->width; e += 16) {
      const __m512 normed = _mm512_mul_ps(_mm512_loadu_ps(x + e), _mm512_set1_ps(scale));
      _mm512_storeu_ps(call->y + line * call->width + e, _mm512_mul_ps(normed, _mm512_loadu_ps(call->gain + e)));
    }
    call->scale[line] = scale;
  }
}

// With n = x s: dx = s (up g - n mean(up g n)), dg = sum(up n).
void norm_backward(const Norm* call) {
#pragma omp parallel for num_threads(call->threads) if (call->threads > 1)
  for (long part = 0; part < (call->lines + LINES - 1) / LINES; ++part)
    for (long line = part * LINES; line < call->lines && line < (part + 1) * LINES; ++line) {
      const float* x = call->x + line * call->width;
      const float* up = call->up + line * call->width;
      float* d_gain = call->d_gain + part * call->width;
      const __m512 scale = _mm512_set1_ps(call->scale[line]);
      __m512 sum = _mm512_setzero_ps();
      for (long e = 0; e < call->width; e += 16) {
        const __m512 both = _mm512_mul_ps(_mm512_loadu_ps(up + e), _mm512_mul_ps(_mm512_loadu_ps(x + e), scale));
        _mm512_storeu_ps(d_gain + e, _mm512_add_ps(both, _mm512_loadu_ps(d_gain + e)));
        sum = _mm512_fmadd_ps(both, _mm512_loadu_ps(call->gain + e), sum);
      }
      const __m512 shared = _mm512_set1_ps(_mm512_reduce_add_ps(sum) / call->width);
      for (long e = 0; e < call->width; e += 16) {
        const __m512 above = _mm512_mul_ps(_mm512_loadu_ps(up + e), _mm512_loadu_ps(call->gain + e));
        const __m512 normed = _mm512_mul_ps(_mm512_loadu_ps(x + e), scale);
        _mm512_storeu_ps(call->dx + line * call->width + e, _mm512_mul_ps(scale, _mm512_fnmadd_ps(normed, shared, above)));
      }
    }
}

// relu(x)^2, and its gradient 2 relu(x) up. size is a multiple of 16.
void squared_relu_forward(const uint16_t* x, uint16_t* y, int64_t size, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (long i = 0; i < size; i += 16) {
    const __m512 kept = _mm512_max_ps(wide(x + i), _mm512_setzero_ps());
    store_rounded(y + i, _mm512_mul_ps(kept, kept));
  }
}

void squared_relu_backward(const uint16_t* x, const uint16_t* up, uint16_t* dx, int64_t size, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (long i = 0; i < size; i += 16) {
    const __m512 kept = _mm512_max_ps(wide(x + i), _mm512_setzero_ps());
    store_rounded(dx + i, _mm512_mul_ps(_mm512_add_ps(kept, kept), wide(up + i)));
  }
}

// silu(gate) up, and its gradients; each step is rounded, as torch's are. size is a multiple of 16.
INLINE __m512 sigmoid(__m512 x) {
  const __m512 small = exponential(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_abs_ps(x)));
  const __m512 above = _mm512_mask_mov_ps(small, _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GE_OQ), _mm512_set1_ps(1.0f));
  return _mm512_div_ps(above, _mm512_add_ps(small, _mm512_set1_ps(1.0f)));
}

INLINE __m512 as_rounded(__m512 x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded(x)), 16)); }

void swiglu_forward(const uint16_t* gate, const uint16_t* up, uint16_t* y, int64_t size, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (long i = 0; i < size; i += 16) {
    const __m512 g = wide(gate + i);
    store_rounded(y + i, _mm512_mul_ps(as_rounded(_mm512_mul_ps(g, sigmoid(g))), wide(up + i)));
  }
}

void swiglu_backward(const uint16_t* gate, const uint16_t* up, const uint16_t* above, uint16_t* d_gate, uint16_t* d_up, int64_t size,
                     int64_t threads) {
  const __m512 one = _mm512_set1_ps(1.0f);
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (long i = 0; i < size; i += 16) {
    const __m512 g = wide(gate + i), s = sigmoid(g), a = wide(above + i);
    const __m512 slope = _mm512_mul_ps(s, _mm512_fmadd_ps(g, _mm512_sub_ps(one, s), one));
    store_rounded(d_gate + i, _mm512_mul_ps(as_rounded(_mm512_mul_ps(a, wide(up + i))), slope));
    store_rounded(d_up + i, _mm512_mul_ps(a, as_rounded(_mm512_mul_ps(g, s))));
  }
}

// ---- products

// c (m, 16 V) = a (m, pairs) b (pairs, 16 V); with add it is added to c. m is a multiple of 16 / V.
INLINE void multiply(const Pair* a, long a_row, long a_pair, const Pair* b, long b_pair, float* c, long c_row, long m, long pairs, int add,
                     const int V) {
  const int R = 16 / V;
  for (long i = 0; i < m; i += R) {
    __m512 sum[16];
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) sum[r * V + v] = add ? _mm512_loadu_ps(c + (i + r) * c_row + 16 * v) : _mm512_setzero_ps();
    for (long p = 0; p < pairs; ++p) {
      __m512i right[4];
      for (int v = 0; v < V; ++v) right[v] = _mm512_loadu_si512(b + p * b_pair + 16 * v);
      for (int r = 0; r < R; ++r) {
        const __m512i left = _mm512_set1_epi32((int)a[(i + r) * a_row + p * a_pair]);
        for (int v = 0; v < V; ++v) sum[r * V + v] = _mm512_dpbf16_ps(sum[r * V + v], (__m512bh)left, (__m512bh)right[v]);
      }
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) _mm512_storeu_ps(c + (i + r) * c_row + 16 * v, sum[r * V + v]);
  }
}

// (KEYS, E) -> (E / 2, KEYS) pairs of a row
INLINE void pair_columns(const uint16_t* x, Pair* to, const long E) {
  const Pair* from = (const Pair*)x;
  for (long p = 0; p < E / 2; ++p)
    for (long k = 0; k < KEYS; ++k) to[p * KEYS + k] = from[k * E / 2 + p];
}

// (n, E) -> (n / 2, E) pairs of a column
INLINE void pair_rows(const uint16_t* x, Pair* to, long n, const long E) {
  for (long k = 0; k < n; k += 2)
    for (long e = 0; e < E; e += 16)
      _mm512_storeu_si512(to + k / 2 * E + e, paired(_mm256_loadu_si256((const __m256i*)(x + k * E + e)),
                                                     _mm256_loadu_si256((const __m256i*)(x + (k + 1) * E + e))));
}

// ---- attention

typedef struct {
  const uint16_t* qkv;        // (rows, tokens, heads + 2 groups, width): queries, keys, values
  const float* gains;         // (2, width) of queries and keys; or none: they are not normed
  const float *cos, *sin;     // (turns, tokens, width), turns = 1 or rows; or none: they are not turned
  const int32_t* seen;        // (rows, tokens, 3): token i attends to [first, second) and [third, i]
  uint16_t* out;              // (rows, tokens, heads, width)
  float* kept;                // (rows, heads, tokens, 2): of a query its largest score and 1 / the sum of exponentials
  const uint16_t* up;         // as out: the gradient from above
  uint16_t* d_qkv;            // as qkv
  float* d_gains;             // (rows, groups, 2, width), zeros
  int64_t rows, tokens, heads, groups, width, turns, threads;
  float eps;
} Call;

INLINE const uint16_t* head_of(const Call* call, const uint16_t* qkv, long row, long token, long head) {
  return qkv + ((row * call->tokens + token) * (call->heads + 2 * call->groups) + head) * call->width;
}

INLINE const float* gain_of(const Call* call, long head) { return call->gains + (head < call->heads ? 0 : call->width); }

INLINE long angle_of(const Call* call, long row, long token) {
  return ((call->turns > 1 ? row : 0) * call->tokens + token) * call->width;
}

// 1 / the root of the mean square
INLINE float scale_of(const uint16_t* x, float eps, const long E) {
  __m512 squares = _mm512_setzero_ps();
  for (long e = 0; e < E; e += 16) squares = _mm512_fmadd_ps(wide(x + e), wide(x + e), squares);
  return inverse_root(_mm512_reduce_add_ps(squares) / E + eps);
}

// A query or a key of one token, normed and turned.
INLINE void turn(const Call* call, long row, long token, long head, uint16_t* to, const long E) {
  const uint16_t* x = head_of(call, call->qkv, row, token, head);
  __m512 y[E / 16];
  for (long v = 0; v < E / 16; ++v) y[v] = wide(x + 16 * v);
  if (call->gains) {
    const __m512 scale = _mm512_set1_ps(scale_of(x, call->eps, E));
    for (long v = 0; v < E / 16; ++v)
      y[v] = _mm512_mul_ps(_mm512_mul_ps(y[v], scale), _mm512_loadu_ps(gain_of(call, head) + 16 * v));
  }
  const long angle = call->cos ? angle_of(call, row, token) : 0;
  for (long v = 0; v < E / 16; ++v) {
    __m512 turned = y[v];
    if (call->cos) {
      turned = _mm512_mul_ps(turned, _mm512_loadu_ps(call->cos + angle + 16 * v));
      turned = _mm512_fmadd_ps(y[(v + E / 32) % (E / 16)], _mm512_loadu_ps(call->sin + angle + 16 * v), turned);
    }
    store_rounded(to + 16 * v, turned);
  }
}

// The reverse: d (E), the gradient of what `turn` has made, becomes that of its input; adds to the gain's gradient.
INLINE void turn_back(const Call* call, long row, long token, long head, const float* d, float* d_gain, const long E) {
  const uint16_t* x = head_of(call, call->qkv, row, token, head);
  uint16_t* to = (uint16_t*)head_of(call, call->d_qkv, row, token, head);
  __m512 gradient[E / 16];
  const long angle = call->cos ? angle_of(call, row, token) : 0;
  for (long v = 0; v < E / 16; ++v) {
    gradient[v] = _mm512_loadu_ps(d + 16 * v);
    if (call->cos) {
      const long other = 16 * ((v + E / 32) % (E / 16));
      gradient[v] = _mm512_mul_ps(gradient[v], _mm512_loadu_ps(call->cos + angle + 16 * v));
      gradient[v] = _mm512_fmadd_ps(_mm512_loadu_ps(d + other), _mm512_loadu_ps(call->sin + angle + other), gradient[v]);
    }
  }
  if (call->gains) {
    const __m512 scale = _mm512_set1_ps(scale_of(x, call->eps, E));
    __m512 normed[E / 16];
    __m512 shared = _mm512_setzero_ps();
    for (long v = 0; v < E / 16; ++v) {
      normed[v] = _mm512_mul_ps(wide(x + 16 * v), scale);
      _mm512_storeu_ps(d_gain + 16 * v, _mm512_fmadd_ps(gradient[v], normed[v], _mm512_loadu_ps(d_gain + 16 * v)));
      gradient[v] = _mm512_mul_ps(gradient[v], _mm512_loadu_ps(gain_of(call, head) + 16 * v));
      shared = _mm512_fmadd_ps(gradient[v], normed[v], shared);
    }
    const __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(shared) / E);
    for (long v = 0; v < E / 16; ++v) gradient[v] = _mm512_mul_ps(scale, _mm512_fnmadd_ps(normed[v], mean, gradient[v]));
  }
  for (long v = 0; v < E / 16; ++v) store_rounded(to + 16 * v, gradient[v]);
}

// n tokens from `at` of a query or key head, zeros behind the last token: (n, E)
INLINE void turned(const Call* call, long row, long at, long n, long head, uint16_t* to, const long E) {
  for (long i = 0; i < n; ++i)
    if (at + i < call->tokens) turn(call, row, at + i, head, to + i * E, E);
    else memset(to + i * E, 0, 2 * E);
}

// The same as they are, from x, whose tokens lie `stride` apart.
INLINE void copied(const Call* call, const uint16_t* x, long stride, long at, long n, uint16_t* to, const long E) {
  for (long i = 0; i < n; ++i)
    if (at + i < call->tokens) memcpy(to + i * E, x + (at + i) * stride, 2 * E);
    else memset(to + i * E, 0, 2 * E);
}

typedef struct {
  int32_t first, second, third, last;
} Seen;

INLINE Seen seen_of(const Call* call, long row, long token) {
  if (token >= call->tokens) return (Seen){0, 0, (int32_t)token, (int32_t)token};  // itself: a softmax without keys is NaN
  const int32_t* seen = call->seen + (row * call->tokens + token) * 3;
  return (Seen){seen[0], seen[1], seen[2], (int32_t)token};
}

// of 16 keys from `at`
INLINE __mmask16 sees(Seen seen, long at) {
  const __m512i key = _mm512_add_epi32(_mm512_set1_epi32((int)at), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  const __mmask16 early = _mm512_cmpge_epi32_mask(key, _mm512_set1_epi32(seen.first)) & _mm512_cmplt_epi32_mask(key, _mm512_set1_epi32(seen.second));
  return early | (_mm512_cmpge_epi32_mask(key, _mm512_set1_epi32(seen.third)) & _mm512_cmple_epi32_mask(key, _mm512_set1_epi32(seen.last)));
}

// The blocks of keys that one of the queries from `at` sees; returns their number.
INLINE long blocks_of(const Seen* seen, long at, int32_t* blocks) {
  long n = 0;
  for (long start = 0; start < at + QUERIES; start += KEYS)
    for (int r = 0; r < QUERIES; ++r) {
      const long end = start + KEYS;
      if ((seen[r].third < end && seen[r].last >= start) || (seen[r].first < end && seen[r].second > start)) {
        blocks[n++] = (int32_t)(start / KEYS);
        break;
      }
    }
  return n;
}

INLINE void* room(size_t bytes) { return aligned_alloc(64, (bytes + 63) / 64 * 64); }

INLINE void forward(const Call* call, long task, const long E) {
  const long row = task / call->groups, group = task % call->groups, share = call->heads / call->groups;
  const long padded = (call->tokens + KEYS - 1) / KEYS * KEYS, stride = (call->heads + 2 * call->groups) * E;
  const float factor = inverse_root(E);
  Pair* keys = room(2 * padded * E);    // (padded / KEYS, E / 2, KEYS)
  Pair* values = room(2 * padded * E);  // (padded / 2, E)
  float* scores = room(4 * QUERIES * padded);
  uint16_t* weights = room(2 * QUERIES * padded);
  int32_t* blocks = room(4 * padded / KEYS);
  uint16_t rows[KEYS * E] __attribute__((aligned(64)));
  float sums[QUERIES * E] __attribute__((aligned(64)));
  for (long at = 0; at < padded; at += KEYS) {
    turned(call, row, at, KEYS, call->heads + group, rows, E);
    pair_columns(rows, keys + at * E / 2, E);
    copied(call, head_of(call, call->qkv, row, 0, call->heads + call->groups + group), stride, at, KEYS, rows, E);
    pair_rows(rows, values + at / 2 * E, KEYS, E);
  }
  for (long head = group * share; head < (group + 1) * share; ++head)
    for (long at = 0; at < call->tokens; at += QUERIES) {
      Seen seen[QUERIES];
      for (int r = 0; r < QUERIES; ++r) seen[r] = seen_of(call, row, at + r);
      const long n = blocks_of(seen, at, blocks), line = n * KEYS;
      turned(call, row, at, QUERIES, head, rows, E);
      for (long i = 0; i < n; ++i)
        multiply((const Pair*)rows, E / 2, 1, keys + blocks[i] * KEYS * E / 2, KEYS, scores + i * KEYS, line, QUERIES, E / 2, 0, KEYS / 16);
      for (int r = 0; r < QUERIES; ++r) {
        float* s = scores + r * line;
        __m512 most = _mm512_set1_ps(-3e38f);
        for (long v = 0; v < line; v += 16) {
          const __m512 x = _mm512_mul_ps(_mm512_loadu_ps(s + v), _mm512_set1_ps(factor));
          const __m512 shown = _mm512_mask_mov_ps(_mm512_set1_ps(-3e38f), sees(seen[r], blocks[v / KEYS] * KEYS + v % KEYS), x);
          _mm512_storeu_ps(s + v, shown);
          most = _mm512_max_ps(most, shown);
        }
        const float largest = _mm512_reduce_max_ps(most);
        __m512 total = _mm512_setzero_ps();
        for (long v = 0; v < line; v += 16) {
          const __m512 x = _mm512_loadu_ps(s + v);
          const __mmask16 shown = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-3e38f), _CMP_GT_OQ);
          const __m512 y = _mm512_maskz_mov_ps(shown, exponential(_mm512_sub_ps(x, _mm512_set1_ps(largest))));
          _mm512_storeu_ps(s + v, y);
          total = _mm512_add_ps(total, y);
        }
        const float inverse = 1.0f / _mm512_reduce_add_ps(total);
        for (long v = 0; v < line; v += 16) store_rounded(weights + r * line + v, _mm512_mul_ps(_mm512_loadu_ps(s + v), _mm512_set1_ps(inverse)));
        if (at + r < call->tokens) {
          float* kept = call->kept + ((row * call->heads + head) * call->tokens + at + r) * 2;
          kept[0] = largest;
          kept[1] = inverse;
        }
      }
      for (long i = 0; i < n; ++i)
        for (long e = 0; e < E; e += 64)
          multiply((const Pair*)weights + i * KEYS / 2, line / 2, 1, values + blocks[i] * KEYS / 2 * E + e, E, sums + e, E, QUERIES, KEYS / 2, i > 0, 4);
      for (int r = 0; r < QUERIES && at + r < call->tokens; ++r)
        for (long e = 0; e < E; e += 16)
          store_rounded(call->out + ((row * call->tokens + at + r) * call->heads + head) * E + e, _mm512_loadu_ps(sums + r * E + e));
    }
  free(keys), free(values), free(scores), free(weights), free(blocks);
}

// With weights w = softmax(s): dv = w' up, ds = w (up v' - sum(up out)), dq = ds k, dk = ds' q.
INLINE void backward(const Call* call, long task, const long E) {
  const long row = task / call->groups, group = task % call->groups, share = call->heads / call->groups;
  const long padded = (call->tokens + KEYS - 1) / KEYS * KEYS, stride = (call->heads + 2 * call->groups) * E;
  const float factor = inverse_root(E);
  const __m512 by = _mm512_set1_ps(factor);
  Pair* keys = room(2 * padded * E);         // (padded / KEYS, E / 2, KEYS)
  Pair* values = room(2 * padded * E);       // the same
  Pair* keys_by_rows = room(2 * padded * E);  // (padded / 2, E)
  float* d_keys = room(4 * padded * E);
  float* d_values = room(4 * padded * E);
  int32_t* blocks = room(4 * padded / KEYS);
  float* d_gains = call->gains ? call->d_gains + task * 2 * E : 0;
  uint16_t rows[KEYS * E] __attribute__((aligned(64))), above[QUERIES * E] __attribute__((aligned(64)));
  Pair queries[QUERIES / 2 * E] __attribute__((aligned(64))), above_by_rows[QUERIES / 2 * E] __attribute__((aligned(64)));
  float scores[QUERIES * KEYS] __attribute__((aligned(64))), d_weights[QUERIES * KEYS] __attribute__((aligned(64)));
  float d_queries[QUERIES * E] __attribute__((aligned(64)));
  uint16_t gradients[QUERIES * KEYS] __attribute__((aligned(64)));
  Pair weights[QUERIES / 2 * KEYS] __attribute__((aligned(64))), gradients_by_rows[QUERIES / 2 * KEYS] __attribute__((aligned(64)));
  memset(d_keys, 0, 4 * padded * E);
  memset(d_values, 0, 4 * padded * E);
  for (long at = 0; at < padded; at += KEYS) {
    turned(call, row, at, KEYS, call->heads + group, rows, E);
    pair_columns(rows, keys + at * E / 2, E);
    pair_rows(rows, keys_by_rows + at / 2 * E, KEYS, E);
    copied(call, head_of(call, call->qkv, row, 0, call->heads + call->groups + group), stride, at, KEYS, rows, E);
    pair_columns(rows, values + at * E / 2, E);
  }
  for (long head = group * share; head < (group + 1) * share; ++head)
    for (long at = 0; at < call->tokens; at += QUERIES) {
      Seen seen[QUERIES];
      float largest[QUERIES], inverse[QUERIES], shared[QUERIES];
      turned(call, row, at, QUERIES, head, rows, E);
      pair_rows(rows, queries, QUERIES, E);
      const long first = (row * call->tokens * call->heads + head) * E;
      copied(call, call->up + first, call->heads * E, at, QUERIES, above, E);
      pair_rows(above, above_by_rows, QUERIES, E);
      for (int r = 0; r < QUERIES; ++r) {
        seen[r] = seen_of(call, row, at + r);
        largest[r] = inverse[r] = shared[r] = 0;
        if (at + r >= call->tokens) continue;
        const float* kept = call->kept + ((row * call->heads + head) * call->tokens + at + r) * 2;
        largest[r] = kept[0];
        inverse[r] = kept[1];
        __m512 sum = _mm512_setzero_ps();
        for (long e = 0; e < E; e += 16)
          sum = _mm512_fmadd_ps(wide(call->out + first + (at + r) * call->heads * E + e), wide(above + r * E + e), sum);
        shared[r] = _mm512_reduce_add_ps(sum);
      }
      const long n = blocks_of(seen, at, blocks);
      for (long i = 0; i < n; ++i) {
        const long start = blocks[i] * KEYS;
        multiply((const Pair*)rows, E / 2, 1, keys + start * E / 2, KEYS, scores, KEYS, QUERIES, E / 2, 0, KEYS / 16);
        multiply((const Pair*)above, E / 2, 1, values + start * E / 2, KEYS, d_weights, KEYS, QUERIES, E / 2, 0, KEYS / 16);
        for (int r = 0; r < QUERIES; r += 2)
          for (int v = 0; v < KEYS; v += 16) {
            __m256i weight[2], gradient[2];
            for (int j = 0; j < 2; ++j) {
              const long k = (r + j) * KEYS + v;
              const __m512 score = _mm512_fmsub_ps(_mm512_loadu_ps(scores + k), by, _mm512_set1_ps(largest[r + j]));
              const __m512 w = _mm512_maskz_mul_ps(sees(seen[r + j], start + v), exponential(score), _mm512_set1_ps(inverse[r + j]));
              const __m512 d = _mm512_mul_ps(_mm512_mul_ps(w, by), _mm512_sub_ps(_mm512_loadu_ps(d_weights + k), _mm512_set1_ps(shared[r + j])));
              weight[j] = rounded(w);
              gradient[j] = rounded(d);
              _mm256_storeu_si256((__m256i*)(gradients + k), gradient[j]);
            }
            _mm512_storeu_si512(weights + r / 2 * KEYS + v, paired(weight[0], weight[1]));
            _mm512_storeu_si512(gradients_by_rows + r / 2 * KEYS + v, paired(gradient[0], gradient[1]));
          }
        for (long e = 0; e < E; e += 64) {
          multiply(weights, 1, KEYS, above_by_rows + e, E, d_values + start * E + e, E, KEYS, QUERIES / 2, 1, 4);
          multiply(gradients_by_rows, 1, KEYS, queries + e, E, d_keys + start * E + e, E, KEYS, QUERIES / 2, 1, 4);
          multiply((const Pair*)gradients, KEYS / 2, 1, keys_by_rows + start / 2 * E + e, E, d_queries + e, E, QUERIES, KEYS / 2, i > 0, 4);
        }
      }
      for (int r = 0; r < QUERIES && at + r < call->tokens; ++r) turn_back(call, row, at + r, head, d_queries + r * E, d_gains, E);
    }
  for (long i = 0; i < call->tokens; ++i) {
    turn_back(call, row, i, call->heads + group, d_keys + i * E, d_gains + E, E);
    uint16_t* to = (uint16_t*)head_of(call, call->d_qkv, row, i, call->heads + call->groups + group);
    for (long e = 0; e < E; e += 16) store_rounded(to + e, _mm512_loadu_ps(d_values + i * E + e));
  }
  free(keys), free(values), free(keys_by_rows), free(d_keys), free(d_values), free(blocks);
}

// width is 64 or 128
void attention_forward(const Call* call) {
#pragma omp parallel for num_threads(call->threads) if (call->threads > 1) schedule(dynamic)
  for (long task = 0; task < call->rows * call->groups; ++task)
    if (call->width == 64) forward(call, task, 64);
    else forward(call, task, 128);
}

void attention_backward(const Call* call) {
#pragma omp parallel for num_threads(call->threads) if (call->threads > 1) schedule(dynamic)
  for (long task = 0; task < call->rows * call->groups; ++task)
    if (call->width == 64) backward(call, task, 64);
    else backward(call, task, 128);
}
