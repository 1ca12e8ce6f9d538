// Tasks on the caller's threads, each with scratch memory.
#pragma once

#include <stddef.h>

#include "base/parallel.h"

enum { SP_NO_MEMORY = 2 };

// Runs tasks 0 to count - 1, started in ascending order, on the threads of parallel_for. Each thread has `scratch`
// bytes, aligned to a page. work: floating-point operations of all tasks; a small amount runs on one thread. Returns 0
// or SP_NO_MEMORY.
typedef void (*sp_job)(void* job, int64_t task, char* scratch);
int sp_run(sp_job run, void* job, int64_t count, size_t scratch, double work, sp_parallel_for parallel_for);

// Memory aligned to a page; NULL if there is none left. Release it with free().
void* sp_allocate(size_t bytes);
