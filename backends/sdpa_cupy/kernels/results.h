// results.h: what becomes of a row's sums; infinite and NaN values that some rows of a block see and others drop.
#pragma once
#include "scores.h"
#include "states.h"

// Stores a row's lse, or the state of its chunk but for the sums, by one lane; returns what the sums are multiplied by.
DEVICE Number leave(const Parameters& p, const Task& task, Row& row, Number m, Number z, bool stores) {
    End end = p.chunks > 1 ? End{1, 0, 0} : finish(p, row.h, m, z);
    if (!stores) return end.ratio;
    row.m = z == 0 ? -infinity() : m * (Number)(p.unit * LN_2);
    if (!row.real) return end.ratio;
    if (p.chunks > 1) {
        Number* to = state(p, task.b, row.h, row.i, task.chunk);
        to[0] = m;
        to[1] = z;
    } else {
        put_lse(p, task.b, row.h, row.i, end);
    }
    return end.ratio;
}

// Stores number d of a row's result.
DEVICE void put(const Parameters& p, const Task& task, const Row& row, int d, Number number) {
    if (p.chunks > 1) state(p, task.b, row.h, row.i, task.chunk)[2 + d] = number;
    else if (p.out.data) store(place(p, p.out, task.b, row.h, row.i) + d * p.out.column, number);
}

// Returns whether every row keeps all keys of the tile at j.
DEVICE bool kept_whole(const Parameters& p, const Span& block, int j) {
    return complete(block, j, j + KEYS) && !p.dense.data && !p.bias.data;
}

// Adds what rows miss because `clean_tile` made it 0 for all: the infinite and NaN values of tiles that are not kept
// whole, for the rows that do keep them, number by number. It is rare, and need not be fast.
DEVICE void repair(const Parameters& p, const Table& table) {
    const Task& task = table.task;
    const Change change = change_of(p);
    ROLLED for (int j = task.first; j < end_of_walk(table.span, task); j++) {
        if (kept_whole(p, table.span, j - j % KEYS)) continue;
        ROLLED for (int d = thread_x(); d < (int)p.Ev; d += THREADS) {
            Number v = value_number(p, task.value, j, d);
            if (is_finite(v)) continue;
            ROLLED for (int r = 0; r < ROWS; r++) {
                const Row& row = table.rows[r];
                if (!row.real || (p.chunks == 1 && row.m == -infinity()) || !keeps(p, row, j)) continue;
                const char* query = task.query + row.h * p.query.head + row.i * p.query.row;
                Number s = dot(p, query, task.key, j);
                Number weight = power_of_2((adjusted(p, change, task.b, row, j, s) - row.m) * (Number)LOG2_E);
                if (!keeps_weight(p, task.b, row, j)) weight = 0;
                if (p.chunks > 1) {
                    Number& sum = state(p, task.b, row.h, row.i, task.chunk)[2 + d];
                    sum = multiply_add(weight, v, sum);
                } else if (p.out.data) {
                    char* out = place(p, p.out, task.b, row.h, row.i) + d * p.out.column;
                    store(out, multiply_add(weight, v, load<Element>(out)));
                }
            }
        }
    }
}
