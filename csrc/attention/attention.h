// Attention of query rows over one buffer of keys on the CPU: what seqpar/kernels/protocol.py defines, without torch.
//
// Strides count elements; the last dim is dense, all else is arbitrary. Results do not depend on the number of threads,
// to the bit.
#pragma once

#include "base/parallel.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { SP_F32 = 0, SP_BF16 = 1 };

// Query tiles, as seqpar.facts.tiles.Tiles has them: rows [count + 1], the first row of each; order, heavy ones first.
// A tile has at most bm rows. Which keys a tile sees, kernels find from the bounds, to the row.
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
  float scale, softcap;                    // softcap 0: none
  const float* slopes;                     // ALiBi's [heads], or NULL
  double dropout_p;                        // double, since the threshold floor(p * 2^32) has more bits than a float
  const int32_t *drop_a, *drop_b;          // words [heads][m] and [heads][n]; see seqpar/kernels/dropout.py
  sp_tiles tiles;
} sp_attention;

// acc [m][heads][v_dim], NULL if not needed. lse [heads][m], the rows of a head side by side. out: in dtype, or NULL;
// float32 calls may give acc's memory. first: acc and lse hold nothing yet.
typedef struct {
  float* acc;
  int64_t acc_row, acc_head;
  float* lse;
  int64_t lse_head;
  void* out;
  int64_t out_row, out_head;
  int first;
} sp_sums;

// dout in dtype; lse and delta as above; dq, dk, dv are added to.
typedef struct {
  const void* dout;
  int64_t dout_row, dout_head;
  const float *lse, *delta;
  int64_t lse_head, delta_head;
  float *dq, *dk, *dv;
  int64_t dq_row, dq_head, dk_row, dk_head, dv_row, dv_head;
} sp_grads;

// The shape of the tiles that the tables should have. Tables of other bm are refused if it is larger.
void sp_attention_tile(int isa, int dtype, int64_t* bm, int64_t* bn);

// 0; SP_UNSUPPORTED for a head dim beyond SP_MAX_DIM, for tables of larger tiles, or for heads that key heads do not
// divide; or SP_NO_MEMORY. isa: at most sp_isa().
enum { SP_MAX_DIM = 1024 };
enum { SP_UNSUPPORTED = 1, SP_NO_MEMORY = 2 };
int sp_attention_forward(const sp_attention* x, const sp_sums* sums, int isa, sp_parallel_for parallel_for);
int sp_attention_backward(const sp_attention* x, const sp_grads* grads, int isa, sp_parallel_for parallel_for);

#ifdef __cplusplus
}
#endif
