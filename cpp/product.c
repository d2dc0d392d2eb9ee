// One row times a packed weight, in bfloat16: y = x W' + b. Memory is read once and in order, with a prefetch ahead of it,
// where a general product of one row reads it at half the speed.
//
// The weight lies as oneDNN packs it: (out / 64, in / 2, 64, 2). Sums are float32, of even and odd pairs apart; y is rounded once.
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define AHEAD 4096  // numbers, 8 KB

int product_runs_here(void) { return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw"); }

__attribute__((target("avx512f,avx512bw,avx512bf16"))) static __m512bh pair_at(const uint16_t* x) {
  int32_t pair;
  memcpy(&pair, x, sizeof pair);
  return (__m512bh)_mm512_set1_epi32(pair);
}

// 64 outputs. bias: 64 numbers, or none.
__attribute__((target("avx512f,avx512bw,avx512bf16"))) static void block(const uint16_t* x, const uint16_t* w, const float* bias,
                                                                          uint16_t* y, long n_in) {
  __m512 even[4], odd[4];
  for (int i = 0; i < 4; ++i) {
    even[i] = bias ? _mm512_loadu_ps(bias + 16 * i) : _mm512_setzero_ps();
    odd[i] = _mm512_setzero_ps();
  }
  for (long k = 0; k < n_in; k += 4, w += 256) {
    for (int line = 0; line < 8; ++line) _mm_prefetch((const char*)(w + AHEAD + 32 * line), _MM_HINT_T0);
    const __m512bh first = pair_at(x + k), second = pair_at(x + k + 2);
    for (int i = 0; i < 4; ++i) {
      even[i] = _mm512_dpbf16_ps(even[i], (__m512bh)_mm512_loadu_si512(w + 32 * i), first);
      odd[i] = _mm512_dpbf16_ps(odd[i], (__m512bh)_mm512_loadu_si512(w + 128 + 32 * i), second);
    }
  }
  for (int i = 0; i < 4; ++i) {
    const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_add_ps(even[i], odd[i]));
    memcpy(y + 16 * i, &rounded, sizeof rounded);
  }
}

// x (n_in), n_in a multiple of 4; y (n_out), n_out a multiple of 64; bias (n_out) in float32, or none.
void product(const uint16_t* x, const uint16_t* w, const float* bias, uint16_t* y, long n_in, long n_out, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (long o = 0; o < n_out; o += 64) block(x, w + o * n_in, bias ? bias + o : 0, y + o, n_in);
}
