"""The one error that a user can cause and mend."""


class InputError(ValueError):
    """Bad input: one line that says what was found, where, and what would be right.

    Raised before anything is computed or written. The command line prints it as
    `error: ...` and exits with code 2; Python callers may catch it as a `ValueError`.
    """
