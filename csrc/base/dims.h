// The most dims a non-contiguous tensor may have, in every interface of csrc.
#pragma once

enum { SP_DIMS = 6 };  // native.DIMS in Python
