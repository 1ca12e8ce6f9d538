// The product of two panels on AMX's tile registers, which have 16 rows of 16 words.
//
// The instructions stand as assembly: the compiler's functions do not say that they read memory. Steps are multiples
// of 16 words, rows of 16; panels are padded to that.
#pragma once

#include "attention/panel.h"

namespace {

constexpr int TILE = 16;  // rows, and words of a row

// Tile registers of this shape are this thread's while the object lives. No call that may use them lies between.
struct Registers {
  Registers() {
    struct {
      uint8_t palette, start, zeros[14];
      uint16_t row_bytes[16];
      uint8_t rows[16];
    } shapes = {};
    static_assert(sizeof(shapes) == 64, "as LDTILECFG reads it");
    shapes.palette = 1;
    for (int i = 0; i < 8; ++i) shapes.row_bytes[i] = TILE * 4, shapes.rows[i] = TILE;
    asm volatile("ldtilecfg %0" : : "m"(shapes));
  }
  ~Registers() { asm volatile("tilerelease"); }
  Registers(const Registers&) = delete;
};

template <int REGISTER>
inline void load_tile(const float* at, int64_t row) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(at), "r"(row * 4), "i"(REGISTER) : "memory");
}

template <int REGISTER>
inline void store_tile(float* at, int64_t row) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(at), "r"(row * 4), "i"(REGISTER) : "memory");
}

template <int REGISTER>
inline void clear_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(REGISTER));
}

template <int SUM, int A, int B>
inline void dot_tiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUM), "i"(A), "i"(B));
}

// One or two tiles of rows times one or two of columns. Sums are registers 0 to 3, a's 4 and 5, b's 6 and 7.
template <int ROWS, int COLS, bool ADD>
inline void block_product(const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t b_step, float* c,
                          int64_t c_row, int64_t steps) {
  const int64_t a_next = TILE * a_row, c_next = TILE * c_row;
  if (ADD) {
    load_tile<0>(c, c_row);
    if (COLS > 1) load_tile<1>(c + TILE, c_row);
    if (ROWS > 1) load_tile<2>(c + c_next, c_row);
    if (ROWS > 1 && COLS > 1) load_tile<3>(c + c_next + TILE, c_row);
  } else {
    clear_tile<0>();
    if (COLS > 1) clear_tile<1>();
    if (ROWS > 1) clear_tile<2>();
    if (ROWS > 1 && COLS > 1) clear_tile<3>();
  }
  for (int64_t s = 0; s < steps; s += TILE, a += TILE * a_step, b += TILE * b_step) {
    load_tile<6>(b, b_step);
    load_tile<4>(a, a_row);
    dot_tiles<0, 4, 6>();
    if (COLS > 1) load_tile<7>(b + TILE, b_step), dot_tiles<1, 4, 7>();
    if (ROWS > 1) load_tile<5>(a + a_next, a_row), dot_tiles<2, 5, 6>();
    if (ROWS > 1 && COLS > 1) dot_tiles<3, 5, 7>();
  }
  store_tile<0>(c, c_row);
  if (COLS > 1) store_tile<1>(c + TILE, c_row);
  if (ROWS > 1) store_tile<2>(c + c_next, c_row);
  if (ROWS > 1 && COLS > 1) store_tile<3>(c + c_next + TILE, c_row);
}

// c[r][:] = or += sum over steps of a's rows and b's, for r < rows. a_step: from one step of 16 words to the next, in
// sixteenths.
template <bool ADD>
__attribute__((noinline)) void tile_product(int64_t vectors, const float* a, int64_t a_row, int64_t a_step,
                                            const float* b, int64_t b_step, float* c, int64_t c_row, int64_t rows,
                                            int64_t steps) {
  for (; rows > 0; rows -= 2 * TILE, a += 2 * TILE * a_row, c += 2 * TILE * c_row) {
    const bool two = rows > TILE;
    int64_t v = 0;
    for (; v + 1 < vectors; v += 2) {
      if (two)
        block_product<2, 2, ADD>(a, a_row, a_step, b + v * TILE, b_step, c + v * TILE, c_row, steps);
      else
        block_product<1, 2, ADD>(a, a_row, a_step, b + v * TILE, b_step, c + v * TILE, c_row, steps);
    }
    if (v < vectors && two)
      block_product<2, 1, ADD>(a, a_row, a_step, b + v * TILE, b_step, c + v * TILE, c_row, steps);
    else if (v < vectors)
      block_product<1, 1, ADD>(a, a_row, a_step, b + v * TILE, b_step, c + v * TILE, c_row, steps);
  }
}

// The product as attention/product.h has it, for a flat panel a.
template <bool ADD, bool FETCH = false>
inline void multiply(int64_t vectors, const float* a, int64_t a_row, int64_t, const float* b, int64_t b_step, float* c,
                     int64_t c_row, int64_t rows, int64_t steps, const Ahead* = nullptr) {
  tile_product<ADD>(vectors, a, a_row, 1, b, b_step, c, c_row, rows, steps);
}

// c[col][:] += the columns of a banded panel with a_words words a row, times the same number of rows of b.
inline void multiply_down(int64_t vectors, const float* a, int64_t a_words, const float* b, int64_t b_step, float* c,
                          int64_t c_row, int64_t cols, int64_t steps) {
  tile_product<true>(vectors, a, TILE, a_words, b, b_step, c, c_row, cols, steps);
}

}  // namespace
