// rows.h: which query rows a block has, which keys they see, and the walk over the tiles of keys that some row sees.
#pragma once
#include "stored.h"

struct Row {
    int prefix, start, stop;  // sees keys [0, prefix) and [start, stop)
    int h, i;                 // head and index
    int real;                 // 0: a copy of the last row that fills up the tile
    const char *dense, *bias;
    i64 position;
    Number slope;
    Number m;  // its largest score, in the end
    char odd[24 - 2 * sizeof(Number)];  // so that eight neighbours lie in different banks
};

struct Span {  // over several rows
    int prefix_least, prefix_most, start_least, start_most, stop_least, stop_most;
};

struct Task {  // of a block
    const char* query;  // of its batch item
    Side key, value;    // of that and its key head
    u32 b;
    int head, tile, chunk;  // first head, number of the tile of rows and of the chunk of keys
    int first, last;        // the chunk has the keys [first, last)
};

static_assert(sizeof(Task) == 96 && sizeof(Span) == 24 && sizeof(Row) == 72, "TASK_, SPAN_ and ROW_BYTES of plan.py");

DEVICE Task take_task(const Parameters& p) {
    Task task;
    u32 index = (u32)block_x(), heads = (u32)(p.Hq / p.fold);
    task.chunk = index % (u32)p.chunks;
    index /= (u32)p.chunks;
    task.tile = (int)((u32)p.tiles - 1 - index % (u32)p.tiles);  // under a causal mask the last tiles take longest
    index /= (u32)p.tiles;
    task.b = index / heads;
    task.head = (int)(index % heads * (u32)p.fold);
    task.first = (int)(task.chunk * p.chunk);
    task.last = (int)(task.first + p.chunk < p.S ? task.first + p.chunk : p.S);
    i64 kv = task.head / (int)p.group;
    task.query = p.query.data + batch_offset(p, p.query, task.b);
    task.key = side_of(p, p.key, task.b, kv);
    task.value = side_of(p, p.value, task.b, kv);
    return task;
}

DEVICE int look(const Parameters& p, const View& view, u32 b, int i, i64 otherwise) {
    return (int)(view.data ? *(const i64*)(view.data + batch_offset(p, view, b) + i * view.row) : otherwise);
}

DEVICE i64 least_of(i64 a, i64 b) { return a < b ? a : b; }
DEVICE i64 most_of(i64 a, i64 b) { return a > b ? a : b; }
DEVICE int key_of(i64 bound, i64 S) { return (int)least_of(most_of(bound, 0), S); }

// Sets which of S keys a row sees, as `Band.intervals` of the core does.
DEVICE void lay(Row& row, const Band& band, i64 S) {
    constexpr i64 FAR = 1ll << 41;
    i64 at = row.i + band.offset, begin = most_of(band.start, at - band.left);
    if (band.chunk < FAR) begin = most_of(begin, at - (at % band.chunk + band.chunk) % band.chunk);
    bool valid = row.i < band.rows;
    row.start = key_of(begin, S);
    row.stop = valid ? key_of(least_of(band.stop, most_of(band.floor, at + band.right + 1)), S) : 0;
    row.prefix = valid && band.first ? key_of(least_of(band.first, at + band.reach + 1), S) : 0;
    if (row.start >= row.stop) {
        row.start = row.stop = 0;
    } else if (row.prefix > 0 && row.start <= row.prefix) {  // they touch: one interval
        row.stop = row.stop > row.prefix ? row.stop : row.prefix;
        row.prefix = row.start = 0;
    }
}

// Returns row number `index` of those that share tiles.
DEVICE Row make_row(const Parameters& p, u32 b, int head, int index) {
    Row row;
    int rows = (int)(p.fold * p.L);
    row.real = index < rows;
    index = row.real ? index : rows - 1;
    row.h = head + index / (int)p.L;
    row.i = index % (int)p.L;
    if (p.banded) {
        lay(row, p.band, p.S);
    } else if (p.bands) {
        lay(row, p.bands[b], p.S);
    } else {
        row.prefix = look(p, p.prefix, b, row.i, 0);
        row.start = look(p, p.start, b, row.i, 0);
        row.stop = look(p, p.stop, b, row.i, p.S);
    }
    i64 dense = batch_offset(p, p.dense, b) + row.h * p.dense.head + row.i * p.dense.row;
    i64 bias = batch_offset(p, p.bias, b) + row.h * p.bias.head + row.i * p.bias.row;
    row.dense = p.dense.data ? p.dense.data + dense : nullptr;
    row.bias = p.bias.data ? p.bias.data + bias : nullptr;
    row.slope = 0;
    row.position = 0;
    if (p.slopes.data) {
        row.slope = load<double>(p.slopes.data + batch_offset(p, p.slopes, b) + row.h * p.slopes.head);
        const char* at = p.position.data + batch_offset(p, p.position, b) + row.i * p.position.row;
        row.position = p.position.data ? *(const i64*)at : p.place + row.i;
    }
    row.m = 0;
    return row;
}

DEVICE int least(int a, int b) { return a < b ? a : b; }
DEVICE int most(int a, int b) { return a > b ? a : b; }

DEVICE Span joined(Span a, Span b) {
    return {least(a.prefix_least, b.prefix_least), most(a.prefix_most, b.prefix_most),
            least(a.start_least, b.start_least),   most(a.start_most, b.start_most),
            least(a.stop_least, b.stop_least),     most(a.stop_most, b.stop_most)};
}

// The description of a block's work. It is in shared memory, as registers are few.
struct alignas(16) Table {
    Task task;
    Span span, spans[WARPS];  // of all rows, and of each warp's
    Row rows[ROWS];
};

// Fills the table, a row a thread, and ends with a barrier.
DEVICE void fill_table(const Parameters& p, Table& table) {
    static_assert(WARP_ROWS <= 32, "a row a lane");
    Task task = take_task(p);
    int warp = thread_x() / 32, lane = thread_x() % 32, r = warp * WARP_ROWS + lane % WARP_ROWS;
    Row row = make_row(p, task.b, task.head, task.tile * ROWS + r);
    if (lane < WARP_ROWS) table.rows[r] = row;
    int start = row.start < row.stop ? row.start : 1 << 30;  // an empty interval begins nowhere
    Span span = {row.prefix, row.prefix, start, row.start, row.stop, row.stop};
    UNROLL for (int mask = 1; mask < WARP_ROWS; mask *= 2) {
        Span other = {shuffle_xor(span.prefix_least, mask), shuffle_xor(span.prefix_most, mask),
                      shuffle_xor(span.start_least, mask),  shuffle_xor(span.start_most, mask),
                      shuffle_xor(span.stop_least, mask),   shuffle_xor(span.stop_most, mask)};
        span = joined(span, other);
    }
    if (lane == 0) table.spans[warp] = span;
    barrier();
    if (thread_x() == 0) {
        for (int w = 0; w < WARPS; w++) span = joined(span, table.spans[w]);
        table.span = span;
        table.task = task;
    }
    barrier();
}

// Returns whether every row sees all of the keys [j, end), and whether some row may see one of them.
DEVICE bool complete(const Span& span, int j, int end) {
    return span.prefix_least >= end || (span.start_most <= j && span.stop_least >= end);
}
DEVICE bool touched(const Span& span, int j, int end) {
    return span.prefix_most > j || (span.start_least < end && span.stop_most > j);
}

// Returns the first key, at j or later, of a tile of KEYS keys that some row sees; j is a multiple of KEYS.
DEVICE int skip(const Span& span, int j) {
    return j < span.prefix_most ? j : most(j, span.start_least / KEYS * KEYS);
}
DEVICE int end_of_walk(const Span& span, const Task& task) {
    return least(most(span.prefix_most, span.stop_most), task.last);
}
