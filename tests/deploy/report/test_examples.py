"""The report's answers, from the record: the best and the worst of each group, its images, untrusted text as text."""

from pathlib import Path

import pytest
from msgspec.structs import replace

import wire_examples
from inspected_run import (
    HOSTILE_TEXT,
    KNOWN,
    NAME,
    entry_of,
    hostile,
    inspected_run,
    settings,
    skipped,
    trainer_files,
    write_batch,
)
from parsed_page import ParsedPage
from penstock.deploy.launch.run_folder import save_run_file
from penstock.deploy.report import examples as module
from penstock.deploy.report.examples import examples
from penstock.deploy.report.report import write_report
from penstock.schemas.prompt import Reward
from penstock.schemas.record import SegmentFindings


def test_the_last_batch_has_its_best_and_worst_answers(tmp_path: Path) -> None:
    inspected_run(tmp_path)
    page = ParsedPage(examples(tmp_path / NAME, settings(tmp_path)))
    assert page.texts[:2] == ["Answers of update 11", f"Group {KNOWN}"] and "skipped" not in page.text
    known = page.texts[2 : page.texts.index("Group 102")]
    assert known == ["2+2=", "reward 1", "abcdef", "reward 0.25", "éé"]
    assert page.texts[-2:] == ["reward 0.5", "tool\nend"], "a rollout of two turns, alone in its group"
    assert page.open == []


def test_images_are_shown_small_and_untrusted_text_is_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_CHARACTERS", len(HOSTILE_TEXT))
    group = wire_examples.image_group()
    seen = replace(group, rollouts=tuple(replace(one, reward=Reward(value=n)) for n, one in enumerate(group.rollouts)))
    findings = ((SegmentFindings((0,)),),) * len(seen.rollouts)
    untrusted, its_findings, entry = hostile()
    save_run_file(settings(tmp_path), tmp_path / NAME)
    files = trainer_files(tmp_path)
    shown = seen, findings, entry_of(seen, "trained", lags=(0, 0))
    write_batch(files, 0, [shown, (untrusted, its_findings, replace(entry, outcome="trained"))])
    files.close()
    page = ParsedPage(write_report(tmp_path / NAME)[1].read_text(encoding="utf-8"))
    sources = [value for tag, name, value in page.attributes if (tag, name) == ("img", "src")]
    (digest,) = group.images
    assert len(sources) == 1 and sources[0].startswith("data:image/png;base64,")
    assert ("img", "alt", f"image {digest[:12]}") in page.attributes
    assert "script" not in page.tags and HOSTILE_TEXT in page.texts


def test_without_a_record_or_a_trained_group_there_are_none(tmp_path: Path) -> None:
    assert examples(tmp_path, None) == ""
    save_run_file(settings(tmp_path), tmp_path / NAME)
    files = trainer_files(tmp_path)
    write_batch(files, 0, [skipped()])
    files.close()
    assert examples(tmp_path / NAME, settings(tmp_path)) == ""
