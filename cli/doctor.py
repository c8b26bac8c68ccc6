"""`pvisor doctor`."""

from __future__ import annotations

import click

from cli.common import Settings, command_options


@click.command(short_help="Check what this host can do.")
@command_options
def doctor(settings: Settings) -> int:
    """Check this host: root, FUSE, EROFS, overlayfs, directories, server. Exit code 1 when something is missing.

    \b
    Examples:
      pvisor doctor
      pvisor doctor --server http://store:7878
    """
    from fuse.doctor import examine

    checks = examine(settings.config)

    def text() -> str:
        lines = []
        for check in checks:
            lines.append(f"{'ok  ' if check.ok else 'FAIL'}  {check.name}: {check.detail}")
            if check.hint and not check.ok:
                lines.append(f"      hint: {check.hint}")
        return "\n".join(lines)

    failed = [check for check in checks if not check.ok]
    settings.emit(
        {
            "ok": not failed,
            "checks": [
                {"name": c.name, "ok": c.ok, "detail": c.detail, "hint": "" if c.ok else c.hint} for c in checks
            ],
        },
        text,
    )
    return 1 if failed else 0
