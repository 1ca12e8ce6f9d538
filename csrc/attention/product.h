// The product of two panels on vector registers.
#pragma once

#include "attention/panel.h"

namespace {

struct Registers {  // nothing to set up; see attention/tiles.h
  Registers() {}
};

inline V dot(V a, V b, V sum) {
#if defined(SP_PAIRS)
  return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
#else
  return fma(a, b, sum);
#endif
}

// c[r][:] = or += sum over s < steps of a[r * a_row + s * a_step] * b[s * b_step :][: N vectors], for r < rows.
template <int N, bool ADD, bool FETCH>
inline void product(const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t b_step, float* c,
                    int64_t c_row, int64_t rows, int64_t steps, const Ahead* ahead) {
  for (int64_t first = 0; first < rows; first += MR) {
    const float* at[MR];  // past the end the last row again: computed, not stored
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) at[r] = a + least(first + r, rows - 1) * a_row;
    V sum[MR][N];
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) sum[r][v] = splat(0.0f);
    const float* from = b;
    int64_t offset = 0;
    for (int64_t s = 0, pause = steps; s < steps; s = pause) {
      if (FETCH) {
        pause = least(s + 16, steps);  // a cache line's worth of steps
        for (int64_t r = first; r < first + MR; ++r) {
          __builtin_prefetch(ahead->near + r * ahead->near_row + s, 0, 3);
          __builtin_prefetch(ahead->far + r * ahead->far_row + s, 0, 2);
        }
      }
      for (int64_t t = s; t < pause; ++t, offset += a_step, from += b_step) {
        V y[N];
#pragma GCC unroll 4
        for (int v = 0; v < N; ++v) y[v] = load(from + v * W);
#pragma GCC unroll 16
        for (int r = 0; r < MR; ++r) {
          V x = splat(*(const LooseFloat*)(at[r] + offset));
#pragma GCC unroll 4
          for (int v = 0; v < N; ++v) sum[r][v] = dot(x, y[v], sum[r][v]);
        }
      }
    }
    float* to = c + first * c_row;
    if (rows - first >= MR) {
#pragma GCC unroll 16
      for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < N; ++v) {
          float* word = to + r * c_row + v * W;
          store(word, ADD ? load(word) + sum[r][v] : sum[r][v]);
        }
    } else {
      V kept[MR][N];
      memcpy(kept, sum, sizeof(sum));
      for (int64_t r = 0; r < rows - first; ++r)
        for (int v = 0; v < N; ++v) {
          float* word = to + r * c_row + v * W;
          store(word, ADD ? load(word) + kept[r][v] : kept[r][v]);
        }
    }
  }
}

// The same product over any number of vectors.
template <bool ADD, bool FETCH = false>
__attribute__((noinline)) void multiply(int64_t vectors, const float* a, int64_t a_row, int64_t a_step, const float* b,
                                        int64_t b_step, float* c, int64_t c_row, int64_t rows, int64_t steps,
                                        const Ahead* ahead = nullptr) {
  for (int64_t parts = (vectors + NV - 1) / NV; parts > 0; --parts) {
    int64_t n = (vectors + parts - 1) / parts;
    switch (n) {
      case 1:
        product<1, ADD, FETCH>(a, a_row, a_step, b, b_step, c, c_row, rows, steps, ahead);
        break;
      case 2:
        product<2, ADD, FETCH>(a, a_row, a_step, b, b_step, c, c_row, rows, steps, ahead);
        break;
      case 3:
        product<3, ADD, FETCH>(a, a_row, a_step, b, b_step, c, c_row, rows, steps, ahead);
        break;
      default:
        product<NV, ADD, FETCH>(a, a_row, a_step, b, b_step, c, c_row, rows, steps, ahead);
    }
    vectors -= n, b += n * W, c += n * W;
  }
}

// c[col][:] += the columns of a zipped panel with a_words words a row, times the same number of rows of b.
inline void multiply_down(int64_t vectors, const float* a, int64_t a_words, const float* b, int64_t b_step, float* c,
                          int64_t c_row, int64_t cols, int64_t steps) {
  multiply<true>(vectors, a, 1, a_words, b, b_step, c, c_row, cols, steps);
}

}  // namespace
