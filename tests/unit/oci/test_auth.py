"""Credentials from files and helpers, and WWW-Authenticate headers."""

from __future__ import annotations

import base64
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from imaged.errors import FormatError, RegistryAuthError
from imaged.oci.auth import Credentials, auth_files, find_credentials
from imaged.oci.tokens import parse_challenges

SECRET = "s3cret-that-must-not-show"


def entry(user: str, password: str = SECRET) -> dict[str, str]:
    return {"auth": base64.b64encode(f"{user}:{password}".encode()).decode()}


def environ(tmp_path: Path, document: object = None, **extra: str) -> dict[str, str]:
    if document is not None:
        (tmp_path / ".docker").mkdir(exist_ok=True)
        (tmp_path / ".docker/config.json").write_text(json.dumps(document))
    return {"HOME": str(tmp_path), **extra}


def helper(tmp_path: Path, name: str, script: str) -> str:
    """A credential helper; the PATH that has it."""
    directory = tmp_path / "bin"
    directory.mkdir(exist_ok=True)
    program = directory / f"docker-credential-{name}"
    program.write_text("#!/bin/sh\n" + script)
    program.chmod(0o755)
    return f"{directory}:/usr/bin:/bin"


def user(found: Credentials | None) -> str | None:
    return found.username if found else None


def test_nothing_is_anonymous(tmp_path: Path) -> None:
    assert find_credentials("host:5000", "a/b", environ=environ(tmp_path)) is None
    assert find_credentials("host:5000", "a/b", environ=environ(tmp_path, {})) is None
    (tmp_path / ".docker/config.json").write_text("")
    assert find_credentials("host:5000", "a/b", environ=environ(tmp_path)) is None


def test_the_most_specific_entry_wins(tmp_path: Path) -> None:
    auths = {"host:5000": entry("host"), "host:5000/a": entry("team"), "host:5000/a/b": entry("repo")}
    where = environ(tmp_path, {"auths": auths})
    for repository, expected in (("a/b", "repo"), ("a/c", "team"), ("ab", "host"), ("a/b/c", "repo")):
        assert user(find_credentials("host:5000", repository, environ=where)) == expected
    assert find_credentials("host:5001", "a/b", environ=where) is None
    assert find_credentials("host", "a/b", environ=where) is None


@pytest.mark.parametrize("key", ["https://host/v1/", "http://host", "host/", "https://host/v2/"])
def test_old_keys(tmp_path: Path, key: str) -> None:
    where = environ(tmp_path, {"auths": {key: entry("me", "pass:word")}})
    assert find_credentials("host", "a", environ=where) == Credentials("me", "pass:word")


def test_aliases(tmp_path: Path) -> None:
    where = environ(tmp_path, {"auths": {"https://old.example/v1/": entry("me")}})
    assert user(find_credentials("new.example", "a", aliases=("https://old.example/v1/",), environ=where)) == "me"
    assert find_credentials("new.example", "a", environ=where) is None


def test_other_fields(tmp_path: Path) -> None:
    auths = {"a": {"username": "u", "password": "p"}, "b": {"identitytoken": "t"}, "c": {}, "d": {"auth": ""}}
    where = environ(tmp_path, {"auths": auths})
    assert find_credentials("a", "x", environ=where) == Credentials("u", "p")
    assert find_credentials("b", "x", environ=where) == Credentials(identity_token="t")
    assert find_credentials("c", "x", environ=where) is None
    assert find_credentials("d", "x", environ=where) is None


def test_the_order_of_files(tmp_path: Path) -> None:
    paths = {
        "runtime": tmp_path / "run/containers/auth.json",
        "config": tmp_path / ".config/containers/auth.json",
        "docker": tmp_path / "docker/config.json",
        "named": tmp_path / "named.json",
    }
    where = {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path / "run"), "DOCKER_CONFIG": str(tmp_path / "docker")}
    for name in ("docker", "config", "runtime"):
        paths[name].parent.mkdir(parents=True)
        paths[name].write_text(json.dumps({"auths": {"host": entry(name)}}))
        assert user(find_credentials("host", "a", environ=where)) == name
    assert auth_files(where) == [paths["runtime"], paths["config"], paths["docker"]]
    paths["named"].write_text(json.dumps({"auths": {"host": entry("named")}}))
    where["REGISTRY_AUTH_FILE"] = str(paths["named"])
    assert user(find_credentials("host", "a", environ=where)) == "named"
    assert auth_files({"HOME": "/h"})[-1] == Path("/h/.docker/config.json")


def test_a_helper_for_the_host(tmp_path: Path) -> None:
    log = tmp_path / "asked"
    script = f"""printf '%s ' "$@" >>{log}; cat >>{log}
    echo '{{"ServerURL": "x", "Username": "helped", "Secret": "{SECRET}"}}'"""
    path = helper(tmp_path, "test", script)
    document: dict[str, Any] = {
        "credHelpers": {"host:5000": "test"},
        "auths": {"host:5000": {}, "other": entry("other")},
    }
    where = environ(tmp_path, document, PATH=path)
    assert find_credentials("host:5000", "a", environ=where) == Credentials("helped", SECRET)
    assert log.read_text() == "get host:5000"
    assert user(find_credentials("other", "a", environ=where)) == "other"
    assert find_credentials("third", "a", environ=where) is None


def test_a_store_for_all_hosts(tmp_path: Path) -> None:
    script = """read host; if [ "$host" = known ]; then
    echo '{"Username": "<token>", "Secret": "identity"}'; else
    echo "credentials not found in native keychain"; exit 1; fi"""
    where = environ(tmp_path, {"credsStore": "all", "auths": {"known": {}}}, PATH=helper(tmp_path, "all", script))
    assert find_credentials("known", "a", environ=where) == Credentials(identity_token="identity")
    assert find_credentials("unknown", "a", environ=where) is None


@pytest.mark.parametrize(
    ("name", "script", "fact"),
    [
        ("bad", f"echo {SECRET}; echo {SECRET} >&2; exit 3", "failed for host with exit status 3"),
        ("bad", f"echo {SECRET}", "failed for host with exit status 0"),
        ("absent", None, "No such file"),
        ("../evil", None, "not the name of a credential helper"),
    ],
)
def test_broken_helpers_do_not_tell_secrets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, script: str | None, fact: str
) -> None:
    path = helper(tmp_path, name, script) if script else "/nonexistent"
    where = environ(tmp_path, {"credHelpers": {"host": name}}, PATH=path)
    with caplog.at_level(logging.DEBUG), pytest.raises(RegistryAuthError, match=fact) as caught:
        find_credentials("host", "a", environ=where)
    assert SECRET not in caught.value.message + caught.value.hint + caplog.text


def test_broken_files(tmp_path: Path) -> None:
    with pytest.raises(RegistryAuthError, match="not base64 of user:password"):
        find_credentials("a", "x", environ=environ(tmp_path, {"auths": {"a": {"auth": "!!"}}}))
    with pytest.raises(RegistryAuthError, match="not base64 of user:password"):
        find_credentials("a", "x", environ=environ(tmp_path, {"auths": {"a": {"auth": "YWJj"}}}))
    with pytest.raises(FormatError, match="JSON object"):
        find_credentials("a", "x", environ=environ(tmp_path, []))
    for odd in ({"auths": []}, {"auths": {"a": 3}}, {"credHelpers": 3}, {"credsStore": {}}):
        assert find_credentials("a", "x", environ=environ(tmp_path, odd)) is None


def test_secrets_are_not_in_repr() -> None:
    shown = repr(Credentials("me", SECRET, SECRET))
    assert "me" in shown
    assert SECRET not in shown
    assert Credentials("a", "b").basic == "Basic YTpi"


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (
            'Bearer realm="https://auth.example/token",service="reg",scope="repository:a/b:pull,push"',
            [
                (
                    "bearer",
                    {"realm": "https://auth.example/token", "service": "reg", "scope": "repository:a/b:pull,push"},
                )
            ],
        ),
        ('Basic realm="a \\"b\\""', [("basic", {"realm": 'a "b"'})]),
        (
            'Basic realm="x", Bearer realm="y" , service=z,Digest nonce=1',
            [("basic", {"realm": "x"}), ("bearer", {"realm": "y", "service": "z"}), ("digest", {"nonce": "1"})],
        ),
        ("Negotiate, Basic realm=x", [("negotiate", {}), ("basic", {"realm": "x"})]),
        ("BEARER Realm = 'x'", [("bearer", {"realm": "'x'"})]),
        ("", []),
        ("???", []),
        ('Bearer realm="unclosed', [("bearer", {})]),
    ],
)
def test_challenges(header: str, expected: list[tuple[str, dict[str, str]]]) -> None:
    assert parse_challenges(header) == expected
