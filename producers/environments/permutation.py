"""A keyed permutation of 0 to n - 1, computed for one place at a time: a shuffled order without state."""

import hashlib

_ROUNDS = 6


def task_of(index: int, num_tasks: int, seed: int) -> int:
    """Returns the task, from 0, of the run's `index`, from 1: each task once per epoch, in an order of that epoch's."""
    epoch, place = divmod(index - 1, num_tasks)
    return permuted(place, num_tasks, seed, epoch)


def permuted(place: int, size: int, *key: str | int) -> int:
    """Returns where `place` of `size` goes under the permutation that `key` names; the same on every machine.

    A Feistel network over the smallest domain of an even number of bits that holds `size`, whose round function is
    BLAKE2b (Luby and Rackoff, 1988), walked until it falls below `size` (cycle walking: Black and Rogaway, Ciphers with
    Arbitrary Finite Domains, 2002). The domain is less than four times as large: the mean walk takes at most 4 steps.

    Raises:
        ValueError: place is not from 0 to size - 1.
    """
    if not 0 <= place < size:
        raise ValueError(f"place = {place}, expected 0 to {size - 1}")
    bits = max(1, ((size - 1).bit_length() + 1) // 2)
    name, mask = repr(key).encode(), (1 << bits) - 1
    while True:
        left, right = place >> bits, place & mask
        for number in range(_ROUNDS):
            digest = hashlib.blake2b(b"%d:%d:" % (number, right) + name, digest_size=8).digest()
            left, right = right, left ^ int.from_bytes(digest) & mask
        place = left << bits | right
        if place < size:
            return place
