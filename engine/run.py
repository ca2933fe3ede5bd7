"""A run: its folder, whose phases are done once, and its models as they learn and play.

`Run` is what the loops and phases of `coevolve.py` are given. `once` does a phase, `load`,
`log_probs` and `fit` train a model, `play` lets one play.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

import dpo
from common import files
from common.files import (
    file_hash,
    files_in,
    hash_of,
    input_key,
    is_edited,
    plain,
    read_json,
    write_json,
)
from common.settings import UsageError, check_same
from dpo import Group, Trajectory
from engine import branch, machine, models, prefix_sharing, rollouts, self_check
from engine.code import code_differences, code_now
from engine.console import sentence, visible
from engine.experts import check_not_trained_on
from engine.forward_passes import distributed_log_probs, fits_in_round
from engine.machine import Machine
from engine.records import check_ids, named, write
from engine.sampling import TokenSampler
from engine.tracking import Tracking
from environments import make

# How a model is asked with which nothing is wrong, see `engine.self_check`.
ALL_BACKENDS = dict(replies="kv_cache", passes=[*self_check.PASS_BACKENDS])


class Run:
    """A run's folder, machine and models. A run that was stopped goes on after its last phase."""

    def __init__(self, settings, options, beside: bool = False,
                 make_env: Callable | None = None):
        """
        Args:
            settings: All of them.
            options: Those of the environment.
            beside: Whether pi_ref stays beside a model while that is trained.
            make_env: What makes environments, if not the settings do.
        """
        s = settings
        self.settings = s
        self.options = options  # of the environment
        self.folder = Path(s.out or f"runs/{s.env}-{s.method}-s{s.seed}")
        self.name = ""          # the output of the running phase
        self.done = {}          # output -> what is recorded of it
        self.names = {}         # output -> the names of its trajectories, see `engine.records`
        self.recorded = {}      # the same by an earlier process, until the output is asked for
        self.machine = Machine(s)
        self.main = self.machine.main
        self.make_env = make_env or partial(make, s.env, s.view, **vars(options))
        self.env = self.make_env()
        self.splits = {"test": self.env.test_splits, "validation": ("validation",),
                       "all": ("validation", *self.env.test_splits)}[s.eval_splits]
        self.open_base()
        self.machine.plan(s, self.config, self.parameters, beside)
        self.open_folder()

    def open_base(self) -> None:
        """Reads what is to be known of the model that training starts from, but its weights."""
        s = self.settings
        self.base = models.folder_of(s.model)
        self.config = models.read_config(self.base)
        self.parameters = models.parameter_count(self.config)
        self.encoder = models.read_encoder(self.base)
        self.fingerprint = self.encoder.fingerprint()
        if s.failure_from:
            check_reads_alike(self, Path(s.failure_from))
        check_not_trained_on(self)

    def given_models(self) -> dict[str, Path]:
        """Returns the models that the run begins from, by their flags."""
        given = self.settings.failure_from
        return {"--model": self.base} | ({"--failure-from": Path(given)} if given else {})

    def open_folder(self) -> None:
        """Opens the folder, which is new or that of a run with the same settings; else Refused."""
        s = self.settings
        config = self.folder / "config.json"
        phases = self.folder / "phases.json"
        now = vars(s) | vars(self.options)
        self.code = code_now() if self.main else None  # the first rank records it
        if self.main:
            check_folder(self.folder)
            # Which stay the same when the run goes on.
            ways = None if config.exists() else self.run_backends()
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = files.lock(self.folder)
            if ways and not config.exists():
                taken = branch.take(self, s.branch, now) if s.branch else {}
                write_json(config, dict(settings=now, backends=ways, code=self.code, **taken))
        self.machine.gather([])  # the first may fetch a model for longer than others' patience
        begun = read_json(config)
        if "settings" not in begun:
            raise UsageError(f"--out {self.folder}: its config.json is no run's; give another folder")
        if "backends" not in begun:
            raise UsageError(f"--out {self.folder}: an older version of this program made this run; "
                             "give another folder, or use that version")
        check_same(begun["settings"], now, type(s))
        self.backends = begun["backends"]
        # On a CPU the products are most of the time, else starting them is.
        alone = self.machine.ranks == 1 and self.machine.device.type == "cpu"
        self.shares = alone and "prefix_sharing" in self.backends["passes"]
        if self.backends != ALL_BACKENDS:
            self.print(f"{self.base}: {self.backends}")

        # What is gone is not recorded any more.
        rows = read_json(phases) if phases.exists() else begun.get("taken", {})
        self.recorded = {output: row for output, row in rows.items()
                         if (self.folder / output).exists()}
        self.machine.wait()
        if self.main:
            self.begun = begun  # config.json
            self.note(settings=begun["settings"] | now)
            write_json(phases, self.recorded)
            if "code" in begun and begun["code"] != self.code:
                changed = ", ".join(code_differences(begun["code"], self.code)) or "its commit"
                self.print(f"{self.folder}: the code has changed since: {changed}")
        self.tracking = Tracking(self.machine.accelerator, self.folder, s.track, now)

    def note(self, **facts) -> None:
        """Writes facts into config.json, unless it has them."""
        if self.main and self.begun != self.begun | facts:
            self.begun |= facts
            write_json(self.folder / "config.json", self.begun)

    def run_backends(self) -> dict:
        """How the models of the run have to be asked, see `engine.self_check`."""
        found = []
        for flag, model in self.given_models().items():
            with models.named(flag):
                found.append(model_backends(self, model))
        replies = max((ways["replies"] for ways in found), key=self_check.REPLY_BACKENDS.index)
        passes = [way for way in self_check.PASS_BACKENDS if all(way in ways["passes"] for ways in found)]
        return dict(replies=replies, passes=passes)

    # ................................................................................. phases

    def once(self, output: str, phase: Callable, *inputs, **parameters) -> Path:
        """Does a phase, unless its output is there and was made alike: by the same phase, with the
        same parameters, from files of the same bytes and agents made alike. An output that was
        edited since is used as it is, and its record says `edited`.

        Args:
            output: The name of the file or folder in the run's folder.
            phase: phase(run, temporary path, *inputs, **parameters) writes it; returns numbers.
            inputs: Paths, or lists or dictionaries of them.
            parameters: Numbers and names.

        Returns:
            The path of the output.

        Raises:
            Refused: The output was asked for before; an input is no path; a parameter or a number
                cannot be written as JSON; the phase wrote nothing or returned no dict; an edited
                input has ids that are not in the vocabulary.
        """
        path = self.folder / output
        self.name = output
        who = f"{phase.__name__}, for the output {output}"
        if output in self.done:
            raise UsageError(f"{who}: this run has made it already, by {self.done[output]['function']}; "
                          "give each call of once an output of its own")
        agents = {self.folder / name: row["cache_key"] for name, row in self.done.items()}
        with one_line_of(who):
            values = plain(parameters)
            if commit := models.commit_of(str(self.base)):  # a hub name's files can change
                agents[self.base] = commit
            made_from = input_key(inputs, agents)
        cache_key = hash_of([phase.__name__, made_from, values, self.fingerprint])
        row = self.recorded.pop(output, None)
        if row:
            if row["cache_key"] == cache_key:
                row.pop("edited", None)
                if is_edited(path, row):
                    row["edited"] = True
                    self.print(f"{output} was edited: it is used as it is, and its recorded numbers "
                             "are those from before")
                self.done[output] = row
                return path
            self.print(f"{output} is made again: what it is made from is another")

        self.note(code=self.code, finished=False)
        check_edits(self, inputs)
        started = time.perf_counter()
        temporary = path.with_name(f"{path.name}.tmp")
        self.machine.wait()
        if self.main:
            files.remove(self.folder / "result.json")  # the run is not finished any more
            path.parent.mkdir(exist_ok=True)
            files.remove(temporary)
        self.machine.wait()
        numbers = phase(self, temporary, *inputs, **parameters)
        with one_line_of(who):
            numbers = checked(numbers, temporary, self.main)
        self.machine.wait()

        # The output appears by renaming, so that a run that is stopped leaves none half made.
        seconds = round(time.perf_counter() - started, 1)
        row = dict(function=phase.__name__, cache_key=cache_key) | values | dict(seconds=seconds) | numbers
        self.done[output] = row
        if self.main:
            files.remove(path)
            os.replace(temporary, path)
            if path.is_file():
                row["hash"] = file_hash(path)  # from which `is_edited` sees edits
            write_json(self.folder / "phases.json", self.done | self.recorded)
        self.print(sentence(output, row))
        self.tracking.log("phase", output, row)
        self.machine.wait()
        return path

    def close(self) -> None:
        """Leaves the folder of a run that has ended. What an earlier process recorded of phases
        that this run has not asked for is forgotten: another loop has made them."""
        if self.main:
            write_json(self.folder / "phases.json", self.done)
            self.note(finished=True)
            self.lock.release()

    def print(self, text: str) -> None:
        if self.main:
            tqdm.write(visible(text))

    def bar(self, total: int | None, items: Iterable | None = None):
        """A progress bar of the running phase, where somebody looks at it. It advances over items,
        if they are given, whose number may be unknown (None)."""
        hidden = None if self.main else True  # None: where the output is no terminal
        return tqdm(items, total=total, desc=self.name, leave=False, disable=hidden, delay=2)

    # ............................................................................... training

    def load(self, agent: Path):
        """The model in a folder, ready to train."""
        with reading(self, agent):
            model = models.load(self.machine.accelerator, agent, self.machine.recompute,
                                self.machine.shard)
        self.attention = model.config._attn_implementation  # its own, with which it plays
        if self.shares:
            model.set_attn_implementation("prefix_sharing")
        return model

    def log_probs(
        self,
        model,
        trajectories: list[Trajectory],
        logits_processor: Callable = dpo.in_fp32,
    ) -> torch.Tensor:
        """log pi of all action tokens of some trajectories, (A,), in nats; scores: what pi is, as
        in `dpo.token_log_probs`."""
        if self.shares:
            return prefix_sharing.log_probs(model, trajectories, self.shared_tokens, logits_processor)
        tokens = self.machine.tokens_per_forward if "padded" in self.backends["passes"] else 0
        return distributed_log_probs(self.machine.accelerator, model, trajectories, tokens, logits_processor)

    @property
    def shared_tokens(self) -> int:
        """Tokens of a forward pass with prefix sharing, of which about a quarter is distinct."""
        return 4 * self.machine.tokens_per_forward

    def fits(self, trajectories: list[Trajectory]) -> bool:
        """Returns True if the activations of trajectories fit in the memory of all ranks."""
        if self.shares:
            return dpo.fits_in_pass(trajectories, self.shared_tokens)
        return fits_in_round(trajectories, self.machine.tokens_per_forward, self.machine.ranks)

    def fit(
        self,
        model,
        out: Path,
        steps: list[list[Group]],
        rates: list[float],
        loss: Callable,
        denominator: Callable,
        log_probs: Callable | None = None,
    ) -> dict:
        """Trains a model of `load`, and writes it, with a line for each step in train.jsonl and for
        each pair in margins.jsonl. The arguments are those of `dpo.train`; log_probs is the run's,
        unless told otherwise."""
        s = self.settings
        with one_line_of(self.name):  # what is wrong with trajectories may be an edit
            dpo.check_trainable(model, steps)
        optimizer = dpo.adamw(model, s.weight_decay)
        lines = []
        with self.bar(len(steps)) as progress:
            for line in dpo.train(model, optimizer, steps, rates, loss, denominator,
                                  log_probs or self.log_probs, s.max_grad_norm,
                                  self.fits):
                lines.append(line)
                self.tracking.log("train", self.name, line)
                progress.update()
        models.save(self.machine.accelerator, model, self.encoder, out)
        write(self, out / "train.jsonl", lines)
        margins = margins_of(steps)
        if margins:
            write(self, out / "margins.jsonl", margins)
        tokens = sum(len(t.ids) for batch in steps for t in dpo.trajectories_of(batch))
        losses = {}  # the loss and its terms, in the first step and in the last
        for name in lines[0]:
            if name not in ("step", "lr", "norm", "kinds"):
                losses |= {f"first_{name}": lines[0][name], name: lines[-1][name]}
        return dict(steps=len(lines), **losses, tokens=tokens)

    def copy_agent(self, agent: Path, out: Path) -> dict:
        """Copies an agent that stays as it is, but for the log of what it learned before."""
        if self.main:
            shutil.copytree(agent, out, ignore=shutil.ignore_patterns("*.jsonl"))
        return dict(steps=0)

    # ................................................................................ playing

    def play(
        self,
        agent,
        begun: list[Trajectory],
        temperature: float,
        make_env: Callable | None = None,
    ) -> list[Trajectory]:
        """Plays episodes, each rank a share of them.

        Args:
            agent: The folder of the model that plays, or a model that is being trained.
            begun: Trajectories with task, agent, iteration, rollout and seed, which get the rest.
            temperature: That of sampling; 0 is greedy.
            make_env: Makes environments that know other tasks than the run's.

        Returns:
            The trajectories in the order given; all ranks have all of them.
        """
        model = self.inference_copy(agent)
        share = begun[self.machine.rank::self.machine.ranks]
        slots = self.slots(model)
        with self.bar(len(share)) as progress:
            rollouts.play(make_env or self.make_env, self.encoder, share,
                         self.make_generator(model, temperature, slots), slots, self.settings.max_tokens,
                         ended=lambda t: progress.update())
        if model is agent and self.shares:
            model.set_attn_implementation("prefix_sharing")
        order = {(t.task, t.rollout): n for n, t in enumerate(begun)}
        return sorted(self.machine.gather(share), key=lambda t: order[t.task, t.rollout])

    def inference_copy(self, agent):
        """A model as it plays, whole on each rank; of a folder, or as it is now in training."""
        dtype = torch.bfloat16 if self.machine.bf16 else torch.float32
        if not isinstance(agent, Path):
            model = models.make_inference_copy(agent, dtype)
            model.set_attn_implementation(self.attention)
            return model
        with reading(self, agent):
            return models.read_model(agent, dtype, self.machine.device).eval()

    def slots(self, model) -> int:
        """How many episodes are played side by side on a rank: on a GPU those that fit it."""
        s = self.settings
        if self.machine.device.type != "cuda":
            return s.slots or (64 if self.parameters < machine.SMALL else 8)
        models.collect()
        longest = s.max_tokens + s.max_new_tokens
        fitting = machine.slots_that_fit(self.config, machine.free_memory(), longest,
                                         self.machine.bf16, self.machine.tokens_per_forward // 2)
        return min(s.slots or fitting, fitting)

    def make_generator(self, model, temperature: float, slots: int) -> Callable:
        """What replies to conversations: [(trajectory, random numbers)] -> [(ids, log_probs)]."""
        s = self.settings
        draw = TokenSampler(self.encoder.sampler(temperature), self.encoder, self.env.stops)
        return self_check.make_generator(self.backends["replies"], model, draw, slots, s.max_tokens,
                               s.max_new_tokens, self.machine.tokens_per_forward // 2)


def check_edits(run: Run, inputs) -> None:
    """Raises Refused if an output that was edited has ids that are not in the vocabulary."""
    edited = [run.folder / output for output, row in run.done.items() if "edited" in row]
    for file in files_in(inputs):
        if file in edited:
            check_ids(file, run.encoder.vocabulary_size)


def checked(numbers, out: Path, main: bool) -> dict:
    """Returns a phase's numbers as JSON has them. Raises TypeError or ValueError if JSON has none
    such, if they are no dict, or if the phase wrote nothing."""
    if not isinstance(numbers, dict):
        raise TypeError(f"it returned {numbers!r:.60}; return a dict of numbers, or {{}}")
    if main and not out.exists():
        raise ValueError("it wrote nothing; write its second argument, a path")
    return plain(numbers)


def margins_of(steps: list[list[Group]]) -> list[dict]:
    """What training saw of each pair first and last: [chosen, rejected, margin] in nats."""
    rows = []
    for pair in {id(pair): pair for batch in steps for pair in dpo.pairs_of(batch)}.values():
        if pair.history:
            rows.append(named(pair) | dict(first=pair.history[0], last=pair.history[-1]))
    return rows


# ------------------------------------------------------------------------- what a run asks first


def check_folder(folder: Path) -> None:
    """Refused where a folder has something else than a run, whose outputs would replace it."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--out {folder}: it is a file; give a folder")
    names = {path.name for path in folder.glob("*")}
    stopped = "lock" in names and "phases.json" not in names  # before it had a config
    if names and "config.json" not in names and not stopped:
        raise UsageError(f"--out {folder}: {min(names)} is in it, and no config.json of a run; give "
                      "another folder")


def check_reads_alike(run: Run, agent: Path) -> None:
    """Refused where an agent of a folder has other tokens than the run, which writes its ids."""
    with models.named("--failure-from"):
        other = models.read_encoder(agent).fingerprint()
    if other != run.fingerprint:
        raise UsageError(f"--failure-from {agent}: its tokenizer or chat template is not that of "
                      f"--model {run.base}, by which episodes are written; give an agent of that "
                      "model")


def model_backends(run: Run, model: Path) -> dict:
    """How a model has to be asked, see `engine.self_check`."""
    if model == models.MODELS["tiny"]:
        return ALL_BACKENDS
    device = run.machine.device
    longest = run.settings.max_tokens
    positions = models.positions_of(run.config)
    if longest > positions:
        run.print(f"--model {model} has {positions:,} positions: longer episodes are read as it "
                f"never learned to; lower --max-tokens {longest}")
    if device.type == "cuda" and not machine.fits_in_fp32(run.config, run.parameters,
                                                          machine.free_memory(), longest):
        device = "cpu"
    read = models.read_model(model, device=device).eval()
    ways = self_check.select_backends(read, run.encoder, longest)
    models.check_can_be_saved(read, run.encoder)
    return ways


@contextmanager
def reading(run: Run, agent):
    """Says of an agent of the run that cannot be read what can be done; another model's error
    stays as it is."""
    try:
        yield
    except UsageError as error:
        if run.folder not in Path(agent).parents:
            raise
        cause = str(error).removeprefix(f"--model {agent}: ")
        raise UsageError(f"{agent}: this agent of the run is damaged; delete the folder, and the same "
                      f"command makes it again; the cause: {cause}") from error


@contextmanager
def one_line_of(who: str):
    """Turns errors of what a phase was given or returned into one line that names the phase."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise UsageError(f"{who}: {error}") from error
