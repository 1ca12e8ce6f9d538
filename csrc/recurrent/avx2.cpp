// Recurrences with AVX2 and FMA.
#if defined(__x86_64__)
#include "recurrent/kernels.h"

const sp_recurrent_kernels sp_recurrent_avx2 = {forward, backward};
#endif
