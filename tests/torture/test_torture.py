"""The torture run in its short form. `make torture MINUTES=5` is the long one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.torture.children import ROOT

SECONDS = 30
SEED = "7"
PATIENCE = 540
"""Seconds for the run, its coming to rest and its account, on a machine that has much else to do."""


@pytest.mark.torture
@pytest.mark.timeout(PATIENCE + 60)
@pytest.mark.parametrize("liveness", ["on", "off"])
def test_nothing_is_lost_and_nothing_doubled(tmp_path: Path, liveness: str) -> None:
    run = subprocess.Popen(
        [sys.executable, "-m", "tests.torture", "--minutes", str(SECONDS / 60), "--seed", SEED, "--folder", tmp_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.torture.settings", "ALKSTORE_TEST_LIVENESS": liveness},
    )
    try:
        output, _ = run.communicate(timeout=PATIENCE)
    finally:
        # It ends its own children at SIGTERM; where even that fails, they end with it, as it does with this process.
        run.terminate()
        try:
            run.wait(20)
        except subprocess.TimeoutExpired:
            run.kill()
            run.wait()
    assert run.returncode == 0, output
    assert "nothing lost, nothing doubled" in output
    assert ("left by the dead" in output) == (liveness == "on"), output
