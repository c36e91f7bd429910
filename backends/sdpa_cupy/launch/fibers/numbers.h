// The types that C++ does not have, as bits.
#pragma once

namespace fibers {

using Half = unsigned short;

inline unsigned bits_of(float x) {
    unsigned u;
    __builtin_memcpy(&u, &x, sizeof u);
    return u;
}

inline float float_of(unsigned u) {
    float x;
    __builtin_memcpy(&x, &u, sizeof x);
    return x;
}

inline float from_half(Half h) {
    unsigned magnitude = (h & 0x7fffu) << 13, sign = (h & 0x8000u) << 16;
    if ((h & 0x7c00) == 0x7c00) return float_of(sign | 0x7f800000u | magnitude);
    return float_of(sign | bits_of(float_of(magnitude) * 0x1p112f));
}

inline Half to_half(float x) {
    unsigned u = bits_of(x), sign = u >> 16 & 0x8000;
    u &= 0x7fffffff;
    if (u > 0x7f800000) return 0x7fff;
    if (u >= 0x477ff000) return Half(sign | 0x7c00);  // 65520 and more round to infinity
    if (u < 0x38800000) return Half(sign | (bits_of(float_of(u) + 0.5f) - 0x3f000000));  // rounded by the sum
    return Half(sign | (u + 0xfff + (u >> 13 & 1) - 0x38000000) >> 13);
}

inline float from_bfloat(Half h) { return float_of(unsigned(h) << 16); }

inline Half to_bfloat(float x) {
    unsigned u = bits_of(x);
    return (u & 0x7fffffff) > 0x7f800000 ? 0x7fff : Half((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

// Rounded to 10 bits of fraction, ties away from zero.
inline unsigned to_tf32(float x) {
    unsigned u = bits_of(x);
    return (u & 0x7fffffff) >= 0x7f800000 ? u : (u + 0x1000) & 0xffffe000u;
}

}  // namespace fibers
