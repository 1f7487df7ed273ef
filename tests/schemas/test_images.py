"""Images in prompts: the forms that environments give them in, their places in a segment, and what is refused."""

import base64
import io
from pathlib import Path

import msgspec
import pytest
from PIL import Image

import wire_examples
from penstock.schemas.images import MAX_IMAGE_BYTES, MAX_IMAGES, ImageError, ImagePlace, digest_of, file_of
from penstock.schemas.process.image_files import decoded
from penstock.schemas.prompt import ImagePart, Message, Prompt, TextPart
from penstock.schemas.rollout import RecordError, decode_entry, decode_group, encode_entry, encode_group

PNG = wire_examples.PNG
DIGEST = digest_of(PNG)
URL = "data:image/png;base64," + base64.b64encode(PNG).decode()


def saved(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, format=kind, **options)
    return file.getvalue()


def test_a_message_takes_an_image_in_any_of_the_usual_forms(tmp_path):
    (tmp_path / "two.png").write_bytes(PNG)
    for source in (PNG, URL, str(tmp_path / "two.png"), tmp_path / "two.png", {"bytes": PNG, "path": "gone.png"}):
        for part in (
            {"type": "image", "image": source},
            {"type": "image_url", "image_url": {"url": source}},
            {"type": "input_image", "image_url": source},
        ):
            message = Message(role="user", content=[{"type": "text", "text": "See "}, part])
            assert message.content == (TextPart(text="See "), ImagePart(digest=DIGEST, data=PNG)), part
            assert message.text == "See [image]"
    picture = Image.new("RGB", (3, 2), "red")
    (part,) = Message(role="user", content=[{"type": "image", "image": picture}]).content
    assert decoded(part.data).tobytes() == picture.tobytes()


def test_nothing_is_fetched_and_what_is_no_image_is_named():
    for source, message in [
        ("https://example.org/a.png", "'https://example.org/a.png', expected bytes.*nothing is fetched"),
        ("s3://a/b.png", "nothing is fetched"),
        ("data:text/plain;base64,AA==", "expected data:image/...;base64"),
        ("data:image/png;base64,*", "not Base64"),
        ("/no/such.png", "image file '/no/such.png' that cannot be read"),
        ({"path": None}, "an image as None"),
        (7, "an image as 7"),
    ]:
        with pytest.raises(ImageError, match=message):
            file_of(source)


def test_a_prompt_s_files_go_into_the_group_once_each():
    parts = [{"type": "image", "image": PNG}, {"type": "text", "text": " or "}, {"type": "image", "image": PNG}]
    prompt, files = Prompt(messages=(Message(role="user", content=parts),)).without_files()
    assert files == {DIGEST: PNG}
    assert prompt.images == [ImagePart(digest=DIGEST)] * 2
    assert Prompt(text="1").without_files() == (Prompt(text="1"), {})


PLACE = ImagePlace(DIGEST, 1, 3)


@pytest.mark.parametrize(
    ("places", "images", "message"),
    [
        ((PLACE, ImagePlace(DIGEST, 2, 3)), {DIGEST: PNG}, r"images: \(2, 3\), expected 3 <= start < end <= 6"),
        ((ImagePlace(DIGEST, 1, 7),), {DIGEST: PNG}, r"images: \(1, 7\), expected 0 <= start < end <= 6"),
        ((ImagePlace(DIGEST, 1, 1),), {DIGEST: PNG}, r"images: \(1, 1\)"),
        ((ImagePlace(DIGEST, 2, 4),), {DIGEST: PNG}, r"images: \(2, 4\) holds sampled tokens, expected context"),
        ((ImagePlace("ab", 1, 3),), {DIGEST: PNG}, r"images: no image of the digest 'ab', expected its bytes"),
        ((PLACE,), msgspec.UNSET, f"no image of the digest '{DIGEST}'"),
        ((PLACE,), {DIGEST: PNG, "ab": PNG}, f"images: 72 bytes of the digest {DIGEST}, expected 'ab'"),
        ((PLACE,), {DIGEST: PNG} | {str(n): b"" for n in range(MAX_IMAGES)}, "1,025 images, expected at most 1,024"),
    ],
)
def test_places_that_do_not_fit_the_images_are_refused(places, images, message):
    group = wire_examples.image_group()
    first = group.rollouts[0]
    segment = msgspec.structs.replace(first.segments[0], images=places)
    group = msgspec.structs.replace(
        group, rollouts=(msgspec.structs.replace(first, segments=(segment,)),), images=images
    )
    with pytest.raises(RecordError, match=message):
        decode_group(msgspec.msgpack.encode(group))


def test_a_prompt_whose_image_is_gone_is_refused():
    group = msgspec.structs.replace(wire_examples.image_group(), images=msgspec.UNSET, rollouts=())
    with pytest.raises(RecordError, match=f"prompt: no image of the digest '{DIGEST}'"):
        encode_group(group, dead=True)


def test_a_group_whose_images_do_not_fit_an_entry_is_one_with_its_images(monkeypatch):
    group = wire_examples.image_group()
    assert encode_entry(group) == (encode_group(group), {})
    payload = (Path(__file__).parents[1] / "golden" / "wire" / "group_v1_samplers_images_apart.msgpack").read_bytes()
    monkeypatch.setattr("penstock.schemas.rollout.MAX_ENTRY_BYTES", len(encode_group(group)) - 1)
    assert encode_entry(group) == (payload, {DIGEST: PNG})
    assert decode_entry(payload, image={DIGEST: PNG}.get) == group
    assert decode_entry(payload) == decode_group(payload) == msgspec.structs.replace(group, images={DIGEST: b""})
    assert decode_group(encode_group(group)) == group, "the record holds it whole"
    with pytest.raises(RecordError, match=r"payload: .* bytes, expected at most"):
        decode_entry(encode_group(group))


def test_an_image_whose_bytes_are_gone_is_named_with_its_place():
    group = msgspec.structs.replace(wire_examples.image_group(), images={DIGEST: b""})
    payload, turn = encode_group(group), Prompt(text="2+2=")
    with pytest.raises(RecordError, match=rf"group \d+: prompt: the bytes of the image '{DIGEST}' are gone"):
        decode_entry(payload, image=lambda digest: None)
    with pytest.raises(
        RecordError, match=rf"rollouts\[0\].segments\[0\].images \(1, 3\): the bytes of the image '{DIGEST}'"
    ):
        decode_entry(encode_group(msgspec.structs.replace(group, prompt=turn)), image=lambda digest: None)
    with pytest.raises(RecordError, match=r"images: 5 bytes of the digest .*, expected"):
        decode_entry(payload, image=lambda digest: b"other")


def test_an_image_is_decoded_to_the_pixels_that_a_viewer_shows():
    assert decoded(PNG).tobytes() == bytes([255, 0, 0, 0, 0, 255])
    clear = Image.new("RGBA", (1, 1), (0, 0, 0, 0))
    assert decoded(saved(clear)).getpixel((0, 0)) == (255, 255, 255)
    for mode in ("1", "L", "LA", "P", "CMYK"):
        kind = "JPEG" if mode == "CMYK" else "PNG"
        assert decoded(saved(Image.new(mode, (4, 3)), kind)).mode == "RGB"
    turned = Image.Exif()
    turned[0x0112] = 6
    assert decoded(saved(Image.new("RGB", (4, 2)), "JPEG", exif=turned)).size == (2, 4)


def test_images_that_no_model_should_be_given_are_refused_by_name():
    two = [Image.new("RGB", (2, 2), colour) for colour in ("red", "blue")]
    for data, message in [
        (b"no image", "8 bytes that cannot be decoded .*expected an image file of PNG, JPEG"),
        (PNG[:50], "50 bytes that cannot be decoded"),
        (saved(Image.effect_noise((64, 64), 99), "JPEG")[:-200], "cannot be decoded"),
        (b"x" * (MAX_IMAGE_BYTES + 1), "an image of 16,777,217 bytes, expected at most 16,777,216"),
        (saved(Image.new("1", (8192, 8192))), "8192 x 8192 pixels, expected at most 33,554,432"),
        (saved(Image.new("1", (20000, 20000))), "cannot be decoded .*decompression bomb"),
        (saved(Image.new("I;16", (2, 2))), "mode 'I;16', expected one of 1, L"),
        (saved(two[0], "GIF", save_all=True, append_images=two[1:]), "an animated image of 2 frames"),
        (saved(two[0], "TIFF"), "cannot be decoded"),
    ]:
        with pytest.raises(ImageError, match=message):
            decoded(data)
