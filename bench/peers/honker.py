"""honker: one process, one loop over its asynchronous claim, as its README shows.

Its package brings compiled code; where there is none for the machine's Python, it cannot be installed and is left out.
"""

import asyncio
import sys
from collections.abc import Sequence

from bench import notes
from bench.program import Program, main

QUEUE = "bench"


class HonkerProgram(Program):
    def open(self) -> None:
        import honker

        self.database = honker.open(str(self.folder / "honker.sqlite3"))
        self.queue = self.database.queue(QUEUE)

    def prepare(self) -> None:
        """It makes its tables as the queue is opened."""

    def enqueue(self, payload: object, *, priority: int = 0) -> object:
        return self.queue.enqueue(payload, priority=priority)

    def enqueue_many(self, payloads: Sequence[object]) -> object:
        with self.database.transaction() as transaction:
            for payload in payloads:
                self.queue.enqueue(payload, tx=transaction)
        return None

    def claim_and_ack(self) -> bool:
        job = self.queue.claim_one("bench")
        return job is not None and bool(job.ack())

    def claim_and_ack_batch(self, size: int) -> int:
        jobs = self.queue.claim_batch("bench", size)
        self.queue.ack_batch([job.id for job in jobs], "bench")
        return len(jobs)

    def left(self) -> int:
        return int(self.database.query("SELECT count(*) AS jobs FROM _honker_live")[0]["jobs"])

    def worker(self) -> Sequence[str]:
        return [sys.executable, "-m", "bench.peers.honker", "consume", str(self.folder)]

    def role_consume(self) -> None:
        async def consume() -> None:
            print("worker started", flush=True)
            async for job in self.queue.claim("bench"):
                notes.begun(job.payload)
                job.ack()

        asyncio.run(consume())


if __name__ == "__main__":
    main(HonkerProgram)
