"""A log formatter that splits messages of several lines into records."""

from __future__ import annotations

import copy
import logging


class LineFormatter(logging.Formatter):
    """Formats each line of a message as a record."""

    def format(self, record: logging.LogRecord) -> str:
        """Format each line of a message as a separate record; a traceback follows the last one unchanged."""
        *lines, last = record.getMessage().splitlines() or [""]
        records = []
        for line in lines:
            own = copy.copy(record)
            own.msg, own.args, own.exc_info, own.exc_text, own.stack_info = line, None, None, None, None
            records.append(super().format(own))
        own = copy.copy(record)
        own.msg, own.args = last, None
        return "\n".join([*records, super().format(own)])
