"""Entry point of the `pvisor` command; what it does is in `cli.group`."""

from __future__ import annotations

import sys


def main() -> None:
    """The `pvisor` command."""
    from cli import startup  # here, and it imports nothing more: while something is imported Ctrl-C shows a traceback

    startup.begin()
    from cli.group import run

    code = run(sys.argv[1:])
    startup.end(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
