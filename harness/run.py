"""A run: what its phases work with. Which there are, and in which order, is in `coevolve.py`."""

import random
import re
import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import AutoConfig, AutoTokenizer

import dpo
import envs
from engine import sharding
from engine.checkpoint import Checkpoint
from harness import files, margins, models, reuse, smollm2, tiny
from harness.dry_run import disk_bytes
from harness.endpoint import explorer_of
from harness.folder import Folder
from harness.settings import BUILT_IN, EVOLVING, Settings, SettingsError, is_endpoint, options_of
from harness.tasks import check_openings, survey, trains


class Run(Folder):
    """A folder with an environment, a base model and a machine to train on."""

    def __init__(self, settings: Settings, accelerator: Accelerator):
        """Takes the folder, new or to go on in; SettingsError if it cannot be this run's.

        The order is: what the environment lacks, the lock, a first request, changed settings, and
        only then the base model, which may take minutes; settings are on disk before any phase.
        """
        super().__init__(settings, accelerator)
        large = accelerator.device.type == "cuda" and settings.model != "tiny"
        self.shard, self.recompute = (
            large if flag == "auto" else flag == "on"
            for flag in (settings.shard, settings.gradient_checkpointing))
        self._try_environment()
        before = self.find_earlier()
        if settings.experts and trains(settings) and "experts.jsonl" not in self.phases:
            self._check_openings()
        self.saving_works = any(name.startswith("sft-") for name in self.phases)
        self.base = (tiny.base(accelerator, self) if settings.model == "tiny" else
                     self.first_says(smollm2.base) if settings.model == "smollm2" else
                     settings.model)
        identity = self._identity()
        self.record(before, identity)
        self.ingredients = self.first_says(lambda: reuse.ingredients(self, identity))
        if settings.failure_from and "sft-failure" not in self.phases:
            self.find_failure_agent()  # if it cannot be used, it is said now
        n = accelerator.num_processes
        self.print_main(
            f"{n} process{'es' * (n > 1)} on {accelerator.device.type}"
            f"{', weights sharded' * self.shard}; weights and AdamW float32, passes "
            f"{'bfloat16' if accelerator.mixed_precision == 'bf16' else 'float32'}"
            f"{', gradient checkpointing' * self.recompute}")
        accelerator.wait_for_everyone()

    def _identity(self) -> str:
        """What says which model this is, once it is known to be usable."""
        if self.settings.method == "chat":
            return f"{self.base} {self.settings.model_name}"
        try:
            models.check_model(self.base, self.settings.max_tokens)
        except SettingsError as error:
            if self.settings.model in BUILT_IN:
                raise SettingsError(f"{error}; or delete this folder: it is made again") from None
            raise
        if not self.phases and (wrong := self.first_says(  # one rank holds the model meanwhile
                lambda: models.wrong_numbers(self.base, self.settings.max_tokens))):
            raise SettingsError(wrong)
        return self.first_says(lambda: models.identity(self.base))

    def _try_environment(self) -> None:
        """Counts its tasks and, once the folder is locked, begins one: faults show at once."""
        s, env = self.settings, self.make_env()
        found = survey(s, env)
        self.splits, self.about = found.splits, found.record()
        self.training, self.left_out = found.training, found.left_out
        self.print_main(found.counts)
        if self.main:  # alone: a WebShop server must not load its catalogue twice at once
            if s.method == "evolve" and is_endpoint(s.explorer) and not (
                    self.path / "result.json").exists():
                _, took = explorer_of(s)([{"role": "user", "content": "Answer with: ok"}], tries=4)
                self.print_main(f"explorer: {s.explorer_model} answers; {took['prompt_tokens']} "
                                f"tokens read, {took['completion_tokens']} written")
            self.take()
            env.waits = ()
            for task in found.tried:
                env.reset(task)
        env.close()
        self.accelerator.wait_for_everyone()

    def _check_openings(self) -> None:
        if self.main:
            s, env = self.settings, self.make_env()
            experts = envs.read_experts(s.experts, env)[:s.train_tasks or None]
            check_openings(self, [e for e in experts if e[0] not in self.left_out])
        self.accelerator.wait_for_everyone()

    # ----------------------------------------------------------------- what the phases work with

    def make_env(self) -> envs.Env:
        """The run's environment, with the tasks that were made during the run."""
        s = self.settings
        env = envs.make(s.env, s.view, **options_of(s))
        for row in self.added_tasks():
            env.add(row["task"])
        return env

    def smith(self):
        """Who makes tasks in an environment of its own; see `worlds/`."""
        return self.make_env().smith()

    def added_tasks(self) -> list[dict]:
        return files.made_tasks(self.path, self.phases)

    def add_tasks(self, out: Path, tasks: list[dict]) -> list[str]:
        """Writes a phase's tasks.jsonl: from then on every environment of the run has them too.

        Returns their ids. ValueError, naming what is wrong, for one that the environment refuses.
        """
        with closing(self.make_env()) as env:
            ids = [env.add(task) for task in tasks]
        self.write_jsonl(out, [dict(id=id, task=task) for id, task in zip(ids, tasks)])
        return ids

    def tasks(self, split: str) -> list[str]:
        """The evaluated tasks of a split."""
        with closing(self.make_env()) as env:
            return env.tasks(split)[:self.settings.eval_tasks or None]

    def definitions(self, tasks: list[str]) -> list:
        """What the tasks are."""
        with closing(self.make_env()) as env:
            return [env.find(task) for task in tasks]

    def seed(self, *names) -> int:
        return files.seed_of(self.settings.seed, *names)

    def rng(self, *names) -> random.Random:
        return random.Random(self.seed(*names))

    def encoder(self) -> dpo.Encoder:
        return dpo.Encoder(AutoTokenizer.from_pretrained(self.base))

    def agent(self, agent: str, i: int) -> Path | str:
        """The folder of an agent's checkpoint after iteration i; 0 is after SFT.

        Where there is none before training, the base model's, which may be a name on the hub.
        """
        s = self.settings
        if s.method == "evaluate" or not i and s.method in EVOLVING and s.warm_start == "none":
            return self.base
        return self.path / (f"iter{i}/{agent}-agent" if i else f"sft-{agent}")

    # ------------------------------------------------------------------------------- training

    def load(self, folder):
        """The model in a folder, ready to train on all ranks; one of them reads the weights."""
        return sharding.shard_model(self.accelerator, models.load_model(folder, data=self.main),
                                    self.shard, self.recompute)

    def add_reference(self, model, groups: list[dpo.Group]) -> None:
        with self.bar("reference", sum(g.tokens for g in groups), "token") as progress:
            dpo.add_reference(self.accelerator, model, groups, self.settings.tokens_per_forward,
                              progress)

    def never_drawn(self) -> list[int]:
        """Ids that agents of this run never sample, some of which may only pad the embedding."""
        config = AutoConfig.from_pretrained(self.base).get_text_config()
        return self.encoder().never_drawn(config.vocab_size)

    def log_probs(self, model, groups: list[dpo.Group]) -> list[list[float]]:
        """log pi(e|u) of the groups' trajectories, in nats."""
        copies = [replace(g) for g in groups]
        self.add_reference(model, copies)
        return [g.reference for g in copies]

    def fit(self, model, before, out: Path, epochs, objective, normaliser, *, lr, warmup,
            schedule, beta=None) -> dict:
        """Trains a model of `load`, which came from folder `before`, into folder `out`.

        beta: DPO's, where there are pairs, whose margins are logged before and after.
        Returns numbers for the log. A checkpoint inside the phase is taken up again.
        """
        s, accelerator, phase, last = self.settings, self.accelerator, self.running, {}
        self.check_saving(model, before)
        self._warn_of_equal_agents(epochs)
        self.log("precision", phase=phase, processes=accelerator.num_processes, shards=self.shard,
                 **sharding.dtypes(accelerator, model))

        def log(event):
            last.update(event)
            self.log("train", phase=phase, **event)

        watched = margins.watched(epochs, s.margins)
        # With another reference than the agent itself, its own log-probabilities are not known yet.
        entered = ([g.reference for g in watched] if s.reference == "phase" or not watched else
                   self.log_probs(model, watched))
        checkpoint = self.checkpoint()
        tokens = sum(g.tokens for epoch in epochs for batch in epoch for g in batch)
        with self.bar(phase, tokens, "token") as progress:
            dpo.fit(accelerator, model, epochs, objective, normaliser, lr=lr, warmup=warmup,
                    schedule=schedule, weight_decay=s.weight_decay, max_grad_norm=s.max_grad_norm,
                    tokens_per_forward=s.tokens_per_forward, log=log, progress=progress,
                    checkpoint=checkpoint)
        if checkpoint.resumed_at:
            self.print_main(f"{phase} went on after step {checkpoint.resumed_at}")
        left = self.log_probs(model, watched) if watched else []
        for when, policy in (("before", entered), ("after", left)) if watched else ():
            self.log("margins", phase=phase, when=when,
                     pairs=margins.of_pairs(watched, policy, beta, s))
        self.save(model, before, out)
        checkpoint.remove()
        return dict(steps=last["step"], tokens=tokens, loss=last["loss"])

    def fit_step(self, model, optimizer, batches: list, objective, lr: float,
                 names: tuple[str, ...]) -> list[dict]:
        """One optimiser step for each batch, moments kept; what `dpo.fit` logs of each."""
        s, events = self.settings, []
        dpo.fit(self.accelerator, model, [batches], objective, dpo.count_action_tokens, lr=lr,
                warmup=0.0, schedule="constant", weight_decay=s.weight_decay,
                max_grad_norm=s.max_grad_norm, tokens_per_forward=s.tokens_per_forward,
                log=events.append, optimizer=optimizer, names=names)
        return events

    def checkpoint(self) -> Checkpoint:
        """The state inside the running phase."""
        return Checkpoint(self.accelerator, self.path / "checkpoint", self.inputs(),
                          self.settings.checkpoint_minutes)

    def whole(self, model):
        """A model of `load` as it plays, whole on each rank."""
        def make():
            bf16 = self.accelerator.mixed_precision == "bf16"
            folder = self.accelerator.unwrap_model(model).name_or_path
            return models.load_model(folder, torch.bfloat16 if bf16 else torch.float32, data=False)

        return sharding.whole(self.accelerator, model, make)

    def inputs(self) -> str:
        """Identifies the running phase and what it starts from: the phases before it, by hash."""
        done = {name: recorded["sha256"] for name, recorded in self.phases.items()}
        return self.first_says(lambda: files.hashed([self.running, done]))

    def save(self, model, before, out: Path) -> None:
        """The model and the tokenizer it came with, as `from_pretrained` reads them."""
        sharding.save(self.accelerator, model, out)
        if self.main:
            AutoTokenizer.from_pretrained(before).save_pretrained(out)

    def check_saving(self, model, before) -> None:
        """Saves the first model once before it trains: what cannot be saved is known at once."""
        if self.saving_works:
            return
        trial = self.path / "trial"
        if self.main:
            numbers = sum(p.numel() for p in model.parameters())
            needed = sum(disk_bytes(self.settings, numbers))
            if needed > (free := shutil.disk_usage(self.path).free):
                raise SettingsError(f"--out {self.path}: {free / 1e9:.1f} GB are free, and the "
                                    f"run's checkpoints take {needed / 1e9:.1f} GB; give a folder "
                                    "on another disk")
        self.save(model, before, trial)
        if self.main:
            models.check_copy(before, trial)
            shutil.rmtree(trial)
        self.saving_works = True
        self.accelerator.wait_for_everyone()

    def _warn_of_equal_agents(self, epochs) -> None:
        """Before a second agent's SFT: another seed orders its batches, and one has no order."""
        if (re.fullmatch("sft-(?!target).*", self.running)
                and all(len(batches) == 1 for batches in epochs)):
            experts = len(epochs[0][0])
            self.log("equal agents", phase=self.running, experts=experts)
            self.print_main(f"{self.running}: all {experts} experts are in one batch, so that this "
                            "agent is the target but for rounding; raise --train-tasks, or give "
                            f"a --sft-batch below {experts}")

    def keep_agent(self, before: Path, out: Path, why: str) -> dict:
        """A training phase that has nothing to learn from: the agent is copied."""
        self.print_main(f"{why}, which stays as it is")
        if self.main:
            shutil.copytree(before, out)
        return dict(steps=0)

    def take_failure_agent(self, out: Path) -> dict:
        """The last failure agent of the run --failure-from, in place of Eq. (3)-(5)."""
        if self.main:
            shutil.copytree(self.find_failure_agent(), out)
        return {}

    def find_failure_agent(self) -> Path:
        """SettingsError if that run has none, or another tokenizer: its tokens train the target."""
        source = Path(self.settings.failure_from)
        found = sorted(source.glob("iter*/failure-agent"), key=lambda p: int(p.parent.name[4:]))
        if not found:
            raise SettingsError(f"--failure-from {source}: no iter<i>/failure-agent in it; give "
                                "the folder of a run of --method coevolve")
        models.check_model(found[-1], self.settings.max_tokens)
        theirs, ours = (AutoTokenizer.from_pretrained(name) for name in (found[-1], self.base))
        if (theirs.get_vocab(), theirs.chat_template) != (ours.get_vocab(), ours.chat_template):
            raise SettingsError(f"--failure-from {source}: its tokenizer is not that of --model "
                                f"{self.settings.model}; give a run that started from this model")
        return found[-1]
