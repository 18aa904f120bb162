"""What the commands share: the arguments, and turning an outcome into an exit code."""

import argparse
import atexit
import errno
import logging
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import DatabaseError, NotSupportedError, connections

from django_alkstore import registry, signals
from django_alkstore.dialects import dialect_of
from django_alkstore.dialects.transactions import is_contention, resolve_alias
from django_alkstore.models import Job
from django_alkstore.runtime.commands import NotRegistered, WorkerOptions, refuse_in_memory
from django_alkstore.runtime.log_handler import show_log
from django_alkstore.runtime.stop_signals import StoppedAtStart, StopSignals
from django_alkstore.services.error_backoff import ErrorBackoff

if sys.platform != "win32":
    import resource  # here, since at the limit for open files nothing can be imported any more

EXIT_USAGE = 2
MOST_CONCURRENCY = 1_000
"""Sync handlers at once. Each has a thread and, if it uses the database, a connection with its file descriptors."""
LONGEST_LOOK = 0.5
"""Seconds that a command which is starting waits for another process inside SQLite."""
EXIT_PIPE_CLOSED = 128 + 13
"""What a shell reports of a tool that ended by SIGPIPE."""


def positive_int(text: str) -> int:
    # The digits that `int` takes are more than people mean: " 4", "4_0", "٤".
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def concurrency(text: str) -> int:
    number = positive_int(text)
    if number > MOST_CONCURRENCY:
        raise argparse.ArgumentTypeError(f"{text!r} is more than {MOST_CONCURRENCY}: start several workers instead")
    return number


def duration(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds of at least 0")
    return number


def _write_obstacle(alias: str) -> str | None:
    connection = connections[alias]
    return dialect_of(connection).write_obstacle(connection)


def _with_obstacle(alias: str, error: DatabaseError) -> str:
    """The error, and which files this user may not write."""
    obstacle = _write_obstacle(alias)
    return f"{error}; {obstacle}" if obstacle else str(error)


def _unreadable(alias: str, error: DatabaseError) -> CommandError:
    # If this user cannot write the files, `migrate` cannot help, and would only lead away from the cause.
    hint = "" if _write_obstacle(alias) else f". If they do not exist yet: manage.py migrate --database {alias}"
    return CommandError(f"the tables on the database {alias!r} cannot be read ({_with_obstacle(alias, error)}){hint}")


def _refused(alias: str, error: DatabaseError) -> CommandError:
    if is_contention(alias, error):
        why = f"was busy with another's work for the whole busy timeout ({error}); try again"
    else:
        why = f"cannot be used ({_with_obstacle(alias, error)})"
    return CommandError(f"the database {alias!r} {why}")


def _too_many_open_files() -> str:
    limit = f" of {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}" if sys.platform != "win32" else ""
    return (
        f"this process has reached its limit{limit} for open files. Raise the limit (ulimit -n; LimitNOFILE= for "
        "systemd), or give a worker a lower --concurrency; --traceback shows where it was reached"
    )


class AlkstoreCommand(BaseCommand):
    """A command on one database."""

    requires_system_checks = ["alkstore"]

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--database", help="Database alias. Default: ALKSTORE['DATABASE'], else the routers' choice."
        )

    def get_check_kwargs(self, options: Any) -> Any:
        """Let the checks connect to the database that the command works on."""
        return {**super().get_check_kwargs(options), "databases": self._databases(options)}

    def _databases(self, options: dict[str, Any]) -> list[str]:
        try:
            alias = options["database"] or resolve_alias(None)
        except ImproperlyConfigured:
            return []  # a check says so
        return [alias] if alias in connections else []

    def handle(self, *args: Any, **options: Any) -> str | None:
        alias = options["database"] or resolve_alias(None)
        if alias not in connections:
            known = ", ".join(map(repr, connections))
            raise CommandError(f"DATABASES has no {alias!r}; it has {known}", returncode=EXIT_USAGE)
        self.prepare(alias)
        try:
            return self.work(alias, options)
        except DatabaseError as error:
            raise _refused(alias, error) from error

    def prepare(self, alias: str) -> None:
        """Make sure that the database can be used."""
        try:
            self.precheck(alias)
            self.see_tables(alias)
        except NotSupportedError as error:
            raise CommandError(str(error)) from error
        except DatabaseError as error:
            if not is_contention(alias, error):
                raise _unreadable(alias, error) from error
            self.wait_for_tables(alias, error)

    def see_tables(self, alias: str) -> None:
        Job.objects.using(alias).exists()

    def wait_for_tables(self, alias: str, error: DatabaseError) -> None:
        """Another process locks everybody out: say so, and end."""
        raise _refused(alias, error) from error

    def precheck(self, alias: str) -> None:
        """Refuse a database that the command cannot work on, before it is asked anything."""

    def work(self, alias: str, options: dict[str, Any]) -> str | None:
        raise NotImplementedError


@contextmanager
def _impatient_connection(alias: str) -> Iterator[None]:
    """Inside the block this thread uses a connection of its own that waits for no lock for long.

    Python runs no signal handler while the thread is inside SQLite.
    """
    before = connections[alias]
    own = connections[alias] = connections.create_connection(alias)
    own.settings_dict = {**own.settings_dict, "OPTIONS": {**own.settings_dict["OPTIONS"], "timeout": LONGEST_LOOK}}
    try:
        yield
    finally:
        connections[alias] = before
        own.close()


class ReportCommand(AlkstoreCommand):
    """A command that prints what it found, and ends."""

    def run_from_argv(self, argv: list[str]) -> None:
        try:
            try:
                super().run_from_argv(argv)
            finally:
                self.stdout.flush()
        except BrokenPipeError:
            # The reader, `head` for example, has read enough. Python would try to flush once more at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise SystemExit(EXIT_PIPE_CLOSED) from None


class _StandardError:
    """Standard error as a run command uses it: a message that cannot be written is lost, and the command goes on."""

    def write(self, text: str) -> None:
        # It may be closed (`ValueError`), missing (`AttributeError`) or full.
        with suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)


def finish_output() -> None:
    """Flush logs, standard output and standard error for 2 s at most, as the last thing before Python ends by itself.

    Python would flush them again, which would end the process with status 120 or never. So what could not be flushed
    is left out.
    """
    failed = signals.flush()
    if any(isinstance(one, logging.Handler) for one in failed):
        atexit.unregister(logging.shutdown)
    for name in ("stdout", "stderr"):
        if any(one is getattr(sys, name) for one in failed):
            nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  it stays open until the process ends
            setattr(sys, name, nowhere)
            setattr(sys, f"__{name}__", nowhere)


class RunCommand(AlkstoreCommand):
    """A command that runs until it is stopped, and says what it does through the log."""

    def __init__(self, stdout: Any = None, stderr: Any = None, **options: Any) -> None:
        super().__init__(stdout, stderr or cast("TextIO", _StandardError()), **options)
        self.stop_signals = StopSignals()

    def run_from_argv(self, argv: list[str]) -> None:
        try:
            super().run_from_argv(argv)
        finally:
            finish_output()

    def precheck(self, alias: str) -> None:
        try:
            refuse_in_memory(alias)
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from error

    def wait_for_tables(self, alias: str, error: DatabaseError) -> None:
        """Go on: a busy database is no reason to end for what is meant to run for ever."""
        error_backoff = ErrorBackoff("starting", alias)
        while True:
            self.stop_signals.sleep(error_backoff.after(error))
            try:
                self.see_tables(alias)
            except DatabaseError as again:
                error = again
            else:
                error_backoff.reset()
                return

    def handle(self, *args: Any, **options: Any) -> str | None:
        show_log(options["verbosity"])
        with self.stop_signals.received():
            try:
                return super().handle(*args, **options)
            except StoppedAtStart as stopped:
                signals.logger.info("stopped while starting (%s)", stopped)
                return None
            except OSError as error:
                if error.errno != errno.EMFILE:
                    raise
                raise CommandError(_too_many_open_files()) from error

    def see_tables(self, alias: str) -> None:
        with _impatient_connection(alias):
            super().see_tables(alias)

    def work(self, alias: str, options: dict[str, Any]) -> str | None:
        # The scheduler has a thread and a connection of its own. This one would keep files open that may need repair.
        if not connections[alias].in_atomic_block:
            connections[alias].close()
        try:
            code = self.run(alias, options)
        except NotRegistered as error:
            raise CommandError(str(error), returncode=EXIT_USAGE) from error
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from error
        if code:
            raise SystemExit(code)
        return None

    def run(self, alias: str, options: dict[str, Any]) -> int:
        """Run; the exit code."""
        raise NotImplementedError


class WorkerCommand(RunCommand):
    """A command that runs handlers."""

    def add_arguments(self, parser: CommandParser) -> None:
        super().add_arguments(parser)
        parser.add_argument(
            "--concurrency", type=concurrency, default=4, metavar="N", help="Sync handlers at once. Default: 4."
        )
        parser.add_argument(
            "--async-concurrency", type=positive_int, default=100, metavar="N", help="Coroutines at once. Default: 100."
        )
        parser.add_argument(
            "--grace",
            type=duration,
            default=30.0,
            metavar="SECONDS",
            help="How long running handlers may take after SIGTERM. Default: 30.",
        )
        parser.add_argument(
            "--tolerant",
            action="store_true",
            help="If an alkstore module cannot be imported, run the handlers of the others. Default: status 2.",
        )

    def prepare(self, alias: str) -> None:
        super().prepare(alias)
        with self.stop_signals.may_interrupt():
            registry.autodiscover()

    def worker_options(self, options: dict[str, Any]) -> WorkerOptions:
        return {
            "concurrency": options["concurrency"],
            "async_concurrency": options["async_concurrency"],
            "grace": options["grace"],
        }

    def work(self, alias: str, options: dict[str, Any]) -> str | None:
        broken = registry.broken_modules()
        if broken and not options["tolerant"]:
            modules = ", ".join(one.module for one in broken)
            raise CommandError(
                f"cannot be imported: {modules}; the log has the traceback. "
                "To run the handlers of the other modules all the same, add --tolerant",
                returncode=EXIT_USAGE,
            )
        return super().work(alias, options)
