"""The page in a real browser; these tests skip where no Chromium is installed."""

import re
import shutil
from threading import Event

import pytest

from tests.app.server import EVIL
from tests.conftest import slow

HEIGHT = 844  # of the window, in pixels
# What reaches beyond the window, or beyond what it lies in, unless that scrolls.
CUT_OFF = """() => [...document.querySelectorAll('main *')].filter(e => {
  const box = e.getBoundingClientRect();
  const visible = box.width && getComputedStyle(e).visibility !== 'hidden';
  return visible && box.right > innerWidth + 1 && !e.closest('.wide');
}).map(e => e.outerHTML.slice(0, 100))"""


def chromium() -> str:
    """Return the path of Chromium, or skip the test."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        path = shutil.which(name)
        if path:
            return path
    pytest.skip("no Chromium is installed (apt-get install chromium)")


@pytest.fixture(scope="module")
def browser():
    path = chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])


@pytest.fixture(params=[1280, slow(390)])
def page(browser, server, request):
    """The page in a window as wide as a screen, or as a telephone.

    The test fails if a script fails, another host is asked, or a hostile string runs.
    """
    problems = []

    def on_console(message):
        if message.type == "error":
            problems.append(message.text)

    def on_dialog(dialog):
        problems.append(dialog.message)
        dialog.dismiss()

    def on_request(request):
        if not request.url.startswith((server.address + "/", "data:", "blob:")):
            problems.append(request.url)

    page = browser.new_page(viewport={"width": request.param, "height": HEIGHT})
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", on_console)
    page.on("dialog", on_dialog)
    page.on("request", on_request)
    page.goto(server.address)
    page.locator("#ask").wait_for()
    yield page
    page.close()
    assert problems == []


def assert_fits(page) -> None:
    """Assert that the page needs no scrolling sideways, and that nothing is cut off."""
    assert page.evaluate("document.scrollingElement.scrollWidth <= innerWidth")
    assert page.evaluate(CUT_OFF) == []


def shown_answer(page) -> str:
    return page.locator(".answer textarea").first.input_value()


def test_browser_one_click_shows_the_answer_in_the_window(page):
    page.locator("#ask").click()
    mark = page.locator("mark")
    mark.wait_for()
    assert shown_answer(page) != ""
    assert mark.text_content() == shown_answer(page)
    box = mark.bounding_box()
    assert box["y"] >= 0
    assert box["y"] + box["height"] <= HEIGHT
    assert_fits(page)
    assert page.get_by_label("Model").input_value() == "A2-s0 · smoke · F1 99.9"
    assert page.locator("footer:visible").count() == 0


def test_browser_shows_the_example_answered_before_anybody_has_clicked(page):
    page.locator("mark").wait_for()
    assert page.locator("mark").text_content() == "Greta Miller"
    page.get_by_text(re.compile(r"A2-s0 · smoke · F1 99.9 · \d+ ms")).wait_for()


def test_browser_answers_a_question_asked_while_the_example_is_being_answered(browser, server):
    page = browser.new_page()
    asked = Event()
    held = []

    def hold_until_asked(request):
        if asked.is_set():
            request.continue_()
        else:
            held.append(request)

    page.route("**/queue/join*", hold_until_asked)
    page.goto(server.address)
    page.get_by_label("Paragraph").fill("it was a paragraph of somebody else")
    page.locator("#ask").click()
    page.wait_for_timeout(200)  # milliseconds, for a request that the click makes
    asked.set()
    for request in held:
        request.continue_()
    page.wait_for_function(
        "document.querySelector('.paragraph .text')?.textContent.includes('somebody else')",
        timeout=10_000,
    )
    page.close()


@pytest.mark.slow
def test_browser_marks_the_answer_and_the_threshold_decides_again(page, server, questions):
    example = next(example for example in questions if example.answers)
    context = f"😀  {EVIL}\n\n {example.context} \t<b>\u200b"
    page.get_by_label("Paragraph").fill(context)
    page.get_by_label("Question").fill(example.question)
    page.locator("#ask").click()
    page.wait_for_function(
        "text => document.querySelector('.paragraph .text')?.textContent === text", arg=context
    )
    best = page.locator("mark").text_content()
    assert page.locator("input[type=number]:visible").input_value() == "3.25"

    sent_events = []

    def on_request(request):
        if request.method == "POST":
            sent_events.append(request.post_data_json["fn_index"])

    page.on("request", on_request)
    page.locator("input[type=range]:visible").focus()
    page.keyboard.press("Home")  # the lowest threshold: any margin is over it
    page.locator("mark").wait_for(state="detached")
    assert shown_answer(page) == "No answer"
    page.keyboard.press("End")
    page.locator("mark").wait_for()
    assert page.locator("mark").text_content() == best
    assert page.locator(".paragraph .text").text_content() == context
    assert sent_events
    assert server.ask_event["id"] not in sent_events, "the model runs once"


@pytest.mark.slow
def test_browser_dashboard_shows_a_group_and_what_its_records_hold_as_text(page):
    page.get_by_role("tab", name="Dashboard").click()
    page.wait_for_function("document.querySelectorAll('.shown img').length > 0")
    assert page.evaluate(
        "[...document.querySelectorAll('.shown img')].every(one => one.naturalWidth > 0)"
    )
    assert page.locator(".shown img[src=x], .shown script").count() == 0
    assert page.locator("table tbody tr:visible").count() >= 2
    assert_fits(page)
    texts = page.locator(".shown").all_text_contents()
    assert any("A3-s0-abcdef" in text and "not readable as JSON" in text for text in texts)
    assert any(EVIL in text for text in texts), "text, and not HTML"


@pytest.mark.slow
def test_browser_dashboard_follows_a_run(page, runs):
    (steps,) = runs.glob("cpu-smoke/A4-*/steps.jsonl")
    before = steps.read_text()
    page.get_by_role("tab", name="Dashboard").click()
    page.get_by_text("step 7 of ").wait_for()
    steps.write_text(before.replace('"step": 7', '"step": 8'))
    page.get_by_text("step 8 of ").wait_for(timeout=8_000)  # by itself
    steps.write_text(before)
