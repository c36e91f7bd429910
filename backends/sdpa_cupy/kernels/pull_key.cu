// pull_key.cu: the gradients by a tile of keys and values, dK = dS^T Q and dV = P^T dO, over the rows of all heads of the
// group, tile by tile. Specialised by PARTS: 1 for dV, 2 for dK, 3 for both, where there are registers for them.
#include "gradients.h"

struct alignas(16) Queries {  // the rows of a tile
    Row rows[KEYS];
    Flow flows[KEYS];
};

KERNEL(pull_key, 32 * WARPS) {
    Queries& tile = *(Queries*)dynamic_shared();
    char* keys = dynamic_shared() + sizeof(Queries);
    char* values = keys + ROWS * pitch(WIDTH);
    char* queries = values + ROWS * pitch(VALUE_WIDTH);
    char* grads = queries + KEYS * pitch(WIDTH);
    u32 tiles = (u32)((p.S + ROWS - 1) / ROWS), index = (u32)block_x();
    int j = (int)(index % tiles * ROWS), kv = (int)(index / tiles % (u32)p.Hkv);
    u32 b = index / tiles / (u32)p.Hkv;
    int lane = thread_x() % 32, first = thread_x() / 32 * WARP_ROWS;  // of the warp's keys
    const Side key = side_of(p, p.key, b, kv), value = side_of(p, p.value, b, kv);
    const char *query = p.query.data + batch_offset(p, p.query, b), *grad = p.grad.data + batch_offset(p, p.grad, b);

    auto key_row = [&](int r) { return j + r < (int)p.S ? row_at(p.key, p.key_storage, key, j + r) : nullptr; };
    auto value_row = [&](int r) { return j + r < (int)p.S ? row_at(p.value, p.value_storage, value, j + r) : nullptr; };
    load_tile<ROWS, WIDTH>(keys, key_row, p.key.numbers.column, (int)p.E);
    load_tile<ROWS, VALUE_WIDTH>(values, value_row, p.value.numbers.column, (int)p.Ev);
    commit_copies();

    const Change change = change_of(p);
    Number dk[ROW_TILES][WIDTH / 8][4], dv[ROW_TILES][VALUE_WIDTH / 8][4], unit = 1;
    fill(dk, 0);
    fill(dv, 0);
    bool harmful = false;
    ROLLED for (int head = kv * (int)p.group; head < (kv + 1) * (int)p.group; head++) {
        ROLLED for (int i = 0; i < (int)p.L; i += KEYS) {
            bool sees = false, whole = true;
            barrier();  // no warp reads the tiles any more
            if (thread_x() < KEYS) {
                Row row = make_row(p, b, head, i + thread_x());
                Flow flow = flow_of(p, b, head, row.i);
                if (!row.real) flow.factor = 0;
                tile.rows[thread_x()] = row;
                tile.flows[thread_x()] = flow;
                sees = flow.factor != 0 && (row.prefix > j || (row.start < j + ROWS && row.stop > most(j, row.start)));
                whole = flow.factor != 0 && !row.dense && BIAS < 0 &&
                        (row.prefix >= j + ROWS || (row.start <= j && row.stop >= j + ROWS));
            }
            if (!barrier_any(sees)) continue;
            auto row_in = [&](const View& view, const char* start) {
                return [&, start](int r) {
                    const Row& row = tile.rows[r];
                    return row.real ? start + row.h * view.head + row.i * view.row : nullptr;
                };
            };
            load_tile<KEYS, WIDTH>(queries, row_in(p.query, query), p.query.column, (int)p.E);
            load_tile<KEYS, VALUE_WIDTH>(grads, row_in(p.grad, grad), p.grad.column, (int)p.Ev);
            commit_copies();
            wait_copies<0>();
            bool clean = barrier_any(!whole);  // and the tiles are there
            Scores s, dp;
            score<WIDTH, true>(s, keys + first * pitch(WIDTH), queries);
            score<VALUE_WIDTH>(dp, values + first * pitch(VALUE_WIDTH), grads);
            if (clean) {
                barrier();  // no warp reads queries and gradients as they are any more
                harmful |= clean_tile<KEYS, WIDTH>(queries) | clean_tile<KEYS, VALUE_WIDTH>(grads);
                barrier();
            }
            UNROLL for (int x = 0; x < KEYS / 2; x++) {
                int r = x / 4 * 8 + lane % 4 * 2 + x % 2, own = j + first + x % 4 / 2 * 8 + lane / 4;
                pull(p, change, b, tile.rows[r], tile.flows[r], own, s[0][x / 4][x % 4], dp[0][x / 4][x % 4]);
            }
            if (PARTS & 1) mix(dv, s, grads);
            if (PARTS & 2) {
                fit(dp, dk, unit);
                mix(dk, dp, queries);
            }
        }
    }
    wait_copies<0>();  // of keys that nothing sees

    Number factor = (Number)p.scale / unit, mixed = (Number)p.dropout_factor;
    auto row_of = [&](const View& view, int r) { return place(p, view, b, kv, r); };
    for_each_sum(dv, [&](int r, int d, Number sum) {
        int own = j + first + r;
        if (PARTS & 1 && own < (int)p.S && d < (int)p.Ev) sum_at(p.d_value, row_of(p.d_value, own), d) = sum * mixed;
    });
    for_each_sum(dk, [&](int r, int e, Number sum) {
        int own = j + first + r;
        if (PARTS & 2 && own < (int)p.S && e < (int)p.E) sum_at(p.d_key, row_of(p.d_key, own), e) = sum * factor;
    });
    if (!barrier_any(harmful)) return;
    // What `clean_tile` made 0 for all: infinite and NaN numbers of rows that see some of the keys, number by number.
    ROLLED for (int index = 0; index < (int)(p.group * p.L); index++) {
        int head = kv * (int)p.group + index / (int)p.L;
        Row row = make_row(p, b, head, index % (int)p.L);
        Flow flow = flow_of(p, b, head, row.i);
        if (flow.factor == 0) continue;
        const char *own_query = query + head * p.query.head + row.i * p.query.row;
        const char *own_grad = grad + head * p.grad.head + row.i * p.grad.row;
        ROLLED for (int x = thread_x(); x < (int)(p.E + p.Ev); x += THREADS) {
            int d = x - (int)p.E;
            Number number = d < 0 ? load<Element>(own_query + x * p.query.column)
                                  : load<Element>(own_grad + d * p.grad.column);
            if (is_finite(number)) continue;
            ROLLED for (int own = j; own < least(j + ROWS, (int)p.S); own++) {
                if (!keeps(p, row, own)) continue;
                if (d < 0) {
                    if (PARTS & 2) sum_at(p.d_key, row_of(p.d_key, own), x) = infinity() - infinity();
                } else if (PARTS & 1) {
                    Number s = dot(p, own_query, key, own), none = 0;
                    pull(p, change, b, row, flow, own, s, none);
                    Number& sum = sum_at(p.d_value, row_of(p.d_value, own), d);
                    sum = multiply_add(s * mixed, number, sum);
                }
            }
        }
    }
}
