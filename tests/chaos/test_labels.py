"""The comparison of labels: which notes of trainers and engines count as a violation."""

import pytest
import torch

from tests.chaos.labels import digest, judge_labels, note

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros((), dtype=torch.bfloat16)}


def test_engines_that_held_what_was_published_are_as_they_must_be(tmp_path):
    file = tmp_path / "labels"
    for version in (3, 4):
        note(file, "published", version, str(version))
    for version in (3, 4, 4):
        note(file, "held", version, str(version))
    assert judge_labels(file) == (3, [])


def test_a_label_over_other_weights_is_complained_of(tmp_path):
    file = tmp_path / "labels"
    for version in (3, 4):
        note(file, "published", version, str(version))
    note(file, "held", 4, "3")
    note(file, "held", 9, "9")
    _, (problem,) = judge_labels(file)
    assert problem == "2 versions held with other bits than were published: 4, 9"


def test_a_version_with_two_contents_is_complained_of(tmp_path):
    file = tmp_path / "labels"
    note(file, "published", 3, "a")
    note(file, "published", 3, "b")
    assert judge_labels(file)[1] == ["a version was published with two contents"]


def test_without_a_trainer_that_notes_nothing_is_said(tmp_path):
    assert judge_labels(tmp_path / "labels") == (0, [])
    note(tmp_path / "labels", "held", 3, "a")
    assert judge_labels(tmp_path / "labels") == (1, [])


@pytest.mark.parametrize("change", ["bit", "sign of zero", "name", "shape", "type"])
def test_any_difference_is_another_digest(change):
    other = {name: tensor.clone() for name, tensor in WEIGHTS.items()}
    if change == "bit":
        other["a"][1, 2] = torch.nextafter(other["a"][1, 2], torch.tensor(9.0))
    elif change == "sign of zero":
        other["b"] = -other["b"]
    elif change == "name":
        other["c"] = other.pop("b")
    elif change == "shape":
        other["a"] = other["a"].reshape(3, 2)
    else:
        other["b"] = other["b"].to(torch.float16)
    assert digest(other) != digest(WEIGHTS)
    assert digest(dict(reversed(WEIGHTS.items()))) == digest(WEIGHTS)
