"""Signing in with a token."""

from __future__ import annotations

from imaged.web.frame import Page, note
from imaged.web.html import Html, join, tag

_ID = "token"


def login_page(after: str, *, problem: str = "") -> Page:
    """`after` is the path to go to then."""
    form = tag(
        "form",
        tag("input", type="hidden", name="next", value=after),
        tag(
            "div",
            tag("label", "Token", for_=_ID),
            tag(
                "input",
                type="password",
                name="token",
                id=_ID,
                required=True,
                autofocus=True,
                autocomplete="current-password",
                aria_describedby="token-help",
                aria_invalid="true" if problem else None,
            ),
        ),
        tag("button", "Sign in", class_="main"),
        method="post",
        action="/login",
    )
    body = tag(
        "div",
        tag("h1", "Sign in"),
        note("bad", problem) if problem else None,
        tag("div", form, class_="card"),
        _help(),
        class_="login",
    )
    return Page(title="Sign in", body=body, status=401 if problem else 200)


def _help() -> Html:
    return join(
        tag(
            "p",
            "A token is what PVISOR_TOKEN has on a host. Whoever runs this server makes one with:",
            id="token-help",
            class_="dim",
        ),
        tag("pre", "pvisor token new --scope read --file FILE"),
        tag("p", "A session lasts twelve hours. Its cookie does not have the token.", class_="dim"),
    )
