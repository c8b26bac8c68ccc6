"""The page without a browser: text that stays text, sessions, forms of other sites, lists of a thousand images."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
from aiohttp import ClientResponse
from aiohttp.test_utils import TestClient, TestServer

from imaged.chunkstore.refs import RefTable
from imaged.chunkstore.store import ChunkStore
from imaged.collection.collect import collect
from imaged.jobs.directorystore import DirectoryJobStore
from imaged.jobs.job import Job, State
from imaged.serving.serveconfig import ServeOptions
from imaged.serving.server import application
from imaged.serving.sharing import own_bytes
from imaged.serving.tokens import Scope, Token
from imaged.web.html import Html, escape, join, tag
from imaged.web.imagepages import Asked
from imaged.web.session import COOKIE
from imaged.web.text import ago, plural, size, span
from tests.support.parked import add_snapshot
from tests.support.synthetic import add_image

T = TypeVar("T")
Client = TestClient  # type: ignore[type-arg]
TestClient.__test__ = TestServer.__test__ = False  # type: ignore[attr-defined]


def test_text_stays_text() -> None:
    assert escape('<a href="x">\'&') == "&lt;a href=&quot;x&quot;&gt;&#39;&amp;"
    assert escape("a\0\x1b\u202e\ud800\tb\n") == "a\\u0000\\u001b\\u202e\\ud800\tb\n"
    assert tag("p", "<b>", None, ["x", tag("b", "y")], 5) == "<p>&lt;b&gt;x<b>y</b>5</p>"
    assert (
        tag("input", value='"><script>', disabled=True, name=None)
        == '<input value="&quot;&gt;&lt;script&gt;" disabled>'
    )
    assert join("<", Html("<hr>")) == "&lt;<hr>"
    with pytest.raises(ValueError, match="javascript"):
        tag("a", "x", href="javascript:alert(1)")


def test_figures_are_read_by_people() -> None:
    assert [size(count) for count in (0, 1023, 1536, 5 << 40, 1 << 60)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 TiB",
        "1048576.0 TiB",
    ]
    assert (plural(1, "run"), plural(1204, "chunk")) == ("1 run", "1,204 chunks")
    assert [span(seconds) for seconds in (-1, 59, 60, 7200, 90_000)] == [
        "0 seconds",
        "59 seconds",
        "1 minute",
        "2 hours",
        "1 day",
    ]
    assert ">2 hours ago</time>" in ago(1000, 8200)
    assert [ago(at) for at in (None, 0, 1e300)] == ["–", "–", "–"]


@pytest.mark.parametrize("query", [{}, {"page": "x", "sort": "y"}, {"page": "-1"}, {"page": "²"}, {"page": "9" * 99}])
def test_a_query_of_nonsense_is_none(query: dict[str, str]) -> None:
    assert Asked.parse(query) == Asked()


def test_own_bytes_are_those_nobody_else_has(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path) as store:
        image = add_image(store, "a:1", chunks=10)
        store.refs.set("also:1", store.refs.get("a:1"))  # type: ignore[arg-type]
        alone = own_bytes(store)[image.id]
        assert alone == store.df().stored_bytes
        longer = add_image(store, "b:1", chunks=20)
        own = own_bytes(store)
        assert 0 < own[image.id] < alone / 10  # its record and roots
        assert own[image.id] + own[longer.id] < store.df().stored_bytes
        parked = add_snapshot(store, "s", image.id)
        own = own_bytes(store)
        assert own[image.id] == 0
        assert own[parked.id] > 1 << 20


@asynccontextmanager
async def client_of(store: ChunkStore, tokens: Path | None = None) -> AsyncIterator[Client]:
    options = ServeOptions(store=str(store.root), token_file=None if tokens is None else str(tokens))
    async with application(store, options) as app, TestClient(TestServer(app)) as client:
        yield client


def on_server(root: Path, use: Callable[[Client], Awaitable[T]], tokens: Path | None = None) -> T:
    async def run() -> T:
        with ChunkStore.open(root) as store:
            async with asyncio.timeout(60), client_of(store, tokens) as client:
                return await use(client)

    return asyncio.run(run())


async def _form_key(answer: ClientResponse) -> str:
    found = re.search(r'name="form" value="([0-9a-f]{64})"', await answer.text())
    assert found is not None
    return found[1]


def test_pages_say_what_to_do_when_there_is_nothing(tmp_path: Path) -> None:
    async def use(client: Client) -> None:
        for path, said in (("/", "No images yet"), ("/snapshots", "No snapshots yet"), ("/jobs", "No jobs yet")):
            answer = await client.get(path)
            text = await answer.text()
            assert said in text
            assert f"--server http://{client.host}:{client.port}" in text
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        assert "None is remembered" in await (await client.get("/store")).text()
        await asyncio.to_thread(collect, tmp_path)
        assert "by a command: 0 B freed" in await (await client.get("/store")).text()
        for path in ("/images/none:1", "/images/%00", "/snapshots/none", "/jobs/none", "/images/UP/../x"):
            answer = await client.get(path)
            assert answer.status in (400, 404)
            assert "</html>" in await answer.text()
        evil = await client.get("/", headers={"Host": "<script>.test"})
        assert "<script>.test" not in await evil.text()

    on_server(tmp_path, use)


def test_a_thousand_names_are_shown_a_hundred_at_a_time(tmp_path: Path) -> None:
    with ChunkStore.open(tmp_path) as store:
        add_image(store, "x:0", chunks=2)
        ref = store.refs.get("x:0")
        assert ref is not None
        more = {f"x:{number}": replace(ref, stored_bytes=number, created_at=number) for number in range(1, 250)}
        RefTable.restore(store.index, more)

    async def use(client: Client) -> None:
        async def names(path: str) -> list[str]:
            return re.findall(r"<bdi>(x:\d+)</bdi>", await (await client.get(path)).text())

        assert len(await names("/")) == len(await names("/?page=2")) == 100
        assert len(await names("/?page=3")) == len(await names("/?page=77")) == 50
        assert (await names("/?sort=stored"))[1:3] == ["x:249", "x:248"]
        assert (await names("/?q=X:24+9&sort=age")) == ["x:249"]
        assert "No image has" in await (await client.get("/?q=<script>")).text()
        text = await (await client.get("/?page=2&sort=age&q=x")).text()
        assert 'href="/?q=x&amp;sort=age&amp;page=3"' in text

    on_server(tmp_path, use)


def test_what_a_page_says_of_a_job(tmp_path: Path) -> None:
    jobs = DirectoryJobStore(tmp_path)
    with ChunkStore.open(tmp_path) as store:
        image = add_image(store, "app:v1", chunks=2)

    def end(source: str, change: Callable[[Job], Job]) -> Job:
        jobs.submit(Job.conversion(source, name=None, platform=None))
        claim = jobs.claim()
        assert claim is not None
        with claim:
            return claim.finish(change)

    result = {"name": "app:v1", "id": str(image.id), "warnings": ["<b>one</b>", "two"]}
    done = end("docker://h.test/a:1", lambda job: job.done(image=result))
    failed = end("docker://h.test/b:1", lambda job: job.failed("it <broke>", "mend it"))
    jobs.submit(Job.collection())
    jobs.cancel(jobs.all()[0].id)

    async def use(client: Client) -> None:
        listed = await (await client.get("/jobs")).text()
        assert "0 waiting" not in listed
        assert "3 jobs remembered" in listed
        assert "2 warnings" in listed
        assert 'http-equiv="refresh"' in listed  # without a script
        assert "&lt;b&gt;one&lt;/b&gt;" in await (await client.get(f"/jobs/{done.id}")).text()
        shown = await (await client.get(f"/jobs/{failed.id}")).text()
        assert "it &lt;broke&gt;" in shown
        assert "mend it" in shown
        assert "&lt;b&gt;one&lt;/b&gt;" in await (await client.get("/images/app:v1")).text()

    on_server(tmp_path, use)


def test_forms_of_other_sites_do_nothing(tmp_path: Path) -> None:
    async def use(client: Client) -> None:
        key = await _form_key(await client.get("/store"))
        own = f"http://{client.host}:{client.port}"
        for headers, sent in (
            ({"Origin": "http://evil.test"}, key),
            ({"Origin": "null"}, key),
            ({"Sec-Fetch-Site": "cross-site"}, key),
            ({"Sec-Fetch-Site": "same-site", "Origin": own}, key),
            ({"Origin": own}, "0" * 64),
            ({}, ""),
        ):
            answer = await client.post("/store/collect", data={"form": sent}, headers=headers, allow_redirects=False)
            assert answer.status == 403, (headers, sent)
        assert (await (await client.get("/v1/jobs")).json()) == {"jobs": []}
        headers = {"Origin": own, "Sec-Fetch-Site": "same-origin"}
        answer = await client.post("/store/collect", data={"form": key}, headers=headers, allow_redirects=False)
        assert answer.status == 303
        job = answer.headers["Location"].removeprefix("/jobs/").partition("?")[0]
        answer = await client.post(f"/jobs/{job}/cancel", data={"form": key}, allow_redirects=False)
        assert answer.status in (303, 409)
        found = await (await client.get(f"/v1/jobs/{job}")).json()
        assert found["state"] in (State.CANCELLED, State.DONE)

    on_server(tmp_path, use)


def test_sessions_are_signed_and_end_with_their_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret, token = Token.new(Scope.READ, namespace=None)
    file = tmp_path / "tokens"
    file.write_text(token.line())

    async def use(client: Client) -> None:
        async def status(cookie: str) -> int:
            answer = await client.get("/jobs", headers={"Cookie": f"{COOKIE}={cookie}"}, allow_redirects=False)
            return answer.status

        for after, path in (
            ("/jobs?x=1", "/jobs?x=1"),
            ("//evil.test", "/"),
            ("https://evil.test", "/"),
            ("/\\e", "/"),
            ("//[", "/"),
            ("/[", "/%5B"),
        ):
            answer = await client.post("/login", data={"token": secret, "next": after}, allow_redirects=False)
            assert (answer.status, answer.headers["Location"]) == (303, path)
        cookie = answer.cookies[COOKIE]
        assert (cookie["httponly"], cookie["samesite"], cookie["max-age"]) == (True, "Strict", "")
        assert secret not in cookie.value
        client.session.cookie_jar.clear()
        answer = await client.post("/login", data={"token": "no", "next": "/"}, allow_redirects=False)
        assert (answer.status, COOKIE in answer.cookies) == (401, False)
        evil = await client.post(
            "/login", data={"token": secret}, headers={"Origin": "http://e"}, allow_redirects=False
        )
        assert evil.status == 403
        for kind in ("application/x-www-form-urlencoded; charset=bogus", "multipart/form-data"):
            odd = await client.post("/login", data=b"token=x", headers={"Content-Type": kind})
            assert odd.status == 400, kind
        client.session.cookie_jar.clear()
        expires, digest, signature = cookie.value.split(".")
        assert await status(cookie.value) == 200
        for wrong in ("", "x", "..", f"{int(expires) + 1}.{digest}.{signature}", f"{expires}.{'0' * 64}.{signature}"):
            assert await status(wrong) == 303
        answer = await client.get("/store", headers={"Cookie": f"{COOKIE}={cookie.value}"})
        assert "Collect now" not in await answer.text()
        key = await _form_key(answer)
        with_cookie = {"Cookie": f"{COOKIE}={cookie.value}"}
        answer = await client.post("/store/collect", data={"form": key}, headers=with_cookie, allow_redirects=False)
        assert answer.status == 403
        monkeypatch.setattr("imaged.web.session.time.time", lambda: int(expires) + 1)
        assert await status(cookie.value) == 303
        monkeypatch.undo()
        monkeypatch.setattr("imaged.serving.tokens._LOOK_S", -1.0)
        file.write_text("# nobody\n")
        assert await status(cookie.value) == 303

    on_server(tmp_path / "store", use, file)
    assert (tmp_path / "store/session.key").stat().st_mode & 0o777 == 0o600
