#include "base/isa.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <stdint.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#if defined(__x86_64__)
// Whether the processor has products of bf16 tiles and Linux lets this process use them. Source: the kernel's
// Documentation/arch/x86/xstate.rst: a process must ask once before it touches the tile registers.
bool amx() {
#if defined(__linux__)
  constexpr unsigned TILES = 1u << 24, BF16 = 1u << 22, OSXSAVE = 1u << 27;  // CPUID.7.0:EDX, CPUID.1:ECX
  constexpr uint64_t STATE = 3u << 17;                                       // XCR0: configuration and data of tiles
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & OSXSAVE)) return false;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & (TILES | BF16)) != (TILES | BF16)) return false;
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((((uint64_t)high << 32 | low) & STATE) != STATE) return false;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
  return false;
#endif
}

int best() {
  // These builtins ask the operating system too: it must save the wider registers for a feature to count.
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return SP_PORTABLE;
  bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (!wide) return SP_AVX2;
  if (!__builtin_cpu_supports("avx512bf16")) return SP_AVX512;
  return amx() ? SP_AMX : SP_AVX512_BF16;
}
#else
int best() { return SP_PORTABLE; }
#endif

}  // namespace

int sp_isa(void) {
  static const int isa = best();
  return isa;
}
