// One chunk of one head, from the state that enters it. With G the sum of log decays from the chunk's start, for
// rows i and j and the state S that enters:
//
//     pairs      P_ij = scale exp(G_i - G_j) (q_i k_j), j <= i      M_ij = exp(G_i - G_j) (k_i k_j), j < i
//     delta rule X = v - exp(G) k S      u_i + sum over j < i of beta_i M_ij u_j = beta_i X_i      without beta u = v
//     results    out = scale exp(G) q S + P u      S <- exp(G_end) S + (exp(G_end - G) k)^T u
//
// Pairs lie transposed, see pairs.h. Zeros fill up the last block of rows.
#pragma once

#include "recurrent/pairs.h"

namespace {

// u <- (1 + beta M)^-1 u, a block of rows after another.
template <class T>
inline void solve(const Chunk<T>* c, T* u) {
  constexpr int LANES = Lanes<T>::COUNT;
  const int64_t words = c->v_words;
  for (int64_t first = 0; first < c->padded; first += BLOCK) {
    multiply<SUBTRACT>(words, c->system + first, 1, ROWS, u, words, u + first * words, words, first > 0 ? BLOCK : 0,
                       first);
    for (int64_t n = 0; n < words; n += LANES)
      for (int64_t i = first + 1; i < first + BLOCK; ++i) {
        Vec<T> sum = take(u + i * words + n);
        for (int64_t j = first; j < i; ++j) sum -= take(u + j * words + n) * splat(c->system[j * ROWS + i]);
        put(u + i * words + n, sum);
      }
  }
}

// u <- (1 + beta M)^-T u.
template <class T>
inline void solve_back(const Chunk<T>* c, T* u) {
  constexpr int LANES = Lanes<T>::COUNT;
  const int64_t words = c->v_words;
  for (int64_t first = c->padded - BLOCK; first >= 0; first -= BLOCK) {
    const int64_t after = first + BLOCK, later = c->padded - after;
    multiply<SUBTRACT>(words, c->system + first * ROWS + after, ROWS, 1, u + after * words, words, u + first * words,
                       words, later > 0 ? BLOCK : 0, later);
    for (int64_t n = 0; n < words; n += LANES)
      for (int64_t j = after - 2; j >= first; --j) {
        Vec<T> sum = take(u + j * words + n);
        for (int64_t i = j + 1; i < after; ++i) sum -= take(u + i * words + n) * splat(c->system[j * ROWS + i]);
        put(u + j * words + n, sum);
      }
  }
}

// Loads the rows [row, row + rows) and computes everything that stands before `results` in the head of this file, from
// the state that enters. v becomes X.
template <class T>
inline void begin_chunk(Chunk<T>* c, int64_t row, int64_t rows) {
  const sp_recurrence* x = c->x;
  const Decays<T>* d = &c->decays;
  const int64_t group = c->head / (x->heads / x->groups), words = c->words;
  c->row = row, c->rows = rows, c->padded = up(rows, BLOCK);
  const int64_t n = c->padded;
  stage(c, x->k, x->k_row, group, x->dim, c->k, words);
  stage(c, x->v, x->v_row, c->head, x->v_dim, c->v, c->v_words);
  if (d->channels)
    channel_decays(c, x->q != nullptr || x->beta != nullptr);
  else
    scalar_decays(c);
  scaled(d, d->until, c->k, T(1), c->k_until, words, n);
  if (x->q != nullptr) {
    stage(c, x->q, x->q_row, group, x->dim, c->q, words);
    if (d->channels) scaled(d, d->head, c->q, (T)x->scale, c->q_since, words, n);
    turn(d->channels ? c->q_since : c->q, words, n, words, c->q_turned, ROWS);
    scaled(d, d->since, c->q, (T)x->scale, c->q_since, words, n);
  }
  if (x->beta != nullptr) {
    stage(c, x->beta, x->beta_row, c->head, 1, c->beta, 1);
    if (d->channels) scaled(d, d->head, c->k, T(1), c->k_since, words, n);
    turn(d->channels ? c->k_since : c->k, words, n, words, c->k_turned, ROWS);
    scaled(d, d->since, c->k, T(1), c->k_since, words, n);
  }
  if (x->q != nullptr || x->beta != nullptr) find_pairs(c);
  if (x->beta == nullptr) {
    c->u = c->v;
    return;
  }
  multiply<SUBTRACT>(c->v_words, c->k_since, words, 1, c->state, c->v_words, c->v, c->v_words, n, x->dim);
  for (int64_t r = 0; r < n; ++r)
    for (int64_t i = 0; i < c->v_words; i += Lanes<T>::COUNT)
      put(c->u + r * c->v_words + i, take(c->v + r * c->v_words + i) * splat(c->beta[r]));
  solve(c, c->u);
}

}  // namespace
