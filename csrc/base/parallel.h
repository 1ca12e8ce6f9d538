// How code without a thread pool of its own borrows its caller's.
#pragma once

#include <stdint.h>

typedef void (*sp_task)(int64_t begin, int64_t end, void* context);

// Splits [begin, end) into ranges of at least `grain` (the last may be shorter) and calls the task on each, on any
// thread of the caller's pool. It may call the task once, with the whole range.
typedef void (*sp_parallel_for)(int64_t begin, int64_t end, int64_t grain, sp_task task, void* context);
