"""Settings of the processes of a torture run: all on one file, with short leases and a short patience.

The journal and transaction mode come from the same variables as in the suite's settings. ALKSTORE_TEST_LIVENESS=off
switches crash detection off.
"""

import os

_MODE = os.environ.get("ALKSTORE_TEST_TRANSACTION_MODE", "IMMEDIATE")
_JOURNAL = os.environ.get("ALKSTORE_TEST_JOURNAL", "wal")

LEASE = 2.0
"""Seconds: short, so that a short run sees many leases lapse."""
BUSY_TIMEOUT = 1.0
"""Seconds: short, so that holding the writer lock for longer costs the run little."""

SECRET_KEY = "only for the tests"
USE_TZ = True
TIME_ZONE = "Europe/Paris"
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ["ALKSTORE_TEST_DATABASE"],
        "OPTIONS": {
            "init_command": f"PRAGMA journal_mode={_JOURNAL}; PRAGMA synchronous=NORMAL;",
            "timeout": BUSY_TIMEOUT,
            **({"transaction_mode": _MODE} if _MODE else {}),
        },
    }
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = ["django_alkstore", "tests.torture"]
# What a run does on purpose: another transaction mode, another journal, a short busy timeout.
SILENCED_SYSTEM_CHECKS = ["alkstore.W001", "alkstore.W002", "alkstore.W004"]

_MANY = {"visibility_timeout": LEASE, "backoff_base": 0.1, "max_attempts": 40}
_FEW = {**_MANY, "max_attempts": 2}
QUEUES = ("plain", "async", "atomic", "own", "moody", "self-ack", "limited", "doomed", "beat", "beat-exact")
ALKSTORE = {
    "QUEUES": {queue: _FEW if queue == "doomed" else _MANY for queue in QUEUES},
    "MAX_BACKOFF": 1.0,
    "LIVENESS": os.environ.get("ALKSTORE_TEST_LIVENESS", "on") == "on",
    # Short, so that there is something to prune while the run lasts. The dead stay, for the account.
    "KEEP_COMPLETED": 4.0,
}
SCHEDULES = (
    ("each-second", "@every 1s", "beat"),
    ("each-second-exactly", "@every 1s", "beat-exact"),
    ("every-two-seconds", "@every 2s", "beat"),
)
"""Name, spec and queue."""
