"""Settings of the suite. The environment picks the journal and transaction modes that a run is for."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

_FOLDER = Path(tempfile.mkdtemp(prefix="alkstore-tests-"))
atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)
# Set by the suite for the processes that it starts, so that they work on its own test database.
_DATABASE = os.environ.get("ALKSTORE_TEST_DATABASE")
_JOURNAL = os.environ.get("ALKSTORE_TEST_JOURNAL", "wal")
_MODE = os.environ.get("ALKSTORE_TEST_TRANSACTION_MODE", "IMMEDIATE")


def sqlite(name: str, path: str | None = None) -> dict[str, object]:
    options: dict[str, object] = {
        "init_command": f"PRAGMA journal_mode={_JOURNAL}; PRAGMA synchronous=NORMAL;",
        "timeout": float(os.environ.get("ALKSTORE_TEST_TIMEOUT", "20")),
    }
    if _MODE:
        options["transaction_mode"] = _MODE
    return {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": path or _FOLDER / f"{name}.sqlite3",
        "OPTIONS": options,
        "TEST": {"NAME": _FOLDER / f"test-{name}.sqlite3"},
    }


SECRET_KEY = "only for the tests"
USE_TZ = True
TIME_ZONE = "Europe/Paris"
DATABASES = {"default": sqlite("default", _DATABASE), "other": sqlite("other")}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django_alkstore",
    "tests.ledger",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
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
ROOT_URLCONF = "tests.urls"
STATIC_URL = "static/"
