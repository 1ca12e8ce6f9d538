// Attention on bf16 operands by AVX512_BF16's products of pairs.
#if defined(__x86_64__)
#define SP_PAIRS
#include "attention/kernels.h"

const sp_kernels sp_attention_avx512_bf16 = {BM, BN, forward, backward};
#endif
