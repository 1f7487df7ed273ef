"""Living through an outage of Redis: what producer and trainer share."""


class RedisGoneError(RuntimeError):
    """Redis stayed away longer than the run file allows, or refuses this process."""
