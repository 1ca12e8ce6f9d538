// Attention on bf16 operands by AMX's products of tile registers.
#if defined(__x86_64__)
#define SP_PAIRS
#define SP_TILES
#include "attention/kernels.h"

const sp_kernels sp_attention_amx = {BM, BN, forward, backward};
#endif
