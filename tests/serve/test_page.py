"""The page in a real browser, against the application as it ships.

`WRITE_DOCS=1` makes the screenshot's test write docs/page.png as well; a normal run leaves the tree as it is.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, Route, expect, sync_playwright

pytestmark = [pytest.mark.serve, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
PATIENCE_MS = 60_000.0  # of the machine, not a promise
TEXT = "I was charged twice for the same card purchase."
LABELS = ["card not received", "duplicate card payment", "cash withdrawal: declined"]
# An emoji of five code points, CJK, a combining accent: all before the words that match.
WIDE_TEXT = f"\U0001f468\u200d\U0001f469\u200d\U0001f467 漢字 cafe\u0301 \U0001f615: {TEXT}"


@dataclass
class Opened:
    """A page in a context of its own; `errors`: what its console complained of, `hosts`: whom it asked."""

    page: Page
    errors: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def fill(self, text: str, labels: list[str]) -> None:
        self.page.get_by_label("Text", exact=True).fill(text)
        self.page.get_by_label("Labels, one per line").fill("\n".join(labels))

    def classify(self, text: str, labels: list[str]) -> None:
        """Returns once the answer to these is shown."""
        self.fill(text, labels)
        with self.page.expect_response("**/v1/classify"):
            self.page.get_by_role("button", name="Classify").click()
        expect(self.page.locator("#results")).to_have_attribute("aria-busy", "false")

    @property
    def rows(self) -> Locator:
        return self.page.get_by_role("option")

    @property
    def tokens(self) -> Locator:
        return self.page.locator("#tokens button")

    def expect_only_failed_loads(self) -> None:
        """The browser's own word on an answer other than 200 is the only complaint."""
        assert self.errors
        assert all("Failed to load resource" in error for error in self.errors)
        self.errors.clear()


Open = Callable[..., AbstractContextManager[Opened]]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium without a window; a test that needs it is skipped without it, but fails under CI=true."""
    binary = shutil.which("chromium")
    if binary is None:
        reason = "chromium is not installed (Debian: apt install chromium)"
        if os.environ.get("CI") == "true":
            pytest.fail(f"{reason}, and CI must not skip what needs it")
        pytest.skip(reason)
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # root may not have one
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=binary, args=sandbox)
        yield launched
        launched.close()


@pytest.fixture
def opened_page(browser: Browser, default_app: Any) -> Open:
    """Opens the page; at the end nothing but the service was asked for anything, and the console had no error."""

    @contextmanager
    def open_(path: str = "/", **options: Any) -> Iterator[Opened]:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 860}} | options)
        context.set_default_timeout(PATIENCE_MS)
        opened = Opened(context.new_page())
        opened.page.on("request", lambda request: opened.requests.append(request.url))
        opened.page.on("pageerror", lambda error: opened.errors.append(str(error)))
        opened.page.on("console", lambda said: opened.errors.append(said.text) if said.type == "error" else None)
        opened.page.goto(f"{default_app.url}{path}")
        yield opened
        context.close()
        assert opened.errors == []
        assert [url for url in opened.requests if not url.startswith((f"{default_app.url}/", "data:"))] == []

    return open_


@pytest.fixture
def opened(opened_page: Open) -> Iterator[Opened]:
    """The page, opened."""
    with opened_page() as page:
        yield page


@pytest.fixture(scope="module")
def ask(default_app: Any) -> Callable[..., dict[str, Any]]:
    """Gives the service's own answer to what the page asks."""

    def post(text: str, labels: list[Any]) -> dict[str, Any]:
        body = {"text": text, "labels": labels, "explain": "all"}
        response = httpx.post(f"{default_app.url}/v1/classify", json=body, timeout=60, trust_env=False)
        answer: dict[str, Any] = response.raise_for_status().json()
        return answer

    return post


expect.set_options(timeout=PATIENCE_MS)


def test_a_click_shows_the_services_scores_as_bars(opened: Opened, ask: Callable[..., dict[str, Any]]) -> None:
    """Typed text and labels, one click: the labels best first, with the API's numbers and bars as long as them."""
    opened.classify(TEXT, LABELS)
    scores = ask(TEXT, LABELS)["results"][0]["scores"]
    assert opened.rows.locator(".name").all_inner_texts() == [score["label"] for score in scores]
    for row, score in zip(opened.rows.all(), scores, strict=True):
        assert float(row.get_attribute("data-score") or "") == pytest.approx(score["score"], abs=1e-3)
        bar, track = (row.locator(part).bounding_box() for part in (".bar", ".track"))
        assert bar is not None
        assert track is not None
        assert bar["width"] == pytest.approx(max(2, track["width"] * score["score"]), abs=1.5)
    expect(opened.page.get_by_text(re.compile(r"^\d+ ms$"))).to_be_visible()
    expect(opened.page.get_by_text(re.compile("^[0-3] of 3 labels from the cache$"))).to_be_visible()
    expect(opened.page.get_by_role("status").last).to_contain_text("duplicate card payment")


def test_the_request_asks_for_all_matches(opened: Opened) -> None:
    """Names stay as typed, colons included; an arrow separates a name from its descriptions."""
    opened.fill(TEXT, ["cash: none", "", "refund => money back", "refund => money returned"])
    with opened.page.expect_request("**/v1/classify") as request:
        opened.page.get_by_label("Text", exact=True).press("Control+Enter")
    assert json.loads(request.value.post_data or "") == {
        "text": TEXT,
        "labels": ["cash: none", {"name": "refund", "description": ["money back", "money returned"]}],
        "explain": "all",
    }
    assert "authorization" not in request.value.headers
    expect(opened.rows).to_have_count(2)


@pytest.mark.parametrize("text", [TEXT, WIDE_TEXT])
def test_pointing_at_a_label_shows_the_words_that_it_matched(
    opened: Opened, ask: Callable[..., dict[str, Any]], text: str
) -> None:
    """For every label and each of its tokens, the word that is brought out is the one that the API names."""
    opened.classify(text, LABELS)
    matches = ask(text, LABELS)["results"][0]["matches"]
    assert len({match["text"] for match in matches}) > 2
    for row in opened.rows.all():
        row.hover()
        name = row.locator(".name").inner_text()
        expected = [match for match in matches if match["label"] == name]
        assert opened.tokens.all_inner_texts() == [match["token"] for match in expected]
        for token, match in zip(opened.tokens.all(), expected, strict=True):
            token.dispatch_event("mouseenter")
            assert opened.page.locator("mark.on").all_inner_texts() == [match["text"]]
            expect(opened.page.locator("#detail")).to_contain_text(f"similarity {match['similarity']:.2f}")
            token.dispatch_event("mouseleave")
    assert opened.page.locator("#text").inner_text() == text


def test_shading_follows_the_contribution(opened: Opened, ask: Callable[..., dict[str, Any]]) -> None:
    """The word with the largest contribution of all labels is fully shaded, the others in proportion to it."""
    opened.classify(TEXT, LABELS)
    matches = ask(TEXT, LABELS)["results"][0]["matches"]
    most = max(match["contribution"] for match in matches)
    best = [match["contribution"] for match in matches if match["label"] == "duplicate card payment"]
    weights = opened.tokens.evaluate_all("all => all.map(each => Number(each.style.getPropertyValue('--w')))")
    assert weights == pytest.approx([contribution / most for contribution in best], abs=1e-2)
    assert len(set(opened.tokens.evaluate_all("all => all.map(each => getComputedStyle(each).backgroundColor)"))) > 1


def test_leaving_the_labels_shows_the_chosen_one_again(opened: Opened) -> None:
    """Pointing is a look; a click stays."""
    opened.classify(TEXT, LABELS)
    shown = opened.page.locator("#shown-label")
    opened.rows.nth(1).hover()
    expect(shown).to_have_text("card not received")
    opened.page.locator("h1").hover()
    expect(shown).to_have_text("duplicate card payment")
    opened.rows.nth(1).click()
    opened.page.locator("h1").hover()
    expect(shown).to_have_text("card not received")


def test_what_was_cut_is_struck_out(opened: Opened, ask: Callable[..., dict[str, Any]]) -> None:
    """From `cut_at` on, in code points, the text is struck out, and a sentence says how much that is."""
    text = "\U0001f615 I was charged twice for the same card purchase. " * 30
    opened.classify(text, LABELS)
    truncation = ask(text, LABELS)["results"][0]["truncation"]
    assert "".join(opened.page.locator("#text s").all_text_contents()) == text[truncation["cut_at"] :]
    expect(opened.page.get_by_label("Warnings")).to_contain_text(f"the first {truncation['used']}")


def test_warnings_name_the_label(opened: Opened) -> None:
    """Labels that the model can't tell apart are named, with what to do."""
    opened.classify(TEXT, ["\U0001f984", "\U0001f980", "card"])
    expect(opened.page.get_by_label("Warnings")).to_contain_text(
        re.compile("^\U0001f980: .*word one of them differently")
    )


def test_a_duplicate_label_is_explained_where_it_stands(opened: Opened) -> None:
    """The message is shown, the field has the focus, and the line at fault is selected."""
    opened.classify(TEXT, ["first", "", "second", "first"])
    expect(opened.page.get_by_role("alert")).to_contain_text("Labels, line 4: 'first' is the same label")
    field_ = opened.page.get_by_label("Labels, one per line")
    expect(field_).to_be_focused()
    expect(field_).to_have_attribute("aria-invalid", "true")
    selected = field_.evaluate("f => [f.selectionStart, f.selectionEnd]")
    assert selected == [len("first\n\nsecond\n"), len("first\n\nsecond\nfirst")]
    opened.expect_only_failed_loads()
    opened.classify(TEXT, ["first", "second"])
    expect(opened.page.get_by_role("alert")).to_be_hidden()
    expect(opened.rows).to_have_count(2)


def test_an_empty_text_is_explained(opened: Opened) -> None:
    """The text field has the focus."""
    opened.classify(" ", LABELS)
    expect(opened.page.get_by_role("alert")).to_contain_text("Text: is empty")
    expect(opened.page.get_by_label("Text", exact=True)).to_be_focused()
    opened.expect_only_failed_loads()


@pytest.mark.parametrize(("status", "says"), [(429, "busy. Try again in 7 s."), (503, "not ready. Try again in 7 s.")])
def test_who_is_turned_away_can_try_again(opened: Opened, status: int, says: str) -> None:
    """Where the service says when to come back the page says so, and a button asks again."""
    body = json.dumps({"error": "too much at once", "error_type": "overloaded", "loc": []})

    def refuse(route: Route) -> None:
        route.fulfill(status=status, headers={"Retry-After": "7", "Content-Type": "application/json"}, body=body)

    opened.page.route("**/v1/classify", refuse, times=1)
    opened.classify(TEXT, LABELS)
    expect(opened.page.get_by_role("alert")).to_contain_text(says)
    opened.expect_only_failed_loads()
    opened.page.get_by_role("button", name="Try again").click()
    expect(opened.rows).to_have_count(3)


def test_a_lost_service_is_said(opened: Opened) -> None:
    """No answer at all is no silence on the page."""
    opened.page.route("**/v1/classify", lambda route: route.abort())
    opened.fill(TEXT, LABELS)
    opened.page.get_by_role("button", name="Classify").click()
    expect(opened.page.get_by_role("alert")).to_contain_text("The service did not answer.")
    opened.expect_only_failed_loads()


def test_a_key_is_sent_and_forgotten(opened: Opened) -> None:
    """It goes out as a bearer token, stands in no address and no storage, and is gone after a reload."""
    opened.page.get_by_text("API key", exact=True).click()
    opened.page.get_by_label("API key", exact=True).fill("s3cret")
    opened.fill(TEXT, LABELS)
    with opened.page.expect_request("**/v1/classify") as request:
        opened.page.get_by_role("button", name="Classify").click()
    assert request.value.headers["authorization"] == "Bearer s3cret"
    expect(opened.rows).to_have_count(3)
    stored = "JSON.stringify([location.href, {...localStorage}, {...sessionStorage}, document.cookie, history.state])"
    assert "s3cret" not in opened.page.evaluate(stored)
    opened.page.reload()
    assert opened.page.locator("#in-key").input_value() == ""


@pytest.mark.parametrize(
    ("status", "error_type", "asked"), [(401, "unauthenticated", True), (403, "not_local", False), (403, "", True)]
)
def test_a_key_is_asked_for_where_one_would_help(opened: Opened, status: int, error_type: str, *, asked: bool) -> None:
    """The field is shown, marked and has the focus; where no key would help, only the service's words are said."""
    answer = {"error": "the service says why", "error_type": error_type, "loc": []}
    opened.page.route("**/v1/classify", lambda route: route.fulfill(status=status, json=answer))
    opened.fill(TEXT, LABELS)
    opened.page.get_by_role("button", name="Classify").click()
    expect(opened.page.get_by_role("alert")).to_contain_text("the service says why")
    field_ = opened.page.locator("#in-key")
    expect(field_).to_be_focused() if asked else expect(field_).not_to_be_visible()
    assert (field_.get_attribute("aria-invalid") == "true") == asked
    assert ("API key" in opened.page.get_by_role("alert").inner_text()) == asked
    opened.expect_only_failed_loads()


def test_labels_of_a_stored_set_are_shown_and_used(opened: Opened, default_app: Any) -> None:
    """An id shows the set's name and labels, and the request sends the id only."""
    body = {"name": "questions <b>", "labels": LABELS}
    made = httpx.post(f"{default_app.url}/v1/label-sets", json=body, timeout=60, trust_env=False).json()
    opened.page.get_by_label("a stored set").check()
    field_ = opened.page.get_by_label("Id of the label set")
    field_.fill(made["id"])
    field_.blur()
    expect(opened.page.locator("#set-help")).to_have_text("questions <b>, 3 labels")
    assert opened.page.locator("#set-names li").all_inner_texts() == LABELS
    opened.page.get_by_label("Text", exact=True).fill(TEXT)
    with opened.page.expect_request("**/v1/classify") as request:
        field_.press("Enter")
    assert json.loads(request.value.post_data or "") == {"text": TEXT, "label_set": made["id"], "explain": "all"}
    expect(opened.rows).to_have_count(3)


def test_an_unknown_label_set_is_explained(opened: Opened) -> None:
    """Beside the field at once, and as an error once it is asked for."""
    opened.page.get_by_label("a stored set").check()
    field_ = opened.page.get_by_label("Id of the label set")
    field_.fill("0" * 32)
    field_.blur()
    expect(opened.page.locator("#set-help")).to_contain_text("no label set has the id")
    opened.page.get_by_label("Text", exact=True).fill(TEXT)
    opened.page.get_by_role("button", name="Classify").click()
    expect(opened.page.get_by_role("alert")).to_be_visible()
    expect(field_).to_be_focused()
    opened.expect_only_failed_loads()


def test_markup_in_text_and_labels_is_text(opened: Opened) -> None:
    """What looks like an element is shown letter by letter and never becomes one."""
    evil = "<img src=x onerror=\"document.title='taken'\">"
    opened.classify(f"{evil} card", [f"{evil} => <script>card</script>", "card"])
    names = opened.rows.locator(".name").all_inner_texts()
    assert sorted(names) == sorted([evil, "card"])
    assert opened.page.locator("#text").inner_text() == f"{evil} card"
    assert opened.page.locator("img, main script").count() == 0
    opened.classify(TEXT, [evil, evil])
    expect(opened.page.get_by_role("alert")).to_contain_text("<img src=x")
    assert opened.page.locator("img").count() == 0
    assert opened.page.title() == "tokenalign"
    opened.expect_only_failed_loads()


def test_the_keyboard_is_enough(opened: Opened) -> None:
    """From an empty page to the words of the second label without a pointer, and the focus is always seen."""
    keyboard = opened.page.keyboard

    def tab_to(target: str) -> None:
        for _ in range(20):
            keyboard.press("Tab")
            assert opened.page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
            if opened.page.evaluate("selector => document.activeElement.matches(selector)", target):
                return
        pytest.fail(f"20 tabs never reached {target}")

    tab_to("#in-text")
    keyboard.type(TEXT)
    tab_to("#in-labels")
    for label in LABELS:
        keyboard.type(label)
        keyboard.press("Enter")
    tab_to("#go")
    keyboard.press("Enter")
    expect(opened.rows).to_have_count(3)
    tab_to("#tokens button")
    assert opened.page.locator("mark.on").count() == 1
    tab_to("[role=option]")
    keyboard.press("ArrowDown")
    expect(opened.page.locator("#shown-label")).to_have_text("card not received")
    expect(opened.rows.nth(1)).to_have_attribute("aria-selected", "true")
    expect(opened.rows.nth(1)).to_be_focused()
    keyboard.press("Home")
    expect(opened.rows.nth(0)).to_be_focused()


def test_one_click_fills_in_an_example(opened: Opened) -> None:
    """The empty page offers an example, which is classified at once."""
    opened.page.get_by_role("button", name="Try an example").click()
    expect(opened.rows.first).to_contain_text("duplicate card payment")
    assert opened.page.get_by_label("Text", exact=True).input_value()


def test_the_address_brings_back_what_was_asked(opened: Opened) -> None:
    """A reload shows the same text, labels and answer."""
    opened.classify(WIDE_TEXT, LABELS)
    names = opened.rows.locator(".name").all_inner_texts()
    opened.page.reload()
    expect(opened.rows).to_have_count(3)
    assert opened.page.get_by_label("Text", exact=True).input_value() == WIDE_TEXT
    assert opened.rows.locator(".name").all_inner_texts() == names


def test_only_the_last_of_two_requests_is_shown(opened: Opened) -> None:
    """A request that is still on its way when a newer one is sent is given up, and that is no error."""
    held: list[Route] = []
    opened.page.route("**/v1/classify", lambda route: held.append(route), times=1)
    opened.fill(TEXT, ["old one", "old two"])
    opened.page.get_by_role("button", name="Classify").click()
    with opened.page.expect_event("requestfailed"):
        opened.classify(TEXT, LABELS)
    assert len(held) == 1
    expect(opened.rows).to_have_count(3)
    expect(opened.page.get_by_role("alert")).to_be_hidden()


def test_the_link_leads_to_the_api_reference(opened: Opened) -> None:
    """The page keeps a way to the documentation."""
    assert (opened.page.get_by_role("link", name="API reference").get_attribute("href") or "").endswith("/docs")


@pytest.mark.parametrize("path", ["/some/prefix", "/some/prefix/"])
def test_it_works_behind_a_prefix(opened_page: Open, default_app: Any, path: str) -> None:
    """Under a path that a proxy takes away, with or without its last slash, the page still finds the service."""
    with opened_page() as opened:
        prefix = re.compile(f"{default_app.url}/some/prefix/?")
        opened.page.route(
            prefix,
            lambda route: route.fulfill(response=route.fetch(url=prefix.sub(f"{default_app.url}/", route.request.url))),
        )
        opened.page.goto(f"{default_app.url}{path}")
        opened.classify(TEXT, LABELS)
        expect(opened.rows).to_have_count(3)
        assert opened.requests[-1] == f"{default_app.url}/some/prefix/v1/classify"
        link = opened.page.get_by_role("link", name="API reference")
        assert link.get_attribute("href") == f"{default_app.url}/some/prefix/docs"


CONTRAST = """element => {
  const painted = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const rgb = color => {
    painted.fillStyle = color;
    painted.fillRect(0, 0, 1, 1);
    return [...painted.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const luminance = color => rgb(color).map(c => c / 255)
    .map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  let behind = element;
  while (getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
  const [a, b] = [getComputedStyle(element).color, getComputedStyle(behind).backgroundColor].map(luminance);
  return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
}"""  # WCAG 2's contrast ratio


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_schemes_are_legible(opened_page: Open, scheme: str) -> None:
    """The page follows the system's light or dark, and every kind of text has a contrast of at least 4.5."""
    with opened_page(color_scheme=scheme) as opened:
        opened.classify(TEXT * 20, LABELS)
        sum_of_rgb = "sum = getComputedStyle(document.body).backgroundColor.match(/\\d+/g).reduce((a, b) => a + +b, 0)"
        assert (opened.page.evaluate(sum_of_rgb) < 3 * 64) == (scheme == "dark")
        for selector in ("h1", ".quiet", "#text", "#text s", "mark", "#tokens button", "#go", ".name", "#warnings li"):
            contrasts = opened.page.locator(selector).evaluate_all(f"all => all.map({CONTRAST})")
            assert contrasts
            assert min(contrasts) >= 4.5, selector


def test_forced_colours_keep_bars_and_words(opened_page: Open) -> None:
    """Where the system takes the colours away, bars and matched words still differ from what is around them."""
    with opened_page(forced_colors="active") as opened:
        opened.classify(TEXT, LABELS)
        colour = "e => getComputedStyle(e).backgroundColor"
        row = opened.rows.first
        assert row.locator(".bar").evaluate(colour) != row.locator(".track").evaluate(colour)
        assert opened.page.locator("mark").first.evaluate(colour) != opened.page.locator("#alignment").evaluate(colour)


def test_a_phone_shows_all_without_scrolling_sideways(opened_page: Open) -> None:
    """320 pixels are enough, with a long word and a long label."""
    with opened_page(viewport={"width": 320, "height": 640}) as opened:
        opened.classify("x" * 300 + " card", ["y" * 100, "card => " + "z" * 100])
        expect(opened.page.locator("#alignment")).to_be_in_viewport()
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= 320


def test_bars_stay_under_the_pointer(opened_page: Open) -> None:
    """On a phone some labels need more lines than others; pointing at one must not set the bars swinging."""
    with opened_page(viewport={"width": 390, "height": 844}) as opened:
        opened.page.get_by_role("button", name="Try an example").click()
        expect(opened.rows).to_have_count(4)
        for row in opened.rows.all():
            row.hover()
            expect(opened.page.locator("#shown-label")).to_have_text(row.locator(".name").inner_text())


def test_screenshot(opened_page: Open, tmp_path: Path) -> None:
    """The picture in the docs is this page with its example, a matched word brought out."""
    with opened_page(viewport={"width": 1280, "height": 720}, device_scale_factor=2) as opened:
        opened.page.get_by_role("button", name="Try an example").click()
        expect(opened.rows).to_have_count(4)
        opened.tokens.first.hover()
        folder = ROOT / "docs" if os.environ.get("WRITE_DOCS") == "1" else tmp_path
        picture = opened.page.screenshot(path=folder / "page.png")
        assert picture.startswith(b"\x89PNG")
