"""Headless Chromium, driven by selenium through Debian's chromedriver."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from selenium.common.exceptions import StaleElementReferenceException, WebDriverException
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

CHROMIUM, DRIVER = "/usr/bin/chromium", "/usr/bin/chromedriver"
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)
_WAIT_S = 40.0
_MOST_TABS = 80
T = TypeVar("T")


class Browser:
    """One window."""

    def __init__(self, driver: Chrome) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        self.driver.get(url)

    @property
    def path(self) -> str:
        """Of the page that is shown."""
        return "/" + self.driver.current_url.split("/", 3)[3]

    @property
    def text(self) -> str:
        return self.find("body").text

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def count(self, selector: str) -> int:
        return len(self.driver.find_elements(By.CSS_SELECTOR, selector))

    @property
    def focused(self) -> WebElement:
        return self.driver.switch_to.active_element

    def press(self, *keys: str) -> None:
        """Type into whatever has the focus."""
        self.focused.send_keys(*keys)

    def tab_to(self, wanted: Callable[[WebElement], bool]) -> WebElement:
        """Press Tab until the focus is where it is wanted; every stop on the way must show that it has the focus."""
        for _ in range(_MOST_TABS):
            self.press(Keys.TAB)
            here = self.focused
            if here.tag_name == "body":
                continue
            assert self.driver.execute_script("return arguments[0].matches(':focus-visible')", here)
            assert here.value_of_css_property("outline-style") == "solid"
            if wanted(here):
                return here
        raise AssertionError("nothing that was wanted got the focus")

    def until(self, look: Callable[[], T]) -> T:
        """What `look` gives once that is something; the page may change below it."""
        deadline = time.monotonic() + _WAIT_S
        while True:
            with contextlib.suppress(StaleElementReferenceException, WebDriverException):
                found = look()
                if found:
                    return found
            assert time.monotonic() < deadline, self.text
            time.sleep(0.05)

    def script(self, code: str) -> object:
        return self.driver.execute_script(code)

    def resize(self, width: int, height: int = 900) -> None:
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A window of a fresh browser, whose profile is in a directory of the caller's."""
    options = ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*_FLAGS, f"--user-data-dir={profile}", "--window-size=1400,900"):
        options.add_argument(flag)
    driver = Chrome(options=options, service=Service(DRIVER))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
