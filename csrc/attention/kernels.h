// The kernels of one ISA; the .cpp of each includes this once.
#pragma once

#include "attention/backward.h"
#include "attention/forward.h"

namespace {

constexpr int64_t BN = 32;  // only how finely tables see where query tiles should start

}  // namespace
