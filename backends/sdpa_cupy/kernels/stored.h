// stored.h: where keys and values lie: in a dense array, in pages that a table lists, or as codes with scales.
//
// Specialised by STORED: 0 where both are dense, 1 where pages of Element are among them, 2 where there are codes, or
// pages of another type. A code means scale * (code - zero) + offset, every operation rounded once.
#pragma once
#include "numbers.h"

struct Side {  // keys or values of a batch item and a head
    const char *numbers, *table, *scale, *offset;
};

DEVICE const char* side_view(const Parameters& p, const View& view, u32 b, i64 head) {
    return view.data ? view.data + batch_offset(p, view, b) + head * view.head : nullptr;
}
DEVICE Side side_of(const Parameters& p, const Source& source, u32 b, i64 head) {
    Side side = {source.numbers.data + batch_offset(p, source.numbers, b) + head * source.numbers.head};
    if (STORED) side.table = side_view(p, source.table, b, 0);
    if (STORED == 2) side.scale = side_view(p, source.scale, b, head), side.offset = side_view(p, source.offset, b, head);
    return side;
}

struct Place {
    int page, slot;
};
DEVICE Place place_of(const Source& source, const Storage& storage, const Side& side, int j) {
    if (!STORED || !side.table) return {0, j};
    i64 page = *(const i64*)(side.table + j / (int)storage.page * source.table.row);
    return {(int)page, j % (int)storage.page};
}

// Returns where the numbers of key j begin.
DEVICE const char* row_at(const Source& source, const Storage& storage, const Side& side, int j) {
    Place at = place_of(source, storage, side, j);
    return side.numbers + (STORED ? at.page * storage.leap : 0) + at.slot * source.numbers.row;
}

#if STORED == 2

DEVICE float e4m3(u32 code) {
    u32 low = code & 127;
    float normal = float_of(((low >> 3) + 120) << 23 | (low & 7) << 20), subnormal = (float)(int)low * 0.001953125f;
    float magnitude = low == 127 ? float_of(0x7fc00000u) : low < 8 ? subnormal : normal;
    return code & 128 ? -magnitude : magnitude;
}

// Returns number e of a row, of the type by its place in CODES of stored.py.
DEVICE Number code_at(const char* row, i64 step, i64 type, int e) {
    if (type < 4) return load_any(row + e * step, type);
    u32 code = *(const u8*)(row + (type == 8 ? e / 2 : e) * step);
    if (type == 8) return (Number)(int)(e % 2 ? code >> 4 : code & 15);
    if (type == 4) return (Number)((int)(code ^ 128) - 128);
    if (type == 5) return (Number)(int)code;
    return type == 6 ? (Number)e4m3(code) : (Number)to_float(half{(u16)(code << 8)});
}

DEVICE Number served(const View& view, const Serving& by, const char* base, Place at, int e) {
    i64 place = at.page / (int)by.pages * by.leap + at.slot / (int)by.keys * view.row;
    return load_any(base + place + e / (int)by.columns * view.column, by.type);
}

#endif

// Returns number e of key j.
DEVICE Number number_at(const Source& source, const Storage& storage, const Side& side, int j, int e) {
#if STORED == 2
    Place at = place_of(source, storage, side, j);
    const char* row = side.numbers + at.page * storage.leap + at.slot * source.numbers.row;
    Number number = code_at(row, source.numbers.column, storage.type, e);
    if (!side.scale) return number;
    number = served(source.scale, storage.scale, side.scale, at, e) * (number - (Number)(int)storage.zero);
    return side.offset ? number + served(source.offset, storage.offset, side.offset, at, e) : number;
#else
    return load<Element>(row_at(source, storage, side, j) + e * source.numbers.column);
#endif
}
DEVICE Number key_number(const Parameters& p, const Side& key, int j, int e) {
    return number_at(p.key, p.key_storage, key, j, e);
}
DEVICE Number value_number(const Parameters& p, const Side& value, int j, int e) {
    return number_at(p.value, p.value_storage, value, j, e);
}
