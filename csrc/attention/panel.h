// Panels, the operands in the order in which the matrix product reads them.
//
// A panel consists of 4-byte words: one float, or with SP_PAIRS two bf16 that are neighbours along the summed index.
// A matrix [rows][cols] has two layouts. For 2 x 4 values a b c d / e f g h in pairs:
//     flat     ab cd / ef gh      pairs along the columns
//     zipped   ae bf cg dh        pairs along the rows: half as many rows of words
// SP_TILES adds a third, for a left operand that is summed along its rows: a tile register wants 16 words of that
// index side by side.
//     banded   zipped in bands of 16 rows of words, and each band transposed
#pragma once

#include "base/vector.h"

namespace {

#if defined(SP_PAIRS)
constexpr int PAIR = 2;  // values per word
#else
constexpr int PAIR = 1;
#endif
#if defined(SP_TILES)
constexpr int GROUP = 2;          // vectors of lanes that are computed together, and
constexpr int GRAIN = PAIR * 16;  // keys: a sum over either fills rows of tile registers
#else
constexpr int GROUP = 1, GRAIN = PAIR;
#endif

inline int64_t up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

inline V widened(uint16_t bits) {
  uint32_t word = (uint32_t)bits << 16;
  float x;
  memcpy(&x, &word, 4);
  return splat(x);
}

enum Layout { FLAT, ZIPPED, BANDED };

inline float value(const float* panel, int64_t row, int64_t words, int64_t col, Layout layout) {
#if defined(SP_PAIRS)
  const LooseHalf* halves = (const LooseHalf*)panel;
  int64_t word = row / 2 * words + col;
#if defined(SP_TILES)
  if (layout == BANDED) word = row / GRAIN * 16 * words + col * 16 + row / 2 % 16;
#endif
  return widened(layout == FLAT ? halves[row * words * 2 + col] : halves[word * 2 + row % 2])[0];
#else
  (void)layout;
  return panel[row * words + col];
#endif
}

// Rows to prefetch into the first- and second-level cache during a product, as many and as long as its own. Rows of a
// head may lie a page apart, where the hardware prefetcher gives up. Addresses beyond the tensors do no harm.
struct Ahead {
  const float *near, *far;
  int64_t near_row, far_row;
};

// Prefetches rows that will be read soon; `row` and `bytes` are in bytes.
inline void fetch(const void* at, int64_t row, int64_t rows, int64_t bytes) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t b = 0; b < bytes; b += 64) __builtin_prefetch(static_cast<const char*>(at) + r * row + b, 0, 2);
}

constexpr int64_t FETCHED_ROWS = 6;  // how many rows to prefetch ahead of a sequential read

// Copies rows of a tensor into a flat panel of `words` words a row, padded with zeros.
inline void stage(int dtype, const void* x, int64_t row, int64_t cols, int64_t rows, float* panel, int64_t words,
                  int64_t panel_rows) {
  for (int64_t r = 0; r < rows; ++r) {
    float* to = panel + r * words;
    int64_t width = dtype == SP_F32 ? 4 : 2;
    if (r + FETCHED_ROWS < rows) fetch((const char*)x + (r + FETCHED_ROWS) * row * width, 0, 1, cols * width);
    if (dtype == SP_F32) {
      memcpy(to, (const char*)x + r * row * 4, (size_t)cols * 4);
      memset(to + cols, 0, (size_t)(words - cols) * 4);
    } else if (PAIR == 2) {
      memcpy(to, (const char*)x + r * row * 2, (size_t)cols * 2);
      memset((char*)to + cols * 2, 0, (size_t)(words * 4 - cols * 2));
    } else {
      const LooseHalf* from = (const LooseHalf*)((const char*)x + r * row * 2);
      LooseWord* bits = (LooseWord*)to;
      for (int64_t c = 0; c < cols; ++c) bits[c] = (uint32_t)from[c] << 16;
      memset(to + cols, 0, (size_t)(words - cols) * 4);
    }
  }
  memset(panel + rows * words, 0, (size_t)((panel_rows - rows) * words) * 4);
}

// Transposes a flat panel: out[w][r], for multiples of W.
inline void turn(const float* panel, int64_t words, int64_t rows, float* out, int64_t out_row) {
  for (int64_t w = 0; w < words; w += W)
    for (int64_t r = 0; r < rows; r += W) transpose(panel + r * words + w, words, out + w * out_row + r, out_row);
}

#if defined(SP_PAIRS)
// Zips a flat panel with an even number of rows: `cols` words a row.
inline void zip(const float* panel, int64_t words, int64_t rows, float* __restrict out, int64_t cols) {
  for (int64_t r = 0; r < rows; r += 2) {
    const LooseHalf *a = (const LooseHalf*)(panel + r * words), *b = (const LooseHalf*)(panel + (r + 1) * words);
    uint32_t* to = (uint32_t*)(out + r / 2 * cols);
    for (int64_t c = 0; c < cols; ++c) to[c] = a[c] | (uint32_t)b[c] << 16;
  }
}

// Zips a flat panel whose columns will be summed down: into bands with SP_TILES, for multiples of GRAIN rows and of W
// columns.
inline void zip_down(const float* panel, int64_t words, int64_t rows, float* out, int64_t cols) {
#if defined(SP_TILES)
  float block[16 * W];
  for (int64_t r = 0; r < rows; r += GRAIN)
    for (int64_t c = 0; c < cols; c += W) {
      zip(panel + r * words + c / PAIR, words, GRAIN, block, W);
      transpose(block, W, out + r / PAIR * cols + c * 16, 16);
    }
#else
  zip(panel, words, rows, out, cols);
#endif
}
#endif

#if defined(SP_PAIRS)
// Rounds two rows to bf16: as words of pairs, or as two flat rows of half a vector each.
inline V zipped(const V* rows) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  return (V)_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(rows[1], rows[0]));
}

inline V halves(const V* rows) { return (V)_mm512_cvtne2ps_pbh(rows[1], rows[0]); }
#else
inline V zipped(const V* rows) { return rows[0]; }
#endif

// Whether all values of these words are finite.
inline bool finite(const float* panel, int64_t words) {
  const LooseWord* bits = (const LooseWord*)panel;
  uint32_t bad = 0;
  for (int64_t w = 0; w < words; ++w) {
    bad |= (bits[w] & 0x7f800000u) == 0x7f800000u;
    if (PAIR == 2) bad |= (bits[w] & 0x7f80u) == 0x7f80u;
  }
  return bad == 0;
}

// Rounds floats to the nearest bf16, ties to even.
inline void round_row(const float* __restrict x, uint16_t* __restrict out, int64_t cols) {
  const LooseWord* bits = (const LooseWord*)x;
  LooseHalf* to = (LooseHalf*)out;
  for (int64_t c = 0; c < cols; ++c) {
    uint32_t word = bits[c], rounded = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
    to[c] = (uint16_t)((word & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
  }
}

}  // namespace
