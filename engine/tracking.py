"""The log of a run, metrics.jsonl, which an experiment tracker can also receive.

`Run` writes a line for each training step and for each finished phase.
"""

import json
import re
import sys
from pathlib import Path
from urllib.parse import quote, unquote

from accelerate.tracking import filter_trackers

from common.files import whole_lines
from common.settings import UsageError

# The names of a training step's numbers in a tracker, as in TRL. All others keep their names.
TRL_NAMES = {"norm": "grad_norm", "chosen": "logps/chosen", "rejected": "logps/rejected",
         "reward_chosen": "rewards/chosen", "reward_rejected": "rewards/rejected",
         "margin": "rewards/margins", "accuracy": "rewards/accuracies"}


class Tracking:
    """Writes the log of a run.

    Args:
        accelerator: The Accelerator of the run. Its trackers are used.
        folder: The folder of the run. A tracker writes its files to `tracking` in it.
        name: The name of the tracker, such as "tensorboard", or None for no tracker.
        settings: The settings of the run, which the tracker records.

    Raises:
        UsageError: accelerate does not support the tracker, or it is not installed.
    """

    def __init__(self, accelerator, folder: Path, name: str | None, settings: dict):
        self.accelerator = accelerator
        self.file = folder / "metrics.jsonl"
        if not accelerator.is_main_process:
            return
        self.lines = len(whole_lines(self.file))  # including lines from before a resume
        if name:
            self.start(name, folder / "tracking", settings)

    def start(self, name: str, folder: Path, settings: dict) -> None:
        try:
            trackers = filter_trackers(name, str(folder))
        except ValueError as error:
            raise UsageError(f"--track {name}: {error}") from None
        if not trackers:
            raise UsageError(f"--track {name}: it is not installed; {sys.executable} -m pip "
                             f"install {name}")
        self.accelerator.log_with = trackers
        self.accelerator.project_configuration.set_directories(str(folder))
        folder.mkdir(exist_ok=True)
        settings = {key: value for key, value in settings.items() if value is not None}
        self.accelerator.init_trackers("coevolve", settings)

    def log(self, event: str, phase: str, numbers: dict) -> None:
        """Appends a line to metrics.jsonl, and sends its numbers to the tracker, on the main rank.

        The names in the tracker begin with the phase. Numbers of an evaluation are also sent under
        the agent and the split, which gives a curve over the run. The number of a line is its step
        in the tracker, so a resumed run continues the curves.

        Args:
            event: "train" for a training step, or "phase" for a finished phase.
            phase: The output of the phase.
            numbers: The numbers by name. Nested dictionaries are allowed.
        """
        if not self.accelerator.is_main_process:
            return
        with open(self.file, "a") as file:
            file.write(json.dumps(dict(event=event, phase=phase, **numbers)) + "\n")
        self.lines += 1
        renamed = with_trl_names(numbers) if event == "train" else numbers
        values = flatten(phase.removesuffix(".jsonl"), renamed)
        if "split" in numbers:
            values |= flatten(f"evaluate/{numbers['name']}/{numbers['split']}", numbers)
        self.accelerator.log({valid_name(name): value for name, value in values.items()},
                             self.lines)


def with_trl_names(line: dict) -> dict:
    """Returns the numbers of a training step under their names in a tracker.

    Examples are `grad_norm`, and `rewards/margins/expert>target` for a kind of pairs.
    """
    renamed = {}
    for name, value in line.items():
        if name == "kinds":
            for kind, row in value.items():
                for statistic, mean in row.items():
                    renamed[f"{TRL_NAMES.get(statistic, statistic)}/{kind}"] = mean
        else:
            renamed[TRL_NAMES.get(name, name)] = value
    return renamed


def valid_name(name: str) -> str:
    """Returns a name in a form that every tracker accepts.

    It has at most 250 characters, which are ASCII letters, digits, `_`, `-`, `.` and `/`, and no
    part between slashes consists of dots alone. The name of an agent may come from a file, in which
    case it is percent-encoded in the name of the phase.
    """
    name = quote(unquote(name).replace(">", "_over_")).replace("~", "_").replace("%", "_")
    name = re.sub(r"(?<![^/])(\.*)(?![^/])", r"_\1", name)
    return name[:250].rstrip("/")


def flatten(name: str, value) -> dict[str, float]:
    """Returns the numbers in nested dictionaries by their path, such as "phase/loss"."""
    if isinstance(value, dict):
        values = {}
        for key, inner in value.items():
            values |= flatten(f"{name}/{key}", inner)
        return values
    return {name: value} if isinstance(value, (int, float)) else {}
