"""The careful run, whose episodes a server replies to with `--serve`.

It replaces these methods of it; without --serve they are the careful run's.

    open        a run that was begun by a server goes on by one
    load        the server ends before anything is trained
    replica     an agent's server in place of its model
    answer      what asks the server
    play_share  each episode goes on by itself, and is kept as it ends
"""

from pathlib import Path

import coevolve
import dpo
import envs
from common.files import read_json
from lab.careful import run as careful
from lab.careful.kept import Kept
from lab.serve.rollouts import SLOTS, Servers


class Run(careful.Run):
    """See above."""

    def __init__(self, settings, options):
        super().__init__(settings, options)
        self.servers = Servers(self) if settings.serve else None

    def open(self) -> None:
        check_begun(self.folder / "config.json", self.settings.serve)
        super().open()
        if self.settings.serve and self.settings.slots == 0:
            self.slots = SLOTS

    def load(self, agent: Path):
        if self.servers:  # which would keep the memory
            self.servers.end()
        return super().load(agent)

    def replica(self, agent: Path):
        return self.servers.of(agent) if self.servers else super().replica(agent)

    def answer(self, model, temperature: float):
        if not self.servers:
            return super().answer(model, temperature)
        return self.servers.engine(model, temperature)

    def play_share(self, share: list[dpo.Trajectory], answer, make_env) -> list[dpo.Trajectory]:
        if not self.servers:
            return super().play_share(share, answer, make_env)

        # Each episode has its own random numbers at the server: also on a CPU it may be kept alone.
        file = f"{self.state}-served-{self.accelerator.process_index}.jsonl"
        kept = Kept(self.folder / "playing" / file, make_env)
        waiting = kept.missing(share)
        with coevolve.bar(self, len(share)) as progress:
            progress.update(len(share) - len(waiting))
            for t in self.servers.play(waiting, answer, make_env):
                careful.keep_reads(self)
                kept.add([t])
                progress.update()
        return kept.of(share)


def check_begun(config: Path, serve: str | None) -> None:
    """Refused where a folder's run was begun by a server and is to go on without, or vice versa.
    Another command is no other run: only how the server computes may change with it."""
    begun = read_json(config) if config.exists() else {}
    if "settings" not in begun:  # a new run, or none
        return
    before = begun["settings"].get("serve")
    if bool(before) != bool(serve):
        how = f"with --serve {before!r}" if before else "without --serve"
        raise envs.Refused(f"--out {config.parent}: this run was begun {how}, and a server draws "
                           "others; go on likewise, or give another folder")
