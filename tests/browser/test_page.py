"""The live page as people see it."""

from __future__ import annotations

import json
import re
import sys
import threading
import urllib.request
from typing import TYPE_CHECKING

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from demo.ports import free_port
from demo.process import Process
from demo.wait import wait_until
from tests.component.serving import SERVE, messages
from tests.support.watched import FLEET, Watched

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest

    from tests.browser.conftest import Browser

pytestmark = pytest.mark.browser

BODY = json.dumps({"model": "m1", "messages": [{"role": "user", "content": "hello " * 500}]}).encode()


def test_a_decision_that_was_just_made_is_shown(watched: Watched, browser: Browser) -> None:
    browser.open(watched, len(FLEET))
    assert browser.count("#decisions > li") == 0
    ending = threading.Event()

    def held() -> Iterator[ProcessingRequest]:
        yield from messages(BODY, {"x-session-id": "mine"})
        ending.wait(60)

    replies = watched.process(held())
    next(replies), next(replies)  # it is routed, and its answer is under way
    try:
        wait_until(lambda: browser.count("#decisions > li") == 1, "the decision is shown", 20.0)
        row = browser.text("#decisions > li")
        assert "session" in row
        assert "m1" in row
        assert "open" in row
        (chosen,) = [endpoint for endpoint in FLEET if endpoint in row]
        card = f'#replicas > li[title^="{chosen}"]'
        assert "in flight1" in browser.text(f"{card} .gauge")
        assert browser.text("#dial .centre") == "1"
    finally:
        ending.set()
    wait_until(lambda: "ended" in browser.text("#decisions > li"), "its end is shown", 20.0)
    wait_until(lambda: browser.text("#dial .centre") == "0", "nothing is in flight", 20.0)
    assert browser.count("#decisions > li") == 1
    wait_until(lambda: "session 1" in browser.text("#legend"), "it is counted", 20.0)
    assert browser.count("#rate path[d*=Z]") == 1


def test_it_says_where_a_session_would_go(watched: Watched, browser: Browser) -> None:
    browser.open(watched, len(FLEET))
    for session in ("a", "b", "c"):
        answer = browser.ask(session)
        sent_to = watched.route(**{"x-session-id": session})
        assert f"session → {sent_to}" in answer
    request = {"path": "/v1/chat/completions", "headers": {}, "body": json.loads(BODY)}
    for asked in (request, request["body"]):  # a body alone will do
        assert "prompt tokens" in browser.ask(json.dumps(asked))
        assert "cold → " in browser.text("#answer")
    assert "work " in browser.text("#answer li")
    wait_until(lambda: browser.count("#decisions > li") == 3, "what was routed is shown, what was asked is not", 20.0)


def test_names_are_text_whatever_is_in_them(watched: Watched, browser: Browser) -> None:
    browser.open(watched, len(FLEET))
    name = "<img src=x onerror=\"document.title='broken into'\"><script>document.title='broken into'</script>"
    watched.route(json.dumps({"model": name, "messages": [{"role": "user", "content": "x"}]}).encode())
    wait_until(lambda: name in browser.text("#decisions .more"), "the model's name is shown as it is", 20.0)
    assert browser.count("img") == 0
    assert browser.driver.title == "extproc"
    browser.ask(name)
    # What is written into the page by force does not run either.
    browser.driver.execute_script(
        "const script = document.createElement('script');"
        "script.textContent = \"document.title = 'run'\"; document.body.append(script)"
    )
    assert browser.driver.title == "extproc"
    (complaint,) = browser.complaints()
    assert "Content Security Policy" in complaint


RATIO = """
const parse = text => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
const light = rgb => rgb.map(c => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const ground = node => { for (; node; node = node.parentElement) {
    const colour = getComputedStyle(node).backgroundColor;
    if (!/, 0\\)$|transparent/.test(colour)) return parse(colour); } };
return [...document.querySelectorAll(arguments[0])].map(node => {
    const [a, b] = [light(parse(getComputedStyle(node).color)), light(ground(node))].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05); });
"""
"""Contrast by WCAG 2.2: of each element's text to what is behind it."""


@pytest.mark.parametrize("scheme", ["dark", "light"])
@pytest.mark.parametrize(("width", "height"), [(390, 844), (820, 1180), (1920, 1080)])
def test_any_screen_by_day_and_night(watched: Watched, browser: Browser, width: int, height: int, scheme: str) -> None:
    browser.look(width, height, scheme)
    browser.open(watched, len(FLEET))
    watched.route(BODY)
    watched.route()
    browser.ask("someone")
    wait_until(lambda: browser.count("#decisions > li") == 2, "decisions are shown", 20.0)
    wide = browser.driver.execute_script("return document.documentElement.scrollWidth")
    assert wide == width
    if width == 1920:  # a wall screen can't be scrolled
        assert browser.driver.execute_script("return document.documentElement.scrollHeight") == height
    ground = browser.driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    red, green, blue = map(int, re.findall(r"\d+", ground))
    assert (red + green + blue < 3 * 64) == (scheme == "dark")
    browser.driver.execute_script("for (const row of document.getAnimations()) row.finish()")
    ratios = browser.driver.execute_script(
        RATIO, "p, dt, dd, h1, h2, b, span, output, label, figcaption, button, .foot"
    )
    assert len(ratios) > 50
    assert min(ratios) >= 4.5


def test_hundreds_of_replicas(watched: Watched, browser: Browser) -> None:
    fleet = [f"10.0.{number // 250}.{number % 250}:8000" for number in range(400)]
    watched.fleet(*fleet)
    browser.open(watched, len(fleet))
    assert browser.count("#arcs > g") == len(fleet)
    tile = browser.driver.find_element(By.CSS_SELECTOR, '#replicas > li[title^="10.0.1.7:8000"]')
    tile.send_keys(Keys.ENTER)
    wait_until(lambda: "10.0.1.7:8000" in browser.text("#selected"), "the whole card is shown", 20.0)
    browser.driver.find_element(By.ID, "filter").send_keys("10.0.1.7:")
    wait_until(lambda: browser.count("#replicas > li:not([hidden])") == 1, "one is found", 20.0)
    watched.fleet(*fleet[:3])
    wait_until(lambda: browser.count("#replicas > li") == browser.count("#arcs > g") == 3, "the others have gone", 20.0)


def test_figures_of_a_real_engine(browser: Browser, tmp_path: Path) -> None:
    port = free_port()
    endpoint = f"127.0.0.1:{port}"
    engine = Process([sys.executable, "-m", "serve_app.engine", "--port", str(port)], tmp_path / "engine.log")
    with engine, Watched(tmp_path, {"load": {"enabled": True, "poll_s": 0.1}}) as watched:
        watched.fleet(endpoint)
        watched.wait_for("ready")
        browser.open(watched, 1)
        wait_until(lambda: "queue 0" in browser.text("#replicas .foot"), "the engine's figures are shown", 30.0)
        body = json.dumps({"model": "sim", "max_tokens": 1, "messages": [{"role": "user", "content": "hi " * 2000}]})

        def drawn() -> bool:
            request = urllib.request.Request(
                f"http://{endpoint}/v1/chat/completions", body.encode(), {"content-type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=30) as answer:
                assert answer.status == 200
            return browser.count("#hits path[d^=M].first") > 0

        wait_until(drawn, "the fleet's hit rate is drawn", 30.0)
        shown = re.compile(r"hit rate[1-9]\d*%")
        wait_until(lambda: shown.search(browser.text("#replicas .gauge")), "the replica's hit rate is shown", 20.0)
        browser.leave()


def test_a_router_that_is_gone_is_said_to_be_until_it_is_back(
    watched: Watched, browser: Browser, tmp_path: Path
) -> None:
    for _ in range(3):
        watched.route()
    browser.open(watched, len(FLEET))
    wait_until(lambda: browser.text("#health") == "all well", "all is well", 20.0)
    wait_until(lambda: browser.count("#decisions > li") == 3, "its decisions are shown", 20.0)
    watched.kill()
    wait_until(lambda: "does not answer" in browser.text("#health"), "the page says so", 30.0)
    with Process([*SERVE, "--config", watched.file], tmp_path / "again.log"):
        wait_until(lambda: browser.text("#health") == "all well", "it is found again", 30.0)
        wait_until(lambda: browser.count("#decisions > li") == 0, "what an earlier one decided is gone", 20.0)
        browser.leave()
    assert all("Failed to load resource" in complaint for complaint in browser.complaints())
