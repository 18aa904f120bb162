"""How long the model is held against the library: the same short time in each run of the suite. With
`HYPOTHESIS_PROFILE=thorough`, for `HYPOTHESIS_EXAMPLES` sequences of 50 calls: new ones, or those of `HYPOTHESIS_SEED`.
"""

import os
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.configuration import set_hypothesis_home_dir

_COMMON = {
    "deadline": None,
    "database": None,
    "stateful_step_count": 50,
    "suppress_health_check": list(HealthCheck),
}
settings.register_profile("suite", derandomize=True, max_examples=10, **_COMMON)
settings.register_profile("thorough", max_examples=int(os.environ.get("HYPOTHESIS_EXAMPLES", "5000")), **_COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))


@pytest.fixture(autouse=True, scope="session")
def _nothing_left_in_the_tree() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="alkstore-tests-") as folder:
        set_hypothesis_home_dir(folder)
        yield
