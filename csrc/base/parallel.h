// How code without a thread pool of its own uses its caller's.
#pragma once

#include <stdint.h>

typedef void (*sp_task)(int64_t begin, int64_t end, void* context);

// Calls the task on ranges that make up [begin, end), each of at least `grain` but the last, on whichever threads the
// caller has; it may call it once, for everything.
typedef void (*sp_parallel_for)(int64_t begin, int64_t end, int64_t grain, sp_task task, void* context);
