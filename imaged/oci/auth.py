"""Registry credentials, from the files and helpers that docker, podman and skopeo use (containers-auth.json(5)).

Secrets stay in objects whose repr hides them; they are in no argument list, message or log.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from imaged.document import parse_json
from imaged.errors import RegistryAuthError

_HELPER_TIMEOUT_S = 60
_IDENTITY_USER = "<token>"


@dataclass(frozen=True, slots=True)
class Credentials:
    """A user with a password, or an identity token (OAuth2 refresh token) in its place."""

    username: str = ""
    password: str = field(default="", repr=False)
    identity_token: str = field(default="", repr=False)

    @property
    def basic(self) -> str:
        """The value of an Authorization header of the Basic scheme."""
        return "Basic " + base64.b64encode(f"{self.username}:{self.password}".encode()).decode()


def find_credentials(
    host: str, repository: str, *, aliases: Sequence[str] = (), environ: Mapping[str, str] = os.environ
) -> Credentials | None:
    """What the first file that knows this host says, the most specific entry of it; None for anonymous.

    `aliases` are other names that files have for the host. RegistryAuthError for a file or helper that is broken.
    """
    for path in auth_files(environ):
        try:
            raw = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise RegistryAuthError(f"{path}: {error.strerror}", hint="make it readable or move it away") from error
        found = _in_file(parse_json(raw or b"{}", str(path)), path, host, repository, aliases, environ)
        if found is not None:
            return found
    return None


def auth_files(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """The files that are looked at, in order. $REGISTRY_AUTH_FILE, when set, is the only one."""
    if named := environ.get("REGISTRY_AUTH_FILE"):
        return [Path(named)]
    home = Path(environ.get("HOME") or "/")
    runtime = environ.get("XDG_RUNTIME_DIR")
    config = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    return [
        *([Path(runtime) / "containers/auth.json"] if runtime else []),
        config / "containers/auth.json",
        Path(environ.get("DOCKER_CONFIG") or home / ".docker") / "config.json",
    ]


def _in_file(
    document: dict[str, Any],
    path: Path,
    host: str,
    repository: str,
    aliases: Sequence[str],
    environ: Mapping[str, str],
) -> Credentials | None:
    helpers = document.get("credHelpers")
    entries = document.get("auths")
    for name in (host, *aliases):
        helper = helpers.get(name) if isinstance(helpers, dict) else None
        if isinstance(helper, str) and helper and (found := _ask_helper(helper, name, environ)):
            return found
    if isinstance(entries, dict) and (found := _in_auths(entries, path, host, repository, aliases)):
        return found
    store = document.get("credsStore")
    if isinstance(store, str) and store:
        for name in (host, *aliases):
            if found := _ask_helper(store, name, environ):
                return found
    return None


def _in_auths(
    entries: dict[str, Any], path: Path, host: str, repository: str, aliases: Sequence[str]
) -> Credentials | None:
    """The entry of the longest key that is a prefix of HOST/REPOSITORY; old keys have a scheme and /v1/."""
    by_name = {_normalized(key): value for key, value in entries.items()}
    wanted = f"{host}/{repository}"
    while wanted:
        if (found := _credentials(by_name.get(wanted), path)) is not None:
            return found
        wanted = wanted.rpartition("/")[0]
    for alias in aliases:
        if (found := _credentials(by_name.get(_normalized(alias)), path)) is not None:
            return found
    return None


def _normalized(key: str) -> str:
    return re.sub(r"/v[12]$", "", re.sub(r"^https?://", "", key).rstrip("/"))


def _credentials(entry: object, path: Path) -> Credentials | None:
    """One value of `auths`; None when it is empty, as it is where a helper keeps the secret."""
    if not isinstance(entry, dict):
        return None
    identity = str(entry.get("identitytoken") or "")
    username, password = str(entry.get("username") or ""), str(entry.get("password") or "")
    if auth := entry.get("auth"):
        try:
            username, colon, password = base64.b64decode(str(auth), validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            colon = ""
        if not colon:
            raise RegistryAuthError(
                f"{path} has an auth entry that is not base64 of user:password", hint="log in again"
            )
        password = password.rstrip("\0")
    if not (identity or username or password):
        return None
    return Credentials(username, password, identity)


def _ask_helper(name: str, server: str, environ: Mapping[str, str]) -> Credentials | None:
    """Ask `docker-credential-NAME get`; None when it has nothing for this server."""
    program = f"docker-credential-{name}"
    if re.fullmatch(r"[A-Za-z0-9._-]+", name) is None:
        raise RegistryAuthError(f"{name[:80]!r} is not the name of a credential helper")
    try:
        done = subprocess.run(
            [program, "get"],
            input=server.encode(),
            capture_output=True,
            timeout=_HELPER_TIMEOUT_S,
            env=dict(environ),
            check=False,
        )
    except OSError as error:
        raise RegistryAuthError(f"{program}: {error.strerror}", hint="install it or log in without it") from error
    except subprocess.TimeoutExpired:
        raise RegistryAuthError(f"{program} gave no answer within {_HELPER_TIMEOUT_S} s") from None
    if done.returncode and b"credentials not found" in done.stdout + done.stderr:
        return None
    try:
        answer = json.loads(done.stdout) if done.returncode == 0 else None
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise RegistryAuthError(
            f"{program} failed for {server} with exit status {done.returncode}",
            hint=f"`echo {server} | {program} get` shows why",
        )
    username, secret = str(answer.get("Username") or ""), str(answer.get("Secret") or "")
    if username == _IDENTITY_USER:
        return Credentials(identity_token=secret)
    return Credentials(username, secret) if username or secret else None
