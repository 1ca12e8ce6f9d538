// Which keys a query tile sees, block by block, and how a score is computed from a product.
#pragma once

#include "attention/dispatch.h"
#if defined(SP_TILES)
#include "attention/tiles.h"
#else
#include "attention/product.h"
#endif

namespace {

// Vectors of a query tile. Where registers are few, two blocks of them share each row of keys that comes from memory.
#if defined(__AVX2__) && !defined(__AVX512F__)
constexpr int VECTORS = 2 * NV;
#else
constexpr int VECTORS = NV;
#endif
constexpr int BM = VECTORS * W;
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;

// A query tile: each lane's keys [begin, end), and for each vector the keys that any lane sees and that all lanes see.
// Where keys end, these are the keys before some are left out, and `at` has each lane's position, which ascend.
struct Lanes {
  int32_t begin[BM], end[BM], at[BM];
  int64_t first[VECTORS], stop[VECTORS], all_first[VECTORS], all_stop[VECTORS];
  int64_t row, rows, vectors;
  sp_ends ends;
};

// Keys [begin, end) and the vectors [vector, vector + vectors) that see any of them; full: all lanes see all keys.
struct Block {
  int64_t begin, end;
  int vector, vectors;
  bool full;
};

// Rows [row, row + rows) of 32-bit facts as lanes, padded with zeros.
inline void load_lanes(const int32_t* facts, const Lanes* lanes, int32_t* out) {
  memset(out, 0, BM * sizeof(int32_t));
  if (facts != nullptr) memcpy(out, facts + lanes->row, (size_t)lanes->rows * sizeof(int32_t));
}

inline void find_lanes(const sp_attention* x, const sp_ranges* ranges, int64_t tile, Lanes* lanes) {
  lanes->row = x->tiles.rows[tile];
  lanes->rows = x->tiles.rows[tile + 1] - lanes->row;
  lanes->vectors = up(lanes->rows, GROUP * W) / W;
  for (int64_t v = 0; v < lanes->vectors; ++v) {
    int64_t first = INT64_MAX, stop = 0, all_first = 0, all_stop = INT64_MAX;
    for (int64_t i = v * W; i < (v + 1) * W; ++i) {
      bool real = i < lanes->rows;
      int64_t begin = real ? ranges->begin[lanes->row + i] : 0, end = real ? ranges->end[lanes->row + i] : 0;
      lanes->begin[i] = (int32_t)begin, lanes->end[i] = (int32_t)end;
      if (begin < end) first = least(first, begin), stop = most(stop, end);
      all_first = most(all_first, begin), all_stop = least(all_stop, end);
    }
    // never split a pair of keys, or what fills a tile register
    lanes->first[v] = first == INT64_MAX ? first : first / GRAIN * GRAIN;
    lanes->stop[v] = up(stop, GRAIN);
    lanes->all_first[v] = all_first, lanes->all_stop[v] = all_stop;
  }
  lanes->ends = ranges->ends;
  if (lanes->ends.until != nullptr) load_lanes(x->pos, lanes, lanes->at);
}

// The first key from `key` to `limit` whose run is open to the tile's first row, or is not, if `open` is false.
inline int64_t next_run(const Lanes* lanes, int64_t key, int64_t limit, bool open) {
  while (key < limit && (lanes->at[0] < lanes->ends.most[key / RUN]) != open) key = (key / RUN + 1) * RUN;
  return least(key, limit);
}

// The first key from `from` that any vector's bounds admit, or `limit`.
inline int64_t next_key(const Lanes* lanes, int64_t from, int64_t limit) {
  int64_t begin = limit;
  for (int64_t v = 0; v < lanes->vectors; ++v)
    if (from < lanes->stop[v]) begin = least(begin, most(from, lanes->first[v]));
  return begin;
}

// Leaves out of a block the last vectors, to which its keys are closed. Returns the first position that misses a key.
inline int32_t leave_closed(const Lanes* lanes, int64_t begin, int64_t end, int low, int* high) {
  int32_t first = INT32_MAX, last = INT32_MIN;
  for (int64_t run = begin / RUN; run * RUN < end; ++run) {
    first = lanes->ends.least[run] < first ? lanes->ends.least[run] : first;
    last = lanes->ends.most[run] > last ? lanes->ends.most[run] : last;
  }
  while (*high > low && lanes->at[*high * W] >= last) --*high;
  return first;
}

// The next block of at most `keys` keys within [from, limit); false if there is none.
inline bool next_block(const Lanes* lanes, int64_t from, int64_t limit, int64_t keys, Block* block) {
  const bool ends = lanes->ends.until != nullptr;
  int64_t begin = next_key(lanes, from, limit);
  if (ends)
    for (int64_t open; (open = next_run(lanes, begin, limit, true)) != begin;) begin = next_key(lanes, open, limit);
  if (begin >= limit) return false;
  int64_t end = least(begin + keys, limit);
  if (ends) end = next_run(lanes, begin, end, false);
  int low = VECTORS, high = -1;
  int32_t missing = INT32_MAX;
  for (int64_t v = 0; v < lanes->vectors; ++v) {
    if (lanes->first[v] > begin) end = least(end, most(lanes->first[v], begin));
    if (lanes->stop[v] > begin) end = least(end, lanes->stop[v]);
    if (lanes->first[v] <= begin && begin < lanes->stop[v]) {
      low = (int)least(low, v);
      high = (int)v;
    }
  }
  if (ends) missing = leave_closed(lanes, begin, end, low, &high);
  low = low / GROUP * GROUP, high = high / GROUP * GROUP + GROUP - 1;
  block->full = !ends || lanes->at[least((high + 1) * W, lanes->rows) - 1] < missing;
  for (int v = low; v <= high; ++v) block->full &= lanes->all_first[v] <= begin && end <= lanes->all_stop[v];
  block->begin = begin, block->end = end, block->vector = low, block->vectors = high - low + 1;
  return true;
}

inline bool sees(const Lanes* lanes, int64_t lane, int64_t key) {
  return lanes->begin[lane] <= key && key < lanes->end[lane] &&
         (lanes->ends.until == nullptr || lanes->at[lane] < lanes->ends.until[key]);
}

// Which pairs of a block are seen: all, those within the bounds, or of these those whose key has not ended.
enum Pairs { ALL, BOUNDED, OPEN };

inline Pairs pairs_of(const Lanes* lanes, const Block* block) {
  return block->full ? ALL : lanes->ends.until == nullptr ? BOUNDED : OPEN;
}

// The lanes of a vector that see a key, as a mask of all ones.
template <Pairs PAIRS>
inline I seen(const Lanes* lanes, int64_t lane, int64_t key) {
  I at = (I){} + (int32_t)key;
  I see = (load_ints(lanes->begin + lane) <= at) & (at < load_ints(lanes->end + lane));
  return PAIRS == OPEN ? see & (load_ints(lanes->at + lane) < (I){} + lanes->ends.until[key]) : see;
}

// How scores and weights follow from the products of queries and keys, for one head.
struct Score {
  const sp_attention* x;
  bool plain;  // a positive scale and nothing else
  float slope;
  float exponent;  // powers of 2 per unit of the kept value: a product if plain, else a score
  float natural;   // score per unit of the kept value
  uint32_t threshold;
  float kept;  // 1 / (1 - p)
  const int32_t *a, *b;
};

inline Score make_score(const sp_attention* x, int64_t head) {
  Score score = {};
  score.x = x;
  score.plain = x->scale > 0.0f && x->softcap == 0.0f && x->slopes == nullptr;
  score.slope = x->slopes != nullptr ? x->slopes[head] : 0.0f;
  score.natural = score.plain ? x->scale : 1.0f;
  score.exponent = score.natural * LOG2E;
  if (x->drop_a != nullptr && x->dropout_p > 0.0) {
    score.a = x->drop_a + head * x->m;
    score.b = x->drop_b + head * x->n;
    score.threshold = (uint32_t)(x->dropout_p * 4294967296.0);
    score.kept = (float)(1.0 / (1.0 - x->dropout_p));
  }
  return score;
}

// Scores of W queries with one key, from their products. fall: the factor of the gradients under softcap.
inline V scored(const Score* score, V s, I pos, int32_t key_pos, V* fall) {
  s = s * splat(score->x->scale);
  *fall = splat(1.0f);
  if (score->x->softcap != 0.0f) {
    V t = tanh(s / splat(score->x->softcap));
    s = t * splat(score->x->softcap);
    *fall = splat(1.0f) - t * t;
  }
  if (score->x->slopes != nullptr) {
    I far = pos - key_pos;
    far = far < 0 ? -far : far;
    s = s - splat(score->slope) * __builtin_convertvector(far, V);
  }
  return s;
}

// Dropout's factors for W queries and one key.
inline V kept(const Score* score, I a, int32_t b) {
  N x = (N)(a ^ b);
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  x = x ^ (x >> 16);
  return x >= score->threshold ? splat(score->kept) : splat(0.0f);
}

// c[col][lane] += a[key][col] * b[key][lane] over seen pairs only, as multiply_down: for values that are not finite.
inline void add_seen_keys(const Lanes* lanes, const Block* block, const float* a, int64_t a_words, int64_t cols,
                          const float* b, float* c) {
  for (int64_t lane = block->vector * W; lane < (block->vector + block->vectors) * W; ++lane)
    for (int64_t key = block->begin; key < block->end; ++key) {
      if (!sees(lanes, lane, key)) continue;
      float weight = value(b, key - block->begin, BM, lane, ZIPPED);
      for (int64_t col = 0; col < cols; ++col)
        c[col * BM + lane] += value(a, key - block->begin, a_words, col, BANDED) * weight;
    }
}

// c[key][col] += a[key][lane] * b[lane][col], over seen pairs only. a is flat with `words` words a row, b zipped.
inline void add_seen_queries(const Lanes* lanes, const Block* block, const float* a, int64_t a_words, const float* b,
                             int64_t b_words, int64_t cols, float* c, int64_t c_row) {
  for (int64_t key = block->begin; key < block->end; ++key)
    for (int64_t lane = block->vector * W; lane < (block->vector + block->vectors) * W; ++lane) {
      if (!sees(lanes, lane, key)) continue;
      float weight = value(a, key - block->begin, a_words, lane, FLAT);
      for (int64_t col = 0; col < cols; ++col)
        c[(key - block->begin) * c_row + col] += weight * value(b, lane, b_words, col, ZIPPED);
    }
}

}  // namespace
