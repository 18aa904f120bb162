"""Who gets the shop's webhooks: another party, with trouble of its own.

    python -m testproject.receiver --log receiver.jsonl

It checks each signature, ignores repeats by their idempotency key, and notes what came in, one JSON object a line.
Now and then it fails on a key's first delivery, as the seed decides: it refuses, or it takes the delivery and then
says that it failed, or says nothing at all. To the sender all three look alike, so it must send again, and that makes
the repeats that the key is for. The secret is read from SHOP_WEBHOOK_SECRET.
"""

import argparse
import json
import os
import random
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from enum import StrEnum
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import FrameType
from typing import Any

from testproject.signing import KEY_HEADER, SIGNATURE_HEADER, is_signed

MAX_BODY = 1_048_576
READ_TIMEOUT = 10.0
SILENCE = 0
"""In place of a status: the connection is closed without an answer."""


class Event(StrEnum):
    """What became of one delivery."""

    ACCEPTED = "accepted"  # new, and taken
    REPEAT = "repeat"  # taken before, and ignored
    REFUSED = "refused"  # not taken: trouble
    FORGED = "forged"  # not taken: the signature is wrong


class Ledger:
    """What came in, by idempotency key, and in the file. Read when it starts, so that it knows repeats afterwards."""

    def __init__(self, path: Path, seed: int) -> None:
        self._seed = seed
        self._lock = threading.Lock()
        self._deliveries: Counter[str] = Counter()
        self._taken: set[str] = set()
        if path.exists():
            for line in path.read_text().splitlines():
                self._remember(json.loads(line))
        self._file = path.open("a")

    def close(self) -> None:
        self._file.close()

    def deliver(self, key: str, body: bytes) -> int:
        """Note a signed delivery; the status to answer with."""
        with self._lock:
            event, status = self._judge(key)
            self._note(key, event, status, json.loads(body))
        return status

    def forged(self, key: str) -> int:
        with self._lock:
            self._note(key, Event.FORGED, HTTPStatus.UNAUTHORIZED, {})
        return HTTPStatus.UNAUTHORIZED

    def _judge(self, key: str) -> tuple[Event, int]:
        if key in self._taken:
            return Event.REPEAT, HTTPStatus.OK
        if self._deliveries[key]:  # refused before: the second time all is well
            return Event.ACCEPTED, HTTPStatus.OK
        return self._first(key)

    def _first(self, key: str) -> tuple[Event, int]:
        """By the seed and the key alone, so that no order of arrival changes it."""
        fate = random.Random(f"{self._seed}:{key}").random()
        if fate < 0.10:
            return Event.REFUSED, HTTPStatus.SERVICE_UNAVAILABLE
        if fate < 0.15:
            return Event.ACCEPTED, HTTPStatus.INTERNAL_SERVER_ERROR
        if fate < 0.20:
            return Event.ACCEPTED, SILENCE
        return Event.ACCEPTED, HTTPStatus.OK

    def _note(self, key: str, event: Event, status: int, payload: dict[str, Any]) -> None:
        """In the file before the sender gets its answer: what it was told has always been written down."""
        at = datetime.now(UTC).isoformat()
        entry = {"at": at, "key": key, "order": payload.get("order"), "event": event, "answer": int(status)}
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()
        self._remember(entry)

    def _remember(self, entry: dict[str, Any]) -> None:
        if entry["event"] == Event.FORGED:
            return
        self._deliveries[entry["key"]] += 1
        if entry["event"] == Event.ACCEPTED:
            self._taken.add(entry["key"])


class Handler(BaseHTTPRequestHandler):
    server: "Receiver"
    timeout = READ_TIMEOUT

    def do_POST(self) -> None:
        key = self.headers.get(KEY_HEADER, "")
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdigit() or int(length) > MAX_BODY:
            self._answer(HTTPStatus.BAD_REQUEST)
            return
        body = self.rfile.read(int(length))
        signature = self.headers.get(SIGNATURE_HEADER, "")
        if is_signed(self.server.secret, key, body, signature):
            self._answer(self.server.ledger.deliver(key, body))
        else:
            self._answer(self.server.ledger.forged(key))

    def _answer(self, status: int) -> None:
        self.close_connection = True
        if status == SILENCE:
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class's name
        """The ledger's file is the log."""


class Receiver(ThreadingHTTPServer):
    """The receiver, on a port of 127.0.0.1 alone."""

    def __init__(self, port: int, secret: str, ledger: Ledger) -> None:
        self.secret = secret
        self.ledger = ledger
        super().__init__(("127.0.0.1", port), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(0)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="testproject.receiver", description="Receives the shop's webhooks.")
    parser.add_argument("--log", type=Path, required=True, help="The file to note deliveries in.")
    parser.add_argument("--port", type=int, default=0, help="Default: a free one.")
    parser.add_argument("--seed", type=int, default=1, help="Which first deliveries fail. Default: 1.")
    options = parser.parse_args(arguments)
    secret = os.environ.get("SHOP_WEBHOOK_SECRET")
    if not secret:
        parser.error("SHOP_WEBHOOK_SECRET is not set")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    with Receiver(options.port, secret, Ledger(options.log, options.seed)) as receiver:
        print(f"receiving at {receiver.url}", flush=True)
        receiver.serve_forever()


if __name__ == "__main__":
    main()
