"""The other queues on SQLite: each one's program, its settings, and how it is installed.

Each gets WAL, `synchronous=NORMAL`, connections that are kept open, and the worker settings that its documentation
offers for throughput (said in its module). Its waiting is left as it comes: how soon an idle worker looks again, and
what that costs, is the peer's own choice, and the tables show both.
"""

import re
import venv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.processes import Failed, Processes
from bench.runner import Contender, say

PEERS = {
    "huey": Contender("huey", "bench.peers.huey", settle=2.0),  # it is quiet, so it does not say that it has started
    "honker": Contender("honker", "bench.peers.honker", pace=0.1, settle=2.0),
    "django-tasks-db": Contender("django-tasks-db", "bench.peers.tasks_db", pace=0.04, started="Starting worker"),
    "django-q2": Contender("django-q2", "bench.peers.q2", pace=0.05, started=r"Q Cluster .* running"),
    "steady-queue": Contender("steady-queue", "bench.peers.steady", pace=0.03, settle=4.0),
}
INSTALL_TIMEOUT = 300.0


def install(folder: Path, names: Sequence[str], processes: Processes) -> tuple[list[Contender], dict[str, str]]:
    """Each into a virtual environment of its own: those that are there now, and why the others are not."""
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise SystemExit(f"there is no peer {', '.join(unknown)}; there are {', '.join(PEERS)}")
    installed, missing = [], {}
    for name in names or PEERS:
        say(f"installing {name} ...")
        try:
            installed.append(_install(folder / "peers" / name, PEERS[name], processes))
        except Exception as error:  # noqa: BLE001  whatever keeps it out, the run goes on without it
            missing[name] = _reason(str(error))
            say(f"  {name} cannot be installed on this machine and is left out: {missing[name]}")
    return installed, missing


def _install(home: Path, peer: Contender, processes: Processes) -> Contender:
    venv.create(home, with_pip=True, symlinks=True)
    python = str(home / "bin" / "python")
    log = home / "install.txt"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input", peer.name]
    if processes.start(pip, {}, log).popen.wait(INSTALL_TIMEOUT):
        raise Failed(log.read_text())
    show = [python, "-c", f"from importlib.metadata import version; print(version({peer.name!r}))"]
    if processes.start(show, {}, log).popen.wait(INSTALL_TIMEOUT):
        raise Failed(log.read_text())
    version = log.read_text().strip()
    say(f"  {peer.name} {version}")
    return replace(peer, python=python, version=version)


def _reason(output: str) -> str:
    """The first line of what was printed that tells of an error."""
    lines = [line.strip() for line in output.splitlines() if line.strip()] or ["no reason was given"]
    return next((line for line in lines if re.search(r"\berror: (?!subprocess)", line, re.IGNORECASE)), lines[-1])[:300]
