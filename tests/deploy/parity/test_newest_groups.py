"""A run's newest groups, as `penstock parity` reads them beside its trainer."""

import fakeredis
from msgspec.structs import replace

from penstock.deploy.parity.inputs import _NewestGroups
from penstock.schemas.images import digest_of
from penstock.schemas.keys import Field, Keys, Kind
from penstock.schemas.rollout import encode_group
from wire_examples import PNG, image_group

KEYS = Keys("test")


def test_groups_are_read_with_the_images_that_are_beside_their_entries():
    client, group, digest = fakeredis.FakeRedis(), image_group(), digest_of(PNG)
    apart = encode_group(replace(group, images={digest: b""}))
    client.hset(KEYS.images, f"a/{digest}", PNG)
    for name, payload in (("a", apart), ("gone", apart), ("", encode_group(group))):
        fields = {Field.INDEX: group.index, Field.KIND: Kind.GROUP, Field.PAYLOAD: payload}
        client.xadd(KEYS.rollouts, fields | ({Field.IMAGES: f"{name} {digest}"} if name else {}))
    newest = _NewestGroups(client, KEYS, 8)
    newest.read(None)
    assert list(newest.groups) == [group, group] and (newest.num_seen, newest.num_refused) == (3, 1)
    assert newest.refusal == f"group {group.index}: prompt: the bytes of the image '{digest}' are gone"
