"""The careful run: what a week of runs needs beside the plain one, and what makes it fast on a CPU.

It extends the core's run and replaces these methods of it; the loop, phases, pairs and losses are
the core's.

    open        one process in a folder; disk and machine are looked at; fast or plain
    make        takes over what another run has made alike (--reuse), and notes how it was made
    record      metrics.jsonl and trackers
    load, replica, log_probs, answer
                packed passes and a cache over turns, where the model is one of plain attention
    fit, checkpoint
                a state inside long phases, margins of pairs before and after
    play_share  episodes are kept as they end; one thread for a small model
"""

import json
import shutil
from contextlib import nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import psutil
import torch
from accelerate.tracking import filter_trackers
from accelerate.utils import broadcast_object_list
from filelock import FileLock, Timeout

import coevolve
import dpo
import envs
import evolve
from common.files import hashed
from lab.careful import machine, overlap, store
from lab.careful.kept import CHUNK, Checkpoint, Kept
from lab.fast import cache, check, packing
from lab.fast.prepacked import prepack

SMALL = 40_000_000  # bytes of weights: threads would wait for each other, 3.6 s against 1.6 s


class Run(evolve.Run):
    """See above."""

    def open(self) -> None:
        s, self.logged, self.fast = self.settings, 0, False
        trains = self.ranks if s.method in evolve.METHODS else None  # beside its replica
        self.settings = s = replace(s, slots=s.slots or (
            32 if self.accelerator.device.type == "cpu" else machine.slots(
                dpo.read_config(self.base), torch.cuda.mem_get_info()[0], s.max_tokens, trains)))
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            if self.main:
                self.lock = FileLock(self.folder / "lock")
                self.lock.acquire(timeout=0)
        except Timeout:
            raise envs.Refused(f"--out {self.folder}: another process is running in this folder; "
                               "wait for it or give another") from None
        if s.track:
            self.accelerator.log_with = filter_trackers(s.track, str(self.folder))
            self.accelerator.init_trackers("coevolve", {
                name: value for name, value in vars(s).items() if value is not None})
        weights = sum(file.stat().st_size for file in self.base.glob("*.safetensors"))
        needed = weights * (2 + 2 * getattr(s, "iterations", 0))
        if needed > (free := shutil.disk_usage(self.folder).free):
            raise envs.Refused(f"--out {self.folder}: {free / 1e9:.1f} GB are free, and agents "
                               f"take up to {needed / 1e9:.1f} GB; give a folder on another disk")
        self.small = 0 < weights < SMALL
        super().open()
        overlap.check(self)
        plain = ("--fast off" if s.fast == "off" else "of several processes" if self.ranks > 1 else
                 "on a GPU" if self.accelerator.device.type != "cpu" else
                 check.why_not(dpo.read_model(self.base).eval(), self.encoder, s))
        self.fast = not plain
        if plain and self.main and s.method != "chat":
            print(f"passes and replies are plain: {plain}")
        if self.fast and not s.tokens_per_forward:
            self.tokens_per_forward = 4096  # without padding
        self.reads = store.Reads()
        self.settings = store.recorded(s, self.reads)

    def make(self, out: Path, work, *inputs, **how) -> dict:
        s, taken, lock = self.settings, None, nullcontext()
        code = store.code_of(work, s.env)
        if s.reuse and self.main:  # of runs that come to it together one makes it
            lock = FileLock(Path(s.reuse) / f".{self.recipe}.lock")
        with lock:
            if s.reuse:
                taken = [store.take(self, out, code, Path(s.reuse)) if self.main else None]
                taken = broadcast_object_list(taken)[0]
            self.reads.begin(self.folder / "reads" / self.recipe if self.main else None)
            numbers = taken or super().make(out, work, *inputs, **how)
            if self.main and (out / "config.json").exists():  # an agent
                overlap.record(self, out, *inputs)
        if self.main:  # what the phase has kept to go on from
            for inside in "playing", "checkpoint", "reads":
                shutil.rmtree(self.folder / inside, ignore_errors=True)
        reads = {name: vars(self.settings)[name] for name in sorted(self.reads.names)}
        self.reads.begin(None)  # the loop reads settings too
        made_by = hashed([self.recipe, reads, code])  # what follows tells agents apart by it
        return taken or numbers | dict(
            made_by=made_by, resident_mb=psutil.Process().memory_info().rss >> 20,
            made=dict(reads=reads | asdict(self.options), code=code, machine=store.machine(self)))

    def record(self, output: str) -> None:
        super().record(output)
        row = self.done[output]
        self.log("phase", phase=output, **{k: v for k, v in row.items() if k != "made"})

    def log(self, event: str, **fields) -> None:
        """Appends a line to metrics.jsonl, and gives its numbers to the trackers."""
        if not self.main:
            return
        with open(self.folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps(dict(event=event, **fields)) + "\n")
        self.logged += 1
        self.accelerator.log(flat(event, fields), self.logged)

    def load(self, agent: Path):
        return self.attend(super().load(agent))

    def attend(self, model):
        """The model with the attention that serves it on this machine, its own or another."""
        fp32 = self.accelerator.device.type == "cuda" and not self.bf16
        if self.fast or fp32 and model.config._attn_implementation == "sdpa":
            model.set_attn_implementation("ragged" if self.fast else "repeated")
        return model

    def replica(self, agent):
        model = super().replica(agent)
        if model is not agent:  # one that is being trained stays as it is
            self.attend(model)
            if self.fast:
                prepack(model)
        return model

    def log_probs(self, model, sequences: list[dpo.Trajectory], sampler=dpo.Sampler()):
        if not self.fast:
            return super().log_probs(model, sequences, sampler)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.bf16):
            return packing.log_probs(model, sequences, self.tokens_per_forward, sampler)

    def answer(self, model, temperature: float):
        if not self.fast:
            return super().answer(model, temperature)
        never = self.encoder.never(model.config.get_text_config().vocab_size)
        return cache.Cached(model, self.encoder, dpo.Sampler(temperature, never), self.env.stops,
                            self.settings)

    def checkpoint(self, steps: list[dict]) -> Checkpoint:
        return Checkpoint(self.accelerator, self.folder / "checkpoint" / self.recipe,
                          self.settings.checkpoint_minutes, steps)

    def fit(self, model, out: Path, steps: list, how: dpo.Objective) -> dict:
        s, events = self.settings, []
        how = replace(how, weight_decay=s.weight_decay, max_grad_norm=s.max_grad_norm,
                      tokens=self.tokens_per_forward * self.ranks)

        def log(event):
            events.append(event)
            progress.update()
            self.log("train", phase=self.name, **event)

        with coevolve.bar(self, len(steps)) as progress:
            dpo.fit(model, steps, partial(self.log_probs, sampler=how.sampler), how, log,
                    self.checkpoint(events))
        dpo.save(self.accelerator, model, self.tokenizer, out)
        coevolve.write(self, out / "train.jsonl", events)
        coevolve.write(self, out / "margins.jsonl", margins(self, model, steps, how))
        tokens = sum(len(t.ids) for batch in steps for t in dpo.trajectories(batch))
        return dict(steps=len(events), tokens=tokens, first_loss=events[0]["loss"],
                    loss=events[-1]["loss"])

    def play_share(self, share: list[dpo.Trajectory], answer, make_env) -> list[dpo.Trajectory]:
        s, cpu = self.settings, self.accelerator.device.type == "cpu"
        file = f"{self.recipe}-{self.accelerator.process_index}.jsonl"
        kept, threads = Kept(self.folder / "playing" / file, make_env), torch.get_num_threads()
        size = CHUNK * s.slots if cpu else 1
        chunks = [share[n:n + size] for n in range(0, len(share), size)]
        waiting = [chunk for chunk in chunks if kept.of(chunk) is None]
        waiting = waiting if cpu else [sum(waiting, [])]
        torch.set_num_threads(1 if cpu and self.small else threads)
        with coevolve.bar(self, len(share)) as progress:
            progress.update(len(share) - sum(map(len, waiting)))
            for chunk in waiting:
                envs.play(make_env, self.encoder, chunk, answer, s.slots, s.max_tokens,
                          lambda t: (progress.update(), cpu or kept.add([t])))
                if cpu:
                    kept.add(chunk)
        torch.set_num_threads(threads)
        return [t for chunk in chunks for t in kept.of(chunk)]


@torch.no_grad()
def margins(run: Run, model, steps: list[list[dpo.Group]], how: dpo.Objective) -> list[dict]:
    """What training did to each pair, by a pass over the hardest instructions: rows {task, before,
    after} with [chosen, rejected, margin] of each pair, in nats; of a phase without preferences, or
    one with another reference than its start, none."""
    groups = [*{id(g): g for batch in steps for g in batch if g.pairs}.values()]
    if not groups or run.settings.reference != "phase":
        return []
    s = how.loss.keywords["s"]
    groups.sort(reverse=True, key=lambda g: max(g.sequences[p.rejected].reward for p in g.pairs))
    rows = []
    for some in dpo.together(groups[:run.settings.margins], how.tokens):
        policy = run.log_probs(model, dpo.trajectories(some))
        pi, ref, _, w, l = dpo.of_pairs(policy, some, s.log_prob)
        margin = s.beta * ((pi - ref)[w] - (pi - ref)[l])                             # (P,)
        sides = ([*zip(p[w].tolist(), p[l].tolist(), m.tolist())] for p, m in (
            (ref, torch.zeros_like(margin)), (pi, margin)))
        before, after = ([[round(w, 3), round(l, 3), round(m, 4)] for w, l, m in side]
                         for side in sides)
        for g in some:
            n = len(g.pairs)
            rows.append(dict(task=g.sequences[0].task, before=before[:n], after=after[:n]))
            before, after = before[n:], after[n:]
    return rows


def flat(name: str, value) -> dict:
    """The numbers in nested dictionaries, with / between the names."""
    if isinstance(value, dict):
        return {k: x for inner in value for k, x in flat(f"{name}/{inner}", value[inner]).items()}
    return {name: value} if isinstance(value, (int, float)) else {}
