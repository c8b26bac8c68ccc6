"""Servers and sizes as users write them."""

from __future__ import annotations

import pytest

from imaged.config import Config
from imaged.errors import InvalidNameError
from imaged.sizes import cache_bytes, parse_bytes


def test_servers_are_asked_in_the_order_given() -> None:
    config = Config.resolve(environ={"PVISOR_SERVER": "http://peer:1/, https://rack ,,http://peer:1,http://origin"})
    assert config.servers == ("http://peer:1", "https://rack", "http://origin")
    assert config.origin == "http://origin"
    assert config.server == "http://peer:1,https://rack,http://origin"
    assert Config.resolve(server="http://flag", environ={"PVISOR_SERVER": "http://a"}).servers == ("http://flag",)
    none = Config.resolve(environ={"PVISOR_SERVER": " , "})
    assert (none.server, none.servers, none.origin) == (None, (), None)
    with pytest.raises(InvalidNameError, match="'rack:1' is not an http"):
        Config.resolve(server="http://a,rack:1", environ={})


def test_a_required_signature_that_names_no_key_is_refused() -> None:
    required = {
        text: [str(path) for path in Config.resolve(environ={"PVISOR_REQUIRE_SIGNATURE": text}).require_signature]
        for text in ("", "/a.pub", ":/a.pub:", "/a.pub:/b.pub")
    }
    assert required == {"": [], "/a.pub": ["/a.pub"], ":/a.pub:": ["/a.pub"], "/a.pub:/b.pub": ["/a.pub", "/b.pub"]}
    for text in (":", "::"):
        with pytest.raises(InvalidNameError, match=f"PVISOR_REQUIRE_SIGNATURE '{text}' names no key"):
            Config.resolve(environ={"PVISOR_REQUIRE_SIGNATURE": text})


def test_sizes() -> None:
    sizes = {
        "20G": 20 << 30,
        "500M": 500 << 20,
        "1.5g": 3 << 29,
        "2TiB": 2 << 40,
        "64 mb": 64 << 20,
        "16777216": 16 << 20,
    }
    assert {text: cache_bytes(text, "size") for text in sizes} == sizes
    assert parse_bytes("7b", "size") == 7
    for text in ("", "G", "-1G", "1X", "1e9", "nan", "9999999P"):
        with pytest.raises(InvalidNameError, match="is not a size"):
            cache_bytes(text, "size")
    with pytest.raises(InvalidNameError, match="at least 16M"):
        cache_bytes("15M", "size")
    assert Config.resolve(environ={"PVISOR_CACHE_MAX": "1G"}).cache_max_bytes == 1 << 30
    assert Config.resolve(environ={}).cache_max_bytes is None
    with pytest.raises(InvalidNameError, match="PVISOR_CACHE_MAX 'big'"):
        Config.resolve(environ={"PVISOR_CACHE_MAX": "big"})


def test_a_password_in_a_url_is_refused_and_not_shown() -> None:
    with pytest.raises(InvalidNameError) as caught:
        Config.resolve(server="https://user:secret@rack", environ={})
    assert "secret" not in str(caught.value) + caught.value.hint
