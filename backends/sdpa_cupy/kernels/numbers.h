// numbers.h: the types of a kernel's numbers and what both of its accumulation types can do.
//
// Every kernel says before how its blocks are made: WARPS, ROWS (query rows of all warps) and KEYS (of a tile).
#pragma once
#include "parameters.h"

#if ELEMENT == 0
typedef half Element;
typedef float Number;  // what scores, sums and outputs are accumulated in
#elif ELEMENT == 1
typedef bfloat Element;
typedef float Number;
#elif ELEMENT == 2
typedef float Element;
typedef float Number;
#else
typedef double Element;
typedef double Number;
#endif

constexpr int THREADS = 32 * WARPS, WARP_ROWS = ROWS / WARPS;
constexpr double LOG2_E = 1.4426950408889634, LN_2 = 0.6931471805599453;

DEVICE float infinity() { return float_of(0x7f800000u); }
DEVICE float largest(float) { return float_of(0x7f7fffffu); }
DEVICE double largest(double) { return 1.7976931348623157e308; }

DEVICE Number widen(half x) { return to_float(x); }
DEVICE Number widen(bfloat x) { return to_float(x); }
DEVICE Number widen(float x) { return x; }
DEVICE Number widen(double x) {  // finite stays finite
    Number most = largest(Number());
    return x > most && x < infinity() ? most : x < -most && x > -infinity() ? -most : (Number)x;
}
DEVICE void narrow(half& y, Number x) { from_float(y, (float)x); }
DEVICE void narrow(bfloat& y, Number x) { from_float(y, (float)x); }
DEVICE void narrow(float& y, Number x) { y = (float)x; }
DEVICE void narrow(double& y, Number x) { y = x; }

template <class T> DEVICE Number load(const char* at) { return widen(*(const T*)at); }
// Types: 0 half, 1 bfloat, 2 float, 3 double.
DEVICE Number load_any(const char* at, i64 type) {
    return type == 0 ? load<half>(at) : type == 1 ? load<bfloat>(at) : type == 2 ? load<float>(at) : load<double>(at);
}
DEVICE void store(char* at, Number x) { narrow(*(Element*)at, x); }

DEVICE bool is_finite(float x) { return (bits_of(x) & 0x7f800000u) != 0x7f800000u; }
DEVICE bool is_finite(double x) { return x - x == 0; }
DEVICE float maximum(float a, float b) { return fmaxf(a, b); }  // the other one where one is NaN
DEVICE double maximum(double a, double b) { return fmax(a, b); }
DEVICE float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
DEVICE double multiply_add(double a, double b, double c) { return fma(a, b, c); }
DEVICE float power_of_2(float x) { return exp2_approx(x); }
DEVICE double power_of_2(double x) { return exp2(x); }
DEVICE float logarithm(float x) { return logf(x); }
DEVICE double logarithm(double x) { return log(x); }
DEVICE float hyperbolic_tangent(float x) { return tanhf(x); }
DEVICE double hyperbolic_tangent(double x) { return tanh(x); }
