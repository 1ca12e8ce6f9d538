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
int by_intel() {
  unsigned highest = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(0, &highest, &b, &c, &d) && b == signature_INTEL_ebx && c == signature_INTEL_ecx &&
         d == signature_INTEL_edx;
}

// Source: Linux, Documentation/arch/x86/xstate.rst: a process asks before it touches the tile registers.
int has_tiles() {
#if defined(__linux__)
  constexpr unsigned OSXSAVE = 1u << 27,
                     TILES = 1u << 24 | 1u << 22;  // CPUID.1:ECX; AMX-TILE and AMX-BF16 in CPUID.7:EDX
  constexpr unsigned STATE = 3u << 17;             // XCR0: the configuration and the tiles
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  unsigned a = 0, b = 0, c = 0, d = 0, low, high;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & OSXSAVE)) return 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & TILES) != TILES) return 0;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low & STATE) != STATE) return 0;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
  return 0;
#endif
}
#endif

sp_processor described() {
  sp_processor x = {};
#if defined(__x86_64__)
  // These builtins ask the operating system too: it must save the wider registers for a feature to count.
  x.intel = by_intel();
  x.avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  x.avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  x.bf16 = __builtin_cpu_supports("avx512bf16") ? 1 : 0;
  x.tiles = has_tiles();
#endif
  return x;
}

}  // namespace

sp_processor sp_this_processor(void) {
  static const sp_processor processor = described();  // a virtual machine takes long to answer
  return processor;
}

int sp_isa_of(sp_processor x) {
  if (!x.avx2) return SP_PORTABLE;
  if (!x.avx512) return SP_AVX2;
  if (!x.bf16) return SP_AVX512;
  if (x.tiles) return SP_AMX;
  return x.intel ? SP_AVX512 : SP_AVX512_BF16;
}

int sp_packs(sp_processor x) { return x.avx2 && (x.intel || !x.avx512); }

int sp_isa(void) { return sp_isa_of(sp_this_processor()); }
