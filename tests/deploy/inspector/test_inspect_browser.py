"""The inspector's page in a real headless Chromium, over a record that is known token by token."""

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from transformers import AutoTokenizer

import wire_examples
from browser import Browser, needs_browser
from inspected_run import (
    HOSTILE,
    HOSTILE_KEY,
    HOSTILE_TEXT,
    KNOWN,
    KNOWN_KEY,
    NAME,
    NUM_PLAIN,
    TURNS,
    entry_of,
    inspected_run,
    plain,
    settings,
    trainer_files,
    write_batch,
)
from penstock.deploy.inspector.catalogue import Catalogue
from penstock.deploy.inspector.server import InspectorServer
from penstock.deploy.launch.run_folder import save_run_file
from penstock.deploy.report.tokens import TokenTexts
from penstock.schemas.record_reader import Record

pytestmark = [needs_browser, pytest.mark.slow, pytest.mark.xdist_group("browser")]

INDEXES = "[...document.querySelectorAll('#rows tr')].map((row) => Number(row.children[1].innerText))"
ALL = NUM_PLAIN + 5


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def files(runs):
    """The record files of a run that is still written."""
    files = inspected_run(runs, close=False)
    yield files
    files.close()


@pytest.fixture(scope="module")
def server(runs, files) -> Iterator[InspectorServer]:
    texts = TokenTexts(AutoTokenizer.from_pretrained(runs / "model"))
    server = InspectorServer(Catalogue(NAME, Record(runs / NAME), texts), 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def opened(server) -> Iterator[Browser]:
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture
def browser(server, opened) -> Iterator[Browser]:
    """At a test's end nothing went wrong, nothing opened, and nothing was asked of anybody else."""
    yield opened
    assert opened.errors == [] and opened.dialogs == []
    assert [url for url in opened.requests if not url.startswith((server.url, "about:blank", "data:,"))] == []


def group_is(browser: Browser, index: int) -> None:
    browser.wait_for("document.getElementById('title').innerText", lambda title: title.startswith(f"Group {index}:"))
    # What a frame has not drawn yet has no innerText (content-visibility: auto).
    browser.wait_for("document.querySelector('.sibling h3')?.innerText")


def test_the_list_is_filtered_sorted_paged_linked_and_exported(server, browser):
    browser.open(server.url)
    assert browser.wait_for(INDEXES, len)[:5] == [105, 104, 103, 102, 101]
    assert browser.text("#num-found") == f"{ALL} of {ALL} groups" and browser.text("#page") == "Page 1 of 2"
    assert browser.evaluate("location.search") == "", "nothing is chosen, and so the newest are shown"
    browser.click("#next")
    browser.wait_for(INDEXES, lambda found: len(found) == ALL - 50)
    browser.click("[name=lag_min]")
    browser.type("4")
    browser.wait_for(INDEXES, lambda found: found == [TURNS, KNOWN])
    until = server.catalogue.run()["newest"]
    assert browser.evaluate("location.search") == f"?lag_min=4&until={until}"
    browser.press("Escape")
    browser.press("e")
    lines = [json.loads(line) for line in browser.downloaded().read_text().splitlines()]
    assert [line["index"] for line in lines] == [TURNS, KNOWN]
    browser.click("th button[data-sort=reward]")
    browser.wait_for("document.querySelector('th[aria-sort]')?.innerText", lambda head: head.startswith("Reward"))
    browser.wait_for(INDEXES, lambda found: found == [KNOWN, TURNS])
    browser.open(f"{server.url}?lag_min=4&sort=weight&group={KNOWN_KEY}&sibling=2&mode=mask")
    group_is(browser, KNOWN)
    browser.wait_for(INDEXES, lambda found: found == [KNOWN, TURNS])
    assert browser.evaluate("document.querySelector('.sibling[aria-current]').innerText").startswith("Sibling 2 of 2")
    assert browser.evaluate("document.querySelector('[aria-checked=true]').innerText") == "Mask"
    browser.open(f"{server.url}?lag_min=x")
    assert browser.wait_for("document.getElementById('problem').innerText") == "lag_min = 'x': expected a whole number"
    browser.errors = [error for error in browser.errors if "400" not in error]


def test_a_group_is_opened_by_keys_its_tokens_in_the_colours_of_their_numbers(server, browser):
    browser.open(server.url)
    browser.wait_for(INDEXES, len)
    for _ in range(5):
        browser.press("j")
    group_is(browser, KNOWN)
    tokens = "[...document.querySelectorAll('.sibling')].map((one) => one.querySelector('.tokens').innerText)"
    assert browser.evaluate(tokens) == ["2+2=abcdef", "2+2=‥é‥é"]
    legend = browser.evaluate("[...document.querySelectorAll('#legend li')].map((one) => one.innerText)")
    assert legend == ["0", "1", "2", "3", "4", "5 or more"]
    swatches, tokens = (
        browser.evaluate(f"[...document.querySelectorAll('{of}')].map((one) => getComputedStyle(one).backgroundColor)")
        for of in ("#legend i", ".sibling .t.sampled")
    )
    assert tokens[:6] == swatches[::-1] and len(set(swatches)) == 6, "lags 5, 4, 3, 2, 1, 0"
    for classes in (
        ["cat-0", "cat-1", "cat-2", "cat-3", "cat-4", "cat-5"],
        ["div-0", "div-1", "div-2", "div-3", "div-4", "div-6"],
        ["no", "div-1", "div-2", "div-3", "div-4", "div-6"],
        ["no", "yes", "yes", "yes", "yes", "yes"],
    ):
        browser.press("c")
        shown = browser.evaluate("[...document.querySelectorAll('.sibling .t.sampled')].map((one) => one.classList[2])")
        assert shown[:6] == classes
    browser.press("w")
    assert " ".join(browser.text("#token").split()) == (
        'token "a" id 97 position 4 version 15 lag 5 behavior logprob -2 proximal logprob -4 gap -2 weight 0 masked'
    )
    browser.hover(".sibling:nth-child(2) .t.sampled", 0)
    browser.wait_for("document.getElementById('token').innerText", lambda text: "C3" in text)
    browser.press("k")
    group_is(browser, TURNS)
    heads = browser.evaluate("[...document.querySelectorAll('.sibling h4')].map((one) => one.innerText)")
    assert heads == ["Segment 1 of 2: stop", "Segment 2 of 2: stop"]


def test_text_of_strangers_is_text(server, browser):
    browser.open(f"{server.url}?group={HOSTILE_KEY}&mode=constructor")
    group_is(browser, HOSTILE)
    assert browser.wait_for("document.querySelector('#modes [aria-checked=true]')?.dataset.mode") == "lag"
    browser.click("#facts summary")
    for nth in (0, 40, 90):
        browser.hover(".t", nth)
    assert browser.evaluate("document.querySelectorAll('script').length") == 1
    strange = "img, iframe, b, [onmouseover], [onerror], [style]"
    assert browser.evaluate(f"document.querySelectorAll('{strange}').length") == 0
    text = browser.text("#prompt")
    assert "</script><script>alert(1)</script><img src=x onerror=alert(2)>" in text
    for shown in ("U+202E", "U+2066", "U+001B", "U+0000", "U+200B"):
        assert shown in text and shown in browser.text("#facts") and shown in browser.text(".sibling .sub"), shown
    hidden = "/[\\u0000\\u001b\\u200b\\u202e\\u2066]/.test(document.body.innerText)"
    assert browser.evaluate(hidden) is False
    options = "[...document.querySelector('[name=producer]').options].map((one) => one.value)"
    assert HOSTILE_TEXT in browser.evaluate(options)


def test_what_comes_in_meanwhile_is_told_and_moves_nothing_and_what_was_undone_says_so(server, browser, files, runs):
    browser.open(f"{server.url}?group={KNOWN_KEY}&sibling=2")
    group_is(browser, KNOWN)
    before = browser.wait_for(INDEXES, len)
    write_batch(files, 11, [plain(300)])
    browser.wait_for("!document.getElementById('fresh').hidden")
    assert browser.evaluate(INDEXES) == before
    browser.press("r")
    browser.wait_for(INDEXES, lambda found: found[0] == 300)
    assert browser.evaluate("document.querySelector('tr[aria-current]').dataset.key") == KNOWN_KEY
    again = trainer_files(runs, 1, {0: 10})
    write_batch(again, 10, [plain(202)])
    again.close()
    browser.click("#follow")
    browser.wait_for(INDEXES, lambda found: found[0] == 202 and KNOWN not in found)
    browser.open(f"{server.url}?group={KNOWN_KEY}")
    browser.wait_for(
        "document.getElementById('trouble').innerText",
        lambda text: text == "batch 10 of trainer 0 was undone by a rollback",
    )
    browser.errors = [error for error in browser.errors if "404" not in error]


def test_images_are_shown_in_the_prompt_and_before_their_tokens(tmp_path, opened):
    group = wire_examples.image_group()
    save_run_file(settings(tmp_path), tmp_path / NAME)
    with closing(trainer_files(tmp_path)) as files:
        write_batch(files, 0, [(group, (), entry_of(group, "trained", lags=(0, 0)))])
    texts = TokenTexts(AutoTokenizer.from_pretrained(tmp_path / "model"))
    server = InspectorServer(Catalogue(NAME, Record(tmp_path / NAME), texts), 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        opened.open(server.url)
        opened.wait_for(INDEXES, len)
        opened.press("j")
        group_is(opened, group.index)
        sizes = "[...document.querySelectorAll('#prompt img, .tokens img')].map((one) => one.naturalWidth)"
        opened.wait_for(sizes, lambda found: found == [2, 2, 2])
        before = "document.querySelector('.tokens img').nextSibling.facts.position"
        assert opened.evaluate(before) == 1 and opened.errors == []
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
