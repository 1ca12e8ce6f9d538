#include "recurrent/recurrent.h"

#include "base/isa.h"
#include "recurrent/dispatch.h"

namespace {

const sp_recurrent_kernels* kernels(int isa) {
#if defined(__x86_64__)
  if (isa > sp_isa()) isa = sp_isa();
  if (isa >= SP_AVX512) return &sp_recurrent_avx512;
  if (isa == SP_AVX2) return &sp_recurrent_avx2;
#else
  (void)isa;
#endif
  return &sp_recurrent_portable;
}

}  // namespace

int sp_recurrent_forward(const sp_recurrence* x, const sp_recurrent_sums* sums, int isa, sp_parallel_for parallel_for) {
  return kernels(isa)->forward(x, sums, parallel_for);
}

int sp_recurrent_backward(const sp_recurrence* x, const sp_recurrent_grads* grads, int isa,
                          sp_parallel_for parallel_for) {
  return kernels(isa)->backward(x, grads, parallel_for);
}
