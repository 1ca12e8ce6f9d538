// Many copies in one launch. The items are kernel parameters, which live in constant memory, so nothing is uploaded.
// Each thread loads UNROLL vectors before it stores one. The first blocks belong to different items, so that the links
// to all peers are busy from the start.

#include <cuda_runtime.h>

#include <algorithm>
#include <vector>

#include "copy/cuda.h"
#include "copy/dims.h"

namespace seqpar {
namespace {

constexpr int ITEMS = 64;  // items per launch
constexpr int THREADS = 256;
constexpr int UNROLL = 4;                      // vectors per thread
constexpr int64_t LARGEST = int64_t{1} << 31;  // vectors per item, so that 32 bits can number them

// Divides numbers below 2^31 by a constant.
struct Divisor {
  uint32_t value, factor, shift;

  static Divisor of(int64_t value) {
    uint32_t shift = 0;
    while ((int64_t{1} << shift) < value) shift++;
    const uint64_t factor = (((uint64_t{1} << shift) - value) << 32) / value + 1;
    return {static_cast<uint32_t>(value), static_cast<uint32_t>(factor), shift};
  }
  __device__ uint32_t divide(uint32_t n) const { return (__umulhi(n, factor) + n) >> shift; }
};

struct Item {
  const char* src;
  char* dst;
  const void *src_rows, *dst_rows;
  int64_t src_step[SP_DIMS], dst_step[SP_DIMS];
  Divisor run, count[SP_DIMS];  // run: in vectors
  uint32_t vectors, end;        // end: of the item's blocks, among the blocks of all items
  int16_t width, ndim, rows_dim, row_bits;
};

struct Items {
  uint32_t n, blocks;
  uint32_t segment;
  Item item[ITEMS];
};

__device__ int64_t row(const void* rows, int bits, uint32_t i) {
  if (!rows) return i;
  return bits == 32 ? __ldg(static_cast<const int32_t*>(rows) + i)
                    : __ldg(reinterpret_cast<const long long*>(rows) + i);
}

template <class Vector>
__device__ void move(const Item& item, uint32_t first) {
  uint32_t rest[UNROLL];
  int64_t src[UNROLL], dst[UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; u++) {
    // past the end the last vector is read again, which avoids a branch, and not stored
    const uint32_t at = min(first + u * THREADS, item.vectors - 1);
    rest[u] = item.run.divide(at);
    src[u] = dst[u] = static_cast<int64_t>(at - rest[u] * item.run.value) * sizeof(Vector);
  }
  for (int d = item.ndim - 1; d >= 0; d--) {
    const bool numbered = d == item.rows_dim;
#pragma unroll
    for (int u = 0; u < UNROLL; u++) {
      const uint32_t next = item.count[d].divide(rest[u]), i = rest[u] - next * item.count[d].value;
      rest[u] = next;
      src[u] += (numbered ? row(item.src_rows, item.row_bits, i) : i) * item.src_step[d];
      dst[u] += (numbered ? row(item.dst_rows, item.row_bits, i) : i) * item.dst_step[d];
    }
  }
  Vector values[UNROLL];
#pragma unroll
  for (int u = 0; u < UNROLL; u++) values[u] = __ldcs(reinterpret_cast<const Vector*>(item.src + src[u]));
#pragma unroll
  for (int u = 0; u < UNROLL; u++)
    if (first + u * THREADS < item.vectors) *reinterpret_cast<Vector*>(item.dst + dst[u]) = values[u];
}

__global__ void __launch_bounds__(THREADS) copy_kernel(const __grid_constant__ Items items) {
  // The blocks of all items, laid end to end, are cut into one segment per item and dealt out in turns.
  const uint32_t turn = blockIdx.x / items.n, block = (blockIdx.x - turn * items.n) * items.segment + turn;
  if (block >= items.blocks) return;
  uint32_t low = 0, high = items.n - 1;
  while (low < high) {
    const uint32_t middle = (low + high) / 2;
    if (block < items.item[middle].end)
      high = middle;
    else
      low = middle + 1;
  }
  const Item& item = items.item[low];
  const uint32_t first = (block - (low ? items.item[low - 1].end : 0)) * (THREADS * UNROLL) + threadIdx.x;
  switch (item.width) {
    case 16:
      return move<uint4>(item, first);
    case 8:
      return move<uint2>(item, first);
    case 4:
      return move<uint32_t>(item, first);
    case 2:
      return move<uint16_t>(item, first);
    default:
      return move<uint8_t>(item, first);
  }
}

// Bytes of the widest vectors that divide the item.
int64_t width_of(const sp_copy_item& item, const std::vector<CopyDim>& dims, int64_t run) {
  int64_t bits = reinterpret_cast<intptr_t>(item.src) | reinterpret_cast<intptr_t>(item.dst) | run | 16;
  for (const CopyDim& d : dims) bits |= d.src | d.dst;
  return bits & -bits;
}

// The item, or parts of it if it has too many vectors.
void add(std::vector<Item>& items, const sp_copy_item& whole) {
  std::vector<CopyDim> dims;
  const int64_t run = simplify(whole, dims, true), width = width_of(whole, dims, run);
  if (elements(whole) * whole.size / width >= LARGEST) {
    const int d = static_cast<int>(std::max_element(whole.shape, whole.shape + whole.ndim) - whole.shape);
    for (int64_t half = whole.shape[d] / 2, first = 0; first < whole.shape[d]; first += half) {
      sp_copy_item part = whole;
      part.shape[d] = std::min(half, whole.shape[d] - first);
      const int64_t row_bytes = whole.row_bits / 8;
      auto on = [&](const void*& rows, int64_t stride) {
        if (d || !rows) return first * stride * whole.size;
        rows = static_cast<const char*>(rows) + first * row_bytes;
        return int64_t{0};
      };
      part.src = static_cast<const char*>(whole.src) + on(part.src_rows, whole.src_strides[d]);
      part.dst = static_cast<char*>(whole.dst) + on(part.dst_rows, whole.dst_strides[d]);
      add(items, part);
    }
    return;
  }
  Item item = {};
  item.src = static_cast<const char*>(whole.src);
  item.dst = static_cast<char*>(whole.dst);
  item.width = static_cast<int16_t>(width);
  item.run = Divisor::of(run / width);
  item.ndim = static_cast<int16_t>(dims.size());
  item.rows_dim = -1;
  item.row_bits = static_cast<int16_t>(whole.row_bits);
  item.vectors = static_cast<uint32_t>(elements(whole) * whole.size / width);
  for (int d = 0; d < item.ndim; d++) {
    item.count[d] = Divisor::of(dims[d].count);
    item.src_step[d] = dims[d].src;
    item.dst_step[d] = dims[d].dst;
    if (!dims[d].numbered()) continue;
    item.rows_dim = static_cast<int16_t>(d);
    item.src_rows = dims[d].src_rows;
    item.dst_rows = dims[d].dst_rows;
  }
  items.push_back(item);
}

cudaError_t launch(Items& items, cudaStream_t stream) {
  items.blocks = 0;
  for (uint32_t i = 0; i < items.n; i++) {
    items.blocks += (items.item[i].vectors + THREADS * UNROLL - 1) / (THREADS * UNROLL);
    items.item[i].end = items.blocks;
  }
  items.segment = (items.blocks + items.n - 1) / items.n;
  copy_kernel<<<items.segment * items.n, THREADS, 0, stream>>>(items);
  return cudaGetLastError();
}

}  // namespace
}  // namespace seqpar

extern "C" int sp_cuda_copy(const sp_copy_item* given, int64_t n, void* stream) {
  using namespace seqpar;
  std::vector<Item> items;
  for (int64_t i = 0; i < n; i++)
    if (!valid(given[i])) return static_cast<int>(-1 - i);
  for (int64_t i = 0; i < n; i++)
    if (elements(given[i])) add(items, given[i]);
  for (size_t first = 0; first < items.size(); first += ITEMS) {
    Items batch = {};
    batch.n = static_cast<uint32_t>(std::min<size_t>(ITEMS, items.size() - first));
    std::copy_n(items.begin() + static_cast<int64_t>(first), batch.n, batch.item);
    const cudaError_t wrong = launch(batch, static_cast<cudaStream_t>(stream));
    if (wrong != cudaSuccess) return static_cast<int>(wrong);
  }
  return 0;
}
