// The change from one fiber to another.
#pragma once
#include <cstddef>

#if !defined(__x86_64__) && !defined(__aarch64__)
#include <ucontext.h>
#endif

namespace fibers {

#if defined(__x86_64__) || defined(__aarch64__)
struct Context {
    void* stack;  // with the registers on top that a function has to keep
};
#else
using Context = ucontext_t;
#endif

// Sets a fiber to begin in a function that never returns.
void prepare(Context& context, char* stack, size_t bytes, void (*entry)());

void change(Context& from, Context& to);

}  // namespace fibers
