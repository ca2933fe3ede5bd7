"""The `Run` class: the folder of a run, its cached phases, and training and inference.

The training loops and the phases in `coevolve.py` receive a `Run` object. Its main methods:

- `once` runs a phase, or reuses the phase's output if it already exists. An interrupted run resumes
  with the same calls of `once`.
- `load`, `log_probs` and `fit` train a model.
- `play` runs episodes with a model.
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

# The backends for a model for which all backends in `engine.self_check` are correct. `replies` is
# the backend that generates replies. `passes` lists the backends for forward passes in training.
ALL_BACKENDS = dict(replies="kv_cache", passes=[*self_check.PASS_BACKENDS])


class Run:
    """The folder, the machine and the models of a run.

    To resume an interrupted run, create a `Run` with the same settings. The new object reuses
    the outputs of all finished phases, and restarts the phase that was interrupted.
    """

    def __init__(
        self,
        settings,
        options,
        keeps_reference: bool = False,
        group: int = 1,
        make_env: Callable | None = None,
    ):
        """
        Args:
            settings: The settings of the run.
            options: The settings that only this environment has.
            keeps_reference: Whether the reference model, pi_ref, stays in memory during training.
            group: The number of trajectories in the largest group, see `Machine.plan`.
            make_env: A function that creates an environment. The default creates the environment
                that the settings name.
        """
        s = settings
        self.settings = s
        self.options = options
        self.folder = Path(s.out or f"runs/{s.env}-{s.method}-s{s.seed}")
        # The name of the output that the current phase writes.
        self.name = ""
        # Maps each output that this process has made or reused to its record in phases.json.
        self.done = {}
        # Maps each output to a dict {trajectory name: token ids}, see `engine.records`.
        self.ids_by_name = {}
        # Maps outputs of an earlier process to their records in phases.json. A call of `once`
        # removes the record of its output from this dict.
        self.recorded = {}
        self.machine = Machine(s)
        self.main = self.machine.main
        self.make_env = make_env or partial(make, s.env, s.view, **vars(options))
        self.env = self.make_env()
        self.splits = {"test": self.env.test_splits, "validation": ("validation",),
                       "all": ("validation", *self.env.test_splits)}[s.eval_splits]
        self.open_base()
        self.machine.plan(s, self.config, self.parameters, keeps_reference, group)
        self.open_folder()

    def open_base(self) -> None:
        """Reads the config and the tokenizer of the base model. The weights are not read here.

        Raises UsageError if the model in --model or --failure-from cannot be used.
        """
        s = self.settings
        self.base = models.folder_of(s.model)
        self.config = models.read_config(self.base)
        self.parameters = models.parameter_count(self.config)
        self.encoder = models.read_encoder(self.base)
        self.fingerprint = self.encoder.fingerprint()
        if s.failure_from:
            check_same_tokenizer(self, Path(s.failure_from))
        check_not_trained_on(self)

    def given_models(self) -> dict[str, Path]:
        """Returns the initial models of the run as a dict {command-line flag: path}."""
        given = self.settings.failure_from
        return {"--model": self.base} | ({"--failure-from": Path(given)} if given else {})

    def open_folder(self) -> None:
        """Creates the folder of a new run, or opens the existing folder to resume a run.

        Raises UsageError if the folder contains something other than a run, or a run with different
        settings. Only a few settings may change when a run is resumed, see `check_same`.
        """
        s = self.settings
        config = self.folder / "config.json"
        phases = self.folder / "phases.json"
        now = vars(s) | vars(self.options)
        # Only the main rank needs the code version, because only this rank writes config.json.
        self.code = code_now() if self.main else None

        # 1. Create the folder of a new run, and select its backends. A resumed run uses the
        #    backends that are stored in its config.json.
        if self.main:
            check_folder(self.folder)
            backends = None if config.exists() else self.run_backends()
            self.folder.mkdir(parents=True, exist_ok=True)
            self.lock = files.lock(self.folder)
            if backends and not config.exists():
                branched = branch.take(self, s.branch, now) if s.branch else {}
                write_json(config, dict(settings=now, backends=backends, code=self.code,
                                        **branched))
        # The other ranks wait here, because the main rank may have to download a model. They wait
        # with `gather`, because its timeout is longer than the timeout of `wait`.
        self.machine.gather([])

        # 2. Read config.json, and check the settings.
        before = read_json(config)
        if "settings" not in before:
            raise UsageError(f"--out {self.folder}: its config.json is not that of a run; give "
                             "another folder")
        if "backends" not in before:
            raise UsageError(f"--out {self.folder}: an older version of this program made this "
                             "run; give another folder, or use that version")
        check_same(before["settings"], now, type(s))
        self.backends = before["backends"]
        # Prefix sharing is used on a CPU only, because it saves matmuls. Matmuls take most of the
        # time on a CPU. On a GPU, most of the time is spent on launching kernels.
        single_cpu = self.machine.ranks == 1 and self.machine.device.type == "cpu"
        self.shares_prefixes = single_cpu and "prefix_sharing" in self.backends["passes"]
        if self.backends != ALL_BACKENDS:
            self.print(f"{self.base}: {self.backends}")

        # 3. Read the records in phases.json. Skip outputs whose files were deleted.
        rows = read_json(phases) if phases.exists() else before.get("taken", {})
        self.recorded = {output: row for output, row in rows.items()
                         if (self.folder / output).exists()}
        self.machine.wait()

        # 4. Write config.json and phases.json, and open the metrics log.
        if self.main:
            self.run_config = before  # the current content of config.json
            self.note(settings=before["settings"] | now)
            write_json(phases, self.recorded)
            if "code" in before and before["code"] != self.code:
                changed = ", ".join(code_differences(before["code"], self.code)) or "its commit"
                self.print(f"{self.folder}: the code has changed since: {changed}")
        self.tracking = Tracking(self.machine.accelerator, self.folder, s.track, now)

    def note(self, **facts) -> None:
        """Updates entries of config.json. The file is rewritten only if an entry has changed."""
        if self.main and self.run_config != self.run_config | facts:
            self.run_config |= facts
            write_json(self.folder / "config.json", self.run_config)

    def run_backends(self) -> dict:
        """Returns the backends that give correct results for all initial models of the run.

        The result has the same entries as the dict from `engine.self_check.select_backends`.
        """
        selected = []
        for flag, model in self.given_models().items():
            with models.named(flag):
                selected.append(model_backends(self, model))
        replies = max((backends["replies"] for backends in selected),
                      key=self_check.REPLY_BACKENDS.index)
        passes = [name for name in self_check.PASS_BACKENDS
                  if all(name in backends["passes"] for backends in selected)]
        return dict(replies=replies, passes=passes)

    # ................................................................................. phases

    def once(self, output: str, phase: Callable, *inputs, **parameters) -> Path:
        """Runs a phase, or reuses its output if the output exists and has the same cache key.

        The cache key is a hash of the name, parameters and inputs of the phase, and the tokenizer.
        A file among the inputs is represented by its bytes. An agent of this run is represented by
        the cache key of the phase that trained it. The code of the phase is not part of the key.

        If a user has edited an output after the phase wrote it, the edited output is reused. Its
        record in phases.json then has the entry `edited`.

        Args:
            output: The name of the output, which is a file or a folder in the run's folder.
            phase: A function phase(run, path, *inputs, **parameters). The function writes the
                output to the temporary path `path`, and returns a dict of numbers for phases.json.
            inputs: The inputs of the phase: paths, or lists or dictionaries of paths.
            parameters: The parameters of the phase: numbers and strings.

        Returns:
            The path of the output.

        Raises:
            UsageError: One of these is the case:
                - This process has already called `once` with the same output.
                - An input is not a path.
                - A parameter, or a number that the phase returned, cannot be written as JSON.
                - The phase wrote nothing, or did not return a dict.
                - A user has edited the output, and a token id is now outside of the vocabulary.
        """
        path = self.folder / output
        self.name = output
        label = f"{phase.__name__}, for the output {output}"
        if output in self.done:
            raise UsageError(f"{label}: this run has already made it with the phase "
                             f"{self.done[output]['function']}; give each call of once its own "
                             "output")

        # 1. Compute the cache key.
        agents = {self.folder / name: row["cache_key"] for name, row in self.done.items()}
        with prefix_errors(label):
            values = plain(parameters)
            # A model on the Hub can be updated, so the cache key contains its commit hash.
            if commit := models.commit_of(str(self.base)):
                agents[self.base] = commit
            inputs_key = input_key(inputs, agents)
        cache_key = hash_of([phase.__name__, inputs_key, values, self.fingerprint])

        # 2. Reuse an existing output that has the same cache key.
        if self.reuse(output, cache_key):
            return path

        # 3. Otherwise run the phase, and record its output.
        self.note(code=self.code, finished=False)
        started = time.perf_counter()
        temporary = path.with_name(f"{path.name}.tmp")
        self.prepare_paths(path, temporary)
        numbers = phase(self, temporary, *inputs, **parameters)
        with prefix_errors(label):
            numbers = checked(numbers, temporary, self.main)
        self.machine.wait()
        seconds = round(time.perf_counter() - started, 1)
        row = dict(function=phase.__name__, cache_key=cache_key)
        self.record(path, temporary, row | values | dict(seconds=seconds) | numbers)
        return path

    def reuse(self, output: str, cache_key: str) -> bool:
        """Returns True if an earlier process made this output with the same cache key.

        In this case, the record of the output is moved from `recorded` to `done`.
        """
        row = self.recorded.pop(output, None)
        if row is None:
            return False
        if row["cache_key"] != cache_key:
            self.print(f"{output} is recomputed, because its inputs or parameters have changed")
            return False
        row.pop("edited", None)
        if is_edited(self.folder / output, row):
            check_ids(self.folder / output, self.encoder.vocabulary_size)
            row["edited"] = True
            self.print(f"{output} was edited; the run uses it as it is, but its recorded numbers "
                       "are from before the edit")
        self.done[output] = row
        return True

    def prepare_paths(self, path: Path, temporary: Path) -> None:
        """Creates the parent folder of an output, and removes files of an interrupted phase."""
        self.machine.wait()
        if self.main:
            # Remove result.json, because it must exist only in a finished run.
            files.remove(self.folder / "result.json")
            path.parent.mkdir(exist_ok=True)
            files.remove(temporary)
        self.machine.wait()

    def record(self, path: Path, temporary: Path, row: dict) -> None:
        """Moves a finished output to its final path, and writes its record to phases.json.

        A phase writes to a temporary path first. Therefore an interrupted phase never leaves an
        incomplete output at the final path.
        """
        self.done[self.name] = row
        if self.main:
            files.remove(path)
            os.replace(temporary, path)
            if path.is_file():
                row["hash"] = file_hash(path)  # for `is_edited`, which detects edits by a user
            write_json(self.folder / "phases.json", self.done | self.recorded)
        self.print(sentence(self.name, row))
        self.tracking.log("phase", self.name, row)
        self.machine.wait()

    def close(self) -> None:
        """Marks the run as finished, and unlocks its folder.

        Records of outputs that this process has neither made nor reused are removed from
        phases.json, because they come from an earlier version of the training loop.
        """
        if self.main:
            write_json(self.folder / "phases.json", self.done)
            self.note(finished=True)
            self.lock.release()

    def print(self, text: str) -> None:
        """Prints a text on the main rank. An active progress bar stays below the text."""
        if self.main:
            tqdm.write(visible(text))

    def bar(self, total: int | None, items: Iterable | None = None):
        """Returns a progress bar for the current phase. The bar is visible only in a terminal.

        Args:
            total: The number of steps, or None if the number is unknown.
            items: The items to iterate over. Without items, call the bar's `update` after each
                step.
        """
        hidden = None if self.main else True  # with None, tqdm shows the bar only in a terminal
        return tqdm(items, total=total, desc=self.name, leave=False, disable=hidden, delay=2)

    # ............................................................................... training

    def load(self, agent: Path):
        """Loads the model in a folder, and returns it ready for training."""
        with agent_errors(self, agent):
            model = models.load(self.machine.accelerator, agent, self.machine.recompute,
                                shard=self.machine.ranks > 1)
        # `inference_copy` restores this attention implementation for inference.
        self.attention = model.config._attn_implementation
        if self.shares_prefixes:
            model.set_attn_implementation("prefix_sharing")
        return model

    def log_probs(
        self,
        model,
        trajectories: list[Trajectory],
        logits_processor: Callable = dpo.in_fp32,
    ) -> torch.Tensor:
        """Returns log pi of all action tokens of the trajectories, (A,), in nats.

        Except for rounding, the result is the same as that of `dpo.token_log_probs`. This method is
        faster, because it runs in parallel on all ranks, or with prefix sharing on a CPU.

        Args:
            model: The model that defines the policy pi.
            trajectories: The trajectories.
            logits_processor: A function that is applied to the model's logits. pi is the softmax of
                the processed logits, the same as in `dpo.token_log_probs`.
        """
        if self.shares_prefixes:
            return prefix_sharing.log_probs(model, trajectories, self.shared_tokens,
                                            logits_processor)
        tokens = self.machine.tokens_per_forward if "padded" in self.backends["passes"] else 0
        return distributed_log_probs(self.machine.accelerator, model, trajectories, tokens,
                                     logits_processor)

    @property
    def shared_tokens(self) -> int:
        """Maximum number of tokens in a forward pass with prefix sharing.

        This maximum is 4 times `tokens_per_forward`, because the model computes only about a
        quarter of the counted tokens. A shared prefix is counted once per trajectory, but the model
        computes the prefix only once.
        """
        return 4 * self.machine.tokens_per_forward

    def fits(self, trajectories: list[Trajectory]) -> bool:
        """Returns True if one forward pass on each rank is enough for all these trajectories.

        `dpo.train` calls this method to split a batch into micro-batches whose activations fit in
        memory.
        """
        if self.shares_prefixes:
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
        """Trains a model with AdamW, and saves the model and two logs to a folder.

        The log train.jsonl has one line per training step. The log margins.jsonl has one line per
        pair, and is written only if there are pairs.

        Args:
            model: A model that `load` returned.
            out: The folder to write.
            steps, rates, loss, denominator: The same arguments as in `dpo.train`.
            log_probs: The same argument as in `dpo.train`. The default is `Run.log_probs`.

        Returns:
            A dict for phases.json with the number of steps, the number of tokens, and the loss and
            its terms in the first step (for example `first_loss`) and in the last step (`loss`).
        """
        s = self.settings
        # `check_trainable` may raise an error, for example if a user has edited a trajectory file.
        # The error message then starts with the name of the output.
        with prefix_errors(self.name):
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
        # The loss and its terms. The names of the values in the first step start with "first_". The
        # names of the values in the last step have no prefix.
        losses = {}
        for name in lines[0]:
            if name not in ("step", "lr", "norm", "kinds"):
                losses |= {f"first_{name}": lines[0][name], name: lines[-1][name]}
        return dict(steps=len(lines), **losses, tokens=tokens)

    def copy_agent(self, agent: Path, out: Path) -> dict:
        """Copies the folder of an agent without its training logs.

        A phase calls this instead of `fit` if it has no training data for the agent.
        """
        if self.main:
            shutil.copytree(agent, out, ignore=shutil.ignore_patterns("*.jsonl"))
        return dict(steps=0)

    # .............................................................................. inference

    def play(
        self,
        agent,
        new: list[Trajectory],
        temperature: float,
        make_env: Callable | None = None,
    ) -> list[Trajectory]:
        """Runs episodes in parallel. The episodes are distributed equally over the ranks.

        Args:
            agent: The model that acts in the episodes, given as its folder, or as the model object
                that is being trained.
            new: New trajectories. Their task, agent, iteration, rollout and seed are set. The
                episodes fill in the other fields.
            temperature: The sampling temperature. With 0, decoding is greedy.
            make_env: A function that creates an environment. The default is the run's `make_env`.

        Returns:
            The finished trajectories in the order of `new`. Every rank returns all of them.
        """
        model = self.inference_copy(agent)
        share = new[self.machine.rank::self.machine.ranks]
        slots = self.slots(model)
        with self.bar(len(share)) as progress:
            rollouts.play(make_env or self.make_env, self.encoder, share,
                          self.make_generator(model, temperature, slots), slots,
                          self.settings.max_tokens, ended=lambda t: progress.update())
        if model is agent and self.shares_prefixes:
            model.set_attn_implementation("prefix_sharing")
        order = {(t.task, t.rollout): n for n, t in enumerate(new)}
        return sorted(self.machine.gather(share), key=lambda t: order[t.task, t.rollout])

    def inference_copy(self, agent):
        """Returns an unsharded model for inference, in bf16 if the run uses bf16 and else in fp32.

        Args:
            agent: The folder of a model, or the model object that is being trained.
        """
        dtype = torch.bfloat16 if self.machine.bf16 else torch.float32
        if not isinstance(agent, Path):
            model = models.make_inference_copy(agent, dtype)
            model.set_attn_implementation(self.attention)
            return model
        with agent_errors(self, agent):
            return models.read_model(agent, dtype, self.machine.device).eval()

    def slots(self, model) -> int:
        """Returns the number of episodes that each rank runs in parallel.

        On a GPU, the free memory limits this number.
        """
        s = self.settings
        if self.machine.device.type != "cuda":
            return s.slots or (64 if self.parameters < machine.SMALL else 8)
        models.collect()
        longest = s.max_tokens + s.max_new_tokens
        limit = machine.slots_that_fit(self.config, machine.free_memory(), longest,
                                       self.machine.bf16, self.machine.tokens_per_forward // 2)
        return min(s.slots or limit, limit)

    def make_generator(self, model, temperature: float, slots: int) -> Callable:
        """Returns a function that generates the next reply in each of several episodes.

        The argument of this function is a list of pairs (trajectory, RNG of the trajectory). The
        function returns a list of pairs (ids, log_probs), one per reply. See
        `engine.self_check.make_generator`.
        """
        s = self.settings
        token_sampler = TokenSampler(self.encoder.sampler(temperature), self.encoder,
                                     self.env.stops)
        return self_check.make_generator(self.backends["replies"], model, token_sampler, slots,
                                         s.max_tokens, s.max_new_tokens,
                                         self.machine.tokens_per_forward // 2)


def checked(numbers, out: Path, main: bool) -> dict:
    """Checks the result of a phase, and converts its numbers to plain JSON values.

    Args:
        numbers: The value that the phase returned.
        out: The path that the phase wrote its output to.
        main: Whether this is the main rank. Only the main rank checks that `out` exists.

    Raises:
        TypeError, ValueError: `numbers` is not a dict, a number cannot be written as JSON, or the
            phase wrote nothing.
    """
    if not isinstance(numbers, dict):
        raise TypeError(f"it returned {numbers!r:.60}; return a dict of numbers, or {{}}")
    if main and not out.exists():
        raise ValueError("it wrote nothing; write its second argument, a path")
    return plain(numbers)


def margins_of(steps: list[list[Group]]) -> list[dict]:
    """Returns the rows of margins.jsonl, one per pair.

    A row identifies the pair, and has its statistics in the first and in the last optimiser step on
    the pair. The statistics are log pi of the chosen trajectory, log pi of the rejected trajectory,
    and the margin from `dpo.dpo_loss`, all in nats.
    """
    rows = []
    for pair in {id(pair): pair for batch in steps for pair in dpo.pairs_of(batch)}.values():
        if pair.history:
            rows.append(named(pair) | dict(first=pair.history[0], last=pair.history[-1]))
    return rows


# ----------------------------------------------------------------- checks before the first phase


def check_folder(folder: Path) -> None:
    """Raises UsageError if `folder` is a file, or contains files that do not belong to a run.

    Without this check, a new run could overwrite these files.
    """
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--out {folder}: it is a file; give a folder")
    names = {path.name for path in folder.glob("*")}
    # If a run is interrupted right after its start, its folder contains the file `lock` but
    # no config.json.
    interrupted = "lock" in names and "phases.json" not in names
    if names and "config.json" not in names and not interrupted:
        raise UsageError(f"--out {folder}: it contains {min(names)}, but no config.json of a run; "
                         "give another folder")


def check_same_tokenizer(run: Run, agent: Path) -> None:
    """Raises UsageError if the --failure-from agent has another tokenizer or chat template.

    All agents of a run need the tokenizer and the chat template of the base model.
    """
    with models.named("--failure-from"):
        fingerprint = models.read_encoder(agent).fingerprint()
    if fingerprint != run.fingerprint:
        raise UsageError(f"--failure-from {agent}: its tokenizer or chat template is not that of "
                         f"--model {run.base}, which encodes the episodes; give an agent of that "
                         "model")


def model_backends(run: Run, model: Path) -> dict:
    """Returns the backends that give correct results for a model, see `engine.self_check`.

    Raises UsageError if no generation backend is correct, or if transformers cannot save the model.
    """
    if model == models.MODELS["tiny"]:
        return ALL_BACKENDS
    device = run.machine.device
    longest = run.settings.max_tokens
    positions = models.positions_of(run.config)
    if longest > positions:
        run.print(f"--model {model} has {positions:,} positions, and it never learned to read "
                  f"longer episodes; lower --max-tokens {longest}")
    if device.type == "cuda" and not machine.fits_in_fp32(run.config, run.parameters,
                                                          machine.free_memory(), longest):
        device = "cpu"
    causal_lm = models.read_model(model, device=device).eval()
    backends = self_check.select_backends(causal_lm, run.encoder, longest)
    models.check_can_be_saved(causal_lm, run.encoder)
    return backends


@contextmanager
def agent_errors(run: Run, agent):
    """Adds a remedy to the UsageError that is raised when a model cannot be read.

    The remedy is to delete the folder and rerun the command. The remedy is added only if this run
    trained the model, because the run cannot train other models again. Other errors are raised
    unchanged.
    """
    try:
        yield
    except UsageError as error:
        if run.folder not in Path(agent).parents:
            raise
        cause = str(error).removeprefix(f"--model {agent}: ")
        raise UsageError(f"{agent}: this agent of the run is damaged; delete the folder and rerun "
                         f"the same command to make it again; the cause: {cause}") from error


@contextmanager
def prefix_errors(label: str):
    """Turns a TypeError or ValueError into a UsageError whose message begins with `label`."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise UsageError(f"{label}: {error}") from error
