"""The kernels: `few_rows`, `many_rows` and `backward` are compiled as a whole, the others are their parts."""
