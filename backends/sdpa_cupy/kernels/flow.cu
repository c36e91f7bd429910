// flow.cu: what flows into each row, a warp a row. Specialised by ELEMENT and OUTPUT, the type of the output as load_any has
// it; z is 0 for a row that sees nothing.
constexpr int WARPS = 4, ROWS = 4, KEYS = 32;

#include "flow.h"

KERNEL(flow, 32 * WARPS) {
    i64 index = (i64)block_x() * WARPS + thread_x() / 32;
    int lane = thread_x() % 32;
    if (index >= p.B * p.Hq * p.L) return;
    int i = (int)(index % p.L), h = (int)(index / p.L % p.Hq);
    u32 b = (u32)(index / p.L / p.Hq);
    const char *grad = place(p, p.grad, b, h, i), *out = place(p, p.out, b, h, i);

    Number inner = 0;
    ROLLED for (int d = lane; d < (int)p.Ev; d += 32) {
        inner = multiply_add(load<Element>(grad + d * p.grad.column), load_any(out + d * p.out.column, OUTPUT), inner);
    }
    UNROLL for (int mask = 1; mask < 32; mask *= 2) inner += shuffle_xor(inner, mask);
    if (lane != 0) return;
    Number m = *(const Number*)place(p, p.m, b, h, i), z = *(const Number*)place(p, p.z, b, h, i);
    if (p.grad_lse.data) inner -= *(const Number*)place(p, p.grad_lse, b, h, i);
    flow_of(p, b, h, i) = {m, z == 0 ? 0 : 1 / z, inner};
}
