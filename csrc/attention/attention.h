// Attention of query rows over one buffer of keys on the CPU, as seqpar/kernels/protocol.py defines it, without torch.
//
// Strides count elements; the last dim is dense, the others are arbitrary. Results are the same to the bit for any
// number of threads.
#pragma once

#include "base/tasks.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { SP_F32 = 0, SP_BF16 = 1 };

// Query tiles, as in seqpar.facts.tiles.Tiles. rows [count + 1]: the first row of each tile, at most bm rows apart;
// order: heavy tiles first. The kernels find the keys of each row from its bounds.
typedef struct {
  int64_t count, bm;
  const int64_t *rows, *order;
} sp_tiles;

typedef struct {
  int dtype;
  int64_t m, n, heads, kv_heads, dim, v_dim;
  const void *q, *k, *v;
  int64_t q_row, q_head, k_row, k_head, v_row, v_head;
  const int32_t *pos, *lo, *hi, *key_pos;  // row i sees key j iff lo[i] <= key_pos[j] < hi[i]; key_pos ascends
  const int32_t* until;                    // and pos[i] < until[j], with ascending pos; NULL if no key ends
  float scale, softcap;                    // softcap 0: off
  const float* slopes;                     // ALiBi's slopes [heads], or NULL
  double dropout_p;                        // double: the threshold floor(p * 2^32) needs more bits than a float has
  const int32_t *drop_a, *drop_b;          // words [heads][m] and [heads][n]; see seqpar/kernels/dropout.py
  sp_tiles tiles;
} sp_attention;

// acc [m][heads][v_dim], or NULL if not needed. lse [heads][m], dense along the rows. out in dtype, or NULL; in
// float32 it may share acc's memory. first: acc and lse hold no earlier sums. top [heads][m], dense along the rows:
// raised to each row's largest scaled product, NaN if one is NaN; or NULL. Not with softcap or ALiBi.
typedef struct {
  float* acc;
  int64_t acc_row, acc_head;
  float* lse;
  int64_t lse_head;
  void* out;
  int64_t out_row, out_head;
  int first;
  float* top;
  int64_t top_head;
} sp_sums;

// dout in dtype; lse and delta as in sp_sums. dq, dk and dv are added to.
typedef struct {
  const void* dout;
  int64_t dout_row, dout_head;
  const float *lse, *delta;
  int64_t lse_head, delta_head;
  float *dq, *dk, *dv;
  int64_t dq_row, dq_head, dk_row, dk_head, dv_row, dv_head;
} sp_grads;

// The tile shape that the tables should use. Tables with a larger bm are refused.
void sp_attention_tile(int isa, int dtype, int64_t* bm, int64_t* bn);

// Returns 0; SP_UNSUPPORTED if a head dim exceeds SP_MAX_DIM, the tables have larger tiles, kv_heads does not divide
// heads, or scores are more than scaled and top is asked for; or SP_NO_MEMORY. isa: at most sp_isa().
enum { SP_MAX_DIM = 1024 };
enum { SP_UNSUPPORTED = 1 };
int sp_attention_forward(const sp_attention* x, const sp_sums* sums, int isa, sp_parallel_for parallel_for);
int sp_attention_backward(const sp_attention* x, const sp_grads* grads, int isa, sp_parallel_for parallel_for);

#ifdef __cplusplus
}
#endif
