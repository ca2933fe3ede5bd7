"""A run's log: metrics.jsonl, and a tracker that gets its numbers, too. `Run` writes it."""

import json
import re
import sys
from pathlib import Path
from urllib.parse import quote, unquote

from accelerate.tracking import filter_trackers

from common.files import whole_lines
from common.settings import UsageError

# What trackers call numbers of a step of training, as TRL's do; others keep their names.
NAMES = {"norm": "grad_norm", "chosen": "logps/chosen", "rejected": "logps/rejected",
         "reward_chosen": "rewards/chosen", "reward_rejected": "rewards/rejected",
         "margin": "rewards/margins", "accuracy": "rewards/accuracies"}


class Tracking:
    """Writes the log of a run.

    Args:
        accelerator: accelerate's, whose trackers are used.
        folder: The run's; a tracker that writes files does so in its folder `tracking`.
        name: The tracker, such as tensorboard; None: there is none.
        settings: The run's, which trackers show.

    Raises:
        Refused: The tracker is not one of accelerate's, or is not installed.
    """

    def __init__(self, accelerator, folder: Path, name: str | None, settings: dict):
        self.accelerator = accelerator
        self.file = folder / "metrics.jsonl"
        if not accelerator.is_main_process:
            return
        self.lines = len(whole_lines(self.file))  # those of earlier processes among them
        if name:
            self.start(name, folder / "tracking", settings)

    def start(self, name: str, folder: Path, settings: dict) -> None:
        try:
            found = filter_trackers(name, str(folder))
        except ValueError as error:
            raise UsageError(f"--track {name}: {error}") from None
        if not found:
            raise UsageError(f"--track {name}: it is not installed; {sys.executable} -m pip install "
                          f"{name}")
        self.accelerator.log_with = found
        self.accelerator.project_configuration.set_directories(str(folder))
        folder.mkdir(exist_ok=True)
        known = {key: value for key, value in settings.items() if value is not None}
        self.accelerator.init_trackers("coevolve", known)

    def log(self, event: str, phase: str, numbers: dict) -> None:
        """Appends a line to metrics.jsonl, and gives its numbers to the tracker, named by phase;
        those of evaluations by agent and split, too, a curve over the run. The number of the line
        is their step, so that a run that goes on goes on there."""
        if not self.accelerator.is_main_process:
            return
        with open(self.file, "a") as file:
            file.write(json.dumps(dict(event=event, phase=phase, **numbers)) + "\n")
        self.lines += 1
        shown = by_pair(numbers) if event == "train" else numbers
        found = flat(phase.removesuffix(".jsonl"), shown)
        if "split" in numbers:
            found |= flat(f"evaluate/{numbers['name']}/{numbers['split']}", numbers)
        self.accelerator.log({accepted(name): value for name, value in found.items()}, self.lines)


def by_pair(line: dict) -> dict:
    """Returns the numbers of a step of training as trackers call them, such as `grad_norm`, and
    `rewards/margins/expert>target` for a kind of pairs."""
    found = {}
    for name, value in line.items():
        if name == "kinds":
            for kind, row in value.items():
                for own, mean in row.items():
                    found[f"{NAMES.get(own, own)}/{kind}"] = mean
        else:
            found[NAMES.get(name, name)] = value
    return found


def accepted(name: str) -> str:
    """Returns a name as every tracker accepts it: letters of ASCII, digits, `_`, `-`, `.` and `/`,
    no part of it dots alone, as in a path, and 250 characters at most. Names of agents may come
    from a file, and are quoted in names of phases."""
    name = quote(unquote(name).replace(">", "_over_")).replace("~", "_").replace("%", "_")
    name = re.sub(r"(?<![^/])(\.*)(?![^/])", r"_\1", name)
    return name[:250].rstrip("/")


def flat(name: str, value) -> dict[str, float]:
    """The numbers in nested dictionaries, with / between the names."""
    if isinstance(value, dict):
        found = {}
        for inner, part in value.items():
            found |= flat(f"{name}/{inner}", part)
        return found
    return {name: value} if isinstance(value, (int, float)) else {}
