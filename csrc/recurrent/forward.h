// Forward: a run's chunks one after another.
#pragma once

#include <stdlib.h>

#include "recurrent/chunk.h"

namespace {

template <class T>
struct Forward {
  const sp_recurrence* x;
  const sp_recurrent_sums* sums;
};

template <class T>
inline T* place_forward(Chunk<T>* c, const sp_recurrence* x, Arena* arena) {
  place(c, x, arena);
  return panel<T>(arena, ROWS * c->v_words);
}

template <class T>
inline void forward_task(void* context, int64_t task, char* scratch) {
  const Forward<T>* job = static_cast<const Forward<T>*>(context);
  const sp_recurrence* x = job->x;
  const int64_t run = x->order[task / x->heads], end = x->end[run];
  Arena arena = {scratch, 0};
  Chunk<T> c = {};
  T* out = place_forward(&c, x, &arena);
  c.head = task % x->heads;
  load_state(x->entering, run, &c, c.state);
  for (int64_t row = x->begin[run], chunk = x->chunk[run]; row < end; row += ROWS, ++chunk) {
    const int64_t vw = c.v_words;
    if (job->sums->entered != nullptr) store_state(c.state, &c, job->sums->entered, chunk);
    begin_chunk(&c, row, least(ROWS, end - row));
    if (x->q != nullptr) {
      multiply<SET>(vw, c.q_since, c.words, 1, c.state, vw, out, vw, c.padded, x->dim);
      for (int64_t first = 0; first < c.padded; first += BLOCK)
        multiply<ADD>(vw, c.p + first, 1, ROWS, c.u, vw, out + first * vw, vw, BLOCK, first + BLOCK);
      unstage(&c, out, vw, x->v_dim, job->sums->out);
    }
    shrink(&c, c.state);
    multiply<ADD>(vw, c.k_until, 1, c.words, c.u, vw, c.state, vw, x->dim, c.padded);
  }
  store_state(c.state, &c, job->sums->left, run);
}

// Multiply-adds of forward, twice.
inline double work_of(const sp_recurrence* x) {
  double rows = 0;
  for (int64_t run = 0; run < x->runs; ++run) rows += (double)(x->end[run] - x->begin[run]);
  return rows * (double)(x->heads * (6 * x->dim * x->v_dim + 4 * ROWS * (x->dim + x->v_dim)));
}

template <class T>
inline int forward_of(const sp_recurrence* x, const sp_recurrent_sums* sums, sp_parallel_for parallel_for) {
  Forward<T> job = {x, sums};
  Arena arena = {};
  Chunk<T> c = {};
  place_forward(&c, x, &arena);
  return sp_run(forward_task<T>, &job, x->runs * x->heads, arena.used, work_of(x), parallel_for);
}

}  // namespace
