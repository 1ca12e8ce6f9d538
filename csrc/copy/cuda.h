// Copies of many strided tensors on a CUDA device. Destinations may lie in peers' memory that is mapped here: then one
// launch pushes what all peers get straight to where it belongs.
#pragma once

#include "copy/copy.h"

#ifdef __cplusplus
extern "C" {
#endif

// As sp_copy, on a CUDA stream of the current device; pointers and row numbers are the device's, and one launch makes
// up to 64 copies. Returns 0, a cudaError_t, or -1 - the number of the first item that is none.
int sp_cuda_copy(const sp_copy_item* items, int64_t n, void* stream);

#ifdef __cplusplus
}
#endif
