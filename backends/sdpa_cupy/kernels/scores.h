// scores.h: what happens to one score between the two products.
#pragma once
#include "philox.h"
#include "rows.h"

DEVICE bool inside(const Row& row, int j) { return j < row.prefix || (row.start <= j && j < row.stop); }

// Returns whether the row keeps the key.
DEVICE bool keeps(const Parameters& p, const Row& row, int j) {
    return inside(row, j) && (!row.dense || row.dense[j * p.dense.column]) &&
           (!row.bias || load_any(row.bias + j * p.bias.column, p.bias_type) != -infinity());
}

// Returns scale * s after softcap, bias and ALiBi, or -inf where the row drops the key.
DEVICE Number adjusted(const Parameters& p, const Row& row, int j, Number s) {
    if (!inside(row, j) || (row.dense && !row.dense[j * p.dense.column])) return -infinity();
    Number bias = row.bias ? load_any(row.bias + j * p.bias.column, p.bias_type) : 0;
    if (bias == -infinity()) return -infinity();
    s *= (Number)p.scale;
    if (p.softcap) {
        Number x = s * (Number)(1 / p.softcap), small = sizeof(Number) == 4 ? 1e-8 : 1e-17;
        s = x * x < small ? s : (Number)p.softcap * hyperbolic_tangent(x);  // tanh x = x there, even if x is subnormal
    }
    s += bias;
    if (p.slopes.data) {
        i64 distance = row.position - j;
        s -= row.slope * (Number)(distance < 0 ? -distance : distance);
    }
    return s;
}

// Returns whether dropout keeps the weight.
DEVICE bool keeps_weight(const Parameters& p, u32 b, const Row& row, int j) {
    u32 i = (u32)(p.first_row + row.i), h = (u32)(p.first_head + row.h), low = (u32)p.seed_low, high = (u32)p.seed_high;
    u32 quad = (u32)(p.first_key / 4) + (u32)j / 4;
    return philox(quad, i, h, b + (u32)p.first_entry, low, high, j % 4) >= (u32)p.threshold;
}

// Returns the product of a query and key j, read where they lie.
DEVICE Number dot(const Parameters& p, const char* query, const Side& key, int j) {
    Number sum = 0;
    ROLLED for (int e = 0; e < (int)p.E; e++) {
        sum = multiply_add(load<Element>(query + e * p.query.column), key_number(p, key, j, e), sum);
    }
    return sum;
}
