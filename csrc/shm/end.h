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

// A pool and the memory it is about; tensors keep it. After the pool lies a spare one, for what must not fail when the
// pool is full.
struct SharedPool {
  explicit SharedPool(size_t bytes);

  // The offset of a free block, or -1; with `spare`, of the spare pool if need be.
  int64_t take(int64_t bytes, bool spare);
  void give(int64_t offset);
  int64_t used() { return pool.used() + rest.used(); }

  size_t begin;  // of the spare pool
  Memfile memory;
  Pool pool, rest;
};

// How other processes find an end.
struct Address {
  int64_t process, mailbox_file, pool_file, pool_bytes, nonce;
};

// Elements of a tensor and where they lie.
struct View {
  char* data;
  int64_t item;  // bytes of an element
  std::vector<int64_t> sizes, strides;
};

enum class Pushed { kNothingOffered, kMoved, kOtherHeader };

// One thread at a time uses an end, but for `wait`, `fail` and `cause`. Failures throw std::runtime_error.
class ShmEnd {
 public:
  ShmEnd(int rank, int size, int64_t pool_bytes);
  ~ShmEnd();

  Address address() const;
  void map(int peer, const Address& address);  // every other rank's, once
  void open();                                 // when all have mapped all
  Mailbox& mailbox() { return *mailbox_; }

  const std::shared_ptr<SharedPool>& pool() const { return pool_; }
  bool owns(const View& view) const;

  // Tells `peer` that its next message is this one and belongs to `target`, which lies in the pool; false while all
  // slots are taken.
  bool credit(int peer, const int64_t* header, const View& target);

  // If `peer` expects its next message and that is this one, moves the elements of `source` where they belong, on the
  // threads of `parallel_for` or, if it is null, on this one.
  Pushed push(int peer, const int64_t* header, const View& source, sp_parallel_for parallel_for);

  bool ended(int peer) const { return processes_[peer] && processes_[peer]->ended(); }

 private:
  int rank_;
  int64_t process_, nonce_;
  std::unique_ptr<Memfile> own_;
  std::shared_ptr<SharedPool> pool_;
  std::vector<std::unique_ptr<Memfile>> segments_, pools_;  // of the others
  std::vector<std::unique_ptr<Process>> processes_;
  std::unique_ptr<Mailbox> mailbox_;
};

}  // namespace seqpar
