"""States inside a training phase, from which one that was stopped goes on to the same bits."""

import json
import shutil
import time
from pathlib import Path

import torch.distributed.checkpoint as dcp
from accelerate.utils import broadcast_object_list
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint import state_dict as states

NAMES = ("weights", "moments")
SHARE = 0.05  # of a phase's time may go into writing states [ours]


class Checkpoint:
    """The newest state of a phase: weights, moments and `events`, what it has logged of its steps.
    folder/step-N appears by renaming; then the one before goes."""

    def __init__(self, accelerator, folder: Path, minutes: float, events: list[dict]):
        self.accelerator, self.folder, self.events = accelerator, folder, events
        self.seconds, self.saved_at, self.took = 60 * minutes, time.monotonic(), 0.0

    def restore(self, model, optimizer) -> int:
        """Puts the newest state back, also into `events`; the number of steps it had made."""
        saved = sorted(self.folder.glob("step-*"), key=lambda path: int(path.name[5:]))
        if not saved:
            return 0
        state = dict(zip(NAMES, states.get_state_dict(model, optimizer)))
        try:
            dcp.load(state, checkpoint_id=saved[-1], no_dist=self.accelerator.num_processes == 1)
            self.events += json.loads((saved[-1] / "events.json").read_text())
        except (Exception, CheckpointException) as error:  # whatever a damaged file makes of it
            raise OSError(f"{saved[-1]} is damaged ({type(error).__name__}); delete {self.folder} "
                          "to begin the phase again") from None
        states.set_state_dict(model, optimizer, model_state_dict=state["weights"],
                              optim_state_dict=state["moments"])
        return int(saved[-1].name[5:])

    def keep(self, model, optimizer, step: int) -> None:
        """Every rank calls this after the same step. A state is written after the minutes given, or
        as many more as keep writing a SHARE of the time; the main rank's clock decides."""
        least = max(self.seconds, self.took / SHARE if self.seconds else 0)
        due = broadcast_object_list([time.monotonic() - self.saved_at >= least])[0]
        if not due or not optimizer.state:  # before the first update there are no moments
            return
        started, main = time.monotonic(), self.accelerator.is_main_process
        temporary = self.folder / "writing"
        if main:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        self.accelerator.wait_for_everyone()
        dcp.save(dict(zip(NAMES, states.get_state_dict(model, optimizer))), checkpoint_id=temporary,
                 no_dist=self.accelerator.num_processes == 1)
        if main:
            (temporary / "events.json").write_text(json.dumps(self.events))
            before = [*self.folder.glob("step-*")]
            temporary.rename(self.folder / f"step-{step}")
            for path in before:
                shutil.rmtree(path)
        self.accelerator.wait_for_everyone()
        self.saved_at = time.monotonic()
        self.took = self.saved_at - started
