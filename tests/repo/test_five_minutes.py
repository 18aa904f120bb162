"""The README's first section, followed to the letter in a new project."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import django

from tests.processes import Process

README = (Path(__file__).parent.parent.parent / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README.split("\n## Five minutes\n")[1].split("\n## ")[0], re.DOTALL)
ENVIRONMENT = {"DJANGO_SETTINGS_MODULE": "site_of_shop.settings"}


def test_the_first_task_is_run_and_the_first_mail_is_sent(tmp_path: Path) -> None:
    project = _Project(tmp_path)
    settings, *others = BLOCKS
    project.add_settings(settings)
    for block in others:
        if module := re.match(r"# (shop/\w+\.py)\n", block):
            (tmp_path / module[1]).write_text(block)
    greet, look, order = [block for block in others if not block.startswith("# shop/")]
    project.manage("makemigrations", "shop")
    project.manage("migrate")
    assert "no issues" in project.manage("check", "--database", "default")
    worker = Process([str(tmp_path / "manage.py"), "run_alkstore"], ENVIRONMENT)
    try:
        worker.wait_for("INFO worker started: outbox confirmations, queue default; concurrency 4")
        worker.wait_for("INFO scheduler leads")
        project.manage("shell", typed=greet)
        worker.wait_for("INFO completed job 1 in queue default in ")
        # The page shows what an interactive shell prints of the last line.
        code, printed = look.rstrip().rsplit("  # ", 1)
        *lines, last = code.splitlines()
        typed = "\n".join(
            ["from shop.tasks import greet", "result = greet.get_result('1')", *lines, f"print(({last}))"]
        )
        assert printed in project.manage("shell", typed=typed)
        project.manage("shell", typed=order)
        worker.wait_for("Thank you! It is number 1.")
        worker.wait_for("INFO completed job 2 in outbox confirmations in ")
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
    finally:
        worker.end()


class _Project:
    """What `startproject` and `startapp` make."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._python("-m", "django", "startproject", "site_of_shop", ".")
        self.manage("startapp", "shop")

    def add_settings(self, block: str) -> None:
        """Put the README's settings behind those of the new project, whose apps stand for the dots."""
        block = block.replace("    # ...\n", "    *INSTALLED_APPS,\n", 1)
        if django.VERSION >= (6, 1):
            block = re.sub(r"^EMAIL_BACKEND = .*\n# From Django 6.1 on: ", "", block, flags=re.MULTILINE)
        with (self._folder / "site_of_shop" / "settings.py").open("a") as settings:
            settings.write(block)

    def manage(self, *arguments: str, typed: str = "") -> str:
        return self._python("manage.py", *arguments, typed=typed)

    def _python(self, *arguments: str, typed: str = "") -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self._folder,
            env={key: value for key, value in os.environ.items() if key != "DJANGO_SETTINGS_MODULE"},
            input=typed,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr
