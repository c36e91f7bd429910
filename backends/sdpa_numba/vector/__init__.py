"""LLVM for Numba: vectors, memory that threads share, and unrolled code."""
