// states.h: what a row's keys add up to: the largest score m, the sum z of exponentials relative to it, and the sums of
// weighted values. A chunk of keys leaves it in the workspace: m, z and Ev sums, chunk by chunk and row by row.
#pragma once
#include "numbers.h"

DEVICE Number* state(const Parameters& p, u32 b, int h, int i, int chunk) {
    i64 row = ((i64)b * p.Hq + h) * p.L + i;
    return (Number*)p.workspace + (row * p.chunks + chunk) * (p.Ev + 2);
}

struct End {
    Number ratio, m, z;  // what turns the sums into the output; the largest score and the sum, those of the sink included
};

DEVICE End finish(const Parameters& p, int h, Number m, Number z) {
    m *= (Number)(p.unit * LN_2);
    Number factor = (Number)p.dropout_factor;
    if (!p.sink.data) return z == 0 ? End{0, -infinity(), 0} : End{factor / z, m, z};
    Number sink = load<double>(p.sink.data + h * p.sink.head), top = maximum(m, sink);
    if (top == -infinity()) return {0, top, 0};
    Number own = power_of_2((m - top) * (Number)LOG2_E);
    Number total = z == 0 ? 0 : z * own;
    total += power_of_2((sink - top) * (Number)LOG2_E);
    return {z == 0 ? 0 : factor * own / total, top, total};
}

DEVICE char* place(const Parameters& p, const View& view, u32 b, int h, int i) {
    return view.data + batch_offset(p, view, b) + h * view.head + i * view.row;
}

// Stores a row's lse, and of what it was made.
DEVICE void put_lse(const Parameters& p, u32 b, int h, int i, const End& end) {
    if (p.lse.data) *(Number*)place(p, p.lse, b, h, i) = end.z == 0 ? -infinity() : end.m + logarithm(end.z);
    if (!p.m.data) return;
    *(Number*)place(p, p.m, b, h, i) = end.m;
    *(Number*)place(p, p.z, b, h, i) = end.z;
}
