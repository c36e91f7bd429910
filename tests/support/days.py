"""What runs every day, and what only in the nightly profile."""

from itertools import product

from hypothesis import settings

NIGHTLY = settings.default.max_examples >= 1000


def crossed(*lists):
    """Return all combinations of values; by day so many that each value is there, side by side with several others."""
    lists = [list(values) for values in lists]
    if NIGHTLY:
        return list(product(*lists))
    return [tuple(values[i % len(values)] for values in lists) for i in range(max(map(len, lists)))]
