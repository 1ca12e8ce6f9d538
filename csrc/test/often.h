// How many of the random cases run.
#pragma once

// Races do not depend on numbers, and looking for them is slow: then one case of so many will do.
#ifdef __SANITIZE_THREAD__
constexpr int kEvery = 5;
#else
constexpr int kEvery = 1;
#endif
