"""`penstock inspect` but for its page: the list's query, tokens' texts, the sources, the server, the command."""

import http.client
import json
import math
import os
import re
import signal
import sqlite3
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import wire_examples
from forked_programs import ForkedProgram, start_program
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
from mini_producer import dead_fields, group_fields, make_group, unscored_fields
from penstock.deploy import cli
from penstock.deploy.inspector.catalogue import Catalogue
from penstock.deploy.inspector.command import WITHOUT_RECORD
from penstock.deploy.inspector.content import beginning
from penstock.deploy.inspector.rows import InspectedRow, QueryError, RowQuery, parse_query, select
from penstock.deploy.inspector.searching import TextSearch
from penstock.deploy.inspector.server import InspectorServer
from penstock.deploy.inspector.sources import RecordSource
from penstock.deploy.inspector.stream import StreamSource
from penstock.deploy.inspector.tokens import TokenTexts, texts_of_run
from penstock.deploy.launch.run_folder import save_run_file
from penstock.schemas.config import ModelConfig
from penstock.schemas.keys import Commit, Field, Keys, Kind
from penstock.schemas.policy import make_version
from penstock.schemas.prompt import Message, Prompt
from penstock.schemas.record import GroupEntry, RecordReadError
from penstock.schemas.record_reader import Record
from penstock.schemas.rollout import encode_group
from real_server import RealServer
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
    return Catalogue(NAME, RecordSource(Record(run)), texts)


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


def test_the_newest_group_comes_first_and_every_group_is_listed(catalogue):
    assert found(catalogue) == [HOSTILE, DEAD, SKIPPED, TURNS, KNOWN, *range(NUM_PLAIN, 0, -1)]
    assert found(catalogue, order="asc") == found(catalogue)[::-1]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({"outcome": "skipped"}, {SKIPPED, HOSTILE}),
        ({"outcome": "dead"}, {DEAD}),
        ({"finish": "length"}, {KNOWN}),
        ({"producer": "producer-1"}, {TURNS, *range(1, NUM_PLAIN + 1, 2)}),
        ({"producer": HOSTILE_TEXT}, {HOSTILE}),
        ({"environment": "tools"}, {TURNS}),
        ({"reward_min": 0.6, "reward_max": 0.65}, set(range(60, 66))),
        ({"reward_min": 0.9}, {KNOWN, SKIPPED, DEAD}),
        ({"lag_min": 4}, {KNOWN, TURNS}),
        ({"lag_max": 0}, {n for n in PLAIN if n % 4 == 0} | {SKIPPED, DEAD, HOSTILE}),
        ({"lag_min": 3, "lag_max": 3}, {n for n in PLAIN if n % 4 == 3}),
        ({"ess_max": 0.3}, {KNOWN}),
        ({"ess_min": 0.99, "ess_max": 1}, {1, 2, TURNS}),
        ({"version": 16}, {KNOWN}),
        ({"version": "0:21"}, {n for n in PLAIN if n % 5 == 1}),
        ({"version": "1:21"}, set()),
        ({"q": "49+49="}, {49}),
        ({"q": "PÉNSTOCK"}, {HOSTILE}),
        ({"q": "width"}, {KNOWN}),
        ({"q": "nowhere"}, set()),
        ({"outcome": "trained", "producer": "producer-0", "lag_min": 2, "reward_min": 0.6}, {62, 66, 70, KNOWN}),
    ],
    ids=str,
)
def test_a_filter_lets_through_what_it_says(catalogue, query, expected):
    assert set(found(catalogue, **query)) == expected


@pytest.mark.parametrize(
    ("sort", "order", "first"),
    [
        ("ess", "asc", [KNOWN, 70, 69]),
        ("ess", "desc", [TURNS, 1, 2]),
        ("lag", "desc", [TURNS, KNOWN]),
        ("weight", "desc", [KNOWN]),
        ("masked", "desc", [TURNS, KNOWN]),
        ("reward", "asc", [1, 2, 3]),
        ("index", "desc", [HOSTILE, DEAD]),
        ("tokens", "desc", [HOSTILE, KNOWN, TURNS]),
    ],
)
def test_a_sorted_list_has_groups_without_the_number_last(catalogue, sort, order, first):
    listed = found(catalogue, sort=sort, order=order)
    assert listed[: len(first)] == first
    if sort in ("ess", "weight", "masked"):
        assert set(listed[-3:]) == {SKIPPED, DEAD, HOSTILE}


def test_a_prompt_begins_in_one_short_line():
    def line(**prompt: Any) -> str:
        return beginning(msgspec.structs.replace(wire_examples.group(1), prompt=Prompt(**prompt)))

    turns = (Message(role="system", content="Be brief."), Message(role="user", content="Capital of\n  Norway?"))
    assert line(messages=turns) == "Capital of Norway?"
    assert line(text="a b " * 1000) == ("a b " * 20)
    assert line(messages=()) == beginning(None) == ""


def test_a_group_is_listed_with_the_beginning_of_its_prompt(catalogue):
    rows = catalogue.page(RowQuery(size=200))["rows"]
    assert all(row["prompt_beginning"] for row in rows if row["outcome"] == "trained")
    (known,) = [row for row in rows if row["key"] == KNOWN_KEY]
    prompt = catalogue.group(KNOWN_KEY)["prompt"]
    text = prompt["text"] or prompt["messages"][-1]["content"]
    assert text.startswith(known["prompt_beginning"])


def test_pages_follow_each_other_and_stay_where_they_are_while_more_comes_in(tmp_path, monkeypatch):
    files = inspected_run(tmp_path, close=False)
    catalogue = Catalogue(NAME, RecordSource(Record(tmp_path / NAME)), None)
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


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"lag_min": "x"}, "lag_min = 'x': expected a whole number"),
        ({"reward_min": "high"}, "reward_min = 'high': expected a number"),
        ({"ess_min": "nan"}, "ess_min = nan: expected a finite number"),
        ({"sort": "name"}, "sort = 'name': expected newest, index"),
        ({"version": "1:2:3"}, "version = '1:2:3': expected a number, or EPOCH:STEPS"),
        ({"version": "9" * 5000}, "expected a number, or EPOCH:STEPS"),
        ({"page": "0"}, "page = 0"),
        ({"size": "1000"}, "size = 1000"),
        ({"colour": "red"}, "colour: expected one of reward_min"),
    ],
)
def test_a_parameter_that_is_none_is_named(parameters, message):
    with pytest.raises(QueryError) as caught:
        parse_query(parameters)
    assert message in str(caught.value)


def test_a_hundred_thousand_groups_are_filtered_and_sorted():
    rows = [
        InspectedRow(
            f"{n // 32}-{n % 32}",
            n,
            "trained",
            n // 32,
            GroupEntry(
                index=n, outcome="trained", producer_id=f"producer-{n % 8}", rewards=(n % 7 / 7,) * 8,
                finish_reasons=("stop",) * 8, num_sampled_tokens=(100,) * 8, min_version=n // 32, max_version=n // 32,
                max_lag=n % 5, num_masked=0, ess_fraction=n % 101 / 101, max_weight=1.0,
            ),
        )
        for n in range(100_000)
    ]  # fmt: skip
    chosen = select(rows, parse_query({"sort": "ess", "order": "asc", "reward_min": "0.5", "lag_max": "3"}))
    assert len(chosen) == sum(row.entry.max_lag <= 3 and row.entry.rewards[0] >= 0.5 for row in rows)
    shares = [row.entry.ess_fraction for row in chosen]
    assert shares == sorted(shares)


def test_what_a_rollback_undid_is_told_from_what_was_done_instead(tmp_path, monkeypatch):
    inspected_run(tmp_path)
    catalogue = Catalogue(NAME, RecordSource(Record(tmp_path / NAME)), None)
    assert catalogue.group(KNOWN_KEY)["index"] == KNOWN
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


def row(key: str) -> InspectedRow:
    return InspectedRow(key, 0, "trained", 1, GroupEntry(index=1, outcome="trained"))


def test_a_text_search_keeps_no_more_text_than_it_may_and_comes_to_its_end_all_the_same():
    rows, read = [row(str(n)) for n in range(10)], []

    def text_of(row: InspectedRow) -> str:
        read.append(row.key)
        return f"{row.key}abc"

    search = TextSearch(text_of, kept_characters=4 * 3)
    assert search.matching(rows, "7A", math.inf) == ([rows[7]], 10) and len(read) == 10
    assert search.matching(rows, "7a", -1.0) == ([rows[7]], 10) and len(read) == 10, "known"
    assert search.matching(rows, "b", math.inf) == (rows, 10) and len(read) == 17, "three texts were kept"
    search.keep(rows[2:])
    assert search.matching(rows[2:], "b", -1.0) == (rows[2:], 8) and len(read) == 17
    assert search.matching(rows, "b", -1.0) == ([], 0), "forgotten"
    assert search.matching(rows, "c", math.inf) == (rows, 10) and len(read) == 17 + 9, "one of the texts was kept"
    assert search.matching(rows, "a", math.inf) == (rows, 10) and len(read) == 26 + 7, "three again"
    for n in range(20):
        search.matching(rows, str(n), math.inf)
    assert [search.matching(rows, str(n), -1.0)[1] for n in (12, 19, 11)] == [10, 10, 0], "eight answers are kept"


def test_a_text_search_that_takes_long_answers_in_parts_and_goes_on(catalogue, run, monkeypatch):
    slow = Catalogue(NAME, RecordSource(Record(run)), None)
    monkeypatch.setattr("penstock.deploy.inspector.catalogue.SEARCH_S", -1.0)
    first = slow.page(RowQuery(q="+"))
    assert (first["searched"], first["to_search"]) == (0, NUM_PLAIN + 5)
    monkeypatch.setattr("penstock.deploy.inspector.catalogue.SEARCH_S", 60.0)
    assert slow.page(RowQuery(q="+"))["searched"] == NUM_PLAIN + 5


# ---- tokens


def byte_texts(tmp_path: Path) -> TokenTexts:
    byte_tokenizer(tmp_path)
    return TokenTexts(AutoTokenizer.from_pretrained(tmp_path))


def test_a_character_spread_over_tokens_stands_at_the_one_that_completes_it(tmp_path):
    shown = byte_texts(tmp_path).texts([*"a€\n".encode(), 256])
    assert shown == [("a", ""), ("", "E2"), ("", "82"), ("€", "AC"), ("\n", ""), ("<eos>", "special")]


def test_bytes_that_are_no_text_and_ids_that_are_no_token_are_shown_as_such(tmp_path):
    texts = byte_texts(tmp_path)
    assert texts.texts([0xFF, 0x61, 0xE2]) == [("\ufffd", "FF"), ("a", ""), ("\ufffd", "E2")]
    assert texts.texts([0xE2, 4000, 2**31 - 1, 0x62]) == [
        ("", "E2"), ("\ufffd", "unknown"), ("", "unknown"), ("b", ""),
    ]  # fmt: skip


def test_all_texts_together_are_what_the_tokenizer_decodes(tmp_path):
    byte_tokenizer(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("12+34=46", "Grüße, 世界 👩‍👩‍👧 \x00\x1b[1m", HOSTILE_TEXT):
        ids = list(text.encode())
        assert "".join(token.text for token in TokenTexts(tokenizer).texts(ids)) == text == tokenizer.decode(ids)


def test_sentencepiece_pieces_have_their_spaces_and_their_bytes():
    vocab = {"<unk>": 0, "\u2581Hello": 1, "\u2581world": 2, "<0xE2>": 3, "<0x82>": 4, "<0xAC>": 5}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken("<unk>", special=True)])
    texts = TokenTexts(PreTrainedTokenizerFast(tokenizer_object=backend))
    assert texts.texts([1, 2, 3, 4, 5]) == [(" Hello", ""), (" world", ""), ("", "E2"), ("", "82"), ("€", "AC")]


# ---- one group


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


def test_a_number_that_is_not_finite_leaves_the_json_readable(server, run, monkeypatch):
    source = server.catalogue.source
    looked = source.read(KNOWN_KEY)
    findings = msgspec.structs.replace(looked.findings[0][0], importance_weights=b"\x00\x00\xc0\x7f" * 6)
    broken = looked._replace(findings=((findings,), looked.findings[1]))
    monkeypatch.setattr(source, "read", lambda key: broken)
    status, _, body = ask(server, f"/api/groups/{KNOWN_KEY}")
    assert status == 200
    assert json.loads(body)["rollouts"][0]["segments"][0]["importance_weights"] == [None] * 6


def test_findings_that_do_not_fit_their_segment_are_left_out(catalogue, monkeypatch):
    looked = catalogue.source.read(KNOWN_KEY)
    monkeypatch.setattr(catalogue.source, "read", lambda key: looked._replace(findings=looked.findings[::-1]))
    segment = catalogue.group(KNOWN_KEY)["rollouts"][0]["segments"][0]
    assert segment["kept"] == segment["lags"] == [None] * 6 and segment["versions"][0] == 15


def test_without_its_tokenizer_a_group_has_ids_and_says_so(run, tmp_path):
    config = msgspec.structs.replace(settings(tmp_path), model=ModelConfig(path=str(tmp_path)))
    texts, why = texts_of_run(config)
    assert texts is None and why.startswith("tokens are shown as ids: model.path = ")
    catalogue = Catalogue(NAME, RecordSource(Record(run)), texts, [why])
    assert why in catalogue.run()["notes"]
    segment = catalogue.group(KNOWN_KEY)["rollouts"][0]["segments"][0]
    assert "texts" not in segment and bytes(segment["token_ids"]) == b"2+2=abcdef"


# ---- the server


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
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        try:
            assert server.url == f"http://127.0.0.1:{server.server_port}/"
            for host, status in (
                ("evil.example", 403),
                ("0.0.0.0", 403),
                ("172.18.0.2:8642", 403),
                ("localhost:9000", 200),
            ):
                assert ask(server, "/api/run", Host=host)[0] == status, host
        finally:
            server.shutdown()


def test_on_an_address_of_its_own_it_answers_to_that_too(catalogue):
    with InspectorServer(catalogue, 0, "127.0.0.2") as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        try:
            assert server.url == f"http://127.0.0.2:{server.server_port}/"
            with urllib.request.urlopen(f"{server.url}api/run", timeout=30) as answer:
                assert json.load(answer)["name"] == NAME
            with pytest.raises(urllib.error.HTTPError, match="403"):
                urllib.request.urlopen(urllib.request.Request(server.url, headers={"Host": "evil.example"}), timeout=30)
            with pytest.raises(OSError):
                http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=5).connect()
        finally:
            server.shutdown()


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
def test_nothing_but_get_is_answered(server, method):
    assert ask(server, "/api/run", method)[0] == 501


@pytest.mark.parametrize("path", ["/", "/page.js", "/page.css", "/api/run", "/api/groups", "/nothing", "/api/groups/x"])
def test_every_answer_is_strict_about_what_a_browser_may_do_with_it(server, path):
    _, headers, _ = ask(server, path)
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "require-trusted-types-for 'script'" in policy
    assert "unsafe" not in policy and "http" not in policy and "*" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert headers.get("Access-Control-Allow-Origin") is None


@pytest.mark.parametrize(
    "path",
    ["/../server.py", "/page.py", "/..%2fserver.py", "/api/groups/..%2f", "/api/groups/0-0-9", "/api/groups/0-9999-0",
     "/api/groups/1-0-0", "/api/groups/10-0", "/api/groups/0-0-%00", "/api/groups/0-0-0%0A", "/api/groups/0--1-0",
     "/api/groups/0-%D9%A3-0", "/api/groups/0-" + "9" * 5000 + "-0"],
)  # fmt: skip
def test_what_is_not_there_is_not_found(server, path):
    assert ask(server, path)[0] == 404


@pytest.mark.parametrize("path", ["http://[", "http://[x]/api/run"])
def test_a_path_that_is_none_is_a_400(server, path):
    status, _, body = ask(server, path, Host="localhost")
    assert status == 400 and json.loads(body)["problem"].startswith("path: ")


def test_a_parameter_that_is_none_is_a_400_that_names_it(server):
    status, _, body = ask(server, "/api/groups?lag_min=x")
    assert status == 400 and json.loads(body)["problem"] == "lag_min = 'x': expected a whole number"
    assert ask(server, "/api/export.jsonl?lag_min=x")[0] == 400


def test_the_page_has_no_inline_script_and_nothing_from_elsewhere():
    folder = ROOT / "deploy" / "inspector"
    page, script = (folder / "page.html").read_text(), (folder / "page.js").read_text()
    assert page.count("<script") == 1 and "style=" not in page and not re.search(r"\bon\w+=", page)
    assert "http" not in page + (folder / "page.css").read_text()
    for unsafe in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
        assert unsafe not in script


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


def test_an_export_says_which_group_was_dropped_meanwhile(tmp_path):
    inspected_run(tmp_path)
    catalogue = Catalogue(NAME, RecordSource(Record(tmp_path / NAME)), None)
    next((tmp_path / NAME / "record").glob("*.sqlite")).unlink()
    lines = list(catalogue.export(RowQuery()))
    assert len(lines) == NUM_PLAIN + 5 and all("dropped from the record" in line["problem"] for line in lines)


def test_a_batch_that_was_altered_is_named_and_hides_no_other(tmp_path):
    inspected_run(tmp_path)
    with closing(sqlite3.connect(next((tmp_path / NAME / "record").glob("*.sqlite")))) as connection:
        connection.execute("UPDATE batches SET metrics = '{' WHERE position = 3")
        connection.commit()
    source = RecordSource(Record(tmp_path / NAME))
    assert len(source.rows) == NUM_PLAIN + 5 - 7
    assert any("altered since it was written" in note for note in source.notes)


# ---- the live stream


@pytest.fixture
def keys(redis_client) -> Keys:
    redis_client.hset("{test}:commit", mapping={Commit.VERSION: 12, Commit.EPOCH: 0})
    return Keys("test")


@pytest.mark.redis
def test_groups_on_the_stream_are_listed_with_versions_lags_and_what_is_missing(redis_client, keys):
    redis_client.xadd(keys.rollouts, group_fields(7, 10))
    redis_client.xadd(keys.rollouts, dead_fields(8, "reward: x\x1b[1m"))
    redis_client.xadd(keys.rollouts, {Field.INDEX: 9, Field.KIND: Kind.GROUP, Field.PAYLOAD: b"junk"})
    redis_client.xadd(keys.rollouts, {b"\xff": b"\xff"})
    catalogue = Catalogue("test", StreamSource(redis_client, keys), None)
    rows = catalogue.page(RowQuery(order="asc"))["rows"]
    assert [(row["index"], row["outcome"]) for row in rows] == [
        (7, "unsettled"), (8, "dead"), (9, "unreadable"), (None, "unreadable"),
    ]  # fmt: skip
    assert (rows[0]["lags"], rows[0]["versions"], rows[0]["ess_fraction"]) == ([2, 2], [10, 10], None)
    assert "payload: not a rollout group" in rows[2]["reason"] and "\x1b" not in rows[1]["reason"]
    group = catalogue.group(rows[0]["key"])
    segment = group["rollouts"][0]["segments"][0]
    assert segment["lags"] == [2, 2, 2] and segment["kept"] == [None] * 3
    assert group["missing"] and "policy 12" in group["remark"]
    assert "dead: reward: x" in catalogue.group(rows[1]["key"])["problem"]
    assert [row["index"] for row in catalogue.page(RowQuery(lag_min=2))["rows"]] == [7]


@pytest.mark.redis
def test_a_dead_group_on_the_stream_is_shown_as_far_as_it_came(redis_client, keys):
    redis_client.xadd(keys.rollouts, unscored_fields(8, "reward: KeyError: 'x'"))
    catalogue = Catalogue("test", StreamSource(redis_client, keys), None)
    (row,) = catalogue.page(RowQuery())["rows"]
    assert (row["outcome"], row["rewards"], row["reason"]) == ("dead", (), "reward: KeyError: 'x'")
    group = msgspec.json.decode(msgspec.json.encode(catalogue.group(row["key"])))  # as the page gets it
    assert group["prompt"]["text"] and [rollout["reward"] for rollout in group["rollouts"]] == [None, None]
    assert len(group["rollouts"][0]["segments"][0]["token_ids"]) == 6


def test_a_group_that_died_before_it_was_scored_is_in_the_list_and_shown_as_far_as_it_came(tmp_path):
    inspected_run(tmp_path, close=False).append(dead_batch(11))
    catalogue = Catalogue(NAME, RecordSource(Record(tmp_path / NAME)), None)
    unposed, unscored = catalogue.page(RowQuery(outcome="dead", size=2))["rows"]
    assert (unposed["index"], unscored["index"]) == (302, 301)
    assert catalogue.group(unposed["key"])["problem"] == "dead: prompt: boom"
    group = msgspec.json.decode(msgspec.json.encode(catalogue.group(unscored["key"])))
    assert [rollout["reward"] for rollout in group["rollouts"]] == [None, None]
    assert group["missing"] == ["proximal logprobs and weights: no token scored (it died before)"]
    assert [row["index"] for row in catalogue.page(RowQuery(sort="reward", size=200))["rows"][-2:]] == [301, 302]


@pytest.mark.redis
def test_what_was_trimmed_before_the_page_came_and_between_two_looks_is_said(redis_client, keys):
    for index in range(1, 11):
        redis_client.xadd(keys.rollouts, group_fields(index, 12))
    redis_client.xtrim(keys.rollouts, maxlen=4, approximate=False)
    source = StreamSource(redis_client, keys)
    assert [row.entry.index for row in source.rows] == [7, 8, 9, 10]
    assert "6 entries were trimmed from the stream before this page started" in source.notes
    for index in range(11, 16):
        redis_client.xadd(keys.rollouts, group_fields(index, 12))
    redis_client.xtrim(keys.rollouts, maxlen=3, approximate=False)
    source.refresh()
    assert [row.entry.index for row in source.rows] == [7, 8, 9, 10, 13, 14, 15], "those read are kept"
    assert "2 entries arrived and were trimmed between two reads" in source.notes
    assert source.read(source.rows[0].key).group.index == 7
    before = source.revision
    source.refresh()
    assert source.revision == before


@pytest.mark.redis
def test_a_stream_that_is_not_there_yet_and_one_that_began_anew_are_followed(redis_client, keys):
    source = StreamSource(redis_client, keys)
    assert source.rows == []
    redis_client.xadd(keys.rollouts, group_fields(1, 12), id="99999999999999-0")
    source.refresh()
    redis_client.delete(keys.rollouts)
    redis_client.xadd(keys.rollouts, group_fields(2, 12))
    source.refresh()
    assert [row.entry.index for row in source.rows] == [1, 2]
    assert source.rows[0].number < source.rows[1].number


@pytest.mark.redis
def test_a_link_to_the_stream_means_the_same_groups_to_whoever_looks_later(redis_client, keys):
    for index in range(1, 8):
        redis_client.xadd(keys.rollouts, group_fields(index, 12), id=f"1763770000123-{index}")
    first = StreamSource(redis_client, keys)
    redis_client.xtrim(keys.rollouts, maxlen=4, approximate=False)
    redis_client.xadd(keys.rollouts, group_fields(8, 12))
    later = StreamSource(redis_client, keys)
    assert [row.number for row in later.rows[:4]] == [row.number for row in first.rows[3:]]
    assert later.rows[-1].number > first.rows[-1].number
    assert first.rows[-1].number < 2**53, "a browser's numbers are exact up to there"


@pytest.mark.redis
def test_an_entry_id_that_no_clock_gives_is_counted_on_from_the_one_before(redis_client, keys):
    for index, entry in enumerate(("1763770000123-0", f"{10**13}-0", f"{10**18}-7", f"{2**64 - 1}-9"), start=1):
        redis_client.xadd(keys.rollouts, group_fields(index, 12), id=entry)
    first, *others = (row.number for row in StreamSource(redis_client, keys).rows)
    assert others == [first + 1, first + 2, first + 3]


@pytest.mark.redis
def test_the_memory_for_groups_read_is_bounded_and_says_what_was_forgotten(redis_client, keys):
    size = len(encode_group(make_group(1, 12)))
    source = StreamSource(redis_client, keys, kept_bytes=3 * size)
    entries = [redis_client.xadd(keys.rollouts, group_fields(index, 12)).decode() for index in range(1, 11)]
    source.refresh()
    assert [row.entry.index for row in source.rows] == [8, 9, 10]
    assert "the oldest 7 groups were dropped here, to bound memory" in source.notes
    assert [source.read(row.key).group.index for row in source.rows] == [8, 9, 10]
    for forgotten in entries[:7]:
        with pytest.raises(KeyError):
            source.read(forgotten)


@pytest.mark.redis
def test_a_first_look_at_a_long_stream_is_bounded_too(redis_client, keys, monkeypatch):
    for index in range(1, 201):
        redis_client.xadd(keys.rollouts, group_fields(index, 12))
    most, read = [], StreamSource._read

    def watched(source: StreamSource) -> bool:
        most.append(len(source.rows))
        return read(source)

    monkeypatch.setattr(StreamSource, "_read", watched)
    source = StreamSource(redis_client, keys, kept_bytes=3 * len(encode_group(make_group(200, 12))))
    assert max(most) <= 3 and [row.entry.index for row in source.rows] == [198, 199, 200]
    assert "the oldest 197 groups were dropped here, to bound memory" in source.notes


@pytest.mark.redis
def test_texts_of_groups_forgotten_are_forgotten(redis_client, keys, monkeypatch):
    class Watched(TextSearch):
        def keep(self, rows):
            kept.extend([{row.key for row in rows}])
            super().keep(rows)

    kept: list[set[str]] = []
    monkeypatch.setattr("penstock.deploy.inspector.catalogue.TextSearch", Watched)
    source = StreamSource(redis_client, keys, kept_bytes=3 * len(encode_group(make_group(1, 12))))
    catalogue = Catalogue("test", source, None)
    for index in range(1, 11):
        redis_client.xadd(keys.rollouts, group_fields(index, 12))
        monkeypatch.setattr("penstock.deploy.inspector.catalogue.REFRESH_S", 0.0)
        catalogue.run()
        assert catalogue.page(RowQuery(q="12+34"))["num_found"] == min(index, 3)
    assert kept[-1] == {row.key for row in source.rows} and len(kept) == 10


@pytest.mark.redis
def test_the_time_for_a_group_of_the_stream_does_not_grow_with_their_number(redis_client, keys):
    class Unscanned(list):
        def __iter__(self):
            raise AssertionError("every group was gone through")

    redis_client.xadd(keys.rollouts, group_fields(1, 12))
    source = StreamSource(redis_client, keys)
    key = source.rows[0].key
    source.rows = Unscanned(source.rows)
    assert source.read(key).group.index == 1


@pytest.mark.redis
def test_lags_after_a_rollback_are_counted_through_the_fork(redis_client, keys):
    redis_client.hset(keys.commit, mapping={Commit.VERSION: make_version(1, 3), b"fork:1": 10, b"announced:0": 12})
    redis_client.xadd(keys.rollouts, group_fields(1, 12))
    assert StreamSource(redis_client, keys).rows[0].entry.max_lag == 5


@pytest.mark.redis
def test_a_redis_that_goes_away_leaves_what_was_read_and_a_note(server_binary, keys, monkeypatch):
    server = RealServer(server_binary)
    try:
        server.client.xadd(keys.rollouts, group_fields(1, 12))
        catalogue = Catalogue("test", StreamSource(server.client, keys), None)
        server.stop()
        monkeypatch.setattr("penstock.deploy.inspector.catalogue.REFRESH_S", 0.0)
        run = catalogue.run()
        assert run["num_groups"] == 1
        assert any("cannot be read now" in note for note in run["notes"])
        (row,) = catalogue.page(RowQuery())["rows"]
        assert catalogue.group(row["key"])["prompt"]["text"] == "12+34="
    finally:
        server.remove()


# ---- the command


@contextmanager
def started(
    log: Path, *arguments: str, fresh: bool = False, **environment: str
) -> Iterator[tuple[subprocess.Popen | ForkedProgram, http.client.HTTPConnection, list[str]]]:
    """The process, a connection to the URL that it printed, and the lines up to that; all its output goes to `log`."""
    program = "import sys; from penstock.deploy.cli import main; sys.exit(main(sys.argv[1:]))"
    process = start_program(program, ["inspect", *arguments], {**os.environ, **environment}, log, fresh=fresh)
    try:
        wait_for(lambda: "(Ctrl-C ends)\n" in log.read_text(), process=process, log=log.read_text)
        lines = log.read_text().splitlines(keepends=True)
        connection = http.client.HTTPConnection(lines[-1].split("/")[2], timeout=30)
        yield process, connection, lines
        connection.close()
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_prints_its_url_and_ends_cleanly(run, tmp_path, number):
    log = tmp_path / "log"
    arguments = NAME, "--runs", str(run.parent), "--port", "0"
    with started(log, *arguments, fresh=number == signal.SIGINT) as (process, connection, lines):
        assert lines[0] == f"{NAME}: reading its rollouts, loading its tokenizer ...\n"
        told = asked(connection, "/api/run")
        assert told["notes"] == [] and len(lines) == 3
        assert (told["name"], told["kind"], told["num_groups"]) == (NAME, "record", NUM_PLAIN + 5)
        process.send_signal(number)  # with a connection that is kept open
        assert process.wait(60) == 0
        assert log.read_text() == "".join(lines)


def test_a_run_or_a_port_that_is_none_is_refused_in_one_line(run, tmp_path, capsys, server):
    def refused(*arguments: str) -> str:
        assert cli.main(["inspect", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        return error

    assert "neither a folder nor a run" in refused("nothing", "--runs", str(tmp_path))
    assert f"--port {server.server_port}: Address already in use" in refused(
        str(run), "--port", str(server.server_port)
    )
    assert "--port 70000: expected 0 to 65535" in refused(str(run), "--port", "70000")
    for host in ("localhost", "::", "300.1.1.1", ""):
        assert f"--host {host}: expected an IPv4 address" in refused(str(run), "--host", host)
    assert "--host 192.0.2.1 --port 0: " in refused(str(run), "--host", "192.0.2.1", "--port", "0")


@pytest.mark.redis
def test_a_run_without_a_record_is_looked_at_on_its_stream(redis_client, redis_url, tmp_path):
    config = settings(tmp_path)
    keys = Keys(NAME)
    save_run_file(config, tmp_path / NAME)
    redis_client.hset(keys.commit, mapping={Commit.VERSION: 3})
    redis_client.xadd(keys.rollouts, group_fields(5, 2))
    arguments = NAME, "--runs", str(tmp_path), "--port", "0"
    with started(tmp_path / "log", *arguments, REDIS_URL=redis_url) as (process, connection, lines):
        assert f"{WITHOUT_RECORD}\n" in lines and WITHOUT_RECORD in asked(connection, "/api/run")["notes"]
        (row,) = asked(connection, "/api/groups")["rows"]
        assert (row["index"], row["lags"]) == (5, [1, 1])
        redis_client.xadd(keys.rollouts, group_fields(6, 3))
        wait_for(lambda: asked(connection, "/api/run")["num_groups"], lambda number: number == 2)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0


def asked(connection: http.client.HTTPConnection, path: str) -> Any:
    connection.request("GET", path)
    return json.loads(connection.getresponse().read())
