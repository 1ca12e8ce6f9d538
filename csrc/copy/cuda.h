// Copies many strided tensors on a CUDA device. A destination may be a peer's memory, mapped here: one launch then
// pushes every peer's data straight to its destination.
#pragma once

#include "copy/copy.h"

#ifdef __cplusplus
extern "C" {
#endif

// As sp_copy, on a CUDA stream of the current device. Pointers and row numbers are on the device; a launch makes up to
// 64 copies. Returns 0, a cudaError_t, or -1 - the number of the first invalid item.
int sp_cuda_copy(const sp_copy_item* items, int64_t n, void* stream);

#ifdef __cplusplus
}
#endif
