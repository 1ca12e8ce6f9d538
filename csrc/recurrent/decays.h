// What decays do in a chunk. `exp` is only taken of logarithms at or below 0, added up in double and rounded once.
#pragma once

#include "recurrent/panels.h"

namespace {

// out[i] = exp(a[i]).
template <class T>
inline void exp_row(const double* a, T* out, int64_t count) {
  constexpr int LANES = Lanes<T>::COUNT;
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    T x[LANES];
    for (int n = 0; n < LANES; ++n) x[n] = (T)a[i + n];
    put(out + i, exp_of<T>(take(x)));
  }
  if (i == count) return;
  T x[LANES] = {};
  for (int64_t n = i; n < count; ++n) x[n - i] = (T)a[n];
  put(x, exp_of<T>(take(x)));
  memcpy(out + i, x, (size_t)(count - i) * sizeof(T));
}

// One decay for all channels.
template <class T>
inline void scalar_decays(const Chunk<T>* c) {
  const Decays<T>* d = &c->decays;
  const int64_t n = c->padded;
  double gaps[ROWS];
  for (int64_t r = 0; r < n; ++r) {
    const bool given = r < c->rows && c->x->decay != nullptr;
    const double own = given ? (double)((const T*)c->x->decay)[(c->row + r) * c->x->decay_row + c->head] : 0.0;
    d->sums[r] = r > 0 ? d->sums[r - 1] + own : own;
  }
  for (int64_t r = 0; r < n; ++r) gaps[r] = d->sums[n - 1] - d->sums[r];
  exp_row<T>(d->sums, d->since, n);
  exp_row<T>(gaps, d->until, n);
  d->total[0] = d->since[n - 1];
  for (int64_t j = 0; j < n; ++j) {
    T* to = d->within + j * ROWS;
    const int64_t first = j / BLOCK * BLOCK;
    for (int64_t i = first; i < n; ++i) gaps[i] = i > j ? d->sums[i] - d->sums[j] : 0.0;
    exp_row<T>(gaps + first, to + first, n - first);
    for (int64_t i = first; i < j; ++i) to[i] = T(0);
  }
}

// The factors of whole blocks multiplied up, and the logarithm of that.
template <class T>
struct Beyond {
  Vec<T> factor, log;
};

// x * beyond, without products that would be subnormal; log: of x.
template <class T>
inline Vec<T> reached(Vec<T> x, Vec<T> log, Beyond<T> beyond) {
  return (log + beyond.log < splat(Lanes<T>::LOWEST) ? splat(T(0)) : x) * beyond.factor;
}

// A decay for each channel. pairs: those of single rows and of blocks are wanted too.
template <class T>
inline void channel_decays(const Chunk<T>* c, bool pairs) {
  const Decays<T>* d = &c->decays;
  const int64_t row = d->row, n = c->padded;
  stage(c, c->x->decay, c->x->decay_row, c->head, c->x->dim, d->step, row);
  for (int64_t lane = 0; lane < row; lane += Lanes<T>::COUNT) {
    Beyond<T> beyond = {splat(T(1)), splat(T(0))};
    for (int64_t first = n - BLOCK; first >= 0; first -= BLOCK) {
      Sums<T> sums = {};
      for (int64_t r = first + BLOCK - 1; r >= first; --r) {
        const int64_t at = r * row + lane;
        const Vec<T> log = sums.rounded(), tail = exp_of<T>(log);
        if (pairs) put(d->tail + at, tail);
        put(d->until + at, reached(tail, log, beyond));
        sums.add(take(d->step + at));
      }
      const Vec<T> log = sums.rounded(), whole = exp_of<T>(log);
      put(d->whole + first / BLOCK * row + lane, whole);
      beyond = {reached(whole, log, beyond), beyond.log + log};
    }
    put(d->total + lane, beyond.factor);
    if (!pairs) continue;
    beyond = {splat(T(1)), splat(T(0))};
    for (int64_t first = 0; first < n; first += BLOCK) {
      Sums<T> sums = {};
      for (int64_t r = first; r < first + BLOCK; ++r) {
        const int64_t at = r * row + lane;
        sums.add(take(d->step + at));
        const Vec<T> log = sums.rounded(), head = exp_of<T>(log);
        put(d->head + at, head);
        put(d->since + at, reached(head, log, beyond));
        put(d->step + at, exp_of<T>(take(d->step + at)));
      }
      const Vec<T> log = sums.rounded();
      beyond = {reached(take(d->whole + first / BLOCK * row + lane), log, beyond), beyond.log + log};
    }
  }
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
