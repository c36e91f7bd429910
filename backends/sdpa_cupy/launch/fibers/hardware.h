// The operations of kernels/hardware.h for g++, carried out by the machine in this folder.
#pragma once
#include <math.h>

#include "numbers.h"
#include "operations.h"

// As on the device, functions are part of the kernel, and so are the places that faults are reported at.
#define DEVICE static inline __attribute__((always_inline))
#define UNROLL
#define ROLLED
#define EXPORTED extern "C" __attribute__((visibility("default")))
#define KERNEL(name, threads)                                                            \
    static void name##_of(const Parameters& p);                                          \
    EXPORTED const int name##_threads = threads;                                         \
    EXPORTED void name(const void* p) { name##_of(*static_cast<const Parameters*>(p)); } \
    static void name##_of(const Parameters& p)

using fibers::barrier, fibers::barrier_any, fibers::bits_of, fibers::block_x, fibers::commit_copies;
using fibers::dynamic_shared, fibers::exp2_approx, fibers::float_of, fibers::thread_x, fibers::to_tf32;
using fibers::warp_any;

template <class T>
DEVICE T shuffle_xor(T value, int mask) {
    u64 bits = 0;
    __builtin_memcpy(&bits, &value, sizeof value);
    bits = fibers::shuffle_xor(bits, mask);
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

DEVICE float to_float(half x) { return fibers::from_half(x.bits); }
DEVICE float to_float(bfloat x) { return fibers::from_bfloat(x.bits); }
DEVICE void from_float(half& y, float x) { y.bits = fibers::to_half(x); }
DEVICE void from_float(bfloat& y, float x) { y.bits = fibers::to_bfloat(x); }
DEVICE u32 pack2(float low, float high, half) { return u32(fibers::to_half(high)) << 16 | fibers::to_half(low); }
DEVICE u32 pack2(float low, float high, bfloat) { return u32(fibers::to_bfloat(high)) << 16 | fibers::to_bfloat(low); }

DEVICE void ldmatrix_x4(u32 (&r)[4], const void* row) { fibers::ldmatrix_x4(r, row); }
DEVICE void ldmatrix_x4_trans(u32 (&r)[4], const void* row) { fibers::ldmatrix_x4_trans(r, row); }

#if TURING
DEVICE void mma_1688(float (&d)[4], u32 a0, u32 a1, u32 b, half) {
    const u32 a[2] = {a0, a1};
    fibers::mma_1688_half(d, a, &b);
}
template <int N>
DEVICE void wait_copies() {}
#else
DEVICE void mma_16816(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], half) { fibers::mma_16816_half(d, a, b); }
DEVICE void mma_16816(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], bfloat) {
    fibers::mma_16816_bfloat(d, a, b);
}
DEVICE void mma_1688_tf32(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) { fibers::mma_1688_tf32(d, a, b); }
using fibers::copy_async_16;
template <int N>
DEVICE void wait_copies() {
    fibers::wait_copies(N);
}
#endif
