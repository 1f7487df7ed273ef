"""The one exception of the parity check."""


class ParityError(ValueError):
    """The check cannot be made; the message says what is missing and what was expected."""
