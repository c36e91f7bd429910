// What a kernel may touch: global memory in registered spans, and shared memory in an order that barriers fix.
#pragma once
#include "machine.h"

namespace fibers {

enum Kind : int { kRead, kWrite };

// Checks one access by the current thread: its place in memory, its alignment, and for shared memory its order.
void check(Kind kind, const void* address, size_t bytes, bool aligned, const void* place);

// Checks that a collective may read these bytes of shared memory.
void check_shared(Kind kind, const void* address, size_t bytes, const char* what, const void* place);

// Counts the bank conflicts of what the lanes of a warp did since they last met.
void settle(Thread* lanes);

// Counts in how many steps the banks serve one access of several lanes.
void served(const Access* accesses, int count);

// Carries a copy out, which is 16 bytes.

void begin_copy(const Copy& copy);
void finish_copies(size_t groups_left);

}  // namespace fibers
