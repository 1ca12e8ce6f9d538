// Recurrences with vectors of 16 bytes, which every processor has.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=fast")  // ISO C++ forbids contraction, and a * b + c would take two instructions
#endif
#include "recurrent/kernels.h"

const sp_recurrent_kernels sp_recurrent_portable = {forward, backward};
