// Copies many strided tensors at once: packs, unpacks, or moves them straight to their destination.
#pragma once

#include <stdint.h>

#include "base/dims.h"
#include "base/parallel.h"

#ifdef __cplusplus
extern "C" {
#endif

// Copies `shape` elements of `size` bytes (1, 2, 4, 8 or 16). Strides are in elements. With row numbers, int32 or int64
// by `row_bits`, index i of dim 0 stands for row number[i] of that side.
typedef struct {
  const void* src;
  void* dst;
  const void *src_rows, *dst_rows;
  int32_t row_bits, ndim, size;
  int64_t shape[SP_DIMS], src_strides[SP_DIMS], dst_strides[SP_DIMS];
} sp_copy_item;

// Makes n copies in any order. No destination may overlap another, itself or a source, and row numbers must be in
// range: neither is checked. `parallel_for` NULL: on the calling thread. Returns 0, or 1 + the number of the first
// invalid item, and then nothing was written.
int sp_copy(const sp_copy_item* items, int64_t n, sp_parallel_for parallel_for);

#ifdef __cplusplus
}
#endif
