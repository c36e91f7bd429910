// hardware.h: the operations of the hardware under one name each. Everything else in this folder is plain C++17 without
// any other header, so that NVRTC needs no include path and an emulation (-DEMULATED) runs the same source.
// Products and sums that are to be one operation are written as one: compilers are set to join no others.
//
// All lanes of a warp call mma_*, ldmatrix_*, shuffle_xor and warp_any together, all threads of a block the barriers.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct half {
    u16 bits;
};
struct bfloat {
    u16 bits;
};
struct alignas(16) Chunk {  // what a copy moves, and a row of a matrix that ldmatrix reads
    u32 words[4];
};

#ifndef TURING
#define TURING 0  // 1: sm_75, which has no cp.async, no bfloat16 and no TF32, and multiplies 8 columns at a time
#endif

#ifdef EMULATED
#include "fibers/hardware.h"
#else

#define DEVICE static __device__ __forceinline__
#define UNROLL _Pragma("unroll")
#define ROLLED _Pragma("unroll 1")
#define KERNEL(name, threads) \
    extern "C" __global__ void __launch_bounds__(threads, 1) name(const __grid_constant__ Parameters p)

DEVICE int thread_x() { return threadIdx.x; }
DEVICE int block_x() { return blockIdx.x; }
DEVICE void barrier() { __syncthreads(); }
DEVICE bool barrier_any(bool flag) { return __syncthreads_or(flag); }  // whether a thread of the block has the flag
DEVICE bool warp_any(bool flag) { return __any_sync(0xffffffffu, flag); }
template <class T> DEVICE T shuffle_xor(T value, int mask) { return __shfl_xor_sync(0xffffffffu, value, mask); }

// Dynamic shared memory, aligned to 16 bytes.
DEVICE char* dynamic_shared() {
    extern __shared__ Chunk memory[];
    return (char*)memory;
}
DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// 2 to the power of x: 2 units in the last place, 0 where the result would be subnormal.
DEVICE float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE float to_float(half x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}
DEVICE float to_float(bfloat x) { return __uint_as_float((u32)x.bits << 16); }
DEVICE void from_float(half& y, float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); }
DEVICE void from_float(bfloat& y, float x) {
#if TURING
    u32 bits = __float_as_uint(x);
    y.bits = x != x ? 0x7fff : (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
#else
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#endif
}

// Two numbers rounded to 16 bits each, `low` in the lower half.
template <class T> DEVICE u32 pack2(float low, float high, T) {
    T a, b;
    from_float(a, low);
    from_float(b, high);
    return a.bits | (u32)b.bits << 16;
}

DEVICE u32 bits_of(float x) { return __float_as_uint(x); }
DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }

// Four 8x8 matrices of 16-bit numbers (or 8x4 of 32-bit numbers): lane 8 m + i names row i of matrix m, 16 bytes; lane
// l gets, from each matrix, the word at row l / 4, column l % 4. Transposed, its two numbers are of column l / 4.
DEVICE void ldmatrix_x4(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}
DEVICE void ldmatrix_x4_trans(u32 (&r)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(row))
                 : "memory");
}

#if TURING

// d += a b, a 16x8 (two registers), b 8x8 (one register), d 16x8.
DEVICE void mma_1688(float (&d)[4], u32 a0, u32 a1, u32 b, half) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a0), "r"(a1), "r"(b));
}
DEVICE void commit_copies() {}
template <int N> DEVICE void wait_copies() {}

#else

// d += a b, a 16x16 row by row, b 16x8 column by column, d 16x8.
DEVICE void mma_16816(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], half) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
DEVICE void mma_16816(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], bfloat) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// d += a b, a 16x8, b 8x8, of 32-bit numbers of which the upper 19 bits count.
DEVICE void mma_1688_tf32(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
DEVICE u32 to_tf32(float x) {  // rounded to 11 significant bits
    u32 y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return y;
}
// Copies 16 bytes; done for this thread after wait_copies, for the block after a barrier.
DEVICE void copy_async_16(void* shared, const void* global) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> DEVICE void wait_copies() {  // until at most N groups are under way
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

#endif
#endif
