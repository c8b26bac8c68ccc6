"""`pvisor token`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cli.common import Settings, output_options, table
from imaged.serving.tokenfile import add_token, revoke_token
from imaged.serving.tokens import Scope, Token, read_tokens


def file_option(function: Any) -> Any:
    return click.option("--file", "file", required=True, metavar="F", help="The server's token file.")(function)


def describe(token: Token) -> dict[str, Any]:
    """What is shown of a token: all but its secret, which nobody has any more."""
    return {
        "id": token.id,
        "scope": str(token.scope),
        "namespace": token.namespace,
        "created": token.created,
        "label": token.label,
    }


@click.group(short_help="Make, list and revoke a server's tokens.")
def token() -> None:
    """Tokens of a chunk server, in the file that `pvisor serve --token-file` is given.

    The file has hashes only. A server that runs takes changes within a second.

    \b
    Examples:
      pvisor token new --scope read --file /etc/pvisor/tokens
      export PVISOR_TOKEN=...      on the hosts that may use it
    """


@token.command(short_help="Make a token and print its secret.")
@click.option("--scope", type=click.Choice([str(scope) for scope in Scope]), required=True, help="What it may do.")
@click.option("--namespace", metavar="NS", help="For images NS/... and snapshots NS.xxx only.")
@click.option("--label", default="", metavar="TEXT", help="A note for whoever reads the file.")
@file_option
@output_options
def new(settings: Settings, scope: str, namespace: str | None, label: str, file: str) -> None:
    """Make a token, add its hash to the file, and print its secret: only now, it is kept nowhere.

    read: images, snapshots, chunks and profiles. write: also conversions, uploads and names. admin: also removal and
    garbage collection.

    \b
    Examples:
      pvisor token new --scope read --file /etc/pvisor/tokens
      pvisor token new --scope write --namespace team-a --label "build hosts" --file /etc/pvisor/tokens
    """
    secret, made = Token.new(Scope.parse(scope), namespace=namespace, label=label)
    add_token(Path(file), made)
    click.echo(f"token {made.id} was added to {file}; this is the only time that its secret is shown", err=True)
    settings.emit({**describe(made), "token": secret}, secret)


@token.command("ls", short_help="List the tokens of a file.")
@file_option
@output_options
def list_tokens(settings: Settings, file: str) -> None:
    """List the tokens of a file. ID is the start of the hash; a server's log names tokens by it.

    \b
    Example:
      pvisor token ls --file /etc/pvisor/tokens
    """
    held = read_tokens(Path(file))
    rows = [[one.id, str(one.scope), one.namespace or "-", one.created, one.label] for one in held.tokens]
    settings.emit(
        [describe(one) for one in held.tokens], lambda: table(["ID", "SCOPE", "NAMESPACE", "CREATED", "LABEL"], rows)
    )


@token.command(short_help="Take a token out of a file.")
@click.argument("token_id", metavar="ID")
@file_option
@output_options
def revoke(settings: Settings, token_id: str, file: str) -> None:
    """Take the token with this ID out of the file. Servers that run refuse it within a second.

    \b
    Example:
      pvisor token revoke 3f9a1c0d77e2 --file /etc/pvisor/tokens
    """
    gone = revoke_token(Path(file), token_id)
    settings.emit(describe(gone), f"revoked token {gone.id}")
