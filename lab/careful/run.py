"""The careful run: what a week of runs needs beside the plain one, and what makes it fast on a CPU.

It extends the core's run; the loop, phases, pairs and losses are the core's. Of its methods these
do what the core's does, and more:

    open        disk and machine are looked at; fast or plain
    make        takes over what another run has made alike (--reuse), and notes how it was made
    record      metrics.jsonl and trackers
    load, replica
                the attention that serves the model on this machine
    fit         margins of pairs before and after

These stand in for the core's, as long as the core's are as `stand_in` knows them; where one was
changed, the core's is run, and that is said:

    log_probs   packed passes    } where the model is one of plain attention
    answer      a cache over turns
    training    keeps a state inside long phases, and agents on the way (--save-every)
    play_share  episodes are kept as they end; one thread for a small model
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import torch
from filelock import FileLock

import coevolve
import dpo
import envs
import evolve
from common.files import hashed, known_by, remove
from common.settings import Instead
from lab.careful import overlap, stand_in, store
from lab.careful.kept import CHUNK, Checkpoint, Kept, saved_agents
from lab.careful.margins import margins
from lab.careful.tracking import Tracking
from lab.fast import cache, check, packing
from lab.fast.prepacked import prepack

SMALL = 10_000_000  # parameters: threads would wait for each other, 3.6 s against 1.6 s
SLOTS = 32          # episodes side by side on a CPU, if not said otherwise [ours]
PASS = 4096         # tokens of a packed pass, likewise
STATES = ("playing", "checkpoint", "reads")  # what a phase keeps to go on from


class Run(evolve.Run):
    """See above."""
    keeps_states = True

    def __init__(self, settings, options):
        self.fast = False    # whether passes are packed and replies cached
        self.small = False   # whether the model is so small that threads only wait
        self.tracking = None
        self.inputs = ()     # of the running phase
        self.state = ""      # what its states are known by: its recipe and its code
        super().__init__(settings, options)

    def open(self) -> None:
        s = self.settings
        self.small = self.parameters < SMALL
        if self.accelerator.device.type == "cpu" and s.slots == 0:
            self.slots = SLOTS
        super().open()
        overlap.check(self)
        self.tracking = Tracking(self.accelerator, self.folder, s.track, vars(s))
        say_what_a_fork_changed(self)
        if s.method == "chat":  # at an endpoint; there is no model
            return
        plain = why_plain(self)
        self.fast = not plain
        if plain:
            coevolve.say(self, f"passes and replies are plain: {plain}")
        elif s.tokens_per_forward == 0:
            self.tokens_per_forward = PASS  # without padding

    def agents_kept(self) -> int:
        if self.settings.method in ("rft", "dart"):
            return 2
        if self.settings.method == "ppo":
            return 1 + self.settings.iterations
        return super().agents_kept()

    # ................................................................................. phases

    def make(self, out: Path, phase, *inputs, **parameters) -> dict:
        if self.main:  # the run is not finished any more
            remove(self.folder / "result.json")
        code = store.code_of(phase, self.settings.env)
        self.state = f"{self.recipe}-{code}"
        reuse = self.settings.reuse
        lock = nullcontext()
        if reuse and self.main:  # of runs that come to it together one makes it
            lock = FileLock(Path(reuse) / f".{self.recipe}.lock")
        with lock:
            taken = None
            if reuse:
                found = [store.take(self, out, code, Path(reuse)) if self.main else None]
                if self.ranks > 1:  # another run may take hours to make it
                    torch.distributed.broadcast_object_list(found, group=self.patient)
                taken = found[0]
            if taken:
                remove_states(self)
                return taken
            self.inputs = inputs
            say_of_other_states(self)
            self.reads.update(read_before(self))
            numbers = super().make(out, phase, *inputs, **parameters)
            if self.main and (out / "config.json").exists():  # an agent
                overlap.record(self, out, *inputs)
        remove_states(self)

        # What follows tells agents apart by how they were made.
        reads = reads_of_phase(self)
        made = dict(reads=reads | asdict(self.options), code=code, machine=store.machine(self))
        if self.main:
            made["output"] = known_by(out, {})
        return numbers | dict(made_by=hashed([self.recipe, reads, code]), made=made)

    def record(self, output: str) -> None:
        super().record(output)
        row = self.done[output]
        numbers = {name: row[name] for name in row if name not in store.HOW_MADE}
        self.tracking.log("phase", output, numbers)

    # ................................................................................. models

    def load(self, agent: Path):
        return attend(self, super().load(agent))

    def replica(self, agent):
        model = super().replica(agent)
        if model is agent:  # it is being trained, and stays as it is
            return model
        attend(self, model)
        if self.fast:
            prepack(model)
        return model

    def log_probs(self, model, trajectories: list[dpo.Trajectory], sampler=dpo.Sampler()):
        if not self.fast or "log_probs" in stand_in.changed():
            return super().log_probs(model, trajectories, sampler)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            return packing.log_probs(model, trajectories, self.tokens_per_forward, sampler)

    def answer(self, model, temperature: float):
        if not self.fast or "answer" in stand_in.changed():
            return super().answer(model, temperature)
        return cache.Cached(model, self.encoder, self.encoder.sampler(temperature), self.env.stops,
                            Instead(self.settings, slots=self.slots))

    # ............................................................................... training

    def fit(self, model, out: Path, steps: list[list[dpo.Group]], objective: dpo.Objective) -> dict:
        numbers = super().fit(model, out, steps, objective)
        groups = list({id(group): group for batch in steps for group in batch}.values())
        coevolve.write(self, out / "margins.jsonl", margins(self, model, groups, objective))
        tokens = 0
        for batch in steps:
            tokens += sum(len(t.ids) for t in dpo.trajectories_of(batch))
        return numbers | dict(tokens=tokens)

    def training(self, model, steps: list[list[dpo.Group]],
                 objective: dpo.Objective) -> Iterator[dict]:
        if "training" in stand_in.changed():
            yield from super().training(model, steps, objective)
            return
        optimizer = dpo.adamw(model, objective)
        lines = []
        checkpoint = self.checkpoint(lines)
        done = checkpoint.restore(model, optimizer)
        yield from lines
        for line in dpo.training(model, optimizer, steps, objective, self.log_probs, done):
            lines.append(line)
            self.tracking.log("train", self.name, line)
            checkpoint.keep(model, optimizer, line["step"])
            yield line

    def checkpoint(self, lines: list[dict]) -> CheckpointOfRun:
        return CheckpointOfRun(self, lines)

    # ................................................................................ playing

    def play_share(self, share: list[dpo.Trajectory], answer, make_env) -> list[dpo.Trajectory]:
        if "play_share" in stand_in.changed():
            return super().play_share(share, answer, make_env)
        file = f"{self.state}-{self.accelerator.process_index}.jsonl"
        kept = Kept(self.folder / "playing" / file, make_env)
        on_cpu = self.accelerator.device.type == "cpu"
        chunks = [share[:]]
        if on_cpu:
            size = CHUNK * self.slots
            chunks = [share[n:n + size] for n in range(0, len(share), size)]

        threads = torch.get_num_threads()
        if on_cpu and self.small:
            torch.set_num_threads(1)
        with coevolve.bar(self, len(share)) as progress:
            for chunk in chunks:
                play_chunk(self, chunk, kept, answer, make_env, progress, whole=on_cpu)
        torch.set_num_threads(threads)
        return kept.of(share)


def say_what_a_fork_changed(run: Run) -> None:
    """Says of each of the core's methods that is not as lab knows it whether it acts here."""
    for name in stand_in.changed():
        if name in stand_in.FOR:
            coevolve.say(run, f"{name} is not as lab knows it: it runs as it is, and what lab "
                              "does in its place is left out")
    for method in stand_in.hidden(type(run)):
        coevolve.say(run, f"Run.{method} of the core does nothing here, since lab has a method of "
                          "that name for something else; give it another name")


def why_plain(run: Run) -> str | None:
    """Why passes and replies are the core's; None where they are packed and cached."""
    if run.settings.fast == "off":
        return "--fast off"
    for method in "log_probs", "answer":
        if method in stand_in.changed():
            return f"Run.{method} is a fork's"
    if run.ranks > 1:
        return "of several processes"
    if run.accelerator.device.type != "cpu":
        return "on a GPU"
    return check.why_not(dpo.read_model(run.base).eval(), run.encoder,
                         Instead(run.settings, slots=run.slots))


def reads_of_phase(run: Run) -> dict:
    """The settings that the phase has read; of those that were read before it, which lay out the
    work, `store.machine` has what is in force."""
    names = (run.reads | coevolve.ALL_READ) - store.NO_PART
    values = vars(run.settings)
    return {name: values[name] for name in sorted(names)}


def say_of_other_states(run: Run) -> None:
    """Says that the phase does not go on from a state that other code has left of it."""
    for kind in STATES:
        for path in (run.folder / kind).glob(f"{run.recipe}-*"):
            if not path.name.startswith(run.state):
                coevolve.say(run, f"{run.name} begins again: other code than this left what it "
                                  "would go on from")
                return


def remove_states(run: Run) -> None:
    """Removes what a phase that is done, here or by another run, kept to go on from."""
    if run.main:
        for name in STATES:
            remove(run.folder / name)


def keep_reads(run: Run) -> None:
    """Writes down what the phase has read so far, beside the state that it is about to keep:
    what goes on from that does not read again what led to it."""
    if run.main:
        file = run.folder / "reads" / run.state
        file.parent.mkdir(exist_ok=True)
        file.write_text("\n".join(sorted(run.reads)))


def read_before(run: Run) -> list[str]:
    """What the phase has read before it was stopped."""
    file = run.folder / "reads" / run.state
    return file.read_text().split() if file.exists() else []


def attend(run: Run, model):
    """The model with the attention that serves it on this machine, its own or another."""
    fp32 = run.accelerator.device.type == "cuda" and not run.bf16
    if run.fast:
        model.set_attn_implementation("ragged")
    elif fp32 and model.config._attn_implementation == "sdpa":
        model.set_attn_implementation("repeated")
    return model


def play_chunk(run: Run, chunk: list[dpo.Trajectory], kept: Kept, answer, make_env, progress,
               whole: bool) -> None:
    """Plays the episodes of a chunk that are not kept, or, if it has to stay whole, all of it;
    and keeps them."""
    waiting = chunk if whole and kept.of(chunk) is None else kept.missing(chunk)
    progress.update(len(chunk) - len(waiting))

    def ended(t):
        progress.update()
        if not whole:
            keep_reads(run)
            kept.add([t])

    envs.play(make_env, run.encoder, waiting, answer, run.slots,
              run.settings.max_tokens, ended)
    if whole and waiting:
        keep_reads(run)
        kept.add(waiting)


class CheckpointOfRun(Checkpoint):
    """The states inside a run's phase, and the agents that --save-every asks for."""

    def __init__(self, run: Run, lines: list[dict]):
        super().__init__(run.accelerator, run.folder / "checkpoint" / run.state,
                         run.settings.checkpoint_minutes, lines)
        self.run = run
        self.every = run.settings.save_every

    def restore(self, model, optimizer) -> int:
        done = super().restore(model, optimizer)
        if self.run.main:
            for step, folder in saved_agents(self.run.folder / self.run.name):
                if step > done:  # of another way of making the phase, or to be made again
                    remove(folder)
        return done

    def write(self, model, optimizer, step: int) -> None:
        keep_reads(self.run)
        super().write(model, optimizer, step)

    def keep(self, model, optimizer, step: int) -> None:
        # The agent comes before the state, from which nothing goes back to this step.
        if self.every and step % self.every == 0:
            self.save_agent(model, step)
        super().keep(model, optimizer, step)

    def save_agent(self, model, step: int) -> None:
        """Saves the agent as it is after a step."""
        run = self.run
        out = run.folder / f"{run.name}-step{step}"
        temporary = out.with_name(f"{out.name}.tmp")
        if run.main:
            remove(temporary)  # of a process that was stopped
        dpo.save(run.accelerator, model, run.encoder, temporary)
        if run.main:
            overlap.record(run, temporary, *run.inputs)
            remove(out)
            os.replace(temporary, out)
