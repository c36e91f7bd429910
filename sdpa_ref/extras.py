"""How to install an optional part of the package."""


def install(extra: str) -> str:
    """Return the commands that install an extra, from an index and in a checkout.

    Parameters
    ----------
    extra : str
        Its name in ``pyproject.toml``.

    Examples
    --------
    >>> install("numba")
    'pip install "sdpa-ref[numba]" (in a checkout: pip install -e ".[numba]")'
    """
    return f'pip install "sdpa-ref[{extra}]" (in a checkout: pip install -e ".[{extra}]")'
