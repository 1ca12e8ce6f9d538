// What attention.cpp and the files compiled for one ISA share.
#pragma once

#include "attention/attention.h"
#include "base/tasks.h"

constexpr int64_t RUN = 32;  // keys of a run, a multiple of every GRAIN

// Where keys end: until [keys, padded to whole runs], and its least and greatest value in each run.
struct sp_ends {
  const int32_t *until, *least, *most;
};

// Query row i sees key rows [begin[i], end[i]), none if the two are equal; of them only the open ones if ends.until.
struct sp_ranges {
  const int32_t *begin, *end;
  sp_ends ends;
};

// forward, packs: float32 keys and values may be copied, so that the rows of a head lie close.
struct sp_kernels {
  int64_t bm, bn;
  int (*forward)(const sp_attention*, const sp_sums*, const sp_ranges*, bool packs, sp_parallel_for);
  int (*backward)(const sp_attention*, const sp_grads*, const sp_ranges*, sp_parallel_for);
};

extern const sp_kernels sp_attention_portable, sp_attention_avx2, sp_attention_avx512, sp_attention_avx512_bf16,
    sp_attention_amx;
