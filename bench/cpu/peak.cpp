// GFLOP/s of one thread that multiplies and adds registers, as the attention kernels do. bench/cpu/attention.py
// compiles it for the processor that it runs on, with SP_PAIRS for dot products of pairs of bf16, and SP_TILES for
// those of tile registers.
#include <time.h>

#include "attention/walk.h"

namespace {

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// The best of short windows, since others may want the processor too. run: so many operations.
template <class Run>
double best(double seconds, double operations, Run run) {
  double best = 0, begin = now(), last = begin;
  do {
    run();
    double at = now(), rate = operations / (at - last) * 1e-9;
    best = rate > best ? rate : best;
    last = at;
  } while (last - begin < seconds);
  return best;
}

}  // namespace

#if defined(SP_TILES)
extern "C" double peak(double seconds) {
  constexpr int STEPS = 5000;
  Registers registers;
  clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
  clear_tile<4>(), clear_tile<5>(), clear_tile<6>(), clear_tile<7>();
  return best(seconds, 4.0 * STEPS * TILE * TILE * TILE * PAIR * 2, [] {
    for (int s = 0; s < STEPS; ++s)
      dot_tiles<0, 4, 6>(), dot_tiles<1, 4, 7>(), dot_tiles<2, 5, 6>(), dot_tiles<3, 5, 7>();
  });
}
#else
extern "C" double peak(double seconds) {
  constexpr int CHAINS = MR * NV, STEPS = 50000;
  V sum[CHAINS], a = splat(1e-9f), b = splat(1e-9f);
#pragma GCC unroll 32
  for (int i = 0; i < CHAINS; ++i) sum[i] = splat((float)i);
  double rate = best(seconds, (double)STEPS * CHAINS * W * PAIR * 2, [&] {
    for (int s = 0; s < STEPS; ++s) {
#if defined(__x86_64__)
      asm volatile("" : "+x"(a), "+x"(b));
#else
      asm volatile("" : "+w"(a), "+w"(b));
#endif
#pragma GCC unroll 32
      for (int i = 0; i < CHAINS; ++i) sum[i] = dot(a, b, sum[i]);
    }
  });
  // they end in a result, or none would be computed
#pragma GCC unroll 32
  for (int i = 1; i < CHAINS; ++i) sum[0] += sum[i];
  return any(sum[0] < splat(0.0f)) ? 0.0 : rate;
}
#endif
