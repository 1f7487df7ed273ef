"""`penstock inspect` but for its page: the list's query, tokens' texts, the sources, the server, the command."""

import http.client
import json
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import wire_examples
from inspected_run import (
    DEAD,
    HOSTILE,
    HOSTILE_TEXT,
    KNOWN,
    KNOWN_KEY,
    NAME,
    NUM_PLAIN,
    PER_BATCH,
    SKIPPED,
    TURNS,
    TURNS_KEY,
    byte_tokenizer,
    inspected_run,
    plain,
    settings,
    trainer_files,
    write_batch,
)
from penstock.deploy import cli
from penstock.deploy.inspector.catalogue import Catalogue
from penstock.deploy.inspector.content import InspectedGroup, InspectedRow, group_fields
from penstock.deploy.inspector.query import QueryError, RowQuery, parse_query
from penstock.deploy.inspector.server import InspectorServer
from penstock.deploy.launch.run_folder import save_run_file
from penstock.deploy.report.tokens import TokenTexts, texts_of_run
from penstock.schemas.config import ModelConfig
from penstock.schemas.images import file_of
from penstock.schemas.record import BatchHead, RecordReadError
from penstock.schemas.record_reader import Record
from recorded_batches import dead_batch
from waiting import wait_for

ROOT = Path(__file__).parents[3]
PLAIN = set(range(1, NUM_PLAIN + 1))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    inspected_run(runs)
    return runs / NAME


@pytest.fixture(scope="module")
def catalogue(run: Path) -> Catalogue:
    texts = TokenTexts(AutoTokenizer.from_pretrained(run.parent / "model"))
    return Catalogue(NAME, Record(run), texts)


@pytest.fixture(scope="module")
def server(catalogue: Catalogue) -> Iterator[InspectorServer]:
    server = InspectorServer(catalogue, 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def ask(server: InspectorServer, path: str, method: str = "GET", **headers: str) -> tuple[int, Any, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, answer.headers, body


def found(catalogue: Catalogue, **query: Any) -> list[int]:
    """Returns the indexes of the groups that a query matches, in its order. An answer may have searched only a part."""
    parsed = parse_query({"size": "200"} | {name: str(value) for name, value in query.items()})
    page = wait_for(lambda: catalogue.page(parsed), lambda page: page["searched"] == page["to_search"])
    assert page["num_found"] == len(page["rows"])
    return [row["index"] for row in page["rows"]]


# ---- the list


def test_a_filter_lets_through_what_it_says(catalogue):
    for query, expected in (
        ({}, PLAIN | {KNOWN, TURNS, SKIPPED, DEAD, HOSTILE}),
        ({"outcome": "dead"}, {DEAD}),
        ({"finish": "length"}, {KNOWN}),
        ({"producer": HOSTILE_TEXT}, {HOSTILE}),
        ({"environment": "tools"}, {TURNS}),
        ({"reward_min": 0.6, "reward_max": 0.65}, set(range(60, 66))),
        ({"lag_min": 4}, {KNOWN, TURNS}),
        ({"lag_max": 0}, {n for n in PLAIN if n % 4 == 0} | {SKIPPED, DEAD, HOSTILE}),
        ({"ess_max": 0.3}, {KNOWN}),
        ({"ess_min": 0.99, "ess_max": 1}, {1, 2, TURNS}),
        ({"version": 16}, {KNOWN}),
        ({"version": "0:21"}, {n for n in PLAIN if n % 5 == 1}),
        ({"version": "1:21"}, set()),
        ({"q": "49+49="}, {49}),
        ({"q": "PÉNSTOCK"}, {HOSTILE}),
        ({"q": "nowhere"}, set()),
        ({"outcome": "trained", "producer": "producer-0", "lag_min": 2, "reward_min": 0.6}, {62, 66, 70, KNOWN}),
    ):
        assert set(found(catalogue, **query)) == expected, query


def test_a_sorted_list_has_groups_without_the_number_last(catalogue):
    for sort, order, first in (
        ("newest", "desc", [HOSTILE, DEAD, SKIPPED, TURNS, KNOWN, NUM_PLAIN]),
        ("ess", "asc", [KNOWN, 70, 69]),
        ("ess", "desc", [TURNS, 1, 2]),
        ("lag", "desc", [TURNS, KNOWN]),
        ("weight", "desc", [KNOWN]),
        ("masked", "desc", [TURNS, KNOWN]),
        ("reward", "asc", [1, 2, 3]),
        ("index", "desc", [HOSTILE, DEAD]),
        ("tokens", "desc", [HOSTILE, KNOWN, TURNS]),
    ):
        listed = found(catalogue, sort=sort, order=order)
        assert listed[: len(first)] == first, (sort, order)
        if sort in ("ess", "weight", "masked"):
            assert set(listed[-3:]) == {SKIPPED, DEAD, HOSTILE}, (sort, order)


def test_pages_follow_each_other_and_stay_where_they_are_while_more_comes_in(tmp_path, monkeypatch):
    files = inspected_run(tmp_path, close=False)
    catalogue = Catalogue(NAME, Record(tmp_path / NAME), None)
    before = catalogue.run()
    pages = [catalogue.page(RowQuery(page=n, size=20, until=before["newest"]))["rows"] for n in (1, 2, 3, 4)]
    keys = [row["key"] for page in pages for row in page]
    assert len(keys) == len(set(keys)) == NUM_PLAIN + 5
    write_batch(files, 11, [plain(200)])
    monkeypatch.setattr("penstock.deploy.inspector.catalogue.REFRESH_S", 0.0)
    after = catalogue.run()
    assert after["num_groups"] == before["num_groups"] + 1 and after["revision"] != before["revision"]
    again = [catalogue.page(RowQuery(page=n, size=20, until=before["newest"]))["rows"] for n in (1, 2, 3, 4)]
    assert again == pages
    assert catalogue.page(RowQuery(size=1))["rows"][0]["index"] == 200
    files.close()


def test_a_parameter_that_is_none_is_named():
    for parameters, message in (
        ({"lag_min": "x"}, "lag_min = 'x': expected a whole number"),
        ({"reward_min": "high"}, "reward_min = 'high': expected a number"),
        ({"ess_min": "nan"}, "ess_min = nan: expected a finite number"),
        ({"sort": "name"}, "sort = 'name': expected newest, index"),
        ({"version": "1:2:3"}, "version = '1:2:3': expected a number, or EPOCH:STEPS"),
        ({"version": "9" * 5000}, "expected a number, or EPOCH:STEPS"),
        ({"page": "0"}, "page = 0"),
        ({"until": "9" * 18}, "until = 999999999999999999: expected at most"),
        ({"colour": "red"}, "colour: expected one of reward_min"),
    ):
        with pytest.raises(QueryError) as caught:
            parse_query(parameters)
        assert message in str(caught.value)


def test_what_a_rollback_undid_is_told_from_what_was_done_instead(tmp_path, monkeypatch):
    inspected_run(tmp_path)
    catalogue = Catalogue(NAME, Record(tmp_path / NAME), None)
    assert catalogue.group(KNOWN_KEY)["index"] == KNOWN
    monkeypatch.setattr("penstock.deploy.inspector.catalogue.SEARCH_S", -1.0)
    first = catalogue.page(RowQuery(q="+"))
    assert (first["searched"], first["to_search"]) == (0, NUM_PLAIN + 5), "a search that takes long goes on in parts"
    monkeypatch.undo()
    assert found(catalogue, q="2+2=") == [KNOWN, 2]
    files = trainer_files(tmp_path, 1, {0: 10})
    write_batch(files, 10, [plain(201)])
    monkeypatch.setattr("penstock.deploy.inspector.catalogue.REFRESH_S", 0.0)
    assert catalogue.run()["num_groups"] == NUM_PLAIN + 1
    assert found(catalogue, q="2+2=") == [2] and found(catalogue, q="201+") == [201]
    (row,) = catalogue.page(RowQuery(size=1))["rows"]
    assert row["key"] != KNOWN_KEY and catalogue.group(row["key"])["prompt"]["text"] == "201+201="
    for key in (KNOWN_KEY, TURNS_KEY):
        with pytest.raises(RecordReadError, match="batch 10 of trainer 0 was undone by a rollback"):
            catalogue.group(key)
    assert catalogue.group("0-9-6")["index"] == NUM_PLAIN, "what was before the fork keeps its name"
    files.close()


def test_parts_of_characters_stand_at_the_token_that_completes_one_and_what_is_none_is_shown_as_such(tmp_path):
    byte_tokenizer(tmp_path)
    texts = TokenTexts(AutoTokenizer.from_pretrained(tmp_path))
    assert texts.texts([*"a€\n".encode(), 256]) == [
        ("a", ""), ("", "E2"), ("", "82"), ("€", "AC"), ("\n", ""), ("<eos>", "special"),
    ]  # fmt: skip
    assert texts.texts([0xFF, 0x61, 0xE2]) == [("\ufffd", "FF"), ("a", ""), ("\ufffd", "E2")]
    assert texts.texts([0xE2, 4000, 2**31 - 1, 0x62]) == [
        ("", "E2"), ("\ufffd", "unknown"), ("", "unknown"), ("b", ""),
    ]  # fmt: skip


def test_sentencepiece_pieces_have_their_spaces_and_their_bytes():
    vocab = {"<unk>": 0, "\u2581Hello": 1, "\u2581world": 2, "<0xE2>": 3, "<0x82>": 4, "<0xAC>": 5}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken("<unk>", special=True)])
    texts = TokenTexts(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert texts.texts([1, 2, 3, 4, 5]) == [(" Hello", ""), (" world", ""), ("", "E2"), ("", "82"), ("€", "AC")]


def test_a_groups_numbers_are_those_of_the_record_token_by_token(catalogue):
    group = catalogue.group(KNOWN_KEY)
    first = group["rollouts"][0]["segments"][0]
    assert "".join(first["texts"]) == "2+2=abcdef"
    assert first["positions"] == [4, 5, 6, 7, 8, 9]
    assert first["versions"] == [15, 16, 17, 18, 19, 20]
    assert first["lags"] == [5, 4, 3, 2, 1, 0]
    assert first["behavior_logprobs"] == [-2.0] * 6
    assert first["proximal_logprobs"] == pytest.approx([-4.0, -2.5, -2.05, -2.0, -1.95, -0.5])
    assert first["importance_weights"] == pytest.approx([0.0, 0.6, 0.95, 1.0, 1.05, 3.0])
    assert first["kept"] == [False, True, True, True, True, True]
    assert group["rollouts"][1]["segments"][0]["marks"] == {4: "C3", 5: "A9", 6: "C3", 7: "A9"}
    assert group["rollouts"][0]["parts"] == {"exact": 1.0, "digits": 0.5}
    assert [rollout["advantage"] for rollout in group["rollouts"]] == [0.375, -0.375]
    assert group["missing"] == [] and group["batch"]["policy_version"] == 20


def test_images_stand_at_their_tokens_and_are_there_once():
    group = wire_examples.image_group()
    row = InspectedRow("0", 1, 1, msgspec.structs.replace(plain(1)[2], index=group.index))
    batch = BatchHead(position=0, update=1, policy_version=1, counts=True)
    fields = group_fields(InspectedGroup(row, group, (), batch, ""), None)
    (digest,) = group.images
    assert file_of(fields["images"][digest]) == group.images[digest]
    json.dumps(fields)
    assert [one["segments"][0]["images"] for one in fields["rollouts"]] == [[(digest, 1, 3)]] * 2
    assert [part["type"] for part in fields["prompt"]["messages"][0]["content"]] == ["text", "image", "text"]


def test_what_was_not_scored_has_no_numbers_and_says_why(catalogue):
    group = catalogue.group(TURNS_KEY)
    assert group["missing"] == [
        "proximal logprobs and weights: 1 of 2 segments not scored (every token lies past the lag bound)"
    ]
    scored, unscored = group["rollouts"][0]["segments"]
    assert scored["kept"] == [True] * 4
    assert unscored["kept"] == unscored["proximal_logprobs"] == unscored["importance_weights"] == [None] * 3
    assert unscored["versions"] == [None, 20, 20] and unscored["lags"] == [9, 0, 0]
    skipped = catalogue.group("0-10-2")
    assert skipped["missing"] == ["proximal logprobs and weights: no token scored (its rewards do not differ)"]


def test_findings_that_are_not_finite_or_do_not_fit_leave_the_json_readable(server, run, monkeypatch):
    catalogue = server.catalogue
    looked = catalogue.read(KNOWN_KEY)
    findings = msgspec.structs.replace(looked.findings[0][0], importance_weights=b"\x00\x00\xc0\x7f" * 6)
    for broken, name in ((((findings,), looked.findings[1]), "importance_weights"), (looked.findings[::-1], "kept")):
        with monkeypatch.context() as patched:
            patched.setattr(catalogue, "read", lambda key, broken=broken: looked._replace(findings=broken))
            status, _, body = ask(server, f"/api/groups/{KNOWN_KEY}")
        segment = json.loads(body)["rollouts"][0]["segments"][0]
        assert status == 200 and segment[name] == [None] * 6 and segment["versions"][0] == 15


def test_without_its_tokenizer_a_group_has_ids_and_says_so(run, tmp_path):
    config = msgspec.structs.replace(settings(tmp_path), model=ModelConfig(path=str(tmp_path)))
    texts, why = texts_of_run(config)
    assert texts is None and why.startswith("tokens are shown as ids: model.path = ")
    catalogue = Catalogue(NAME, Record(run), texts, [why])
    assert why in catalogue.run()["notes"]
    segment = catalogue.group(KNOWN_KEY)["rollouts"][0]["segments"][0]
    assert "texts" not in segment and bytes(segment["token_ids"]) == b"2+2=abcdef"


def test_whoever_addresses_the_server_by_another_name_gets_nothing(server):
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil:1", "", "[::2]:80"):
        for path in ("/", "/api/run", f"/api/groups/{KNOWN_KEY}", "/api/export.jsonl"):
            status, _, body = ask(server, path, Host=host)
            assert status == 403 and NAME.encode() not in body, (host, path)
    for host in ("127.0.0.1:1", "localhost", "LOCALHOST:9000", "[::1]:80"):
        assert ask(server, "/api/run", Host=host)[0] == 200, host


def test_on_all_addresses_it_still_answers_to_loopback_names_only(catalogue):
    """In a container: whoever comes through a published port or a tunnel asks for 127.0.0.1 or localhost."""
    with InspectorServer(catalogue, 0, "0.0.0.0") as server:
        assert server.names == {"127.0.0.1", "localhost", "[::1]"}
        assert server.url == f"http://127.0.0.1:{server.server_port}/"


def test_every_answer_is_strict_about_what_a_browser_may_do_with_it(server):
    for path in ("/", "/page.js", "/page.css", "/api/run", "/api/groups", "/nothing", "/api/groups/x"):
        _, headers, _ = ask(server, path)
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "require-trusted-types-for 'script'" in policy, path
        assert "unsafe" not in policy and "http" not in policy and "*" not in policy, path
        assert headers["X-Content-Type-Options"] == "nosniff", path
        assert headers["Cross-Origin-Resource-Policy"] == "same-origin", path
        assert headers.get("Access-Control-Allow-Origin") is None, path


def test_a_request_that_is_none_is_refused_with_the_reason(server):
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "PATCH"):
        assert ask(server, "/api/run", method)[0] == 501, method
    for path, problem in (
        ("http://[", "path: "),
        ("http://[x]/api/run", "path: "),
        ("/api/groups?lag_min=x", "lag_min = 'x': expected a whole number"),
        ("/api/export.jsonl?lag_min=x", "lag_min = 'x': expected a whole number"),
    ):
        status, _, body = ask(server, path, Host="localhost")
        assert status == 400 and json.loads(body)["problem"].startswith(problem), path


def test_what_is_not_there_is_not_found(server):
    keys = ("..%2f", "0-0-9", "0-9999-0", "1-0-0", "10-0", "0-0-%00", "0-0-0%0A", "0--1-0", "0-%D9%A3-0")
    for path in ("/../server.py", "/page.py", *(f"/api/groups/{key}" for key in keys), "/api/groups/0-" + "9" * 5000):
        assert ask(server, path)[0] == 404, path


def test_the_filtered_groups_are_exported_whole(server):
    status, headers, body = ask(server, "/api/export.jsonl?lag_min=4&sort=index&order=asc&page=7")
    assert status == 200 and headers["Content-Disposition"] == f'attachment; filename="{NAME}-groups.jsonl"'
    known, turns = map(json.loads, body.splitlines())
    assert (known["index"], turns["index"]) == (KNOWN, TURNS)
    first = known["rollouts"][0]["segments"][0]
    assert "".join(first["texts"]) == "2+2=abcdef" and first["token_ids"] == list(b"2+2=abcdef")
    assert first["lags"] == [5, 4, 3, 2, 1, 0] and first["versions"][0] == 15
    assert first["importance_weights"] == pytest.approx([0.0, 0.6, 0.95, 1.0, 1.05, 3.0])
    assert known["prompt"]["text"] == "2+2=" and known["fingerprint"]["engine"] == "vllm"
    assert len(ask(server, "/api/export.jsonl")[2].splitlines()) == NUM_PLAIN + 5
    first_batch = PER_BATCH - 1
    assert len(ask(server, f"/api/export.jsonl?until={first_batch}")[2].splitlines()) == PER_BATCH


def test_a_batch_that_was_altered_is_named_and_an_export_says_which_group_was_dropped(tmp_path):
    inspected_run(tmp_path)
    (file,) = (tmp_path / NAME / "record").glob("*.sqlite")
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("UPDATE batches SET metrics = '{' WHERE position = 3")
        connection.commit()
    catalogue = Catalogue(NAME, Record(tmp_path / NAME), None)
    told = catalogue.run()
    assert told["num_groups"] == NUM_PLAIN + 5 - 7, "it hides no other"
    assert any("altered since it was written" in note for note in told["notes"])
    file.unlink()
    lines = list(catalogue.export(RowQuery()))
    assert len(lines) == NUM_PLAIN + 5 - 7 and all("dropped from the record" in line["problem"] for line in lines)


def test_a_group_that_died_before_it_was_scored_is_in_the_list_and_shown_as_far_as_it_came(tmp_path):
    inspected_run(tmp_path, close=False).append(dead_batch(11))
    catalogue = Catalogue(NAME, Record(tmp_path / NAME), None)
    unposed, unscored = catalogue.page(RowQuery(outcome="dead", size=2))["rows"]
    assert (unposed["index"], unscored["index"]) == (302, 301)
    assert catalogue.group(unposed["key"])["problem"] == "dead: prompt: boom"
    group = msgspec.json.decode(msgspec.json.encode(catalogue.group(unscored["key"])))
    assert [rollout["reward"] for rollout in group["rollouts"]] == [None, None]
    assert group["missing"] == ["proximal logprobs and weights: no token scored (it died before)"]
    assert [row["index"] for row in catalogue.page(RowQuery(sort="reward", size=200))["rows"][-2:]] == [301, 302]


def test_a_run_or_a_port_that_is_none_is_refused_in_one_line(run, tmp_path, capsys, server):
    def refused(*arguments: str) -> str:
        assert cli.main(["inspect", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    assert "neither a folder nor a run" in refused("nothing", "--runs", str(tmp_path))
    save_run_file(settings(tmp_path), tmp_path / NAME)
    assert "no record of rollouts; expected the folder of a run" in refused(NAME, "--runs", str(tmp_path))
    assert f"--port {server.server_port}: Address already in use" in refused(
        str(run), "--port", str(server.server_port)
    )
    assert "--port 70000: expected 0 to 65535" in refused(str(run), "--port", "70000")
    for host in ("localhost", "::", "300.1.1.1", ""):
        assert f"--host {host}: expected an IPv4 address" in refused(str(run), "--host", host)
    assert "--host 192.0.2.1 --port 0: " in refused(str(run), "--host", "192.0.2.1", "--port", "0")
