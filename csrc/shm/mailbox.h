// The protocol between ranks that share memory, without the payload: who may write where, and which messages arrived.
//
// Every rank has a segment. All ranks map it; only its owner waits on it. The messages of an ordered pair of ranks are
// numbered, and message n uses slot n % kSlots on both sides:
//
//     receiver   writes credit n into the SENDER's segment: the message it expects, and where it belongs
//     sender     moves the bytes, then writes arrival n into the RECEIVER's segment
//     receiver   sees the arrival, and may reuse the slot for n + kSlots
//
// A slot's epoch tells which message it holds: n plus a first epoch just below the wrap of 32 bits, so that every run
// of
// more than a few messages crosses the wrap. An epoch is stored last (release) and read first (acquire). Nothing is
// ever
// cleared, and there is no barrier.
//
// A writer rings the bell of the segment it wrote into: a counter on which the owner sleeps (a futex). The group's
// first
// failure is written once, into the segment of rank 0, even if rank 0 is dead.
//
// Only one thread at a time may use a mailbox, except for `wait`, `fail` and `cause`.
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

// A message as errors show it: its slot, the awaited epoch, and the epoch found in it.
struct Place {
  int slot;
  uint32_t expected, seen;
};

class Mailbox {
 public:
  static size_t bytes(int ranks);

  // Formats a segment in zeroed memory, before anyone else maps it. `nonce` tells segments apart.
  static void format(void* segment, int ranks, int64_t nonce, uint32_t first_epoch = kFirstEpoch);

  // Whether the memory holds a segment formatted with that nonce.
  static bool is(const void* segment, int ranks, int64_t nonce);

  // segments: those of all ranks, by rank; they must outlive the mailbox.
  Mailbox(int rank, std::vector<void*> segments);

  // Receiving: tells `peer` where its next message belongs; false while every slot waits for a message.
  bool credit(int peer, const Offer& offer);
  // The number of messages from `peer` that have arrived, in order, and may be read.
  int64_t arrived(int peer);

  // Sending: the message that `peer` expects next, or null if it has not said so; valid until `arrive`.
  const Offer* offered(int peer);
  // Tells `peer` that its message is in place.
  void arrive(int peer);

  // The next message from `peer` (receiving) or to it.
  Place next(int peer, bool receiving);

  // The bell counts writes to this segment. `wait` returns whether it has moved on from `seen`. It returns false after
  // `nanoseconds`, or earlier on a stale wake-up.
  uint32_t bell() const;
  bool wait(uint32_t seen, int64_t nanoseconds);

  // Tells all ranks that this one will write no more; whether `peer` has said so.
  void leave();
  bool has_left(int peer) const;

  // Makes this rank's reason the cause of the group's death, unless there is one already, and wakes all ranks.
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
  std::vector<int64_t> credited_, received_, sent_;  // messages per pair so far
};

}  // namespace seqpar
