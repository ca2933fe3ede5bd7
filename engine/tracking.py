"""Logs the metrics of a run to metrics.jsonl and to an experiment tracker (wandb, tensorboard)."""

import json
import sys
from pathlib import Path

from accelerate.tracking import filter_trackers

from common.files import whole_lines
from common.settings import UsageError
from engine.chat import first_line

# Maps training metrics to their names in an experiment tracker. TRL uses the same names.
TRL_NAMES = {"norm": "grad_norm", "chosen": "logps/chosen", "rejected": "logps/rejected",
         "reward_chosen": "rewards/chosen", "reward_rejected": "rewards/rejected",
         "margin": "rewards/margins", "accuracy": "rewards/accuracies"}


class Tracking:
    """Logs the metrics of a run to metrics.jsonl, and to the experiment tracker `name`, if given.

    The tracker shows `settings` as the configuration of the run. Raises UsageError if accelerate
    does not support the tracker, or if the tracker is not installed or cannot start.
    """

    def __init__(self, accelerator, folder: Path, name: str | None, settings: dict):
        self.accelerator = accelerator
        self.file = folder / "metrics.jsonl"
        if not accelerator.is_main_process:
            return
        # The number of lines in metrics.jsonl. A resumed run appends to this file.
        self.lines = len(whole_lines(self.file))
        if not name:
            return
        tracking = folder / "tracking"
        try:
            trackers = filter_trackers(name, str(tracking))
        except ValueError as error:
            raise UsageError(f"--track {name}: {error}") from None
        if not trackers:
            raise UsageError(f"--track {name}: it is not installed; {sys.executable} -m pip "
                             f"install {name}")
        accelerator.log_with = trackers
        accelerator.project_configuration.set_directories(str(tracking))
        tracking.mkdir(exist_ok=True)
        settings = {key: value for key, value in settings.items() if value is not None}
        try:
            accelerator.init_trackers("coevolve", settings)
        except Exception as error:  # each tracker defines its own exception classes
            raise UsageError(f"--track {name}: it cannot start: {first_line(error)}; set it up, or "
                             "give --track tensorboard, which needs no account and no network"
                             ) from None

    def log(self, event: str, phase: str, numbers: dict) -> None:
        """Appends a line to metrics.jsonl, and sends its metrics to the tracker.

        In the tracker, the name of a metric starts with the name of the phase. The metrics of an
        evaluation are sent a second time, under a name that starts with evaluate/AGENT/SPLIT, so
        that the tracker draws one curve over all iterations. The number of a line is its step in
        the tracker, so a resumed run continues the curves.

        Args:
            event: "train" for a training step, or "phase" for a finished phase.
            phase: The name of the phase's output, such as iter1/target-agent.
            numbers: The metrics by name. Nested dictionaries are allowed.
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
        # Most trackers do not accept ">", which occurs in the kinds of pairs.
        self.accelerator.log({name.replace(">", "_over_"): value for name, value in values.items()},
                             self.lines)


def with_trl_names(line: dict) -> dict:
    """Renames the metrics of a training step to the names that TRL uses.

    Metrics of one kind of pair get the kind as a suffix, as in `rewards/margins/expert>target`.
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


def flatten(name: str, value) -> dict[str, float]:
    """Flattens nested dictionaries to a single dict {path: number}, with paths like "phase/loss".

    Values that are not numbers are left out.
    """
    if isinstance(value, dict):
        values = {}
        for key, inner in value.items():
            values |= flatten(f"{name}/{key}", inner)
        return values
    return {name: value} if isinstance(value, (int, float)) else {}
