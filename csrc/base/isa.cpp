#include "base/isa.h"

int sp_isa(void) {
#if defined(__x86_64__)
  // These builtins ask the operating system too: it must save the wider registers for a feature to count.
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return SP_PORTABLE;
  bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (!wide) return SP_AVX2;
  return __builtin_cpu_supports("avx512bf16") ? SP_AVX512_BF16 : SP_AVX512;
#else
  return SP_PORTABLE;
#endif
}
