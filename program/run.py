"""A run: what its phases work with. Which there are, and in which order, is in `coevolve.py`."""

import json
import random
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from accelerate import Accelerator

import envs
from harness import files, reuse
from harness.folder import Folder
from harness.settings import EVOLVING, Settings, is_endpoint, options_of, tokens_per_forward
from program.tasks import TRAINED_ON, check_openings, marks, survey, trained_on, trains
from training.trainer import Trainer


class Run:
    """A folder with tasks, a base model and a machine to train on."""

    def __init__(self, settings: Settings, accelerator: Accelerator):
        """Takes the folder, new or to go on in; SettingsError if it cannot be this run's. The base
        model, which may take minutes, comes last."""
        self.settings = settings = replace(settings, tokens_per_forward=tokens_per_forward(
            settings, accelerator.device.type == "cuda"))
        self.accelerator = accelerator
        self.main = accelerator.is_main_process
        self.folder = Folder(settings, accelerator)
        self.log = self.folder.log
        self.tasks = RunTasks(settings, self.folder)
        if self.main:  # alone: a WebShop server must not load its catalogue twice at once
            if not (self.folder.path / "result.json").exists():
                self._ask_explorer()
            self.folder.take()
            self.tasks.try_out()
        accelerator.wait_for_everyone()
        before = self.folder.find_earlier()
        if settings.experts and trains(settings) and "experts.jsonl" not in self.folder.phases:
            self.folder.on_main(lambda: check_openings(self, self.tasks.experts()))
        self.trainer = Trainer(settings, self.folder, self.tasks)
        self.folder.record(before, self.trainer.identity, self.tasks.about)
        self.folder.ingredients = self.folder.on_main(lambda: reuse.ingredients(
            self.folder, self.trainer.identity, [self.trainer.shard, self.trainer.recompute]))
        accelerator.wait_for_everyone()

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

    def _ask_explorer(self) -> None:
        """A word of the explorer's endpoint: address, name, key and temperature are tried."""
        if self.settings.method in EVOLVING and is_endpoint(self.settings.explorer):
            from playing.endpoint import explorer_of

            _, took = explorer_of(self.settings)(
                [{"role": "user", "content": "Answer with: ok"}], tries=4)
            self.log.say(f"explorer: {self.settings.explorer_model} answers; tokens: "
                         f"{took['prompt_tokens']} read, {took['completion_tokens']} written")


class RunTasks:
    """A run's environment, its splits, and the tasks that were made during the run."""

    def __init__(self, settings: Settings, folder: Folder):
        self.settings, self.folder = settings, folder
        self.tried_on = []  # proposals that the running phase plays
        with closing(self.make_env()) as env:
            found = survey(settings, env)  # what a run lacks shows at once
        self.splits, self.about = found.splits, found.about
        self.training, self.left_out, self.tried = found.training, found.left_out, found.tried
        folder.log.say(found.counts)

    def try_out(self) -> None:
        """Begins an episode of each kind, so that an environment's faults show at once."""
        with closing(self.make_env()) as env:
            env.waits = ()
            for task in self.tried:
                env.reset(task)

    def make_env(self):
        """An environment with the tasks that were made during the run."""
        s = self.settings
        env = envs.make(s.env, s.view, **options_of(s))
        for task in [*(row["task"] for row in self.added()), *self.tried_on]:
            env.add(task)
        return env

    def experts(self) -> list[tuple[str, list[dict], float]]:
        """(task, messages, reward) of --experts FILE, without those of evaluated tasks."""
        s = self.settings
        with closing(self.make_env()) as env:
            return [e for e in envs.read_experts(s.experts, env)[:s.train_tasks or None]
                    if e[0] not in self.left_out]

    def added(self) -> list[dict]:
        return files.made_tasks(self.folder.path, self.folder.phases)

    def add(self, out: Path, tasks: list[dict], left: list[str]) -> list[str]:
        """Writes a phase's tasks.jsonl: from then on every environment of the run has them too.
        Their ids; left: those that nobody trains on any more. ValueError, naming what is wrong, for
        one that the environment refuses."""
        with closing(self.make_env()) as env:
            ids = [env.add(task) for task in tasks]
        self.folder.write_jsonl(out, [*(dict(id=id, task=task) for id, task in zip(ids, tasks)),
                                      *(dict(id=id, left=True) for id in left)])
        return ids

    def record(self, before, out: Path) -> None:
        """Writes into an agent's folder what it and `before`, from which it came, were trained on:
        later runs refuse to evaluate it on that, wherever the folder has been moved."""
        with closing(self.make_env()) as env:
            own = [*self.training, *(row["id"] for row in self.added())]
            known = trained_on(before).union(*(marks(env, task) for task in own))
        files.write_text(out / TRAINED_ON, json.dumps(dict(marks=sorted(known))))

    def of_split(self, split: str) -> list[str]:
        """The evaluated tasks of a split."""
        with closing(self.make_env()) as env:
            return env.tasks(split)[:self.settings.eval_tasks or None]

    def definitions(self, tasks: list[str]) -> list:
        with closing(self.make_env()) as env:
            return [env.find(task) for task in tasks]

    def task_generator(self):
        """Who makes tasks in an environment of its own; see `worlds/`."""
        return self.make_env().task_generator()
