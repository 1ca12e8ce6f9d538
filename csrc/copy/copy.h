// Copies of many strided tensors at once: what a rank packs, unpacks, or moves straight to where it belongs.
#pragma once

#include <stdint.h>

#include "base/dims.h"
#include "base/parallel.h"

#ifdef __cplusplus
extern "C" {
#endif

// One copy of `shape` elements of `size` bytes (1, 2, 4, 8 or 16). Strides are in elements. Where there are row
// numbers, int32 or int64 by `row_bits`, index i of dim 0 is row number[i] of that side's memory.
typedef struct {
  const void* src;
  void* dst;
  const void *src_rows, *dst_rows;
  int32_t row_bits, ndim, size;
  int64_t shape[SP_DIMS], src_strides[SP_DIMS], dst_strides[SP_DIMS];
} sp_copy_item;

// Makes n copies, in any order: no destination may overlap another one, itself, or a source. Neither that nor row
// numbers are checked. `parallel_for` NULL: on the calling thread alone.
// Returns 0, or 1 + the number of the first item that is none, in which case nothing was written.
int sp_copy(const sp_copy_item* items, int64_t n, sp_parallel_for parallel_for);

#ifdef __cplusplus
}
#endif
