"""A log formatter for messages of several lines."""

from __future__ import annotations

import copy
import logging


class LineFormatter(logging.Formatter):
    """Formats each line of a message as a record; a traceback follows the last."""

    def format(self, record: logging.LogRecord) -> str:
        *lines, last = record.getMessage().splitlines() or [""]
        records = []
        for line in lines:
            copied = copy.copy(record)
            copied.msg, copied.args, copied.exc_info, copied.exc_text, copied.stack_info = line, None, None, None, None
            records.append(super().format(copied))
        copied = copy.copy(record)
        copied.msg, copied.args = last, None
        return "\n".join([*records, super().format(copied)])
