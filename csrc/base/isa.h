// The best instruction set of this machine that csrc has kernels for.
#pragma once

#ifdef __cplusplus
extern "C" {
#endif

enum { SP_PORTABLE = 0, SP_AVX2 = 1, SP_AVX512 = 2, SP_AVX512_BF16 = 3, SP_AMX = 4 };

// What the processor and the operating system both support; each level includes those before it.
int sp_isa(void);

#ifdef __cplusplus
}
#endif
