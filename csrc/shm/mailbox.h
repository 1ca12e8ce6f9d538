// The protocol between ranks that share memory, without the bytes it is about: who may write where, and what has come.
//
// Every rank has a segment, which all ranks map and on which only its owner waits. Messages of an ordered pair of ranks
// are numbered, and number n uses slot n % kSlots on both sides:
//
//     receiver   writes the credit n into the SENDER's segment: what it expects, and where that belongs
//     sender     moves the bytes, then writes the arrival n into the RECEIVER's segment
//     receiver   sees it, and may use the slot for n + kSlots
//
// A slot's epoch says which message it speaks of: n plus a first epoch just below the wrap of 32 bits, so that every
// run of more than a few messages has crossed it. An epoch is stored last (release) and read first (acquire). Nothing
// is ever cleared and nobody waits for everybody.
//
// Who wrote into a segment rings its bell, a counter on which the owner sleeps (a futex). The first failure of the
// group is written once, into the segment of rank 0, whoever of the ranks still lives.
//
// One thread at a time uses a mailbox; `wait`, `fail` and `cause` may run beside it.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <atomic>
#include <string>
#include <vector>

#include "base/dims.h"

namespace seqpar {

constexpr int kSlots = 32;
constexpr int kHeader = 9;
constexpr uint32_t kFirstEpoch = 0u - 48;

// What a receiver expects and where it belongs: `where` bytes into its memory, with strides in elements.
struct Offer {
  int64_t header[kHeader];
  int64_t where;
  int64_t strides[SP_DIMS];
};

// A message as an error names it: the slot, the epoch that was waited for, the one that stood there.
struct Place {
  int slot;
  uint32_t expected, seen;
};

class Mailbox {
 public:
  static size_t bytes(int ranks);

  // Makes a segment, in memory that is zero, before anyone else maps it. `nonce` tells segments apart.
  static void format(void* segment, int ranks, int64_t nonce, uint32_t first_epoch = kFirstEpoch);

  // Whether memory holds a formatted segment with that nonce.
  static bool is(const void* segment, int ranks, int64_t nonce);

  // segments: of all ranks, by rank; they outlive the mailbox.
  Mailbox(int rank, std::vector<void*> segments);

  // Receiving: tells `peer` where its next message belongs; false while all slots hold messages that have not arrived.
  bool credit(int peer, const Offer& offer);
  // Messages from `peer` that have arrived, in order. What they brought may be read.
  int64_t arrived(int peer);

  // Sending: what `peer` expects next, null if it has not said so yet; it stands until `arrive`.
  const Offer* offered(int peer);
  // Tells `peer` that the message lies where it belongs.
  void arrive(int peer);

  // The next message from (receiving) or to `peer`.
  Place next(int peer, bool receiving);

  // A counter of what was written here. `wait` returns when it is no longer `seen`, and whether that is so: also after
  // so many nanoseconds, or earlier, when it was woken for what was written before.
  uint32_t bell() const;
  bool wait(uint32_t seen, int64_t nanoseconds);

  // Tells all that this rank will not write any more, and whether `peer` has said so.
  void leave();
  bool has_left(int peer) const;

  // Makes this rank's reason the cause of the group's death unless one stands, and wakes all ranks.
  void fail(const std::string& reason);
  // Whether the group is dead; if so, its cause.
  bool cause(int* rank, std::string* reason) const;

 private:
  struct Segment;
  struct Slot;

  Segment& segment(int rank) const;
  Slot& slot(int owner, int writer, int64_t number) const;
  std::atomic<uint32_t>& arrival(int owner, int writer, int64_t number) const;
  std::atomic<uint32_t>& left(int owner, int writer) const;
  uint32_t epoch(int64_t number) const;
  void ring(int rank);

  int rank_, size_;
  std::vector<void*> segments_;
  std::vector<int64_t> credited_, received_, sent_;  // messages of each pair so far
};

}  // namespace seqpar
