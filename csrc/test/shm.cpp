// The protocol of shared memory between threads of one mapping, so that a thread sanitizer sees both ends.
#include <errno.h>
#include <linux/futex.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "test/check.h"

namespace {

thread_local std::minstd_rand dice;

// Between two steps of the protocol: mostly nothing, often another thread's turn, sometimes a long one.
void delay() {
  unsigned n = dice() % 128;
  if (n == 0) std::this_thread::sleep_for(std::chrono::microseconds(dice() % 100));
  if (n < 8) std::this_thread::yield();
}

}  // namespace

// A mailbox of this file's own, with a delay at every SP_POINT. Its headers are included before the namespace is
// renamed.
#define SP_POINT(name) delay()
#define seqpar delayed
#include "shm/mailbox.cpp"
#undef seqpar

void test_shm_end();
void test_pool();

namespace {

using delayed::kHeader;
using delayed::kSlots;
using delayed::Mailbox;
using delayed::Offer;

constexpr int kWords = 48;

// Sleeps until the bell rings; slow only if a wake-up was lost.
void sleep(Mailbox& box, uint32_t bell) {
  auto start = std::chrono::steady_clock::now();
  while (!box.wait(bell, 20'000'000'000))
    check(std::chrono::steady_clock::now() - start < std::chrono::seconds(15), "a waiting rank was not woken");
}

// The ranks of one process: their segments, and a ring of buffers in the receiver's memory for every pair.
struct World {
  World(int size, int buffers, uint32_t first_epoch)
      : size(size), buffers(buffers), memory(size * size * buffers * kWords) {
    for (int rank = 0; rank < size; ++rank) {
      storage.emplace_back(Mailbox::bytes(size) / sizeof(Line) + 1);
      Mailbox::format(storage.back().data(), size, rank, first_epoch);
      segments.push_back(storage.back().data());
    }
  }

  int64_t where(int receiver, int sender, int64_t number) const {
    return ((receiver * size + sender) * buffers + number % buffers) * kWords;
  }

  struct alignas(64) Line {
    char bytes[64];
  };
  int size, buffers;
  std::vector<std::vector<Line>> storage;
  std::vector<void*> segments;
  std::vector<int64_t> memory;
};

// The content of message `number` of a pair: its length and every word follow from these numbers alone.
int length(int from, int to, int64_t number) { return static_cast<int>((number * 7 + from * 3 + to) % kWords) + 1; }
int64_t word(int from, int to, int64_t number, int at) { return ((number * 64 + from) * 64 + to) * 64 + at; }

// One rank: sends `messages` to every other rank and receives as many, each once and in order, in reused buffers.
void rank_main(World& world, int rank, int64_t messages, unsigned seed, std::atomic<int64_t>& full) {
  dice.seed(seed * 64 + rank + 1);
  Mailbox box(rank, world.segments);
  std::vector<int64_t> credited(world.size), taken(world.size), sent(world.size);
  int64_t left = 2 * messages * (world.size - 1);
  while (left > 0) {
    uint32_t bell = box.bell();
    bool moved = false;
    for (int peer = 0; peer < world.size; ++peer) {
      if (peer == rank) continue;
      if (dice() % 4 == 0) {
        moved = true;  // skips this peer for now, and must not sleep before it tries again
        continue;
      }
      while (credited[peer] < messages && credited[peer] - taken[peer] < world.buffers) {
        Offer offer{};
        offer.header[0] = credited[peer];
        offer.header[kHeader - 1] = length(peer, rank, credited[peer]);
        offer.where = world.where(rank, peer, credited[peer]);
        if (!box.credit(peer, offer)) {
          ++full;
          break;
        }
        ++credited[peer];
        moved = true;
      }
      for (const Offer* offer; sent[peer] < messages && (offer = box.offered(peer)); --left, moved = true) {
        int64_t number = sent[peer]++;
        int words = length(rank, peer, number);
        check(offer->header[0] == number && offer->header[kHeader - 1] == words, "a credit for another message");
        check(offer->where == world.where(peer, rank, number), "a credit with another destination");
        for (int i = 0; i < words; ++i) world.memory[offer->where + i] = word(rank, peer, number, i);
        box.arrive(peer);
      }
      for (int64_t arrived = box.arrived(peer); taken[peer] < arrived; --left, moved = true) {
        int64_t number = taken[peer]++;
        int64_t* at = &world.memory[world.where(rank, peer, number)];
        for (int i = 0; i < length(peer, rank, number); ++i) {
          check(at[i] == word(peer, rank, number, i), "a message lost, doubled, or out of order");
          at[i] = -1;
        }
      }
    }
    if (!moved && left > 0) sleep(box, bell);
  }
}

void test_messages(int size, int buffers, int64_t messages, uint32_t first_epoch, bool fills) {
  World world(size, buffers, first_epoch);
  std::atomic<int64_t> full{0};
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank)
    ranks.emplace_back(rank_main, std::ref(world), rank, messages, first_epoch + buffers, std::ref(full));
  for (std::thread& rank : ranks) rank.join();
  check(!fills || full > 0, "the slots were never full");
}

// All ranks but the last sleep; two fail at once; all learn the same cause.
void test_failure(unsigned seed) {
  constexpr int size = 4;
  World world(size, 1, delayed::kFirstEpoch);
  std::vector<std::string> reasons(size);
  std::vector<int> culprits(size, -1);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank)
    ranks.emplace_back([&, rank] {
      dice.seed(seed * size + rank + 1);
      Mailbox box(rank, world.segments);
      if (rank >= 2) box.fail("rank " + std::to_string(rank) + " gave up");
      uint32_t bell = box.bell();
      while (!box.cause(&culprits[rank], &reasons[rank])) {
        sleep(box, bell);
        bell = box.bell();
      }
    });
  for (std::thread& rank : ranks) rank.join();
  for (int rank = 0; rank < size; ++rank) {
    check(culprits[rank] == culprits[0] && reasons[rank] == reasons[0], "ranks know different causes");
    check(reasons[rank] == "rank " + std::to_string(culprits[rank]) + " gave up", "the cause is no rank's reason");
  }
}

void test_state() {
  World world(2, 1, delayed::kFirstEpoch);
  Mailbox a(0, world.segments), b(1, world.segments);
  check(Mailbox::is(world.segments[1], 2, 1) && !Mailbox::is(world.segments[1], 2, 0),
        "a nonce does not tell segments apart");
  Offer offer{};
  check(!b.offered(0) && a.arrived(1) == 0, "a message before any was written");
  for (int i = 0; i < kSlots; ++i) check(a.credit(1, offer), "a slot is not free");
  check(!a.credit(1, offer), "more credits than slots");
  check(b.offered(0) && a.next(1, true).slot == 0, "the first credit is missing");
  b.arrive(0);
  check(a.arrived(1) == 1 && a.credit(1, offer), "an arrival does not free its slot");
  delayed::Place next = a.next(1, true);
  check(next.slot == 1 && next.expected == delayed::kFirstEpoch + 2 && next.seen == delayed::kFirstEpoch,
        "the slot and epochs of the next message");
  uint32_t bell = a.bell();
  check(!a.wait(bell, 1000), "woken without a ring");
  check(!a.has_left(1), "left before leaving");
  b.leave();
  check(a.has_left(1) && a.bell() != bell, "left without ringing the bell");
  b.fail(std::string(5000, 'x'));
  int rank = -1;
  std::string reason;
  check(a.cause(&rank, &reason) && rank == 1 && reason == std::string(1024, 'x'), "a long reason is cut");
}

}  // namespace

void test_shm() {
  dice.seed(1);
  test_pool();
  test_state();
  test_messages(2, 1, 40000, delayed::kFirstEpoch, false);
  test_messages(3, 5, 20000, 0u - 1000, false);
  test_messages(2, 2 * kSlots, 40000, 0u - 2000, true);
  test_messages(4, 3, 5000, 0, false);
  for (unsigned seed = 0; seed < 50; ++seed) test_failure(seed);
  test_shm_end();
}

#ifdef SP_TEST_MAIN
int main() { test_shm(); }
#endif
