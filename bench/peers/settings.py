"""Django settings for the peers that are Django apps. `BENCH_PEER` says which one it is."""

import os
from pathlib import Path

PEER = os.environ["BENCH_PEER"]

DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": Path(os.environ["BENCH_FOLDER"]) / "bench.sqlite3",
        # Kept open: a close that is the last one checkpoints, which would be the largest part of their work.
        "CONN_MAX_AGE": None,
        "OPTIONS": {
            "transaction_mode": "IMMEDIATE",
            "timeout": 20,
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
        },
    }
}
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", PEER]
SECRET_KEY = "only for the benchmarks"  # noqa: S105
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

if PEER == "django_tasks_db":
    TASKS = {"default": {"BACKEND": "django_tasks_db.DatabaseBackend"}}
elif PEER == "steady_queue":
    from steady_queue.configuration import Configuration

    TASKS = {"default": {"BACKEND": "steady_queue.backend.SteadyQueueBackend", "QUEUES": ["default"]}}
    STEADY_QUEUE = Configuration.Options(workers=[Configuration.Worker(queues=["default"], threads=4)])
elif PEER == "django_q":
    Q_CLUSTER = {
        "name": "bench",
        "orm": "default",
        "workers": 4,
        # Many at each look, and none of the results stored.
        "bulk": 50,
        "queue_limit": 500,
        "save_limit": -1,
        "recycle": 1_000_000,
        "timeout": 300,
        "retry": 600,
        "catch_up": False,
        "log_level": "INFO",
    }
