// Rows times a packed weight, in bfloat16: y = x W' + b. A row's numbers do not depend on the rows beside it.
//
// The weight lies as oneDNN packs it: (out / 64, in / 2, 64, 2). Memory is read once and in order, with a prefetch ahead of it,
// where a general product of one row reads it at half the speed. Sums are float32, one pair of numbers after another; y is
// rounded once.
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define AHEAD 4096  // numbers, 8 KB
#define ABREAST 6   // rows whose sums stay in registers: 4 of each, of 32

int product_runs_here(void) {
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}

// 64 outputs of so many rows, a constant where it is called. bias: 64 numbers, or none.
__attribute__((target("avx512f,avx512bw,avx512bf16"), always_inline)) static inline void block(
    const int rows, const uint16_t* x, const uint16_t* w, const float* bias, uint16_t* y, long n_in, long n_out) {
  __m512 sums[ABREAST][4];
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) sums[r][i] = bias ? _mm512_loadu_ps(bias + 16 * i) : _mm512_setzero_ps();
  }
  for (long k = 0; k < n_in; k += 2, w += 128) {
#pragma GCC unroll 4
    for (int line = 0; line < 4; ++line) _mm_prefetch((const char*)(w + AHEAD + 32 * line), _MM_HINT_T0);
    __m512bh weights[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) weights[i] = (__m512bh)_mm512_loadu_si512(w + 32 * i);
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      int32_t pair;
      memcpy(&pair, x + r * n_in + k, sizeof pair);
      const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) sums[r][i] = _mm512_dpbf16_ps(sums[r][i], weights[i], both);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m256bh rounded = _mm512_cvtneps_pbh(sums[r][i]);
      memcpy(y + r * n_out + 16 * i, &rounded, sizeof rounded);
    }
  }
}

__attribute__((target("avx512f,avx512bw,avx512bf16"))) static void blocks(long rows, const uint16_t* x, const uint16_t* w,
                                                                           const float* bias, uint16_t* y, long n_in, long n_out) {
  switch (rows) {
    case 1: return block(1, x, w, bias, y, n_in, n_out);
    case 2: return block(2, x, w, bias, y, n_in, n_out);
    case 3: return block(3, x, w, bias, y, n_in, n_out);
    case 4: return block(4, x, w, bias, y, n_in, n_out);
    case 5: return block(5, x, w, bias, y, n_in, n_out);
    default: return block(ABREAST, x, w, bias, y, n_in, n_out);
  }
}

// x (rows, n_in), n_in a multiple of 2; y (rows, n_out), n_out a multiple of 64; bias (n_out) in float32, or none.
void product(const uint16_t* x, const uint16_t* w, const float* bias, uint16_t* y, long rows, long n_in, long n_out, int threads) {
  const long groups = (rows + ABREAST - 1) / ABREAST;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (long o = 0; o < n_out; o += 64) {
    for (long g = 0; g < groups; ++g) {  // of equal size but for one row
      const long from = g * rows / groups, n = (g + 1) * rows / groups - from;
      blocks(n, x + from * n_in, w + o * n_in, bias ? bias + o : 0, y + from * n_out + o, n_in, n_out);
    }
  }
}
