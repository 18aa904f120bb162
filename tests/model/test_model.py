"""The library against the model of the contract, in random sequences of calls."""

import os
import secrets

import pytest
from hypothesis import seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.model.machine import Alkstore, another_connection


@pytest.mark.django_db(transaction=True)
@pytest.mark.timeout(0)  # a thorough run is long, and cutting a failure down takes minutes
def test_the_library_does_what_the_model_does() -> None:
    profile = settings.default
    with another_connection() as outside:

        def machine() -> Alkstore:
            return Alkstore(outside)

        if not profile.derandomize:
            number = int(os.environ.get("HYPOTHESIS_SEED") or secrets.randbits(32))
            print(f"HYPOTHESIS_SEED={number} repeats this run")
            machine = seed(number)(machine)
        run_state_machine_as_test(machine, settings=profile)
