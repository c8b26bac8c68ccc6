"""A token goes to the servers it was given for, and nowhere else."""

from __future__ import annotations

import pytest

from imaged.config import Config
from imaged.errors import InvalidNameError
from imaged.fetching.credentials import KNOWN, Credentials, origin_of


@pytest.mark.parametrize(
    ("servers", "given", "url", "sent"),
    [
        ("http://a:1", "T", "http://a:1", "T"),
        ("http://a:1", "T", "http://A:1/prefix", "T"),
        ("http://a:1,https://b", "T", "https://b:443", "T"),
        ("http://a:1", "T", "http://a:2", ""),
        ("https://a", "T", "http://a", ""),
        ("https://a", "T", "https://a:8443", ""),
        ("http://a:1", "T", "http://a.evil:1", ""),
        ("http://a:1", "T", "http://evil:1/http://a:1", ""),
        ("http://peer:1,https://a", "https://a=T", "https://a", "T"),
        ("http://peer:1,https://a", "https://a=T", "http://peer:1", ""),
        ("http://peer:1,https://a", "https://a=T, http://peer:1=P", "http://peer:1", "P"),
        ("http://peer:1,https://a", "P,https://a=T", "https://a", "T"),
        ("", "T", "http://a:1", ""),
        ("http://[::1]:7", "T", "http://[::1]:7", "T"),
    ],
)
def test_the_token_of_a_server(servers: str, given: str, url: str, sent: str) -> None:
    held = Credentials()
    held.learn(servers, given)
    assert held.authorization(origin_of(url)) == (f"Bearer {sent}" if sent else "")
    assert held.lacks(origin_of(url)) == (not sent)
    without = Credentials()
    without.learn(servers, "")
    assert not without.lacks(origin_of(url))
    assert "T" not in repr(held)


@pytest.mark.parametrize("given", ["two words", "https://a", "https://=canary", "line\ncanary", "cänary", "a\r\nX: y"])
def test_what_is_no_token_is_refused_and_not_shown(given: str) -> None:
    with pytest.raises(InvalidNameError) as caught:
        Credentials().learn("http://a:1", given)
    assert given not in f"{caught.value}{caught.value.hint}"
    assert "canary" not in f"{caught.value}{caught.value.hint}"


def test_a_configuration_notes_the_token_and_does_not_have_it() -> None:
    environ = {"PVISOR_TOKEN": "secret-canary", "PVISOR_SERVER": "http://configured.test:1"}
    config = Config.resolve(environ=environ)
    assert "canary" not in repr(config)
    assert KNOWN.authorization(origin_of("http://configured.test:1")) == "Bearer secret-canary"
    assert KNOWN.authorization(origin_of("http://remembered.test:1")) == ""
    Config.resolve(server="http://flag.test:1", environ={**environ, "PVISOR_TOKEN": "another"})
    assert KNOWN.authorization(origin_of("http://flag.test:1")) == "Bearer another"
    assert KNOWN.authorization(origin_of("http://configured.test:1")) == "Bearer secret-canary"
