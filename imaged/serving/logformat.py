"""How a server logs: text for people, or one JSON object a line for what collects logs."""

from __future__ import annotations

import json
import logging
import time

from imaged.loglines import LineFormatter
from imaged.serving.serveconfig import ServeOptions

_TEXT = "pvisor: %(levelname)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """`time` (UTC), `level`, `logger`, `process`, `message`, `error` with a traceback, and what a record has as
    `fields`: of a request its method, path, status, bytes, seconds and peer."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        document = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            document["error"] = self.formatException(record.exc_info)
        return json.dumps(document, default=str)


def configure(options: ServeOptions) -> None:
    """For this process: warnings and worse on stderr, a line for each request when that was asked for."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if options.log_format == "json" else LineFormatter(_TEXT))
    level = logging.INFO if options.log_requests else logging.WARNING
    logging.basicConfig(handlers=[handler], level=level, force=True)
