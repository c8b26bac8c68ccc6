"""A server with tokens: each may do its part over every route, and no namespace learns of another."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from imaged.blockimage import BlockImage
from imaged.chunkstore.store import ChunkStore
from imaged.errors import UpstreamError
from imaged.fetching.credentials import KNOWN
from imaged.fetching.retry import RetryPolicy
from imaged.fetching.upstream import HttpUpstream
from imaged.frame import HEADER_BYTES, Codec, Frame, FrameHeader
from imaged.ids import ChunkId
from imaged.reach import reachable
from imaged.serving.access import ROUTES, Need
from imaged.serving.serveconfig import ServeOptions
from imaged.serving.server import application
from imaged.serving.tokenfile import add_token, revoke_token
from imaged.serving.tokens import Scope, Token
from tests.support.chunkserver import ChunkServer, ask, chunk_server
from tests.support.command import Host
from tests.support.node import wait_for
from tests.support.stage_process import processes_with
from tests.support.synthetic import Synthetic, add_image
from tests.support.tokens import Tokens, write_tokens

QUICK = RetryPolicy(total_s=0.5, first_wait_s=0.02, longest_wait_s=0.1)
DATA = b"bytes that somebody may or may not have " * 200
WHO = ("", "read", "write", "admin", "a-read", "a-write", "a-admin", "b-read", "b-write", "b-admin")


class Site(NamedTuple):
    server: ChunkServer
    tokens: Tokens
    store: Path
    images: dict[str, Synthetic]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    home = tmp_path_factory.mktemp("access")
    tokens = write_tokens(home / "tokens")
    with ChunkStore.open(home / "store") as store:
        names = {"a/app:v1": 1, "b/app:v1": 2, "plain:v1": 3}
        images = {name: add_image(store, name, seed=seed, chunks=4) for name, seed in names.items()}
        store.profiles.merge(images["plain:v1"].record.data, [images["plain:v1"].record.data])
    with chunk_server(home / "store", token_file=str(tokens.path)) as server:
        yield Site(server, tokens, home / "store", images)


def asked(site: Site, who: str, method: str, path: str, body: Any = None) -> tuple[int, dict[str, str], bytes]:
    raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    kind = "application/octet-stream" if isinstance(body, bytes) else "application/json"
    return ask(site.server, method, path, raw, Content_Type=kind, **site.tokens.bearer(who))


REQUESTS: dict[tuple[str, str], tuple[str, Any]] = {
    ("GET", "/v1/images"): ("/v1/images", None),
    ("POST", "/v1/images"): ("/v1/images", {"source": "oci:/etc"}),
    ("GET", "/v1/images/{name}"): ("/v1/images/nobody:has", None),
    ("PUT", "/v1/images/{name}"): ("/v1/images/a/x:v1", {"id": "0" * 64}),
    ("DELETE", "/v1/images/{name}"): ("/v1/images/nobody:has", None),
    ("GET", "/v1/snapshots"): ("/v1/snapshots", None),
    ("GET", "/v1/snapshots/{name}"): ("/v1/snapshots/nobodys", None),
    ("PUT", "/v1/snapshots/{name}"): ("/v1/snapshots/a.x", {"id": "0" * 64}),
    ("DELETE", "/v1/snapshots/{name}"): ("/v1/snapshots/nobodys", None),
    ("GET", "/v1/profiles/{name}"): ("/v1/profiles/nobody:has", None),
    ("PUT", "/v1/profiles/{name}"): ("/v1/profiles/nobody:has", b""),
    ("GET", "/v1/chunks/{id}"): ("/v1/chunks/" + "0" * 64, None),
    ("POST", "/v1/chunks/batch"): ("/v1/chunks/batch", b""),
    ("POST", "/v1/chunks/missing"): ("/v1/chunks/missing", b""),
    ("PUT", "/v1/chunks"): ("/v1/chunks", b""),
    ("POST", "/v1/leases"): ("/v1/leases", {"holder": "a test", "keeps": []}),
    ("PUT", "/v1/leases/{id}"): ("/v1/leases/nobodys", {}),
    ("DELETE", "/v1/leases/{id}"): ("/v1/leases/nobodys", None),
    ("GET", "/v1/jobs"): ("/v1/jobs", None),
    ("GET", "/v1/jobs/{id}"): ("/v1/jobs/nobodys", None),
    ("DELETE", "/v1/jobs/{id}"): ("/v1/jobs/nobodys", None),
    ("POST", "/v1/gc"): ("/v1/gc", None),
    ("GET", "/metrics"): ("/metrics", None),
    ("GET", "/healthz"): ("/healthz", None),
    ("GET", "/readyz"): ("/readyz", None),
    ("GET", "/v1/openapi.json"): ("/v1/openapi.json", None),
}
FOREIGN = {("PUT", "/v1/images/{name}"), ("PUT", "/v1/snapshots/{name}")}
"""Name something of namespace a."""


def test_the_table_has_every_route(tmp_path: Path) -> None:
    async def routes() -> set[tuple[str, str]]:
        with ChunkStore.open(tmp_path / "store") as store:
            async with application(store) as app:
                found = [(route.method, route.resource) for route in app.router.routes()]
        return {("GET" if method == "HEAD" else method, one.canonical) for method, one in found if one is not None}

    there = asyncio.run(routes())
    assert there == set(ROUTES)
    assert {key for key, need in ROUTES.items() if need is not Need.PAGE} == set(REQUESTS)


@pytest.mark.parametrize("route", REQUESTS, ids=lambda route: " ".join(route))
def test_each_token_can_do_its_part(site: Site, route: tuple[str, str]) -> None:
    need, (path, body) = ROUTES[route], REQUESTS[route]
    for who in WHO:
        status, headers, answer = asked(site, who, route[0], path, body)
        said = (who, status, answer[:300])
        assert status < 500, said
        if need is Need.OPEN:
            assert status == 200, said
            continue
        namespace, _, scope = who.rpartition("-")
        if not who:
            assert status == 401, said
            assert headers["www-authenticate"].startswith("Bearer"), said
        elif (
            Scope.parse(scope) < need.scope or (need.is_whole and namespace) or (route in FOREIGN and namespace == "b")
        ):
            assert status == 403, said
        elif route == ("POST", "/v1/images"):
            assert (status, json.loads(answer)["error"].split()[0]) == (403, "this"), said
            assert "oci" in json.loads(answer)["error"], said
        else:
            assert status not in (401, 403, 405), said
        if status in (401, 403):
            assert set(json.loads(answer)) == {"error", "hint"}
            assert headers["cache-control"] == "no-store"


@pytest.mark.parametrize(
    "authorization",
    [
        "Bearer",
        "Bearer ",
        "Basic {}",
        "{}",
        "Bearer x{}",
        "Bearer {}x",
        "Bearer {},{}",
        "Bearer \xff",
        "Bearer " + "x" * 7000,
    ],
)
def test_what_is_no_token_is_refused(site: Site, authorization: str) -> None:
    secret = site.tokens.secrets["admin"]
    for path in ("/v1/images", "/v1/chunks/" + "0" * 64, "/v1/no/such/path"):
        given = authorization.format(secret, secret)
        status, headers, answer = ask(site.server, "GET", path, Authorization=given)
        assert status == 401, given
        assert "Bearer" in headers["www-authenticate"]
        assert secret.encode() not in answer
    status, _, _ = ask(site.server, "GET", "/v1/images", Authorization=f"bEARER   {secret} ")
    assert status == 200


def test_paths_are_told_only_to_who_has_a_token(site: Site) -> None:
    for method, path, status in (("GET", "/v1/nothing", 404), ("DELETE", "/v1/chunks", 405), ("PATCH", "/v1/gc", 405)):
        assert asked(site, "", method, path)[0] == 401
        assert asked(site, "a-read", method, path)[0] == status


def listed(site: Site, who: str) -> set[str]:
    return {image["name"] for image in json.loads(asked(site, who, "GET", "/v1/images")[2])["images"]}


def test_a_namespace_sees_its_own_images(site: Site) -> None:
    assert listed(site, "read") >= {"a/app:v1", "b/app:v1", "plain:v1"}
    assert {name for name in listed(site, "a-read") if not name.startswith("a/")} == set()
    mine, theirs = site.images["a/app:v1"], site.images["b/app:v1"]
    for text in ("a/app:v1", "app:v1", str(mine.id)):
        assert json.loads(asked(site, "a-read", "GET", f"/v1/images/{text}")[2])["id"] == str(mine.id)
    unknown = str(ChunkId.of(b"nobody has this"))
    nobody = asked(site, "a-read", "GET", f"/v1/images/{unknown}")[2].replace(unknown.encode(), b"ID")
    for text in ("b/app:v1", "plain:v1", str(theirs.id), str(site.images["plain:v1"].id)):
        for query in ("", "?view=boot&profile=chunks"):
            status, _, answer = asked(site, "a-read", "GET", f"/v1/images/{text}{query}")
            assert status == 404
            if ChunkId.is_id(text):
                assert answer.replace(text.encode(), b"ID") == nobody
        assert asked(site, "a-read", "GET", f"/v1/profiles/{text}")[0] == 404
        assert asked(site, "a-admin", "DELETE", f"/v1/images/{text}")[0] == 404
    assert asked(site, "a-read", "GET", "/v1/images/app:v1?view=boot&profile=chunks")[0] == 200


def test_chunks_of_others_are_as_chunks_of_nobody(site: Site) -> None:
    with ChunkStore.open(site.store, readonly=True) as store:
        theirs = list(reachable(store, site.images["b/app:v1"].id))
        mine = list(reachable(store, site.images["a/app:v1"].id))
    asked(site, "a-read", "GET", "/v1/images/app:v1")
    nobody = ChunkId.of(b"nobody has this")
    for chunk in theirs:
        expected = asked(site, "a-read", "GET", f"/v1/chunks/{nobody}")
        for extra in ({}, {"If_None_Match": f'"{chunk}"'}, {"If_None_Match": "*"}, {"Cache_Control": "no-cache"}):
            bearer = site.tokens.bearer("a-read")
            status, _, answer = ask(site.server, "GET", f"/v1/chunks/{chunk}", **bearer, **extra)
            assert (status, answer.replace(str(chunk).encode(), b"")) == (
                404,
                expected[2].replace(str(nobody).encode(), b""),
            )
    batch = b"".join([*theirs, nobody, *mine])
    status, _, answer = asked(site, "a-read", "POST", "/v1/chunks/batch", batch)
    frames = split(answer)
    assert [frame.id for frame in frames] == [*theirs, nobody, *mine]
    assert [frame.header.codec is Codec.MISSING for frame in frames] == [True] * (len(theirs) + 1) + [False] * len(mine)
    missing = json.loads(asked(site, "a-read", "POST", "/v1/chunks/missing", batch)[2])["missing"]
    assert missing == [str(chunk) for chunk in (*theirs, nobody)]
    for who in ("read", "b-read"):
        asked(site, who, "GET", "/v1/images/b/app:v1")
        assert asked(site, who, "GET", f"/v1/chunks/{theirs[3]}")[0] == 200


def split(raw: bytes) -> list[Frame]:
    frames = []
    while raw:
        end = HEADER_BYTES + FrameHeader.parse(raw[:HEADER_BYTES]).payload_bytes
        frames.append(Frame.parse(raw[:end]))
        raw = raw[end:]
    return frames


@pytest.mark.parametrize("whose", ["nobodys", "b's"])
def test_an_upload_does_not_tell_whether_others_have_it(site: Site, whose: str) -> None:
    with ChunkStore.open(site.store, readonly=True) as store:
        chunks = list(BlockImage.open(store, site.images["b/app:v1"].record.data).chunk_ids())
        data = store.get(chunks[0]) if whose == "b's" else DATA
    chunk = ChunkId.of(data)
    frame = Frame(FrameHeader(chunk, Codec.RAW, len(data), len(data)), data)
    assert json.loads(asked(site, "a-write", "POST", "/v1/chunks/missing", chunk)[2]) == {"missing": [str(chunk)]}
    lie = Frame(FrameHeader(chunk, Codec.RAW, 4096, 4096), bytes(4096))
    assert asked(site, "a-write", "PUT", "/v1/chunks", lie.pack())[0] == 400
    assert asked(site, "a-read", "GET", f"/v1/chunks/{chunk}")[0] == 404
    status, _, answer = asked(site, "a-write", "PUT", "/v1/chunks", frame.pack())
    assert (status, json.loads(answer)) == (200, {"stored": 1})
    status, headers, answer = asked(site, "a-read", "GET", f"/v1/chunks/{chunk}")
    assert (status, answer) == (200, Frame.of(data).pack())
    assert headers["cache-control"].startswith("private")


def test_who_knows_ids_only_can_not_name_them(site: Site) -> None:
    image = site.images["b/app:v1"]
    status, _, answer = asked(site, "a-write", "PUT", "/v1/images/a/stolen:v1", {"id": str(image.id)})
    assert status == 409
    upload = Frame.of(image.record.to_bytes()).pack()
    assert asked(site, "a-write", "PUT", "/v1/chunks", upload)[0] == 200
    status, _, answer = asked(site, "a-write", "PUT", "/v1/images/a/stolen:v1", {"id": str(image.id)})
    assert status == 409, answer
    assert asked(site, "a-read", "GET", "/v1/images/a/stolen:v1")[0] == 404


def test_a_namespaced_token_names_images_and_snapshots_of_its_own(site: Site) -> None:
    image = site.images["a/app:v1"]
    asked(site, "a-read", "GET", "/v1/images/app:v1")
    status, _, answer = asked(site, "a-write", "PUT", "/v1/images/b/mine:v1", {"id": str(image.id)})
    assert (status, json.loads(answer)["hint"]) == (403, "name it a/b/mine:v1")
    status, _, answer = asked(site, "a-write", "PUT", "/v1/snapshots/mine", {"id": str(image.id)})
    assert (status, json.loads(answer)["hint"]) == (403, "name it a.mine")
    status, _, answer = asked(site, "a-write", "PUT", "/v1/images/a/again:v1", {"id": str(image.id)})
    assert (status, json.loads(answer)["source"]) == (200, "synthetic")
    assert asked(site, "a-write", "DELETE", "/v1/images/a/again:v1")[0] == 403
    assert asked(site, "a-admin", "DELETE", "/v1/images/a/again:v1")[0] == 200
    # The same bytes under a name of another: where they came from there is not told.
    with ChunkStore.open(site.store, readonly=True) as store:
        frames = b"".join(frame.pack() for frame in store.frames(list(reachable(store, image.id))))
    assert asked(site, "b-write", "PUT", "/v1/chunks", frames)[0] == 200
    status, _, answer = asked(site, "b-write", "PUT", "/v1/images/b/same:v1", {"id": str(image.id)})
    assert (status, json.loads(answer)["source"]) == (200, "upload")


def test_conversions_land_in_the_namespace_and_are_seen_there(site: Site) -> None:
    for name in (None, "x:v1", "b/x:v1", "a/x:v1"):
        wanted = {"source": "docker://127.0.0.1:9/none:v1"} | ({"name": name} if name else {})
        status, _, answer = asked(site, "a-write", "POST", "/v1/images", wanted)
        assert status == 202
        path = f"/v1/jobs/{json.loads(answer)['job']}"
        found = json.loads(asked(site, "a-read", "GET", path)[2])
        assert found["name"] == {None: "a/127.0.0.1_9/none:v1", "a/x:v1": "a/x:v1"}.get(name, f"a/{name}")
        assert asked(site, "read", "GET", path)[0] == 200
        assert asked(site, "b-read", "GET", path)[0] == 404
        assert asked(site, "b-admin", "DELETE", path)[0] == 404
        jobs = json.loads(asked(site, "b-read", "GET", "/v1/jobs")[2])["jobs"]
        assert [job for job in jobs if job["name"] == found["name"]] == []
        assert asked(site, "a-write", "DELETE", path)[0] in (200, 409)


def test_profiles_are_of_the_namespace(site: Site) -> None:
    image = site.images["a/app:v1"]
    leaves = b"".join(BlockImage.open(ChunkStoreReader(site), image.record.data).leaf_ids())
    assert asked(site, "a-read", "GET", f"/v1/profiles/{image.id}")[0] == 404
    assert asked(site, "a-write", "PUT", f"/v1/profiles/{image.id}", leaves)[0] == 200
    assert asked(site, "a-read", "GET", f"/v1/profiles/{image.id}")[0] == 200
    assert asked(site, "b-read", "GET", f"/v1/profiles/{image.id}")[0] == 404
    assert asked(site, "read", "GET", f"/v1/profiles/{image.id}")[0] == 404


class ChunkStoreReader:
    """Chunks through the server, as the operator."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def get(self, chunk: ChunkId) -> bytes:
        return Frame.parse(asked(self._site, "read", "GET", f"/v1/chunks/{chunk}")[2]).open()

    def frames(self, chunks: list[ChunkId]) -> Iterator[Frame]:
        return iter(split(asked(self._site, "read", "POST", "/v1/chunks/batch", b"".join(chunks))[2]))


def test_tokens_come_and_go_without_a_restart(site: Site) -> None:
    secret, token = Token.new(Scope.READ, namespace=None)

    def status(wanted: int) -> None:
        def says(authorization: str) -> bool:
            return ask(site.server, "GET", "/v1/images", Authorization=authorization)[0] == wanted

        wait_for(lambda: says(f"Bearer {secret}"))

    status(401)
    add_token(site.tokens.path, token)
    status(200)
    revoke_token(site.tokens.path, token.id)
    status(401)


def test_the_client_sends_its_token_to_its_server_only(site: Site) -> None:
    with HttpUpstream(site.server.url, retry=QUICK) as upstream:
        with pytest.raises(UpstreamError, match="takes a token") as caught:
            upstream.images()
        assert "PVISOR_TOKEN" in caught.value.hint
        KNOWN.learn(site.server.url, site.tokens.secrets["a-read"])
        assert {image.name for image in upstream.images()} == {"a/app:v1"}
        with pytest.raises(UpstreamError, match="scope write"):
            upstream.upload([Frame.of(b"x")])
        KNOWN.learn(site.server.url, "not-a-token-canary")
        with pytest.raises(UpstreamError, match="none of this server's") as caught:
            upstream.images()
        assert "canary" not in f"{caught.value}{caught.value.hint}"


def until_refused(site: Site, who: str) -> tuple[list[int], dict[str, str], bytes]:
    """The statuses of requests until one is 429, and the rest of that answer. AssertionError after 200."""
    statuses: list[int] = []
    for _ in range(200):
        status, headers, answer = asked(site, who, "GET", "/v1/images")
        statuses.append(status)
        if status == 429:
            return statuses, headers, answer
    raise AssertionError(statuses)


def test_requests_over_the_limit_wait(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "tokens")
    with chunk_server(tmp_path / "store", token_file=str(tokens.path), rate_limit=5.0) as server:
        site = Site(server, tokens, tmp_path / "store", {})
        statuses, headers, answer = until_refused(site, "read")
        assert statuses[:10] == [200] * 10
        assert set(statuses[10:-1]) <= {200}  # on a slow host the first of them are forgiven meanwhile
        assert headers["retry-after"] == "1"
        assert "--rate-limit" in json.loads(answer)["hint"]
        # Others are not held up; who has no token is one client.
        assert asked(site, "a-read", "GET", "/v1/images")[0] == 200
        statuses, _, _ = until_refused(site, "")
        assert set(statuses[:-1]) == {401}
        assert asked(site, "", "GET", "/healthz")[0] == 200
        KNOWN.learn(server.url, tokens.secrets["read"])
        with HttpUpstream(server.url, retry=RetryPolicy(total_s=10)) as upstream:
            assert upstream.images() == []


def test_no_secret_is_shown_anywhere(site: Site, tmp_path: Path) -> None:
    """In no log, no command line, no answer: of the server, and of commands against it."""
    tokens = write_tokens(tmp_path / "tokens")
    log = tmp_path / "log"
    argv = [sys.executable, "-c", "from cli.main import main; main()", "serve", "-v", "--listen", "127.0.0.1:0"]
    argv += ["--store", str(tmp_path / "store"), "--token-file", str(tokens.path), "--json"]
    with log.open("wb") as errors:
        serving = subprocess.Popen(argv, env=Host(tmp_path).env, stdout=subprocess.PIPE, stderr=errors)
    try:
        assert serving.stdout is not None
        url = json.loads(serving.stdout.readline())["url"]
        for who in ("admin",):
            secret = tokens.secrets[who]
            host = Host(tmp_path, url, {"PVISOR_TOKEN": secret})
            shown = host.run("convert", "docker://127.0.0.1:9/none:v1", "-v", code=1).stderr
            bad = Host(tmp_path, url, {"PVISOR_TOKEN": f"{secret}x"})
            shown += bad.run("image", "ls", "--remote", "-v", code=1).stderr
            assert b"Traceback" in shown
            assert secret.encode() not in shown
        assert [processes_with(secret) for secret in tokens.secrets.values()] == [[]] * len(tokens.secrets)
    finally:
        serving.terminate()
        serving.wait(20)
        if serving.stdout is not None:
            serving.stdout.close()
    said = log.read_text()
    assert not any(secret in said for secret in tokens.secrets.values())


def test_a_server_with_bad_tokens_says_so_and_ends(tmp_path: Path) -> None:
    bad = tmp_path / "tokens"
    bad.write_text("pvisor_canary is no line\n")
    host = Host(tmp_path)
    for path, says in ((bad, "line 1"), (tmp_path / "none", "No such file")):
        text = host.error("serve", "--listen", "127.0.0.1:0", "--token-file", str(path))
        assert says in text
        assert "canary" not in text


def test_a_pipe_in_place_of_the_token_file_stops_no_server(tmp_path: Path) -> None:
    """To open one waits for somebody who writes to it, and the event loop would wait with it."""
    tokens, log = write_tokens(tmp_path / "tokens"), tmp_path / "log"
    with (
        log.open("wb") as output,
        chunk_server(tmp_path / "store", stderr=output, token_file=str(tokens.path)) as server,
    ):
        tokens.path.unlink()
        os.mkfifo(tokens.path)

        def is_noticed() -> bool:
            assert ask(server, "GET", "/v1/images", **tokens.bearer("read"))[0] == 200
            return "not a regular file" in log.read_text()

        wait_for(is_noticed)
        assert server.stop() == 0
    host = Host(tmp_path)
    for command in (("ls",), ("new", "--scope", "read"), ("revoke", "0123456789ab")):
        assert "not a regular file" in host.error("token", *command, "--file", str(tokens.path))


def test_options_that_travel_to_workers_have_no_secret(tmp_path: Path) -> None:
    options = ServeOptions(store=str(tmp_path), token_file=str(tmp_path / "tokens"))
    assert ServeOptions.parse(options.to_json()) == options
