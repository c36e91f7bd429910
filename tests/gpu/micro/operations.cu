// One kernel for each operation of hardware.h: registers come from `in`, a row of words for each thread, and go to `out`.
#include "hardware.h"

struct Parameters {
    const u32* in;
    u32* out;
    const char* data;
};

template <int N, class T> DEVICE void get(T (&registers)[N], const u32* words) {
    for (int i = 0; i < N; i++) registers[i] = words[i];
}

DEVICE i64 global_thread() { return block_x() * 32ll + thread_x(); }

// A row of `in` is a, b and d before, of `out` d.
template <int A, int B, class Multiply> DEVICE void multiply(const Parameters& p, Multiply with) {
    u32 a[A], b[B], before[4];
    const u32* in = p.in + global_thread() * (A + B + 4);
    get(a, in);
    get(b, in + A);
    get(before, in + A + B);
    float d[4];
    for (int i = 0; i < 4; i++) d[i] = float_of(before[i]);
    with(d, a, b);
    for (int i = 0; i < 4; i++) p.out[global_thread() * 4 + i] = bits_of(d[i]);
}

#if TURING
KERNEL(multiply_half_8, 32) {
    multiply<2, 1>(p, [](auto& d, auto& a, auto& b) { mma_1688(d, a[0], a[1], b[0], half()); });
}
#else
KERNEL(multiply_half, 32) {
    multiply<4, 2>(p, [](auto& d, auto& a, auto& b) { mma_16816(d, a, b, half()); });
}
KERNEL(multiply_bfloat, 32) {
    multiply<4, 2>(p, [](auto& d, auto& a, auto& b) { mma_16816(d, a, b, bfloat()); });
}
KERNEL(multiply_tf32, 32) {
    multiply<4, 2>(p, [](auto& d, auto& a, auto& b) { mma_1688_tf32(d, a, b); });
}
KERNEL(round_tf32, 32) { p.out[global_thread()] = to_tf32(float_of(p.in[global_thread()])); }
#endif

// `in` says where in shared memory, which is `data`, each lane's row begins.
template <class Load> DEVICE void load(const Parameters& p, Load with) {
    for (int i = thread_x(); i < 64; i += 32) ((Chunk*)dynamic_shared())[i] = ((const Chunk*)p.data)[i];
    barrier();
    u32 r[4];
    with(r, dynamic_shared() + p.in[thread_x()]);
    for (int i = 0; i < 4; i++) p.out[thread_x() * 4 + i] = r[i];
}
KERNEL(load, 32) {
    load(p, [](auto& r, const char* row) { ldmatrix_x4(r, row); });
}
KERNEL(load_transposed, 32) {
    load(p, [](auto& r, const char* row) { ldmatrix_x4_trans(r, row); });
}

KERNEL(shuffle, 64) {
    int t = thread_x();
    u32* out = p.out + t * 5;
    out[0] = shuffle_xor(p.in[t], 1);
    out[1] = bits_of(shuffle_xor(float_of(p.in[t]), 6));
    double wide = shuffle_xor((double)p.in[t], 16);
    out[2] = (u32)wide;
    out[3] = warp_any(p.in[t] == 40);
    out[4] = barrier_any(p.in[t] == 40) + 2 * barrier_any(p.in[t] == 99);
}

// A row of `in` is two floats.
KERNEL(convert, 32) {
    i64 t = global_thread();
    float low = float_of(p.in[t * 2]), high = float_of(p.in[t * 2 + 1]);
    half h;
    bfloat b;
    from_float(h, low);
    from_float(b, low);
    u32* out = p.out + t * 6;
    out[0] = h.bits | (u32)b.bits << 16;
    out[1] = pack2(low, high, half());
    out[2] = pack2(low, high, bfloat());
    out[3] = bits_of(to_float(half{(u16)t}));
    out[4] = bits_of(to_float(bfloat{(u16)t}));
    out[5] = bits_of(exp2_approx(low));
}

#if !TURING
// Three groups of copies; what has landed when at most one is left is read back.
KERNEL(copy, 32) {
    char* own = dynamic_shared() + thread_x() * 48;
    for (int group = 0; group < 3; group++) {
        copy_async_16(own + group * 16, p.data + thread_x() * 48 + group * 16);
        commit_copies();
    }
    wait_copies<1>();
    for (int i = 0; i < 8; i++) p.out[thread_x() * 8 + i] = ((const u32*)own)[i];
    wait_copies<0>();
}
#endif
