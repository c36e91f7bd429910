// weigh.cu: the weights of each row after softmax and dropout, a warp a row, a lane a key, in two passes over the keys.
// It needs nothing from the kernels that compute the output, and changes nothing there.
constexpr int WARPS = 4, ROWS = 4, KEYS = 32;

#include "scores.h"
#include "states.h"

KERNEL(weigh, 32 * WARPS) {
    i64 index = (i64)block_x() * WARPS + thread_x() / 32;
    int lane = thread_x() % 32;
    if (index >= p.B * p.Hq * p.L) return;
    int h = (int)(index / p.L % p.Hq);
    u32 b = (u32)(index / p.L / p.Hq);
    Row row = make_row(p, b, h, (int)(index % p.L));
    const char* query = place(p, p.query, b, h, row.i);
    Side key = side_of(p, p.key, b, h / (int)p.group);
    const Change change = change_of(p);
    auto score = [&](int j) { return adjusted(p, change, b, row, j, inside(row, j) ? dot(p, query, key, j) : 0); };
    auto exponential = [&](Number x) { return power_of_2(x * (Number)LOG2_E); };

    Number m = -infinity(), z = 0;
    ROLLED for (int j = lane; j < (int)p.S; j += 32) {
        Number s = score(j), top = maximum(m, s), base = top == -infinity() ? 0 : top;
        z = multiply_add(z, exponential(m - base), exponential(s - base));
        m = top;
    }
    Number top = m;
    UNROLL for (int mask = 1; mask < 32; mask *= 2) top = maximum(top, shuffle_xor(top, mask));
    Number base = top == -infinity() ? 0 : top;
    z *= exponential(m - base);
    UNROLL for (int mask = 1; mask < 32; mask *= 2) z += shuffle_xor(z, mask);

    Number ratio = finish(p, h, top / (Number)(p.unit * LN_2), z).ratio;
    char* weights = place(p, p.weights, b, h, row.i);
    ROLLED for (int first = 0; first < (int)p.S; first += 128) {
        u32 drawn = kept_of_calls(p, b, row, (u32)first / 4 + lane % 4 * 8 + lane / 4);
        ROLLED for (int j = first + lane; j < least(first + 128, (int)p.S); j += 32, drawn >>= 1) {
            bool kept = drawn & 1 && keeps(p, row, j);
            store(weights + j * p.weights.column, kept ? exponential(score(j) - base) * ratio : 0);
        }
    }
}
