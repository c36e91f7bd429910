// score_mod.h: the function of the user's that changes each score, SCORE_MOD, as statements that tracing.py writes. They
// read s, b, h, i and j and the numbers of `p.constants`, and have the types and the rounding of NumPy on arrays.
#pragma once
#include "numbers.h"

#ifdef SCORE_MOD
template <class T> DEVICE T magnitude(T x) { return x < 0 ? -x : x == 0 ? 0 : x; }  // of -0, too
template <class T> DEVICE T greater_of(T a, T b) { return a != a || a > b ? a : b; }  // NaN where one is
template <class T> DEVICE T lesser_of(T a, T b) { return a != a || a < b ? a : b; }
DEVICE i64 modulo(i64 a, i64 b) {  // with the sign of b
    i64 rest = b == 0 || b == -1 ? 0 : a % b;
    return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}
DEVICE i64 quotient(i64 a, i64 b) { return b == 0 ? 0 : b == -1 ? -a : (a - modulo(a, b)) / b; }
DEVICE float exponential(float x) { return expf(x); }
DEVICE double exponential(double x) { return exp(x); }
DEVICE float square_root(float x) { return sqrtf(x); }
DEVICE double square_root(double x) { return sqrt(x); }

DEVICE Number modified(const Parameters& p, Number s, i64 b, i64 h, i64 i, i64 j) { SCORE_MOD }
#else
DEVICE Number modified(const Parameters& p, Number s, i64 b, i64 h, i64 i, i64 j) { return s; }
#endif
