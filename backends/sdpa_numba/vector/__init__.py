"""LLVM for Numba: vectors, memory that threads share, and the two pieces of unrolled code."""
