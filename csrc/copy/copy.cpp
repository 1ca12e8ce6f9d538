// The order of copies, which decides their speed once they exceed the caches:
//
//   runs    Elements contiguous on both sides are one run; the dims around it go in the order of the source. Copies
//           with equal dims, such as the pieces of one tensor for all peers, go together, run by run, so that the
//           source is read from front to back however it is cut. Dense sources that are streamed take turns: the
//           hardware prefetcher cannot follow many at a time.
//   long    Longer runs are cut into blocks.
//   tiles   Without runs, as in a transposition, tiles of both sides stay in the cache.
//
// Work is cut into units of similar size, whatever the number of threads. Large copies bypass the caches, one line at a
// time: memory that will be overwritten is not read, and the caches are left to computation.

#include "copy/copy.h"

#include <string.h>

#include <algorithm>
#include <vector>

#include "base/isa.h"
#include "copy/dims.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace seqpar {
namespace {

constexpr int64_t LINE = 64;
// bytes above which copies are streamed; a constant, since virtual machines report a cache that they share
constexpr int64_t LARGE = 16 << 20;
constexpr int64_t UNIT = 64 << 10;     // bytes of a unit of work, and of a block of a long run
constexpr int64_t GRAIN = 4;           // units worth waking a thread for
constexpr int64_t AHEAD = 8 << 10;     // bytes that the prefetch is ahead of the copy
constexpr int64_t SHORT_STREAM = 512;  // bytes of the shortest run that is streamed without being aligned to lines
constexpr int64_t TILE = 32;           // elements of a side of a tile
constexpr int64_t TILES = 64;          // tiles of a unit, along the innermost dim

struct Member {
  const char* src;
  char* dst;
  int64_t run;
  bool stream;
  int64_t src_step[SP_DIMS], dst_step[SP_DIMS];
};

enum class Kind { RUNS, LONG, TILES };

struct Group {
  Kind kind;
  int ndim, rows_dim;  // rows_dim: the dim with row numbers, or -1
  int32_t row_bits;
  int64_t count[SP_DIMS];
  const void *src_rows, *dst_rows;
  bool dense;                   // RUNS only: one member alone reads the source from front to back
  std::vector<Member> members;  // any number for RUNS, else one
  int64_t first, units, per_unit;
};

int64_t row(const void* rows, int32_t bits, int64_t i) {
  if (!rows) return i;
  return bits == 32 ? static_cast<const int32_t*>(rows)[i] : static_cast<const int64_t*>(rows)[i];
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t outer(const Group& g) {
  int64_t n = 1;
  for (int d = 0; d < g.ndim; d++) n *= g.count[d];
  return n;
}

// A run.

using Run = void (*)(char* dst, const char* src, int64_t bytes);

void plain_run(char* dst, const char* src, int64_t bytes) { memcpy(dst, src, bytes); }

#ifdef __x86_64__

// Copies up to the first line boundary of dst; returns the bytes left.
inline int64_t to_line(char*& dst, const char*& src, int64_t bytes) {
  int64_t head = std::min<int64_t>(-reinterpret_cast<intptr_t>(dst) & (LINE - 1), bytes);
  if (head) memcpy(dst, src, head);
  dst += head, src += head;
  return bytes - head;
}

void stream_run(char* dst, const char* src, int64_t bytes) {
  for (bytes = to_line(dst, src, bytes); bytes >= LINE; bytes -= LINE, dst += LINE, src += LINE) {
    auto* from = reinterpret_cast<const __m128i*>(src);
    auto* to = reinterpret_cast<__m128i*>(dst);
    __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
    __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a), _mm_stream_si128(to + 1, b), _mm_stream_si128(to + 2, c), _mm_stream_si128(to + 3, d);
  }
  if (bytes) memcpy(dst, src, bytes);
}

__attribute__((target("avx512f"))) void stream_run_avx512(char* dst, const char* src, int64_t bytes) {
  for (bytes = to_line(dst, src, bytes); bytes >= LINE; bytes -= LINE, dst += LINE, src += LINE)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(dst), _mm512_loadu_si512(src));
  if (bytes) memcpy(dst, src, bytes);
}

Run streaming() { return sp_isa() >= SP_AVX512 ? stream_run_avx512 : stream_run; }
void streamed() { _mm_sfence(); }

#else

Run streaming() { return plain_run; }
void streamed() {}

#endif

// Units of work.

// Each member's pointers at an index of the outer dims, and a loop over the last of these dims.
struct Cursor {
  const Group& g;
  int64_t index[SP_DIMS] = {};

  Cursor(const Group& group, int64_t at) : g(group) {
    for (int d = g.ndim - 1; d >= 0; d--) index[d] = at % g.count[d], at /= g.count[d];
  }

  // Advances the index of all dims but the last.
  void carry() {
    for (int d = g.ndim - 1; d >= 0; d--) {
      if (d < g.ndim - 1 && ++index[d] < g.count[d]) return;
      index[d] = 0;
    }
  }

  int64_t src(int d, int64_t i) const { return d == g.rows_dim ? row(g.src_rows, g.row_bits, i) : i; }
  int64_t dst(int d, int64_t i) const { return d == g.rows_dim ? row(g.dst_rows, g.row_bits, i) : i; }

  // A member's pointers at the index, the last `dims` dims left out.
  const char* src(const Member& m, int dims) const {
    const char* at = m.src;
    for (int d = 0; d < g.ndim - dims; d++) at += src(d, index[d]) * m.src_step[d];
    return at;
  }
  char* dst(const Member& m, int dims) const {
    char* at = m.dst;
    for (int d = 0; d < g.ndim - dims; d++) at += dst(d, index[d]) * m.dst_step[d];
    return at;
  }
};

void copy_runs(const Group& g, int64_t begin, int64_t end, Run stream) {
  struct Base {
    const char* src;
    char* dst;
  };
  std::vector<Base> bases(g.members.size());
  Cursor at(g, begin);
  const int last = g.ndim - 1;
  int64_t bytes = 0;
  for (const Member& m : g.members) bytes += m.run;
  const int64_t ahead = std::max<int64_t>(1, AHEAD / bytes);
  while (begin < end) {
    const int64_t from = at.index[last], to = std::min(g.count[last], from + end - begin);
    for (size_t n = 0; n < bases.size(); n++) bases[n] = {at.src(g.members[n], 1), at.dst(g.members[n], 1)};
    for (int64_t i = from; i < to; i++) {
      const int64_t src = at.src(last, i), dst = at.dst(last, i), next = at.src(last, std::min(i + ahead, to - 1));
      for (size_t n = 0; n < bases.size(); n++) {
        const Member& m = g.members[n];
        const char* soon = bases[n].src + next * m.src_step[last];
        for (int64_t b = 0; b < m.run && !g.dense; b += LINE) __builtin_prefetch(soon + b);
        (m.stream ? stream : plain_run)(bases[n].dst + dst * m.dst_step[last], bases[n].src + src * m.src_step[last],
                                        m.run);
      }
    }
    begin += to - from;
    at.carry();
  }
}

void copy_blocks(const Group& g, int64_t begin, int64_t end, Run stream) {
  const Member& m = g.members[0];
  const int64_t blocks = ceil_div(m.run, UNIT);
  for (int64_t unit = begin; unit < end; unit++) {
    const Cursor at(g, unit / blocks);
    const int64_t first = unit % blocks * UNIT;
    (m.stream ? stream : plain_run)(at.dst(m, 0) + first, at.src(m, 0) + first, std::min(UNIT, m.run - first));
  }
}

template <int SIZE>
void copy_tile(const int64_t* src_a, const int64_t* dst_a, int64_t na, const char* src, char* dst) {
  for (int64_t a = 0; a < na; a++) memcpy(dst + dst_a[a], src + src_a[a], SIZE);
}

// The last two dims in tiles: a, the innermost, runs along the destination, b along the source.
template <int SIZE>
void copy_tiles(const Group& g, int64_t begin, int64_t end) {
  const Member& m = g.members[0];
  const int da = g.ndim - 1, db = g.ndim - 2;
  const int64_t na = g.count[da], nb = g.count[db], strips = ceil_div(nb, TILE), parts = ceil_div(na, TILE * TILES);
  int64_t src_a[TILE], dst_a[TILE];
  for (int64_t unit = begin; unit < end; unit++) {
    const Cursor at(g, unit / (strips * parts) * na * nb);
    const char* src = at.src(m, 2);
    char* dst = at.dst(m, 2);
    const int64_t b0 = unit / parts % strips * TILE, b1 = std::min(nb, b0 + TILE);
    const int64_t a0 = unit % parts * TILE * TILES, a1 = std::min(na, a0 + TILE * TILES);
    for (int64_t a = a0; a < a1; a += TILE) {
      const int64_t n = std::min(TILE, a1 - a);
      for (int64_t i = 0; i < n; i++) {
        src_a[i] = at.src(da, a + i) * m.src_step[da];
        dst_a[i] = at.dst(da, a + i) * m.dst_step[da];
      }
      for (int64_t b = b0; b < b1; b++)
        copy_tile<SIZE>(src_a, dst_a, n, src + at.src(db, b) * m.src_step[db], dst + at.dst(db, b) * m.dst_step[db]);
    }
  }
}

struct Work {
  std::vector<Group> groups;
  Run stream;
};

void copy_units(int64_t begin, int64_t end, void* context) {
  const Work& work = *static_cast<const Work*>(context);
  for (const Group& g : work.groups) {
    const int64_t from = std::max<int64_t>(begin - g.first, 0), to = std::min(end - g.first, g.units);
    if (from >= to) continue;
    switch (g.kind) {
      case Kind::RUNS:
        copy_runs(g, from * g.per_unit, std::min(to * g.per_unit, outer(g)), work.stream);
        break;
      case Kind::LONG:
        copy_blocks(g, from, to, work.stream);
        break;
      case Kind::TILES:
        switch (g.members[0].run) {
          case 1:
            copy_tiles<1>(g, from, to);
            break;
          case 2:
            copy_tiles<2>(g, from, to);
            break;
          case 4:
            copy_tiles<4>(g, from, to);
            break;
          case 8:
            copy_tiles<8>(g, from, to);
            break;
          default:
            copy_tiles<16>(g, from, to);
        }
    }
  }
  // after this, whoever sees the task finished sees its streamed stores
  streamed();
}

// From items to groups.

// Whether the destination is written in whole lines, or in runs so long that their ends do not matter.
bool whole_lines(const char* dst, const std::vector<CopyDim>& dims, int64_t run) {
  if (run >= SHORT_STREAM) return true;
  int64_t bits = reinterpret_cast<intptr_t>(dst) | run;
  for (const CopyDim& d : dims) bits |= d.dst;
  return bits % LINE == 0;
}

Group group_of(const sp_copy_item& item, bool large) {
  std::vector<CopyDim> dims;
  const int64_t run = simplify(item, dims, false);
  Group g = {};
  g.kind = run > UNIT ? Kind::LONG : Kind::RUNS;
  if (run <= 16 && !(run & (run - 1)) && !dims.empty()) {
    // a is the dim with the smallest stride in the destination, b in the source, where it is innermost already
    g.kind = Kind::TILES;
    auto nearer = [](const CopyDim& x, const CopyDim& y) { return x.dst < y.dst; };
    auto a = std::min_element(dims.begin(), dims.end(), nearer);
    std::rotate(a, a + 1, dims.end());
    if (dims.size() == 1) dims.insert(dims.begin(), CopyDim{1, 0, 0, nullptr, nullptr});
  }
  if (dims.empty()) dims.push_back({1, 0, 0, nullptr, nullptr});
  g.ndim = static_cast<int>(dims.size());
  g.rows_dim = -1;
  Member m = {static_cast<const char*>(item.src), static_cast<char*>(item.dst), run, false, {}, {}};
  m.stream = large && whole_lines(m.dst, dims, run);
  for (int d = 0; d < g.ndim; d++) {
    g.count[d] = dims[d].count;
    m.src_step[d] = dims[d].src;
    m.dst_step[d] = dims[d].dst;
    if (dims[d].numbered()) {
      g.rows_dim = d;
      g.row_bits = item.row_bits;
      g.src_rows = dims[d].src_rows;
      g.dst_rows = dims[d].dst_rows;
    }
  }
  g.dense = m.stream && m.src_step[g.ndim - 1] == run && !(g.src_rows && g.rows_dim == g.ndim - 1);
  g.members = {m};
  return g;
}

bool together(const Group& a, const Group& b) {
  return a.kind == Kind::RUNS && b.kind == Kind::RUNS && !a.dense && !b.dense && a.ndim == b.ndim &&
         a.rows_dim == b.rows_dim && a.src_rows == b.src_rows && a.dst_rows == b.dst_rows && a.row_bits == b.row_bits &&
         std::equal(a.count, a.count + a.ndim, b.count);
}

int64_t units_of(Group& g) {
  const Member& m = g.members[0];
  if (g.kind == Kind::LONG) return outer(g) * ceil_div(m.run, UNIT);
  if (g.kind == Kind::TILES) {
    const int64_t na = g.count[g.ndim - 1], nb = g.count[g.ndim - 2];
    return outer(g) / (na * nb) * ceil_div(nb, TILE) * ceil_div(na, TILE * TILES);
  }
  int64_t bytes = 0;
  for (const Member& each : g.members) bytes += each.run;
  g.per_unit = std::max<int64_t>(1, UNIT / bytes);
  return ceil_div(outer(g), g.per_unit);
}

}  // namespace
}  // namespace seqpar

using namespace seqpar;

extern "C" int sp_copy(const sp_copy_item* items, int64_t n, sp_parallel_for parallel_for) {
  int64_t total = 0;
  for (int64_t i = 0; i < n; i++) {
    if (!valid(items[i])) return static_cast<int>(i) + 1;
    total += elements(items[i]) * items[i].size;
  }
  Work work;
  work.stream = streaming();
  for (int64_t i = 0; i < n; i++) {
    if (!elements(items[i])) continue;
    Group made = group_of(items[i], total > LARGE);
    auto same = std::find_if(work.groups.begin(), work.groups.end(), [&](const Group& g) { return together(g, made); });
    if (same == work.groups.end())
      work.groups.push_back(std::move(made));
    else
      same->members.push_back(made.members[0]);
  }
  int64_t units = 0;
  for (Group& g : work.groups) {
    g.first = units;
    g.units = units_of(g);
    units += g.units;
  }
  if (!units) return 0;
  if (parallel_for && units > GRAIN)
    parallel_for(0, units, GRAIN, copy_units, &work);
  else
    copy_units(0, units, &work);
  return 0;
}
