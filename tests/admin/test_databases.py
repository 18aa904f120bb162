"""The product's tables in another database: the admin reads and acts there, and logs where the project logs. F064."""

from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connections
from django.test import override_settings
from django.test.utils import CaptureQueriesContext

from django_alkstore.models import Job, Lock, Schedule
from django_alkstore.services import enqueue, get_job, lock, schedule
from tests.admin.conftest import Browser

pytestmark = pytest.mark.django_db(databases=["default", "other"])


class ToOther:
    """Sends the product's models to `other`."""

    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        return "other" if model._meta.app_label == "django_alkstore" else None

    db_for_write = db_for_read


@pytest.fixture(params=["setting", "router"])
def elsewhere(request: pytest.FixtureRequest) -> Iterator[None]:
    settings: dict[str, Any] = {"ALKSTORE": {"DATABASE": "other"}}
    if request.param == "router":
        settings = {"DATABASE_ROUTERS": [ToOther()]}
    with override_settings(**settings):
        yield


def test_f064_lists_pages_and_actions_work_on_the_other_database(elsewhere: None, root: Browser) -> None:
    job, row = enqueue("mail", {"n": 1}, unique_key="k"), schedule("nightly", "@every 1h", "mail")
    lock("report").acquire()
    token = Lock.objects.using("other").get().pk
    with CaptureQueriesContext(connections["default"]) as on_default:
        assert root.ids() == root.ids(q="k") == root.ids(queue="mail", state="pending", situation="due") == [job.id]
        assert "n" in root.detail("job", job.id)
        assert "nightly" in root.page("schedule")
        assert "report" in root.page("lock")
        assert root.detail("schedule", row.pk)
        assert root.detail("lock", token)
        assert root.said("job", "cancel", [job.id], select_across="1") == "1 job cancelled."
        assert root.said("schedule", "fire_now", [row.pk]) == "1 schedule fired."
        assert root.said("lock", "force_release", [token]) == "1 lock released."
        assert root.client.get(f"/admin/django_alkstore/job/{job.id}/history/").status_code == 200
    tables = [f'"{model._meta.db_table}"' for model in (Job, Lock, Schedule)]
    assert not [query["sql"] for query in on_default if any(table in query["sql"] for table in tables)]
    stored = get_job(job.id, using="other")
    assert stored is not None
    assert stored.state == "cancelled"
    assert LogEntry.objects.using("default").count() == 3
