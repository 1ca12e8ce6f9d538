// A copy with adjacent dims merged where possible; shared by all kernels.
#pragma once

#include <algorithm>
#include <vector>

#include "copy/copy.h"

namespace seqpar {

struct CopyDim {
  int64_t count, src, dst;  // strides in bytes
  const void *src_rows, *dst_rows;
  bool numbered() const { return src_rows || dst_rows; }
};

inline bool valid(const sp_copy_item& item) {
  bool ok = 0 <= item.ndim && item.ndim <= SP_DIMS;
  ok = ok && 0 < item.size && item.size <= 16 && !(item.size & (item.size - 1));
  if (ok && (item.src_rows || item.dst_rows)) ok = item.ndim > 0 && (item.row_bits == 32 || item.row_bits == 64);
  for (int d = 0; ok && d < item.ndim; d++) ok = item.shape[d] >= 0;
  return ok;
}

inline int64_t elements(const sp_copy_item& item) {
  int64_t n = 1;
  for (int d = 0; d < item.ndim; d++) n *= item.shape[d];
  return n;
}

// The bytes of a run, which is contiguous on both sides, and the dims around it, merged where one continues the other
// and ordered as in the source or in the destination.
inline int64_t simplify(const sp_copy_item& item, std::vector<CopyDim>& dims, bool by_dst) {
  for (int d = 0; d < item.ndim; d++) {
    const CopyDim dim = {item.shape[d], item.src_strides[d] * item.size, item.dst_strides[d] * item.size,
                         d ? nullptr : item.src_rows, d ? nullptr : item.dst_rows};
    if (dim.count != 1 || dim.numbered()) dims.push_back(dim);
  }
  int64_t run = item.size;
  auto continues = [&](const CopyDim& d) { return !d.numbered() && d.src == run && d.dst == run; };
  for (auto d = dims.begin(); (d = std::find_if(dims.begin(), dims.end(), continues)) != dims.end();) {
    run *= d->count;
    dims.erase(d);
  }
  std::stable_sort(dims.begin(), dims.end(), [=](const CopyDim& a, const CopyDim& b) {
    const int64_t one = by_dst ? a.dst - b.dst : a.src - b.src, other = by_dst ? a.src - b.src : a.dst - b.dst;
    return one ? one > 0 : other > 0;
  });
  for (size_t d = 0; d + 1 < dims.size();) {
    const CopyDim &a = dims[d], &b = dims[d + 1];
    if (a.numbered() || b.numbered() || a.src != b.src * b.count || a.dst != b.dst * b.count) {
      d++;
      continue;
    }
    dims[d] = {a.count * b.count, b.src, b.dst, nullptr, nullptr};
    dims.erase(dims.begin() + d + 1);
  }
  return run;
}

}  // namespace seqpar
