"""The page at ``/`` in a real browser."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.serving import Server

pytestmark = pytest.mark.slow
selenium = pytest.importorskip("selenium", reason="selenium is not installed")

from selenium import webdriver  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

DESKTOP, PHONE = (1280, 900), (375, 800)


@pytest.fixture(scope="module")
def slow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two hundredths of a second per step, so that there is something to stop."""
    running = Server(tmp_path_factory.mktemp("console"), "scheduler=slow", "scheduler.delay=0.02")
    yield running
    assert running.stop() == 0


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    chromium, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if not chromium or not driver:
        pytest.skip("there is no Chromium with its driver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with webdriver.Chrome(options=options, service=webdriver.ChromeService(driver)) as browser:
        yield browser


@pytest.fixture
def page(browser: webdriver.Chrome, slow_server: Server) -> Iterator[webdriver.Chrome]:
    browser.set_window_size(*DESKTOP)
    browser.get(slow_server.url)
    until(browser, lambda: "running" in text(browser, "metrics") and "decode_first" not in text(browser, "subtitle"))
    yield browser
    errors = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    # A refusal is what some tests provoke; everything else, a missing asset for one, is a fault of the page.
    assert all("status of 400" in message for message in errors), errors


def until(browser: webdriver.Chrome, condition: Callable[[], Any]) -> Any:
    return WebDriverWait(browser, 20, poll_frequency=0.05).until(lambda _: condition())


def text(browser: webdriver.Chrome, identity: str) -> str:
    return browser.find_element(By.ID, identity).get_property("textContent") or ""


def write(browser: webdriver.Chrome, identity: str, value: str) -> None:
    element = browser.find_element(By.ID, identity)
    browser.execute_script("arguments[0].closest('details')?.setAttribute('open', '')", element)
    element.clear()
    element.send_keys(value)


def click(browser: webdriver.Chrome, identity: str) -> None:
    browser.find_element(By.ID, identity).click()


def finished(browser: webdriver.Chrome) -> str:
    return until(browser, lambda: text(browser, "summary") or text(browser, "problem"))


def test_a_completion_streams_and_equals_the_api_s(page, slow_server):
    write(page, "prompt", "class Stack:")
    for name, value in (("max_tokens", "24"), ("temperature", "0")):
        write(page, f"set-{name}", value)
    click(page, "send")
    lengths = set()
    until(page, lambda: lengths.add(len(text(page, "output"))) or text(page, "summary"))
    assert len(lengths) > 4, "the text came at once"
    whole = slow_server.complete(prompt="class Stack:", max_tokens=24, temperature=0)
    assert text(page, "output") == "class Stack:" + whole["choices"][0]["text"]
    assert re.match(r"Ended: length · \d+ \+ 24 tokens · first after \d+ ms · [\d.]+ s", text(page, "summary"))


def test_a_chat_remembers(page):
    page.find_element(By.CSS_SELECTOR, "input[value=chat]").click()
    write(page, "set-max_tokens", "8")
    for question in ("def add(a, b):", "def sub(a, b):"):
        write(page, "prompt", question)
        page.find_element(By.ID, "prompt").send_keys(Keys.CONTROL, Keys.ENTER)
        assert finished(page).startswith("Ended:")
        until(page, lambda: page.find_element(By.ID, "send").is_enabled())
    assert "def add" in text(page, "output") and "def sub" in text(page, "output")
    assert page.execute_script("return messages.map(m => m.role).join()") == "user,assistant,user,assistant"
    click(page, "clear")
    assert text(page, "output") == "" and page.execute_script("return messages.length") == 0


@pytest.mark.parametrize("how", ["button", "key"])
def test_stop_aborts_at_the_server(page, slow_server, how):
    """C42: nobody listens, so nothing runs."""
    before = slow_server.stats()["requests_aborted"]
    write(page, "set-max_tokens", "2000")
    click(page, "send")
    until(page, lambda: slow_server.stats()["running"] == 1)
    until(page, lambda: re.search(r"running1\D", text(page, "metrics")))  # the page shows it too
    if how == "button":
        click(page, "stop")
    else:
        page.find_element(By.TAG_NAME, "body").send_keys(Keys.ESCAPE)
    assert finished(page).startswith("Ended: stopped")
    assert slow_server.wait_idle()["requests_aborted"] == before + 1
    assert page.find_element(By.ID, "send").is_enabled() and not page.find_element(By.ID, "stop").is_enabled()


def test_a_refusal_is_shown_in_the_server_s_words(page):
    write(page, "set-guided_regex", "(")
    click(page, "send")
    assert finished(page).startswith("guided_regex: ") and not text(page, "summary")
    assert page.find_element(By.ID, "problem").get_attribute("role") == "alert"
    write(page, "set-guided_regex", "[a-f]{6}")
    click(page, "send")
    assert finished(page).startswith("Ended: stop")
    assert re.search("[a-f]{6}$", text(page, "output"))


def test_the_composition_and_the_figures_are_there(page, slow_server):
    blocks = str(slow_server.stats()["num_blocks"])
    for word in ("sdpa", "bf16", "slow", "auto (policy/auto.yaml)", "llguidance", blocks[:1]):
        assert word in text(page, "composition")
    assert "tiny" in text(page, "subtitle")
    click(page, "send")
    finished(page)
    until(page, lambda: re.search(r"TTFT, median[\d.]+ ms", text(page, "metrics")))
    until(page, lambda: re.search(r"output[\d.,]+ token/s", text(page, "metrics")))


def test_nothing_is_loaded_from_elsewhere(page, slow_server):
    entries = page.execute_script("return performance.getEntriesByType('resource').map(e => e.name)")
    assert entries and all(name.startswith(slow_server.url + "/") for name in entries)
    assert {name.rpartition("/")[2] for name in entries} <= {"stats", "composition", "completions"}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_every_width_and_scheme_is_readable(page, scheme, size, tmp_path: Path):
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size is PHONE}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        wide, narrow = page.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
        assert wide <= narrow == size[0], "the page scrolls sideways"
        low = page.execute_script(CONTRASTS)
        assert not low, f"contrast below 4.5 (WCAG AA): {low}"
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_every_control_has_a_name_and_can_be_reached_by_keyboard(page):
    nameless = page.execute_script(
        "return [...document.querySelectorAll('input, textarea, button, meter, [role=log]')]"
        ".filter(e => !(e.labels?.length || e.textContent.trim() && e.tagName == 'BUTTON'"
        " || e.ariaLabel || e.getAttribute('aria-labelledby'))).map(e => e.outerHTML)"
    )
    assert nameless == []
    reached = set()
    for _ in range(12):
        page.switch_to.active_element.send_keys(Keys.TAB)
        reached.add(page.switch_to.active_element.get_attribute("id"))
    assert {"prompt", "send", "clear", "output"} <= reached


#: Texts whose contrast with what is behind them is below 4.5 (relative luminance as in WCAG 2).
CONTRASTS = """
const channel = c => (c /= 255, c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
const rgb = text => text.match(/[\\d.]+/g).map(Number);
const luminance = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
function behind(element) {
  for (let e = element; e; e = e.parentElement) {
    const colour = rgb(getComputedStyle(e).backgroundColor);
    if (colour.length === 3 || colour[3] === 1) return colour;
  }
  return [255, 255, 255];
}
const texts = "h1, h2, p, span, label, legend, summary, dt, dd, button:enabled, input, textarea, pre";
return [...document.querySelectorAll(texts)]
  .map(e => [e.id || e.textContent, luminance(rgb(getComputedStyle(e).color)), luminance(behind(e))])
  .map(([name, a, b]) => [name, (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05)])
  .filter(([, ratio]) => ratio < 4.5).map(([name, ratio]) => `${name}: ${ratio.toFixed(2)}`);
"""
