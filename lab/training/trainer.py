"""The models of a run: loading, reference policies, training phases and what they save."""

import shutil
from pathlib import Path

import torch
from transformers import AutoTokenizer

from lab import tokens as dpo
from lab.engine import sharding
from lab.engine.checkpoint import Checkpoint
from lab.harness.settings import EVOLVING, Settings, SettingsError, agents_of, segments_of
from lab.training import models, probe


class Trainer:
    """Loads, trains and saves models of `models.load_model` on the machine of a run."""

    def __init__(self, settings: Settings, folder, tasks):
        self.settings, self.folder, self.log, self.tasks = settings, folder, folder.log, tasks
        self.accelerator = accelerator = folder.accelerator
        self._first = None  # the base model's weights, which were loaded to be checked
        s, large = settings, accelerator.device.type == "cuda" and settings.model != "tiny"
        self.shard, self.recompute = (large if flag == "auto" else flag == "on"
                                      for flag in (s.shard, s.gradient_checkpointing))
        self.base = str(models.TINY) if s.model == "tiny" else s.model
        if s.model == "smollm2":
            from lab.training import smollm2  # its packages are asked for where it is
            self.base = folder.on_main(smollm2.base)
        self.saving_works = any(name.startswith("sft-") for name in folder.phases)
        if s.method == "chat":  # an endpoint
            self.identity = f"{self.base} {s.model_name}"
            return
        self._check_base()
        self.identity = folder.on_main(lambda: models.identity(self.base))
        n = accelerator.num_processes
        self.log.say(
            f"{n} process{'es' * (n > 1)} on {accelerator.device.type}"
            f"{', weights sharded' * self.shard}; weights and AdamW float32, passes "
            f"{'bfloat16' if accelerator.mixed_precision == 'bf16' else 'float32'}"
            f"{', gradient checkpointing' * self.recompute}")

    def _check_base(self) -> None:
        s = self.settings
        models.check_model(self.base, s.max_tokens)
        if s.failure_from and "sft-failure" not in self.folder.phases:
            self.failure_agent()  # if it cannot be used, it is said now
        if self.folder.phases:
            return

        def wrong_numbers():  # of the one load before the first step: on the CPU, in fp32
            self._first = models.load_model(self.base)
            try:
                probe.check_numbers(self._first, s.max_tokens)
            except ValueError as error:
                return f"--model {self.base}: {error}"

        if wrong := self.folder.on_main(wrong_numbers):
            raise SettingsError(wrong)

    def read(self, folder, dtype=torch.float32):
        """The model in a folder: its weights on the main rank, without them on the others."""
        first, self._first = self._first, None
        if first is not None and folder == self.base and dtype == torch.float32:
            return first
        return models.load_model(folder, dtype, data=self.folder.main)

    def load(self, folder):
        """The model in a folder, ready to train on all ranks; one of them reads the weights."""
        return sharding.shard_model(self.accelerator, self.read(folder), self.shard,
                                    self.recompute)

    def encoder(self) -> dpo.Encoder:
        return dpo.Encoder(AutoTokenizer.from_pretrained(self.base))

    def sampler(self, temperature: float) -> dpo.Sampler:
        """What agents of this run draw tokens from."""
        vocabulary = models.config_of(self.base).vocab_size
        return dpo.Sampler(temperature, self.encoder().suppress_tokens(vocabulary))

    def log_probs(self, model, groups: list[dpo.Group], sampler: dpo.Sampler | None = None) -> list:
        """`dpo.log_probs_of` by a model of `load`."""
        with self.log.bar("log-probabilities", sum(g.tokens for g in groups), "token") as progress:
            return dpo.log_probs_of(self.accelerator, model, groups,
                                    self.settings.tokens_per_forward, progress, sampler)

    def optimisation(self, lr: float, warmup: float = 0.0, schedule: str = "constant"):
        s = self.settings
        return dpo.Optimisation(lr, warmup, schedule, s.weight_decay, s.max_grad_norm,
                                s.tokens_per_forward)

    def fit(self, model, before, out: Path, epochs, objective: dpo.Objective,
            how: dpo.Optimisation) -> dict:
        """Trains a model of `load`, which came from folder `before`, into folder `out`; numbers for
        the log. A checkpoint inside the phase is taken up again."""
        phase, last = self.folder.running, {}
        self.check_saving(model, before)
        self.log("precision", phase=phase, processes=self.accelerator.num_processes,
                 shards=self.shard, **sharding.dtypes(self.accelerator, model))
        sizes = [sum(g.tokens for g in batch) for epoch in epochs for batch in epoch]
        checkpoint = self.checkpoint()
        with self.log.bar(phase, sum(sizes), "token") as progress:
            def log(event):
                last.update(event)
                progress.update(sizes[event["step"] - 1])
                self.log("train", phase=phase, **event)

            dpo.fit(self.accelerator, model, epochs, objective, how, log, checkpoint)
        if checkpoint.resumed_at:
            self.log.say(f"{phase} went on after step {checkpoint.resumed_at}")
        self.save(model, before, out)
        return dict(steps=last["step"], tokens=sum(sizes), loss=last["loss"])

    def checkpoint(self) -> Checkpoint:
        """The state inside the running phase."""
        return Checkpoint(self.accelerator, self.folder.path / "checkpoint", self.folder.inputs(),
                          self.settings.checkpoint_minutes)

    def whole(self, model):
        """A model of `load` as it plays, whole on each rank."""
        def make():
            bf16 = self.accelerator.mixed_precision == "bf16"
            folder = self.accelerator.unwrap_model(model).name_or_path
            return models.load_model(folder, torch.bfloat16 if bf16 else torch.float32, data=False)

        return sharding.whole(self.accelerator, model, make)

    def save(self, model, before, out: Path) -> dict | None:
        """Writes the model and the tokenizer it came with, as `from_pretrained` reads them; the
        weights, on the main rank."""
        if self.folder.main:
            AutoTokenizer.from_pretrained(before).save_pretrained(out)
            self.tasks.record(before, out)
        return sharding.save(self.accelerator, model, out)

    def copy(self, agent, out: Path) -> None:
        """An agent's folder as it is, where a phase has nothing to train."""
        if self.folder.main:
            shutil.copytree(agent, out)

    def check_saving(self, model, before) -> None:
        """Saves the first model once before it trains: what cannot be saved is known at once."""
        if self.saving_works:
            return
        trial = self.folder.path / "trial"
        if self.folder.main:
            numbers = sum(p.numel() for p in model.parameters())
            needed = sum(disk_bytes(self.settings, numbers))
            if needed > (free := shutil.disk_usage(self.folder.path).free):
                raise SettingsError(f"--out {self.folder.path}: {free / 1e9:.1f} GB are free, and "
                                    f"the run's checkpoints take {needed / 1e9:.1f} GB; give a "
                                    "folder on another disk")
        weights = self.save(model, before, trial)
        if self.folder.main:
            saved = models.digests(weights)  # two large models at once may not fit the memory
            del weights
            models.check_copy(saved, before, trial)
            shutil.rmtree(trial)
        self.saving_works = True
        self.accelerator.wait_for_everyone()

    def failure_agent(self) -> Path:
        """The last failure agent of the run --failure-from; SettingsError if that run has none, or
        another tokenizer: its tokens train the target."""
        s, source = self.settings, Path(self.settings.failure_from)
        found = sorted(source.glob("iter*/failure-agent"), key=lambda p: int(p.parent.name[4:]))
        if not found:
            raise SettingsError(f"--failure-from {source}: no iter<i>/failure-agent in it; give "
                                "the folder of a run of --method coevolve")
        models.check_model(found[-1], s.max_tokens)
        theirs, ours = (AutoTokenizer.from_pretrained(name) for name in (found[-1], self.base))
        if (theirs.get_vocab(), theirs.chat_template) != (ours.get_vocab(), ours.chat_template):
            raise SettingsError(f"--failure-from {source}: its tokenizer is not that of --model "
                                f"{s.model}; give a run that started from this model")
        return found[-1]


def disk_bytes(s: Settings, numbers: int) -> tuple[int, int]:
    """Bytes that a run with a model of so many numbers writes: its agents, and states inside a
    phase. Agents are fp32, those of GRPO with two moments; there are two states at once."""
    if s.method in EVOLVING:
        return 4 * numbers * (1 + 3 * segments_of(s)), 2 * 12 * numbers
    rounds = 1 + {"sft": 0, "rft": 1, "dart": 1}.get(s.method, s.iterations)
    return 4 * numbers * len(agents_of(s.method)) * rounds, 2 * 12 * numbers
