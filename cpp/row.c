// One new token of each row through all blocks of the model, as codechat/models/fast/one_token.py computes it, so that Python
// makes one call a step. Products (product.c), keys and values are of bfloat16 or float32 (numbers.h), the residual of float32. What
// a row becomes does not depend on the rows beside it.
//
// B rows, D width, H heads, K key-value heads, E head width, F hidden width; D, E and F are multiples of 16.
#include <omp.h>
#include <stdlib.h>

#include "numbers.h"

void product(const Number* x, const Number* w, const float* bias, Number* y, long rows, long n_in, long n_out, int threads);

typedef struct {
  long depth, width, heads, kv_heads, head_width, hidden;
  int gated;  // SwiGLU, of which `up` makes h and gate; else squared ReLU
  float eps;
} Shape;

typedef struct {
  const float *attn_norm, *mlp_norm;      // (D)
  const float *gain, *bias;               // of normed queries and keys (H + K, E), of qkv ((H + 2 K) E); or none
  const Number *qkv, *out, *up, *down;  // as product.c reads them
} Layer;

typedef struct {
  Number* const* blocks;          // of each block: keys, then values, in each head E numbers a token
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

// ---- what stands between products

static float inverse_rms(const float* x, long n, float eps) {
  Vector squares = all(0);
  for (long i = 0; i < n; i += LANES) squares = times_plus(load(x + i), load(x + i), squares);
  return inverse_root(sum_of(squares) / n + eps);
}

static void norm(const float* x, const float* gain, Number* y, long n, float eps) {
  const Vector scale = all(inverse_rms(x, n, eps));
  for (long i = 0; i < n; i += LANES) store_rounded(y + i, load(x + i) * scale * load(gain + i));
}

static void add(float* x, const Number* y, long n) {
  for (long i = 0; i < n; i += LANES) store(x + i, load(x + i) + wide(y + i));
}

// A query or key, normed where there is a gain, turned by its position, and rounded.
static void turn(const Number* x, const float* gain, const float* cos, const float* sin, Number* y, long n_e, float eps) {
  float made[n_e], turned[n_e];
  const long half = n_e / 2;
  for (long e = 0; e < n_e; e += LANES) store(made + e, wide(x + e));
  const float scale = gain ? inverse_rms(made, n_e, eps) : 1;
  for (long e = 0; gain && e < n_e; ++e) made[e] *= scale * gain[e];
  for (long e = 0; e < half; ++e) {
    turned[e] = made[e] * cos[e] + made[e + half] * sin[e];
    turned[e + half] = made[e + half] * cos[e + half] + made[e] * sin[e + half];
  }
  for (long e = 0; e < n_e; e += LANES) store_rounded(y + e, load(turned + e));
}

// ---- attention

// p (G, room): q k / root of G queries and n keys, four keys at once; minus infinity where a key is not attended to, and
// behind the last up to a whole vector. real: which keys are attended to; none = all.
static void score(const Number* q, const Number* k, const uint8_t* real, float* p, long n_g, long room, long n, long n_e) {
  const Vector root = all(1 / __builtin_sqrtf(n_e)), nothing = all(-__builtin_inff());
  for (long t = 0; t < n; t += 4) {
    const Number* keys[4];
    for (int i = 0; i < 4; ++i) keys[i] = k + (t + i < n ? t + i : n - 1) * n_e;
    for (long g = 0; g < n_g; ++g) {
      Vector sums[4] = {all(0), all(0), all(0), all(0)};
      long e = 0;
      for (; e + PAIRED * LANES <= n_e; e += PAIRED * LANES) {
        const Pairs query = load_pairs((const Pair*)(q + g * n_e + e));
        for (int i = 0; i < 4; ++i) sums[i] = add_products(sums[i], query, load_pairs((const Pair*)(keys[i] + e)));
      }
      for (int i = 0; i < 4 && e < n_e; ++i) sums[i] = times_plus(wide(q + g * n_e + e), wide(keys[i] + e), sums[i]);
      _mm_storeu_ps(p + g * room + t, four_sums(sums));
    }
  }
  for (long t = 0; t < n; t += LANES) {
    const Mask here = real ? flagged(real + t, n - t) : between(t, 0, n);
    for (float* to = p + t; to < p + n_g * room; to += room) store(to, chosen(here, load(to) * root, nothing));
  }
}

// p (n): the softmax but for a factor, which is returned. A score that is NaN stays NaN. Summed in double: where among the lanes
// a token stands depends on the rows beside it, and must not change the sum.
static float softmax(float* p, long n) {
  const Vector nothing = all(-__builtin_inff());
  Vector largest = nothing;
  for (long t = 0; t < n; t += LANES) largest = larger(largest, load(p + t));
  const Vector most = all(largest_of(largest));
  Doubles total = no_doubles();
  for (long t = 0; t < n; t += LANES) {
    const Vector x = load(p + t);
    const Vector mass = chosen(at_least(nothing, x), all(0), exponential(x - most));
    store(p + t, mass);
    total += in_doubles(mass);
  }
  return 1 / (float)sum_of_doubles(total);
}

// sums (G, E) += p v of n tokens, in the order of memory; four at once, since the sums do not stay in registers.
static void add_values(const float* p, const Number* v, float* sums, long n_g, long room, long n, long n_e) {
  for (long t = 0; t < n; t += 4) {
    const long there = n - t < 4 ? n - t : 4;
    for (long e = 0; e < n_e; e += LANES) {
      Vector values[4];
      for (int i = 0; i < 4; ++i) values[i] = i < there ? wide(v + (t + i) * n_e + e) : all(0);
      for (long g = 0; g < n_g; ++g) {
        Vector sum = load(sums + g * n_e + e);
        for (int i = 0; i < 4; ++i) sum = times_plus(all(p[g * room + t + i]), values[i], sum);
        store(sums + g * n_e + e, sum);
      }
    }
  }
}

static long in_vectors(long n) { return (n + LANES - 1) / LANES * LANES; }

static const uint8_t* real_of(const Kept* kept, long row) { return kept->real ? kept->real + row * kept->to_real : 0; }

// y (G, E): the attention of G queries of row b, which share a key head, to its prefix and to its own tokens.
// p: room for G times the tokens of both, each up to a whole vector.
static void attend(const Shape* s, const Place* place, long block, long b, long head, long n_g, const Number* q, float* p,
                        Number* y) {
  const Kept *const own = &place->own, *const prefix = &place->prefix;
  const long E = s->head_width, n_prefix = place->n_prefix, n_own = place->columns[b] + 1;
  const long behind = in_vectors(n_prefix), room = behind + in_vectors(n_own), owner = n_prefix ? place->owner[b] : 0;
  const long slot = place->slots[b];
  const Number* const k = own->blocks[block] + slot * own->to_row + head * own->to_head;
  float sums[n_g * E];
  for (long e = 0; e < n_g * E; e += LANES) store(sums + e, all(0));
  const Number* const past = n_prefix ? prefix->blocks[block] + owner * prefix->to_row + head * prefix->to_head : 0;
  if (past) score(q, past, real_of(prefix, owner), p, n_g, room, n_prefix, E);
  score(q, k, real_of(own, slot), p + behind, n_g, room, n_own, E);
  float shares[n_g];
  for (long g = 0; g < n_g; ++g) shares[g] = softmax(p + g * room, room);
  if (past) add_values(p, past + prefix->to_values, sums, n_g, room, n_prefix, E);
  add_values(p + behind, k + own->to_values, sums, n_g, room, n_own, E);
  for (long e = 0; e < n_g * E; e += LANES) store_rounded(y + e, load(sums + e) * all(shares[e / E]));
}

// ---- the MLP

// The hidden units (F) of what `up` made: of h and gate (2 F), or of h (F). Each step is rounded, as torch's are.
static void activate(const Number* made, Number* y, long n, int gated) {
  for (long i = 0; i < n; i += LANES) {
    const Vector h = wide(made + i);
    if (gated) {
      const Vector gate = wide(made + n + i);
      store_rounded(y + i, as_rounded(gate * sigmoid(gate)) * h);
    } else {
      const Vector kept = larger(h, all(0));
      store_rounded(y + i, kept * kept);
    }
  }
}

// ---- the rows

// What a row's products made of its token: turned queries, and keys and values where they are kept.
static void keep(const Shape* s, const Layer* layer, const Place* place, long block, long b, const Number* made, Number* q) {
  const long H = s->heads, K = s->kv_heads, E = s->head_width;
  const float *const cos = place->cos + b * E, *const sin = place->sin + b * E;
  const Kept* const own = &place->own;
  Number* const keys = own->blocks[block] + place->slots[b] * own->to_row + place->columns[b] * E;
  for (long h = 0; h < H + K; ++h) {
    Number* const to = h < H ? q + h * E : keys + (h - H) * own->to_head;
    turn(made + h * E, layer->gain ? layer->gain + h * E : 0, cos, sin, to, E, s->eps);
  }
  for (long k = 0; k < K; ++k) {
    memcpy(keys + own->to_values + k * own->to_head, made + (H + K + k) * E, E * sizeof *keys);
  }
}

// x (B, D): the embeddings of the tokens, then their states before the last norm. Their keys and values are stored.
void rows(const Shape* s, const Layer* layers, const Place* place, float* x, int threads) {
  const long B = place->rows, D = s->width, H = s->heads, K = s->kv_heads, E = s->head_width, F = s->hidden;
  const long n_up = s->gated ? 2 * F : F, n_qkv = (H + 2 * K) * E;
  const long n_made = n_qkv > n_up ? n_qkv : n_up, n_inner = H * E > F ? H * E : F;
  const int apart = threads > 1 && B > 1;  // whether threads share the rows
  long longest = 0;
  for (long b = 0; b < B; ++b) longest = place->columns[b] > longest ? place->columns[b] : longest;
  const long abreast = B * K < 2 * threads ? 1 : H / K;  // queries that read a key together
  const long room = abreast * (in_vectors(place->n_prefix) + in_vectors(longest + 1));
  float* const p = malloc(threads * room * sizeof(float));
  const long size = B * (2 * D + H * E + n_made + n_inner) * sizeof(Number);
  // at a line of the cache: a tile that begins elsewhere is read from twice as many
  Number* const normed = aligned_alloc(64, (size + 63) / 64 * 64);
  Number *const y = normed + B * D, *const q = y + B * D, *const made = q + B * H * E, *const inner = made + B * n_made;
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
