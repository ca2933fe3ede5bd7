"""Ranks that watch each other: where one has died, on whatever machine, the others end within
minutes, though they play or compute. What waits for a peer over the network ends by itself.
"""

import os
import sys
import threading
import time
from datetime import timedelta

import torch

BEAT = 10    # seconds between two signs of life of a rank [ours]
LIMIT = 180  # without one it counts as dead; a load can hold all threads for a while [ours]


class Watch(threading.Thread):
    def __init__(self, rank: int, ranks: int):
        super().__init__(daemon=True)
        self.rank, self.ranks, self.over = rank, ranks, threading.Event()
        self.start()

    def run(self) -> None:
        try:
            # A connection of its own to the launcher's store: torch's is for one thread.
            store = torch.distributed.TCPStore(
                os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False,
                timeout=timedelta(seconds=LIMIT))
            others, beat = {*range(self.ranks)} - {self.rank}, 0
            seen = dict.fromkeys(others, (None, time.monotonic()))  # last sign, since when
            while not self.over.wait(BEAT):
                beat += 1
                store.set(f"alive/{self.rank}", str(beat))
                for other in others:
                    name, now = f"alive/{other}", time.monotonic()
                    sign = store.get(name) if store.check([name]) else None
                    if sign != seen[other][0]:
                        seen[other] = sign, now
                    elif sign != b"ended" and now - seen[other][1] > LIMIT:
                        self.end(f"process {other}")
            store.set(f"alive/{self.rank}", "ended")
        except RuntimeError:  # of the store's connection
            if not self.over.is_set():
                self.end("the first machine")

    def end(self, who: str) -> None:
        os.write(2, f"run.sh: process {self.rank} ends, since {who} gives no sign of life; the "
                    "message there says why. The same command goes on from here\n".encode())
        sys.stdout.flush()
        os._exit(3)

    def stop(self) -> None:
        self.over.set()
        self.join(2 * BEAT)
