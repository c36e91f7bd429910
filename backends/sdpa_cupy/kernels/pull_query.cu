// pull_query.cu: the gradient by a tile of query rows, dQ = dS K, and by the bias, dS, the keys tile by tile.
#include "gradients.h"

KERNEL(pull_query, 32 * WARPS) {
    Table& table = *(Table*)dynamic_shared();
    Flow* flows = (Flow*)(dynamic_shared() + sizeof(Table));
    char* queries = (char*)(flows + ROWS);
    char* grads = queries + ROWS * pitch(WIDTH);
    char* keys = grads + ROWS * pitch(VALUE_WIDTH);
    char* values = keys + KEYS * pitch(WIDTH);
    fill_table(p, table);
    int number = thread_x() / 32, lane = thread_x() % 32;
    const Task& task = table.task;
    const Span &block = table.span, &warp = table.spans[number];
    const Row* own = table.rows + number * WARP_ROWS;
    const Flow* own_flows = flows + number * WARP_ROWS;

    auto row_in = [&](const View& view, const char* first) {
        return [&, first](int r) {
            const Row& row = table.rows[r];
            return row.real ? first + row.h * view.head + row.i * view.row : nullptr;
        };
    };
    load_tile<ROWS, WIDTH>(queries, row_in(p.query, task.query), p.query.column, (int)p.E);
    load_tile<ROWS, VALUE_WIDTH>(grads, row_in(p.grad, p.grad.data + batch_offset(p, p.grad, task.b)), p.grad.column,
                                 (int)p.Ev);
    commit_copies();
    if (thread_x() < ROWS) flows[thread_x()] = flow_of(p, task.b, table.rows[thread_x()].h, table.rows[thread_x()].i);

    const Change change = change_of(p);
    Number dq[ROW_TILES][WIDTH / 8][4], unit = 1;
    fill(dq, 0);
    bool harmful = false;
    ROLLED for (int j = skip(block, task.first); j < end_of_walk(block, task); j = skip(block, j + KEYS)) {
        auto key_row = [&](int r) { return j + r < task.last ? row_at(p.key, p.key_storage, task.key, j + r) : nullptr; };
        auto value_row = [&](int r) {
            return j + r < task.last ? row_at(p.value, p.value_storage, task.value, j + r) : nullptr;
        };
        load_tile<KEYS, WIDTH>(keys, key_row, p.key.numbers.column, (int)p.E);
        load_tile<KEYS, VALUE_WIDTH>(values, value_row, p.value.numbers.column, (int)p.Ev);
        commit_copies();
        wait_copies<0>();
        barrier();  // the tiles are there
        bool seen = touched(warp, j, j + KEYS);
        Scores s, dp;
        if (seen) {
            score<WIDTH>(s, queries + number * WARP_ROWS * pitch(WIDTH), keys);
            score<VALUE_WIDTH>(dp, grads + number * WARP_ROWS * pitch(VALUE_WIDTH), values);
        }
        if (!kept_whole(p, block, j)) {
            barrier();  // no warp reads the keys as they are any more
            harmful |= clean_tile<KEYS, WIDTH>(keys);
            barrier();
        }
        if (seen) {
            UNROLL for (int x = 0; x < KEYS / 2; x++) {
                int r = x % 4 / 2 * 8 + lane / 4, key = j + x / 4 * 8 + lane % 4 * 2 + x % 2;
                const Row& row = own[r];
                Number bias = pull(p, change, task.b, row, own_flows[r], key, s[0][x / 4][x % 4], dp[0][x / 4][x % 4]);
                if (BIAS < 0 || !p.d_bias.data || !row.real || !inside(row, key)) continue;
                sum_at(p.d_bias, place(p, p.d_bias, task.b, row.h, row.i), key) = bias;
            }
            fit(dp, dq, unit);
            mix(dq, dp, keys);
        }
        barrier();  // no warp reads the tiles any more
    }
    wait_copies<0>();  // of queries that see no key
    barrier();  // the flows are there, for these

    Number factor = (Number)p.scale / unit;
    for_each_sum(dq, [&](int r, int e, Number sum) {
        const Row& row = own[r];
        if (!row.real || e >= (int)p.E) return;
        bool sees = own_flows[r].factor != 0;
        sum_at(p.d_query, place(p, p.d_query, task.b, row.h, row.i), e) = sees ? sum * factor : 0;
    });
    if (!SOFTCAP || !barrier_any(harmful)) return;
    // A soft cap makes scores of infinite keys finite. Their gradient 0, times infinity, is NaN, for rows that see them.
    ROLLED for (int j = task.first; j < end_of_walk(block, task); j++) {
        ROLLED for (int e = thread_x(); e < (int)p.E; e += THREADS) {
            if (is_finite(key_number(p, task.key, j, e))) continue;
            ROLLED for (int r = 0; r < ROWS; r++) {
                const Row& row = table.rows[r];
                if (!row.real || flows[r].factor == 0 || !keeps(p, row, j)) continue;
                sum_at(p.d_query, place(p, p.d_query, task.b, row.h, row.i), e) = infinity() - infinity();
            }
        }
    }
}
