// The best instruction set of this machine that csrc has kernels for.
#pragma once

#ifdef __cplusplus
extern "C" {
#endif

enum { SP_PORTABLE = 0, SP_AVX2 = 1, SP_AVX512 = 2, SP_AVX512_BF16 = 3, SP_AMX = 4 };

// What the processor and the operating system both support, as 0 or 1. avx512: F, BW, DQ and VL. bf16: products of
// pairs in vectors. tiles: bf16 products of AMX's tile registers, which this process may use.
typedef struct {
  int intel, avx2, avx512, bf16, tiles;
} sp_processor;

// This machine's. Where it has tile registers, Linux is asked once to let this process and its children use them.
sp_processor sp_this_processor(void);

// The fastest set of kernels for a processor; each level includes those before it. Where it is Intel's, kernels that
// widen bf16 are taken before those with products of pairs: on a Xeon such a product took four times as long as a
// multiply-add, and the kernels 1.3 to 1.6 times as long (bench/log.md).
int sp_isa_of(sp_processor processor);

// Whether attention gains by copying float32 keys and values whose rows lie far apart. On a Xeon, whose two ports for
// vectors wait sooner for memory, forward took 0.80 to 0.95 of the time; on an EPYC with AVX-512 0.99 to 1.04, on one
// with AVX2 alone, whose tiles of queries are smaller, 0.65 to 0.88 (bench/log.md).
int sp_packs(sp_processor processor);

// The set of kernels of this machine.
int sp_isa(void);

#ifdef __cplusplus
}
#endif
