"""The schema refuses numbers and moments that a worker or a scheduler could not read, whoever writes them."""

import pytest
from django.db import IntegrityError, connection

from django_alkstore.clock import FIRST_US, LAST_US
from django_alkstore.services import claim_batch, enqueue, lock, schedule

pytestmark = pytest.mark.django_db(transaction=True)

JOB, LOCK, SCHEDULE = "django_alkstore_job", "django_alkstore_lock", "django_alkstore_schedule"
NO_WHOLE_NUMBERS = ["1.5", "'many'", "X'00'", "1e300"]
NO_MOMENTS = [*NO_WHOLE_NUMBERS, "-1e999", "1e999", str(LAST_US + 1), str(FIRST_US - 1)]
NO_DURATIONS = ["-1", "-1e308", "1e999", "'long'", "X'00'", "3e11"]
REFUSED = [
    *((JOB, column, value) for column in ("run_at", "lease_expires_at") for value in [*NO_MOMENTS, "NULL"]),
    *((JOB, "expires_at", value) for value in NO_MOMENTS),
    *((JOB, column, value) for column in ("priority", "fence", "lock_errors") for value in NO_WHOLE_NUMBERS),
    *((JOB, "attempts", value) for value in [*NO_WHOLE_NUMBERS, "-1"]),
    *((JOB, "max_attempts", value) for value in [*NO_WHOLE_NUMBERS, "0"]),
    *((JOB, "visibility_timeout", value) for value in [*NO_DURATIONS, "0"]),
    *((JOB, "backoff_base", value) for value in NO_DURATIONS),
    (JOB, "state", "'asleep'"),
    *((LOCK, "expires_at", value) for value in NO_MOMENTS),
    *((SCHEDULE, "next_fire_at", value) for value in NO_MOMENTS),
]


@pytest.mark.parametrize(("table", "column", "value"), REFUSED)
def test_f051_what_nothing_could_read_is_refused(table: str, column: str, value: str) -> None:
    enqueue("mail", None)
    assert claim_batch("mail", "me")
    assert lock("import").acquire()
    schedule("often", "@every 1h", "mail")
    with connection.cursor() as cursor, pytest.raises(IntegrityError):
        cursor.execute(f"UPDATE {table} SET {column} = {value}")


@pytest.mark.parametrize("moment", [FIRST_US, LAST_US])
def test_the_first_and_the_last_moment_are_moments(moment: int) -> None:
    enqueue("mail", None)
    with connection.cursor() as cursor:
        cursor.execute(f"UPDATE {JOB} SET run_at = %s", [moment])
