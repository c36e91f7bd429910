// tiles.h: rows of Q, K or V in shared memory, as they are stored, filled up with zeroes to whole tiles.
#pragma once
#include "numbers.h"

constexpr int PER_CHUNK = 16 / (int)sizeof(Element);

// Bytes from one row to the next. A row is an even number of chunks; one more keeps the eight rows that ldmatrix reads
// at a time in different banks.
DEVICE constexpr int pitch(int width) { return width * (int)sizeof(Element) + 16; }

// Returns `count` numbers that lie `step` bytes apart.
DEVICE Chunk gather(const char* source, i64 step, int count) {
    union {
        Chunk chunk;
        Element numbers[PER_CHUNK];
    } all = {};
    UNROLL for (int x = 0; x < PER_CHUNK; x++) {
        if (x < count) all.numbers[x] = *(const Element*)(source + x * step);
    }
    return all.chunk;
}

// Copies `width` numbers of each row to a tile, asynchronously where plan and device allow. `row(r)` is the address of
// the first one, null for a row of zeroes. Where threads carry the numbers, several loads are under way before a store.
template <int LINES, int COLUMNS, class Source>
DEVICE void load_tile(char* tile, Source row, i64 column, int width) {
    constexpr int CHUNKS = COLUMNS / PER_CHUNK, ALL = LINES * CHUNKS;
    auto source = [&](int x) {  // of chunk x, null for zeroes
        const char* first = row(x / CHUNKS);
        int skipped = x % CHUNKS * PER_CHUNK;
        return first && skipped < width ? first + skipped * column : nullptr;
    };
    auto target = [&](int x) { return (Chunk*)(tile + x / CHUNKS * pitch(COLUMNS) + x % CHUNKS * 16); };
#if VECTOR && !TURING
    ROLLED for (int x = thread_x(); x < ALL; x += THREADS) {
        const char* from = source(x);
        if (from) copy_async_16(target(x), from);
        else *target(x) = {};
    }
#else
    constexpr int HELD = VECTOR ? 4 : 1;
    ROLLED for (int x = thread_x(); x < ALL; x += HELD * THREADS) {
        Chunk held[HELD] = {};
        UNROLL for (int n = 0; n < HELD; n++) {
            int y = x + n * THREADS;
            const char* from = y < ALL ? source(y) : nullptr;
            if (from) held[n] = VECTOR ? *(const Chunk*)from : gather(from, column, width - y % CHUNKS * PER_CHUNK);
        }
        UNROLL for (int n = 0; n < HELD; n++) {
            if (x + n * THREADS < ALL) *target(x + n * THREADS) = held[n];
        }
    }
#endif
}

// Returns one number of 32 bits or two of 16, with 0 for what is not finite.
DEVICE u32 finite_part(u32 word) {
    constexpr u32 LOW = ELEMENT == 0 ? 0x7c00u : 0x7f80u, HIGH = ELEMENT == 2 ? 0x7f800000u : LOW << 16;
    if (ELEMENT == 2) return (word & HIGH) == HIGH ? 0 : word;
    return word & (((word & LOW) == LOW ? 0 : 0xffffu) | ((word & HIGH) == HIGH ? 0 : 0xffff0000u));
}

// Zeroes what is not finite among the numbers that this thread has loaded; returns whether there was any. A key that a
// row drops has weight 0 there, but 0 times infinity would be NaN. `repair` is for the rows that see it.
template <int LINES, int COLUMNS> DEVICE bool clean_tile(char* tile) {
    constexpr int CHUNKS = COLUMNS / PER_CHUNK;
    bool found = false;
    ROLLED for (int x = thread_x(); x < LINES * CHUNKS; x += THREADS) {
        Chunk* at = (Chunk*)(tile + x / CHUNKS * pitch(COLUMNS) + x % CHUNKS * 16);
        Chunk chunk = *at;
        u32 upper[2] = {chunk.words[1], chunk.words[3]};  // halves of doubles
        bool bad = false;
        UNROLL for (int w = 0; w < 4; w++) {
            u32 kept = finite_part(chunk.words[w]);
            if (ELEMENT == 3) kept = (upper[w / 2] & 0x7ff00000u) == 0x7ff00000u ? 0 : chunk.words[w];
            bad |= kept != chunk.words[w];
            chunk.words[w] = kept;
        }
        if (bad) *at = chunk;
        found |= bad;
    }
    return found;
}

#if ELEMENT != 3

struct alignas(8) Pair {
    float low, high;
};

// Stores two neighbours of a row of a tile.
DEVICE void store_pair(char* to, float low, float high) {
#if ELEMENT == 2
    *(Pair*)to = {low, high};
#else
    *(u32*)to = pack2(low, high, Element());
#endif
}

#endif
