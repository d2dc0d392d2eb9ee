// The numbers that training.c, row.c and product.c compute with: bfloat16 in vectors of 16, for processors that multiply it (AVX-512 BF16); with
// FLOAT32 float in vectors of 8, for all others (AVX2 and FMA). Sums are float in both.
//
// A pair is what one instruction multiplies and adds: two numbers of bfloat16, neighbours of a row or of a column; one float.
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

#ifdef FLOAT32

#pragma GCC target("avx2,fma")

#define LANES 8    // of a vector
#define PAIRED 1   // numbers of a pair
#define SUMS 8     // vectors that one product sums in at once
#define ABREAST 2  // of them in a row, at most

typedef float Number;
typedef float Pair;
typedef __m256 Vector;
typedef __m256 Pairs;
typedef __m256 Mask;

INLINE int runs_here(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

INLINE Vector all(float x) { return _mm256_set1_ps(x); }
INLINE Vector load(const float* x) { return _mm256_loadu_ps(x); }
INLINE void store(float* to, Vector x) { _mm256_storeu_ps(to, x); }
INLINE Vector times_plus(Vector x, Vector y, Vector z) { return _mm256_fmadd_ps(x, y, z); }
INLINE Vector minus_times(Vector z, Vector x, Vector y) { return _mm256_fnmadd_ps(x, y, z); }
INLINE Vector larger(Vector x, Vector y) { return _mm256_max_ps(x, y); }
INLINE Vector chosen(Mask mask, Vector x, Vector y) { return _mm256_blendv_ps(y, x, mask); }
INLINE Mask at_least(Vector x, Vector y) { return _mm256_cmp_ps(x, y, _CMP_GE_OQ); }
INLINE Mask either(Mask x, Mask y) { return _mm256_or_ps(x, y); }
INLINE Vector whole(Vector x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

// whether first <= at + lane < end
INLINE Mask between(long at, int32_t first, int32_t end) {
  const __m256i lane = _mm256_add_epi32(_mm256_set1_epi32((int)at), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  const __m256i early = _mm256_cmpgt_epi32(_mm256_set1_epi32(first), lane);
  return _mm256_castsi256_ps(_mm256_andnot_si256(early, _mm256_cmpgt_epi32(_mm256_set1_epi32(end), lane)));
}

// whether one of the first n bytes, at most LANES, is there and is not 0
INLINE Mask flagged(const uint8_t* flags, long n) {
  uint64_t bytes = 0;
  memcpy(&bytes, flags, n < LANES ? n : LANES);
  const __m256i numbers = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128((int64_t)bytes));
  return _mm256_castsi256_ps(_mm256_cmpgt_epi32(numbers, _mm256_setzero_si256()));
}

// y 2^n for whole n from -126 to 127
INLINE Vector scaled_by_power(Vector y, Vector n) {
  return y * _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}

INLINE __m128 halves(Vector x) { return _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)); }

INLINE float sum_of(Vector x) {
  const __m128 four = halves(x), two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// the sums of each of four vectors
INLINE __m128 four_sums(const Vector x[4]) {
  const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
  return halves(all);
}

typedef __m256d Doubles;
INLINE Doubles no_doubles(void) { return _mm256_setzero_pd(); }
INLINE Doubles in_doubles(Vector x) { return _mm256_cvtps_pd(_mm256_castps256_ps128(x)) + _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)); }

INLINE double sum_of_doubles(Doubles x) {
  const __m128d two = _mm256_castpd256_pd128(x) + _mm256_extractf128_pd(x, 1);
  return _mm_cvtsd_f64(two) + _mm_cvtsd_f64(_mm_unpackhi_pd(two, two));
}

INLINE float largest_of(Vector x) {
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1)), two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

INLINE Vector wide(const Number* x) { return load(x); }
INLINE void store_rounded(Number* to, Vector x) { store(to, x); }
INLINE Vector as_rounded(Vector x) { return x; }

INLINE Pairs load_pairs(const Pair* x) { return load(x); }
INLINE Pairs all_pairs(Pair x) { return all(x); }
INLINE Vector add_products(Vector sum, Pairs left, Pairs right) { return times_plus(left, right, sum); }

// LANES pairs of two neighbouring rows, n columns each
INLINE void pair_lanes(const Number* x, long n, Pair* to) { store(to, load(x)); }

#else

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")

#define LANES 16
#define PAIRED 2
#define SUMS 16
#define ABREAST 4

typedef uint16_t Number;
typedef uint32_t __attribute__((may_alias)) Pair;
typedef __m512 Vector;
typedef __m512i Pairs;
typedef __mmask16 Mask;

INLINE int runs_here(void) {
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512dq");
}

INLINE Vector all(float x) { return _mm512_set1_ps(x); }
INLINE Vector load(const float* x) { return _mm512_loadu_ps(x); }
INLINE void store(float* to, Vector x) { _mm512_storeu_ps(to, x); }
INLINE Vector times_plus(Vector x, Vector y, Vector z) { return _mm512_fmadd_ps(x, y, z); }
INLINE Vector minus_times(Vector z, Vector x, Vector y) { return _mm512_fnmadd_ps(x, y, z); }
INLINE Vector larger(Vector x, Vector y) { return _mm512_max_ps(x, y); }
INLINE Vector chosen(Mask mask, Vector x, Vector y) { return _mm512_mask_mov_ps(y, mask, x); }
INLINE Mask at_least(Vector x, Vector y) { return _mm512_cmp_ps_mask(x, y, _CMP_GE_OQ); }
INLINE Mask either(Mask x, Mask y) { return x | y; }
INLINE Vector whole(Vector x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

INLINE Mask between(long at, int32_t first, int32_t end) {
  const __m512i counted = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i lane = _mm512_add_epi32(_mm512_set1_epi32((int)at), counted);
  return _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(first)) & _mm512_cmplt_epi32_mask(lane, _mm512_set1_epi32(end));
}

INLINE Mask flagged(const uint8_t* flags, long n) {
  const __mmask16 there = n < LANES ? (1u << n) - 1 : 0xffff;
  const __m128i found = _mm_maskz_loadu_epi8(there, flags);
  return _mm_test_epi8_mask(found, found);
}

INLINE __m128 four_sums(const Vector x[4]) {
  const __m512 first = _mm512_unpacklo_ps(x[0], x[1]) + _mm512_unpackhi_ps(x[0], x[1]);
  const __m512 second = _mm512_unpacklo_ps(x[2], x[3]) + _mm512_unpackhi_ps(x[2], x[3]);
  const __m512d a = _mm512_castps_pd(first), b = _mm512_castps_pd(second);
  const __m512 all = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)) + _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
  const __m256 half = _mm512_castps512_ps256(all) + _mm512_extractf32x8_ps(all, 1);
  return _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1);
}

typedef __m512d Doubles;
INLINE Doubles no_doubles(void) { return _mm512_setzero_pd(); }
INLINE Doubles in_doubles(Vector x) { return _mm512_cvtps_pd(_mm512_castps512_ps256(x)) + _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1)); }
INLINE double sum_of_doubles(Doubles x) { return _mm512_reduce_add_pd(x); }

INLINE Vector scaled_by_power(Vector y, Vector n) { return _mm512_scalef_ps(y, n); }
INLINE float sum_of(Vector x) { return _mm512_reduce_add_ps(x); }
INLINE float largest_of(Vector x) { return _mm512_reduce_max_ps(x); }

INLINE Vector widened(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }
INLINE __m256i rounded(Vector x) { return (__m256i)_mm512_cvtneps_pbh(x); }
INLINE Vector wide(const Number* x) { return widened(_mm256_loadu_si256((const __m256i*)x)); }
INLINE void store_rounded(Number* to, Vector x) { _mm256_storeu_si256((__m256i*)to, rounded(x)); }
INLINE Vector as_rounded(Vector x) { return widened(rounded(x)); }

INLINE Pairs load_pairs(const Pair* x) { return _mm512_loadu_si512(x); }
INLINE Pairs all_pairs(Pair x) { return _mm512_set1_epi32((int)x); }
INLINE Vector add_products(Vector sum, Pairs left, Pairs right) { return _mm512_dpbf16_ps(sum, (__m512bh)left, (__m512bh)right); }

INLINE void pair_lanes(const Number* x, long n, Pair* to) {
  const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x));
  const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(x + n)));
  _mm512_storeu_si512(to, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}

#endif

INLINE float inverse_root(float x) { return 1.0f / _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(x))); }

// exp(x) for x <= 0, to 2 units in the last place: 2^n times a polynomial. Below -87 it is that of -87, 1e-38; of NaN it is NaN.
INLINE Vector exponential(Vector x) {
  const Vector near = larger(all(-87.0f), x);  // of a number and NaN the second
  const Vector n = whole(near * all(1.44269504f));
  Vector r = minus_times(near, n, all(0.693359375f));
  r = minus_times(r, n, all(-2.12194440e-4f));
  Vector y = all(1.9875691500e-4f);
  y = times_plus(y, r, all(1.3981999507e-3f));
  y = times_plus(y, r, all(8.3334519073e-3f));
  y = times_plus(y, r, all(4.1665795894e-2f));
  y = times_plus(y, r, all(1.6666665459e-1f));
  y = times_plus(y, r, all(5.0000001201e-1f));
  y = times_plus(y * r, r, r + all(1.0f));
  return scaled_by_power(y, n);
}

INLINE Vector add_product(Vector sum, Pair left, Pairs right) { return add_products(sum, all_pairs(left), right); }

INLINE Vector sigmoid(Vector x) {
  const Vector one = all(1), small = exponential(larger(x, -x) * all(-1));
  return chosen(at_least(x, all(0)), one, small) / (small + one);
}
