// A memory allocator on offsets alone: the memory is the caller's, on any device.
#pragma once

#include <stdint.h>

#include <map>
#include <mutex>
#include <set>
#include <utility>

namespace seqpar {

class Pool {
 public:
  static constexpr int64_t kAlignment = 64;

  explicit Pool(int64_t bytes);

  // The offset of a free block of at least `bytes`, or -1. Best fit, then lowest address: pages that exist already are
  // reused before new ones.
  int64_t take(int64_t bytes);

  // Frees a block; any thread may call it.
  void give(int64_t offset);

  int64_t used();

 private:
  void add_free(int64_t offset, int64_t bytes);
  void drop_free(std::map<int64_t, int64_t>::iterator range);

  std::mutex mutex_;
  std::map<int64_t, int64_t> free_, taken_;        // offset -> bytes; free ranges never touch each other
  std::set<std::pair<int64_t, int64_t>> by_size_;  // (bytes, offset) of the free ranges
  int64_t used_ = 0;
};

}  // namespace seqpar
