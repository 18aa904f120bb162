"""huey: one thread, which is its fastest, and no stored results. It deletes a task as it takes it: there is no ack."""

import os
import sys
from collections.abc import Sequence

from bench.program import Program, main


class HueyProgram(Program):
    def open(self) -> None:
        os.environ["BENCH_FOLDER"] = str(self.folder)
        from bench.peers import huey_tasks

        self.tasks = huey_tasks

    def prepare(self) -> None:
        """It makes its tables as it is imported."""

    def enqueue(self, payload: object, *, priority: int = 0) -> object:
        return self.tasks.noop(payload)

    def claim_and_ack(self) -> bool:
        return self.tasks.instance.dequeue() is not None

    def left(self) -> int:
        return int(self.tasks.instance.pending_count())

    def worker(self) -> Sequence[str]:
        module = self.tasks.__name__
        return [sys.executable, "-m", "huey.bin.huey_consumer", f"{module}.instance", "-w", "1", "-k", "thread", "-q"]


if __name__ == "__main__":
    main(HueyProgram)
