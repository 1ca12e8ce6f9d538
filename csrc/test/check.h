// What the tests of csrc say when something does not hold.
#pragma once

#include <cstdio>
#include <cstdlib>

inline void check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "does not hold: %s\n", what);
  std::abort();
}
