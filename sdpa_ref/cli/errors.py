"""What a command raises to end with a message instead of a traceback."""


class UsageError(Exception):
    """The command was called wrongly: exit code 2."""


class Failure(Exception):
    """The command was called well but cannot do its work here: exit code 1."""
