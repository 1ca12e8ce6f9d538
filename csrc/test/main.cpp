// Runs the tests of csrc without Python and torch, so that sanitizers see this code alone: make sanitize.
#include <algorithm>
#include <cstdio>
#include <thread>
#include <vector>

#include "base/parallel.h"

void test_attention(sp_parallel_for parallel_for);
void test_isa();
void test_recurrent(sp_parallel_for parallel_for);
void test_copy(sp_parallel_for parallel_for);
void test_shm();

namespace {

// Three threads on any machine, with ranges of unequal length.
void threads(int64_t begin, int64_t end, int64_t grain, sp_task task, void* context) {
  const int64_t step = std::max((end - begin + 2) / 3, std::max<int64_t>(grain, 1));
  std::vector<std::thread> running;
  for (int64_t at = begin; at < end; at += step) {
    running.emplace_back(task, at, std::min(at + step, end), context);
  }
  for (std::thread& thread : running) thread.join();
}

// Flushed at once: a test that forks would print buffered text again.
void say(const char* name) {
  std::puts(name);
  std::fflush(stdout);
}

}  // namespace

int main() {
  test_isa();
  say("isa");
  test_copy(threads);
  say("copy");
  test_shm();
  say("shm");
  test_attention(threads);
  say("attention");
  test_recurrent(threads);
  say("recurrent");
  return 0;
}
