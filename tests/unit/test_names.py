"""Image names and sources: what they mean, and what is none."""

from __future__ import annotations

import pytest

from imaged.errors import InvalidNameError
from imaged.names import ImageName, SourceName

DIGEST = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("text", "location", "reference"),
    [
        ("docker://debian", "docker.io/library/debian", "latest"),
        ("docker://debian:12", "docker.io/library/debian", "12"),
        (f"docker://debian@{DIGEST}", "docker.io/library/debian", DIGEST),
        (f"docker://debian:12@{DIGEST}", "docker.io/library/debian", DIGEST),
        (f"docker://team/app@{DIGEST}", "docker.io/team/app", DIGEST),
        (f"docker://host.test/app@{DIGEST}", "host.test/app", DIGEST),
        (f"docker://host:5000/team/app:v1@{DIGEST}", "host:5000/team/app", DIGEST),
        (f"docker://localhost/app@sha512:{'0f' * 64}", "localhost/app", f"sha512:{'0f' * 64}"),
    ],
)
def test_registry_sources(text: str, location: str, reference: str) -> None:
    source = SourceName.parse(text)
    assert source == SourceName("docker", location, reference)
    assert SourceName.parse(str(source)) == source


@pytest.mark.parametrize(
    "text",
    [
        f"docker://127.0.0.1:18999/../../admin/shutdown?x=@{DIGEST}",
        f"docker://host.test/../app@{DIGEST}",
        f"docker://host.test/app?x=y@{DIGEST}",
        f"docker://host.test/app#@{DIGEST}",
        f"docker://host.test/app\r\nX: y@{DIGEST}",
        f"docker://user:word@host.test/app@{DIGEST}",
        f"docker://host.test/%2e%2e/app@{DIGEST}",
        f"docker://@{DIGEST}",
        "docker://host.test/app@",
        "docker://host.test/app@sha256:12",
        f"docker://host.test/app@sha256:{'A' * 64}",
        f"docker://host.test/app@sha256:{'a' * 64}/../../x",
        f"docker://host.test/app@{DIGEST}\n",
        f"docker://host.test/app@md5:{'a' * 32}",
        "docker://host.test/" + "a" * 500,
        f"docker://{'a' * 500}",
        f"docker://{'a' * 500}@{DIGEST}",
    ],
)
def test_what_is_no_registry_source(text: str) -> None:
    with pytest.raises(InvalidNameError):
        SourceName.parse(text)


@pytest.mark.parametrize("odd", ["\ud800", "\udcff", "\0"])
@pytest.mark.parametrize("prefix", ["docker://host.test/a", "oci:/a", "dir:/a", "docker-archive:/a:b", "x"])
def test_text_that_is_none(prefix: str, odd: str) -> None:
    with pytest.raises(InvalidNameError) as caught:
        SourceName.parse(prefix + odd)
    assert caught.value.message.encode()
    with pytest.raises(InvalidNameError) as caught:
        ImageName.parse(prefix.rpartition("/")[2] + odd)
    assert caught.value.message.encode()


def test_a_name_fits_into_the_store_with_its_tag() -> None:
    assert str(ImageName.parse("a" * 504)) == "a" * 504 + ":latest"
    with pytest.raises(InvalidNameError):
        ImageName.parse("a" * 505)
