// One rank's end of a group of processes on one machine: its mailbox, and a pool of memory that all of them can write.
#pragma once

#include <stdint.h>

#include <memory>
#include <string>
#include <vector>

#include "base/parallel.h"
#include "shm/mailbox.h"
#include "shm/memfile.h"
#include "shm/pool.h"

namespace seqpar {

// A pool and its memory; tensors keep it alive. Behind the pool lies a spare one, for allocations that must succeed
// when
// the pool is full.
struct SharedPool {
  explicit SharedPool(size_t bytes);

  // The offset of a free block, or -1. spare: take it from the spare pool if the pool is full.
  int64_t take(int64_t bytes, bool spare);
  void give(int64_t offset);
  int64_t used() { return pool.used() + rest.used(); }

  size_t begin;  // where the spare pool begins
  Memfile memory;
  Pool pool, rest;
};

// What another process needs to map an end.
struct Address {
  int64_t process, mailbox_file, pool_file, pool_bytes, nonce;
};

// Elements of a tensor and their addresses.
struct View {
  char* data;
  int64_t item;  // bytes of an element
  std::vector<int64_t> sizes, strides;
};

enum class Pushed { kNothingOffered, kMoved, kOtherHeader };

// Only one thread at a time may use an end, except for `wait`, `fail` and `cause`. Failures throw std::runtime_error.
class ShmEnd {
 public:
  ShmEnd(int rank, int size, int64_t pool_bytes);
  ~ShmEnd();

  Address address() const;
  void map(int peer, const Address& address);  // once per other rank
  void open();                                 // once all ranks have mapped each other
  Mailbox& mailbox() { return *mailbox_; }

  const std::shared_ptr<SharedPool>& pool() const { return pool_; }
  bool owns(const View& view) const;

  // Tells `peer` that its next message has this header and belongs in `target`, a tensor of the pool. False while all
  // slots are taken.
  bool credit(int peer, const int64_t* header, const View& target);

  // If `peer` expects a message with this header, moves the elements of `source` to their destination, on the threads
  // of
  // `parallel_for`, or on this one if it is null.
  Pushed push(int peer, const int64_t* header, const View& source, sp_parallel_for parallel_for);

  bool ended(int peer) const { return processes_[peer] && processes_[peer]->ended(); }

 private:
  int rank_;
  int64_t process_, nonce_;
  std::unique_ptr<Memfile> own_;
  std::shared_ptr<SharedPool> pool_;
  std::vector<std::unique_ptr<Memfile>> segments_, pools_;  // of the other ranks
  std::vector<std::unique_ptr<Process>> processes_;
  std::unique_ptr<Mailbox> mailbox_;
};

}  // namespace seqpar
