// Memory that the GPUs of one node write for each other, and words in it on which their streams wait.
//
// A word holds an epoch: a 32-bit number that only grows, and wraps. A wait ends when the word is at or past its epoch,
// by signed difference. A write is ordered after all earlier operations of its stream, system-wide.
//
// All functions return 0 or a CUDA error and leave the current device unchanged. `stream` is one of `device`.
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

// Memory that other processes can map. The first `words` words hold `value`; the rest is zero.
int sp_peer_alloc(int device, int64_t bytes, int64_t words, uint32_t value, void** made);
int sp_peer_free(int device, void* memory);
int sp_peer_export(int device, void* memory, void* handle);
// Maps memory that another process exported.
int sp_peer_open(int device, const void* handle, void** mapped);
int sp_peer_close(int device, void* mapped);
// Lets kernels and copies of `device` reach all memory of another device in this process.
int sp_peer_reach(int device, int other);

// A stream of our own that does not wait for the default stream. priority: 0 is the usual one, lower runs first; values
// out of the device's range become the nearest in it.
int sp_peer_stream(int device, int priority, void** made);
int sp_peer_stream_end(int device, void* stream);

// Whether the driver has the stream operations that `by_kernel` replaces.
int sp_peer_driver_signals(void);

// The PCI bus id of a device, which other processes know it by.
int sp_peer_bus(int device, char* bus, int length);
// Whether `device` sees what that other device writes, and then a word that it writes, in this order: the other one is
// the same device, or NVLink joins the two. 0 if this process does not see the other one.
int sp_peer_ordered(int device, const char* bus, int* ordered);
// Whether the driver's waits can flush what others have written into a device's memory.
int sp_peer_can_flush(int device, int* can);

// Writes words, or waits for them, in stream order; the words of one call are unordered. by_kernel: by a kernel instead
// of the driver's operations. A waiting kernel also ends after `nanoseconds`, when it sets the word `poison`, and, if
// `heeds_poison`, once that word is set. Its awaited words then mean nothing, and later operations check the poison.
// flush: the driver's wait also waits for all that others wrote before the words; for devices that can.
int sp_peer_write(int device, void* stream, int by_kernel, int count, const int64_t* words, const int64_t* values);
int sp_peer_wait(int device, void* stream, int by_kernel, int flush, int count, const int64_t* words,
                 const int64_t* values, void* poison, int heeds_poison, int64_t nanoseconds);

// Copies bytes with a copy engine.
int sp_peer_copy(int device, void* stream, void* to, const void* from, int64_t bytes);

// If the word `poison` is set, sets every bit of the tensors' elements: NaN in every floating-point format. If it
// becomes set meanwhile, elements may keep their values; operations released by a poison see it beforehand.
int sp_peer_blank(int device, void* stream, const void* poison, int count, const sp_peer_view* views);

// Reads device memory into host memory and waits for it; nothing else may wait in `stream`.
int sp_peer_read(int device, void* stream, const void* from, void* to, int64_t bytes);

#ifdef __cplusplus
}
#endif
