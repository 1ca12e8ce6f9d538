// Shared by all bindings: the LibTorch Stable ABI, and torch's threads and streams in the form the kernels take.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "base/parallel.h"

namespace seqpar {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// torch's threads
void parallel_for(int64_t begin, int64_t end, int64_t grain, sp_task task, void* context);

// torch's current stream of a CUDA device.
void* current_stream(int32_t device);

// Objects that operators know by number; thread-safe. A removed object lives while someone still holds it.
template <typename T>
class Numbered {
 public:
  explicit Numbered(const char* what) : what_(what) {}

  int64_t add(std::shared_ptr<T> object) {
    std::lock_guard<std::mutex> lock(mutex_);
    all_[++last_] = std::move(object);
    return last_;
  }
  std::shared_ptr<T> at(int64_t number) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto found = all_.find(number);
    STD_TORCH_CHECK(found != all_.end(), "seqpar: no ", what_, " has the number ", number);
    return found->second;
  }
  // Returns the object, so that it is destroyed outside the lock.
  std::shared_ptr<T> remove(int64_t number) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto node = all_.extract(number);
    return node ? std::move(node.mapped()) : nullptr;
  }

 private:
  const char* what_;
  std::mutex mutex_;
  std::map<int64_t, std::shared_ptr<T>> all_;
  int64_t last_ = 0;
};

}  // namespace seqpar
