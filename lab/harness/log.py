"""What a run says of itself: events in metrics.jsonl and to trackers, lines and bars on the screen.
"""

import json
import sys
from pathlib import Path

from accelerate import Accelerator
from tqdm import tqdm

from lab.harness import files


class Log:
    """log(event, ...) appends an event to the file, and gives its numbers to the trackers. Every
    rank has one; the main one writes."""

    def __init__(self, accelerator: Accelerator, file: Path):
        self.accelerator, self.file = accelerator, file
        self.main = accelerator.is_main_process
        self.phases = 0  # recorded: the trackers' x of an event without a step or an iteration

    def __call__(self, event: str, **fields) -> None:
        if not self.main:
            return
        with files.writing(self.file), open(self.file, "a") as f:
            f.write(json.dumps(dict(event=event, **fields)) + "\n")
        self._track(dict(numbers(event, fields)),
                    fields.get("step", fields.get("iteration", self.phases)))

    def dropped(self, phase: str, reason: str, tasks: list[str]) -> None:
        """What a phase left out, if it was anything."""
        if tasks:
            self("dropped", phase=phase, reason=reason, count=len(tasks), tasks=tasks[:10])

    def say(self, line: str) -> None:
        if self.main:
            tqdm.write(line)

    def bar(self, phase: str, total: int, unit: str):
        every = 0 if sys.stderr.isatty() else 60  # seconds: a log needs no moving bar
        return tqdm(total=total, unit=unit, desc=phase, leave=False, disable=not self.main,
                    unit_scale=unit == "token", dynamic_ncols=True, delay=every,
                    mininterval=max(0.1, every), maxinterval=max(10, every))

    def _track(self, values: dict, x: int) -> None:
        """Gives the trackers an event's numbers, at its optimiser step, iteration, or phase x."""
        for tracker in self.accelerator.trackers:
            if tracker.name != "wandb":
                tracker.log(values, step=x)
                continue
            # Its own steps may only rise, over all that is logged: x is a number like the others.
            for name in {name.rpartition("/")[0] for name in values}:
                tracker.tracker.define_metric(f"{name}/*", step_metric=f"{name}/x")
                values = {**values, f"{name}/x": x}
            tracker.log(values)


def numbers(prefix: str, fields: dict):
    """(name, number) of all numbers in an event; its texts, such as the phase, lead the names."""
    prefix = "/".join([prefix, *(v for v in fields.values() if isinstance(v, str))])
    for key, value in fields.items():
        if isinstance(value, dict):
            yield from numbers(f"{prefix}/{key}", value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f"{prefix}/{key}", value
