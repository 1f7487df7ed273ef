"""The inspector's page in a real headless Chromium, over a record that is known token by token."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from transformers import AutoTokenizer

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
    TURNS_KEY,
    entry_of,
    group_of,
    inspected_run,
    plain,
    scored,
    segment,
    trainer_files,
    write_batch,
)
from penstock.deploy.inspector.catalogue import Catalogue
from penstock.deploy.inspector.server import InspectorServer
from penstock.deploy.inspector.sources import RecordSource
from penstock.deploy.inspector.tokens import TokenTexts
from penstock.schemas.prompt import Prompt, Reward
from penstock.schemas.record_reader import Record
from penstock.schemas.rollout import Rollout
from waiting import wait_for

pytestmark = [needs_browser, pytest.mark.slow, pytest.mark.xdist_group("browser")]

INDEXES = "[...document.querySelectorAll('#rows tr')].map((row) => Number(row.children[1].innerText))"
ALL = NUM_PLAIN + 5


class Page:
    """A run that is still written, its inspector, and a browser."""

    def __init__(self, runs: Path) -> None:
        self.files = inspected_run(runs, close=False)
        texts = TokenTexts(AutoTokenizer.from_pretrained(runs / "model"))
        self.server = InspectorServer(Catalogue(NAME, RecordSource(Record(runs / NAME)), texts), 0)
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()
        self.browser = Browser()

    def open(self, query: str = "") -> Browser:
        """Opened anew, its list there."""
        self.browser.errors.clear()
        self.browser.requests.clear()
        self.browser.dialogs.clear()
        self.browser.open("about:blank")
        self.browser.open(f"{self.server.url}{query}")
        self.browser.wait_for(
            "document.getElementById('num-found').innerText || !document.getElementById('problem').hidden"
        )
        return self.browser

    def take_in(self, num_groups: int) -> None:
        """Until the server has looked at what was written."""
        wait_for(lambda: self.server.catalogue.run()["num_groups"], lambda found: found >= num_groups)

    def newest(self) -> int:
        """Returns the moment that a link copied now would name, if nothing has come since."""
        newest: int = self.server.catalogue.run()["newest"]
        return newest

    def check(self) -> None:
        """Nothing went wrong, nothing opened, and nothing was asked of anybody else."""
        assert self.browser.errors == [] and self.browser.dialogs == []
        allowed = (self.server.url, "about:blank", "data:,")
        assert [url for url in self.browser.requests if not url.startswith(allowed)] == []

    def close(self) -> None:
        self.browser.close()
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()
        self.files.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    page = Page(tmp_path_factory.mktemp("runs"))
    yield page
    page.close()


@pytest.fixture
def own_page(tmp_path: Path) -> Iterator[Page]:
    """For a test that writes groups, which others would see."""
    page = Page(tmp_path)
    yield page
    page.close()


def group_is(browser: Browser, index: int) -> None:
    browser.wait_for("document.getElementById('title').innerText", lambda title: title.startswith(f"Group {index}:"))
    # What a frame has not drawn yet has no innerText (content-visibility: auto).
    browser.wait_for("document.querySelector('.sibling h3')?.innerText")


def colours(browser: Browser, number: int) -> list[tuple[int, int, int]]:
    """Returns the colours of the first sibling's sampled tokens, as the picture shows them."""
    box = json.dumps(".sibling .t.sampled")
    picture = browser.screenshot()
    places = browser.evaluate(
        f"[...document.querySelectorAll({box})].slice(0, {number}).map((token) => "
        "{ const box = token.getClientRects()[0]; return [Math.ceil(box.x) + 1, Math.ceil(box.y) + 1]; })"
    )
    return [picture.getpixel((x, y)) for x, y in places]


def test_the_list_opens_filters_by_field_and_says_so_in_its_link(page):
    browser = page.open()
    assert browser.wait_for(INDEXES, len)[:5] == [105, 104, 103, 102, 101]
    assert browser.text("#num-found") == f"{ALL} of {ALL} groups" and browser.text("#page") == "Page 1 of 2"
    browser.click("[name=lag_min]")
    browser.type("4")
    browser.wait_for(INDEXES, lambda found: found == [TURNS, KNOWN])
    assert browser.evaluate("location.search") == f"?lag_min=4&until={page.newest()}"
    browser.click("[name=ess_max]")
    browser.type("0.5")
    browser.wait_for(INDEXES, lambda found: found == [KNOWN])
    browser.evaluate("history.back()")
    browser.wait_for(INDEXES, lambda found: found == [TURNS, KNOWN])
    assert browser.evaluate("document.querySelector('[name=ess_max]').value") == ""
    browser.click("#clear")
    browser.wait_for(INDEXES, lambda found: len(found) == 50)
    page.check()


@pytest.mark.parametrize("width", [1440, 1920])
def test_the_table_is_whole_beside_an_open_group(page, width):
    browser = page.open(f"?group={KNOWN_KEY}")
    group_is(browser, KNOWN)
    browser.wait_for(INDEXES, lambda found: KNOWN in found)
    browser.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
    room = f"innerWidth === {width} && (({{scrollWidth, clientWidth}}) => [scrollWidth, clientWidth])"
    needed, there = browser.wait_for(f"{room}(document.querySelector('.scroll'))")
    browser.call("Emulation.clearDeviceMetricsOverride")
    assert needed <= there
    assert browser.evaluate("document.querySelector('#rows tr[aria-current] .prompt').innerText") == "2+2="


def test_a_filter_that_is_none_is_named_and_the_page_goes_on(page):
    browser = page.open("?lag_min=x")
    assert browser.wait_for("document.getElementById('problem').innerText") == "lag_min = 'x': expected a whole number"
    browser.errors = [error for error in browser.errors if "400" not in error]
    browser.click("#clear")
    browser.wait_for(INDEXES, len)
    assert browser.evaluate("document.getElementById('problem').hidden")
    page.check()


def test_columns_sort_and_pages_turn(page):
    browser = page.open("?sort=ess&order=asc")
    browser.wait_for(INDEXES, lambda found: found[:3] == [KNOWN, 70, 69])
    assert browser.evaluate("document.querySelector('th[aria-sort=ascending]').innerText").startswith("ESS")
    browser.click("#next")
    browser.wait_for(INDEXES, lambda found: len(found) == ALL - 50)
    assert browser.text("#page") == "Page 2 of 2" and "page=2" in browser.evaluate("location.search")
    browser.click("th button", 1)
    browser.wait_for(INDEXES, lambda found: found[:2] == [105, 104])
    page.check()


def test_a_click_opens_a_group_with_its_tokens_in_the_colours_of_their_lag(page):
    browser = page.open("?lag_min=4")
    browser.wait_for(INDEXES, len)
    browser.click(f"tr[data-key='{KNOWN_KEY}']")
    group_is(browser, KNOWN)
    tokens = "[...document.querySelectorAll('.sibling')].map((one) => one.querySelector('.tokens').innerText)"
    assert browser.evaluate(tokens) == ["2+2=abcdef", "2+2=‥é‥é"]
    legend = browser.evaluate("[...document.querySelectorAll('#legend li')].map((one) => one.innerText)")
    assert legend == ["0", "1", "2", "3", "4", "5 or more"]
    seen = colours(browser, 6)
    assert len(set(seen)) == 6
    swatches = browser.evaluate(
        "[...document.querySelectorAll('#legend i')].map((one) => getComputedStyle(one).backgroundColor)"
    )
    assert [f"rgb({r}, {g}, {b})" for r, g, b in seen] == swatches[::-1], "lags 5, 4, 3, 2, 1, 0"
    assert browser.text("#prompt").split() == ["prompt", "2+2=", "answer", "4"]
    dimmed = "getComputedStyle(document.querySelector('.t.context')).opacity"
    assert float(browser.evaluate(dimmed)) < 1
    page.check()


@pytest.mark.parametrize(
    ("mode", "classes", "legend"),
    [
        ("version", ["cat-0", "cat-1", "cat-2", "cat-3", "cat-4", "cat-5"], "15"),
        ("gap", ["div-0", "div-1", "div-2", "div-3", "div-4", "div-6"], "below \u22121"),
        ("weight", ["no", "div-1", "div-2", "div-3", "div-4", "div-6"], "0: masked"),
        ("mask", ["no", "yes", "yes", "yes", "yes", "yes"], "kept"),
    ],
)
def test_each_number_has_its_colours(page, mode, classes, legend):
    browser = page.open(f"?group={KNOWN_KEY}&mode={mode}")
    group_is(browser, KNOWN)
    shown = browser.evaluate("[...document.querySelectorAll('.sibling .t.sampled')].map((one) => one.classList[2])")
    assert shown[:6] == classes
    assert browser.text("#legend li") == legend
    seen = colours(browser, 6)
    assert len(set(seen)) == len(set(classes)) and seen[1] == seen[2] if mode == "mask" else len(set(seen)) == 6
    assert browser.evaluate("document.querySelector('#modes [aria-checked=true]').dataset.mode") == mode
    page.check()


def test_a_token_pointed_at_says_all_its_numbers(page):
    browser = page.open(f"?group={KNOWN_KEY}")
    group_is(browser, KNOWN)
    browser.hover(".sibling .t.sampled", 0)
    browser.wait_for("document.getElementById('token').innerText", lambda text: "masked" in text)
    words = " ".join(browser.text("#token").split())
    assert words == (
        'token "a" id 97 position 4 version 15 lag 5 behavior logprob -2 proximal logprob -4 gap -2 weight 0 masked'
    )
    browser.hover(".sibling:nth-child(2) .t.sampled", 0)
    browser.wait_for("document.getElementById('token').innerText", lambda text: "C3" in text)
    assert "bytes C3" in " ".join(browser.text("#token").split()) and "kept" in browser.text("#token")
    browser.hover(".t.context", 1)
    browser.wait_for("document.getElementById('token').innerText", lambda text: "context" in text)
    page.check()


def test_the_keyboard_is_enough(page):
    browser = page.open()
    browser.wait_for(INDEXES, len)
    browser.press("j")
    group_is(browser, HOSTILE)
    for _ in range(4):
        browser.press("j")
    group_is(browser, KNOWN)
    browser.press("k")
    group_is(browser, TURNS)
    browser.press("j")
    group_is(browser, KNOWN)
    browser.press("l")
    current = "[...document.querySelectorAll('.sibling')].findIndex((one) => one.ariaCurrent === 'true')"
    assert browser.wait_for(current, lambda n: n == 1) == 1
    browser.press("ArrowLeft")
    browser.wait_for(current, lambda n: n == 0)
    browser.press("w")
    browser.press("w")
    assert browser.evaluate("document.activeElement.innerText") == "b"
    assert "weight 0.6" in " ".join(browser.text("#token").split())
    browser.press("b")
    assert browser.evaluate("document.activeElement.innerText") == "a"
    browser.press("c")
    browser.press("c")
    browser.press("C")
    assert browser.evaluate("location.search") == f"?group={KNOWN_KEY}&mode=version&until={page.newest()}"
    browser.press("?")
    assert browser.evaluate("document.getElementById('help').open")
    browser.press("Escape")
    browser.wait_for("!document.getElementById('help').open")
    browser.press("/")
    assert browser.evaluate("document.activeElement.name") == "q"
    browser.type("49+")
    browser.wait_for(INDEXES, lambda found: found == [49])
    browser.press("j")
    assert browser.evaluate("location.search").startswith("?q=49"), "a letter in a field moves nothing"
    browser.press("Escape")
    assert browser.evaluate("document.activeElement === document.body")
    page.check()


def test_j_goes_on_to_the_next_page(page):
    browser = page.open()
    last = browser.wait_for(INDEXES, lambda found: len(found) == 50)[-1]
    browser.click("#rows tr", 49)
    group_is(browser, last)
    browser.press("j")
    group_is(browser, last - 1)
    assert "page=2" in browser.evaluate("location.search")
    browser.press("k")
    group_is(browser, last)
    page.check()


def test_a_link_shows_somebody_else_the_same(page):
    browser = page.open(f"?lag_min=4&sort=weight&group={KNOWN_KEY}&sibling=2&mode=mask")
    group_is(browser, KNOWN)
    browser.wait_for(INDEXES, lambda found: found == [KNOWN, TURNS])
    assert browser.evaluate("document.querySelector('.sibling[aria-current]').innerText").startswith("Sibling 2 of 2")
    assert browser.evaluate("document.querySelector('tr[aria-current]').dataset.key") == KNOWN_KEY
    assert browser.evaluate("document.querySelector('[aria-checked=true]').innerText") == "Mask"
    page.check()


def test_a_link_holds_its_page_and_its_export_while_more_comes_in(tmp_path):
    page = Page(tmp_path)
    try:
        browser = page.open()
        browser.wait_for(INDEXES, len)
        assert browser.evaluate("location.search") == "", "nothing is chosen, and so the newest are shown"
        browser.click("#next")
        seen = browser.wait_for(INDEXES, lambda found: len(found) == ALL - 50)
        link = browser.evaluate("location.search")
        write_batch(page.files, 11, [plain(300), plain(301)])
        page.take_in(ALL + 2)
        page.open(link)
        browser.wait_for("!document.getElementById('fresh').hidden")
        assert browser.evaluate(INDEXES) == seen and browser.evaluate("location.search") == link
        browser.press("e")
        assert len(browser.downloaded().read_text().splitlines()) == ALL
        browser.press("r")
        browser.wait_for(INDEXES, lambda found: found[2:] == seen)
        assert browser.evaluate("location.search") == f"?page=2&until={page.newest()}" != link
        page.open(link)
        browser.wait_for(INDEXES, lambda found: found == seen)
        browser.click("#previous")
        browser.wait_for(INDEXES, lambda found: found[:1] == [301])
        assert browser.evaluate("location.search") == "", "the bare address shows the newest"
        page.open("?page=2")
        browser.wait_for("location.search", lambda now: now == f"?page=2&until={page.newest()}")
        page.open("?page=2&until=x")
        assert browser.wait_for(INDEXES, len)[2:] == seen, "a moment that is none is the present"
        page.check()
    finally:
        page.close()


@pytest.mark.parametrize("mode", ["constructor", "toString", "__proto__", "none"])
def test_a_link_with_a_mode_that_is_none_shows_lags(page, mode):
    browser = page.open(f"?group={KNOWN_KEY}&mode={mode}")
    group_is(browser, KNOWN)
    assert browser.wait_for("document.querySelector('#modes [aria-checked=true]')?.dataset.mode") == "lag"
    assert browser.evaluate("document.querySelectorAll('#legend li').length") == 6
    page.check()


def test_segments_stand_in_order_and_what_was_not_scored_is_told(page):
    browser = page.open(f"?group={TURNS_KEY}&mode=weight")
    group_is(browser, TURNS)
    heads = browser.evaluate("[...document.querySelectorAll('.sibling h4')].map((one) => one.innerText)")
    assert heads == ["Segment 1 of 2: stop", "Segment 2 of 2: stop"]
    assert browser.evaluate("document.querySelectorAll('.t.sampled.none').length") == 3
    browser.click("#facts summary")
    assert "1 of 2 segments not scored" in browser.text("#facts")
    page.check()


def test_the_filtered_groups_are_downloaded(page):
    browser = page.open("?lag_min=4")
    browser.wait_for(INDEXES, len)
    browser.press("e")
    lines = [json.loads(line) for line in browser.downloaded().read_text().splitlines()]
    assert [line["index"] for line in lines] == [TURNS, KNOWN]
    assert lines[1]["rollouts"][0]["segments"][0]["lags"] == [5, 4, 3, 2, 1, 0]
    page.check()


def test_text_of_strangers_is_text(page):
    browser = page.open(f"?group={HOSTILE_KEY}&mode=mask")
    group_is(browser, HOSTILE)
    browser.click("#facts summary")
    for nth in (0, 40, 90):
        browser.hover(".t", nth)
    assert browser.evaluate("document.querySelectorAll('script').length") == 1
    assert (
        browser.evaluate("document.querySelectorAll('img, iframe, b, [onmouseover], [onerror], [style]').length") == 0
    )
    text = browser.text("#prompt")
    assert "</script><script>alert(1)</script><img src=x onerror=alert(2)>" in text
    for shown in ("U+202E", "U+2066", "U+001B", "U+0000", "U+200B"):
        assert shown in text and shown in browser.text("#facts") and shown in browser.text(".sibling .sub"), shown
    assert "U+001B" in browser.text(".tokens")
    hidden = "/[\\u0000\\u001b\\u200b\\u202e\\u2066]/.test(document.body.innerText)"
    assert browser.evaluate(hidden) is False
    options = "[...document.querySelector('[name=producer]').options].map((one) => one.value)"
    assert HOSTILE_TEXT in browser.evaluate(options)
    page.check()


def test_a_hostile_link_is_text_too(page):
    browser = page.open(f"?producer={quote(HOSTILE_TEXT)}&group={quote(HOSTILE_TEXT)}&q={quote(HOSTILE_TEXT)}")
    browser.wait_for("document.getElementById('trouble').innerText", lambda text: text == "no such group here")
    browser.errors = [error for error in browser.errors if "404" not in error]
    assert browser.evaluate("document.querySelectorAll('script').length") == 1
    page.check()


def test_what_comes_in_meanwhile_is_told_and_moves_nothing(own_page):
    page = own_page
    browser = page.open(f"?group={KNOWN_KEY}&sibling=2")
    group_is(browser, KNOWN)
    before = browser.wait_for(INDEXES, len)
    write_batch(page.files, 11, [plain(300)])
    browser.wait_for("!document.getElementById('fresh').hidden")
    assert browser.evaluate(INDEXES) == before
    browser.press("r")
    browser.wait_for(INDEXES, lambda found: found[0] == 300)
    assert browser.evaluate("document.querySelector('tr[aria-current]').dataset.key") == KNOWN_KEY
    assert browser.evaluate("document.querySelector('.sibling[aria-current]').innerText").startswith("Sibling 2")
    browser.click("#follow")
    write_batch(page.files, 12, [plain(301)])
    browser.wait_for(INDEXES, lambda found: found[0] == 301)
    assert browser.evaluate("location.search").endswith(f"&until={page.newest()}")
    assert browser.evaluate("document.activeElement.id") == "follow"
    browser.press("k")
    group_is(browser, TURNS)
    page.check()


def test_two_dozen_versions_are_told_apart(tmp_path):
    page = Page(tmp_path)
    try:
        versions = list(range(24))
        answer = "abcdefghijklmnopqrstuvwx"
        rollout = Rollout(segments=(segment("1+1=", answer, versions, [-1.0] * 24),), reward=Reward(value=1.0))
        group = group_of(400, (rollout,), Prompt(text="1+1="), "producer-0")
        findings = ((scored(versions, [-1.0] * 24, [1.0] * 24, b"\1" * 24),),)
        write_batch(page.files, 11, [(group, findings, entry_of(group, "trained", lags=(0, 23)))])
        page.take_in(ALL + 1)
        browser = page.open("?group=0-11-0&mode=version")
        group_is(browser, 400)
        look = "getComputedStyle(one).backgroundColor + getComputedStyle(one).backgroundImage"
        tokens = browser.evaluate(f"[...document.querySelectorAll('.t.sampled')].map((one) => {look})")
        swatches = browser.evaluate(f"[...document.querySelectorAll('#legend i')].map((one) => {look})")
        assert tokens == swatches and len(set(tokens)) == 24
        page.check()
    finally:
        page.close()


def test_a_link_to_what_a_rollback_undid_meanwhile_says_so(tmp_path):
    page = Page(tmp_path)
    try:
        browser = page.open(f"?group={KNOWN_KEY}&q=2%3D")
        group_is(browser, KNOWN)
        browser.wait_for(INDEXES, lambda found: found[0] == KNOWN)
        again = trainer_files(tmp_path, 1, {0: 10})
        write_batch(again, 10, [plain(202)])
        browser.wait_for("!document.getElementById('fresh').hidden")
        browser.press("r")
        browser.wait_for(INDEXES, lambda found: found[0] == 202 and KNOWN not in found)
        assert browser.evaluate("document.querySelector('tr[aria-current]')") is None
        page.open(f"?group={KNOWN_KEY}")
        browser.wait_for(
            "document.getElementById('trouble').innerText",
            lambda text: text == "batch 10 of trainer 0 was undone by a rollback",
        )
        browser.errors = [error for error in browser.errors if "404" not in error]
        page.check()
        again.close()
    finally:
        page.close()
