// The pool against a model, and the ends of several ranks in one process.
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "shm/end.h"
#include "test/check.h"

using namespace seqpar;

namespace {

constexpr int64_t kPool = 1 << 20;

using Blocks = std::map<int64_t, int64_t>;  // offset -> bytes

// Whether a block lies inside the pool and overlaps no other.
bool apart(const Blocks& blocks, int64_t offset, int64_t bytes) {
  auto after = blocks.lower_bound(offset);
  if (offset % Pool::kAlignment || offset < 0 || offset + bytes > kPool) return false;
  if (after != blocks.end() && after->first < offset + bytes) return false;
  return after == blocks.begin() || std::prev(after)->first + std::prev(after)->second <= offset;
}

void random_blocks(Pool& pool, unsigned seed, int steps, bool alone) {
  std::minstd_rand dice(seed);
  Blocks mine;
  for (int i = 0; i < steps; ++i) {
    if (dice() % 2 && !mine.empty()) {
      auto block = std::next(mine.begin(), dice() % mine.size());
      pool.give(block->first);
      mine.erase(block);
      continue;
    }
    int64_t bytes = 1 + dice() % (1 << dice() % 17), offset = pool.take(bytes);
    if (offset < 0) continue;
    check(apart(mine, offset, bytes), "a block of the pool overlaps another");
    mine[offset] = bytes;
    if (alone) check(pool.used() >= bytes, "the pool undercounts its used bytes");
  }
  for (auto& [offset, bytes] : mine) pool.give(offset);
}

void test_ends() {
  constexpr int size = 3;
  std::vector<std::unique_ptr<ShmEnd>> ends;
  for (int rank = 0; rank < size; ++rank) ends.push_back(std::make_unique<ShmEnd>(rank, size, kPool));
  for (int rank = 0; rank < size; ++rank)
    for (int peer = 0; peer < size; ++peer)
      if (peer != rank) ends[rank]->map(peer, ends[peer]->address());
  Address other = ends[0]->address();
  ++other.nonce;
  bool refused = false;
  try {
    ShmEnd(1, size, kPool).map(0, other);
  } catch (const std::runtime_error& error) {
    refused = strstr(error.what(), "not the one that started as rank 0");
  }
  check(refused, "mistook another process for rank 0");
  for (auto& end : ends) end->open();

  // a 3 x 4 matrix into the transpose of a 4 x 3 one
  std::vector<int32_t> source(12);
  for (int i = 0; i < 12; ++i) source[i] = i;
  SharedPool& pool = *ends[1]->pool();
  int64_t offset = pool.pool.take(12 * 4);
  auto* target = reinterpret_cast<int32_t*>(pool.memory.data() + offset);
  View from{reinterpret_cast<char*>(source.data()), 4, {3, 4}, {4, 1}};
  View to{reinterpret_cast<char*>(target), 4, {3, 4}, {1, 3}};
  check(ends[1]->owns(to) && !ends[1]->owns(from) && !ends[0]->owns(to), "owns() names the wrong memory");
  int64_t words[kHeader] = {1, 2, 3}, others[kHeader] = {1, 2, 4};
  check(ends[0]->push(1, words, from, nullptr) == Pushed::kNothingOffered, "pushed without credit");
  check(ends[1]->credit(0, words, to), "no credit");
  check(ends[0]->push(1, others, from, nullptr) == Pushed::kOtherHeader, "pushed a message with another header");
  check(ends[0]->push(1, words, from, nullptr) == Pushed::kMoved && ends[1]->mailbox().arrived(0) == 1,
        "a message did not arrive");
  for (int i = 0; i < 12; ++i) check(target[i % 4 * 3 + i / 4] == i, "an element is in the wrong place");

  View outside = to;
  outside.sizes[0] = static_cast<int64_t>(kPool);
  check(!ends[1]->owns(outside), "owns memory beyond its pool");
  check(!ends[0]->ended(1) && !ends[0]->mailbox().has_left(1), "left too early");
  std::shared_ptr<SharedPool> kept = ends[1]->pool();
  ends[1].reset();
  check(ends[0]->mailbox().has_left(1) && target[1] == 4, "leaving loses the end's tensors");
}

void test_processes() {
  check(!Process(getpid()).ended(), "this process has ended");
  pid_t child = fork();
  if (child == 0) _exit(0);
  {
    Process process(child);
    for (int i = 0; i < 10000 && !process.ended(); ++i) usleep(1000);
    check(process.ended(), "an ended process that was not reaped counts as running");
  }
  waitpid(child, nullptr, 0);
  check(Process(child).ended(), "a reaped process counts as running");
}

}  // namespace

void test_pool() {
  Pool pool(kPool);
  random_blocks(pool, 7, 20000, true);
  check(pool.used() == 0 && pool.take(kPool + 1) < 0, "the pool kept a block");
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 3; ++seed)
    threads.emplace_back([&pool, seed] { random_blocks(pool, seed, 5000, false); });
  for (std::thread& thread : threads) thread.join();
  int64_t all = pool.take(kPool);
  check(all == 0, "free blocks did not merge again");
  pool.give(all);
  pool.give(all);
  check(pool.used() == 0, "a block freed twice is counted twice");
  int64_t first = pool.take(100);
  pool.take(100);
  pool.give(first);
  check(pool.take(64) == first, "not the first of the smallest free ranges that fit");
}

void test_shm_end() {
  test_ends();
  test_processes();
}
