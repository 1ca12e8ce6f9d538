#include "base/tasks.h"

#include <stdlib.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace {

constexpr size_t HUGE_PAGE = 2 * 1024 * 1024;

struct Queue {
  sp_job run;
  void* job;
  int64_t next, count;
  size_t scratch;
  int failed;
};

// A thread takes tasks until the queue is empty, whatever range it was given: slower threads take fewer.
void drain(int64_t, int64_t, void* context) {
  Queue* queue = static_cast<Queue*>(context);
  char* scratch = static_cast<char*>(sp_allocate(queue->scratch));
  if (scratch == nullptr) {
    __atomic_store_n(&queue->failed, 1, __ATOMIC_RELAXED);
    return;
  }
  for (;;) {
    int64_t task = __atomic_fetch_add(&queue->next, 1, __ATOMIC_RELAXED);
    if (task >= queue->count) break;
    queue->run(queue->job, task, scratch);
  }
  free(scratch);
}

}  // namespace

void* sp_allocate(size_t bytes) {
  const size_t page = bytes >= HUGE_PAGE ? HUGE_PAGE : 4096, size = (bytes + page - 1) / page * page;
  void* memory = aligned_alloc(page, size > 0 ? size : page);
#if defined(__linux__)
  // fresh memory of 4 KiB pages would cost a tenth of a short call in page faults; a refusal does no harm
  if (memory != nullptr && page == HUGE_PAGE) madvise(memory, size, MADV_HUGEPAGE);
#endif
  return memory;
}

int sp_run(sp_job run, void* job, int64_t count, size_t scratch, double work, sp_parallel_for parallel_for) {
  if (count == 0) return 0;
  Queue queue = {run, job, 0, count, scratch, 0};
  // Waking a thread takes microseconds: enough for about a million operations on this one.
  double grain = 1e6 * (double)count / (work > 1e6 ? work : 1e6);
  parallel_for(0, count, grain > 1 ? (int64_t)grain : 1, drain, &queue);
  return queue.failed ? SP_NO_MEMORY : 0;
}
