// What decays do in a chunk. `exp` is only taken of differences at or below 0, rounded once from sums in double.
#pragma once

#include "recurrent/panels.h"

namespace {

// out[i] = exp(a[i] - b[i]), or exp(a[i]) without b.
template <class T>
inline void exp_row(const double* a, const double* b, T* out, int64_t count) {
  constexpr int LANES = Lanes<T>::COUNT;
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    T x[LANES];
    for (int n = 0; n < LANES; ++n) x[n] = (T)(b != nullptr ? a[i + n] - b[i + n] : a[i + n]);
    put(out + i, exp_of<T>(take(x)));
  }
  if (i == count) return;
  T x[LANES] = {};
  for (int64_t n = i; n < count; ++n) x[n - i] = (T)(b != nullptr ? a[n] - b[n] : a[n]);
  put(x, exp_of<T>(take(x)));
  memcpy(out + i, x, (size_t)(count - i) * sizeof(T));
}

// Sums of log decays down the rows [begin, end), from zero.
template <class T>
inline void add_up(const Chunk<T>* c, int64_t begin, int64_t end) {
  const Decays<T>* d = &c->decays;
  const int64_t cols = d->channels ? c->x->dim : 1;
  for (int64_t r = begin; r < end; ++r) {
    double *to = d->sums + r * d->row, *last = to - d->row;
    const int64_t given = r < c->rows && c->x->decay != nullptr ? cols : 0;
    const T* from = (const T*)c->x->decay;
    if (given > 0) from += (c->row + r) * c->x->decay_row + c->head * cols;
    for (int64_t i = 0; i < d->row; ++i) {
      const double own = i < given ? (double)from[i] : 0.0;
      to[i] = r > begin ? last[i] + own : own;
    }
  }
}

// One decay for all channels.
template <class T>
inline void scalar_decays(const Chunk<T>* c) {
  const Decays<T>* d = &c->decays;
  const int64_t n = c->padded;
  double gaps[ROWS];
  add_up(c, 0, n);
  for (int64_t r = 0; r < n; ++r) gaps[r] = d->sums[n - 1] - d->sums[r];
  exp_row<T>(d->sums, nullptr, d->since, n);
  exp_row<T>(gaps, nullptr, d->until, n);
  d->total[0] = d->since[n - 1];
  for (int64_t j = 0; j < n; ++j) {
    T* to = d->within + j * ROWS;
    const int64_t first = j / BLOCK * BLOCK;
    for (int64_t i = first; i < n; ++i) gaps[i] = i > j ? d->sums[i] - d->sums[j] : 0.0;
    exp_row<T>(gaps + first, nullptr, to + first, n - first);
    for (int64_t i = first; i < j; ++i) to[i] = T(0);
  }
}

// A decay for each channel.
template <class T>
inline void channel_decays(const Chunk<T>* c) {
  const Decays<T>* d = &c->decays;
  const int64_t row = d->row, n = c->padded;
  for (int64_t first = 0; first < n; first += BLOCK) {
    add_up(c, first, first + BLOCK);
    const double *sums = d->sums + first * row, *end = sums + (BLOCK - 1) * row;
    for (int64_t r = 0; r < BLOCK; ++r) {
      const int64_t at = (first + r) * row;
      exp_row<T>(sums + r * row, nullptr, d->head + at, row);
      exp_row<T>(end, sums + r * row, d->tail + at, row);
      exp_row<T>(sums + r * row, r > 0 ? sums + (r - 1) * row : nullptr, d->step + at, row);
    }
    memcpy(d->whole + first / BLOCK * row, d->head + (first + BLOCK - 1) * row, (size_t)row * sizeof(T));
  }
  add_up(c, 0, n);
  const double* end = d->sums + (n - 1) * row;
  for (int64_t r = 0; r < n; ++r) {
    exp_row<T>(d->sums + r * row, nullptr, d->since + r * row, row);
    exp_row<T>(end, d->sums + r * row, d->until + r * row, row);
  }
  memcpy(d->total, d->since + (n - 1) * row, (size_t)row * sizeof(T));
}

// to = or += scale * x * factors, row by row; factors [rows][row], one for a row or one for a channel. to may be x.
template <class T, bool MORE = false>
inline void scaled(const Decays<T>* d, const T* factors, const T* x, T scale, T* to, int64_t words, int64_t rows) {
  constexpr int LANES = Lanes<T>::COUNT;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < words; i += LANES) {
      const Vec<T> by = d->channels ? take(factors + r * words + i) : splat(factors[r]);
      const Vec<T> y = take(x + r * words + i) * (by * splat(scale));
      put(to + r * words + i, MORE ? take(to + r * words + i) + y : y);
    }
}

// The state times the decay over the chunk.
template <class T>
inline void shrink(const Chunk<T>* c, T* state) {
  constexpr int LANES = Lanes<T>::COUNT;
  if (c->x->decay == nullptr) return;
  for (int64_t r = 0; r < c->x->dim; ++r) {
    const Vec<T> by = splat(c->decays.total[c->decays.channels ? r : 0]);
    T* at = state + r * c->v_words;
    for (int64_t i = 0; i < c->v_words; i += LANES) put(at + i, take(at + i) * by);
  }
}

}  // namespace
