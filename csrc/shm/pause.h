// The pause of a spinning loop between two reads of memory that another thread writes.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Where the tests of the protocol let other threads run; empty in the product.
#ifndef SP_POINT
#define SP_POINT(name)
#endif

namespace seqpar {

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace seqpar
