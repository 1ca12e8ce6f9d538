// Which kernels a processor gets.
#include "base/isa.h"

#include "test/check.h"

void test_isa() {
  struct {
    sp_processor processor;
    int isa;
  } known[] = {
      {{0, 0, 0, 0, 0}, SP_PORTABLE},     // or no x86
      {{1, 1, 0, 0, 0}, SP_AVX2},         // Haswell
      {{1, 1, 1, 0, 0}, SP_AVX512},       // Skylake, Ice Lake
      {{0, 1, 1, 1, 0}, SP_AVX512_BF16},  // EPYC from Zen 4 on
      {{1, 1, 1, 1, 0}, SP_AVX512},       // Cooper Lake, or Linux gives no tile registers
      {{1, 1, 1, 1, 1}, SP_AMX},          // Sapphire Rapids and later
      {{0, 1, 1, 1, 1}, SP_AMX},
  };
  for (const auto& row : known) check(sp_isa_of(row.processor) == row.isa, "the kernels of a known processor");
  check(sp_packs({1, 1, 1, 0, 0}) && !sp_packs({0, 1, 1, 1, 0}) && sp_packs({0, 1, 0, 0, 0}) &&
            !sp_packs({0, 0, 0, 0, 0}),
        "who copies keys");
  check(sp_isa() == sp_isa_of(sp_this_processor()), "the kernels of this processor");
}
