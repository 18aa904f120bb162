"""The mark by which the torture run can be left out: `pytest -m "not torture"`."""

import pytest


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "torture: half a minute of killed, frozen and locked out processes")
