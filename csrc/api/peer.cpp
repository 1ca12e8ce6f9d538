// Memory that peers write, as operators: blocks of a pool on any device, and the functions of peer/peer.h.
#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "api/api.h"
#include "shm/pool.h"
#ifdef SEQPAR_WITH_CUDA
#include "peer/peer.h"
#endif

namespace seqpar {

namespace {

using Ints = std::vector<int64_t>;
using torch::stable::Device;

// A pool of offsets, and the blocks whose last tensor is gone. Streams may still use these blocks: the pool's owner
// knows when they are done, a destructor on some thread does not.
struct Blocks {
  explicit Blocks(int64_t bytes) : pool(bytes) {}

  Pool pool;
  std::mutex mutex;
  Ints dropped;
};

// never destroyed: tensors may outlive the interpreter
Numbered<Blocks>& pools() {
  static auto& all = *new Numbered<Blocks>("pool");
  return all;
}

int64_t open_pool(int64_t bytes) { return pools().add(std::make_shared<Blocks>(bytes)); }

void close_pool(int64_t pool) { pools().remove(pool); }

int64_t take(int64_t pool, int64_t bytes) { return pools().at(pool)->pool.take(bytes); }

void give(int64_t pool, int64_t offset) { pools().at(pool)->pool.give(offset); }

Tensor block(int64_t pool, int64_t at, int64_t offset, Ints size, Ints stride, ScalarType dtype, Device device) {
  auto drop = [blocks = pools().at(pool), offset](void*) {
    std::lock_guard<std::mutex> lock(blocks->mutex);
    blocks->dropped.push_back(offset);
  };
  return torch::stable::from_blob(reinterpret_cast<void*>(at + offset), size, stride, device, dtype, drop);
}

Ints dropped(int64_t pool) {
  std::shared_ptr<Blocks> blocks = pools().at(pool);
  std::lock_guard<std::mutex> lock(blocks->mutex);
  return std::exchange(blocks->dropped, {});
}

Tensor view(int64_t at, Ints size, Ints stride, ScalarType dtype, Device device) {
  return torch::stable::from_blob(reinterpret_cast<void*>(at), size, stride, device, dtype);
}

#ifdef SEQPAR_WITH_CUDA

void checked(int code, const char* what) {
  STD_TORCH_CHECK(code == 0, what, ": CUDA error ", code, ", ", sp_peer_error(code));
}

void* pointer(int64_t at) { return reinterpret_cast<void*>(at); }

int64_t number(void* at) { return reinterpret_cast<int64_t>(at); }

int64_t alloc(int64_t device, int64_t bytes, int64_t words, int64_t value) {
  void* made = nullptr;
  checked(sp_peer_alloc(static_cast<int>(device), bytes, words, static_cast<uint32_t>(value), &made), "cudaMalloc");
  return number(made);
}

void release(int64_t device, int64_t at) { checked(sp_peer_free(static_cast<int>(device), pointer(at)), "cudaFree"); }

Ints exported(int64_t device, int64_t at) {
  Ints handle(SP_PEER_HANDLE_BYTES / sizeof(int64_t));
  checked(sp_peer_export(static_cast<int>(device), pointer(at), handle.data()), "cudaIpcGetMemHandle");
  return handle;
}

int64_t open(int64_t device, Ints handle) {
  STD_TORCH_CHECK(handle.size() * sizeof(int64_t) == SP_PEER_HANDLE_BYTES,
                  "peer_open: the handle has the wrong length");
  void* mapped = nullptr;
  checked(sp_peer_open(static_cast<int>(device), handle.data(), &mapped), "cudaIpcOpenMemHandle");
  return number(mapped);
}

void close(int64_t device, int64_t at) {
  checked(sp_peer_close(static_cast<int>(device), pointer(at)), "cudaIpcCloseMemHandle");
}

void reach(int64_t device, int64_t other) {
  checked(sp_peer_reach(static_cast<int>(device), static_cast<int>(other)), "cudaDeviceEnablePeerAccess");
}

int64_t stream(int64_t device, int64_t priority) {
  void* made = nullptr;
  checked(sp_peer_stream(static_cast<int>(device), static_cast<int>(priority), &made), "cudaStreamCreate");
  return number(made);
}

void end_stream(int64_t device, int64_t stream) {
  checked(sp_peer_stream_end(static_cast<int>(device), pointer(stream)), "cudaStreamDestroy");
}

bool driver_signals() { return sp_peer_driver_signals() != 0; }

std::string bus(int64_t device) {
  char found[32] = {};
  checked(sp_peer_bus(static_cast<int>(device), found, sizeof found), "cudaDeviceGetPCIBusId");
  return found;
}

bool ordered(int64_t device, std::string other) {
  int found = 0;
  checked(sp_peer_ordered(static_cast<int>(device), other.c_str(), &found), "cudaDeviceGetP2PAttribute");
  return found != 0;
}

bool can_flush(int64_t device) {
  int found = 0;
  checked(sp_peer_can_flush(static_cast<int>(device), &found), "cudaDeviceGetAttribute");
  return found != 0;
}

void write(int64_t device, int64_t stream, bool by_kernel, Ints words, Ints values) {
  STD_TORCH_CHECK(words.size() == values.size(), "peer_write: ", words.size(), " words, ", values.size(), " values");
  checked(sp_peer_write(static_cast<int>(device), pointer(stream), by_kernel, static_cast<int>(words.size()),
                        words.data(), values.data()),
          "a write to peers' memory in stream order");
}

void wait(int64_t device, int64_t stream, bool by_kernel, bool flush, Ints words, Ints values, int64_t poison,
          bool heeds_poison, double seconds) {
  STD_TORCH_CHECK(words.size() == values.size(), "peer_wait: ", words.size(), " words, ", values.size(), " values");
  checked(sp_peer_wait(static_cast<int>(device), pointer(stream), by_kernel, flush, static_cast<int>(words.size()),
                       words.data(), values.data(), pointer(poison), heeds_poison, static_cast<int64_t>(seconds * 1e9)),
          "a wait in stream order");
}

void copy(int64_t device, int64_t stream, int64_t to, Tensor from) {
  STD_TORCH_CHECK(from.is_contiguous(), "peer_copy: the source is not contiguous");
  checked(sp_peer_copy(static_cast<int>(device), pointer(stream), pointer(to), from.const_data_ptr(),
                       from.numel() * static_cast<int64_t>(from.element_size())),
          "cudaMemcpyAsync");
}

void blank(int64_t device, int64_t stream, int64_t poison, std::vector<Tensor> tensors) {
  std::vector<sp_peer_view> views;
  for (const Tensor& x : tensors) {
    sp_peer_view found{x.mutable_data_ptr(), {}, {}, static_cast<int32_t>(x.element_size())};
    std::fill(found.sizes, found.sizes + SP_DIMS, 1);
    // a contiguous tensor may have any number of dims
    if (x.is_contiguous()) {
      found.sizes[0] = x.numel();
      found.strides[0] = 1;
    } else {
      STD_TORCH_CHECK(x.dim() <= SP_DIMS, "peer_blank: ", x.dim(), " dims, at most ", SP_DIMS);
      for (int64_t dim = 0; dim < x.dim(); ++dim) {
        found.sizes[dim] = x.size(dim);
        found.strides[dim] = x.stride(dim);
      }
    }
    views.push_back(found);
  }
  checked(sp_peer_blank(static_cast<int>(device), pointer(stream), pointer(poison), static_cast<int>(views.size()),
                        views.data()),
          "the kernel that blanks what a dead comm received");
}

Ints read(int64_t device, int64_t stream, int64_t at, int64_t words) {
  std::vector<uint32_t> found(words);
  checked(sp_peer_read(static_cast<int>(device), pointer(stream), pointer(at), found.data(),
                       words * static_cast<int64_t>(sizeof(uint32_t))),
          "reading words of the device");
  return Ints(found.begin(), found.end());
}

#endif

}  // namespace

}  // namespace seqpar

STABLE_TORCH_LIBRARY_FRAGMENT(seqpar_native, m) {
  m.def("peer_pool(int bytes) -> int");
  m.def("peer_pool_close(int pool) -> ()");
  m.def("peer_take(int pool, int bytes) -> int");
  m.def("peer_give(int pool, int offset) -> ()");
  m.def(
      "peer_block(int pool, int at, int offset, int[] size, int[] stride, ScalarType dtype, Device device) -> Tensor");
  m.def("peer_dropped(int pool) -> int[]");
  m.def("peer_view(int at, int[] size, int[] stride, ScalarType dtype, Device device) -> Tensor");
#ifdef SEQPAR_WITH_CUDA
  m.def("peer_alloc(int device, int bytes, int words, int value) -> int");
  m.def("peer_free(int device, int at) -> ()");
  m.def("peer_export(int device, int at) -> int[]");
  m.def("peer_open(int device, int[] handle) -> int");
  m.def("peer_close(int device, int at) -> ()");
  m.def("peer_reach(int device, int other) -> ()");
  m.def("peer_stream(int device, int priority) -> int");
  m.def("peer_stream_end(int device, int stream) -> ()");
  m.def("peer_driver_signals() -> bool");
  m.def("peer_bus(int device) -> str");
  m.def("peer_ordered(int device, str bus) -> bool");
  m.def("peer_can_flush(int device) -> bool");
  m.def("peer_write(int device, int stream, bool by_kernel, int[] words, int[] values) -> ()");
  m.def(
      "peer_wait(int device, int stream, bool by_kernel, bool flush, int[] words, int[] values, int poison, "
      "bool heeds_poison, float seconds) -> ()");
  m.def("peer_copy(int device, int stream, int to, Tensor source) -> ()");
  m.def("peer_blank(int device, int stream, int poison, Tensor(a!)[] tensors) -> ()");
  m.def("peer_read(int device, int stream, int at, int words) -> int[]");
#endif
}

STABLE_TORCH_LIBRARY_IMPL(seqpar_native, CompositeExplicitAutograd, m) {
  m.impl("peer_pool", TORCH_BOX(&seqpar::open_pool));
  m.impl("peer_pool_close", TORCH_BOX(&seqpar::close_pool));
  m.impl("peer_take", TORCH_BOX(&seqpar::take));
  m.impl("peer_give", TORCH_BOX(&seqpar::give));
  m.impl("peer_block", TORCH_BOX(&seqpar::block));
  m.impl("peer_dropped", TORCH_BOX(&seqpar::dropped));
  m.impl("peer_view", TORCH_BOX(&seqpar::view));
#ifdef SEQPAR_WITH_CUDA
  m.impl("peer_alloc", TORCH_BOX(&seqpar::alloc));
  m.impl("peer_free", TORCH_BOX(&seqpar::release));
  m.impl("peer_export", TORCH_BOX(&seqpar::exported));
  m.impl("peer_open", TORCH_BOX(&seqpar::open));
  m.impl("peer_close", TORCH_BOX(&seqpar::close));
  m.impl("peer_reach", TORCH_BOX(&seqpar::reach));
  m.impl("peer_stream", TORCH_BOX(&seqpar::stream));
  m.impl("peer_stream_end", TORCH_BOX(&seqpar::end_stream));
  m.impl("peer_driver_signals", TORCH_BOX(&seqpar::driver_signals));
  m.impl("peer_bus", TORCH_BOX(&seqpar::bus));
  m.impl("peer_ordered", TORCH_BOX(&seqpar::ordered));
  m.impl("peer_can_flush", TORCH_BOX(&seqpar::can_flush));
  m.impl("peer_write", TORCH_BOX(&seqpar::write));
  m.impl("peer_wait", TORCH_BOX(&seqpar::wait));
  m.impl("peer_copy", TORCH_BOX(&seqpar::copy));
  m.impl("peer_blank", TORCH_BOX(&seqpar::blank));
  m.impl("peer_read", TORCH_BOX(&seqpar::read));
#endif
}
