"""The demo's account: "nothing lost" is said only where that was counted. And the demo itself, small."""

import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from testproject.account import Account, Received, Stored
from testproject.children import ROOT, Broken, Children
from testproject.receiver import Event

ORDERS = frozenset({"T-1", "T-2"})
STORED = Stored(
    orders=ORDERS,
    turnover=1_900,
    jobs=Counter({(outbox, reference): 1 for outbox in ("mail", "webhook") for reference in ORDERS}),
    unfinished=[],
    retries=Counter(webhook=1),
    invoices=Counter(ORDERS),
    checks=Counter(ORDERS),
    task_retries=1,
    fires=2,
    fires_done=1,
    reports=1,
    last_report=(2, 1_900),
)
RECEIVED = Received(accepted=Counter(ORDERS), events=Counter({Event.ACCEPTED: 2, Event.REPEAT: 1}), failures=1)
GOOD = Account({"T-1": 201, "T-2": 201, "T-7": 402}, STORED, Counter(ORDERS), RECEIVED)


def stored(**changes: Any) -> Account:
    return replace(GOOD, stored=replace(STORED, **changes))


def received(**changes: Any) -> Account:
    return replace(GOOD, received=replace(RECEIVED, **changes))


def test_where_all_is_well_there_is_no_fault() -> None:
    assert GOOD.faults() == []


@pytest.mark.parametrize(
    ("account", "said"),
    [
        (replace(GOOD, answers={**GOOD.answers, "T-3": 500}), "another answer than 201 or 402: T-3 500"),
        (replace(GOOD, answers={**GOOD.answers, "T-3": 0}), "another answer than 201 or 402: T-3 0"),
        (replace(GOOD, answers={**GOOD.answers, "T-3": 201}), "answered as placed but not in the database: T-3"),
        (replace(GOOD, answers={"T-1": 201, "T-2": 402}), "in the database but not answered as placed: T-2"),
        (replace(GOOD, mails=Counter(["T-1"])), "no mail for 1 orders: T-2"),
        (replace(GOOD, mails=Counter(["T-1", "T-1", "T-2"])), "more than one mail for 1 orders: T-1"),
        (replace(GOOD, mails=Counter([*ORDERS, "T-7"])), "a mail for 1 orders that do not exist: T-7"),
        (received(accepted=Counter(["T-1"])), "no webhook taken by the receiver for 1 orders: T-2"),
        (received(accepted=Counter(["T-1", "T-1", "T-2"])), "more than one webhook"),
        (
            received(accepted=Counter([*ORDERS, "T-7"])),
            "a webhook taken by the receiver for 1 orders that do not exist",
        ),
        (received(events=Counter({Event.FORGED: 1})), "1 webhooks had a wrong signature"),
        (stored(unfinished=["webhook T-1 dead"]), "1 jobs are not completed: webhook T-1 dead"),
        (stored(jobs=STORED.jobs - Counter([("mail", "T-1")])), "no mail job for 1 orders: T-1"),
        (stored(jobs=STORED.jobs + Counter([("webhook", "T-7")])), "a webhook job for 1 orders that do not exist: T-7"),
        (stored(invoices=Counter(["T-1"])), "no invoice for 1 orders: T-2"),
        (stored(checks=Counter([*ORDERS, "T-1"])), "more than one credit check for 1 orders: T-1"),
        (stored(fires=0, fires_done=0, reports=0), "the schedule never fired"),
        (stored(reports=2), "1 report jobs are completed, but there are 2 reports"),
        (stored(last_report=(1, 950)), "the last report says (1, 950), not (2, 1900)"),
        (stored(last_report=None), "the last report says None"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_thing_that_is_off_is_said(account: Account, said: str) -> None:
    assert any(said in fault for fault in account.faults()), account.faults()


def run_demo(
    folder: Path, *arguments: str, program: tuple[str, str] = ("-m", "testproject.demo")
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *program, "--folder", str(folder), "--clients", "3", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def test_the_demo_counts_what_it_did(tmp_path: Path) -> None:
    ended = run_demo(tmp_path, "--orders", "20")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stderr == ""
    counted = dict(re.findall(r"^ +(\w[\w ]*?) +(\d+)   ", ended.stdout, re.MULTILINE))
    assert counted["orders placed"] == counted["mails"] == counted["webhooks"] == "18"
    assert counted["orders declined"] == "2"
    assert counted["retries"] == counted["failures"]
    assert "Nothing lost, nothing sent for a declined order." in ended.stdout


def test_the_demo_fails_where_not_all_is_delivered_in_time(tmp_path: Path) -> None:
    never = "import sys; from testproject import demo; demo._all_is_done = lambda: False; sys.exit(demo.main())"
    ended = run_demo(tmp_path, "--orders", "3", "--timeout", "0", program=("-c", never))
    assert ended.returncode == 1
    assert "NOT AS IT SHOULD BE: not everything was done in time" in ended.stdout
    assert "Nothing lost" not in ended.stdout


def test_a_process_that_does_not_start_is_reported_and_none_is_left(tmp_path: Path) -> None:
    with Children() as children:
        stays = children.start(
            "other", ["-c", "import time; print('up', flush=True); time.sleep(600)"], tmp_path / "a", {}
        )
        assert stays.wait_for("(up)") == "up"
        broken = children.start("worker", ["-c", "raise SystemExit(3)"], tmp_path / "b", {})
        with pytest.raises(Broken, match=r"the worker ended by itself \(exit 3\)"):
            broken.wait_for("(never)")
    with pytest.raises(Broken, match=r"the other ended by itself \(by SIGTERM\)"):
        stays.check()
