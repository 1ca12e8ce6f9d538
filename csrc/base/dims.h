// How many dims a tensor may have, in every interface here, where it is not contiguous.
#pragma once

enum { SP_DIMS = 6 };  // as native.DIMS in Python
