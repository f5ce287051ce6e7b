"""Errors whose message is one sentence for the user, and exit code 2."""


class ConfigError(ValueError):
    """A configuration that says what cannot be done."""


class LedgerError(RuntimeError):
    """A ledger that cannot be used as it is."""
