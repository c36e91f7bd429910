// philox.h: Philox 4x32-10, the keep bits of dropout.
#pragma once
#include "hardware.h"

DEVICE u32 high_product(u32 a, u32 b) { return (u32)((u64)a * b >> 32); }

struct Words {
    u32 first, second, third, fourth;
};

// Returns what ten rounds make of the counter (c0, c1, c2, c3).
DEVICE Words philox(u32 c0, u32 c1, u32 c2, u32 c3, u32 k0, u32 k1) {
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
    return {c0, c1, c2, c3};
}
DEVICE u32 word(const Words& words, int which) {
    return which == 0 ? words.first : which == 1 ? words.second : which == 2 ? words.third : words.fourth;
}
