"""Tasks from data sets: the same from every kind of file, in an order of the index alone, never all in memory."""

import gc
import json
import os
import re
import tracemalloc
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.producers.environments import rows
from penstock.producers.environments.dataset import Dataset, permuted
from penstock.producers.environments.math_jsonl import math_verified
from penstock.schemas.images import data_url, digest_of
from penstock.schemas.process.image_files import decoded
from penstock.schemas.prompt import ImagePart, Message, Prompt, TextPart
from wire_examples import PNG

RECORDS = [{"question": f"What is {n}+1?", "solution": n + 1, "level": n % 3} for n in range(23)]
LINE = '{"prompt": "a", "answer": "b"}\n'
COLUMNS = {"prompt": "question", "answer": "solution", "level": "level"}


def write_jsonl(file: Path, records: list[Any] = RECORDS) -> str:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


def write_parquet(file: Path, records: list[Any] = RECORDS, row_group_size: int = 5) -> str:
    pq.write_table(pa.Table.from_pylist(records), file, row_group_size=row_group_size)
    return str(file)


def saved_by_datasets(folder: Path) -> str:
    import datasets

    datasets.DatasetDict({"train": datasets.Dataset.from_list(RECORDS)}).save_to_disk(folder)
    return str(folder)


def folder_of_parts(folder: Path) -> str:
    folder.mkdir()
    write_parquet(folder / "0.parquet", RECORDS[:9])
    write_parquet(folder / "1.parquet", RECORDS[9:])
    return str(folder)


KINDS = {
    "jsonl": lambda folder: write_jsonl(folder / "train.jsonl"),
    "parquet": lambda folder: write_parquet(folder / "train.parquet"),
    "a folder": lambda folder: folder_of_parts(folder / "train"),
    "datasets": lambda folder: saved_by_datasets(folder / "saved"),
}


def test_the_permutation_takes_every_place_to_another_and_is_another_for_every_key():
    for size in (1, 2, 3, 4, 5, 16, 17, 1000):
        for key in range(3):
            assert sorted(permuted(place, size, key) for place in range(size)) == list(range(size))
    assert [permuted(place, 10, 0, 0) for place in range(10)] == [8, 4, 3, 9, 0, 1, 2, 7, 6, 5], "in every release"
    orders = {tuple(permuted(place, 10, seed, epoch) for place in range(10)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    assert permuted(10**12, 3 * 10**12, 0) < 3 * 10**12
    firsts = Counter(permuted(0, 7, key) for key in range(7000))
    assert all(800 < count < 1200 for count in firsts.values()), "it favors no place"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_data_poses_the_same_tasks_once_an_epoch(tmp_path, kind):
    training = KINDS[kind](tmp_path)
    environment = Dataset(seed=4, training=training, columns=COLUMNS, system_prompt="Add.")
    assert environment.num_tasks == len(RECORDS)
    epochs = [[environment.prompt(epoch * 23 + n) for n in range(1, 24)] for epoch in range(2)]
    assert [sorted(prompt.answer for prompt in epoch) for epoch in epochs] == [sorted(map(str, range(1, 24)))] * 2
    assert [prompt.answer for prompt in epochs[0]] != [prompt.answer for prompt in epochs[1]]
    assert environment.prompt(30) == epochs[1][6], "the index alone names the task"
    number = int(epochs[0][0].answer) - 1
    assert epochs[0][0].messages == (
        Message(role="system", content="Add."),
        Message(role="user", content=f"What is {number}+1?"),
    )
    assert epochs[0][0].metadata["level"] == str(number % 3)
    order = [permuted(place, 23, 4, 0) + 1 for place in range(23)]
    assert [int(prompt.answer) for prompt in epochs[0]] == order, "whatever the kind"
    in_order = Dataset(seed=4, training=training, columns=COLUMNS, shuffle=False)
    assert [in_order.prompt(n).answer for n in (1, 2, 23, 24)] == ["1", "2", "23", "1"]
    missing = r"column 'problem' is missing, found \['level', 'question', 'solution'\]; name it"
    with pytest.raises(ValueError, match=missing):
        Dataset(seed=4, training=training, columns={"prompt": "problem", "answer": "solution"})


def test_columns_may_hold_messages_or_bare_text_and_the_rest_is_metadata(tmp_path):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    file = write_jsonl(tmp_path / "a.jsonl", [{"chat": messages, "raw": "Once", "right": True}])
    chat = Dataset(seed=0, training=file, columns={"prompt": "chat", "answer": "right", "of": "raw"}).prompt(1)
    assert [message.role for message in chat.messages] == ["system", "user"]
    assert (chat.answer, chat.metadata) == ("True", {"source": f"{file}:1", "of": "Once"})
    numbers = write_jsonl(tmp_path / "n.jsonl", [{"prompt": "?", "answer": n} for n in (0.00005, 1e22, 2.50, 7)])
    answers = [Dataset(seed=0, training=numbers, shuffle=False).prompt(n).answer for n in (1, 2, 3, 4)]
    assert answers == ["0.00005", "1" + "0" * 22, "2.5", "7"]
    blank = tmp_path / "blank.jsonl"
    blank.write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n\n')
    lines = Dataset(seed=0, training=str(blank), columns={"prompt": "prompt"}, shuffle=False)
    assert [lines.prompt(n).metadata["source"] for n in (1, 2)] == [f"{blank}:1", f"{blank}:3"]
    text = Dataset(seed=0, training=file, columns={"text": "raw"}).prompt(1)
    assert (text.text, text.messages, text.answer) == ("Once", None, "")


def test_held_out_rows_are_those_of_the_evaluation_in_their_order(tmp_path):
    training, evaluation = write_jsonl(tmp_path / "a.jsonl"), write_parquet(tmp_path / "b.parquet", RECORDS[:6])
    environment = Dataset(seed=0, training=training, evaluation=evaluation, columns=COLUMNS, num_evaluation_prompts=4)
    assert [environment.evaluation_prompt(n).answer for n in (1, 2, 3, 4)] == ["1", "2", "3", "4"]
    with pytest.raises(ValueError, match="held-out row 5 asked for, expected 1 to 4"):
        environment.evaluation_prompt(5)
    assert environment.reward(Prompt(text="?", answer="7"), " 7\n").value == 1.0


def test_opening_lines_takes_no_memory_for_their_content(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "SCAN_BYTES", 4096)  # smaller than a line: a line lies in several blocks
    file = write_jsonl(tmp_path / "a.jsonl", [{"prompt": str(n) * 6000, "answer": n} for n in range(1, 300)])
    tracemalloc.start()
    environment = Dataset(seed=0, training=file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert Path(file).stat().st_size > 4_000_000 and peak < 400_000
    assert {environment.prompt(n).answer for n in range(1, 300)} == {str(n) for n in range(1, 300)}


def test_a_parquet_row_is_read_with_its_row_group_and_the_named_columns_and_few_are_kept(tmp_path, monkeypatch):
    read, shapes = [], []
    original = pq.ParquetFile.read_row_group

    def read_and_note(self, *group, **columns):
        table = original(self, *group, **columns)
        read.append(weakref.ref(table))
        shapes.append((table.num_rows, table.column_names))
        return table

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", read_and_note)
    columns = {"prompt": "question", "answer": "solution"}
    environment = Dataset(seed=0, training=write_parquet(tmp_path / "a.parquet"), columns=columns)
    assert shapes == [(5, ["question", "solution"])]
    for index in range(1, 24):
        environment.prompt(index)
    assert len(read) == 5, "what was read last is kept"
    (tmp_path / "a.parquet").unlink()
    for n, record in enumerate(RECORDS):
        write_parquet(tmp_path / f"{n:02}.parquet", [record])
    environment = Dataset(seed=0, training=str(tmp_path), columns=COLUMNS)
    assert {environment.prompt(n).answer for n in range(1, 24)} == {str(n) for n in range(1, 24)}
    gc.collect()
    assert sum(table() is not None for table in read) == rows.ROW_GROUPS_KEPT, "of all files together"


def test_the_reward_of_mathematics_goes_with_any_data_set():
    half = Prompt(text="?", answer="1/2")
    assert math_verified(half, "So \\boxed{0.5}", scoring_timeout_s=60.0) == 1.0
    assert math_verified(half, "0.5", scoring_timeout_s=60.0) == 0.0
    assert math_verified(half, "0.5", require_boxed=False, scoring_timeout_s=60.0) == 1.0


IMAGES = {"prompt": "prompt", "answer": "answer", "images": "images"}


def test_a_column_of_images_fills_their_places_in_the_prompt(tmp_path):
    (tmp_path / "a.png").write_bytes(PNG)
    image, asked = ImagePart(digest=digest_of(PNG), data=PNG), TextPart(text="What?")
    parts = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]
    for prompt, images, content in [
        ("What?", "a.png", (image, asked)),
        ("What?<image>", ["a.png"], (asked, image)),
        ("<image><image>What?", [str(tmp_path / "a.png"), data_url(PNG)], (image, image, asked)),
        (parts, {"bytes": None, "path": "a.png"}, (image, asked)),
    ]:
        file = tmp_path / "rows.jsonl"
        file.write_text(json.dumps({"prompt": prompt, "images": images, "answer": 1}))
        posed = Dataset(seed=0, training=str(file), columns=IMAGES).prompt(1)
        assert posed.messages == (Message(role="user", content=content),), prompt
    for images, prompt, message in [
        (["a.png"], "<image><image>?", "rows.jsonl:1: 1 images for 2 places in column 'prompt', expected one each"),
        (["a.png"] * 2, "<image>?", "2 images for 1 places"),
        (["b.png"], "?", "b.png' that cannot be read"),
        (["http://a/b.png"], "?", "nothing is fetched"),
    ]:
        file.write_text(json.dumps({"prompt": prompt, "images": images, "answer": 1}))
        with pytest.raises(ValueError, match=message):
            Dataset(seed=0, training=str(file), columns=IMAGES)


def test_images_of_parquet_files_and_of_datasets_are_read(tmp_path):
    import datasets

    rows = [{"prompt": "?", "images": [{"bytes": PNG, "path": None}], "answer": 1}]
    write_parquet(tmp_path / "rows.parquet", rows)
    posed = Dataset(seed=0, training=str(tmp_path / "rows.parquet"), columns=IMAGES).prompt(1)
    assert [part.data for part in posed.images] == [PNG]
    features = datasets.Features(
        {"prompt": datasets.Value("string"), "images": [datasets.Image()], "answer": datasets.Value("int64")}
    )
    datasets.Dataset.from_list(rows, features=features).save_to_disk(tmp_path / "saved")
    (part,) = Dataset(seed=0, training=str(tmp_path / "saved"), columns=IMAGES).prompt(1).images
    assert decoded(part.data).tobytes() == decoded(PNG).tobytes()


def test_data_that_poses_no_task_is_refused_before_anything_is_sampled(tmp_path):
    file = tmp_path / "a.jsonl"
    for content, changes, message in [
        ("", {}, "training: {file!r} holds no row, expected at least one"),
        ('{"prompt": 1}\n{"prompt": "c", "ans', {}, 'training: {file}:2: b\'{{"prompt": "c", "ans\' is no JSON'),
        ("[1]\n", {}, "{file}:1: b'[1]', expected an object"),
        ('{"prompt": "a"}\n', {}, "{file}:1: column 'answer' is missing, found ['prompt']; name it in"),
        ('{"prompt": 3, "answer": 4}\n', {}, "{file}:1: column 'prompt' is 3, expected a string that is not empty"),
        ('{"prompt": ["a"], "answer": 4}\n', {}, "column 'prompt' is ['a'], expected a string, or messages with role"),
        (
            '{"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": 4}\n',
            {},
            "column 'prompt': an image as None, expected bytes, a data URL, a path or a PIL image",
        ),
        ('{"prompt": "a", "answer": null}\n', {}, "column 'answer' is None, expected a string, a number or a boolean"),
        (LINE, {"columns": {"answer": "answer"}}, "expected one of prompt and text among"),
        (LINE, {"columns": {"prompt": "prompt", "source": "answer"}}, "expected another name than source"),
        (LINE, {"num_evaluation_prompts": 1}, "num_evaluation_prompts is 1, expected 0 to 0"),
        ('{"prompt": "M\xfcller"}', {}, '{file}:1: b\'{{"prompt": "M\\xfcller"}}\' is no JSON in UTF-8, expected an'),
    ]:
        file.write_text(content, "latin-1")
        with pytest.raises(ValueError, match=re.escape(message.format(file=str(file)))):
            Dataset(seed=0, training=str(file), **changes)


def test_a_name_on_the_hub_is_opened_by_subset_split_and_revision_and_what_it_lacks_is_named(monkeypatch):
    import datasets

    asked = []

    def load_dataset(*arguments: object, **keywords: object) -> datasets.Dataset:
        asked.append((arguments, keywords))
        if arguments[0] == "lab/products":
            raise FileNotFoundError("not on\nthe Hub")
        return datasets.Dataset.from_list(RECORDS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    where = {"subset": "main", "revision": "v1"}
    opened = Dataset(seed=0, training="lab/sums", evaluation="lab/sums", columns=COLUMNS, shuffle=False, **where)
    assert (opened.num_tasks, opened.num_evaluation_prompts) == (23, 23)
    assert opened.prompt(2).metadata == {"source": "lab/sums/train: row 1", "level": "1"}
    assert asked == [(("lab/sums", "main"), {"split": split, "revision": "v1"}) for split in ("train", "test")]
    said = "training: 'lab/products' with subset = 'main', split = 'train', revision = 'v1': FileNotFoundError: not on"
    with pytest.raises(ValueError, match=re.escape(said)) as raised:
        Dataset(seed=0, training="lab/products", columns=COLUMNS, **where)
    assert "\n" not in str(raised.value)


def test_files_that_hold_no_tasks_or_may_not_be_read_are_named_with_what_is_expected(tmp_path, monkeypatch):
    cut = Path(write_parquet(tmp_path / "cut.parquet"))
    cut.write_bytes(cut.read_bytes()[:-40])
    pq.write_table(pa.table({"question": pa.array([], pa.string())}), tmp_path / "empty.parquet")
    (tmp_path / "a.csv").write_text("a,b\n")
    (tmp_path / "both").mkdir()
    write_jsonl(tmp_path / "both/a.jsonl")
    write_parquet(tmp_path / "both/b.parquet")
    saved_by_datasets(tmp_path / "saved")
    for name, message in [
        ("cut.parquet", f"training: {re.escape(str(cut))}: .*; expected a whole Parquet file"),
        ("empty.parquet", "holds no row"),
        ("none.jsonl", "no such file; expected a .jsonl or .parquet file, a folder, or a name"),
        ("a.csv", "expected a .jsonl or .parquet file"),
        ("both", r"holds \.jsonl and \.parquet files, expected one kind"),
        ("saved", "with split = 'test': KeyError"),
    ]:
        with pytest.raises(ValueError, match=message):
            Dataset(
                seed=0, training=str(tmp_path / name), columns=COLUMNS, split="test" if name == "saved" else "train"
            )

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    file = write_jsonl(tmp_path / "a.jsonl")
    monkeypatch.setattr(os, "open", refuse)  # root may read everything
    with pytest.raises(ValueError, match=f"training: {re.escape(file)}: Permission denied; expected a file that"):
        Dataset(seed=0, training=file)
