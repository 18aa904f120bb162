"""Installs the shop for the tests in this folder, and for them alone.

The suite's own settings do not have it: both it and `tests.ledger` deliver the outbox "mail". So it is imported
here with nothing of it left registered, and each test installs it for itself.
"""

from collections.abc import Iterator
from pathlib import Path

import django
import pytest
from django.contrib import admin
from django.core.management import call_command
from django.test import override_settings
from django.test.utils import modify_settings
from pytest_django import DjangoDbBlocker

from django_alkstore import registry

installed = modify_settings(INSTALLED_APPS={"append": ["testproject.shop"]})

TASKS = {"default": {"BACKEND": "django_alkstore.tasks.AlkstoreBackend"}}

with installed, override_settings(TASKS=TASKS), registry.isolated():
    from testproject.shop import alkstore, models, tasks  # noqa: F401  here, and not by whichever test comes first

    REGISTERED = [*registry.registrations()]
for model in (models.Order, models.SalesReport):
    admin.site.unregister(model)

# As in the shop's own settings; Django's test runner would put the mail into memory itself, had the suite's any.
MAIL: dict[str, object] = {}
if django.VERSION >= (6, 1):
    MAIL = {"MAILERS": {"default": {"BACKEND": "django.core.mail.backends.locmem.EmailBackend"}}}


@pytest.fixture(scope="session")
def shop_tables(django_db_setup: None, django_db_blocker: DjangoDbBlocker) -> None:
    with installed, django_db_blocker.unblock():
        call_command("migrate", "shop", verbosity=0)


@pytest.fixture(autouse=True)
def shop(shop_tables: None, tmp_path: Path) -> Iterator[None]:
    """The shop, installed with its addresses and its handlers."""
    with (
        installed,
        override_settings(
            ROOT_URLCONF="testproject.urls",
            TASKS=TASKS,
            SHOP_WEBHOOK_URL="http://127.0.0.1:1/",
            SHOP_WEBHOOK_SECRET="a secret of the tests",
            ALKSTORE={"QUEUES": {"outbox:mail": {"backoff_base": 0}, "outbox:webhook": {"backoff_base": 0}}},
            SHOP_MAIL_FOLDER=tmp_path / "mail",
            **MAIL,
        ),
        registry.isolated(),
    ):
        for known in REGISTERED:
            register = registry.delivery if known.is_outbox else registry.handler
            register(known.name, time_limit=known.time_limit, atomic=known.atomic)(known.target)
        yield


@pytest.fixture(autouse=True)
def shop_database(shop: None, db: None) -> None:
    """The shop is installed before the test's database is opened, and until it is cleared."""
