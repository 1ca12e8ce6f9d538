// The kernels of one ISA; the .cpp file of each ISA includes this once.
#pragma once

#include "recurrent/backward.h"
#include "recurrent/dispatch.h"
#include "recurrent/forward.h"

namespace {

inline int forward(const sp_recurrence* x, const sp_recurrent_sums* sums, sp_parallel_for parallel_for) {
  return x->wide ? forward_of<double>(x, sums, parallel_for) : forward_of<float>(x, sums, parallel_for);
}

inline int backward(const sp_recurrence* x, const sp_recurrent_grads* grads, sp_parallel_for parallel_for) {
  return x->wide ? backward_of<double>(x, grads, parallel_for) : backward_of<float>(x, grads, parallel_for);
}

}  // namespace
