"""A token file with a token of every kind."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from imaged.serving.tokenfile import add_token
from imaged.serving.tokens import Scope, Token


@dataclass(frozen=True, slots=True)
class Tokens:
    """Secrets: `read`, `write`, `admin`, and within namespaces `a-read`, ..., `b-admin`."""

    path: Path
    secrets: dict[str, str]

    def bearer(self, name: str) -> dict[str, str]:
        """Headers for `ask`; none for ""."""
        return {"Authorization": f"Bearer {self.secrets[name]}"} if name else {}


def write_tokens(path: Path) -> Tokens:
    secrets: dict[str, str] = {}
    for space in (None, "a", "b"):
        for scope in Scope:
            secret, token = Token.new(scope, namespace=space)
            add_token(path, token)
            secrets[f"{space}-{scope}" if space else str(scope)] = secret
    return Tokens(path, secrets)
