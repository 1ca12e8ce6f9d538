// Forward: a task is a query tile of one head. Queries lie along the lanes, so a softmax needs no sum across lanes.
#pragma once

#include <stdlib.h>

#include "attention/walk.h"

namespace {

constexpr int64_t FORWARD_KEYS = 128;  // keys of a block: its weights stay in the first-level cache
constexpr int64_t PACK_KEYS = 32;
constexpr float SLACK = 8.0f;  // the running maximum is renewed when a weight would exceed 2^8

// Keys and values as flat and zipped panels, with the strides of their heads and rows.
struct Panels {
  const float *k, *v;
  int64_t k_row, k_head, v_row, v_head;
};

struct Forward {
  const sp_attention* x;
  const sp_sums* sums;
  const sp_ranges* ranges;
  Panels panels;
  int64_t q_words, v_cols;  // words of a staged query; columns of a transposed output, padded to whole vectors
  bool once;  // each key is read by one task, which packs a block before it reads it; a panel is NULL then
};

// A tile's running values while it walks along the keys. high: the maximum, which `top` may be below by SLACK.
struct State {
  float top[BM], base[BM], total[BM], high[BM];
  int32_t pos[BM], drop[BM];
};

// Turns products into scores, -inf where a key is not seen, and finds each lane's maximum.
template <Pairs PAIRS>
inline void mask_scores(const Lanes* lanes, const Block* block, const Score* score, const State* state, float* s,
                        float* peak) {
  for (int64_t v = block->vector; v < block->vector + block->vectors; ++v) {
    V top = splat(-INFINITY), fall;
    I pos = load_ints(state->pos + v * W);
    for (int64_t key = block->begin; key < block->end; ++key) {
      float* at = s + (key - block->begin) * BM + v * W;
      V x = load(at);
      if (!score->plain && (PAIRS == ALL || key < score->x->n))
        x = scored(score, x, pos, score->x->key_pos[key], &fall);
      if (PAIRS != ALL) x = seen<PAIRS>(lanes, v * W, key) ? x : splat(-INFINITY);
      if (PAIRS != ALL || !score->plain) store(at, x);
      top = larger(x, top);
    }
    store(peak + v * W, top);
  }
}

// Renews the running maximum where it fell behind, and rescales the sums.
inline void renew(const Block* block, const Score* score, const float* peak, State* state, float* out, int64_t cols) {
  V slack = splat(SLACK / score->exponent);
  I late = {};
  for (int64_t v = block->vector; v < block->vector + block->vectors; ++v)
    late |= load(peak + v * W) > load(state->top + v * W) + slack;
  if (!any(late)) return;
  for (int64_t v = block->vector; v < block->vector + block->vectors; ++v) {
    V old = load(state->top + v * W), now = larger(load(peak + v * W), old);
    // -inf - -inf is NaN, so a lane that has seen nothing is relative to 0
    V base = now == splat(-INFINITY) ? splat(0.0f) : now;
    V shrink = exp2((old - base) * splat(score->exponent));
    store(state->top + v * W, now);
    store(state->base + v * W, base);
    store(state->total + v * W, load(state->total + v * W) * shrink);
    for (int64_t col = 0; col < cols; ++col) store(out + col * BM + v * W, load(out + col * BM + v * W) * shrink);
  }
}

// Keeps the maximum of each lane.
inline void raise(const Block* block, const float* peak, State* state) {
  for (int64_t v = block->vector; v < block->vector + block->vectors; ++v)
    store(state->high + v * W, larger(load(peak + v * W), load(state->high + v * W)));
}

// Raises a row's largest score. A sum that is NaN without an infinite score has a score that is NaN.
inline void finish_top(float* top, float high, float total) {
  if (total != total && high < INFINITY)
    *top = total;
  else if (*top < high)
    *top = high;
}

// Turns scores of N vectors into weights in place, as a zipped panel, and adds them up.
template <int N, bool DROP>
inline void weigh(const Block* block, int64_t vector, const Score* score, State* state, float* s) {
  s += vector * W;
  V base[N], total[N], scale = splat(score->exponent);
  I a[N];
  for (int v = 0; v < N; ++v) {
    base[v] = -load(state->base + (vector + v) * W);
    if (DROP) a[v] = load_ints(state->drop + (vector + v) * W);
    total[v] = splat(0.0f);
  }
  for (int64_t key = block->begin; key < block->end; key += PAIR) {
    float *from = s + (key - block->begin) * BM, *to = s + (key - block->begin) / PAIR * BM;
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) {
      V p[PAIR];
#pragma GCC unroll 2
      for (int u = 0; u < PAIR; ++u) {
        p[u] = exp2((load(from + u * BM + v * W) + base[v]) * scale);
        total[v] += p[u];
        if (DROP && key + u < score->x->n) p[u] *= kept(score, a[v], score->b[key + u]);
      }
      store(to + v * W, zipped(p));
    }
  }
  for (int v = 0; v < N; ++v) {
    float* at = state->total + (vector + v) * W;
    store(at, load(at) + total[v]);
  }
}

template <bool DROP>
inline void weigh_block(const Block* block, const Score* score, State* state, float* s) {
  const int64_t end = block->vector + block->vectors;
  for (int64_t vector = block->vector; vector < end; vector += NV) {
    switch (least(end - vector, NV)) {
      case 1:
        weigh<1, DROP>(block, vector, score, state, s);
        break;
      case 2:
        weigh<2, DROP>(block, vector, score, state, s);
        break;
      case 3:
        weigh<3, DROP>(block, vector, score, state, s);
        break;
      default:
        weigh<NV, DROP>(block, vector, score, state, s);
    }
  }
}

// out[col][lane] += weights times values of one block.
inline void add_values(const Forward* job, const Lanes* lanes, const Block* block, const float* v, const float* weights,
                       float* out) {
  const Panels* p = &job->panels;
  int64_t rows = (block->end - block->begin) / PAIR, words = GROUP > 1 ? p->v_row : job->x->v_dim;
  bool clean = true;
  for (int64_t r = 0; r < rows && !block->full; ++r) clean &= finite(v + r * p->v_row, words);
  if (clean) {
    multiply_down(block->vectors, v, p->v_row, weights + block->vector * W, BM, out + block->vector * W, BM,
                  job->x->v_dim, rows);
  } else {
    add_seen_keys(lanes, block, v, p->v_row, job->x->v_dim, weights, out);
  }
}

// Writes a row, or merges it with earlier sums. top: the maximum that the sum is relative to.
inline void finish_row(const sp_sums* sums, int dtype, int64_t cols, int64_t row, int64_t head, float total, float top,
                       float* x) {
  float* lse = sums->lse + head * sums->lse_head + row;
  float* acc = sums->acc != nullptr ? sums->acc + row * sums->acc_row + head * sums->acc_head : nullptr;
  int64_t at = row * sums->out_row + head * sums->out_head;
  char* out = sums->out != nullptr ? (char*)sums->out + at * (dtype == SP_F32 ? 4 : 2) : nullptr;
  bool blind = total == 0.0f, alone = sums->first || *lse == -INFINITY;
  if (blind && !sums->first && out == nullptr) return;
  float here = blind ? -INFINITY : top + logf(total), share = blind ? 1.0f : 1.0f / total, rest = 0.0f;
  if (alone) {
    *lse = here;
  } else if (blind) {
    share = 0.0f, rest = 1.0f;
  } else {
    float base = here > *lse || here != here ? here : *lse;
    float a = expf(*lse - base), b = expf(here - base);
    share *= b / (a + b), rest = a / (a + b);
    *lse = logf(a + b) + base;
  }
  const LooseFloat* held = acc;
  if (alone)
    for (int64_t col = 0; col < cols; ++col) x[col] *= share;
  else if (blind)
    memcpy(x, acc, (size_t)cols * 4);
  else
    for (int64_t col = 0; col < cols; ++col) x[col] = x[col] * share + held[col] * rest;
  if (out != nullptr && dtype == SP_BF16)
    round_row(x, (uint16_t*)out, cols);
  else
    memcpy(out != nullptr ? out : (char*)acc, x, (size_t)cols * 4);
}

// Packs keys [begin, end) of one head: keys into a flat panel, unless k is NULL, and values into a zipped one.
inline void pack(const sp_attention* x, int64_t head, int64_t begin, int64_t end, float* k, int64_t k_words, float* v,
                 int64_t v_words, float* scratch) {
  int64_t padded = up(end, GRAIN) - begin, width = x->dtype == SP_F32 ? 4 : 2;
  const char* values = (const char*)x->v + (begin * x->v_row + head * x->v_head) * width;
  if (k != nullptr)
    stage(x->dtype, (const char*)x->k + (begin * x->k_row + head * x->k_head) * width, x->k_row, x->dim, end - begin, k,
          k_words, padded);
#if defined(SP_PAIRS)
  int64_t words = (v_words + 1) / 2;
  stage(x->dtype, values, x->v_row, x->v_dim, end - begin, scratch, words, padded);
  zip_down(scratch, words, padded, v, v_words);
#else
  (void)scratch;
  stage(x->dtype, values, x->v_row, x->v_dim, end - begin, v, v_words, padded);
#endif
}

// The words that `pack` needs as scratch for so many keys.
inline int64_t pack_scratch(int64_t keys, int64_t v_words) { return keys * ((v_words + 1) / 2); }

// Packs PACK_KEYS keys of one head.
struct Packing {
  const sp_attention* x;
  float *k, *v;
  int64_t k_words, v_words, chunks, rows;  // v_words: of a zipped row
};

inline void pack_task(void* context, int64_t task, char* scratch) {
  const Packing* job = static_cast<const Packing*>(context);
  int64_t head = task % job->x->kv_heads, begin = task / job->x->kv_heads * PACK_KEYS;
  float* k = job->k != nullptr ? job->k + (head * job->rows + begin) * job->k_words : nullptr;
  pack(job->x, head, begin, least(begin + PACK_KEYS, job->x->n), k, job->k_words,
       job->v + (head * job->rows + begin) / PAIR * job->v_words, job->v_words, reinterpret_cast<float*>(scratch));
}

// Scratch of a task, in floats.
struct ForwardScratch {
  Lanes lanes;
  State state;
  float peak[BM];
};

inline int64_t forward_stage(const Forward* job) { return BM * most(job->q_words, job->v_cols); }

// Words of the panels that a task packs for each block: of keys, of values, and the scratch to fill them.
struct BlockPanels {
  int64_t k, v, scratch;
};

inline BlockPanels block_panels(const Forward* job) {
  const Panels* p = &job->panels;
  if (!job->once) return {};
  return {p->k == nullptr ? FORWARD_KEYS * p->k_row : 0, FORWARD_KEYS / PAIR * p->v_row,
          up(pack_scratch(FORWARD_KEYS, p->v_row), W)};
}

inline void forward_task(void* context, int64_t task, char* scratch) {
  const Forward* job = static_cast<const Forward*>(context);
  const sp_attention* x = job->x;
  int64_t head = task / x->tiles.count, tile = x->tiles.order[task % x->tiles.count];
  int64_t kv_head = head / (x->heads / x->kv_heads), width = x->dtype == SP_F32 ? 4 : 2;
  float* queries = reinterpret_cast<float*>(scratch);
  float* s = queries + job->q_words * BM;
  float* out = s + FORWARD_KEYS * BM;
  float* rows = out + job->v_cols * BM;
  const BlockPanels words = block_panels(job);
  float *own_k = rows + forward_stage(job), *own_v = own_k + words.k, *loose = own_v + words.v;
  ForwardScratch* here = reinterpret_cast<ForwardScratch*>(loose + words.scratch);
  Lanes* lanes = &here->lanes;
  State* state = &here->state;
  find_lanes(x, job->ranges, tile, lanes);
  if (lanes->rows <= 0) return;
  Registers registers;
  Score score = make_score(x, head);
  load_lanes(x->pos, lanes, state->pos);
  load_lanes(score.a, lanes, state->drop);
  for (int i = 0; i < BM; ++i) state->top[i] = state->high[i] = -INFINITY, state->base[i] = state->total[i] = 0.0f;
  memset(out, 0, (size_t)(job->v_cols * BM) * 4);
  const char* q = (const char*)x->q + (lanes->row * x->q_row + head * x->q_head) * width;
  stage(x->dtype, q, x->q_row, x->dim, lanes->rows, rows, job->q_words, lanes->vectors * W);
  turn(rows, job->q_words, lanes->vectors * W, queries, BM);
  const sp_sums* sums = job->sums;
  if (sums->out != nullptr)
    fetch((char*)sums->out + (lanes->row * sums->out_row + head * sums->out_head) * width, sums->out_row * width,
          lanes->rows, x->v_dim * width);

  const Panels* p = &job->panels;
  Block block;
  const int64_t limit = up(x->n, GRAIN);
  for (int64_t from = 0; next_block(lanes, from, limit, FORWARD_KEYS, &block); from = block.end) {
    const int64_t end = least(block.end, x->n);
    const float *k = own_k, *v = own_v;
    if (job->once)
      pack(x, kv_head, block.begin, end, p->k == nullptr ? own_k : nullptr, p->k_row, own_v, p->v_row, loose);
    if (p->k != nullptr) k = p->k + kv_head * p->k_head + block.begin * p->k_row;
    if (p->v != nullptr) v = p->v + kv_head * p->v_head + block.begin / PAIR * p->v_row;
    // prefetch the next keys, and the values that this block is about to read
    Ahead ahead = {k + MR * p->k_row, v, p->k_row, p->v_row};
    multiply<false, true>(block.vectors, k, p->k_row, 1, queries + block.vector * W, BM, s + block.vector * W, BM,
                          end - block.begin, up(x->dim, GRAIN) / PAIR, &ahead);
    switch (pairs_of(lanes, &block)) {
      case ALL:
        mask_scores<ALL>(lanes, &block, &score, state, s, here->peak);
        break;
      case BOUNDED:
        mask_scores<BOUNDED>(lanes, &block, &score, state, s, here->peak);
        break;
      case OPEN:
        mask_scores<OPEN>(lanes, &block, &score, state, s, here->peak);
    }
    if (sums->top != nullptr) raise(&block, here->peak, state);
    renew(&block, &score, here->peak, state, out, x->v_dim);
    if (score.a != nullptr)
      weigh_block<true>(&block, &score, state, s);
    else
      weigh_block<false>(&block, &score, state, s);
    add_values(job, lanes, &block, v, s, out);
  }
  for (int64_t r = 0; r < lanes->vectors * W; r += W)
    for (int64_t col = 0; col < job->v_cols; col += W)
      transpose(out + col * BM + r, BM, rows + r * job->v_cols + col, job->v_cols);
  for (int64_t i = 0; i < lanes->rows && sums->top != nullptr; ++i)
    finish_top(sums->top + head * sums->top_head + lanes->row + i, state->high[i] * score.natural, state->total[i]);
  for (int64_t i = 0; i < lanes->rows; ++i)
    finish_row(job->sums, x->dtype, x->v_dim, lanes->row + i, head, state->total[i], state->base[i] * score.natural,
               rows + i * job->v_cols);
}

// An upper bound where keys end.
inline double attended(const sp_attention* x, const sp_ranges* ranges) {
  double pairs = 0;
  for (int64_t i = 0; i < x->m; ++i) pairs += ranges->end[i] - ranges->begin[i];
  return pairs * (double)x->heads;
}

constexpr int64_t FAR = 2048;    // bytes between the rows of a head from which a copy pays, if
constexpr double QUERIES = 256;  // so many queries see a key, of all heads that share it

// Whether to copy keys and values in float32: their rows often lie a page apart, and a block's need more pages than
// the first level of address translation holds, and the same few sets of the first-level cache.
inline bool worth_packing(const sp_attention* x, double pairs) {
  return most(x->k_row, x->v_row) * 4 >= FAR && pairs >= QUERIES * (double)(x->n * x->kv_heads);
}

inline int forward(const sp_attention* x, const sp_sums* sums, const sp_ranges* ranges, bool packs,
                   sp_parallel_for parallel_for) {
  Forward job = {x, sums, ranges, {}, up((x->dim + PAIR - 1) / PAIR, W), up(x->v_dim, W), false};
  float* packed = nullptr;
  double pairs = attended(x, ranges);
  if (x->n > 0 && (x->dtype == SP_BF16 || (packs && worth_packing(x, pairs)))) {
    const int64_t v_words = GROUP > 1 ? up(x->v_dim, W) : x->v_dim;
    Packing pack = {};
    pack.x = x, pack.k_words = up(x->dim, GRAIN) / PAIR, pack.v_words = v_words;
    pack.chunks = (x->n + PACK_KEYS - 1) / PACK_KEYS, pack.rows = up(x->n, most(GRAIN, 2));
    // whole pairs can be read in place; tile registers load faster from rows that lie close
    bool lies = PAIR == 2 && GROUP == 1 && x->dim % 2 == 0 && x->k_row % 2 == 0 && x->k_head % 2 == 0;
    int64_t k_words = lies ? 0 : x->kv_heads * pack.rows * pack.k_words;
    job.once = x->heads == x->kv_heads && x->tiles.count == 1;
    if (!job.once) {
      packed = static_cast<float*>(sp_allocate((size_t)(k_words + x->kv_heads * pack.rows / PAIR * v_words) * 4));
      if (packed == nullptr) return SP_NO_MEMORY;
      pack.k = lies ? nullptr : packed, pack.v = packed + k_words;
    }
    job.panels = {pack.k, pack.v, pack.k_words, pack.rows * pack.k_words, v_words, pack.rows / PAIR * v_words};
    if (lies) job.panels.k = (const float*)x->k, job.panels.k_row = x->k_row / 2, job.panels.k_head = x->k_head / 2;
    double work = 8.0 * (double)(x->n * x->kv_heads * (x->dim + x->v_dim));
    size_t bytes = (size_t)pack_scratch(PACK_KEYS, v_words) * 4;
    int64_t tasks = job.once ? 0 : x->kv_heads * pack.chunks;
    int status = sp_run(pack_task, &pack, tasks, bytes, work, parallel_for);
    if (status != 0) {
      free(packed);
      return status;
    }
  } else {
    job.panels = {(const float*)x->k, (const float*)x->v, x->k_row, x->k_head, x->v_row, x->v_head};
  }
  const BlockPanels own = block_panels(&job);
  size_t words =
      (size_t)((job.q_words + FORWARD_KEYS + job.v_cols) * BM + forward_stage(&job) + own.k + own.v + own.scratch);
  double work = 2.0 * pairs * (double)(x->dim + x->v_dim) + (double)(x->m * x->heads) * 1e3;
  int status =
      sp_run(forward_task, &job, x->heads * x->tiles.count, words * 4 + sizeof(ForwardScratch), work, parallel_for);
  free(packed);
  return status;
}

}  // namespace
