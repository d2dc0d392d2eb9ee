// What stands between the products of a training step on a CPU (codechat/models/fast/fused.py), a pass over memory each way:
// RMSNorm, the squared ReLU, SwiGLU, and attention: queries and keys normed and turned, scores, softmax and the weighted sum. Scores
// that no query sees are not computed, and no score leaves the cache.
//
// In bfloat16 or float32 (numbers.h). Sums are float32; queries, keys, weights and gradients are rounded to bfloat16 where they enter a
// product, as torch rounds them.
#include <stdlib.h>
#include <string.h>

#include "numbers.h"

#define QUERIES 32  // of a tile
#define KEYS 32
#define HIDDEN -3e38f  // the score of a key that a query does not see
#define LINES 64  // of a norm whose gain's gradient is summed apart, whatever the number of threads

int training_runs_here(void) { return runs_here(); }

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
    Vector squares = all(0);
    for (long e = 0; e < call->width; e += LANES) squares = times_plus(load(x + e), load(x + e), squares);
    const float scale = inverse_root(sum_of(squares) / call->width + call->eps);
    for (long e = 0; e < call->width; e += LANES)
      store(call->y + line * call->width + e, load(x + e) * all(scale) * load(call->gain + e));
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
      const Vector scale = all(call->scale[line]);
      Vector sum = all(0);
      for (long e = 0; e < call->width; e += LANES) {
        const Vector both = load(up + e) * (load(x + e) * scale);
        store(d_gain + e, both + load(d_gain + e));
        sum = times_plus(both, load(call->gain + e), sum);
      }
      const Vector shared = all(sum_of(sum) / call->width);
      for (long e = 0; e < call->width; e += LANES) {
        const Vector normed = load(x + e) * scale;
        store(call->dx + line * call->width + e, scale * minus_times(load(up + e) * load(call->gain + e), normed, shared));
      }
    }
}

// relu(x)^2, and its gradient 2 relu(x) up. size is a multiple of 16.
void squared_relu_forward(const Number* x, Number* y, int64_t size, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (long i = 0; i < size; i += LANES) {
    const Vector kept = larger(wide(x + i), all(0));
    store_rounded(y + i, kept * kept);
  }
}

void squared_relu_backward(const Number* x, const Number* up, Number* dx, int64_t size, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (long i = 0; i < size; i += LANES) {
    const Vector kept = larger(wide(x + i), all(0));
    store_rounded(dx + i, (kept + kept) * wide(up + i));
  }
}

// silu(gate) up, and its gradients; each step is rounded, as torch's are. size is a multiple of 16.
void swiglu_forward(const Number* gate, const Number* up, Number* y, int64_t size, int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (long i = 0; i < size; i += LANES) {
    const Vector g = wide(gate + i);
    store_rounded(y + i, as_rounded(g * sigmoid(g)) * wide(up + i));
  }
}

void swiglu_backward(const Number* gate, const Number* up, const Number* above, Number* d_gate, Number* d_up, int64_t size,
                     int64_t threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (long i = 0; i < size; i += LANES) {
    const Vector g = wide(gate + i), s = sigmoid(g), a = wide(above + i);
    const Vector slope = s * times_plus(g, all(1) - s, all(1));
    store_rounded(d_gate + i, as_rounded(a * wide(up + i)) * slope);
    store_rounded(d_up + i, a * as_rounded(g * s));
  }
}

// ---- products

// c (m, n) = a (m, pairs) b (pairs, n); with add it is added to c. V vectors of R rows are summed at once; n and m are multiples.
INLINE void multiply(const Pair* a, long a_row, long a_pair, const Pair* b, long b_pair, float* c, long c_row, long m, const long n,
                     long pairs, int add) {
  const int V = n / LANES < ABREAST ? n / LANES : ABREAST, R = SUMS / V;
  for (long j = 0; j < n; j += V * LANES)
    for (long i = 0; i < m; i += R) {
      float* to = c + i * c_row + j;
      Vector sum[SUMS];
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) sum[r * V + v] = add ? load(to + r * c_row + v * LANES) : all(0);
      for (long p = 0; p < pairs; ++p) {
        Pairs right[ABREAST];
        for (int v = 0; v < V; ++v) right[v] = load_pairs(b + p * b_pair + j + v * LANES);
        for (int r = 0; r < R; ++r) {
          const Pair left = a[(i + r) * a_row + p * a_pair];
          for (int v = 0; v < V; ++v) sum[r * V + v] = add_product(sum[r * V + v], left, right[v]);
        }
      }
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) store(to + r * c_row + v * LANES, sum[r * V + v]);
    }
}

// (KEYS, E) -> (E / PAIRED, KEYS) pairs of a row
INLINE void pair_columns(const Number* x, Pair* to, const long E) {
  const Pair* from = (const Pair*)x;
  for (long p = 0; p < E / PAIRED; ++p)
    for (long k = 0; k < KEYS; ++k) to[p * KEYS + k] = from[k * E / PAIRED + p];
}

// (m, n) -> (m / PAIRED, n) pairs of a column
INLINE void pair_rows(const Number* x, Pair* to, long m, const long n) {
  for (long k = 0; k < m; k += PAIRED)
    for (long e = 0; e < n; e += LANES) pair_lanes(x + k * n + e, n, to + k / PAIRED * n + e);
}

// ---- attention

typedef struct {
  const Number* qkv;        // (rows, tokens, heads + 2 groups, width): queries, keys, values
  const float* gains;         // (2, width) of queries and keys; or none: they are not normed
  const float *cos, *sin;     // (turns, tokens, width), turns = 1 or rows; or none: they are not turned
  const int32_t* seen;        // (rows, tokens, 3): token i attends to [first, second) and [third, i]
  Number* out;              // (rows, tokens, heads, width)
  float* kept;                // (rows, heads, tokens, 2): of a query its largest score and 1 / the sum of exponentials
  const Number* up;         // as out: the gradient from above
  Number* d_qkv;            // as qkv
  float* d_gains;             // (rows, groups, 2, width), zeros
  int64_t rows, tokens, heads, groups, width, turns, threads;
  float eps;
} Call;

INLINE const Number* head_of(const Call* call, const Number* qkv, long row, long token, long head) {
  return qkv + ((row * call->tokens + token) * (call->heads + 2 * call->groups) + head) * call->width;
}

INLINE const float* gain_of(const Call* call, long head) { return call->gains + (head < call->heads ? 0 : call->width); }

INLINE long angle_of(const Call* call, long row, long token) {
  return ((call->turns > 1 ? row : 0) * call->tokens + token) * call->width;
}

// 1 / the root of the mean square
INLINE float scale_of(const Number* x, float eps, const long E) {
  Vector squares = all(0);
  for (long e = 0; e < E; e += LANES) squares = times_plus(wide(x + e), wide(x + e), squares);
  return inverse_root(sum_of(squares) / E + eps);
}

// A query or a key of one token, normed and turned.
INLINE void turn(const Call* call, long row, long token, long head, Number* to, const long E) {
  const Number* x = head_of(call, call->qkv, row, token, head);
  const long n = E / LANES;
  Vector y[n];
  for (long v = 0; v < n; ++v) y[v] = wide(x + v * LANES);
  if (call->gains) {
    const Vector scale = all(scale_of(x, call->eps, E));
    for (long v = 0; v < n; ++v) y[v] = y[v] * scale * load(gain_of(call, head) + v * LANES);
  }
  const long angle = call->cos ? angle_of(call, row, token) : 0;
  for (long v = 0; v < n; ++v) {
    Vector turned = y[v];
    if (call->cos) {
      turned = turned * load(call->cos + angle + v * LANES);
      turned = times_plus(y[(v + n / 2) % n], load(call->sin + angle + v * LANES), turned);
    }
    store_rounded(to + v * LANES, turned);
  }
}

// The reverse: d (E), the gradient of what `turn` has made, becomes that of its input; adds to the gain's gradient.
INLINE void turn_back(const Call* call, long row, long token, long head, const float* d, float* d_gain, const long E) {
  const Number* x = head_of(call, call->qkv, row, token, head);
  Number* to = (Number*)head_of(call, call->d_qkv, row, token, head);
  const long n = E / LANES;
  Vector gradient[n];
  const long angle = call->cos ? angle_of(call, row, token) : 0;
  for (long v = 0; v < n; ++v) {
    gradient[v] = load(d + v * LANES);
    if (call->cos) {
      const long other = (v + n / 2) % n * LANES;
      gradient[v] = gradient[v] * load(call->cos + angle + v * LANES);
      gradient[v] = times_plus(load(d + other), load(call->sin + angle + other), gradient[v]);
    }
  }
  if (call->gains) {
    const Vector scale = all(scale_of(x, call->eps, E));
    Vector normed[n];
    Vector shared = all(0);
    for (long v = 0; v < n; ++v) {
      normed[v] = wide(x + v * LANES) * scale;
      store(d_gain + v * LANES, times_plus(gradient[v], normed[v], load(d_gain + v * LANES)));
      gradient[v] = gradient[v] * load(gain_of(call, head) + v * LANES);
      shared = times_plus(gradient[v], normed[v], shared);
    }
    const Vector mean = all(sum_of(shared) / E);
    for (long v = 0; v < n; ++v) gradient[v] = scale * minus_times(gradient[v], normed[v], mean);
  }
  for (long v = 0; v < n; ++v) store_rounded(to + v * LANES, gradient[v]);
}

// n tokens from `at` of a query or key head, zeros behind the last token: (n, E)
INLINE void turned(const Call* call, long row, long at, long n, long head, Number* to, const long E) {
  for (long i = 0; i < n; ++i)
    if (at + i < call->tokens) turn(call, row, at + i, head, to + i * E, E);
    else memset(to + i * E, 0, sizeof(Number) * E);
}

// The same as they are, from x, whose tokens lie `stride` apart.
INLINE void copied(const Call* call, const Number* x, long stride, long at, long n, Number* to, const long E) {
  for (long i = 0; i < n; ++i)
    if (at + i < call->tokens) memcpy(to + i * E, x + (at + i) * stride, sizeof(Number) * E);
    else memset(to + i * E, 0, sizeof(Number) * E);
}

typedef struct {
  int32_t first, second, third, last;
} Seen;

INLINE Seen seen_of(const Call* call, long row, long token) {
  if (token >= call->tokens) return (Seen){0, 0, (int32_t)token, (int32_t)token};  // itself: a softmax without keys is NaN
  const int32_t* seen = call->seen + (row * call->tokens + token) * 3;
  return (Seen){seen[0], seen[1], seen[2], (int32_t)token};
}

// of LANES keys from `at`
INLINE Mask sees(Seen seen, long at) { return either(between(at, seen.first, seen.second), between(at, seen.third, seen.last + 1)); }

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
  const long pairs = E / PAIRED;
  const float factor = inverse_root(E);
  Pair* keys = room(sizeof(Number) * padded * E);    // (padded / KEYS, E / PAIRED, KEYS)
  Pair* values = room(sizeof(Number) * padded * E);  // (padded / PAIRED, E)
  float* scores = room(sizeof(float) * QUERIES * padded);
  Number* weights = room(sizeof(Number) * QUERIES * padded);
  int32_t* blocks = room(sizeof(int32_t) * padded / KEYS);
  Number rows[KEYS * E] __attribute__((aligned(64)));
  float sums[QUERIES * E] __attribute__((aligned(64)));
  for (long at = 0; at < padded; at += KEYS) {
    turned(call, row, at, KEYS, call->heads + group, rows, E);
    pair_columns(rows, keys + at * pairs, E);
    copied(call, head_of(call, call->qkv, row, 0, call->heads + call->groups + group), stride, at, KEYS, rows, E);
    pair_rows(rows, values + at * pairs, KEYS, E);
  }
  for (long head = group * share; head < (group + 1) * share; ++head)
    for (long at = 0; at < call->tokens; at += QUERIES) {
      Seen seen[QUERIES];
      for (int r = 0; r < QUERIES; ++r) seen[r] = seen_of(call, row, at + r);
      const long n = blocks_of(seen, at, blocks), line = n * KEYS;
      turned(call, row, at, QUERIES, head, rows, E);
      for (long i = 0; i < n; ++i)
        multiply((const Pair*)rows, pairs, 1, keys + blocks[i] * KEYS * pairs, KEYS, scores + i * KEYS, line, QUERIES, KEYS, pairs, 0);
      for (int r = 0; r < QUERIES; ++r) {
        float* s = scores + r * line;
        Vector most = all(HIDDEN);
        for (long v = 0; v < line; v += LANES) {
          const Vector shown = chosen(sees(seen[r], blocks[v / KEYS] * KEYS + v % KEYS), load(s + v) * all(factor), all(HIDDEN));
          store(s + v, shown);
          most = larger(most, shown);
        }
        const float largest = largest_of(most);
        Vector total = all(0);
        for (long v = 0; v < line; v += LANES) {
          const Vector x = load(s + v);
          const Vector y = chosen(at_least(all(HIDDEN), x), all(0), exponential(x - all(largest)));
          store(s + v, y);
          total = total + y;
        }
        const float inverse = 1.0f / sum_of(total);
        for (long v = 0; v < line; v += LANES) store_rounded(weights + r * line + v, load(s + v) * all(inverse));
        if (at + r < call->tokens) {
          float* kept = call->kept + ((row * call->heads + head) * call->tokens + at + r) * 2;
          kept[0] = largest;
          kept[1] = inverse;
        }
      }
      for (long i = 0; i < n; ++i)
        multiply((const Pair*)weights + i * KEYS / PAIRED, line / PAIRED, 1, values + blocks[i] * KEYS * pairs, E, sums, E, QUERIES, E,
                 KEYS / PAIRED, i > 0);
      for (int r = 0; r < QUERIES && at + r < call->tokens; ++r)
        for (long e = 0; e < E; e += LANES)
          store_rounded(call->out + ((row * call->tokens + at + r) * call->heads + head) * E + e, load(sums + r * E + e));
    }
  free(keys), free(values), free(scores), free(weights), free(blocks);
}

// With weights w = softmax(s): dv = w' up, ds = w (up v' - sum(up out)), dq = ds k, dk = ds' q.
INLINE void backward(const Call* call, long task, const long E) {
  const long row = task / call->groups, group = task % call->groups, share = call->heads / call->groups;
  const long padded = (call->tokens + KEYS - 1) / KEYS * KEYS, stride = (call->heads + 2 * call->groups) * E;
  const float factor = inverse_root(E);
  const long pairs = E / PAIRED;
  Pair* keys = room(sizeof(Number) * padded * E);          // (padded / KEYS, E / PAIRED, KEYS)
  Pair* values = room(sizeof(Number) * padded * E);        // the same
  Pair* keys_by_rows = room(sizeof(Number) * padded * E);  // (padded / PAIRED, E)
  float* d_keys = room(sizeof(float) * padded * E);
  float* d_values = room(sizeof(float) * padded * E);
  int32_t* blocks = room(sizeof(int32_t) * padded / KEYS);
  float* d_gains = call->gains ? call->d_gains + task * 2 * E : 0;
  Number rows[KEYS * E] __attribute__((aligned(64))), above[QUERIES * E] __attribute__((aligned(64)));
  Pair queries[QUERIES / PAIRED * E] __attribute__((aligned(64))), above_by_rows[QUERIES / PAIRED * E] __attribute__((aligned(64)));
  float scores[QUERIES * KEYS] __attribute__((aligned(64))), d_weights[QUERIES * KEYS] __attribute__((aligned(64)));
  float d_queries[QUERIES * E] __attribute__((aligned(64)));
  Number weights[QUERIES * KEYS] __attribute__((aligned(64))), gradients[QUERIES * KEYS] __attribute__((aligned(64)));
  Pair weights_by_rows[QUERIES / PAIRED * KEYS] __attribute__((aligned(64)));
  Pair gradients_by_rows[QUERIES / PAIRED * KEYS] __attribute__((aligned(64)));
  memset(d_keys, 0, sizeof(float) * padded * E);
  memset(d_values, 0, sizeof(float) * padded * E);
  for (long at = 0; at < padded; at += KEYS) {
    turned(call, row, at, KEYS, call->heads + group, rows, E);
    pair_columns(rows, keys + at * pairs, E);
    pair_rows(rows, keys_by_rows + at * pairs, KEYS, E);
    copied(call, head_of(call, call->qkv, row, 0, call->heads + call->groups + group), stride, at, KEYS, rows, E);
    pair_columns(rows, values + at * pairs, E);
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
        Vector sum = all(0);
        for (long e = 0; e < E; e += LANES)
          sum = times_plus(wide(call->out + first + (at + r) * call->heads * E + e), wide(above + r * E + e), sum);
        shared[r] = sum_of(sum);
      }
      const long n = blocks_of(seen, at, blocks);
      for (long i = 0; i < n; ++i) {
        const long start = blocks[i] * KEYS;
        multiply((const Pair*)rows, pairs, 1, keys + start * pairs, KEYS, scores, KEYS, QUERIES, KEYS, pairs, 0);
        multiply((const Pair*)above, pairs, 1, values + start * pairs, KEYS, d_weights, KEYS, QUERIES, KEYS, pairs, 0);
        for (int r = 0; r < QUERIES; ++r)
          for (int v = 0; v < KEYS; v += LANES) {
            const long k = r * KEYS + v;
            const Vector score = load(scores + k) * all(factor) - all(largest[r]);
            const Vector w = chosen(sees(seen[r], start + v), exponential(score) * all(inverse[r]), all(0));
            store_rounded(weights + k, w);
            store_rounded(gradients + k, w * all(factor) * (load(d_weights + k) - all(shared[r])));
          }
        pair_rows(weights, weights_by_rows, QUERIES, KEYS);
        pair_rows(gradients, gradients_by_rows, QUERIES, KEYS);
        multiply(weights_by_rows, 1, KEYS, above_by_rows, E, d_values + start * E, E, KEYS, E, QUERIES / PAIRED, 1);
        multiply(gradients_by_rows, 1, KEYS, queries, E, d_keys + start * E, E, KEYS, E, QUERIES / PAIRED, 1);
        multiply((const Pair*)gradients, KEYS / PAIRED, 1, keys_by_rows + start * pairs, E, d_queries, E, QUERIES, E, KEYS / PAIRED, i > 0);
      }
      for (int r = 0; r < QUERIES && at + r < call->tokens; ++r) turn_back(call, row, at + r, head, d_queries + r * E, d_gains, E);
    }
  for (long i = 0; i < call->tokens; ++i) {
    turn_back(call, row, i, call->heads + group, d_keys + i * E, d_gains + E, E);
    Number* to = (Number*)head_of(call, call->d_qkv, row, i, call->heads + call->groups + group);
    for (long e = 0; e < E; e += LANES) store_rounded(to + e, load(d_values + i * E + e));
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
