// Rows times a packed weight, in bfloat16 or float32 (numbers.h): y = x W' + b. A row's numbers do not depend on the rows beside it.
//
// In bfloat16 the weight lies as oneDNN packs it: (out / 64, in / 2, 64, 2), for tiles (out / 32, in / 2, 32, 2); in float32
// (out / 16, in, 16). Memory is read once and in order, with a prefetch ahead of it, where a general product of one row reads it at
// half the speed. Sums are float32; y is rounded once. A processor with tiles (AMX) multiplies 16 rows at once. It sums the even
// numbers and the odd ones of 32 apart, so its last bits differ from those of other processors.
#include <sys/syscall.h>
#include <unistd.h>

#include "numbers.h"

#ifdef FLOAT32
#define VECTORS 2  // of a row's outputs that lie side by side
#else
#define VECTORS 4
#endif
#define OUTPUTS (VECTORS * LANES)
#define AHEAD (8192 / sizeof(Number))  // numbers
#define ROWS 6                         // whose sums stay in registers: VECTORS of each
#define LINE (64 / sizeof(Number))     // numbers of a line of the cache

// OUTPUTS outputs of so many rows, a constant where it is called. bias: as many numbers, or none.
INLINE void block(const int rows, const Number* x, const Number* w, const float* bias, Number* y, long n_in, long n_out) {
  Vector sums[ROWS][VECTORS];
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < VECTORS; ++i) sums[r][i] = bias ? load(bias + LANES * i) : all(0);
  }
  for (long k = 0; k < n_in; k += PAIRED, w += OUTPUTS * PAIRED) {
#pragma GCC unroll 4
    for (long n = 0; n < OUTPUTS * PAIRED; n += LINE) _mm_prefetch((const char*)(w + AHEAD + n), _MM_HINT_T0);
    Pairs weights[VECTORS];
#pragma GCC unroll 4
    for (int i = 0; i < VECTORS; ++i) weights[i] = load_pairs((const Pair*)(w + PAIRED * LANES * i));
#pragma GCC unroll 8
    for (int r = 0; r < rows; ++r) {
      Pair pair;
      memcpy(&pair, x + r * n_in + k, sizeof pair);
#pragma GCC unroll 4
      for (int i = 0; i < VECTORS; ++i) sums[r][i] = add_product(sums[r][i], pair, weights[i]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < rows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < VECTORS; ++i) store_rounded(y + r * n_out + LANES * i, sums[r][i]);
  }
}

static void blocks(long rows, const Number* x, const Number* w, const float* bias, Number* y, long n_in, long n_out) {
  switch (rows) {
    case 1: return block(1, x, w, bias, y, n_in, n_out);
    case 2: return block(2, x, w, bias, y, n_in, n_out);
    case 3: return block(3, x, w, bias, y, n_in, n_out);
    case 4: return block(4, x, w, bias, y, n_in, n_out);
    case 5: return block(5, x, w, bias, y, n_in, n_out);
    default: return block(ROWS, x, w, bias, y, n_in, n_out);
  }
}

// ---- in tiles

#if !defined(FLOAT32) && (defined(__clang__) || __GNUC__ >= 11)  // compilers that know tiles

#define HALF 32  // outputs that lie side by side for tiles
#define SIDE 16  // rows of a tile, and its outputs; it takes 32 numbers of a row at a time

static int tiles_run_here(void) {
  const long ask = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM: the kernel then keeps tiles of this process
  return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") && !syscall(SYS_arch_prctl, ask, tile_data);
}

typedef struct {
  uint8_t palette, start, none[14];
  uint16_t bytes[16];  // of a row of each tile
  uint8_t rows[16];
} Tiles;

// Tiles 0 to 3 hold sums, 4 and 5 rows (the second of them those behind 16), 6 and 7 weights.
__attribute__((target("amx-tile"))) static void prepare(long rows) {
  const long first = rows < SIDE ? rows : SIDE, second = rows - first;
  Tiles tiles = {.palette = 1};
  for (int i = 0; i < 8; ++i) {
    const int behind = second && (i == 2 || i == 3 || i == 5);
    tiles.bytes[i] = 64;
    tiles.rows[i] = i >= 6 ? SIDE : behind ? second : first;
  }
  _tile_loadconfig(&tiles);
}

// sums (rows, 64), rounded.
static void finish(const float* sums, const float* bias, uint16_t* y, long rows, long n_out) {
  for (long r = 0; r < rows; ++r) {
    for (int i = 0; i < 64; i += LANES) {
      Vector sum = load(sums + r * 64 + i);
      if (bias) sum += load(bias + i);
      store_rounded(y + r * n_out + i, sum);
    }
  }
}

// 64 outputs of at most 16 rows.
__attribute__((target("amx-tile,amx-bf16"))) static void few_in_tiles(const uint16_t* x, const uint16_t* w, float* sums, long n_in) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (long k = 0; k < n_in; k += 32) {
    const uint16_t *const here = w + k * HALF, *const next = here + n_in * HALF;
    for (int line = 0; line < 32; ++line) {
      _mm_prefetch((const char*)(here + AHEAD / 2 + 32 * line), _MM_HINT_T0);
      _mm_prefetch((const char*)(next + AHEAD / 2 + 32 * line), _MM_HINT_T0);
    }
    _tile_loadd(4, x + k, n_in * 2);
    _tile_loadd(6, here, 4 * HALF);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, here + HALF, 4 * HALF);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(6, next, 4 * HALF);
    _tile_dpbf16ps(2, 4, 6);
    _tile_loadd(7, next + HALF, 4 * HALF);
    _tile_dpbf16ps(3, 4, 7);
  }
  _tile_stored(0, sums, 256);
  _tile_stored(1, sums + 16, 256);
  _tile_stored(2, sums + 32, 256);
  _tile_stored(3, sums + 48, 256);
}

// 64 outputs of 17 to 32 rows, 32 after 32.
__attribute__((target("amx-tile,amx-bf16"))) static void many_in_tiles(const uint16_t* x, const uint16_t* w, float* sums, long n_in) {
  const uint16_t* const behind = x + SIDE * n_in;
  for (int half = 0; half < 64; half += HALF, w += n_in * HALF, sums += HALF) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long k = 0; k < n_in; k += 32) {
      const uint16_t* const here = w + k * HALF;
      for (int line = 0; line < 32; ++line) _mm_prefetch((const char*)(here + AHEAD / 2 + 32 * line), _MM_HINT_T0);
      _tile_loadd(4, x + k, n_in * 2);
      _tile_loadd(6, here, 4 * HALF);
      _tile_loadd(7, here + HALF, 4 * HALF);
      _tile_loadd(5, behind + k, n_in * 2);
      _tile_dpbf16ps(0, 4, 6);
      _tile_dpbf16ps(1, 4, 7);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, 256);
    _tile_stored(1, sums + 16, 256);
    _tile_stored(2, sums + SIDE * 64, 256);
    _tile_stored(3, sums + SIDE * 64 + 16, 256);
  }
}

__attribute__((target("amx-tile"))) static void product_in_tiles(const uint16_t* x, const uint16_t* w, const float* bias, uint16_t* y,
                                                                  long rows, long n_in, long n_out, int threads) {
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    float sums[2 * SIDE * 64] __attribute__((aligned(64)));
    long prepared = 0;
#pragma omp for collapse(2)
    for (long o = 0; o < n_out; o += 64) {
      for (long from = 0; from < rows; from += 2 * SIDE) {
        const long n = rows - from < 2 * SIDE ? rows - from : 2 * SIDE;
        if (n != prepared) prepare(prepared = n);
        (n > SIDE ? many_in_tiles : few_in_tiles)(x + from * n_in, w + o * n_in, sums, n_in);
        finish(sums, bias ? bias + o : 0, y + from * n_out + o, n, n_out);
      }
    }
    _tile_release();
  }
}

#else

static int tiles_run_here(void) { return 0; }

static void product_in_tiles(const Number* x, const Number* w, const float* bias, Number* y, long rows, long n_in, long n_out,
                             int threads) {}

#endif

// ---- either way

int in_tiles;  // which one: `product_runs_here` finds out

// (n_out, pairs) -> (n_out / abreast, pairs, abreast): so many outputs side by side.
void pack(const Pair* w, Pair* packed, long n_out, long pairs, long abreast, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (long o = 0; o < n_out; o += abreast) {
    const Pair* const from = w + o * pairs;
    Pair* const to = packed + o * pairs;
    for (long few = 0; few < pairs; few += 16) {  // a line of the cache of each output
      for (long i = 0; i < abreast; ++i) {
        for (long k = few; k < few + 16 && k < pairs; ++k) to[k * abreast + i] = from[i * pairs + k];
      }
    }
  }
}

int product_runs_here(void) {
  in_tiles = tiles_run_here();
  return runs_here();
}

// x (rows, n_in), n_in a multiple of 32; y (rows, n_out), n_out a multiple of 64; bias (n_out) in float32, or none.
void product(const Number* x, const Number* w, const float* bias, Number* y, long rows, long n_in, long n_out, int threads) {
  if (in_tiles) return product_in_tiles(x, w, bias, y, rows, n_in, n_out, threads);
  const long groups = (rows + ROWS - 1) / ROWS;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (long o = 0; o < n_out; o += OUTPUTS) {
    for (long g = 0; g < groups; ++g) {  // of equal size but for one row
      const long from = g * rows / groups, n = (g + 1) * rows / groups - from;
      blocks(n, x + from * n_in, w + o * n_in, bias ? bias + o : 0, y + from * n_out + o, n_in, n_out);
    }
  }
}
