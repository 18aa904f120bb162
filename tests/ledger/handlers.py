"""Log handlers that a project might have."""

import logging
import threading


class BadFlush(logging.Handler):
    """Its flush does what it is told."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def emit(self, record: logging.LogRecord) -> None:
        """Keep nothing."""

    def flush(self) -> None:
        if self.how == "blocks":
            threading.Event().wait()
        raise OSError("no room") if self.how == "raises an OSError" else RuntimeError("out of order")
