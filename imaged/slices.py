"""Many items, some at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

T = TypeVar("T")


def slices(items: Iterable[T], count: int) -> Iterator[list[T]]:
    """Lists of so many; the last one has what is left."""
    iterator = iter(items)
    while some := list(islice(iterator, count)):
        yield some
