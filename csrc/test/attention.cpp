// Attention on the CPU against double loops over pairs: every ISA of this machine, random cases of all options, odd
// sizes and strides. Memory between and around rows is NaN where it is read, and checked where it is written. Alone:
// g++ -std=c++17 -DSP_TEST_MAIN -Icsrc csrc/test/attention.cpp <objects of csrc/{base,attention}> -lpthread
#include "attention/attention.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "base/isa.h"
#include "test/often.h"

namespace {

std::mt19937_64 random_bits(1);

int64_t draw(int64_t low, int64_t high) { return low + (int64_t)(random_bits() % (uint64_t)(high - low + 1)); }

float normal() { return std::normal_distribution<float>()(random_bits); }

void check(bool good, const char* what, int isa, int number) {
  if (good) return;
  fprintf(stderr, "attention: %s, isa %d, case %d\n", what, isa, number);
  exit(1);
}

// A tensor [rows][heads][cols] with random strides, in memory just long enough.
struct Tensor {
  int64_t rows, heads, cols, row, head;
  bool bf16;
  std::vector<char> memory;

  Tensor(int64_t rows, int64_t heads, int64_t cols, bool bf16) : rows(rows), heads(heads), cols(cols), bf16(bf16) {
    head = cols + draw(0, 3);
    row = heads * head + draw(0, 5);
    if (draw(0, 1)) row = cols + draw(0, 3), head = rows * row + draw(0, 5);
    int64_t words = rows && heads ? (rows - 1) * row + (heads - 1) * head + cols : 0;
    memory.resize((size_t)(words * width()));
    for (int64_t i = 0; i < words; ++i) put(i, NAN);
  }

  int64_t width() const { return bf16 ? 2 : 4; }
  int64_t index(int64_t i, int64_t h, int64_t c) const { return i * row + h * head + c; }
  void* data() { return memory.data(); }
  float* floats() { return reinterpret_cast<float*>(memory.data()); }

  void put(int64_t at, float x) {
    uint32_t word;
    memcpy(&word, &x, 4);
    uint16_t top = (uint16_t)(x != x ? 0x7fc0 : (word + 0x7fff + (word >> 16 & 1)) >> 16);
    memcpy(&memory[(size_t)(at * width())], bf16 ? (void*)&top : (void*)&word, (size_t)width());
  }

  float get(int64_t i, int64_t h, int64_t c) const {
    uint32_t word = 0;
    const char* at = &memory[(size_t)(index(i, h, c) * width())];
    memcpy((char*)&word + (bf16 ? 2 : 0), at, (size_t)width());
    float x;
    memcpy(&x, &word, 4);
    return x;
  }

  template <class F>
  void fill(F value) {
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t c = 0; c < cols; ++c) put(index(i, h, c), value());
  }

  // Whether the memory between rows is unchanged.
  bool whole() const {
    std::vector<bool> ours(memory.size());
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t b = 0; b < cols * width(); ++b) ours[(size_t)(index(i, h, 0) * width() + b)] = true;
    Tensor blank = *this;
    for (int64_t at = 0; at < (int64_t)memory.size() / width(); ++at) blank.put(at, NAN);
    for (size_t b = 0; b < memory.size(); ++b)
      if (!ours[b] && memory[b] != blank.memory[b]) return false;
    return true;
  }
};

struct Case {
  int64_t m, n, heads, kv_heads, dim, v_dim;
  bool bf16;
  float scale, softcap;
  double dropout_p;
  std::vector<float> slopes;
  std::vector<int32_t> pos, lo, hi, key_pos, until, a, b;

  bool sees(int64_t i, int64_t j) const {
    return lo[i] <= key_pos[j] && key_pos[j] < hi[i] && (until.empty() || pos[i] < until[j]);
  }

  bool scaled() const { return softcap == 0.0f && slopes.empty(); }

  double factor(int64_t h, int64_t i, int64_t j) const {
    if (dropout_p == 0.0) return 1.0;
    uint32_t x = (uint32_t)a[h * m + i] ^ (uint32_t)b[h * n + j];
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return (x ^ x >> 16) >= (uint32_t)(dropout_p * 4294967296.0) ? 1.0 / (1.0 - dropout_p) : 0.0;
  }
};

constexpr int kCases = 43, kFar = 42;

Case draw_case(int number) {
  static const int64_t dims[] = {1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 40, 64, 72, 80, 96, 128, 130};
  Case c = {};
  c.m = draw(1, number % 4 ? 70 : 200), c.n = draw(1, number % 4 ? 90 : 400);
  c.kv_heads = draw(1, 3), c.heads = c.kv_heads * draw(1, 3);
  c.dim = dims[draw(0, 16)], c.v_dim = draw(0, 1) ? c.dim : dims[draw(0, 16)];
  const bool tree = number == 40 || number == 41;
  if (tree) {  // several chunks of keys, which add dq in turns; tiles skip some of them
    c.m = 250, c.n = 600, c.kv_heads = 1, c.heads = 2, c.dim = c.v_dim = 128;
  }
  if (number == kFar) {  // many queries on rows that lie 2 KiB apart: some processors copy the keys first
    c.m = 700, c.n = 45, c.kv_heads = 1, c.heads = 4, c.dim = 513, c.v_dim = 9;
  }
  c.bf16 = number % 2;
  c.scale = (draw(0, 9) ? 1.0f : -1.0f) / sqrtf((float)c.dim);
  c.softcap = draw(0, 3) ? 0.0f : 1.5f;
  c.dropout_p = draw(0, 3) ? 0.0 : 0.3;
  if (draw(0, 3) == 0)
    for (int64_t h = 0; h < c.heads; ++h) c.slopes.push_back(0.03f * (float)(h + 1));
  for (int64_t j = 0, at = draw(0, 5); j < c.n; ++j, at += draw(0, 9) ? 1 : 7) c.key_pos.push_back((int32_t)at);
  int64_t last = c.key_pos.back(), kind = tree ? 1 : draw(0, 4), width = draw(1, last + 1);
  for (int64_t i = 0; i < c.m; ++i) {
    int64_t at = i * (last + 1) / c.m, low = 0, high = at + 1;
    if (kind == 0) high = last + 1;
    if (kind == 2) low = at - width;
    if (kind == 3) low = draw(0, last), high = low + draw(-3, last);
    if (kind == 4) low = at / width * width;
    if (!tree && draw(0, 19) == 0) low = 3, high = draw(0, 3);
    c.pos.push_back((int32_t)at), c.lo.push_back((int32_t)low), c.hi.push_back((int32_t)high);
  }
  // keys that end: each on its own, or in runs long enough that whole blocks are closed to a query tile
  const int64_t prompt = 40, answer = 170;
  for (int64_t j = 0; tree && j < c.n; ++j) {
    const int64_t next = j < prompt ? c.n : j - (j - prompt) % answer + answer;
    c.until.push_back(next < c.n ? c.key_pos[next] : (int32_t)last + 1);
  }
  if (int64_t run = tree ? 0 : draw(0, 1) * draw(1, 200))
    for (int64_t j = 0, end = 0; j < c.n; ++j) {
      if (run == 1 || draw(1, run) == 1) end = draw(0, 2) ? draw(0, last + 1) : last + 1;
      c.until.push_back((int32_t)end);
    }
  for (int64_t i = 0; c.dropout_p > 0 && i < c.heads * c.m; ++i) c.a.push_back((int32_t)random_bits());
  for (int64_t i = 0; c.dropout_p > 0 && i < c.heads * c.n; ++i) c.b.push_back((int32_t)random_bits());
  return c;
}

struct Operands {
  Tensor q, k, v, dout;

  explicit Operands(const Case& c)
      : q(c.m, c.heads, c.dim, c.bf16),
        k(c.n, c.kv_heads, c.dim, c.bf16),
        v(c.n, c.kv_heads, c.v_dim, c.bf16),
        dout(c.m, c.heads, c.v_dim, c.bf16) {
    for (Tensor* x : {&q, &k, &v, &dout}) x->fill(normal);
  }
};

struct Results {
  // [m][heads][v_dim]; [heads][m] three times, top of scores that are only scaled; as q, k and v
  std::vector<double> out, lse, delta, top, dq, dk, dv;
};

// By definition: a loop over the pairs that are seen. Real: of scores, probabilities and their gradients.
template <class Real>
Results reference(const Case& c, const Operands& x) {
  Results r;
  r.out.resize((size_t)(c.m * c.heads * c.v_dim)), r.lse.resize((size_t)(c.heads * c.m)), r.delta = r.top = r.lse;
  r.dq.resize((size_t)(c.m * c.heads * c.dim)), r.dk.resize((size_t)(c.n * c.kv_heads * c.dim));
  r.dv.resize((size_t)(c.n * c.kv_heads * c.v_dim));
  std::vector<Real> s((size_t)c.n), fall((size_t)c.n);
  for (int64_t h = 0; h < c.heads; ++h)
    for (int64_t i = 0; i < c.m; ++i) {
      int64_t g = h / (c.heads / c.kv_heads);
      Real top = -INFINITY, total = 0, delta = 0;
      for (int64_t j = 0; j < c.n; ++j) {
        if (!c.sees(i, j)) continue;
        Real dot = 0;
        for (int64_t d = 0; d < c.dim; ++d) dot += (Real)x.q.get(i, h, d) * x.k.get(j, g, d);
        s[j] = dot * c.scale, fall[j] = 1;
        if (c.softcap != 0) {
          Real t = tanh(s[j] / c.softcap);
          s[j] = t * c.softcap, fall[j] = 1 - t * t;
        }
        if (!c.slopes.empty()) s[j] -= c.slopes[h] * (Real)abs(c.pos[i] - c.key_pos[j]);
        top = fmax(top, s[j]);
      }
      for (int64_t j = 0; j < c.n; ++j)
        if (c.sees(i, j)) total += exp(s[j] - top);
      r.top[h * c.m + i] = isnan(total) && top < INFINITY ? NAN : top;
      Real lse = total == 0 ? -INFINITY : top + log(total);
      r.lse[h * c.m + i] = lse;
      double* out = &r.out[(i * c.heads + h) * c.v_dim];
      for (int64_t j = 0; j < c.n; ++j)
        for (int64_t d = 0; c.sees(i, j) && d < c.v_dim; ++d)
          out[d] += exp(s[j] - lse) * c.factor(h, i, j) * x.v.get(j, g, d);
      for (int64_t d = 0; d < c.v_dim; ++d) delta += out[d] * x.dout.get(i, h, d);
      r.delta[h * c.m + i] = total == 0 ? NAN : delta;
      for (int64_t j = 0; j < c.n; ++j) {
        if (!c.sees(i, j)) continue;
        Real p = exp(s[j] - lse), dp = 0, kept = c.factor(h, i, j);
        for (int64_t d = 0; d < c.v_dim; ++d) {
          dp += (double)x.dout.get(i, h, d) * x.v.get(j, g, d) * kept;
          r.dv[(j * c.kv_heads + g) * c.v_dim + d] += p * kept * x.dout.get(i, h, d);
        }
        Real ds = p * (dp - delta) * fall[j] * c.scale;
        for (int64_t d = 0; d < c.dim; ++d) {
          r.dq[(i * c.heads + h) * c.dim + d] += ds * x.k.get(j, g, d);
          r.dk[(j * c.kv_heads + g) * c.dim + d] += ds * x.q.get(i, h, d);
        }
      }
    }
  return r;
}

// Query tiles of random sizes up to bm, in random order.
struct Tables {
  std::vector<int64_t> rows = {0}, order;

  Tables(int64_t m, int64_t bm) {
    while (rows.back() < m) rows.push_back(std::min(m, rows.back() + (draw(0, 3) ? bm : draw(1, bm))));
    order.resize(rows.size() - 1);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random_bits);
  }

  sp_tiles view(int64_t bm) const { return {(int64_t)order.size(), bm, rows.data(), order.data()}; }
};

// The call over keys [first, stop).
sp_attention call(const Case& c, Operands& x, const Tables& tables, int64_t bm, int64_t first, int64_t stop,
                  const std::vector<int32_t>& b) {
  sp_attention y = {};
  y.dtype = c.bf16 ? SP_BF16 : SP_F32;
  y.m = c.m, y.n = stop - first, y.heads = c.heads, y.kv_heads = c.kv_heads, y.dim = c.dim, y.v_dim = c.v_dim;
  y.q = x.q.data(), y.q_row = x.q.row, y.q_head = x.q.head;
  y.k = x.k.memory.data() + first * x.k.row * x.k.width(), y.k_row = x.k.row, y.k_head = x.k.head;
  y.v = x.v.memory.data() + first * x.v.row * x.v.width(), y.v_row = x.v.row, y.v_head = x.v.head;
  y.pos = c.pos.data(), y.lo = c.lo.data(), y.hi = c.hi.data(), y.key_pos = c.key_pos.data() + first;
  y.until = c.until.empty() ? nullptr : c.until.data() + first;
  y.scale = c.scale, y.softcap = c.softcap, y.slopes = c.slopes.empty() ? nullptr : c.slopes.data();
  y.dropout_p = c.dropout_p, y.drop_a = c.a.empty() ? nullptr : c.a.data(), y.drop_b = b.empty() ? nullptr : b.data();
  y.tiles = tables.view(bm);
  return y;
}

std::vector<int32_t> words_of(const Case& c, int64_t first, int64_t stop) {
  std::vector<int32_t> b;
  for (int64_t h = 0; !c.b.empty() && h < c.heads; ++h)
    b.insert(b.end(), c.b.begin() + h * c.n + first, c.b.begin() + h * c.n + stop);
  return b;
}

// Root mean square of the differences, relative to the expected values or `least`; infinite where only one side is NaN
// or infinite.
double distance(const std::vector<double>& got, const std::vector<double>& want, double least = 1e-3) {
  double apart = 0, size = 1e-30;
  for (size_t i = 0; i < want.size(); ++i) {
    if (isfinite(want[i]) != isfinite(got[i])) return INFINITY;
    if (!isfinite(want[i])) continue;
    apart += (got[i] - want[i]) * (got[i] - want[i]), size += want[i] * want[i];
  }
  return sqrt(apart / std::max(size, least * least * (double)want.size()));
}

std::vector<double> values(const Tensor& x, double less = 0) {
  std::vector<double> all;
  for (int64_t i = 0; i < x.rows; ++i)
    for (int64_t h = 0; h < x.heads; ++h)
      for (int64_t c = 0; c < x.cols; ++c) all.push_back(x.get(i, h, c) - less);
  return all;
}

void serial(int64_t begin, int64_t end, int64_t, sp_task task, void* context) { task(begin, end, context); }

// out, lse, top, dq, dk, dv of a case with its keys in one or two buffers.
struct Run {
  Tensor out, acc, lse, top, dq, dk, dv;

  Run(const Case& c, Operands& x, const Results& want, int isa, const Tables& tables, int64_t bm, int64_t cut,
      int number, sp_parallel_for parallel_for)
      : out(c.m, c.heads, c.v_dim, c.bf16),
        acc(c.m, c.heads, c.v_dim, false),
        lse(c.heads, 1, c.m, false),
        top(lse),
        dq(c.m, c.heads, c.dim, false),
        dk(c.n, c.kv_heads, c.dim, false),
        dv(c.n, c.kv_heads, c.v_dim, false) {
    for (Tensor* y : {&dq, &dk, &dv}) y->fill([] { return 0.25f; });
    top.fill([] { return -INFINITY; });
    Tensor delta = lse, final_lse = lse;
    for (int64_t h = 0; h < c.heads; ++h)
      for (int64_t i = 0; i < c.m; ++i) {
        delta.put(delta.index(h, 0, i), (float)want.delta[h * c.m + i]);
        final_lse.put(lse.index(h, 0, i), (float)want.lse[h * c.m + i]);
      }
    std::vector<int64_t> edges = {0, cut, c.n};
    if (cut == 0) edges.erase(edges.begin());
    for (size_t part = 0; part + 1 < edges.size(); ++part) {
      int64_t first = edges[part], stop = edges[part + 1];
      std::vector<int32_t> b = words_of(c, first, stop);
      sp_attention y = call(c, x, tables, bm, first, stop, b);
      bool last = part + 2 == edges.size();
      sp_sums sums = {last && part == 0 ? nullptr : acc.floats(),
                      acc.row,
                      acc.head,
                      lse.floats(),
                      lse.row,
                      last ? out.data() : nullptr,
                      out.row,
                      out.head,
                      part == 0,
                      c.scaled() ? top.floats() : nullptr,
                      top.row};
      check(sp_attention_forward(&y, &sums, isa, parallel_for) == 0, "forward failed", isa, number);
      sp_grads grads = {x.dout.data(),
                        x.dout.row,
                        x.dout.head,
                        final_lse.floats(),
                        delta.floats(),
                        lse.row,
                        delta.row,
                        dq.floats(),
                        dk.floats() + first * dk.row,
                        dv.floats() + first * dv.row,
                        dq.row,
                        dq.head,
                        dk.row,
                        dk.head,
                        dv.row,
                        dv.head};
      check(sp_attention_backward(&y, &grads, isa, parallel_for) == 0, "backward failed", isa, number);
    }
  }

  bool whole() const {
    return out.whole() && acc.whole() && lse.whole() && top.whole() && dq.whole() && dk.whole() && dv.whole();
  }

  bool operator==(const Run& o) const {
    return out.memory == o.out.memory && lse.memory == o.lse.memory && top.memory == o.top.memory &&
           dq.memory == o.dq.memory && dk.memory == o.dk.memory && dv.memory == o.dv.memory;
  }
};

// Puts NaN into one row of an operand.
void spoil(Operands& x) {
  Tensor* chosen[] = {&x.q, &x.k, &x.v, &x.dout};
  Tensor* t = chosen[draw(0, 3)];
  t->put(t->index(draw(0, t->rows - 1), draw(0, t->heads - 1), draw(0, t->cols - 1)), NAN);
}

void test_case(int number, int best, sp_parallel_for parallel_for) {
  Case c = draw_case(number);
  Operands x(c);
  bool spoiled = number % 3 == 0 && number != kFar;
  if (spoiled) spoil(x);
  Results want = reference<double>(c, x), rounded = reference<float>(c, x);
  // rows that see nothing may hold anything
  for (int64_t i = 0; i < c.m; ++i)
    for (int64_t h = 0; h < c.heads; ++h)
      for (int64_t d = 0; want.lse[h * c.m + i] == -INFINITY && d < c.v_dim; ++d)
        x.dout.put(x.dout.index(i, h, d), NAN);
  int64_t cut = draw(0, 1) ? draw(0, c.n - 1) : 0;
  for (int isa = 0; isa <= best; ++isa) {
    int64_t bm, bn;
    sp_attention_tile(isa, c.bf16 ? SP_BF16 : SP_F32, &bm, &bn);
    Tables tables(c.m, bm);
    Run run(c, x, want, isa, tables, bm, cut, number, serial);
    check(run.whole(), "wrote beyond a row", isa, number);
    // far positions have large scores: as much more as the definition itself is off in float
    auto near = [&](const std::vector<double>& got, std::vector<double> Results::* member, double least = 1e-3) {
      const double limit = c.bf16 ? 1e-2 : 1e-5, off = distance(rounded.*member, want.*member, least);
      return distance(got, want.*member, least) < limit + 2 * off;
    };
    check(near(values(run.out), &Results::out), "out", isa, number);
    check(near(values(run.lse), &Results::lse), "lse", isa, number);
    // relative to operands of about 1
    if (c.scaled()) check(near(values(run.top), &Results::top, 1.0), "top", isa, number);
    // where every row sees one key, gradients are zero up to rounding, relative to operands of about 1
    check(near(values(run.dq, 0.25), &Results::dq, 0.1), "dq", isa, number);
    check(near(values(run.dk, 0.25), &Results::dk, 0.1), "dk", isa, number);
    check(near(values(run.dv, 0.25), &Results::dv, 0.1), "dv", isa, number);
    Operands same = x;
    Run other(c, same, want, isa, tables, bm, cut, number, parallel_for);
    if (!spoiled) check(values(run.out) == values(other.out), "threads change out", isa, number);
    if (!spoiled)
      for (auto member : {&Run::dq, &Run::dk, &Run::dv})
        check(values(run.*member) == values(other.*member), "threads change gradients", isa, number);
  }
}

void test_nothing(int best) {
  for (int isa = 0; isa <= best; ++isa) {
    sp_attention x = {};
    x.heads = x.kv_heads = 1, x.dim = x.v_dim = 4, x.scale = 1.0f;
    sp_sums sums = {};
    sp_grads grads = {};
    check(sp_attention_forward(&x, &sums, isa, serial) == 0, "no rows", isa, -1);
    check(sp_attention_backward(&x, &grads, isa, serial) == 0, "no rows", isa, -1);
    x.dim = SP_MAX_DIM + 1;
    check(sp_attention_forward(&x, &sums, isa, serial) == SP_UNSUPPORTED, "a large dim", isa, -1);
    float top = 0.0f;
    x.dim = 4, x.softcap = 1.0f, sums.top = &top;
    check(sp_attention_forward(&x, &sums, isa, serial) == SP_UNSUPPORTED, "the largest of other scores", isa, -1);
  }
}

}  // namespace

void test_attention(sp_parallel_for parallel_for) {
  int best = sp_isa();
  test_nothing(best);
  for (int number = 0; number < kCases; number += kEvery) test_case(number, best, parallel_for);
}
