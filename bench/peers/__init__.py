"""The other queues on SQLite: each one's program, its settings, and how it is installed.

Each gets WAL, `synchronous=NORMAL`, connections that are kept open, and the worker settings that its documentation
offers for throughput (said in its module). Its waiting is left as it comes: how soon an idle worker looks again, and
what that costs, is the peer's own choice, and the tables show both.
"""

import venv
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from bench.processes import Failed, Processes
from bench.runner import Contender, complain, say

PEERS = {
    "huey": Contender("huey", "bench.peers.huey", started="Huey consumer started"),
    "honker": Contender("honker", "bench.peers.honker", pace=0.1, settle=2.0),
    "django-tasks-db": Contender("django-tasks-db", "bench.peers.tasks_db", pace=0.04, started="Starting worker"),
    "django-q2": Contender("django-q2", "bench.peers.q2", pace=0.05, started=r"Q Cluster .* running"),
    "steady-queue": Contender("steady-queue", "bench.peers.steady", pace=0.03, settle=4.0),
}
INSTALL_TIMEOUT = 300.0


def install(folder: Path, names: Sequence[str], processes: Processes) -> list[Contender]:
    """Each into a virtual environment of its own. One that cannot be installed here is left out, and said so."""
    unknown = [name for name in names if name not in PEERS]
    if unknown:
        raise SystemExit(f"there is no peer {', '.join(unknown)}; there are {', '.join(PEERS)}")
    installed = []
    for name in names or PEERS:
        say(f"installing {name} ...")
        home = folder / "peers" / name
        try:
            venv.create(home, with_pip=True, symlinks=True)
            python = str(home / "bin" / "python")
            command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input", name]
            log = folder / "peers" / f"{name}.txt"
            code = processes.start(command, {}, log).popen.wait(INSTALL_TIMEOUT)
            if code:
                raise Failed(log.read_text())
            version = [python, "-c", f"from importlib.metadata import version; print(version({name!r}))"]
            processes.start(version, {}, log).popen.wait()
        except Exception as error:  # noqa: BLE001  whatever keeps it out, the run goes on without it
            complain(f"{name} cannot be installed on this machine and is left out", error)
            continue
        say(f"  {name} {log.read_text().strip()}")
        installed.append(replace(PEERS[name], python=python))
    return installed
