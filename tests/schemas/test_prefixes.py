"""Longest common prefixes, against the obvious way to find them."""

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.schemas.prefixes import PrefixTrie, num_shared
from penstock.schemas.rollout import pack_ids

texts = st.text("ab", max_size=20)
sequences = st.lists(st.sampled_from([0, 1, 256, 2**31 - 1]), max_size=8)


@settings(deadline=None, derandomize=True)
@given(texts, texts)
def test_the_shared_prefix_is_as_long_as_it_looks(left, right):
    shared = 0
    while shared < min(len(left), len(right)) and left[shared] == right[shared]:
        shared += 1
    assert num_shared(left, right) == shared
    assert num_shared(left.encode(), right.encode()) == shared
    assert num_shared(list(left.encode()), list(right.encode())) == shared


@settings(deadline=None, derandomize=True)
@given(st.lists(sequences.filter(bool), max_size=12), sequences)
def test_the_trie_finds_the_longest_prefix_and_of_equals_the_latest(inserted, wanted):
    trie = PrefixTrie()
    for n, sequence in enumerate(inserted):
        trie.insert(pack_ids(sequence), n)
    prefixes = [(len(sequence), n) for n, sequence in enumerate(inserted) if wanted[: len(sequence)] == sequence]
    assert trie.longest_prefix(pack_ids(wanted)) == (max(prefixes)[1] if prefixes else None)
