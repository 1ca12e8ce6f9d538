// Vectors of floats or doubles, by type: what base/vector.h has for floats, for both.
#pragma once

#include "base/vector.h"

namespace {

constexpr int WD = W / 2;  // lanes of a vector of doubles

typedef double D __attribute__((vector_size(8 * WD)));
typedef int64_t J __attribute__((vector_size(8 * WD)));
typedef double LooseD __attribute__((vector_size(8 * WD), aligned(1), may_alias));

template <class T>
struct Lanes;

template <>
struct Lanes<float> {
  typedef V Type;
  typedef I Bits;
  typedef LooseV Loose;
  typedef int32_t Word;
  static constexpr int COUNT = W, MANTISSA = 23, BIAS = 127, TERMS = 7;  // TERMS: of e^x for |x| < 0.35
  static constexpr float LOWEST = -87.0f, SHIFT = 12582912.0f;           // e^LOWEST is normal; SHIFT 1.5 * 2^23
  static constexpr float LN2_HIGH = 0.693145751953125f, LN2_LOW = 1.42860677e-6f;
};

template <>
struct Lanes<double> {
  typedef D Type;
  typedef J Bits;
  typedef LooseD Loose;
  typedef int64_t Word;
  static constexpr int COUNT = WD, MANTISSA = 52, BIAS = 1023, TERMS = 13;
  static constexpr double LOWEST = -708.0, SHIFT = 6755399441055744.0;
  static constexpr double LN2_HIGH = 0.693147180369123816490, LN2_LOW = 1.90821492927058770002e-10;
};

template <class T>
using Vec = typename Lanes<T>::Type;

template <class T>
inline Vec<T> take(const T* at) {
  return *(const typename Lanes<T>::Loose*)at;
}

template <class T>
inline void put(T* at, Vec<T> x) {
  *(typename Lanes<T>::Loose*)at = x;
}

inline D splat(double x) {
#if defined(__AVX512F__)
  return _mm512_set1_pd(x);
#elif defined(__AVX2__)
  return _mm256_set1_pd(x);
#else
  return D{x, x};
#endif
}

inline D fma(D a, D b, D c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_pd(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_pd(a, b, c);
#else
  return a * b + c;
#endif
}

// Sums in double.
template <class T>
struct Sums;

template <>
struct Sums<double> {
  D sum;
  void add(D x) { sum += x; }
  D rounded() const { return sum; }
};

template <>
struct Sums<float> {
  D low, high;
#if defined(__AVX512F__)
  void add(V x) {
    low += _mm512_cvtps_pd(_mm512_castps512_ps256(x)), high += _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
  }
  V rounded() const {
    return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(low)), _mm512_cvtpd_ps(high), 1);
  }
#elif defined(__AVX2__)
  void add(V x) {
    low += _mm256_cvtps_pd(_mm256_castps256_ps128(x)), high += _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1));
  }
  V rounded() const { return _mm256_set_m128(_mm256_cvtpd_ps(high), _mm256_cvtpd_ps(low)); }
#else
  void add(V x) {
    for (int i = 0; i < WD; ++i) low[i] += x[i], high[i] += x[WD + i];
  }
  V rounded() const {
    V x = {};
    for (int i = 0; i < WD; ++i) x[i] = (float)low[i], x[WD + i] = (float)high[i];
    return x;
  }
#endif
};

inline float sum_of(V x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(x);
#elif defined(__AVX2__)
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
#else
  float sum = 0.0f;
  for (int i = 0; i < W; ++i) sum += x[i];
  return sum;
#endif
}

inline double sum_of(D x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_pd(x);
#else
  double sum = 0.0;
  for (int i = 0; i < WD; ++i) sum += x[i];
  return sum;
#endif
}

// e^x for x at or below 0, rounded to about one unit of the last place; 0 where it would be subnormal. NaN for NaN.
template <class T>
inline Vec<T> exp_of(Vec<T> x) {
  typedef Lanes<T> A;
  typedef typename A::Bits Bits;
  const Vec<T> lowest = splat(A::LOWEST), zero = splat(T(0)), shift = splat(A::SHIFT);
  const Bits small = x < lowest;
  const Vec<T> y = small ? zero : x;
  const Vec<T> shifted = fma(y, splat(T(1.44269504088896340736)), shift), whole = shifted - shift;
  Vec<T> rest = fma(whole, splat(-A::LN2_HIGH), y);
  rest = fma(whole, splat(-A::LN2_LOW), rest);
  T factorial = 1;
  for (int n = 2; n <= A::TERMS; ++n) factorial *= T(n);
  Vec<T> sum = splat(T(1) / factorial);
#pragma GCC unroll 16
  for (int n = A::TERMS; n > 0; --n) factorial /= T(n), sum = fma(sum, rest, splat(T(1) / factorial));
  const Bits exponent = ((Bits)shifted << A::MANTISSA) + ((Bits){} + ((typename A::Word)A::BIAS << A::MANTISSA));
  return small ? zero : sum * (Vec<T>)exponent;
}

}  // namespace
