// The pairs of a chunk's rows, with the later row along the lanes. Rows come in blocks of 16.
//
// With a decay for each channel, pairs of one block multiply the decays of single rows one after another; for pairs of
// two blocks, decays are relative to the later one's first row. Source: Yang et al. 2024 (gated linear attention),
// section 4.3, secondary chunking.
#pragma once

#include "recurrent/decays.h"

namespace {

// k of the rows before a block with decays up to it, from those up to the block before.
template <class T>
inline void carry_keys(const Chunk<T>* c, int64_t block) {
  const Decays<T>* d = &c->decays;
  const int64_t words = c->words, own = (block - 1) * BLOCK;
  for (int64_t r = 0; r < own; ++r)
    scaled(d, d->whole + (block - 1) * words, c->far + r * words, T(1), c->far + r * words, words, 1);
  scaled(d, d->tail + own * words, c->k + own * words, T(1), c->far + own * words, words, BLOCK);
}

// The pairs of one block, with decays multiplied row by row.
template <class T>
inline void pairs_of_block(Chunk<T>* c, int64_t first) {
  constexpr int LANES = Lanes<T>::COUNT;
  const int64_t words = c->words;
  const bool reads = c->x->q != nullptr, solves = c->x->beta != nullptr;
  for (int64_t j = first; j < first + BLOCK; ++j) {
    for (int64_t i = first; i < j; ++i) c->p[j * ROWS + i] = c->m[j * ROWS + i] = T(0);
    memcpy(c->line, c->k + j * words, (size_t)words * sizeof(T));
    for (int64_t i = j; i < first + BLOCK; ++i) {
      Vec<T> one = splat(T(0)), two = splat(T(0));
      for (int64_t n = 0; n < words; n += LANES) {
        Vec<T> y = take(c->line + n);
        if (i > j) y *= take(c->decays.step + i * words + n), put(c->line + n, y);
        if (reads) one = fma(y, take(c->q + i * words + n), one);
        if (solves && i > j) two = fma(y, take(c->k + i * words + n), two);
      }
      c->p[j * ROWS + i] = sum_of(one) * (T)c->x->scale, c->m[j * ROWS + i] = sum_of(two);
    }
  }
}

template <class T>
inline void find_pairs(Chunk<T>* c) {
  constexpr int LANES = Lanes<T>::COUNT;
  const Decays<T>* d = &c->decays;
  const int64_t words = c->words, n = c->padded, dim = c->x->dim;
  const bool reads = c->x->q != nullptr, solves = c->x->beta != nullptr;
  const T scale = (T)c->x->scale;
  if (d->channels) {
    for (int64_t first = 0; first < n; first += BLOCK) {
      pairs_of_block(c, first);
      if (first == 0) continue;
      carry_keys(c, first / BLOCK);
      if (reads) multiply<SET>(BLOCK, c->far, words, 1, c->q_turned + first, ROWS, c->p + first, ROWS, first, dim);
      if (solves) multiply<SET>(BLOCK, c->far, words, 1, c->k_turned + first, ROWS, c->m + first, ROWS, first, dim);
    }
  }
  for (int64_t first = 0; first < n; first += BLOCK) {
    const int64_t at = first * ROWS + first;
    if (!d->channels && reads)
      multiply<SET>(n - first, c->k + first * words, words, 1, c->q_turned + first, ROWS, c->p + at, ROWS, BLOCK, dim);
    if (!d->channels && solves)
      multiply<SET>(n - first, c->k + first * words, words, 1, c->k_turned + first, ROWS, c->m + at, ROWS, BLOCK, dim);
    for (int64_t j = first; j < first + BLOCK; ++j)
      for (int64_t i = first; i < n; i += LANES) {
        T *p = c->p + j * ROWS + i, *m = c->m + j * ROWS + i;
        const Vec<T> by = d->channels ? splat(T(1)) : take(d->within + j * ROWS + i);
        if (reads && !d->channels) put(p, take(p) * (by * splat(scale)));
        if (!solves) continue;
        put(m, take(m) * by);
        if (i <= j && j < i + LANES) m[j - i] = T(0);
        put(c->system + j * ROWS + i, take(m) * take(c->beta + i));
      }
  }
}

}  // namespace
