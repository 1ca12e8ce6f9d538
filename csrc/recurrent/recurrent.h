// Recurrences over runs of rows on the CPU, as seqpar/kernels/recurrent/protocol.py defines them, without torch.
//
// All tensors are of one type: float, or double if `wide`. Inputs have dense rows with a stride between them, as some
// heads of more have; others are dense. Results are the same to the bit for any number of threads: a task is one head
// of one run.
#pragma once

#include "base/tasks.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { SP_CHUNK = 64 };  // rows; a run's last chunk may have fewer
enum { SP_DECAY_NONE = 0, SP_DECAY_SCALAR = 1, SP_DECAY_CHANNEL = 2 };

// q, k [rows][groups][dim]; v [rows][heads][v_dim]; head h reads group h / (heads / groups). decay: nothing,
// [rows][heads] or [rows][heads][dim]. beta [rows][heads], or NULL without the delta rule. q is NULL where only states
// are wanted. entering [runs][heads][dim][v_dim]. Run n has the rows begin[n] to end[n] and the chunks from chunk[n]
// on; order: long runs first.
typedef struct {
  int wide, decays;
  int64_t runs, heads, groups, dim, v_dim;
  const int64_t *begin, *end, *chunk, *order;
  const void *q, *k, *v, *decay, *beta, *entering;
  int64_t q_row, k_row, v_row, decay_row, beta_row;  // elements from a row to the next
  double scale;
} sp_recurrence;

// out [rows][heads][v_dim], NULL without q. left: the state that each run leaves. entered [chunks][heads][dim][v_dim]:
// the state that enters each chunk, or NULL if it is not needed.
typedef struct {
  void *out, *left, *entered;
} sp_recurrent_sums;

// Gradients, written for the rows of all runs. dq and dk [rows][heads][dim]: those of a group are the sum over its
// heads. dout and dq are NULL without q, ddecay and dbeta without decay and beta.
typedef struct {
  const void *dout, *dleft, *entered;
  void *dq, *dk, *dv, *ddecay, *dbeta, *dentering;
  int64_t dout_row;
} sp_recurrent_grads;

// Return 0 or SP_NO_MEMORY. isa: at most sp_isa().
int sp_recurrent_forward(const sp_recurrence* x, const sp_recurrent_sums* sums, int isa, sp_parallel_for parallel_for);
int sp_recurrent_backward(const sp_recurrence* x, const sp_recurrent_grads* grads, int isa,
                          sp_parallel_for parallel_for);

#ifdef __cplusplus
}
#endif
