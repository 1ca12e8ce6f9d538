// Backward: a run's chunks from the last to the first, each computed again from the state that enters it. With the
// names of chunk.h, dS the gradient of the state that leaves a chunk, and N_ij the gradient of a pair times its decays:
//
//     du = P^T dout + k_until dS                  y = (1 + beta M)^-T du            without beta y = du
//     dv = beta y                                 dbeta_i = y_i X_i - sum over j of M_ij (y_i u_j)
//     dP = dout u^T                               dM = - beta y u^T
//     dq = q_since's part dout S^T + sum over j of N_ij k_j                         and so for k as M's row
//     dk = k_until's part u dS^T + sum over i of N_ij q_i + M's N_ij k_i
//     dS <- exp(G_end) dS + q_since^T dout - k_since^T dv
//
// A decay's gradient sums, over all exponents that contain it, the factor's gradient times the factor: those of rows i
// and pairs (i, j) from its row on, less those of pairs whose j is no earlier; those of k_until before its row; and the
// state's. A row's pair with itself has no decay and is left out until then.
#pragma once

#include "recurrent/forward.h"

namespace {

template <class T>
struct Gradients {
  T *dout, *du, *turned, *state_turned, *dstate;
  T *dp, *dm, *own;             // own: the gradient of a row's pair with itself
  T *dq, *dk_since, *dk_until;  // of q, of k as a row of M and as what enters the state
  T* dk_pairs;                  // of k as a column of pairs
  T *dbeta, *ddecay, *part;
};

template <class T>
struct Backward {
  const sp_recurrence* x;
  const sp_recurrent_grads* grads;
};

template <class T>
inline void place_backward(Chunk<T>* c, Gradients<T>* g, const sp_recurrence* x, Arena* arena) {
  place(c, x, arena);
  const int64_t keys = ROWS * c->words, values = ROWS * c->v_words, state = c->words * c->v_words;
  g->dout = panel<T>(arena, values), g->du = panel<T>(arena, values), g->turned = panel<T>(arena, values);
  g->state_turned = panel<T>(arena, state), g->dstate = panel<T>(arena, state);
  g->dp = panel<T>(arena, ROWS * ROWS), g->dm = panel<T>(arena, ROWS * ROWS), g->own = panel<T>(arena, ROWS);
  g->dq = panel<T>(arena, keys), g->dk_since = panel<T>(arena, keys), g->dk_until = panel<T>(arena, keys);
  g->dk_pairs = panel<T>(arena, keys), g->dbeta = panel<T>(arena, ROWS), g->ddecay = panel<T>(arena, keys);
  g->part = panel<T>(arena, BLOCK * c->words);
}

template <class T>
inline T dot(const T* a, const T* b, int64_t words) {
  Vec<T> sum = splat(T(0));
  for (int64_t i = 0; i < words; i += Lanes<T>::COUNT) sum = fma(take(a + i), take(b + i), sum);
  return sum_of(sum);
}

// Gradients of pairs, from out[j][i] = u_j x_i: of later rows alone, times scale, times decays where a pair has one.
template <class T>
inline void pair_gradients(const Chunk<T>* c, const T* rows, T scale, T* turned, T* out) {
  constexpr int LANES = Lanes<T>::COUNT;
  const int64_t n = c->padded, vw = c->v_words;
  turn(rows, vw, n, vw, turned, ROWS);
  for (int64_t first = 0; first < n; first += BLOCK) {
    multiply<SET>(n - first, c->u + first * vw, vw, 1, turned + first, ROWS, out + first * ROWS + first, ROWS, BLOCK,
                  c->x->v_dim);
    for (int64_t j = first; j < first + BLOCK; ++j) {
      T* at = out + j * ROWS;
      for (int64_t i = first; i < n; i += LANES) put(at + i, take(at + i) * splat(scale));
      for (int64_t i = first; i <= j; ++i) at[i] = T(0);
    }
  }
}

// Adds to q's or k's gradient as rows, and to k's as columns, those of pairs of different blocks.
template <class T>
inline void between_blocks(Chunk<T>* c, const Gradients<T>* g, bool reads, bool solves) {
  const Decays<T>* d = &c->decays;
  const int64_t words = c->words, n = c->padded;
  for (int64_t first = BLOCK; first < n; first += BLOCK) {
    carry_keys(c, first / BLOCK);
    for (int both = 0; both < 2; ++both) {
      if (!(both ? solves : reads)) continue;
      const T* pairs = (both ? g->dm : g->dp) + first;
      multiply<SET>(words, pairs, 1, ROWS, c->far, words, g->part, words, BLOCK, first);
      T* to = (both ? g->dk_since : g->dq) + first * words;
      scaled<T, true>(d, d->head + first * words, g->part, T(1), to, words, BLOCK);
    }
  }
  for (int64_t first = n - BLOCK; first >= BLOCK; first -= BLOCK) {
    for (int64_t r = 0; r < first; ++r)
      scaled(d, d->whole + first / BLOCK * words, g->dk_pairs + r * words, T(1), g->dk_pairs + r * words, words, 1);
    for (int both = 0; both < 2; ++both) {
      if (!(both ? solves : reads)) continue;
      scaled(d, d->head + first * words, (both ? c->k : c->q) + first * words, T(1), g->part, words, BLOCK);
      multiply<ADD>(words, (both ? g->dm : g->dp) + first, ROWS, 1, g->part, words, g->dk_pairs, words, first, BLOCK);
    }
  }
  scaled(d, d->tail, g->dk_pairs, T(1), g->dk_pairs, words, n);
}

// The same of pairs inside a block.
template <class T>
inline void inside_block(const Chunk<T>* c, const Gradients<T>* g, int64_t first, bool reads, bool solves) {
  constexpr int LANES = Lanes<T>::COUNT;
  const int64_t words = c->words;
  for (int64_t j = first; j < first + BLOCK; ++j)
    for (int64_t n = 0; n < words; n += LANES) {
      const Vec<T> key = take(c->k + j * words + n);
      Vec<T> decay = splat(T(1)), sum = splat(T(0));
      for (int64_t i = j + 1; i < first + BLOCK; ++i) {
        const int64_t at = i * words + n;
        decay *= take(c->decays.step + at);
        const Vec<T> far = key * decay;
        Vec<T> more = splat(T(0));
        if (reads) {
          const Vec<T> by = splat(g->dp[j * ROWS + i]);
          put(g->dq + at, fma(by, far, take(g->dq + at))), more = by * take(c->q + at);
        }
        if (solves) {
          const Vec<T> by = splat(g->dm[j * ROWS + i]);
          put(g->dk_since + at, fma(by, far, take(g->dk_since + at))), more = fma(by, take(c->k + at), more);
        }
        sum = fma(more, decay, sum);
      }
      put(g->dk_pairs + j * words + n, take(g->dk_pairs + j * words + n) + sum);
    }
}

// Adds the gradients that reach q and k through pairs.
template <class T>
inline void through_pairs(Chunk<T>* c, const Gradients<T>* g) {
  constexpr int LANES = Lanes<T>::COUNT;
  const int64_t words = c->words, n = c->padded;
  const bool reads = c->x->q != nullptr, solves = c->x->beta != nullptr;
  memset(g->dk_pairs, 0, (size_t)(n * words) * sizeof(T));
  if (c->decays.channels) {
    between_blocks(c, g, reads, solves);
    for (int64_t first = 0; first < n; first += BLOCK) inside_block(c, g, first, reads, solves);
    return;
  }
  for (int both = 0; both < 2; ++both) {
    if (!(both ? solves : reads)) continue;
    T *pairs = both ? g->dm : g->dp, *to = both ? g->dk_since : g->dq;
    const T* row = both ? c->k : c->q;
    for (int64_t first = 0; first < n; first += BLOCK) {
      for (int64_t j = first; j < first + BLOCK; ++j)
        for (int64_t i = first; i < n; i += LANES)
          put(pairs + j * ROWS + i, take(pairs + j * ROWS + i) * take(c->decays.within + j * ROWS + i));
      multiply<ADD>(words, pairs + first, 1, ROWS, c->k, words, to + first * words, words, BLOCK, first + BLOCK);
      multiply<ADD>(words, pairs + first * ROWS + first, ROWS, 1, row + first * words, words,
                    g->dk_pairs + first * words, words, BLOCK, n - first);
    }
  }
}

// The gradient of log decays, [rows][words] or [rows]. of_state: that of the decay over the chunk, for each channel.
template <class T>
inline void decay_gradients(const Chunk<T>* c, const Gradients<T>* g, const T* of_state) {
  constexpr int LANES = Lanes<T>::COUNT;
  const int64_t words = c->words, n = c->padded;
  const bool reads = c->x->q != nullptr, solves = c->x->beta != nullptr, channels = c->decays.channels;
  T before = T(0), after = T(0);
  if (!channels)
    for (int64_t i = 0; i < words; ++i) before += of_state[i];
  for (int64_t lane = 0; lane < words; lane += LANES) {
    Vec<T> sum = take(of_state + lane);
    for (int64_t r = 0; r < n; ++r) {
      const int64_t at = r * words + lane;
      put(g->ddecay + at, channels ? sum : splat(T(0)));
      if (channels) sum = fma(take(c->k + at), take(g->dk_until + at), sum);
    }
    sum = splat(T(0));
    for (int64_t r = n - 1; r >= 0; --r) {
      const int64_t at = r * words + lane;
      const Vec<T> key = take(c->k + at);
      Vec<T> own = -key * take(g->dk_pairs + at);
      if (solves) own = fma(key, take(g->dk_since + at), own);
      if (reads) own = fma(take(c->q + at), take(g->dq + at), own);
      sum = channels ? sum + own : own;
      put(g->ddecay + at, take(g->ddecay + at) + sum);
    }
  }
  if (channels) return;
  T* rows = g->ddecay;
  T own[ROWS];
  for (int64_t r = 0; r < n; ++r) {
    Vec<T> sum = splat(T(0));
    for (int64_t i = 0; i < words; i += LANES) sum += take(g->ddecay + r * words + i);
    own[r] = sum_of(sum);
  }
  for (int64_t r = 0; r < n; ++r) {
    rows[r] = before;
    before += dot(c->k + r * words, g->dk_until + r * words, words);
  }
  for (int64_t r = n - 1; r >= 0; --r) after += own[r], rows[r] += after;
}

template <class T>
inline void backward_chunk(Chunk<T>* c, const Gradients<T>* g, const sp_recurrent_grads* grads) {
  constexpr int LANES = Lanes<T>::COUNT;
  const sp_recurrence* x = c->x;
  const Decays<T>* d = &c->decays;
  const int64_t words = c->words, vw = c->v_words, n = c->padded;
  const bool reads = x->q != nullptr, solves = x->beta != nullptr;
  T* y = g->du;
  multiply<SET>(vw, c->k_until, words, 1, g->dstate, vw, y, vw, n, x->dim);
  if (reads) {
    stage(c, grads->dout, grads->dout_row, c->head, x->v_dim, g->dout, vw);
    for (int64_t first = 0; first < n; first += BLOCK)
      multiply<ADD>(vw, c->p + first * ROWS + first, ROWS, 1, g->dout + first * vw, vw, y + first * vw, vw, BLOCK,
                    n - first);
  }
  if (solves) solve_back(c, y);

  turn(g->dstate, vw, words, vw, g->state_turned, words);
  multiply<SET>(words, c->u, vw, 1, g->state_turned, words, g->dk_until, words, n, x->v_dim);
  scaled(d, d->until, g->dk_until, T(1), g->dk_until, words, n);
  shrink(c, g->dstate);
  for (int64_t r = 0; r < words; ++r) c->line[r] = dot(c->state + r * vw, g->dstate + r * vw, vw);

  turn(c->state, vw, words, vw, g->state_turned, words);
  if (reads) {
    for (int64_t r = 0; r < n; ++r) g->own[r] = (T)x->scale * dot(c->u + r * vw, g->dout + r * vw, vw);
    multiply<SET>(words, g->dout, vw, 1, g->state_turned, words, g->dq, words, n, x->v_dim);
    scaled(d, d->since, g->dq, (T)x->scale, g->dq, words, n);
    multiply<ADD>(vw, c->q_since, 1, words, g->dout, vw, g->dstate, vw, x->dim, n);
    pair_gradients(c, g->dout, (T)x->scale, g->turned, g->dp);
  }
  if (solves) {
    pair_gradients(c, y, T(-1), g->turned, g->dm);
    for (int64_t r = 0; r < n; ++r) g->dbeta[r] = dot(y + r * vw, c->v + r * vw, vw);
    for (int64_t j = 0; j < n; ++j)
      for (int64_t i = j / BLOCK * BLOCK; i < n; i += LANES) {
        T* at = g->dm + j * ROWS + i;
        put(g->dbeta + i, fma(take(at), take(c->m + j * ROWS + i), take(g->dbeta + i)));
        put(at, take(at) * take(c->beta + i));
      }
    for (int64_t r = 0; r < n; ++r)
      for (int64_t i = 0; i < vw; i += LANES) put(y + r * vw + i, take(y + r * vw + i) * splat(c->beta[r]));
    multiply<SET>(words, y, vw, 1, g->state_turned, words, g->dk_since, words, n, x->v_dim);
    scaled(d, d->since, g->dk_since, T(-1), g->dk_since, words, n);
    multiply<SUBTRACT>(vw, c->k_since, 1, words, y, vw, g->dstate, vw, x->dim, n);
    unstage(c, g->dbeta, 1, 1, grads->dbeta);
  }
  unstage(c, y, vw, x->v_dim, grads->dv);
  if (reads || solves)
    through_pairs(c, g);
  else
    memset(g->dk_pairs, 0, (size_t)(n * words) * sizeof(T));
  if (x->decay != nullptr) {
    decay_gradients(c, g, c->line);
    unstage(c, g->ddecay, d->channels ? words : 1, d->channels ? x->dim : 1, grads->ddecay);
  }
  for (int64_t r = 0; r < n; ++r)
    for (int64_t i = 0; i < words; i += LANES) {
      const int64_t at = r * words + i;
      Vec<T> dk = take(g->dk_until + at) + take(g->dk_pairs + at);
      if (solves) dk += take(g->dk_since + at);
      if (reads) {
        const Vec<T> own = splat(g->own[r]);
        dk = fma(own, take(c->q + at), dk);
        put(g->dq + at, fma(own, take(c->k + at), take(g->dq + at)));
      }
      put(g->dk_until + at, dk);
    }
  unstage(c, g->dk_until, words, x->dim, grads->dk);
  if (reads) unstage(c, g->dq, words, x->dim, grads->dq);
}

template <class T>
inline void backward_task(void* context, int64_t task, char* scratch) {
  const Backward<T>* job = static_cast<const Backward<T>*>(context);
  const sp_recurrence* x = job->x;
  const int64_t run = x->order[task / x->heads], begin = x->begin[run], rows = x->end[run] - begin;
  Arena arena = {scratch, 0};
  Chunk<T> c = {};
  Gradients<T> g = {};
  place_backward(&c, &g, x, &arena);
  c.head = task % x->heads;
  load_state(job->grads->dleft, run, &c, g.dstate);
  for (int64_t chunk = (rows + ROWS - 1) / ROWS - 1; chunk >= 0; --chunk) {
    load_state(job->grads->entered, x->chunk[run] + chunk, &c, c.state);
    begin_chunk(&c, begin + chunk * ROWS, least(ROWS, rows - chunk * ROWS));
    backward_chunk(&c, &g, job->grads);
  }
  store_state(g.dstate, &c, job->grads->dentering, run);
}

template <class T>
inline int backward_of(const sp_recurrence* x, const sp_recurrent_grads* grads, sp_parallel_for parallel_for) {
  Backward<T> job = {x, grads};
  Arena arena = {};
  Chunk<T> c = {};
  Gradients<T> g = {};
  place_backward(&c, &g, x, &arena);
  return sp_run(backward_task<T>, &job, x->runs * x->heads, arena.used, 3 * work_of(x), parallel_for);
}

}  // namespace
