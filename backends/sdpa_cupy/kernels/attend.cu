// attend.cu: output and lse of a tile of query rows, by matrix units, the keys tile by tile (FlashAttention-2).
//
// Specialised by ELEMENT (0 half, 1 bfloat, 2 float), WIDTH and VALUE_WIDTH (E and Ev in whole steps of 16), KEYS (of a
// tile), WARPS, ROW_TILES (of 16 rows, a warp), GENERAL (whether scores need more than their scale), VECTOR (whether
// rows are read 16 bytes at a time), STORED (0 or 1, see stored.h), TURING, and the options of scores.h.
constexpr int ROWS = 16 * ROW_TILES * WARPS;

#include "products.h"
#include "results.h"

// Turns scores into weights, and rescales what was added up before to the new maximum m of each row. Where scores only
// need their scale, m is an exponent of 2, and scaling and subtracting it are one operation; else it is one of e, as a
// bias at the end of float's range leaves no room for a factor.
DEVICE void soften(float (&s)[ROW_TILES][KEYS / 8][4], float (&o)[ROW_TILES][VALUE_WIDTH / 8][4],
                   float (&m)[ROW_TILES][2], float (&z)[ROW_TILES][2], float scale) {
    UNROLL for (int rt = 0; rt < ROW_TILES; rt++) {
        UNROLL for (int half = 0; half < 2; half++) {
            float top = -infinity();
            UNROLL for (int n = 0; n < KEYS / 8; n++) {
                top = fmaxf(top, fmaxf(s[rt][n][2 * half], s[rt][n][2 * half + 1]));
            }
            top = fmaxf(top, shuffle_xor(top, 1));
            top = fmaxf(m[rt][half], fmaxf(top, shuffle_xor(top, 2)) * (GENERAL ? 1 : scale));
            float base = top == -infinity() ? 0 : top, sum = 0;
            float shrink = exp2_approx((m[rt][half] - base) * (GENERAL ? (float)LOG2_E : 1));
            UNROLL for (int n = 0; n < KEYS / 8; n++) {
                UNROLL for (int x = 2 * half; x < 2 * half + 2; x++) {
                    float& weight = s[rt][n][x];
                    weight = exp2_approx(GENERAL ? (weight - base) * (float)LOG2_E : fmaf(weight, scale, -base));
                    sum += weight;
                }
            }
            m[rt][half] = top;
            z[rt][half] = fmaf(z[rt][half], shrink, sum);
            if (!warp_any(shrink != 1)) continue;
            UNROLL for (int n = 0; n < VALUE_WIDTH / 8; n++) {
                o[rt][n][2 * half] *= shrink;
                o[rt][n][2 * half + 1] *= shrink;
            }
        }
    }
}

// Calls f(row tile, n, element, row, key) for the scores that this lane has.
template <class F> DEVICE void for_each_score(const Row* rows, int j, F f) {
    int lane = thread_x() % 32;
    UNROLL for (int rt = 0; rt < ROW_TILES; rt++) {
        UNROLL for (int half = 0; half < 2; half++) {
            const Row& row = rows[rt * 16 + half * 8 + lane / 4];
            UNROLL for (int n = 0; n < KEYS / 8; n++) {
                UNROLL for (int x = 0; x < 2; x++) f(rt, n, 2 * half + x, row, j + n * 8 + lane % 4 * 2 + x);
            }
        }
    }
}

// Makes weights 0 that dropout drops. Two lanes share the words of four keys: each calls for those of one of two tiles,
// and they change what belongs to the other.
DEVICE void drop(const Parameters& p, float (&s)[ROW_TILES][KEYS / 8][4], u32 b, const Row* rows, int j) {
    int lane = thread_x() % 32;
    int odd = lane % 2;
    UNROLL for (int rt = 0; rt < ROW_TILES; rt++) {
        UNROLL for (int half = 0; half < 2; half++) {
            const Row& row = rows[rt * 16 + half * 8 + lane / 4];
            UNROLL for (int n = 0; n < KEYS / 8; n += 2) {
                Words words = words_of(p, b, row, (u32)(j + (n + odd) * 8) / 4 + lane % 4 / 2);
                u32 own[2] = {odd ? words.third : words.first, odd ? words.fourth : words.second};
                u32 other[2] = {shuffle_xor(odd ? words.first : words.third, 1),
                                shuffle_xor(odd ? words.second : words.fourth, 1)};
                UNROLL for (int x = 0; x < 2; x++) {
                    if ((odd ? other[x] : own[x]) < (u32)p.threshold) s[rt][n][2 * half + x] = 0;
                    if ((odd ? own[x] : other[x]) < (u32)p.threshold) s[rt][n + 1][2 * half + x] = 0;
                }
            }
        }
    }
}

// Writes the tile of outputs, 16 bytes at a time where they lie so.
DEVICE void store_tile(const Parameters& p, const Table& table, const char* tile) {
    constexpr int CHUNKS = VALUE_WIDTH / PER_CHUNK;
    ROLLED for (int x = thread_x(); x < ROWS * CHUNKS; x += THREADS) {
        const Row& row = table.rows[x / CHUNKS];
        int first = x % CHUNKS * PER_CHUNK, count = least(PER_CHUNK, (int)p.Ev - first);
        if (!row.real || count <= 0) continue;
        const char* from = tile + x / CHUNKS * pitch(VALUE_WIDTH) + first * sizeof(Element);
        char* to = place(p, p.out, table.task.b, row.h, row.i) + first * p.out.column;
        if (p.out_chunks) *(Chunk*)to = *(const Chunk*)from;
        else ROLLED for (int e = 0; e < count; e++) *(Element*)(to + e * p.out.column) = ((const Element*)from)[e];
    }
}

KERNEL(attend, 32 * WARPS) {
    Table& table = *(Table*)dynamic_shared();
    char* queries = dynamic_shared() + sizeof(Table);
    char* keys = queries + ROWS * pitch(WIDTH);
    char* values = keys + KEYS * pitch(WIDTH);
    fill_table(p, table);
    int number = thread_x() / 32, lane = thread_x() % 32;
    const Task& task = table.task;
    const Span &block = table.span, &warp = table.spans[number];
    Row* own = table.rows + number * WARP_ROWS;
    char* own_queries = queries + number * WARP_ROWS * pitch(WIDTH);

    auto load_keys = [&](int j) {
        auto row = [&](int r) {
            return j + r < task.last ? row_at(p.key, p.key_storage, task.key, j + r) : nullptr;
        };
        load_tile<KEYS, WIDTH>(keys, row, p.key.numbers.column, (int)p.E);
    };
    auto load_values = [&](int j) {
        auto row = [&](int r) {
            return j + r < task.last ? row_at(p.value, p.value_storage, task.value, j + r) : nullptr;
        };
        load_tile<KEYS, VALUE_WIDTH>(values, row, p.value.numbers.column, (int)p.Ev);
    };
    auto query_row = [&](int r) {
        const Row& row = table.rows[r];
        return row.real ? task.query + row.h * p.query.head + row.i * p.query.row : nullptr;
    };
    load_tile<ROWS, WIDTH>(queries, query_row, p.query.column, (int)p.E);

    const Change change = change_of(p);
    float scale = (float)(p.scale * LOG2_E);
    float o[ROW_TILES][VALUE_WIDTH / 8][4], m[ROW_TILES][2], z[ROW_TILES][2];
    fill(o, 0);
    UNROLL for (int x = 0; x < 2 * ROW_TILES; x++) m[x / 2][x % 2] = -infinity(), z[x / 2][x % 2] = 0;
    bool harmful = false;

    int j = skip(block, task.first), end = end_of_walk(block, task);
    if (j < end) load_keys(j);
    commit_copies();
    while (j < end) {
        float s[ROW_TILES][KEYS / 8][4];
        int next = skip(block, j + KEYS);
        bool seen = touched(warp, j, j + KEYS);
        wait_copies<0>();
        barrier();  // the keys are there, and no warp reads the last values any more
        load_values(j);
        commit_copies();
        if (seen) score<WIDTH>(s, own_queries, keys);
        wait_copies<0>();
        if (!kept_whole(p, block, j)) harmful |= clean_tile<KEYS, VALUE_WIDTH>(values);
        barrier();  // the values are there, and no warp reads these keys any more
        if (next < end) load_keys(next);
        commit_copies();
        if (seen) {
            if (GENERAL) {
                for_each_score(own, j, [&](int rt, int n, int x, const Row& row, int key) {
                    s[rt][n][x] = adjusted(p, change, task.b, row, key, s[rt][n][x]);
                });
            } else if (!complete(warp, j, j + KEYS)) {
                for_each_score(own, j, [&](int rt, int n, int x, const Row& row, int key) {
                    bool kept = (u32)(key - row.start) < (u32)(row.stop - row.start) | key < row.prefix;
                    s[rt][n][x] = kept ? s[rt][n][x] : -infinity();
                });
            }
            soften(s, o, m, z, scale);
            if (DROPOUT) drop(p, s, task.b, own, j);
            mix(o, s, values);
        }
        j = next;
    }
    wait_copies<0>();  // of queries that see no key
    barrier();  // no thread reads a tile after this: the output takes their place

    UNROLL for (int rt = 0; rt < ROW_TILES; rt++) {
        UNROLL for (int half = 0; half < 2; half++) {
            float sum = z[rt][half];
            sum += shuffle_xor(sum, 1);
            sum += shuffle_xor(sum, 2);
            int r = rt * 16 + half * 8 + lane / 4, first = lane % 4 * 2;
            float ratio = leave(p, task, own[r], m[rt][half], sum, lane % 4 == 0);
            float* sums = p.chunks > 1 ? state(p, task.b, own[r].h, own[r].i, task.chunk) + 2 : nullptr;
            bool none = !sums && sum == 0;  // of a chunk, 0 times an infinite value counts
            char* to = queries + (number * WARP_ROWS + r) * pitch(VALUE_WIDTH) + first * sizeof(Element);
            UNROLL for (int n = 0; n < VALUE_WIDTH / 8; n++) {
                int d = n * 8 + first;
                float low = none ? 0 : o[rt][n][2 * half] * ratio;
                float high = none ? 0 : o[rt][n][2 * half + 1] * ratio;
                if (!sums) store_pair(to + n * 8 * sizeof(Element), low, high);
                if (sums && own[r].real && d < (int)p.Ev) sums[d] = low;
                if (sums && own[r].real && d + 1 < (int)p.Ev) sums[d + 1] = high;
            }
        }
    }
    barrier();
    if (p.chunks == 1 && p.out.data) store_tile(p, table, queries);
    if (barrier_any(harmful)) repair(p, table);
}
