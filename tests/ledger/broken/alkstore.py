"""Registers one handler, and then fails as ALKSTORE_TEST_BREAKAGE says."""

import os
import sys

from django_alkstore.registry import delivery, handler
from django_alkstore.services import JobHandle


@handler("half")
@delivery("half")
def half(job: JobHandle) -> None:
    print(f"half a module ran job {job.id}", flush=True)


match os.environ.get("ALKSTORE_TEST_BREAKAGE", "error"):
    case "exit":
        sys.exit("leaving at import")
    case "syntax":
        compile("def (:", "somewhere.py", "exec")
    case "missing":
        import tests.no_such_module  # type: ignore[import-not-found]  # noqa: F401
    case "duplicate":
        handler("half")(half)
    case _:
        raise RuntimeError("broken at import")
