// Memory that the GPUs of one node write for each other, and words in it by which their streams wait for each other.
//
// A word holds an epoch, a number of 32 bits that only grows and wraps. A wait ends when the word is at or past the
// epoch, by a signed difference; before a write come all earlier operations of its stream, for the whole system.
//
// All return 0 or an error of CUDA, and leave the current device as it was. `stream` is one of `device`.
#pragma once

#include <stdint.h>

#include "base/dims.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { SP_PEER_HANDLE_BYTES = 64 };

// Elements of a tensor; sizes and strides in elements.
typedef struct {
  void* at;
  int64_t sizes[SP_DIMS], strides[SP_DIMS];
  int32_t item;
} sp_peer_view;

const char* sp_peer_error(int code);

// Memory that other processes can map; its first `words` words hold `value`, all else is zero.
int sp_peer_alloc(int device, int64_t bytes, int64_t words, uint32_t value, void** made);
int sp_peer_free(int device, void* memory);
int sp_peer_export(int device, void* memory, void* handle);
// Maps what another process exported.
int sp_peer_open(int device, const void* handle, void** mapped);
int sp_peer_close(int device, void* mapped);
// Lets kernels and copies of `device` reach all memory of another device of this process.
int sp_peer_reach(int device, int other);

// A stream that no other library has, and which does not wait for the default stream. priority: 0 as most streams have,
// negative comes first; what the device does not have becomes the nearest that it has.
int sp_peer_stream(int device, int priority, void** made);
int sp_peer_stream_end(int device, void* stream);

// Whether the driver has the operations that `by_kernel` stands in for.
int sp_peer_driver_signals(void);

// Writes words, in no order among themselves, or waits for them, in the order of a stream. by_kernel: with a kernel
// instead of the driver's operations. A waiting kernel ends too after `nanoseconds`, when it sets the word `poison`,
// and if `heeds_poison`, when that is set: the words of such a wait say nothing then, and what comes after looks at the
// poison.
int sp_peer_write(int device, void* stream, int by_kernel, int count, const int64_t* words, const int64_t* values);
int sp_peer_wait(int device, void* stream, int by_kernel, int count, const int64_t* words, const int64_t* values,
                 void* poison, int heeds_poison, int64_t nanoseconds);

// Copies bytes by a copy engine.
int sp_peer_copy(int device, void* stream, void* to, const void* from, int64_t bytes);

// If the word `poison` is not 0, sets every bit of the elements of tensors: NaN in every floating-point format. Where
// the word is set while this runs, elements may be left as they are; what a poison let go sees it before.
int sp_peer_blank(int device, void* stream, const void* poison, int count, const sp_peer_view* views);

// Reads memory of the device into the host's and waits for that; `stream` is one that nothing else waits in.
int sp_peer_read(int device, void* stream, const void* from, void* to, int64_t bytes);

#ifdef __cplusplus
}
#endif
