"""One function of scores for all tests that want one, compiled: for each there is a kernel of its own."""

import numba


def tilt(s, b, h, i, j):
    return 0.5 * s + (0.01 + 0.002 * h - 0.003 * b) * (i - j)


def slope(s, b, h, i, j):
    return 0.5 + 0 * s


compiled = numba.njit(tilt)
compiled.derivative = numba.njit(lambda s, b, h, i, j: 0.5)
