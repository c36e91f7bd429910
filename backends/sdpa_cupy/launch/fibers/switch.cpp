// Assembly for x86-64 and AArch64: ucontext, which serves the rest, enters the operating system at every change.
#include "switch.h"

namespace fibers {

#if defined(__x86_64__) || defined(__aarch64__)

extern "C" void fibers_change(void** from, void* to);

#if defined(__x86_64__)
__asm__(R"(
    .text
    .hidden fibers_change
    .globl fibers_change
    .type fibers_change, @function
fibers_change:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size fibers_change, .-fibers_change
)");
constexpr int kSaved = 8, kReturn = 6;  // words, the last of which ends a back trace
#else
__asm__(R"(
    .text
    .hidden fibers_change
    .globl fibers_change
    .type fibers_change, %function
fibers_change:
    stp x29, x30, [sp, #-160]!
    stp x19, x20, [sp, #16]
    stp x21, x22, [sp, #32]
    stp x23, x24, [sp, #48]
    stp x25, x26, [sp, #64]
    stp x27, x28, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #16]
    ldp x21, x22, [sp, #32]
    ldp x23, x24, [sp, #48]
    ldp x25, x26, [sp, #64]
    ldp x27, x28, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    ldp x29, x30, [sp], #160
    ret
    .size fibers_change, .-fibers_change
)");
constexpr int kSaved = 20, kReturn = 1;
#endif

void prepare(Context& context, char* stack, size_t bytes, void (*entry)()) {
    void** words = reinterpret_cast<void**>(stack + bytes) - kSaved;
    for (int i = 0; i < kSaved; i++) words[i] = nullptr;
    words[kReturn] = reinterpret_cast<void*>(entry);
    context.stack = words;
}

void change(Context& from, Context& to) { fibers_change(&from.stack, to.stack); }

#else

void prepare(Context& context, char* stack, size_t bytes, void (*entry)()) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = bytes;
    context.uc_link = nullptr;
    makecontext(&context, entry, 0);
}

void change(Context& from, Context& to) { swapcontext(&from, &to); }

#endif

}  // namespace fibers
