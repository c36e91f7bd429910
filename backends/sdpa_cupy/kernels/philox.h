// philox.h: Philox 4x32-10, the keep bits of dropout.
#pragma once
#include "hardware.h"

DEVICE u32 high_product(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }

// Returns word `which` of the four that ten rounds make of the counter (c0, c1, c2, c3).
DEVICE u32 philox(u32 c0, u32 c1, u32 c2, u32 c3, u32 k0, u32 k1, int which) {
    ROLLED for (int round = 0; round < 10; round++) {
        u32 high0 = high_product(0xD2511F53u, c0), low0 = 0xD2511F53u * c0;
        u32 high1 = high_product(0xCD9E8D57u, c2), low1 = 0xCD9E8D57u * c2;
        c0 = high1 ^ c1 ^ k0;
        c1 = low1;
        c2 = high0 ^ c3 ^ k1;
        c3 = low0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return which == 0 ? c0 : which == 1 ? c1 : which == 2 ? c2 : c3;
}
