"""How pieces of a kernel are compiled, for which processor, and where compiled kernels are kept."""
