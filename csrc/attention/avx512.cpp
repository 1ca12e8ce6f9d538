// Attention with AVX-512; bf16 is widened.
#if defined(__x86_64__)
#include "attention/kernels.h"

const sp_kernels sp_attention_avx512 = {BM, BN, forward, backward};
#endif
