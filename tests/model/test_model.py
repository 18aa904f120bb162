"""The library against the model of the contract, in random sequences of calls."""

import os
import secrets

import pytest
from hypothesis import seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.model.machine import Alkstore, another_connection

PICKED = os.environ.get("HYPOTHESIS_SEED")


# A dozen short runs meet more kinds of sequences than a long one, which likes to vary what it has.
@pytest.mark.django_db(transaction=True)
@pytest.mark.timeout(0)  # a thorough run is long, and cutting a failure down takes minutes
@pytest.mark.parametrize("number", range(12) if settings.default.derandomize else [PICKED])
def test_the_library_does_what_the_model_does(number: int | str | None) -> None:
    chosen = secrets.randbits(32) if number is None else int(number)
    print(f"HYPOTHESIS_SEED={chosen} repeats this run")
    with another_connection() as outside:

        def machine() -> Alkstore:
            return Alkstore(outside)

        run_state_machine_as_test(seed(chosen)(machine))
