"""Settings of the benchmark's project: as the README recommends them, and Django's default logging.

The environment picks what a case is about: the folder of the database, what becomes of completed jobs, whether the
kernel's file events are to be had, and whether the library is installed at all.
"""

import os
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ["BENCH_FOLDER"])
"""Holds the databases, and nothing else: the kernel tells a worker of every write in it."""


def sqlite(name: str) -> dict[str, object]:
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": FOLDER / name,
        "OPTIONS": {
            "transaction_mode": "IMMEDIATE",
            "timeout": 20,
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
        },
    }


DATABASES = {"default": sqlite("bench.sqlite3"), "big": sqlite("big.sqlite3")}
"""`big` is for the cases that compare a full table with an empty one in one process."""

WITHOUT = os.environ.get("BENCH_WITHOUT") == "1"
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    *([] if WITHOUT else ["django_alkstore"]),
    "bench.project",
]

ALKSTORE: dict[str, Any] = {}
if os.environ.get("BENCH_KEEP") == "0":
    ALKSTORE["KEEP_COMPLETED"] = 0

if os.environ.get("BENCH_POLLING") == "1":
    import inotify_simple

    class NoEvents:
        """As the kernel answers where its limit of watches is reached."""

        def __init__(self, **options: object) -> None:
            raise OSError("the benchmark allows no file events")

    inotify_simple.INotify = NoEvents

SECRET_KEY = "only for the benchmarks"  # noqa: S105
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
ROOT_URLCONF = "bench.project.urls"
STATIC_URL = "static/"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
