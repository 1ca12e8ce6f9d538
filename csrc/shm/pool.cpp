#include "shm/pool.h"

#include <algorithm>
#include <iterator>

namespace seqpar {

Pool::Pool(int64_t bytes) { add_free(0, bytes / kAlignment * kAlignment); }

int64_t Pool::take(int64_t bytes) {
  bytes = (std::max<int64_t>(bytes, 1) + kAlignment - 1) / kAlignment * kAlignment;
  std::lock_guard<std::mutex> lock(mutex_);
  auto best = by_size_.lower_bound({bytes, 0});
  if (best == by_size_.end()) return -1;
  auto [size, offset] = *best;
  drop_free(free_.find(offset));
  add_free(offset + bytes, size - bytes);
  taken_[offset] = bytes;
  used_ += bytes;
  return offset;
}

void Pool::give(int64_t offset) {
  std::lock_guard<std::mutex> lock(mutex_);
  auto block = taken_.find(offset);
  if (block == taken_.end()) return;
  int64_t begin = offset, end = offset + block->second;
  used_ -= block->second;
  taken_.erase(block);
  auto after = free_.lower_bound(begin);
  if (after != free_.end() && after->first == end) {
    end += after->second;
    drop_free(after);
  }
  auto next = free_.lower_bound(begin);
  if (next != free_.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == begin) {
      begin = before->first;
      drop_free(before);
    }
  }
  add_free(begin, end - begin);
}

int64_t Pool::used() {
  std::lock_guard<std::mutex> lock(mutex_);
  return used_;
}

void Pool::add_free(int64_t offset, int64_t bytes) {
  if (bytes <= 0) return;
  free_[offset] = bytes;
  by_size_.insert({bytes, offset});
}

void Pool::drop_free(std::map<int64_t, int64_t>::iterator range) {
  by_size_.erase({range->second, range->first});
  free_.erase(range);
}

}  // namespace seqpar
