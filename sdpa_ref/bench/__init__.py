"""What ``sdpa-ref bench`` measures: the cases, the libraries it compares with, and the clock."""
