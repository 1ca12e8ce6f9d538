// Which vector instructions this machine has, of those that csrc has kernels for.
#pragma once

#ifdef __cplusplus
extern "C" {
#endif

enum { SP_PORTABLE = 0, SP_AVX2 = 1, SP_AVX512 = 2, SP_AVX512_BF16 = 3 };

// The best that processor and operating system offer; each includes those before it.
int sp_isa(void);

#ifdef __cplusplus
}
#endif
