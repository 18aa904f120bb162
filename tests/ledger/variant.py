"""The suite's settings, with what the JSON in ALKSTORE_TEST_VARIANT says instead: for single child processes."""

import json
import os

from tests.settings import *  # noqa: F403

_VARIANT = json.loads(os.environ.get("ALKSTORE_TEST_VARIANT", "{}"))
INSTALLED_APPS = [*_VARIANT.pop("FIRST_APPS", []), *INSTALLED_APPS, *_VARIANT.pop("EXTRA_APPS", [])]  # noqa: F405
_OTHER = _VARIANT.pop("OTHER_DATABASE", None)
if _OTHER is not None:
    DATABASES["other"] = sqlite("other", _OTHER)  # noqa: F405
if _VARIANT.pop("IN_MEMORY", False):
    for _database in DATABASES.values():  # noqa: F405
        del _database["TEST"]
globals().update(_VARIANT)
