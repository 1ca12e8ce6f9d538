// copy_: many strided copies in one launch.
#include "copy/copy.h"

#include <optional>
#include <vector>

#include "api/api.h"
#ifdef SEQPAR_WITH_CUDA
#include <torch/csrc/stable/accelerator.h>

#include "copy/cuda.h"
#endif

namespace seqpar {

namespace {

using Rows = std::optional<Tensor>;

// The row numbers of one side of pair i; returns how many rows they select.
const void* numbers(const Rows& rows, const Tensor& x, size_t i, const char* side, sp_copy_item& item, int64_t& count) {
  if (!rows) return nullptr;
  const ScalarType dtype = rows->scalar_type();
  const bool wide = dtype == ScalarType::Long;
  STD_TORCH_CHECK(wide || dtype == ScalarType::Int, "copy_: pair ", i, ": ", side, " rows must be int64 or int32");
  STD_TORCH_CHECK(rows->dim() == 1 && rows->is_contiguous(), "copy_: pair ", i, ": ", side,
                  " rows must be a contiguous tensor of one dim");
  STD_TORCH_CHECK(x.dim() > 0, "copy_: pair ", i, ": ", side, " has rows given but no dims");
  STD_TORCH_CHECK(rows->device() == x.device(), "copy_: pair ", i, ": ", side,
                  " and its rows are on different devices");
  const int32_t bits = wide ? 64 : 32;
  STD_TORCH_CHECK(!item.row_bits || item.row_bits == bits, "copy_: pair ", i,
                  ": rows of both sides must have the same dtype");
  item.row_bits = bits;
  count = rows->numel();
  return rows->const_data_ptr();
}

sp_copy_item item_of(const Tensor& dst, const Tensor& src, const Rows& dst_rows, const Rows& src_rows, size_t i) {
  sp_copy_item item = {};
  STD_TORCH_CHECK(dst.scalar_type() == src.scalar_type(), "copy_: pair ", i, ": dst and src have different dtypes");
  STD_TORCH_CHECK(dst.device() == src.device(), "copy_: pair ", i, ": dst and src are on different devices");
  const auto to = dst.sizes(), from = src.sizes(), dst_strides = dst.strides(), src_strides = src.strides();
  STD_TORCH_CHECK(to.size() == from.size(), "copy_: pair ", i, ": dst has ", to.size(), " dims, src ", from.size());
  STD_TORCH_CHECK(to.size() <= SP_DIMS, "copy_: pair ", i, ": ", to.size(), " dims, at most ", SP_DIMS,
                  " are supported");
  item.ndim = static_cast<int32_t>(to.size());
  item.size = static_cast<int32_t>(dst.element_size());
  int64_t given = item.ndim ? to[0] : 1, taken = item.ndim ? from[0] : 1;
  item.dst_rows = numbers(dst_rows, dst, i, "dst", item, given);
  item.src_rows = numbers(src_rows, src, i, "src", item, taken);
  for (int32_t d = 0; d < item.ndim; d++) {
    const int64_t n = d ? to[d] : given, there = d ? from[d] : taken;
    STD_TORCH_CHECK(n == there, "copy_: pair ", i, ": dim ", d, " has ", n, " elements in dst, ", there, " in src");
    STD_TORCH_CHECK(n < 2 || dst_strides[d] != 0, "copy_: pair ", i, ": dst is expanded along dim ", d);
    item.shape[d] = n;
    item.src_strides[d] = src_strides[d];
    item.dst_strides[d] = dst_strides[d];
  }
  item.src = src.const_data_ptr();
  item.dst = dst.mutable_data_ptr();
  return item;
}

std::vector<sp_copy_item> items_of(const std::vector<Tensor>& dst, const std::vector<Tensor>& src,
                                   const std::vector<Rows>& dst_rows, const std::vector<Rows>& src_rows) {
  STD_TORCH_CHECK(dst.size() == src.size() && dst.size() == dst_rows.size() && dst.size() == src_rows.size(),
                  "copy_: ", dst.size(), " dst, ", src.size(), " src, ", dst_rows.size(), " dst_rows, ",
                  src_rows.size(), " src_rows; expected the same number of each");
  std::vector<sp_copy_item> items;
  items.reserve(dst.size());
  for (size_t i = 0; i < dst.size(); i++) items.push_back(item_of(dst[i], src[i], dst_rows[i], src_rows[i], i));
  return items;
}

}  // namespace

void copy_cpu(std::vector<Tensor> dst, std::vector<Tensor> src, std::vector<Rows> dst_rows,
              std::vector<Rows> src_rows) {
  const std::vector<sp_copy_item> items = items_of(dst, src, dst_rows, src_rows);
  const int wrong = sp_copy(items.data(), static_cast<int64_t>(items.size()), parallel_for);
  STD_TORCH_CHECK(!wrong, "copy_: pair ", wrong - 1, ": unsupported elements of ", items[wrong - 1].size, " bytes");
}

#ifdef SEQPAR_WITH_CUDA
void copy_cuda(std::vector<Tensor> dst, std::vector<Tensor> src, std::vector<Rows> dst_rows,
               std::vector<Rows> src_rows) {
  const std::vector<sp_copy_item> items = items_of(dst, src, dst_rows, src_rows);
  if (items.empty()) return;
  for (size_t i = 1; i < dst.size(); i++)
    STD_TORCH_CHECK(dst[i].device() == dst[0].device(), "copy_: pairs 0 and ", i, " are on different devices");
  const torch::stable::accelerator::DeviceGuard guard(dst[0].get_device_index());
  const int wrong =
      sp_cuda_copy(items.data(), static_cast<int64_t>(items.size()), current_stream(dst[0].get_device_index()));
  STD_TORCH_CHECK(wrong >= 0, "copy_: pair ", -1 - wrong, ": unsupported elements of ", items[-1 - wrong].size,
                  " bytes");
  STD_TORCH_CHECK(wrong == 0, "copy_: CUDA error ", wrong);
}
#endif

}  // namespace seqpar

// dst[i][dst_rows[i]] = src[i][src_rows[i]], or the whole tensors without row numbers. Equal shapes and dtypes, any
// strides. No destination may overlap another, itself or a source, and row numbers must be in range: neither is
// checked.
STABLE_TORCH_LIBRARY_FRAGMENT(seqpar_native, m) {
  m.def("copy_(Tensor(a!)[] dst, Tensor[] src, Tensor?[] dst_rows, Tensor?[] src_rows) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(seqpar_native, CPU, m) { m.impl("copy_", TORCH_BOX(&seqpar::copy_cpu)); }

#ifdef SEQPAR_WITH_CUDA
STABLE_TORCH_LIBRARY_IMPL(seqpar_native, CUDA, m) { m.impl("copy_", TORCH_BOX(&seqpar::copy_cuda)); }
#endif
