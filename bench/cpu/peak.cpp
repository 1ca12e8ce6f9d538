// GFLOP/s of one thread that multiplies and adds registers, as the attention kernels do. bench/cpu/attention.py
// compiles it for the processor that it runs on, with SP_PAIRS for dot products of pairs of bf16.
#include <time.h>

#include "attention/dispatch.h"
#include "attention/panel.h"

namespace {

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

}  // namespace

// The best of short windows, since others may want the processor too.
extern "C" double peak(double seconds) {
  constexpr int CHAINS = MR * NV, STEPS = 50000;
  V sum[CHAINS], a = splat(1e-9f), b = splat(1e-9f);
#pragma GCC unroll 32
  for (int i = 0; i < CHAINS; ++i) sum[i] = splat((float)i);
  double best = 0, begin = now(), last = begin;
  do {
    for (int s = 0; s < STEPS; ++s) {
#if defined(__x86_64__)
      asm volatile("" : "+x"(a), "+x"(b));
#else
      asm volatile("" : "+w"(a), "+w"(b));
#endif
#pragma GCC unroll 32
      for (int i = 0; i < CHAINS; ++i) sum[i] = dot(a, b, sum[i]);
    }
    double at = now(), rate = (double)STEPS * CHAINS * W * PAIR * 2 / (at - last) * 1e-9;
    best = rate > best ? rate : best;
    last = at;
  } while (last - begin < seconds);
  // they end in a result, or none would be computed
#pragma GCC unroll 32
  for (int i = 1; i < CHAINS; ++i) sum[0] += sum[i];
  return any(sum[0] < splat(0.0f)) ? 0.0 : best;
}
