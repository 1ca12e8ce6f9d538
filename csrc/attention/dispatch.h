// What attention.cpp and the files compiled for one ISA share.
#pragma once

#include <stddef.h>

#include "attention/attention.h"

// Query row i sees key rows [begin[i], end[i]); none if the two are equal.
struct sp_ranges {
  const int32_t *begin, *end;
};

// forward, packs: float32 keys and values may be copied, so that the rows of a head lie close.
struct sp_kernels {
  int64_t bm, bn;
  int (*forward)(const sp_attention*, const sp_sums*, const sp_ranges*, bool packs, sp_parallel_for);
  int (*backward)(const sp_attention*, const sp_grads*, const sp_ranges*, sp_parallel_for);
};

extern const sp_kernels sp_attention_portable, sp_attention_avx2, sp_attention_avx512, sp_attention_avx512_bf16,
    sp_attention_amx;

// Runs tasks 0 to count - 1, started in ascending order, on the threads of parallel_for. Each thread has `scratch`
// bytes, aligned to a page. work: floating-point operations of all tasks; a small amount runs on one thread.
typedef void (*sp_job)(void* job, int64_t task, char* scratch);
int sp_run(sp_job run, void* job, int64_t count, size_t scratch, double work, sp_parallel_for parallel_for);

// Memory aligned to a page; NULL if there is none left. Release it with free().
void* sp_allocate(size_t bytes);
