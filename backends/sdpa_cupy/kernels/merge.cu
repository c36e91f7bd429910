// merge.cu: the chunks of each row's keys merged in their order, a warp a row, a lane a column of V.
constexpr int WARPS = 4, ROWS = 4, KEYS = 32;

#include "states.h"

KERNEL(merge, 32 * WARPS) {
    i64 index = (i64)block_x() * WARPS + thread_x() / 32;
    int lane = thread_x() % 32;
    if (index >= p.B * p.Hq * p.L) return;
    int i = (int)(index % p.L), h = (int)(index / p.L % p.Hq);
    u32 b = (u32)(index / p.L / p.Hq);
    const Number* states = state(p, b, h, i, 0);
    i64 step = p.Ev + 2;

    Number m = -infinity(), z = 0;
    ROLLED for (int c = 0; c < (int)p.chunks; c++) m = maximum(m, states[c * step]);
    Number base = m == -infinity() ? 0 : m, unit = (Number)p.unit;
    auto share = [&](int c) { return power_of_2((states[c * step] - base) * unit); };
    ROLLED for (int c = 0; c < (int)p.chunks; c++) z = multiply_add(states[c * step + 1], share(c), z);

    End done = finish(p, h, m, z);
    if (lane == 0) put_lse(p, b, h, i, done);
    if (!p.out.data) return;
    char* out = place(p, p.out, b, h, i);
    ROLLED for (int d = lane; d < (int)p.Ev; d += 32) {
        Number sum = 0;
        ROLLED for (int c = 0; c < (int)p.chunks; c++) sum = multiply_add(states[c * step + 2 + d], share(c), sum);
        store(out + d * p.out.column, z == 0 ? 0 : sum * done.ratio);
    }
}
