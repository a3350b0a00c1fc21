"""Debian's Chromium on the live page of a real `extproc serve`."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

from demo.wait import wait_until
from tests.support.watched import FLEET, Watched

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FLAGS = (
    "--headless",
    "--disable-gpu",
    "--no-first-run",
    # It would call home in the background, and log that it could not.
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


class Browser:
    """A browser and what these tests ask of it."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def look(self, width: int, height: int, scheme: str) -> None:
        """A screen of this size, whose owner prefers this colour scheme."""
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
        preference = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", preference)

    def open(self, serving: Watched, replicas: int) -> None:
        """The page, once it shows so many replicas."""
        self.driver.get(serving.admin)
        wait_until(lambda: self.count("#replicas > li") == replicas, f"{replicas} replicas are shown", 30.0)

    def leave(self) -> None:
        """Before the router ends: the page would go on asking it."""
        self.driver.get("about:blank")

    def count(self, selector: str) -> int:
        return len(self.driver.find_elements(By.CSS_SELECTOR, selector))

    def text(self, selector: str) -> str:
        """Of all that match, as it stands in the document; "" while nothing does."""
        script = "return [...document.querySelectorAll(arguments[0])].map(each => each.textContent).join('\\n')"
        return str(self.driver.execute_script(script, selector))

    def ask(self, question: str) -> str:
        """Type it into the box; the answer, once it has come."""
        self.driver.execute_script("document.getElementById('answer').replaceChildren()")
        box = self.driver.find_element(By.ID, "question")
        box.clear()
        box.send_keys(question)
        self.driver.find_element(By.CSS_SELECTOR, "#ask button").click()
        wait_until(lambda: self.text("#answer"), "an explanation is shown", 20.0)
        return self.text("#answer")

    def complaints(self) -> list[str]:
        """What was said on the console since the last look, but for remarks."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] != "INFO"]


@pytest.fixture(scope="session")
def driver() -> Iterator[webdriver.Chrome]:
    programs = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    assert all(programs.values()), f"missing: {[*programs]}; `make test-browser` installs them"
    options = Options()
    options.binary_location = programs["chromium"]
    for flag in FLAGS + (("--no-sandbox",) if os.geteuid() == 0 else ()):  # Chromium refuses root its sandbox
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(programs["chromedriver"]))
    yield driver
    driver.quit()


@pytest.fixture
def browser(driver: webdriver.Chrome) -> Iterator[Browser]:
    browser = Browser(driver)
    browser.look(1920, 1080, "dark")
    yield browser
    browser.leave()
    assert browser.complaints() == []


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    """A router and two replicas. Asked for before `browser`, it ends after it."""
    with Watched(tmp_path) as serving:
        serving.fleet(*FLEET)
        serving.wait_for("ready")
        yield serving
