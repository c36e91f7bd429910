// parameters.h: the one argument of all kernels, field by field the dtype PARAMETERS of plan.py, of 8 bytes each.
#pragma once
#include "hardware.h"

constexpr int AXES = 8;  // leading axes, at most
constexpr int CONSTANTS = 24;  // of the user's function, at most

struct View {  // an array that broadcasts to (*batch, heads, rows, columns); strides in bytes, data null where absent
    char* data;
    i64 batch[AXES], head, row, column;
};

struct Source {  // keys or values, see stored.h: a dense array, or pages and codes
    View numbers;        // heads Hkv, rows S or those of a page, columns E or Ev
    View table;          // int64 (*batch, pages of an item)
    View scale, offset;  // of codes
};
struct Serving {  // scale or offset: type, bytes from page to page, how many pages, keys and columns one number serves
    i64 type, leap, pages, keys, columns;
};
struct Storage {
    i64 page, leap, type, zero;  // keys of a page, bytes from page to page; type of the codes, and which of them is 0
    Serving scale, offset;
};

struct Band {  // what rows see as numbers, see band.py of the core
    i64 offset, start, stop, left, right, floor, chunk, first, reach, rows;
};

struct Parameters {
    View query;                          // heads Hq, rows L, columns E
    Source key, value;
    View out;                            // heads Hq, rows L, columns Ev
    View lse, weights, m, z;             // (*batch, Hq, L), but for weights (*batch, Hq, L, S); see states.h
    View prefix, start, stop, position;  // int64 (*batch, L)
    View dense, bias;                    // bool and float (*batch, Hq, L, S)
    View slopes, sink;                   // float64 (*batch, Hq) and (Hq,)
    char* workspace;                     // states of chunks of keys, see states.h
    const Band* bands;                   // a band of each batch entry, in the place of `band`, where they differ
    i64 out_chunks;                      // whether rows of `out` can be written 16 bytes at a time
    i64 sizes[AXES], axes;               // of the batch
    i64 B, Hq, Hkv, L, S, E, Ev, group;
    i64 first_row, first_key, first_head, first_entry;  // of the caller's problem, as dropout counts
    i64 fold;                              // heads whose rows share tiles: 1 or the group
    i64 tiles, chunks, chunk;              // tiles of the rows of such heads, chunks of keys, keys of a chunk
    i64 threshold, seed_low, seed_high;    // of dropout
    i64 place;                             // of row 0 among the keys, where `position` is absent
    i64 banded;                            // whether `band` says what rows see; else `bands`, or prefix, start and stop
    Band band;
    double scale, softcap, dropout_factor;  // dropout_factor 1 without
    double unit;                           // a row's maximum, times this, is an exponent of 2
    double constants[CONSTANTS];           // of the user's function, see score_mod.h
    Storage key_storage, value_storage;    // where they are not dense
#ifdef GRADIENTS
    View grad, grad_lse;        // what flows in: heads Hq, rows L, columns Ev; numbers (*batch, Hq, L)
    View d_query, d_key, d_value, d_bias;  // in the type of sums: as query, key, value and bias, of all heads and entries
#endif
};

// Returns the offset of batch item b.
DEVICE i64 batch_offset(const Parameters& p, const View& view, u32 b) {
    i64 offset = 0;
    ROLLED for (int axis = (int)p.axes - 1; axis >= 0; axis--) {
        offset += b % (u32)p.sizes[axis] * view.batch[axis];
        b /= (u32)p.sizes[axis];
    }
    return offset;
}
