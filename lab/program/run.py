"""A run: what its phases work with. Which there are, and in which order, is in `lab/loop.py`."""

import random
from dataclasses import dataclass
from pathlib import Path

from accelerate import Accelerator

from lab.harness import files
from lab.harness.settings import EVOLVING, Settings


@dataclass
class Run:
    """A folder with tasks, a base model and a machine to train on; `lab.program.start` opens it."""
    settings: Settings
    accelerator: Accelerator
    folder: object   # lab.harness.folder.Folder
    tasks: object    # lab.program.tasks.RunTasks
    trainer: object  # lab.training.trainer.Trainer

    def __post_init__(self):
        self.main, self.log = self.folder.main, self.folder.log

    def phase(self, output: str, work, *args, **more) -> None:
        """Runs work(run, temporary path, ...) -> numbers for the log; see `Folder.phase`."""
        self.folder.phase(output, lambda out: work(self, out, *args, **more))

    def seed(self, *names) -> int:
        return files.seed_of(self.settings.seed, *names)

    def rng(self, *names) -> random.Random:
        return random.Random(self.seed(*names))

    def agent_folder(self, agent: str, i: int) -> Path | str:
        """An agent's checkpoint after iteration i, 0 is after SFT; where there is no SFT, the base
        model, which may be a name on the hub."""
        s = self.settings
        if s.method == "evaluate" or not i and s.method in EVOLVING and s.warm_start == "none":
            return self.trainer.base
        return self.folder.path / (f"iter{i}/{agent}-agent" if i else f"sft-{agent}")
