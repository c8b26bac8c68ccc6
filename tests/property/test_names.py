"""Names and sources come back from their own text, whatever they were made of."""

from __future__ import annotations

import contextlib

from hypothesis import given
from hypothesis import strategies as st

from imaged.errors import InvalidNameError
from imaged.names import TRANSPORTS, ImageName, SourceName

words = st.text("ab0.-_", min_size=1, max_size=4)
hosts = st.builds("{}{}".format, words, st.sampled_from(["", ":5000", ".test", "@", ":"]))
tags = st.one_of(st.just(""), words.map(":{}".format))
digests = st.sampled_from(["", "@", "@sha256:" + "a" * 64, "@sha512:" + "0" * 128, "@sha256:12", "@" + "f" * 64])
names = st.builds(
    "{}{}{}".format, st.lists(st.one_of(words, hosts), min_size=1, max_size=4).map("/".join), tags, digests
)
texts = st.one_of(names, st.integers(480, 520).map(lambda length: "a" * length), st.text(max_size=12))
separators = st.sampled_from([":", "://", ":/", ""])


@given(texts)
def test_image_names(text: str) -> None:
    with contextlib.suppress(InvalidNameError):
        name = ImageName.parse(text)
        assert ImageName.parse(str(name)) == name


@given(st.sampled_from(TRANSPORTS), separators, texts)
def test_sources(transport: str, separator: str, text: str) -> None:
    with contextlib.suppress(InvalidNameError):
        source = SourceName.parse(f"{transport}{separator}{text}")
        assert SourceName.parse(str(source)) == source


@given(names)
def test_registry_sources(text: str) -> None:
    """Also: neither host nor repository can hold what would change the request that is made of them."""
    with contextlib.suppress(InvalidNameError):
        source = SourceName.parse(f"docker://{text}")
        assert SourceName.parse(str(source)) == source
        parts = source.location.split("/")
        assert len(parts) >= 2
        assert not {"", ".", ".."} & set(parts)
        assert SourceName.parse(f"docker://{source.default_name}").location == source.location


@given(st.sampled_from(TRANSPORTS), st.text(st.characters(codec=None), max_size=6))
def test_any_text_is_a_source_or_refused(transport: str, text: str) -> None:
    with contextlib.suppress(InvalidNameError):
        assert str(SourceName.parse(f"{transport}:{text}")).encode()
