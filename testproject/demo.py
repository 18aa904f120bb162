"""The shop at work, with everything real: `make demo`, or `python -m testproject.demo`.

It starts the web server, the webhook's receiver and `manage.py run_alkstore`, places orders over HTTP from a few
clients at once, waits until everything is delivered, and tells what it counted (`testproject.account`). The exit
status is 0 only where nothing was lost and nothing was sent for a declined order.
"""

import argparse
import fcntl
import http.client
import json
import os
import random
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import django
from django.core.management import call_command

from testproject.children import ROOT, Broken, Child, Children
from testproject.shop.catalogue import CATALOGUE

if TYPE_CHECKING:
    from testproject.account import Account

REQUEST_TIMEOUT = 30.0
LOOK_EVERY = 0.2
PORT_OF_RUNSERVER = r"server at (http://127\.0\.0\.1:\d+/)"


class Stopped(BaseException):
    """A signal asked the demo to end. Like KeyboardInterrupt, not for `except Exception` to catch."""


def say(text: str = "") -> None:
    print(text, flush=True)


class Demo:
    """One run, in one folder."""

    def __init__(self, folder: Path, children: Children) -> None:
        self._children = children
        self.folder = folder
        self.logs = folder / "log"
        self.mails = folder / "mail"
        self.received = folder / "receiver.jsonl"
        self.url = ""

    def prepare(self) -> None:
        """An empty folder and a new database. Removes only what a demo has put there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in (self.logs, self.mails):
            shutil.rmtree(path, ignore_errors=True)
        for path in (self.received, *self.folder.glob("shop.sqlite3*")):
            path.unlink(missing_ok=True)
        self.logs.mkdir()
        os.environ["DJANGO_SETTINGS_MODULE"] = "testproject.settings"
        os.environ["SHOP_FOLDER"] = str(self.folder)
        os.environ["SHOP_WEBHOOK_SECRET"] = secrets.token_hex()
        # A proxy of the surroundings is not for what stays on this machine.
        os.environ["no_proxy"] = "127.0.0.1"
        django.setup()
        call_command("migrate", verbosity=0)
        call_command("declare_schedules", verbosity=0)

    def start(self) -> None:
        """The receiver first, since the others must know where it is. Each one takes a free port."""
        receiver = self._start("receiver", "-m", "testproject.receiver", "--log", str(self.received))
        os.environ["SHOP_WEBHOOK_URL"] = receiver.wait_for(r"receiving at (\S+)")
        web = self._start("web server", "manage.py", "runserver", "--noreload", "127.0.0.1:0")
        worker = self._start("worker", "manage.py", "run_alkstore")
        self.url = web.wait_for(PORT_OF_RUNSERVER)
        worker.wait_for("(worker started)")

    def _start(self, name: str, *arguments: str) -> Child:
        return self._children.start(name, arguments, self.logs / f"{name.replace(' ', '-')}.log", {})

    def place_orders(self, orders: int, clients: int) -> dict[str, int]:
        """The shop's answer to each, by reference."""
        bodies = list(_orders(orders))
        pool = ThreadPoolExecutor(clients)
        try:
            answers = pool.map(self._place, bodies)
            return {body["reference"]: status for body, status in zip(bodies, answers, strict=True)}
        finally:
            pool.shutdown(cancel_futures=True)

    def _place(self, body: Mapping[str, Any]) -> int:
        """The status of the answer, or 0 where there was none."""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=REQUEST_TIMEOUT)
        try:
            connection.request("POST", "/api/orders/", json.dumps(body), {"Content-Type": "application/json"})
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()

    def wait(self, timeout: float) -> bool:
        """Until the database says that all is done, and a report counts all orders; `False` past the timeout."""
        deadline = time.monotonic() + timeout
        while not _all_is_done():
            self._children.check()
            if time.monotonic() > deadline:
                return False
            time.sleep(LOOK_EVERY)
        return True

    def count(self, answers: Mapping[str, int]) -> "Account":
        from testproject.account import count  # noqa: PLC0415  models can be imported only now

        return count(answers, self.mails, self.received)


def _orders(number: int) -> Iterator[dict[str, Any]]:
    chance = random.Random(1)
    for place in range(1, number + 1):
        lines = {article: chance.randint(1, 4) for article in chance.sample(list(CATALOGUE), chance.randint(1, 3))}
        yield {"reference": f"D-{place:04}", "email": f"customer{place}@example.com", "lines": lines}


def _all_is_done() -> bool:
    from django_alkstore.models import Job  # noqa: PLC0415  models can be imported only now
    from testproject.shop.models import Order, SalesReport  # noqa: PLC0415

    # Reports are left out: the next one may be due at any moment.
    if Job.objects.live().exclude(queue="reports").exists():
        return False
    report = SalesReport.objects.last()
    return report is not None and report.orders == Order.objects.count()


def tell(account: "Account") -> None:
    """The numbers, each with where it was counted."""
    from testproject.receiver import Event  # noqa: PLC0415  beside the rest of the account

    stored, received = account.stored, account.received
    rows = [
        ("orders placed", len(stored.orders), "in the database"),
        ("orders declined", len(account.declined), "by the shop's answers"),
        ("mails", account.mails.total(), f"in the mail folder, for {len(account.mails)} orders"),
        ("webhooks", received.accepted.total(), f"taken by the receiver, for {len(received.accepted)} orders"),
        ("  repeats", received.events[Event.REPEAT], "ignored by the receiver, by their idempotency key"),
        ("  failures", received.failures, "of the receiver: refused, or taken and not confirmed"),
        ("retries", stored.retries.total(), "failed attempts, kept on their jobs"),
        ("invoices", stored.invoices.total(), f"results of a task, after {stored.task_retries} retries"),
        ("credit checks", stored.checks.total(), "results of a coroutine"),
        ("schedule fires", stored.fires, "jobs of the schedule, one every 10 s"),
        ("reports", stored.reports, f"in the database; the last: {_report(stored.last_report)}"),
    ]
    say()
    for name, number, where in rows:
        say(f"  {name:<16}{number:>6}   {where}")
    say()


def _report(totals: tuple[int, int] | None) -> str:
    return f"{totals[0]} orders, turnover {totals[1] / 100:,.2f}" if totals else "none"


def judge(account: "Account", *, in_time: bool) -> int:
    """Say whether all is well; the exit status."""
    faults = account.faults()
    if not in_time:
        faults.insert(0, "not everything was done in time")
    for fault in faults:
        say(f"NOT AS IT SHOULD BE: {fault}")
    if not faults:
        say("Nothing lost, nothing sent for a declined order.")
    return 1 if faults else 0


def serve(demo: Demo, children: Children) -> None:
    """Stay up, with an admin who can log in, until a signal comes."""
    from django.contrib.auth.models import User  # noqa: PLC0415  models can be imported only now

    password = secrets.token_urlsafe(9)
    User.objects.create_superuser("demo", password=password)
    say()
    say(f"The shop stays up, the worker too. Ctrl-C ends them.\n\n  shop     {demo.url}")
    say(f"  admin    {demo.url}admin/   user demo, password {password}")
    say(f"  mails    {demo.mails}\n  logs     {demo.logs}")
    try:
        while True:
            children.check()
            time.sleep(LOOK_EVERY)
    except Stopped:
        ended = children.end()
        say("\nEnded: " + ", ".join(f"{name} {how}" for name, how in ended.items()) + ".")


@contextmanager
def _step(text: str) -> Iterator[None]:
    print(f"  {text:<50}", end="", flush=True)
    started = time.monotonic()
    done = False
    try:
        yield
        done = True
    finally:
        say(f"{time.monotonic() - started:>6.1f} s" if done else "")


def run(options: argparse.Namespace, children: Children) -> int:
    demo = Demo(options.folder, children)
    say("A small shop: one SQLite file holds its orders and the work that they cause.\n")
    with _step("migrating a new database"):
        demo.prepare()
    with _step("starting web server, receiver and run_alkstore"):
        demo.start()
    with _step(f"placing {options.orders} orders from {options.clients} clients at once"):
        answers = demo.place_orders(options.orders, options.clients)
    with _step("waiting for deliveries, and a report of all orders"):
        in_time = demo.wait(options.timeout)
    account = demo.count(answers)
    tell(account)
    status = judge(account, in_time=in_time)
    if options.serve:
        serve(demo, children)
    return status


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """A second demo in the same folder would take away the first one's files."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "demo.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"A demo is running in {folder} already. End it first, or give another --folder.")
        yield


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped(signal.Signals(number).name)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="testproject.demo", description="The shop at work, and what came of it.")
    parser.add_argument("--orders", type=int, default=200, metavar="N", help="Default: 200.")
    parser.add_argument("--clients", type=int, default=6, metavar="N", help="Who order at once. Default: 6.")
    parser.add_argument("--folder", type=Path, default=ROOT / "var" / "demo", help="Default: var/demo.")
    parser.add_argument("--timeout", type=float, default=80.0, metavar="SECONDS", help="For deliveries. Default: 80.")
    parser.add_argument("--serve", action="store_true", help="Stay up afterwards, until Ctrl-C.")
    options = parser.parse_args(arguments)
    options.folder = options.folder.resolve()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    try:
        with _alone(options.folder), Children() as children:
            return run(options, children)
    except Broken as error:
        say(f"The demo failed: {error}.")
        return 1
    except Stopped as stopped:
        say(f"Ended by {stopped} before it was done.")
        return 1


if __name__ == "__main__":
    sys.exit(main())
