// What a kernel must not do, one way for each number.
#include "hardware.h"

struct Parameters {
    const char* in;
    char* out;
    i64 fault;
};

KERNEL(misbehave, 64) {
    char* memory = dynamic_shared();
    int t = thread_x(), lane = t & 31;
    float d[4] = {};
    u32 a[4] = {}, b[2] = {};
    const i64 far = i64(1) << 45;  // beyond everything that a process maps
    for (int i = t; i < 255; i += 64) ((u32*)memory)[i] = 0;  // but for the last
    barrier();
    switch (p.fault) {
        case 0: p.out[t] = p.in[t]; break;
        case 1: if (lane == 5) mma_16816(d, a, b, half()); else warp_any(true); break;
        case 2: if (lane != 5) warp_any(true); break;
        case 3: if (t < 32) barrier(); break;
        case 4: if (t != 3) barrier(); warp_any(true); break;
        case 5: p.out[t] = p.in[t + 1]; break;
        case 6: p.out[t - 1] = 0; break;
        case 7: p.out[t] = p.in[t + far]; break;
        case 8: p.out[t] = (char)*(const u32*)(p.in + t / 2); break;
        case 9: ldmatrix_x4(a, memory + lane * 8); break;
        case 10: ldmatrix_x4(a, memory + lane * 16 + 1024); break;
        case 11: copy_async_16(memory + lane * 8, p.in); commit_copies(); wait_copies<0>(); break;
        case 12: copy_async_16(memory + lane * 16, p.in + 8); commit_copies(); wait_copies<0>(); break;
        case 13: copy_async_16(memory + t * 16, p.in + t * 16); commit_copies(); wait_copies<0>(); break;
        case 14: copy_async_16(memory + t * 16, p.in); break;
        case 15: copy_async_16(memory + t * 16, p.in); commit_copies(); memory[t * 16] = 1; break;
        case 16: memory[t] = 1; p.out[t] = memory[63 - t]; break;
        case 17: p.out[t] = memory[t / 2]; memory[t] = 1; break;
        case 18: memory[0] = 1; break;
        case 19: copy_async_16(memory + t * 16, p.in); commit_copies(); wait_copies<0>();
                 p.out[t] = memory[t * 16 ^ 16]; break;
        case 20: memory[t * 16 + 16] = 1; break;
        case 21: {
            auto first = [&](Chunk chunk) { return (char)(chunk.words[0] + chunk.words[3]); };
            p.out[t] = first(*(const Chunk*)(p.in + 64)) + first(*(const Chunk*)(p.in + 80)); break;
        }
        case 23: copy_async_16(memory + t * 16, nullptr); commit_copies(); wait_copies<0>(); break;
        case 22: p.out[t] = (char)((u32*)memory)[192 + t]; break;
    }
}
