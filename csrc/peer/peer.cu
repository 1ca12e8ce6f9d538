#include <cuda.h>
#include <cuda_runtime.h>
#include <string.h>

#include <algorithm>

#include "peer/peer.h"

namespace {

static_assert(sizeof(cudaIpcMemHandle_t) == SP_PEER_HANDLE_BYTES, "a handle has as many bytes as peer.h says");

constexpr int64_t kGranule = 2 << 20;  // the unit that CUDA shares with other processes: an allocation fills whole ones
constexpr int kBatch = 64;             // words per driver call or kernel
constexpr int kViews = 16;             // tensors per kernel: as many as fit its parameters
constexpr int kBlocks = 16, kThreads = 256;

class OnDevice {
 public:
  explicit OnDevice(int device) {
    code_ = cudaGetDevice(&before_);
    if (code_ == cudaSuccess && before_ != device) code_ = cudaSetDevice(device);
    changed_ = code_ == cudaSuccess && before_ != device;
  }
  ~OnDevice() {
    if (changed_) cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

  int code() const { return code_; }

 private:
  int before_ = 0;
  cudaError_t code_;
  bool changed_;
};

// Looked up by name, so that the library loads on machines without a driver.
using BatchMemOp = CUresult (*)(CUstream, unsigned, CUstreamBatchMemOpParams*, unsigned);

BatchMemOp batch_mem_op() {
  static const BatchMemOp found = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult status;
    auto code = cudaGetDriverEntryPointByVersion("cuStreamBatchMemOp", &entry, 12000, cudaEnableDefault, &status);
    return code == cudaSuccess && status == cudaDriverEntryPointSuccess ? reinterpret_cast<BatchMemOp>(entry) : nullptr;
  }();
  return found;
}

struct Words {
  uint32_t* at[kBatch];
  uint32_t value[kBatch];
};

__device__ __forceinline__ void store(uint32_t* at, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(at), "r"(value) : "memory");
}

__device__ __forceinline__ uint32_t load(const uint32_t* at) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

__device__ __forceinline__ int64_t now() {
  int64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

__global__ void __launch_bounds__(kBatch) write_words(const __grid_constant__ Words words, int count) {
  if (threadIdx.x >= count) return;
  __threadfence_system();
  store(words.at[threadIdx.x], words.value[threadIdx.x]);
}

__global__ void __launch_bounds__(kBatch)
    wait_words(const __grid_constant__ Words words, int count, uint32_t* poison, bool heeds, int64_t nanoseconds) {
  if (threadIdx.x >= count) return;
  const uint32_t* at = words.at[threadIdx.x];
  const uint32_t value = words.value[threadIdx.x];
  const int64_t end = now() + nanoseconds;
  while (static_cast<int32_t>(load(at) - value) < 0) {
    if (heeds && load(poison) != 0) return;
    // without poison, later operations would mistake stale memory for the awaited data
    if (now() >= end) return store(poison, 1);
    __nanosleep(200);
  }
}

struct Views {
  sp_peer_view view[kViews];
};

__device__ __forceinline__ char* element(const sp_peer_view& view, int64_t index) {
  int64_t offset = 0;
#pragma unroll
  for (int dim = SP_DIMS - 1; dim >= 0; --dim) {
    // sizes beyond the last dim are 1
    offset += index % view.sizes[dim] * view.strides[dim];
    index /= view.sizes[dim];
  }
  return static_cast<char*>(view.at) + offset * view.item;
}

__global__ void __launch_bounds__(kThreads) blank_views(const __grid_constant__ Views views, const uint32_t* poison) {
  if (load(poison) == 0) return;
  const sp_peer_view& view = views.view[blockIdx.y];
  int64_t elements = 1;
#pragma unroll
  for (int dim = 0; dim < SP_DIMS; ++dim) elements *= view.sizes[dim];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (int64_t index = first; index < elements; index += static_cast<int64_t>(gridDim.x) * kThreads) {
    char* at = element(view, index);
    for (int byte = 0; byte < view.item; ++byte) at[byte] = static_cast<char>(0xff);
  }
}

Words batch(int count, const int64_t* words, const int64_t* values) {
  Words found{};
  for (int i = 0; i < count; ++i) {
    found.at[i] = reinterpret_cast<uint32_t*>(words[i]);
    found.value[i] = static_cast<uint32_t>(values[i]);
  }
  return found;
}

// What the driver does with words: a write comes after a system-wide fence, a wait compares cyclically, as peer.h says.
constexpr unsigned kWrite = CU_STREAM_WRITE_VALUE_DEFAULT, kWait = CU_STREAM_WAIT_VALUE_GEQ;
constexpr unsigned kFlush = CU_STREAM_WAIT_VALUE_FLUSH;

int by_driver(cudaStream_t stream, bool waiting, unsigned flags, int count, const int64_t* words,
              const int64_t* values) {
  const BatchMemOp call = batch_mem_op();
  if (call == nullptr) return cudaErrorNotSupported;
  CUstreamBatchMemOpParams operations[kBatch] = {};
  for (int i = 0; i < count; ++i) {
    const auto at = static_cast<CUdeviceptr>(words[i]);
    const auto value = static_cast<cuuint32_t>(values[i]);
    if (waiting) {
      operations[i].waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
      operations[i].waitValue.address = at;
      operations[i].waitValue.value = value;
      operations[i].waitValue.flags = flags;
    } else {
      operations[i].writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
      operations[i].writeValue.address = at;
      operations[i].writeValue.value = value;
      operations[i].writeValue.flags = flags;
    }
  }
  return call(stream, count, operations, 0);
}

// Runs the driver's operations, or `launch(stream, words, count)`, on as many words at a time as one call takes.
template <typename Launch>
int in_batches(int device, void* stream, bool by_kernel, bool waiting, unsigned flags, int count, const int64_t* words,
               const int64_t* values, Launch launch) {
  OnDevice on(device);
  int code = on.code();
  for (int done = 0; !code && done < count; done += kBatch) {
    const int some = std::min(kBatch, count - done);
    auto* at = static_cast<cudaStream_t>(stream);
    if (!by_kernel) {
      code = by_driver(at, waiting, flags, some, words + done, values + done);
    } else {
      launch(at, batch(some, words + done, values + done), some);
      code = cudaGetLastError();
    }
  }
  return code;
}

}  // namespace

extern "C" {

const char* sp_peer_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

int sp_peer_alloc(int device, int64_t bytes, int64_t words, uint32_t value, void** made) {
  OnDevice on(device);
  if (on.code()) return on.code();
  bytes = (bytes + kGranule - 1) / kGranule * kGranule;
  int code = cudaMalloc(made, bytes);
  if (!code) code = cudaMemset(*made, 0, bytes);
  for (int64_t i = 0; !code && i < words; ++i)
    code = cudaMemcpy(static_cast<uint32_t*>(*made) + i, &value, sizeof value, cudaMemcpyHostToDevice);
  // copies from pageable memory may return before they are done
  return code ? code : cudaDeviceSynchronize();
}

int sp_peer_free(int device, void* memory) {
  OnDevice on(device);
  return on.code() ? on.code() : cudaFree(memory);
}

int sp_peer_export(int device, void* memory, void* handle) {
  OnDevice on(device);
  return on.code() ? on.code() : cudaIpcGetMemHandle(static_cast<cudaIpcMemHandle_t*>(handle), memory);
}

int sp_peer_open(int device, const void* handle, void** mapped) {
  OnDevice on(device);
  cudaIpcMemHandle_t copy;
  memcpy(&copy, handle, sizeof copy);
  return on.code() ? on.code() : cudaIpcOpenMemHandle(mapped, copy, cudaIpcMemLazyEnablePeerAccess);
}

int sp_peer_close(int device, void* mapped) {
  OnDevice on(device);
  return on.code() ? on.code() : cudaIpcCloseMemHandle(mapped);
}

int sp_peer_reach(int device, int other) {
  OnDevice on(device);
  if (on.code() || device == other) return on.code();
  int can = 0;
  if (int code = cudaDeviceCanAccessPeer(&can, device, other)) return code;
  if (!can) return cudaErrorPeerAccessUnsupported;
  const cudaError_t code = cudaDeviceEnablePeerAccess(other, 0);
  if (code != cudaErrorPeerAccessAlreadyEnabled) return code;
  cudaGetLastError();  // someone else in this process enabled access first
  return cudaSuccess;
}

int sp_peer_stream(int device, int priority, void** made) {
  OnDevice on(device);
  int lowest = 0, highest = 0;
  int code = on.code();
  if (!code) code = cudaDeviceGetStreamPriorityRange(&lowest, &highest);
  if (code) return code;
  priority = std::min(lowest, std::max(highest, priority));
  return cudaStreamCreateWithPriority(reinterpret_cast<cudaStream_t*>(made), cudaStreamNonBlocking, priority);
}

int sp_peer_stream_end(int device, void* stream) {
  OnDevice on(device);
  return on.code() ? on.code() : static_cast<int>(cudaStreamDestroy(static_cast<cudaStream_t>(stream)));
}

int sp_peer_driver_signals(void) { return batch_mem_op() != nullptr; }

int sp_peer_bus(int device, char* bus, int length) { return cudaDeviceGetPCIBusId(bus, length, device); }

int sp_peer_ordered(int device, const char* bus, int* ordered) {
  int other = 0;
  *ordered = 0;
  if (cudaDeviceGetByPCIBusId(&other, bus) != cudaSuccess) {
    cudaGetLastError();  // a device of another process alone
    return cudaSuccess;
  }
  *ordered = 1;
  // of the links between devices, NVLink has all atomic operations, and PCIe only some
  return other == device ? cudaSuccess
                         : cudaDeviceGetP2PAttribute(ordered, cudaDevP2PAttrNativeAtomicSupported, other, device);
}

int sp_peer_can_flush(int device, int* can) {
  return cudaDeviceGetAttribute(can, cudaDevAttrCanFlushRemoteWrites, device);
}

int sp_peer_write(int device, void* stream, int by_kernel, int count, const int64_t* words, const int64_t* values) {
  auto launch = [](cudaStream_t at, const Words& some, int many) { write_words<<<1, kBatch, 0, at>>>(some, many); };
  return in_batches(device, stream, by_kernel, false, kWrite, count, words, values, launch);
}

int sp_peer_wait(int device, void* stream, int by_kernel, int flush, int count, const int64_t* words,
                 const int64_t* values, void* poison, int heeds_poison, int64_t nanoseconds) {
  auto launch = [=](cudaStream_t at, const Words& some, int many) {
    wait_words<<<1, kBatch, 0, at>>>(some, many, static_cast<uint32_t*>(poison), heeds_poison, nanoseconds);
  };
  return in_batches(device, stream, by_kernel, true, flush ? kWait | kFlush : kWait, count, words, values, launch);
}

int sp_peer_copy(int device, void* stream, void* to, const void* from, int64_t bytes) {
  OnDevice on(device);
  return on.code() ? on.code()
                   : cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, static_cast<cudaStream_t>(stream));
}

int sp_peer_blank(int device, void* stream, const void* poison, int count, const sp_peer_view* views) {
  OnDevice on(device);
  int code = on.code();
  for (int done = 0; !code && done < count; done += kViews) {
    const int some = std::min(kViews, count - done);
    Views part;
    std::copy(views + done, views + done + some, part.view);
    blank_views<<<dim3(kBlocks, some), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
        part, static_cast<const uint32_t*>(poison));
    code = cudaGetLastError();
  }
  return code;
}

int sp_peer_read(int device, void* stream, const void* from, void* to, int64_t bytes) {
  OnDevice on(device);
  if (on.code()) return on.code();
  auto* at = static_cast<cudaStream_t>(stream);
  const int code = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, at);
  return code ? code : static_cast<int>(cudaStreamSynchronize(at));
}

}  // extern "C"
