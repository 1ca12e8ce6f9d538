// Products of small matrices in cache.
#pragma once

#include "recurrent/lanes.h"

namespace {

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

enum Into { SET, ADD, SUBTRACT };

template <class T, Into INTO>
inline void write(T* at, Vec<T> sum) {
  put(at, INTO == SET ? sum : INTO == ADD ? take(at) + sum : take(at) - sum);
}

template <class T, int N, Into INTO>
inline void product(const T* a, int64_t a_row, int64_t a_step, const T* b, int64_t b_row, T* c, int64_t c_row,
                    int64_t rows, int64_t steps) {
  constexpr int LANES = Lanes<T>::COUNT;
  for (int64_t first = 0; first < rows; first += MR) {
    const T* at[MR];  // past the end the last row again: computed, not stored
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r) at[r] = a + least(first + r, rows - 1) * a_row;
    Vec<T> sum[MR][N];
#pragma GCC unroll 16
    for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) sum[r][v] = splat(T(0));
    const T* from = b;
    for (int64_t s = 0, offset = 0; s < steps; ++s, offset += a_step, from += b_row) {
      Vec<T> y[N];
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) y[v] = take(from + v * LANES);
#pragma GCC unroll 16
      for (int r = 0; r < MR; ++r) {
        const Vec<T> x = splat(at[r][offset]);
#pragma GCC unroll 4
        for (int v = 0; v < N; ++v) sum[r][v] = fma(x, y[v], sum[r][v]);
      }
    }
    T* to = c + first * c_row;
    if (rows - first >= MR) {
#pragma GCC unroll 16
      for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < N; ++v) write<T, INTO>(to + r * c_row + v * LANES, sum[r][v]);
    } else {
      Vec<T> kept[MR][N];
      memcpy(kept, sum, sizeof(sum));
      for (int64_t r = 0; r < rows - first; ++r)
        for (int v = 0; v < N; ++v) write<T, INTO>(to + r * c_row + v * LANES, kept[r][v]);
    }
  }
}

// c[r][:] = or += or -= sum over s < steps of a[r * a_row + s * a_step] * b[s][:], for r < rows. cols: of b and c, a
// multiple of the lanes.
template <Into INTO, class T>
__attribute__((noinline)) void multiply(int64_t cols, const T* a, int64_t a_row, int64_t a_step, const T* b,
                                        int64_t b_row, T* c, int64_t c_row, int64_t rows, int64_t steps) {
  constexpr int LANES = Lanes<T>::COUNT;
  int64_t vectors = cols / LANES;
  for (int64_t parts = (vectors + NV - 1) / NV; parts > 0; --parts) {
    const int64_t n = (vectors + parts - 1) / parts;
    switch (n) {
      case 1:
        product<T, 1, INTO>(a, a_row, a_step, b, b_row, c, c_row, rows, steps);
        break;
      case 2:
        product<T, 2, INTO>(a, a_row, a_step, b, b_row, c, c_row, rows, steps);
        break;
      case 3:
        product<T, 3, INTO>(a, a_row, a_step, b, b_row, c, c_row, rows, steps);
        break;
      default:
        product<T, NV, INTO>(a, a_row, a_step, b, b_row, c, c_row, rows, steps);
    }
    vectors -= n, b += n * LANES, c += n * LANES;
  }
}

// out[c][r] = in[r][c], for multiples of 16.
inline void turn(const float* in, int64_t in_row, int64_t rows, int64_t cols, float* out, int64_t out_row) {
  for (int64_t r = 0; r < rows; r += W)
    for (int64_t c = 0; c < cols; c += W) transpose(in + r * in_row + c, in_row, out + c * out_row + r, out_row);
}

inline void turn(const double* in, int64_t in_row, int64_t rows, int64_t cols, double* out, int64_t out_row) {
  for (int64_t c = 0; c < cols; ++c)
    for (int64_t r = 0; r < rows; ++r) out[c * out_row + r] = in[r * in_row + c];
}

}  // namespace
