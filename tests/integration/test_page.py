"""The web page in a real browser, on real servers: by keyboard alone, live, cancelling, signing in, hostile names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from imaged.chunkstore.store import ChunkStore
from imaged.fetching.upstream import HttpUpstream
from imaged.serving.tokens import Scope, Token
from tests.support.browser import Browser, browser
from tests.support.chunkserver import ChunkServer, chunk_server
from tests.support.heldregistry import held_registry
from tests.support.parked import add_snapshot
from tests.support.synthetic import Synthetic, add_image

pytestmark = [pytest.mark.browser, pytest.mark.network]
HOSTILE = "</dd></script><script>window.broken=1</script><img src=x onerror=window.broken=1>"


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("page") / "store"
    with ChunkStore.open(root) as store:
        image = add_image(store, "debian:12", chunks=6)
        add_image(store, "team/app:v1", seed=2, chunks=4)
        add_image(store, "registry.example.com:5000/team/with/a-rather-long-name/of-its-own:2026-01-31-nightly", seed=3)
        _name_hostile(store, image)
        ready = add_snapshot(store, "ready", image.id, seed=1)
        add_snapshot(store, "after-install", image.id, seed=2, parent=ready)
        add_snapshot(store, "team.ready", image.id, seed=3)
    return root


def _name_hostile(store: ChunkStore, like: Synthetic) -> None:
    config = {"Env": [f"X={HOSTILE}"], "Labels": {HOSTILE: HOSTILE, "turned": "\u202egpj.exe"}, HOSTILE: [HOSTILE]}
    record = replace(like.record, config=config, source_digest=HOSTILE, platform=HOSTILE, layers=(HOSTILE,))
    ref = store.refs.get("debian:12")
    assert ref is not None
    store.refs.set("hostile:v1", replace(ref, record=store.put(record.to_bytes()), source=HOSTILE))


@pytest.fixture(scope="module")
def server(store: Path) -> Iterator[ChunkServer]:
    with chunk_server(store) as running:
        yield running


def test_the_way_around_by_keyboard(window: Browser, server: ChunkServer) -> None:
    window.open(server.url + "/")
    assert window.tab_to(lambda _: True).text == "Skip to the content"
    window.tab_to(lambda here: here.text == "Snapshots").send_keys("\n")
    window.until(lambda: window.find("nav [aria-current=page]").text == "Snapshots")
    window.tab_to(lambda here: here.text == "after-install").send_keys("\n")
    window.until(lambda: window.path == "/snapshots/after-install")
    assert "pvisor snapshot pull after-install" in window.text
    window.tab_to(lambda here: here.text == "debian:12").send_keys("\n")
    window.until(lambda: window.path == "/images/debian:12")
    window.until(lambda: " KiB" in window.find("dl.tiles").text and "Own" in window.find("dl.tiles").text)
    window.open(server.url + "/")
    window.tab_to(lambda here: here.tag_name == "input").send_keys("team app\n")
    window.until(lambda: "q=team" in window.path)
    assert [cell.text.split("\n")[0] for cell in window.find("tbody").find_elements("css selector", "th")] == [
        "team/app:v1"
    ]


def test_progress_comes_live_and_a_job_is_cancelled_by_keyboard(
    window: Browser, server: ChunkServer, tmp_path: Path
) -> None:
    window.open(server.url + "/jobs")
    assert "No jobs yet" in window.text
    window.script("window.same = true")
    with held_registry(tmp_path) as registry, HttpUpstream(server.url) as upstream:
        job = upstream.convert(registry.source, name="live:v1")
        window.until(lambda: "running" in window.find("tbody").text)
        cancel = window.tab_to(lambda here: here.text == "Cancel")
        assert cancel.get_attribute("aria-label") == f"Cancel {registry.source}"
        window.until(lambda: "1.0 MiB of 2.9 MiB, 34%" in window.find("tbody").text)
        progress = window.find("progress")
        assert 0 < float(progress.get_attribute("value") or 0) < float(progress.get_attribute("max") or 0)
        upstream.convert(registry.source, name="another:v1")
        window.until(lambda: window.count("tbody tr") == 2)
        assert window.script("return window.same")  # the same page all the while
        assert window.focused == cancel
        assert "live:v1" in window.script("return document.activeElement.closest('tr').innerText")  # type: ignore[operator]
        window.press("\n")
        window.until(lambda: "The job is cancelled." in window.text)
        assert upstream.job(job.id).state == "cancelled"
        assert window.find(f"#job-{job.id} .state").text == "cancelled"
        assert window.count(f"#job-{job.id} button") == 0
        registry.go.set()
        window.until(lambda: window.count(".state.done") == 1)
        window.find("tbody a[href='/images/another:v1']").send_keys("\n")
        window.until(lambda: window.path == "/images/another:v1")


def test_hostile_names_are_text(window: Browser, server: ChunkServer) -> None:
    window.open(server.url + "/images/hostile:v1")
    assert window.script("return window.broken") is None
    assert window.count("img") == 0
    assert window.count("main script") == 0
    assert window.text.count(HOSTILE) == 9
    assert "\\u202egpj.exe" in window.text
    assert "\u202e" not in window.driver.page_source


@pytest.mark.parametrize("width", [360, 1400])
def test_pages_fit_the_window(window: Browser, server: ChunkServer, width: int) -> None:
    window.resize(width)
    for path in ("/", "/images/hostile:v1", "/snapshots", "/snapshots/ready", "/jobs", "/store", "/images/none"):
        window.open(server.url + path)
        wide, shown = "document.documentElement.scrollWidth", "document.documentElement.clientWidth"
        assert window.script(f"return {wide} <= {shown} && innerWidth == {width}"), path
        assert window.count("h1") == 1
        assert window.count("main") == 1
    window.resize(1400)


def _sign_in(window: Browser, secret: str) -> None:
    window.tab_to(lambda here: here.get_attribute("type") == "password") if window.focused.tag_name != "input" else None
    window.press(secret, "\n")


def test_a_token_opens_what_it_may_see(window: Browser, store: Path, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    tokens = {
        "admin": Token.new(Scope.ADMIN, namespace=None, label="operator"),
        "read": Token.new(Scope.READ, namespace=None),
        "team": Token.new(Scope.WRITE, namespace="team", label="the team"),
    }
    file.write_text("".join(token.line() for _, token in tokens.values()))
    with chunk_server(store, token_file=str(file)) as server:
        window.open(server.url + "/store")
        assert window.path.startswith("/login")
        _sign_in(window, "wrong")
        window.until(lambda: "none of the server's tokens" in window.text)
        _sign_in(window, tokens["admin"][0])
        window.until(lambda: window.path == "/store")
        assert "operator (admin)" in window.text
        assert window.find("form[action='/store/collect'] button").text == "Collect now"
        cookie = window.driver.get_cookie("pvisor_session")
        assert cookie is not None
        assert (cookie["httpOnly"], cookie["sameSite"], "expiry" in cookie) == (True, "Strict", False)
        assert tokens["admin"][0] not in str(cookie)
        window.find(".who button").send_keys("\n")
        window.until(lambda: window.path.startswith("/login"))
        _sign_in(window, tokens["read"][0])
        window.until(lambda: window.path == "/")
        window.open(server.url + "/store")
        assert window.count("form[action='/store/collect']") == 0
        window.find(".who button").send_keys("\n")
        window.until(lambda: window.path.startswith("/login"))
        _sign_in(window, tokens["team"][0])
        window.until(lambda: window.path == "/")
        assert "the team (write, namespace team)" in window.text
        assert [cell.text.split("\n")[0] for cell in window.find("tbody").find_elements("css selector", "th")] == [
            "team/app:v1"
        ]
        assert [link.text for link in window.find("nav").find_elements("css selector", "a")][-1] == "Jobs"
        window.open(server.url + "/snapshots")
        assert [link.text for link in window.find("ul.tree").find_elements("css selector", "b a")] == ["team.ready"]
        for path in ("/images/debian:12", "/snapshots/ready"):
            window.open(server.url + path)
            assert window.find("h1").text == "Not found"
        window.open(server.url + "/jobs")
        assert "No jobs yet" in window.text
        file.write_text(tokens["admin"][1].line())
        window.until(lambda: window.open(server.url + "/") or window.path.startswith("/login"))
