// What recurrent.cpp and the files compiled for one ISA share.
#pragma once

#include "recurrent/recurrent.h"

struct sp_recurrent_kernels {
  int (*forward)(const sp_recurrence*, const sp_recurrent_sums*, sp_parallel_for);
  int (*backward)(const sp_recurrence*, const sp_recurrent_grads*, sp_parallel_for);
};

extern const sp_recurrent_kernels sp_recurrent_portable, sp_recurrent_avx2, sp_recurrent_avx512;
