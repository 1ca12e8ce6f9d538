// Copies of random strided tensors against a loop over elements, between guard zones.
#include "copy/copy.h"

#include <string.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "test/check.h"
#include "test/often.h"

namespace {

struct Random {
  std::mt19937_64 bits;
  int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }
  bool one_in(int64_t n) { return below(n) == 0; }
};

// Random strides with gaps for a tensor whose dims lie in memory in random order; returns the elements it spans.
int64_t lay_out(Random& random, int ndim, const int64_t* counts, int64_t* strides, bool dense) {
  std::vector<int> order(ndim);
  std::iota(order.begin(), order.end(), 0);
  if (!dense && random.one_in(2)) std::shuffle(order.begin(), order.end(), random.bits);
  int64_t span = 1;
  for (auto d = order.rbegin(); d != order.rend(); d++) {
    strides[*d] = span;
    span *= std::max<int64_t>(counts[*d], 1) + (dense ? 0 : random.below(3));
  }
  return span;
}

// Distinct row numbers below `total`.
template <class T>
std::vector<T> some_rows(Random& random, int64_t total, int64_t n) {
  std::vector<T> rows(total);
  std::iota(rows.begin(), rows.end(), T{0});
  std::shuffle(rows.begin(), rows.end(), random.bits);
  rows.resize(n);
  return rows;
}

struct Rows {
  std::vector<int32_t> narrow;
  std::vector<int64_t> wide;
  const void* data(int bits) const { return bits == 32 ? static_cast<const void*>(narrow.data()) : wide.data(); }
};

Rows rows_of(Random& random, int64_t total, int64_t n) {
  Rows rows = {some_rows<int32_t>(random, total, n), {}};
  rows.wide.assign(rows.narrow.begin(), rows.narrow.end());
  return rows;
}

int64_t number(const void* rows, int bits, int64_t i) {
  if (!rows) return i;
  return bits == 32 ? static_cast<const int32_t*>(rows)[i] : static_cast<const int64_t*>(rows)[i];
}

// The specification: a loop over elements, into a copy of the destination's memory.
void one_by_one(const sp_copy_item& item, char* dst) {
  int64_t n = 1;
  for (int d = 0; d < item.ndim; d++) n *= item.shape[d];
  for (int64_t i = 0; i < n; i++) {
    int64_t rest = i, from = 0, to = 0;
    for (int d = item.ndim - 1; d >= 0; d--) {
      const int64_t at = rest % item.shape[d];
      rest /= item.shape[d];
      from += (d ? at : number(item.src_rows, item.row_bits, at)) * item.src_strides[d];
      to += (d ? at : number(item.dst_rows, item.row_bits, at)) * item.dst_strides[d];
    }
    memcpy(dst + to * item.size, static_cast<const char*>(item.src) + from * item.size, item.size);
  }
}

// Copies of one call, with equal dims or not, with rows or not, into disjoint parts of one memory with guards between.
void compare(int seed, bool large, sp_parallel_for parallel_for) {
  Random random{std::mt19937_64(seed)};
  const int n = large ? 2 : 1 + static_cast<int>(random.below(6));
  std::vector<sp_copy_item> items(n);
  std::vector<Rows> numbers;
  numbers.reserve(2 * n);
  std::vector<int64_t> from(n), to(n);
  const bool alike = random.one_in(2);
  int64_t src_bytes = 0, dst_bytes = 0;
  for (int i = 0; i < n; i++) {
    sp_copy_item& item = items[i];
    item.row_bits = random.one_in(2) ? 32 : 64;
    item.size = 1 << random.below(5);
    item.ndim = static_cast<int>(random.below(SP_DIMS + 1));
    for (int d = 0; d < item.ndim; d++) item.shape[d] = 1 + random.below(d < 2 ? 40 : 2);
    if (item.ndim && random.one_in(20)) item.shape[0] = 0;
    if (large) {
      item.size = 16, item.ndim = 2;
      item.shape[0] = 1 << random.below(13);
      item.shape[1] = ((9 << 20) >> 4) / item.shape[0];
    }
    if (alike && i) item = items[0];
    int64_t src_counts[SP_DIMS], dst_counts[SP_DIMS];
    std::copy_n(item.shape, SP_DIMS, src_counts);
    std::copy_n(item.shape, SP_DIMS, dst_counts);
    if (alike && i) {
      for (int d = 0; d < item.ndim; d++) src_counts[d] += 4, dst_counts[d] += 4;
    } else if (item.ndim) {
      for (const void** rows : {&item.src_rows, &item.dst_rows}) {
        if (!random.one_in(3)) continue;
        int64_t& total = rows == &item.src_rows ? src_counts[0] : dst_counts[0];
        total += random.below(5);
        numbers.push_back(rows_of(random, total, item.shape[0]));
        *rows = numbers.back().data(item.row_bits);
      }
    }
    const bool dense = random.one_in(3);
    from[i] = src_bytes + random.below(3) * item.size;
    src_bytes = from[i] + lay_out(random, item.ndim, src_counts, item.src_strides, dense) * item.size;
    to[i] = (dst_bytes + (random.one_in(2) ? 63 : 15)) & ~int64_t{random.one_in(2) ? 63 : 15};
    dst_bytes = to[i] + lay_out(random, item.ndim, dst_counts, item.dst_strides, dense) * item.size + 64;
  }
  // 8 bytes each, so that generating them takes no time
  std::vector<uint64_t> source(src_bytes / 8 + 1), target(dst_bytes / 8 + 1);
  for (uint64_t& x : source) x = random.bits();
  for (uint64_t& x : target) x = random.bits();
  std::vector<uint64_t> expected = target;
  for (int i = 0; i < n; i++) {
    items[i].src = reinterpret_cast<const char*>(source.data()) + from[i];
    items[i].dst = reinterpret_cast<char*>(target.data()) + to[i];
    one_by_one(items[i], reinterpret_cast<char*>(expected.data()) + to[i]);
  }
  const std::string of = "copy, seed " + std::to_string(seed) + ": ";
  check(sp_copy(items.data(), n, parallel_for) == 0, (of + "valid items are accepted").c_str());
  check(target == expected, (of + "the copies equal a loop over the elements").c_str());
}

void refuses() {
  char x[16] = {}, y[16] = {1};
  sp_copy_item good = {};
  good.src = y, good.dst = x, good.size = 1;
  sp_copy_item items[2] = {good, good};
  for (int kind = 0; kind < 4; kind++) {
    sp_copy_item& bad = items[1] = good;
    if (kind == 0) bad.size = 3;
    if (kind == 1) bad.ndim = 7;
    if (kind == 2) bad.ndim = 1, bad.shape[0] = -1;
    if (kind == 3) bad.src_rows = y;
    check(sp_copy(items, 2, nullptr) == 2 && x[0] == 0, "copy: an invalid item is refused, and nothing is written");
  }
}

}  // namespace

void test_copy(sp_parallel_for parallel_for) {
  refuses();
  for (int seed = 0; seed < 300; seed += kEvery) compare(seed, false, seed % 4 ? parallel_for : nullptr);
  for (int seed = 0; seed < 2; seed++) compare(seed, true, parallel_for);
}
