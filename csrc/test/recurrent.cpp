// Recurrences on the CPU against the definition token by token, in double: every ISA of this machine, random runs,
// dims, decays and groups, forward and backward. Results are NaN before a call, and rows between runs stay so.
#include "recurrent/recurrent.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include <algorithm>
#include <random>
#include <vector>

#include "base/isa.h"
#include "test/often.h"

namespace {

typedef std::vector<double> Values;

std::mt19937_64 random_bits(2);

int64_t draw(int64_t low, int64_t high) { return low + (int64_t)(random_bits() % (uint64_t)(high - low + 1)); }

void check(bool good, const char* what, int isa, int number) {
  if (good) return;
  fprintf(stderr, "recurrent: %s, isa %d, case %d\n", what, isa, number);
  exit(1);
}

Values normals(int64_t count, double size) {
  std::normal_distribution<double> normal(0, size);
  Values x((size_t)count);
  for (double& value : x) value = (double)(float)normal(random_bits);
  return x;
}

struct Case {
  bool delta, reads;
  int decays;
  int64_t rows, chunks, runs, heads, groups, dim, v_dim;
  double scale = 0.5;
  std::vector<int64_t> begin, end, chunk, order;
  Values q, k, v, decay, beta, entering, dout, dleft;

  explicit Case(int number) {
    const int64_t longest = number % 7 == 0 ? 200 : 40, share = draw(1, 2);
    delta = draw(0, 1), decays = (int)draw(0, 2), reads = draw(0, 4) > 0;
    runs = draw(1, 3), groups = draw(1, 2), heads = groups * share, dim = draw(1, 20), v_dim = draw(1, 20);
    rows = draw(0, 2), chunks = 0;
    for (int64_t run = 0; run < runs; ++run) {
      begin.push_back(rows), end.push_back(rows + draw(1, longest)), chunk.push_back(chunks), order.push_back(run);
      chunks += (end.back() - rows + SP_CHUNK - 1) / SP_CHUNK, rows = end.back() + draw(0, 2);
    }
    std::reverse(order.begin(), order.end());
    q = normals(rows * groups * dim, 1), k = normals(rows * groups * dim, 0.5 / sqrt((double)dim));
    v = normals(rows * heads * v_dim, 1), beta = normals(delta ? rows * heads : 0, 0.5);
    const double strength[] = {0.01, 1, 80};
    decay = normals(decays ? rows * heads * (decays == SP_DECAY_CHANNEL ? dim : 1) : 0, strength[draw(0, 2)]);
    for (double& x : decay) x = -fabs(x);
    for (double& x : beta) x = fabs(x);
    entering = normals(runs * heads * dim * v_dim, 1), dleft = normals(runs * heads * dim * v_dim, 1);
    dout = normals(rows * heads * v_dim, 1);
  }
};

struct Results {
  Values out, left, dq, dk, dv, ddecay, dbeta, dentering;

  // In the order of `names`. NaN until written.
  explicit Results(const Case& c)
      : out(c.v.size(), NAN),
        left(c.entering.size(), NAN),
        dq((size_t)(c.rows * c.heads * c.dim), NAN),
        dk(dq),
        dv(c.v.size(), NAN),
        ddecay(c.decay.size(), NAN),
        dbeta(c.beta.size(), NAN),
        dentering(left) {
    if (!c.reads) out.clear(), dq.clear();
  }
  std::vector<const Values*> all() const { return {&out, &left, &dq, &dk, &dv, &ddecay, &dbeta, &dentering}; }
};

const char* const names[] = {"out", "left", "dq", "dk", "dv", "ddecay", "dbeta", "dentering"};

// One head of one run, token by token, and back.
void reference(const Case& c, int64_t run, int64_t head, Results& r) {
  const int64_t K = c.dim, N = c.v_dim, group = head / (c.heads / c.groups), first = c.begin[run], end = c.end[run];
  const size_t at = (size_t)((run * c.heads + head) * K * N);
  const bool channels = c.decays == SP_DECAY_CHANNEL;
  std::vector<Values> before;  // each token's state after its decay
  Values s(c.entering.begin() + (long)at, c.entering.begin() + (long)at + K * N), u((size_t)(c.rows * N));
  auto factor = [&](int64_t t, int64_t i) {
    const int64_t row = t * c.heads + head;
    return c.decays ? exp(c.decay[(size_t)(channels ? row * K + i : row)]) : 1.0;
  };
  auto missing = [&](const Values& state, int64_t t, int64_t n) {  // v - k^T S
    double sum = c.v[(size_t)((t * c.heads + head) * N + n)];
    for (int64_t i = 0; c.delta && i < K; ++i)
      sum -= c.k[(size_t)((t * c.groups + group) * K + i)] * state[(size_t)(i * N + n)];
    return sum;
  };
  for (int64_t t = first; t < end; ++t) {
    const double* k = &c.k[(size_t)((t * c.groups + group) * K)];
    for (int64_t i = 0; i < K; ++i)
      for (int64_t n = 0; n < N; ++n) s[(size_t)(i * N + n)] *= factor(t, i);
    before.push_back(s);
    for (int64_t n = 0; n < N; ++n)
      u[(size_t)(t * N + n)] = missing(before.back(), t, n) * (c.delta ? c.beta[(size_t)(t * c.heads + head)] : 1.0);
    for (int64_t n = 0; n < N; ++n) {
      double sum = 0;
      for (int64_t i = 0; i < K; ++i) {
        s[(size_t)(i * N + n)] += k[i] * u[(size_t)(t * N + n)];
        sum += c.q[(size_t)((t * c.groups + group) * K + i)] * s[(size_t)(i * N + n)];
      }
      if (c.reads) r.out[(size_t)((t * c.heads + head) * N + n)] = c.scale * sum;
    }
  }
  std::copy(s.begin(), s.end(), r.left.begin() + (long)at);
  Values ds(c.dleft.begin() + (long)at, c.dleft.begin() + (long)at + K * N), error((size_t)N), de((size_t)N);
  for (int64_t t = end - 1; t >= first; --t) {
    const Values& old = before[(size_t)(t - first)];
    const int64_t row = t * c.heads + head;
    const double* k = &c.k[(size_t)((t * c.groups + group) * K)];
    double *dq = c.reads ? &r.dq[(size_t)(row * K)] : nullptr, *dk = &r.dk[(size_t)(row * K)], dbeta = 0, total = 0;
    for (int64_t i = 0; i < K; ++i) {
      double sum = 0;
      for (int64_t n = 0; c.reads && n < N; ++n) {
        const double dout = c.scale * c.dout[(size_t)(row * N + n)];
        sum += dout * (old[(size_t)(i * N + n)] + k[i] * u[(size_t)(t * N + n)]);
        ds[(size_t)(i * N + n)] += dout * c.q[(size_t)((t * c.groups + group) * K + i)];
      }
      if (c.reads) dq[i] = sum;
    }
    for (int64_t n = 0; n < N; ++n) {
      double du = 0;
      for (int64_t i = 0; i < K; ++i) du += ds[(size_t)(i * N + n)] * k[i];
      error[(size_t)n] = missing(old, t, n);
      dbeta += du * error[(size_t)n];
      de[(size_t)n] = c.delta ? du * c.beta[(size_t)row] : du;
      r.dv[(size_t)(row * N + n)] = de[(size_t)n];
    }
    if (c.delta) r.dbeta[(size_t)row] = dbeta;
    for (int64_t i = 0; i < K; ++i) {
      double sum = 0, own = 0;
      for (int64_t n = 0; n < N; ++n) {
        double& d = ds[(size_t)(i * N + n)];
        sum += d * u[(size_t)(t * N + n)];
        if (c.delta) sum -= old[(size_t)(i * N + n)] * de[(size_t)n], d -= k[i] * de[(size_t)n];
        own += d * old[(size_t)(i * N + n)];
        d *= factor(t, i);
      }
      dk[i] = sum, total += own;
      if (channels) r.ddecay[(size_t)(row * K + i)] = own;
    }
    if (c.decays == SP_DECAY_SCALAR) r.ddecay[(size_t)row] = total;
  }
  std::copy(ds.begin(), ds.end(), r.dentering.begin() + (long)at);
}

void serial(int64_t begin, int64_t end, int64_t, sp_task task, void* context) { task(begin, end, context); }

template <class T>
Results computed(const Case& c, int isa, sp_parallel_for parallel_for) {
  auto typed = [](const Values& x) { return std::vector<T>(x.begin(), x.end()); };
  auto given = [](std::vector<T>& x) { return x.empty() ? nullptr : x.data(); };
  std::vector<T> q = typed(c.q), k = typed(c.k), v = typed(c.v), decay = typed(c.decay), beta = typed(c.beta);
  std::vector<T> entering = typed(c.entering), dout = typed(c.dout), dleft = typed(c.dleft);
  std::vector<T> entered((size_t)(c.chunks * c.heads * c.dim * c.v_dim), (T)NAN);
  sp_recurrence x = {};
  x.wide = sizeof(T) == 8, x.decays = c.decays, x.runs = c.runs, x.heads = c.heads, x.groups = c.groups;
  x.dim = c.dim, x.v_dim = c.v_dim, x.scale = c.scale;
  x.begin = c.begin.data(), x.end = c.end.data(), x.chunk = c.chunk.data(), x.order = c.order.data();
  x.q = c.reads ? q.data() : nullptr, x.k = k.data(), x.v = v.data(), x.decay = given(decay), x.beta = given(beta);
  x.q_row = x.k_row = c.groups * c.dim, x.v_row = c.heads * c.v_dim, x.beta_row = c.heads;
  x.decay_row = c.decays == SP_DECAY_CHANNEL ? c.heads * c.dim : c.heads;
  x.entering = entering.data();
  Results r(c);
  std::vector<std::vector<T>> to;
  for (const Values* values : r.all()) to.push_back(typed(*values));
  const sp_recurrent_sums sums = {given(to[0]), to[1].data(), entered.data()};
  check(sp_recurrent_forward(&x, &sums, isa, parallel_for) == 0, "no memory", isa, -1);
  sp_recurrent_grads grads = {};
  grads.dout = c.reads ? dout.data() : nullptr, grads.dout_row = x.v_row;
  grads.dleft = dleft.data(), grads.entered = entered.data();
  grads.dq = given(to[2]), grads.dk = to[3].data(), grads.dv = to[4].data(), grads.ddecay = given(to[5]);
  grads.dbeta = given(to[6]), grads.dentering = to[7].data();
  check(sp_recurrent_backward(&x, &grads, isa, parallel_for) == 0, "no memory", isa, -1);
  for (size_t n = 0; n < to.size(); ++n) const_cast<Values*>(r.all()[n])->assign(to[n].begin(), to[n].end());
  return r;
}

// The largest difference, relative to the largest value; infinite where only one is NaN.
double distance(const Values& got, const Values& want) {
  double size = 1, most = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    if (std::isnan(got[i]) != std::isnan(want[i])) return INFINITY;
    if (std::isnan(want[i])) continue;
    size = std::max(size, fabs(want[i])), most = std::max(most, fabs(got[i] - want[i]));
  }
  return most / size;
}

void test_case(int number, int best, sp_parallel_for parallel_for) {
  const Case c(number);
  Results want(c);
  for (int64_t run = 0; run < c.runs; ++run)
    for (int64_t head = 0; head < c.heads; ++head) reference(c, run, head, want);
  for (int isa = 0; isa <= best; ++isa) {
    const Results one = computed<double>(c, isa, serial), all = computed<double>(c, isa, parallel_for);
    const Results narrow = computed<float>(c, isa, serial);
    for (size_t n = 0; n < want.all().size(); ++n) {
      check(distance(*one.all()[n], *want.all()[n]) < 1e-12, names[n], isa, number);
      check(distance(*narrow.all()[n], *want.all()[n]) < 1e-4, names[n], isa, number);
      check(distance(*all.all()[n], *one.all()[n]) == 0, "threads change bits", isa, number);
    }
  }
}

}  // namespace

void test_recurrent(sp_parallel_for parallel_for) {
  const int best = std::min(sp_isa(), (int)SP_AVX512);
  for (int number = 0; number < 150; number += kEvery) test_case(number, best, parallel_for);
}
