#include "attention/attention.h"

#include <stdlib.h>

#include <algorithm>

#include "attention/dispatch.h"
#include "base/isa.h"
#include "base/tasks.h"

namespace {

const sp_kernels* kernels(int isa, int dtype) {
#if defined(__x86_64__)
  if (isa > sp_isa()) isa = sp_isa();  // which also asks Linux for what the processor has
  if (isa >= SP_AMX && dtype == SP_BF16) return &sp_attention_amx;
  if (isa >= SP_AVX512_BF16 && dtype == SP_BF16) return &sp_attention_avx512_bf16;
  if (isa >= SP_AVX512) return &sp_attention_avx512;
  if (isa == SP_AVX2) return &sp_attention_avx2;
#else
  (void)isa, (void)dtype;
#endif
  return &sp_attention_portable;
}

// The first j with at[j] >= x, searched outward from `near`: neighbouring rows have nearby bounds.
int64_t lower_bound(const int32_t* at, int64_t n, int64_t near, int32_t x) {
  int64_t low = near, high = near, step = 1;
  if (near < n && at[near] < x) {
    while (high < n && at[high] < x) {
      low = high + 1;
      high = step < n - high ? high + step : n;
      step *= 2;
    }
  } else {
    while (low > 0 && at[low - 1] >= x) {
      high = low - 1;
      low = step < high ? high - step : 0;
      if (at[low] < x) {
        ++low;
        break;
      }
      step *= 2;
    }
  }
  while (low < high) {
    int64_t middle = low + (high - low) / 2;
    if (at[middle] < x)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

void find_ranges(const sp_attention* x, int32_t* begin, int32_t* end) {
  int64_t first = 0, stop = 0;
  for (int64_t i = 0; i < x->m; ++i) {
    begin[i] = end[i] = 0;
    if (x->lo[i] >= x->hi[i]) continue;
    first = lower_bound(x->key_pos, x->n, first, x->lo[i]);
    stop = lower_bound(x->key_pos, x->n, stop, x->hi[i]);
    if (first < stop) begin[i] = (int32_t)first, end[i] = (int32_t)stop;
  }
}

int supported(const sp_attention* x, const sp_kernels* with) {
  return (x->dtype == SP_F32 || x->dtype == SP_BF16) && x->n < INT32_MAX && x->dim >= 1 && x->dim <= SP_MAX_DIM &&
         x->v_dim >= 1 && x->v_dim <= SP_MAX_DIM && x->tiles.bm <= with->bm &&
         (x->heads == 0 || (x->kv_heads > 0 && x->heads % x->kv_heads == 0));
}

// Fills runs x (RUN + 2) words.
sp_ends find_ends(const sp_attention* x, int64_t runs, int32_t* words) {
  int32_t *until = words, *least = until + runs * RUN, *most = least + runs;
  std::copy(x->until, x->until + x->n, until);
  std::fill(until + x->n, until + runs * RUN, INT32_MIN);
  for (int64_t run = 0; run < runs; ++run) {
    auto range = std::minmax_element(until + run * RUN, until + std::min((run + 1) * RUN, x->n));
    least[run] = *range.first, most[run] = *range.second;
  }
  return {until, least, most};
}

// Runs forward or backward with the range of key rows that each query row sees.
template <class Direction>
int with_ranges(const sp_attention* x, Direction direction) {
  const int64_t runs = x->until != nullptr ? (x->n + RUN - 1) / RUN : 0;
  int32_t* rows = static_cast<int32_t*>(sp_allocate(sizeof(int32_t) * (size_t)(2 * x->m + runs * (RUN + 2))));
  if (rows == nullptr) return SP_NO_MEMORY;
  find_ranges(x, rows, rows + x->m);
  sp_ranges ranges = {rows, rows + x->m, {}};
  if (runs > 0) ranges.ends = find_ends(x, runs, rows + 2 * x->m);
  int status = direction(&ranges);
  free(rows);
  return status;
}

}  // namespace

void sp_attention_tile(int isa, int dtype, int64_t* bm, int64_t* bn) {
  const sp_kernels* with = kernels(isa, dtype);
  *bm = with->bm;
  *bn = with->bn;
}

int sp_attention_forward(const sp_attention* x, const sp_sums* sums, int isa, sp_parallel_for parallel_for) {
  const sp_kernels* with = kernels(isa, x->dtype);
  if (!supported(x, with)) return SP_UNSUPPORTED;
  if (sums->top != nullptr && (x->softcap != 0.0f || x->slopes != nullptr)) return SP_UNSUPPORTED;
  if (x->m == 0 || x->heads == 0) return 0;
  const bool packs = sp_packs(sp_this_processor());
  return with_ranges(x, [=](const sp_ranges* ranges) { return with->forward(x, sums, ranges, packs, parallel_for); });
}

int sp_attention_backward(const sp_attention* x, const sp_grads* grads, int isa, sp_parallel_for parallel_for) {
  const sp_kernels* with = kernels(isa, x->dtype);
  if (!supported(x, with)) return SP_UNSUPPORTED;
  if (x->m == 0 || x->n == 0 || x->heads == 0) return 0;
  return with_ranges(x, [=](const sp_ranges* ranges) { return with->backward(x, grads, ranges, parallel_for); });
}
