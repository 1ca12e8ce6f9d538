// Attention with AVX2 and FMA.
#if defined(__x86_64__)
#include "attention/kernels.h"

const sp_kernels sp_attention_avx2 = {BM, BN, forward, backward};
#endif
