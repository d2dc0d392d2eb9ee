// One new token of one row through all blocks of the model, as codechat/models/fast/one_token.py computes it, so that Python
// makes one call a token. Products are of bfloat16 (product.c), the residual and the cache float32.
//
// D width, H heads, K key-value heads, E head width, F hidden width; D, E and F are multiples of 16.
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>

#define WIDE __attribute__((target("avx512f,avx512bw,avx512bf16")))

void product(const uint16_t* x, const uint16_t* w, const float* bias, uint16_t* y, long n_in, long n_out, int threads);

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
  const float *cos, *sin;   // (E) of the new token
  float* const* kept;       // of each block: keys, then values, in each head E numbers a token
  long to_values, to_head;  // from keys to values, and from a head to the next
  long position;            // of the new token
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
WIDE static void turn(const uint16_t* x, const float* gain, const Place* place, float* y, long n_e, float eps) {
  float wide[n_e];
  for (long e = 0; e < n_e; e += 16) _mm512_storeu_ps(wide + e, load(x + e));
  const float scale = gain ? inverse_rms(wide, n_e, eps) : 1;
  for (long e = 0; gain && e < n_e; ++e) wide[e] *= scale * gain[e];
  for (long e = 0; e < n_e; ++e) y[e] = wide[e] * place->cos[e] + wide[(e + n_e / 2) % n_e] * place->sin[e];
  for (long e = 0; e < n_e; e += 16) _mm512_storeu_ps(y + e, widened(narrowed(_mm512_loadu_ps(y + e))));
}

// A head's attention to n tokens. p: room for n numbers, up to a multiple of 16.
WIDE static void attend(const float* q, const float* k, const float* v, float* p, uint16_t* y, long n, long n_e) {
  const float root = 1 / __builtin_sqrtf(n_e);
  float most = -__builtin_inff();
  for (long t = 0; t < n; ++t) {
    __m512 sum = _mm512_setzero_ps();
    for (long e = 0; e < n_e; e += 16) sum = _mm512_fmadd_ps(_mm512_loadu_ps(q + e), _mm512_loadu_ps(k + t * n_e + e), sum);
    p[t] = _mm512_reduce_add_ps(sum) * root;
    most = p[t] > most ? p[t] : most;
  }
  __m512 total = _mm512_setzero_ps();
  for (long t = 0; t < n; t += 16) {
    const __mmask16 real = n - t < 16 ? (1u << (n - t)) - 1 : 0xffff;
    const __m512 mass = _mm512_maskz_mov_ps(real, exponential(_mm512_loadu_ps(p + t) - _mm512_set1_ps(most)));
    _mm512_storeu_ps(p + t, mass);
    total += mass;
  }
  // row by row, as they lie in memory; four at once, since the sums do not stay in registers
  float sums[n_e];
  for (long e = 0; e < n_e; e += 16) _mm512_storeu_ps(sums + e, _mm512_setzero_ps());
  for (long t = 0; t < n; t += 4) {
    for (long e = 0; e < n_e; e += 16) {
      __m512 sum = _mm512_loadu_ps(sums + e);
      for (long i = t; i < t + 4 && i < n; ++i) {
        sum = _mm512_fmadd_ps(_mm512_set1_ps(p[i]), _mm512_loadu_ps(v + i * n_e + e), sum);
      }
      _mm512_storeu_ps(sums + e, sum);
    }
  }
  const __m512 share = _mm512_set1_ps(1 / _mm512_reduce_add_ps(total));
  for (long e = 0; e < n_e; e += 16) store(y + e, _mm512_loadu_ps(sums + e) * share);
}

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

// x (D): the token's embedding, then its state before the last norm. Its keys and values are stored.
WIDE void row(const Shape* s, const Layer* layers, const Place* place, float* x, int threads) {
  const long D = s->width, H = s->heads, K = s->kv_heads, E = s->head_width, F = s->hidden;
  const long n = place->position + 1, room = (n + 15) / 16 * 16;
  const long made = (H + 2 * K) * E > 2 * F ? (H + 2 * K) * E : 2 * F, inner = H * E > F ? H * E : F;
  float* const q = malloc((H * E + H * room) * sizeof(float));
  float* const p = q + H * E;
  uint16_t* const normed = malloc((2 * D + made + inner) * sizeof(uint16_t));
  uint16_t *const y = normed + D, *const wide = y + D, *const hidden = wide + made;
  for (const Layer* layer = layers; layer < layers + s->depth; ++layer) {
    float* const keys = place->kept[layer - layers];
    norm(x, layer->attn_norm, normed, D, s->eps);
    product(normed, layer->qkv, layer->bias, wide, D, (H + 2 * K) * E, threads);
    for (long h = 0; h < H + K; ++h) {
      float* const to = h < H ? q + h * E : keys + (h - H) * place->to_head + place->position * E;
      turn(wide + h * E, layer->gain ? layer->gain + h * E : 0, place, to, E, s->eps);
    }
    for (long i = 0; i < K * E; i += 16) {
      float* const values = keys + place->to_values + i / E * place->to_head + place->position * E;
      _mm512_storeu_ps(values + i % E, load(wide + (H + K) * E + i));
    }
#pragma omp parallel for num_threads(threads) if (threads > 1)
    for (long h = 0; h < H; ++h) {
      const float* const k = keys + h / (H / K) * place->to_head;
      attend(q + h * E, k, k + place->to_values, p + h * room, hidden + h * E, n, E);
    }
    product(hidden, layer->out, 0, y, H * E, D, threads);
    add(x, y, D);
    norm(x, layer->mlp_norm, normed, D, s->eps);
    product(normed, layer->up, 0, wide, D, s->gated ? 2 * F : F, threads);
    activate(wide, hidden, F, s->gated);
    product(hidden, layer->down, 0, y, F, D, threads);
    add(x, y, D);
  }
  free(normed);
  free(q);
}
