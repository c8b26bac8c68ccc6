"""The first and the last moments of a command: quick, and without a traceback when Ctrl-C comes.

The exception that Ctrl-C raises is for a command that has something to put in order. In the middle of an import it is
printed by whatever happens to run, and sometimes lost; so then it ends the process on the spot.
"""

from __future__ import annotations

import gc
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from types import FrameType, ModuleType
else:
    import _signal as signal  # `signal` brings `enum` and more, and until `begin` Ctrl-C shows a traceback

    ModuleType = type(sys)

INTERRUPTED = 130


class _Later(ModuleType):
    """A module that others import at once and few use: it is itself imported when something in it is looked up."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):  # the import system looks
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        module = __import__(self.__name__)
        self.__dict__.update(module.__dict__)
        return getattr(module, name)


class _LaterInspect(_Later):
    """`inspect`, which click and dataclasses import with all that reads source code: a tenth of a start.

    `cleandoc` is what click asks for each option's help. Whoever looks up anything else gets the module itself.
    """

    def cleandoc(self, doc: str) -> str:
        if "\n" not in doc and "\t" not in doc:
            return doc.lstrip()
        cleandoc = self.__getattr__("cleandoc")
        assert callable(cleandoc)
        return str(cleandoc(doc))


class _LaterPlatform(_Later):
    """`platform`, which `uuid` asks for the system when click imports it."""

    def system(self) -> str:
        return os.uname().sysname


class _Exit:
    """A signal handler that ends the process."""

    def __init__(self, code: int) -> None:
        self._code = code

    def __call__(self, _number: int, _frame: FrameType | None) -> None:
        os._exit(self._code)


def begin() -> None:
    """Before anything else is imported."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else the caller wants it ignored
        signal.signal(signal.SIGINT, _Exit(INTERRUPTED))
    _plug_standard_streams()
    gc.disable()  # imports make no garbage, but enough objects to look for it a hundred times
    sys.modules.setdefault("inspect", _LaterInspect("inspect"))
    sys.modules.setdefault("platform", _LaterPlatform("platform"))
    sys.modules.setdefault("ipaddress", _Later("ipaddress"))  # of urllib.parse, which pathlib imports


def done() -> None:
    """The command begins: all that is alive now stays so, and Ctrl-C is an exception again."""
    gc.freeze()
    gc.enable()
    if isinstance(signal.getsignal(signal.SIGINT), _Exit):
        signal.signal(signal.SIGINT, signal.default_int_handler)


def end(code: int) -> None:
    """The command has put everything in order."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _Exit(code))


def _plug_standard_streams() -> None:
    """A stream that the caller closed becomes /dev/null: nothing opened later may take its number."""
    for number, stream in enumerate((sys.stdin, sys.stdout, sys.stderr)):
        if stream is None:
            plug = os.open(os.devnull, os.O_RDWR)
            if plug != number:
                os.dup2(plug, number)
    if sys.stdout and sys.stderr:
        return
    import io

    sys.stdout = sys.stdout or io.TextIOWrapper(io.FileIO(1, "w", closefd=False))
    sys.stderr = sys.stderr or io.TextIOWrapper(io.FileIO(2, "w", closefd=False))
