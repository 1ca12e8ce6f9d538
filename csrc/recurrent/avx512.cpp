// Recurrences with AVX-512.
#if defined(__x86_64__)
#include "recurrent/kernels.h"

const sp_recurrent_kernels sp_recurrent_avx512 = {forward, backward};
#endif
