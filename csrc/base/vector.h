// Vectors of the ISA that the including file is compiled for.
//
// Everything in a kernel's headers, this one too, has internal linkage and uses no C++ library: otherwise the linker
// might keep a function compiled for one ISA and use it in the others.
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
// GCC 12 warns about vectors that its own header leaves undefined on purpose (GCC bug 105593).
#if !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#if !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#endif

namespace {

#if defined(SP_TILES)
constexpr int W = 16, NV = 4, MR = 32;
#elif defined(__AVX512F__)
constexpr int W = 16;  // lanes of a vector
constexpr int NV = 3;  // vectors and
constexpr int MR = 8;  // rows of the block that a product keeps in registers
#elif defined(__AVX2__)
constexpr int W = 8, NV = 3, MR = 4;
#elif defined(__aarch64__)
constexpr int W = 4, NV = 4, MR = 6;
#else
constexpr int W = 4, NV = 2, MR = 4;
#endif

typedef float V __attribute__((vector_size(4 * W)));
typedef int32_t I __attribute__((vector_size(4 * W)));
typedef uint32_t N __attribute__((vector_size(4 * W)));
typedef float LooseV __attribute__((vector_size(4 * W), aligned(1), may_alias));
typedef int32_t LooseI __attribute__((vector_size(4 * W), aligned(1), may_alias));
typedef float LooseFloat __attribute__((aligned(1), may_alias));
typedef uint32_t LooseWord __attribute__((aligned(1), may_alias));
typedef uint16_t LooseHalf __attribute__((aligned(1), may_alias));

inline V load(const void* at) { return *static_cast<const LooseV*>(at); }
inline I load_ints(const void* at) { return *static_cast<const LooseI*>(at); }
inline void store(void* at, V x) { *static_cast<LooseV*>(at) = x; }

inline V splat(float x) {
#if defined(__AVX512F__)
  return _mm512_set1_ps(x);
#elif defined(__AVX2__)
  return _mm256_set1_ps(x);
#else
  return V{x, x, x, x};
#endif
}

inline V fma(V a, V b, V c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

// The larger one; b if either is NaN.
inline V larger(V a, V b) {
#if defined(__AVX512F__)
  return _mm512_max_ps(a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

inline bool any(I mask) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)mask) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_ps((__m256)mask) != 0;
#else
  int32_t all = 0;
  for (int i = 0; i < W; ++i) all |= mask[i];
  return all != 0;
#endif
}

// 2^x: NaN for NaN, 0 below -126: a result that underflows may take an Intel core more than 100 cycles. Relative error
// 1e-7; 3e-6 where the result is rounded to bf16 anyway.
inline V exp2(V x) {
#if defined(__AVX512F__)
  const __mmask16 normal = _mm512_cmp_ps_mask(x, splat(-126.0f), _CMP_NLT_UQ);
  V whole = _mm512_roundscale_ps(x, 0);
#else
  V top = splat(128.0f), low = splat(-200.0f);
  x = x > top ? top : x;
  x = x < low ? low : x;
  V magic = splat(12582912.0f);  // 1.5 * 2^23: its last bits hold the integer
  V shifted = x + magic;
  V whole = shifted - magic;
#endif
  V f = x - whole;
#if defined(SP_PAIRS)
  V y = fma(f, splat(0.00958285294f), splat(0.0559064262f));
  y = fma(f, y, splat(0.240240991f));
  y = fma(f, y, splat(0.693124175f));
  y = fma(f, y, splat(1.0f));
#else
  V y = fma(f, splat(0.00132647273f), splat(0.00967151299f));
  y = fma(f, y, splat(0.0555073359f));
  y = fma(f, y, splat(0.240222424f));
  y = fma(f, y, splat(0.693147004f));
  y = fma(f, y, splat(1.0f));
#endif
#if defined(__AVX512F__)
  return _mm512_maskz_scalef_ps(normal, y, whole);
#else
  I exponent = ((I)shifted << 23) + (127 << 23);
  V made = y * (V)exponent;
  return x < splat(-126.0f) ? splat(0.0f) : made;
#endif
}

// tanh, by a polynomial where the quotient would lose bits. Source: Moshier, Cephes, tanhf.
inline V tanh(V x) {
  V z = x * x, size = x < splat(0.0f) ? -x : x;
  V y = fma(z, splat(-5.70498872745e-3f), splat(2.06390887954e-2f));
  y = fma(z, y, splat(-5.37397155531e-2f));
  y = fma(z, y, splat(1.33314422036e-1f));
  y = fma(z, y, splat(-3.33332819422e-1f));
  V small = fma(y * z, x, x);
  V large = splat(1.0f) - splat(2.0f) / (exp2(size * splat(2.885390082f)) + splat(1.0f));
  large = x < splat(0.0f) ? -large : large;
  return size < splat(0.625f) ? small : large;
}

// Transposes rows of W words: out[c][r] = in[r][c].
inline void transpose(const void* in, ptrdiff_t in_row, void* out, ptrdiff_t out_row) {
  const LooseFloat* from = static_cast<const LooseFloat*>(in);
  LooseFloat* to = static_cast<LooseFloat*>(out);
#if defined(__AVX512F__)
  __m512 a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = load(from + i * in_row);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4)
    for (int j = 0; j < 2; ++j) {
      __m512d x = _mm512_castps_pd(b[i + j]), y = _mm512_castps_pd(b[i + j + 2]);
      a[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y));
      a[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
    }
  for (int j = 0; j < 4; ++j) {
    __m512 x = _mm512_shuffle_f32x4(a[j], a[4 + j], 0x88), y = _mm512_shuffle_f32x4(a[j], a[4 + j], 0xdd);
    __m512 z = _mm512_shuffle_f32x4(a[8 + j], a[12 + j], 0x88), w = _mm512_shuffle_f32x4(a[8 + j], a[12 + j], 0xdd);
    store(to + j * out_row, _mm512_shuffle_f32x4(x, z, 0x88));
    store(to + (4 + j) * out_row, _mm512_shuffle_f32x4(y, w, 0x88));
    store(to + (8 + j) * out_row, _mm512_shuffle_f32x4(x, z, 0xdd));
    store(to + (12 + j) * out_row, _mm512_shuffle_f32x4(y, w, 0xdd));
  }
#elif defined(__AVX2__)
  __m256 a[8], b[8];
  for (int i = 0; i < 4; ++i) {  // of rows i and i + 4 the left halves, then the right ones
    const __m256 x = load(from + i * in_row), y = load(from + (i + 4) * in_row);
    a[i] = _mm256_permute2f128_ps(x, y, 0x20), a[4 + i] = _mm256_permute2f128_ps(x, y, 0x31);
  }
  for (int i = 0; i < 8; i += 2)
    b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]), b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; ++j) {
      const __m256d x = _mm256_castps_pd(b[i + j]), y = _mm256_castps_pd(b[i + j + 2]);
      store(to + (i + 2 * j) * out_row, _mm256_castpd_ps(_mm256_unpacklo_pd(x, y)));
      store(to + (i + 2 * j + 1) * out_row, _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
    }
#else
  for (int r = 0; r < W; ++r)
    for (int c = 0; c < W; ++c) to[c * out_row + r] = from[r * in_row + c];
#endif
}

}  // namespace
