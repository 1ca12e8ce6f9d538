// The fraction of random cases that run.
#pragma once

// Races do not depend on the numbers, and sanitizers are slow: one case in so many is enough.
#ifdef __SANITIZE_THREAD__
constexpr int kEvery = 5;
#else
constexpr int kEvery = 1;
#endif
