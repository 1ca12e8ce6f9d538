// The kernels of one ISA; the .cpp file of each ISA includes this once.
#pragma once

#include "attention/backward.h"
#include "attention/forward.h"

namespace {

constexpr int64_t BN = 32;  // the granularity, in keys, at which tables say where query tiles start

}  // namespace
