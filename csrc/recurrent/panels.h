// The panels of one chunk of one head: memory that a thread has once, with rows of whole vectors. See chunk.h.
#pragma once

#include "recurrent/product.h"
#include "recurrent/recurrent.h"

namespace {

constexpr int64_t ROWS = SP_CHUNK, BLOCK = 16, BLOCKS = ROWS / BLOCK;

// Takes panels from a thread's scratch; counts them if there is none.
struct Arena {
  char* at;
  size_t used;
};

template <class T>
inline T* panel(Arena* arena, int64_t count) {
  T* result = arena->at != nullptr ? (T*)(arena->at + arena->used) : nullptr;
  arena->used += (size_t)up(count * (int64_t)sizeof(T), 64);
  return result;
}

// What decays do in a chunk. A row of each panel has a factor for each channel; one for all without `channels`.
// since: from the chunk's start. until: to its end. step: of the row itself. head: from the block's start. tail: to the
// block's end. whole: over each block. total: over the chunk. sums: of logarithms, without channels. within
// [ROWS][ROWS]: exp(G_i - G_j) at [j][i], without channels; 1 on the diagonal and 0 below it.
template <class T>
struct Decays {
  bool channels;
  int64_t row;
  T *since, *until, *step, *head, *tail, *whole, *total, *within;
  double* sums;
};

template <class T>
struct Chunk {
  const sp_recurrence* x;
  int64_t head, words, v_words;    // of padded rows of q and k, and of v
  int64_t row, rows, padded;       // the first row, how many, and with the zeros behind them
  T *q, *k, *v, *beta;             // as given; without the delta rule u is v
  T *q_since, *k_since, *k_until;  // with decays, and q with the scale
  T *q_turned, *k_turned;          // [words][ROWS], with decays from the block's start if there are channels
  T* far;                          // k with decays up to the block that is being computed
  T *p, *m, *system;               // [ROWS][ROWS]: P_ij at [j][i], and so M and beta M
  T *u, *state, *line;             // state [words][v_words]; line: of one row
  Decays<T> decays;
};

template <class T>
inline void place(Chunk<T>* c, const sp_recurrence* x, Arena* arena) {
  c->x = x, c->words = up(x->dim, 16), c->v_words = up(x->v_dim, 16);
  const int64_t keys = ROWS * c->words, values = ROWS * c->v_words;
  c->q = panel<T>(arena, keys), c->k = panel<T>(arena, keys), c->v = panel<T>(arena, values);
  c->beta = panel<T>(arena, ROWS), c->u = panel<T>(arena, values);
  c->q_since = panel<T>(arena, keys), c->k_since = panel<T>(arena, keys), c->k_until = panel<T>(arena, keys);
  c->q_turned = panel<T>(arena, keys), c->k_turned = panel<T>(arena, keys), c->line = panel<T>(arena, c->words);
  c->p = panel<T>(arena, ROWS * ROWS), c->system = panel<T>(arena, ROWS * ROWS), c->m = panel<T>(arena, ROWS * ROWS);
  c->state = panel<T>(arena, c->words * c->v_words);
  Decays<T>* d = &c->decays;
  d->channels = x->decays == SP_DECAY_CHANNEL, d->row = d->channels ? c->words : 1;
  const int64_t count = ROWS * d->row;
  d->since = panel<T>(arena, count), d->until = panel<T>(arena, count), d->total = panel<T>(arena, d->row);
  if (!d->channels) {
    d->sums = panel<double>(arena, ROWS);
    d->within = panel<T>(arena, ROWS * ROWS);
    return;
  }
  c->far = panel<T>(arena, keys), d->step = panel<T>(arena, count);
  d->head = panel<T>(arena, count), d->tail = panel<T>(arena, count), d->whole = panel<T>(arena, BLOCKS * d->row);
}

// Copies rows of one head of a tensor [rows][heads][cols] into a panel. stride: elements from a row to the next.
template <class T>
inline void stage(const Chunk<T>* c, const void* x, int64_t stride, int64_t head, int64_t cols, T* to, int64_t words) {
  const T* from = (const T*)x + c->row * stride + head * cols;
  for (int64_t r = 0; r < c->rows; ++r) {
    memcpy(to + r * words, from + r * stride, (size_t)cols * sizeof(T));
    if (words > cols) memset(to + r * words + cols, 0, (size_t)(words - cols) * sizeof(T));
  }
  memset(to + c->rows * words, 0, (size_t)((c->padded - c->rows) * words) * sizeof(T));
}

// Copies a panel into rows of a dense tensor [rows][heads][cols].
template <class T>
inline void unstage(const Chunk<T>* c, const T* from, int64_t words, int64_t cols, void* x) {
  const int64_t heads = c->x->heads;
  T* to = (T*)x + (c->row * heads + c->head) * cols;
  for (int64_t r = 0; r < c->rows; ++r) memcpy(to + r * heads * cols, from + r * words, (size_t)cols * sizeof(T));
}

template <class T>
inline void load_state(const void* x, int64_t number, const Chunk<T>* c, T* to) {
  const int64_t dim = c->x->dim, cols = c->x->v_dim;
  const T* from = (const T*)x + (number * c->x->heads + c->head) * dim * cols;
  for (int64_t r = 0; r < dim; ++r) {
    memcpy(to + r * c->v_words, from + r * cols, (size_t)cols * sizeof(T));
    if (c->v_words > cols) memset(to + r * c->v_words + cols, 0, (size_t)(c->v_words - cols) * sizeof(T));
  }
  memset(to + dim * c->v_words, 0, (size_t)((c->words - dim) * c->v_words) * sizeof(T));
}

template <class T>
inline void store_state(const T* from, const Chunk<T>* c, void* x, int64_t number) {
  const int64_t dim = c->x->dim, cols = c->x->v_dim;
  T* to = (T*)x + (number * c->x->heads + c->head) * dim * cols;
  for (int64_t r = 0; r < dim; ++r) memcpy(to + r * cols, from + r * c->v_words, (size_t)cols * sizeof(T));
}

}  // namespace
