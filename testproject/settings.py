"""Settings of the shop. The parts that django-alkstore is about: DATABASES, INSTALLED_APPS, and SHOP_* below."""

import os
from pathlib import Path

import django

BASE_DIR = Path(__file__).resolve().parent.parent

# Everything that the shop writes is in here. SQLite makes the file, but not the folder that it is in.
FOLDER = Path(os.environ.get("SHOP_FOLDER", BASE_DIR / "var"))
FOLDER.mkdir(parents=True, exist_ok=True)

DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": FOLDER / "shop.sqlite3",
        "OPTIONS": {
            # A transaction takes the writer lock when it begins, and waits for it by the timeout below. With
            # SQLite's own DEFERRED, a transaction that has read is refused at its first write, without any wait,
            # whenever another has written in between ("database is locked").
            "transaction_mode": "IMMEDIATE",
            # Seconds that a writer waits for its turn. The default, 5, is short for a busy moment.
            "timeout": 20,
            # WAL: readers and the writer do not wait for each other. NORMAL: one sync less at each commit; with
            # WAL the file stays whole all the same, and only a power cut can cost the last commits.
            "init_command": "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL;",
        },
    }
}

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "django_alkstore",
    "testproject.shop",
]

# What the webhook goes to, and the secret that it is signed with. The demo puts its receiver's in the environment.
SHOP_WEBHOOK_URL = os.environ.get("SHOP_WEBHOOK_URL", "http://127.0.0.1:8001/")
SHOP_WEBHOOK_SECRET = os.environ.get("SHOP_WEBHOOK_SECRET", "a demo secret")
SHOP_MAIL_FOLDER = FOLDER / "mail"

# Seconds before a failed delivery is tried again, doubled each time. Short, for somebody who watches. A real shop bears
# hours of trouble at the other side: {"max_attempts": 12, "backoff_base": 30} goes on for five hours.
ALKSTORE = {"QUEUES": {"outbox:mail": {"backoff_base": 0.5}, "outbox:webhook": {"backoff_base": 0.5}}}

# Django's tasks are stored in the shop's database, and run by the same worker.
TASKS = {"default": {"BACKEND": "django_alkstore.tasks.AlkstoreBackend"}}

if django.VERSION >= (6, 1):
    MAILERS = {"default": {"BACKEND": "testproject.mail.EmlBackend"}}
else:
    EMAIL_BACKEND = "testproject.mail.EmlBackend"
DEFAULT_FROM_EMAIL = "shop@example.com"

# A demo on 127.0.0.1: none of these three is fit for production.
DEBUG = True
SECRET_KEY = "a demo key, known to all"
ALLOWED_HOSTS = ["127.0.0.1", "localhost"]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
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
ROOT_URLCONF = "testproject.urls"
WSGI_APPLICATION = "testproject.wsgi.application"
STATIC_URL = "static/"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
TIME_ZONE = "UTC"
