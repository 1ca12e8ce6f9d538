#include "shm/mailbox.h"

#include <errno.h>
#include <linux/futex.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <stdexcept>
#include <thread>

#include "shm/pause.h"

namespace seqpar {

namespace {

constexpr size_t kLine = 64;
constexpr int kText = 1024;
constexpr int kSpins = 64;
enum Cause : uint32_t { kNone, kWriting, kWritten, kStates };  // plus kStates * rank

using Epoch = std::atomic<uint32_t>;
static_assert(Epoch::is_always_lock_free, "an epoch is shared between processes");

// The bytes of a UTF-8 text that fit, in whole characters.
size_t fitting(const std::string& text) {
  if (text.size() <= kText) return text.size();
  size_t end = kText;
  while (end > 0 && (text[end] & 0xC0) == 0x80) --end;
  return end;
}

constexpr size_t lines(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

void futex(Epoch* word, int operation, uint32_t value, const timespec* limit) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), operation, value, limit, nullptr, 0);
}

}  // namespace

struct alignas(kLine) Mailbox::Slot {
  Epoch epoch;
  Offer offer;
};

// Behind the segment, by writer: slots[size][kSlots], arrivals[size][kSlots], left[size].
struct alignas(kLine) Mailbox::Segment {
  int64_t nonce;
  uint32_t first_epoch;
  int32_t ranks;
  alignas(kLine) Epoch bell;
  Epoch sleepers;
  alignas(kLine) Epoch cause;
  int32_t cause_length;
  char cause_text[kText];
};

size_t Mailbox::bytes(int ranks) {
  return sizeof(Segment) + ranks * (kSlots * sizeof(Slot) + lines(kSlots * sizeof(Epoch)) + kLine);
}

void Mailbox::format(void* memory, int ranks, int64_t nonce, uint32_t first_epoch) {
  auto* made = new (memory) Segment{};
  made->nonce = nonce;
  made->first_epoch = first_epoch;
  made->ranks = ranks;
  auto* rest = reinterpret_cast<char*>(made + 1);
  for (int i = 0; i < ranks * kSlots; ++i, rest += sizeof(Slot)) (new (rest) Slot{})->epoch = first_epoch;
  for (int i = 0; i < ranks; ++i, rest += lines(kSlots * sizeof(Epoch)))
    for (int j = 0; j < kSlots; ++j) new (rest + j * sizeof(Epoch)) Epoch(first_epoch);
  for (int i = 0; i < ranks; ++i, rest += kLine) new (rest) Epoch(0);
}

bool Mailbox::is(const void* memory, int ranks, int64_t nonce) {
  auto* segment = static_cast<const Segment*>(memory);
  return segment->nonce == nonce && segment->ranks == ranks;
}

Mailbox::Mailbox(int rank, std::vector<void*> segments)
    : rank_(rank),
      size_(static_cast<int>(segments.size())),
      segments_(std::move(segments)),
      credited_(size_),
      received_(size_),
      sent_(size_) {}

Mailbox::Segment& Mailbox::segment(int rank) const { return *static_cast<Segment*>(segments_[rank]); }

Mailbox::Slot& Mailbox::slot(int owner, int writer, int64_t number) const {
  return reinterpret_cast<Slot*>(&segment(owner) + 1)[writer * kSlots + number % kSlots];
}

Epoch& Mailbox::arrival(int owner, int writer, int64_t number) const {
  auto* all = reinterpret_cast<char*>(&segment(owner) + 1) + size_ * kSlots * sizeof(Slot);
  return reinterpret_cast<Epoch*>(all + writer * lines(kSlots * sizeof(Epoch)))[number % kSlots];
}

Epoch& Mailbox::left(int owner, int writer) const {
  auto* all =
      reinterpret_cast<char*>(&segment(owner) + 1) + size_ * (kSlots * sizeof(Slot) + lines(kSlots * sizeof(Epoch)));
  return *reinterpret_cast<Epoch*>(all + writer * kLine);
}

// The epoch of a message of a pair: never equal to that of the slot's previous message, nor to the first epoch.
uint32_t Mailbox::epoch(int64_t number) const { return segment(rank_).first_epoch + 1 + static_cast<uint32_t>(number); }

bool Mailbox::credit(int peer, const Offer& offer) {
  int64_t number = credited_[peer];
  if (number - arrived(peer) >= kSlots) return false;
  Slot& at = slot(peer, rank_, number);
  at.offer = offer;
  SP_POINT("credit written");
  at.epoch.store(epoch(number), std::memory_order_release);
  credited_[peer] = number + 1;
  SP_POINT("credit published");
  ring(peer);
  return true;
}

int64_t Mailbox::arrived(int peer) {
  int64_t& number = received_[peer];
  while (number < credited_[peer] && arrival(rank_, peer, number).load(std::memory_order_acquire) == epoch(number))
    ++number;
  return number;
}

const Offer* Mailbox::offered(int peer) {
  Slot& at = slot(rank_, peer, sent_[peer]);
  return at.epoch.load(std::memory_order_acquire) == epoch(sent_[peer]) ? &at.offer : nullptr;
}

void Mailbox::arrive(int peer) {
  int64_t number = sent_[peer]++;
  SP_POINT("bytes moved");
  arrival(peer, rank_, number).store(epoch(number), std::memory_order_release);
  SP_POINT("arrival published");
  ring(peer);
}

Place Mailbox::next(int peer, bool receiving) {
  int64_t number = receiving ? arrived(peer) : sent_[peer];
  const Epoch& at = receiving ? arrival(rank_, peer, number) : slot(rank_, peer, number).epoch;
  return {static_cast<int>(number % kSlots), epoch(number), at.load(std::memory_order_acquire)};
}

uint32_t Mailbox::bell() const { return segment(rank_).bell.load(std::memory_order_acquire); }

bool Mailbox::wait(uint32_t seen, int64_t nanoseconds) {
  Segment& own = segment(rank_);
  // a peer on another core answers before this thread could fall asleep; a peer on this core needs it to sleep
  for (int i = 0; i < kSpins; ++i) {
    if (own.bell.load(std::memory_order_acquire) != seen) return true;
    pause();
  }
  own.sleepers.fetch_add(1);
  SP_POINT("before sleep");
  // a ring before this line changes the word that the kernel compares; a ring after it sees a sleeper
  timespec limit{static_cast<time_t>(nanoseconds / 1000000000), static_cast<long>(nanoseconds % 1000000000)};
  futex(&own.bell, FUTEX_WAIT, seen, &limit);
  own.sleepers.fetch_sub(1);
  return own.bell.load(std::memory_order_acquire) != seen;
}

void Mailbox::ring(int rank) {
  Segment& other = segment(rank);
  other.bell.fetch_add(1);
  if (other.sleepers.load() != 0) futex(&other.bell, FUTEX_WAKE, INT32_MAX, nullptr);
}

void Mailbox::leave() {
  for (int peer = 0; peer < size_; ++peer) {
    left(peer, rank_).store(1, std::memory_order_release);
    ring(peer);
  }
}

bool Mailbox::has_left(int peer) const { return left(rank_, peer).load(std::memory_order_acquire) != 0; }

void Mailbox::fail(const std::string& reason) {
  Segment& first = segment(0);
  uint32_t none = kNone, own = kStates * rank_;
  if (first.cause.compare_exchange_strong(none, own + kWriting)) {
    SP_POINT("cause begun");
    first.cause_length = static_cast<int32_t>(fitting(reason));
    memcpy(first.cause_text, reason.data(), first.cause_length);
    first.cause.store(own + kWritten, std::memory_order_release);
  }
  for (int peer = 0; peer < size_; ++peer) ring(peer);
}

bool Mailbox::cause(int* rank, std::string* reason) const {
  const Segment& first = segment(0);
  uint32_t state = first.cause.load(std::memory_order_acquire);
  if (state == kNone) return false;
  // writing the cause takes microseconds, unless the writer was killed meanwhile
  for (int i = 0; state % kStates == kWriting && i < 1000; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    state = first.cause.load(std::memory_order_acquire);
  }
  *rank = static_cast<int>(state / kStates);
  if (state % kStates == kWritten)
    reason->assign(first.cause_text, first.cause_length);
  else
    *reason = "was lost while it wrote its reason";
  return true;
}

}  // namespace seqpar
