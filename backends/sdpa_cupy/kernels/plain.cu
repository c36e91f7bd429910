// plain.cu: output and lse of 16 query rows without matrix units: for what attend.cu leaves, by type, device or width.
//
// A warp has 4 rows. For the scores a lane is a key, for the output it is a column of V. Specialised by ELEMENT and
// VALUE_WIDTH (Ev in whole steps of 64), STORED and the options of scores.h; E is anything, as keys and values pass 64 columns at a time.
constexpr int WARPS = 4, ROWS = 16, KEYS = 32, COLUMNS = 64, PITCH = COLUMNS + 1;

#include "results.h"

// Copies some columns of the next keys or values, with zeroes for what is not there and, where `clean`, for what is not
// finite; returns whether there was such a number.
template <class F> DEVICE bool load_columns(Number* tile, F number_of, int rows, int columns, bool clean) {
    bool found = false;
    for (int x = thread_x(); x < KEYS * COLUMNS; x += THREADS) {
        int r = x / COLUMNS, c = x % COLUMNS;
        Number number = r < rows && c < columns ? number_of(r, c) : 0;
        bool bad = clean && !is_finite(number);
        tile[r * PITCH + c] = bad ? 0 : number;
        found |= bad;
    }
    return found;
}

KERNEL(attend_plainly, 32 * WARPS) {
    Table& table = *(Table*)dynamic_shared();
    Number* tile = (Number*)(dynamic_shared() + sizeof(Table));
    Number* weights = tile + KEYS * PITCH;
    Number* queries = weights + ROWS * KEYS;
    fill_table(p, table);
    int number = thread_x() / 32, lane = thread_x() % 32, E = (int)p.E, Ev = (int)p.Ev;
    const Task& task = table.task;
    const Span& block = table.span;
    Row* own = table.rows + number * WARP_ROWS;
    static_assert(WARP_ROWS == 4, "calls of kept_of_calls");
    Number* own_weights = weights + number * WARP_ROWS * KEYS;
    const Number* own_queries = queries + number * WARP_ROWS * E;
    for (int x = thread_x(); x < ROWS * E; x += THREADS) {
        const Row& row = table.rows[x / E];
        const char* query = task.query + row.h * p.query.head + row.i * p.query.row;
        queries[x] = load<Element>(query + x % E * p.query.column);
    }

    Number o[WARP_ROWS][VALUE_WIDTH / 32], m[WARP_ROWS], z[WARP_ROWS];
    UNROLL for (int r = 0; r < WARP_ROWS; r++) {
        m[r] = -infinity();
        z[r] = 0;
        UNROLL for (int c = 0; c < VALUE_WIDTH / 32; c++) o[r][c] = 0;
    }
    const Change change = change_of(p);
    bool harmful = false;

    ROLLED for (int j = skip(block, task.first); j < end_of_walk(block, task); j = skip(block, j + KEYS)) {
        Number s[WARP_ROWS] = {};
        ROLLED for (int first = 0; first < E; first += COLUMNS) {
            barrier();  // no warp reads the tile any more
            auto number_of = [&](int r, int c) { return key_number(p, task.key, j + r, first + c); };
            load_columns(tile, number_of, task.last - j, E - first, false);
            barrier();
            ROLLED for (int c = 0; c < least(COLUMNS, E - first); c++) {
                Number k = tile[lane * PITCH + c];
                UNROLL for (int r = 0; r < WARP_ROWS; r++) s[r] = multiply_add(own_queries[r * E + first + c], k, s[r]);
            }
        }
        barrier();
        u32 kept = kept_of_calls(p, task.b, own[lane % 4], (u32)(j + lane) / 4);  // a row a call
        UNROLL for (int r = 0; r < WARP_ROWS; r++) {
            s[r] = adjusted(p, change, task.b, own[r], j + lane, s[r]);
            Number top = s[r];
            UNROLL for (int mask = 1; mask < 32; mask *= 2) top = maximum(top, shuffle_xor(top, mask));
            top = maximum(top, m[r]);
            Number base = top == -infinity() ? 0 : top, shrink = power_of_2((m[r] - base) * (Number)LOG2_E);
            Number weight = power_of_2((s[r] - base) * (Number)LOG2_E);
            m[r] = top;
            z[r] = multiply_add(z[r], shrink, weight);  // of this lane's keys
            UNROLL for (int c = 0; c < VALUE_WIDTH / 32; c++) o[r][c] *= shrink;
            own_weights[r * KEYS + lane] = kept >> r & 1 ? weight : 0;
        }
        UNROLL for (int first = 0; first < VALUE_WIDTH; first += COLUMNS) {
            auto number_of = [&](int r, int c) { return value_number(p, task.value, j + r, first + c); };
            if (first > 0) barrier();
            harmful |= load_columns(tile, number_of, task.last - j, Ev - first, !kept_whole(p, block, j));
            barrier();
            ROLLED for (int x = 0; x < KEYS; x++) {
                UNROLL for (int c = 0; c < COLUMNS / 32; c++) {
                    Number v = tile[x * PITCH + c * 32 + lane];
                    UNROLL for (int r = 0; r < WARP_ROWS; r++) {
                        Number& sum = o[r][first / 32 + c];
                        sum = multiply_add(own_weights[r * KEYS + x], v, sum);
                    }
                }
            }
        }
    }

    UNROLL for (int r = 0; r < WARP_ROWS; r++) {
        UNROLL for (int mask = 1; mask < 32; mask *= 2) z[r] += shuffle_xor(z[r], mask);
        Number ratio = leave(p, task, own[r], m[r], z[r], lane == 0);
        bool none = p.chunks == 1 && z[r] == 0;  // of a chunk, 0 times an infinite value counts
        UNROLL for (int c = 0; c < VALUE_WIDTH / 32; c++) {
            bool there = own[r].real && c * 32 + lane < Ev;
            if (there) put(p, task, own[r], c * 32 + lane, none ? 0 : o[r][c] * ratio);
        }
    }
    if (barrier_any(harmful)) repair(p, table);
}
