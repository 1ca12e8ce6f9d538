// What attention.cpp and the files compiled for one ISA know of each other.
#pragma once

#include <stddef.h>

#include "attention/attention.h"

// Query row i sees the key rows [begin[i], end[i]), none if they are equal.
struct sp_ranges {
  const int32_t *begin, *end;
};

struct sp_kernels {
  int64_t bm, bn;
  int (*forward)(const sp_attention*, const sp_sums*, const sp_ranges*, sp_parallel_for);
  int (*backward)(const sp_attention*, const sp_grads*, const sp_ranges*, sp_parallel_for);
};

extern const sp_kernels sp_attention_portable, sp_attention_avx2, sp_attention_avx512, sp_attention_avx512_bf16;

// Runs tasks 0 to count in ascending order of their start, on the threads of parallel_for, each with a scratch of that
// many bytes, aligned to a page. work: of all tasks, in floating-point operations, so that little is not spread.
typedef void (*sp_job)(void* job, int64_t task, char* scratch);
int sp_run(sp_job run, void* job, int64_t count, size_t scratch, double work, sp_parallel_for parallel_for);

// Aligned to a page; NULL if there is no memory. Freed by free().
void* sp_allocate(size_t bytes);
