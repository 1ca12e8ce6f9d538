// Backward: a task takes a chunk of keys of one key head and walks along the query tiles that see it.
//
// Gradients of keys and values stay in the task. A tile's dq is a sum over chunks and is added in the order of the
// chunks, so a task may have to wait for one that was started before it.
#pragma once

#include <sched.h>
#include <stdlib.h>

#include "attention/forward.h"

namespace {

constexpr int64_t BACKWARD_KEYS = 64;         // keys of a block
constexpr int64_t CHUNK_BYTES = 1024 * 1024;  // a chunk's keys, values and gradients as floats: the second-level cache
constexpr int64_t TASKS = 16;                 // at least, to share among threads, unless chunks would become tiny

struct Backward {
  const sp_attention* x;
  const sp_grads* grads;
  const sp_ranges* ranges;
  int64_t chunk, chunks;     // keys of a chunk; number of chunks
  int64_t k_words, v_words;  // words of a flat row, padded to whole vectors
  int64_t k_cols, v_cols;    // columns of a zipped row or of a gradient's row, padded too
  int32_t *first, *stop;     // by tile: the chunks within its bounds
  int32_t* turns;            // by head and tile: the chunk that adds its dq next
  int32_t* until;            // by chunk: the latest end of its keys, or NULL if none ends
};

// Whether a chunk's keys have all ended before a tile's queries.
inline bool closed(const Backward* job, int64_t tile, int64_t nth) {
  return job->until != nullptr && job->until[nth] <= job->x->pos[job->x->tiles.rows[tile]];
}

// The first chunk from `nth` that a tile sees, or one past the last within its bounds.
inline int64_t next_chunk(const Backward* job, int64_t tile, int64_t nth) {
  while (nth < job->stop[tile] && closed(job, tile, nth)) ++nth;
  return nth;
}

// The panels of a task within its scratch.
struct Chunk {
  float *k, *v, *k_zipped, *dk, *dv;
  float *q_turned, *dout_turned, *q, *dout, *dq, *staged;
  float *s, *ds, *p_flat, *ds_flat, *ds_zipped;
  float *lse, *delta;
  int32_t *pos, *drop;
  Lanes* lanes;
  bool k_finite, q_finite, dout_finite;
};

// Lays out a task's scratch; returns its bytes. Without bf16 pairs the zipped panels are the flat ones.
inline size_t lay_out(const Backward* job, char* scratch, Chunk* c) {
  float* base = reinterpret_cast<float*>(scratch);
  size_t words = 0;
  auto take = [&](int64_t count) {
    float* at = scratch != nullptr ? base + words : nullptr;
    words += (size_t)up(count, 16);
    return at;
  };
  c->k = take(job->chunk * job->k_words);
  c->v = take(job->chunk * job->v_words);
  c->k_zipped = PAIR == 2 ? take(job->chunk / PAIR * job->k_cols) : c->k;
  c->dk = take(job->chunk * job->k_cols);
  c->dv = take(job->chunk * job->v_cols);
  c->q_turned = take(job->k_words * BM);
  c->dout_turned = take(job->v_words * BM);
  c->q = take(BM / PAIR * job->k_cols);
  c->dout = take(BM / PAIR * job->v_cols);
  c->dq = take(job->k_cols * BM);
  c->staged = take(BM * most(job->k_cols, job->v_cols));
  c->s = take(BACKWARD_KEYS * BM);
  c->ds = take(BACKWARD_KEYS * BM);
  c->p_flat = PAIR == 2 ? take(BACKWARD_KEYS * BM / PAIR) : c->s;
  c->ds_flat = PAIR == 2 ? take(BACKWARD_KEYS * BM / PAIR) : c->ds;
  c->ds_zipped = PAIR == 2 ? take(BACKWARD_KEYS * BM / PAIR) : c->ds;
  c->lse = take(BM);
  c->delta = take(BM);
  c->pos = reinterpret_cast<int32_t*>(take(BM));
  c->drop = reinterpret_cast<int32_t*>(take(BM));
  c->lanes = reinterpret_cast<Lanes*>(take((sizeof(Lanes) + 3) / 4));
  return words * 4;
}

inline void load_keys(const Backward* job, int64_t head, int64_t begin, int64_t end, Chunk* c) {
  const sp_attention* x = job->x;
  int64_t width = x->dtype == SP_F32 ? 4 : 2, rows = up(end - begin, GRAIN);
  const char* k = (const char*)x->k + (begin * x->k_row + head * x->k_head) * width;
  const char* v = (const char*)x->v + (begin * x->v_row + head * x->v_head) * width;
  stage(x->dtype, k, x->k_row, x->dim, end - begin, c->k, job->k_words, rows);
  stage(x->dtype, v, x->v_row, x->v_dim, end - begin, c->v, job->v_words, rows);
#if defined(SP_PAIRS)
  zip_down(c->k, job->k_words, rows, c->k_zipped, job->k_cols);
#endif
  c->k_finite = finite(c->k, rows * job->k_words);
  memset(c->dk, 0, (size_t)(rows * job->k_cols) * 4);
  memset(c->dv, 0, (size_t)(rows * job->v_cols) * 4);
}

inline void load_queries(const Backward* job, int64_t head, const Score* score, Chunk* c) {
  const sp_attention* x = job->x;
  const sp_grads* g = job->grads;
  const Lanes* lanes = c->lanes;
  int64_t width = x->dtype == SP_F32 ? 4 : 2, padded = lanes->vectors * W;
  const char* q = (const char*)x->q + (lanes->row * x->q_row + head * x->q_head) * width;
  const char* dout = (const char*)g->dout + (lanes->row * g->dout_row + head * g->dout_head) * width;
  for (int64_t i = 0; i < padded; ++i) {
    // a row that sees no key at all has weight 0, so its other values are never read
    float lse = i < lanes->rows ? g->lse[head * g->lse_head + lanes->row + i] : -INFINITY;
    c->lse[i] = lse == -INFINITY ? INFINITY : lse;
    c->delta[i] = lse == -INFINITY ? 0.0f : g->delta[head * g->delta_head + lanes->row + i];
  }
  float* flat = PAIR == 2 ? c->staged : c->q;
  stage(x->dtype, q, x->q_row, x->dim, lanes->rows, flat, job->k_words, padded);
  for (int64_t i = 0; i < lanes->rows; ++i)
    if (lanes->begin[i] >= lanes->end[i]) memset(flat + i * job->k_words, 0, (size_t)job->k_words * 4);
  c->q_finite = finite(flat, padded * job->k_words);
  turn(flat, job->k_words, padded, c->q_turned, BM);
#if defined(SP_PAIRS)
  zip(flat, job->k_words, padded, c->q, job->k_cols);
#endif
  flat = PAIR == 2 ? c->staged : c->dout;
  stage(x->dtype, dout, g->dout_row, x->v_dim, lanes->rows, flat, job->v_words, padded);
  for (int64_t i = 0; i < lanes->rows; ++i)
    if (lanes->begin[i] >= lanes->end[i] || c->lse[i] == INFINITY)
      memset(flat + i * job->v_words, 0, (size_t)job->v_words * 4);
  c->dout_finite = finite(flat, padded * job->v_words);
  turn(flat, job->v_words, padded, c->dout_turned, BM);
#if defined(SP_PAIRS)
  zip(flat, job->v_words, padded, c->dout, job->v_cols);
#endif
  fetch(g->dq + lanes->row * g->dq_row + head * g->dq_head, g->dq_row * 4, lanes->rows, x->dim * 4);
  // the next tile reads rows before this one's
  int64_t next = most(lanes->row - BM, 0);
  q = (const char*)x->q + (next * x->q_row + head * x->q_head) * width;
  dout = (const char*)g->dout + (next * g->dout_row + head * g->dout_head) * width;
  fetch(q, x->q_row * width, lanes->row - next, x->dim * width);
  fetch(dout, g->dout_row * width, lanes->row - next, x->v_dim * width);
  load_lanes(x->pos, lanes, c->pos);
  load_lanes(score->a, lanes, c->drop);
  memset(c->dq, 0, (size_t)(job->k_cols * BM) * 4);
}

// Turns products into weights and score gradients, as panels.
template <Pairs PAIRS, bool PLAIN>
inline void differentiate(const Block* block, const Score* score, Chunk* c) {
  int64_t n = score->x->n;
  V scale = splat(score->natural), log2e = splat(LOG2E);
  for (int64_t key = block->begin; key < block->end; key += PAIR)
    for (int v = block->vector; v < block->vector + block->vectors; ++v) {
      V lse = load(c->lse + v * W), delta = load(c->delta + v * W), p[PAIR], ds[PAIR];
      int64_t row = key - block->begin;
#pragma GCC unroll 2
      for (int u = 0; u < PAIR; ++u) {
        V s = load(c->s + (row + u) * BM + v * W), dp = load(c->ds + (row + u) * BM + v * W), fall = splat(1.0f);
        bool real = PLAIN || key + u < n;
        if (!PLAIN && !score->plain && real)
          s = scored(score, s, load_ints(c->pos + v * W), score->x->key_pos[key + u], &fall);
        p[u] = exp2(fma(s, scale, -lse) * log2e);
        V weight = p[u];
        if (!PLAIN && score->a != nullptr && real) {
          V factor = kept(score, load_ints(c->drop + v * W), score->b[key + u]);
          weight *= factor;
          dp *= factor;
        }
        ds[u] = p[u] * (dp - delta);
        if (!PLAIN) ds[u] *= fall;
        p[u] = weight;
        if (PAIRS != ALL) {
          I see = seen<PAIRS>(c->lanes, v * W, key + u);
          p[u] = see ? p[u] : splat(0.0f);
          ds[u] = see ? ds[u] : splat(0.0f);
        }
      }
#if defined(SP_PAIRS)
      const ptrdiff_t half = BM / 2;
      float *p_at = c->p_flat + row * half + v * (W / 2), *ds_at = c->ds_flat + row * half + v * (W / 2);
      __m512 ps = halves(p), dss = halves(ds);
      _mm256_storeu_ps(p_at, _mm512_castps512_ps256(ps));
      _mm256_storeu_ps(p_at + half, _mm512_extractf32x8_ps(ps, 1));
      _mm256_storeu_ps(ds_at, _mm512_castps512_ps256(dss));
      _mm256_storeu_ps(ds_at + half, _mm512_extractf32x8_ps(dss, 1));
      store(c->ds_zipped + row / 2 * BM + v * W, zipped(ds));
#else
      store(c->p_flat + row * BM + v * W, p[0]);
      store(c->ds_flat + row * BM + v * W, ds[0]);
#endif
    }
}

template <Pairs PAIRS>
inline void differentiate(const Block* block, const Score* score, Chunk* c) {
  if (score->plain && score->a == nullptr)
    differentiate<PAIRS, true>(block, score, c);
  else
    differentiate<PAIRS, false>(block, score, c);
}

inline void walk_block(const Backward* job, const Block* block, const Score* score, int64_t begin, Chunk* c) {
  const sp_attention* x = job->x;
  int64_t row = block->begin - begin, keys = block->end - block->begin, lane = block->vector * W;
  multiply<false>(block->vectors, c->k + row * job->k_words, job->k_words, 1, c->q_turned + lane, BM, c->s + lane, BM,
                  keys, up(x->dim, GRAIN) / PAIR);
  multiply<false>(block->vectors, c->v + row * job->v_words, job->v_words, 1, c->dout_turned + lane, BM, c->ds + lane,
                  BM, keys, up(x->v_dim, GRAIN) / PAIR);
  switch (pairs_of(c->lanes, block)) {
    case ALL:
      differentiate<ALL>(block, score, c);
      break;
    case BOUNDED:
      differentiate<BOUNDED>(block, score, c);
      break;
    case OPEN:
      differentiate<OPEN>(block, score, c);
  }

  int64_t lanes = block->vectors * W / PAIR;
  float *dk = c->dk + row * job->k_cols, *dv = c->dv + row * job->v_cols;
  if (block->full || c->dout_finite)
    multiply<true>(job->v_cols / W, c->p_flat + lane / PAIR, BM / PAIR, 1, c->dout + lane / PAIR * job->v_cols,
                   job->v_cols, dv, job->v_cols, keys, lanes);
  else
    add_seen_queries(c->lanes, block, c->p_flat, BM / PAIR, c->dout, job->v_cols, x->v_dim, dv, job->v_cols);
  if (block->full || c->q_finite)
    multiply<true>(job->k_cols / W, c->ds_flat + lane / PAIR, BM / PAIR, 1, c->q + lane / PAIR * job->k_cols,
                   job->k_cols, dk, job->k_cols, keys, lanes);
  else
    add_seen_queries(c->lanes, block, c->ds_flat, BM / PAIR, c->q, job->k_cols, x->dim, dk, job->k_cols);
  const float* k = c->k_zipped + row / PAIR * job->k_cols;
  if (block->full || c->k_finite)
    multiply_down(block->vectors, k, job->k_cols, c->ds_zipped + lane, BM, c->dq + lane, BM, x->dim, keys / PAIR);
  else
    add_seen_keys(c->lanes, block, k, job->k_cols, x->dim, c->ds_zipped, c->dq);
}

// Adds a tile's dq once it is this chunk's turn.
inline void add_dq(const Backward* job, int64_t head, int64_t tile, int64_t nth, Chunk* c) {
  const sp_attention* x = job->x;
  const sp_grads* g = job->grads;
  const Lanes* lanes = c->lanes;
  for (int64_t r = 0; r < lanes->vectors * W; r += W)
    for (int64_t col = 0; col < job->k_cols; col += W)
      transpose(c->dq + col * BM + r, BM, c->staged + r * job->k_cols + col, job->k_cols);
  int32_t* turn = job->turns + head * x->tiles.count + tile;
  for (int spins = 0; __atomic_load_n(turn, __ATOMIC_ACQUIRE) != nth; ++spins)
    if (spins >= 100) --spins, sched_yield();
  for (int64_t i = 0; i < lanes->rows; ++i) {
    LooseFloat* dq = g->dq + (lanes->row + i) * g->dq_row + head * g->dq_head;
    const float* add = c->staged + i * job->k_cols;
    if (lanes->begin[i] < lanes->end[i])
      for (int64_t col = 0; col < x->dim; ++col) dq[col] += add[col] * x->scale;
  }
  __atomic_store_n(turn, (int32_t)next_chunk(job, tile, nth + 1), __ATOMIC_RELEASE);
}

inline void add_rows(float* to, int64_t to_row, const float* from, int64_t from_row, int64_t rows, int64_t cols,
                     float scale) {
  for (int64_t r = 0; r < rows; ++r) {
    LooseFloat* at = to + r * to_row;
    if (r + FETCHED_ROWS < rows) fetch(at + FETCHED_ROWS * to_row, 0, 1, cols * 4);
    for (int64_t col = 0; col < cols; ++col) at[col] += from[r * from_row + col] * scale;
  }
}

inline void backward_task(void* context, int64_t task, char* scratch) {
  const Backward* job = static_cast<const Backward*>(context);
  const sp_attention* x = job->x;
  const sp_grads* g = job->grads;
  Registers registers;
  Chunk c;
  lay_out(job, scratch, &c);
  int64_t nth = task / x->kv_heads, kv_head = task % x->kv_heads, group = x->heads / x->kv_heads;
  int64_t begin = nth * job->chunk, end = least(begin + job->chunk, x->n), limit = up(end, GRAIN);
  bool loaded = false;
  for (int64_t tile = x->tiles.count - 1; tile >= 0; --tile) {
    if (nth < job->first[tile] || nth >= job->stop[tile] || closed(job, tile, nth)) continue;
    if (!loaded) load_keys(job, kv_head, begin, end, &c);
    loaded = true;
    find_lanes(x, job->ranges, tile, c.lanes);
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
      Score score = make_score(x, head);
      load_queries(job, head, &score, &c);
      Block block;
      for (int64_t from = begin; next_block(c.lanes, from, limit, BACKWARD_KEYS, &block); from = block.end)
        walk_block(job, &block, &score, begin, &c);
      add_dq(job, head, tile, nth, &c);
    }
  }
  if (!loaded) return;
  add_rows(g->dk + begin * g->dk_row + kv_head * g->dk_head, g->dk_row, c.dk, job->k_cols, end - begin, x->dim,
           x->scale);
  add_rows(g->dv + begin * g->dv_row + kv_head * g->dv_head, g->dv_row, c.dv, job->v_cols, end - begin, x->v_dim, 1.0f);
}

inline int backward(const sp_attention* x, const sp_grads* grads, const sp_ranges* ranges,
                    sp_parallel_for parallel_for) {
  int64_t tiles = x->tiles.count;
  Backward job = {};
  job.x = x, job.grads = grads, job.ranges = ranges;
  job.k_words = up((x->dim + PAIR - 1) / PAIR, W), job.v_words = up((x->v_dim + PAIR - 1) / PAIR, W);
  job.k_cols = up(x->dim, W), job.v_cols = up(x->v_dim, W);
  // depends on the shape alone, so that the order of summation does too
  job.chunk = most(64, CHUNK_BYTES / (8 * (job.k_cols + job.v_cols)) / 64 * 64);
  while (job.chunk >= 256 && x->kv_heads * ((x->n + job.chunk - 1) / job.chunk) < TASKS)
    job.chunk = up(job.chunk / 2, 64);
  job.chunks = (x->n + job.chunk - 1) / job.chunk;
  size_t counts = (size_t)(tiles * (2 + x->heads) + job.chunks);
  job.first = static_cast<int32_t*>(sp_allocate(counts * sizeof(int32_t)));
  if (job.first == nullptr) return SP_NO_MEMORY;
  memset(job.first, 0, counts * sizeof(int32_t));
  job.stop = job.first + tiles, job.turns = job.stop + tiles;
  if (ranges->ends.until != nullptr) {
    job.until = job.turns + tiles * x->heads;
    for (int64_t nth = 0; nth < job.chunks; ++nth) {
      job.until[nth] = INT32_MIN;
      for (int64_t run = nth * job.chunk / RUN; run * RUN < least((nth + 1) * job.chunk, x->n); ++run)
        job.until[nth] = (int32_t)most(job.until[nth], ranges->ends.most[run]);
    }
  }
  for (int64_t tile = 0; tile < tiles; ++tile) {
    int64_t begin = INT64_MAX, end = 0;
    for (int64_t i = x->tiles.rows[tile]; i < x->tiles.rows[tile + 1]; ++i)
      if (ranges->begin[i] < ranges->end[i]) begin = least(begin, ranges->begin[i]), end = most(end, ranges->end[i]);
    if (begin < end) {
      job.first[tile] = (int32_t)(begin / job.chunk);
      job.stop[tile] = (int32_t)((end + job.chunk - 1) / job.chunk);
    }
    const int32_t turn = (int32_t)next_chunk(&job, tile, job.first[tile]);
    for (int64_t head = 0; head < x->heads; ++head) job.turns[head * tiles + tile] = turn;
  }
  Chunk none;
  size_t scratch = lay_out(&job, nullptr, &none);
  double work = 5.0 * attended(x, ranges) * (double)(x->dim + x->v_dim);
  int status = sp_run(backward_task, &job, x->kv_heads * job.chunks, scratch, work, parallel_for);
  free(job.first);
  return status;
}

}  // namespace
