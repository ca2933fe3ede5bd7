"""The `Run` class: the models of a run, their training, and their episodes.

The training loops and the phases in `coevolve.py` receive a `Run` object. Its method `once` is in
`engine.phases`.
"""

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

import dpo
from common.settings import UsageError, names_in
from dpo import Group, Trajectory
from engine import models, prefix_sharing, rollouts, self_check
from engine.experts import check_not_trained_on
from engine.forward_passes import average_and_clip, distributed_log_probs, fits_in_round
from engine.generation import REPLY_BACKENDS, make_generator
from engine.machine import SMALL, Machine, fits_in_fp32, free_memory, slots_that_fit
from engine.phases import (
    Phases,
    Trained,
    check_folder,
    folder_of,
    hashes_of,
    prefix_errors,
)
from engine.sampling import TokenSampler
from engine.trajectories import row_of
from environments import make

# The backends of a model for which all backends are correct (see `self_check.select_backends`).
ALL_BACKENDS = dict(replies="kv_cache", passes=[*self_check.PASS_BACKENDS])


class Run(Phases):
    """The folder, the machine, the environment and the models of a run."""

    def __init__(self, settings, options, method=None, make_env: Callable | None = None):
        """
        Args:
            options: The settings that are specific to the environment.
            method: The `common.settings.Method`. Without it, all settings count as read.
            make_env: A function that creates an environment, in place of the environment in the
                settings.
        """
        s = settings
        reads = {*vars(s), *vars(options)}
        if method:
            reads = names_in((*method.reads, type(options), "env", "method"))
        machine = Machine(s)
        self.make_env = make_env or partial(make, s.env, s.view, **vars(options))
        self.env = self.make_env()
        self.splits = {"test": self.env.test_splits, "validation": ("validation",),
                       "all": ("validation", *self.env.test_splits)}[s.eval_splits]
        if machine.main and (line := self.env.check(["train", *self.splits])):
            print(line)
        self.base = models.folder_of(s.model)
        self.model_config = models.read_config(self.base)
        self.parameters = models.parameter_count(self.model_config)
        encoder = models.read_encoder(self.base)
        if s.failure_from:
            check_same_tokenizer(self.base, encoder, Path(s.failure_from))
        check_not_trained_on(self.env, self.splits, given_models(s, self.base))
        machine.plan(s, self.model_config, self.parameters, bool(method and method.beside))
        # A new run selects its backends. A resumed run uses those in its config.json.
        backends = None
        folder = folder_of(s)
        if machine.main:
            check_folder(folder)
            if not (folder / "config.json").exists():
                backends = select_backends(s, self.base, machine, encoder)
        super().__init__(machine, encoder, settings, options, reads, backends)
        # The initial models may be large, so only one rank hashes them.
        for model in given_models(s, self.base).values():
            key = models.commit_of(str(model)) or self.on_main(partial(hashes_of, model))
            self.keys[model] = key
        self.backends = self.config["backends"]
        if self.backends != ALL_BACKENDS:
            self.print(f"{self.base}: {self.backends}")
        # Prefix sharing saves matmuls, which take most of the time on a CPU. On a GPU, most of the
        # time is spent on launching kernels.
        single_cpu = machine.ranks == 1 and machine.device.type == "cpu"
        self.shares_prefixes = single_cpu and "prefix_sharing" in self.backends["passes"]
        # The attention implementation of the loaded model, which `inference_copy` restores.
        self.attention = None

    @property
    def expert_file(self) -> Path | None:
        """The file given by --experts, or None for the environment's scripted expert."""
        return Path(self.settings.experts) if self.settings.experts else None

    # ............................................................................... training

    def load(self, folder: Path, groups: Sequence[Group] = ()):
        """Loads a model, and returns it ready for training on `groups`.

        The groups determine whether gradient checkpointing is used (see `Machine.recomputes`).
        """
        with agent_errors(self, folder):
            model = models.load(self.machine.accelerator, folder, self.machine.recomputes(groups),
                                shard=self.machine.ranks > 1)
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

        The result equals that of `dpo.token_log_probs` up to rounding. This method is faster,
        because it runs in parallel on all ranks, or with prefix sharing on a CPU.
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

        The model computes only about a quarter of the counted tokens, because a shared prefix is
        counted once per trajectory.
        """
        return 4 * self.machine.tokens_per_forward

    def fits(self, trajectories: list[Trajectory]) -> bool:
        """Returns True if the trajectories fit in a micro-batch, one forward pass on each rank."""
        if self.shares_prefixes:
            return dpo.fits_in_pass(trajectories, self.shared_tokens)
        return fits_in_round(trajectories, self.machine.tokens_per_forward, self.machine.ranks)

    def fit(
        self,
        model,
        steps: list[list[Group]],
        rates: list[float],
        loss: Callable,
        denominator: Callable,
        log_probs: Callable | None = None,
    ) -> tuple[Trained, dict]:
        """Trains a model with AdamW.

        The log train.jsonl contains one line per training step. The log margins.jsonl contains one
        line per pair, and exists only if there are pairs.

        Args:
            model: A model that `load` returned. It is trained in place.
            steps, rates, loss, denominator: The same arguments as in `dpo.train`.
            log_probs: The same argument as in `dpo.train`. The default is `Run.log_probs`.

        Returns:
            The trained model with its logs, and a dict for phases.json with the numbers of steps
            and tokens, and the loss and its terms in the first step (such as `first_loss`) and in
            the last step (such as `loss`).
        """
        s = self.settings
        # An error, for example after an edit of a trajectory file, starts with the name of the
        # output.
        with prefix_errors(self.name):
            dpo.check_trainable(model, steps)
        optimizer = dpo.adamw(model, s.weight_decay)
        with self.bar(len(steps)) as progress:
            def log(line):
                self.tracking.log("train", self.name, line)
                progress.update()
            lines = dpo.train(model, optimizer, steps, rates, loss, denominator,
                              log_probs or self.log_probs, s.max_grad_norm, self.fits,
                              average_and_clip, log)
        if not any(line["norm"] for line in lines):
            self.print(f"{self.name}: the gradient was 0 in all steps, so the agent is unchanged; "
                       "check that the loss depends on the policy")
        logs = {"train.jsonl": lines}
        margins = margins_of(steps)
        if margins:
            logs["margins.jsonl"] = margins
        tokens = sum(len(t.ids) for batch in steps for t in dpo.trajectories_of(batch))
        losses = {}
        for name in lines[0]:
            if name not in ("step", "lr", "norm", "kinds"):
                losses |= {f"first_{name}": lines[0][name], name: lines[-1][name]}
        return Trained(model, logs), dict(steps=len(lines), **losses, tokens=tokens)

    def is_close(self, loss: float, expected: float) -> bool:
        """Returns True if a loss equals the expected loss up to rounding.

        In bf16, the batch changes the log-probability of a trajectory by several tenths of a nat.
        """
        return abs(loss - expected) <= (0.1 if self.machine.bf16 else 0.001)

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
            agent: The folder of a model, or the model object that is being trained.
            new: New trajectories. Their task, agent, iteration, rollout and seed are set. The
                episodes fill in the other fields.
            temperature: The sampling temperature. With 0, decoding is greedy.
            make_env: A function that creates an environment. The default is the run's `make_env`.

        Returns:
            The finished trajectories in the order of `new`. Every rank returns all of them.
        """
        s = self.settings
        model = self.inference_copy(agent)
        share = new[self.machine.rank::self.machine.ranks]
        slots = self.slots()
        token_sampler = TokenSampler(self.encoder.sampler(temperature), self.encoder,
                                     self.env.stops)
        generate = make_generator(self.backends["replies"], model, token_sampler, slots,
                                  s.max_tokens, s.max_new_tokens,
                                  self.machine.tokens_per_forward // 2)
        with self.bar(len(share)) as progress:
            rollouts.play_episodes(make_env or self.make_env, self.encoder, share, generate, slots,
                                   s.max_tokens, ended=lambda t: progress.update())
        if model is agent and self.shares_prefixes:
            model.set_attn_implementation("prefix_sharing")
        order = {(t.task, t.rollout): n for n, t in enumerate(new)}
        return sorted(self.machine.gather(share), key=lambda t: order[t.task, t.rollout])

    def inference_copy(self, agent):
        """Returns an unsharded inference model, in bf16 if the run uses bf16, and otherwise in
        fp32."""
        dtype = torch.bfloat16 if self.machine.bf16 else torch.float32
        if not isinstance(agent, Path):
            model = models.make_inference_copy(agent, dtype)
            model.set_attn_implementation(self.attention)
            return model
        with agent_errors(self, agent):
            return models.read_model(agent, dtype, self.machine.device).eval()

    def slots(self) -> int:
        """Returns the number of episodes that each rank runs in parallel."""
        s = self.settings
        if self.machine.device.type != "cuda":
            return s.slots or (64 if self.parameters < SMALL else 8)
        models.collect()
        longest = s.max_tokens + s.max_new_tokens
        limit = slots_that_fit(self.model_config, free_memory(), longest, self.machine.bf16,
                               self.machine.tokens_per_forward // 2)
        return min(s.slots or limit, limit)


def margins_of(steps: list[list[Group]]) -> list[dict]:
    """Returns the rows of margins.jsonl, one per pair.

    A row identifies the pair, and contains its statistics (see `dpo.Pair.history`) in the first and
    in the last optimiser step on the pair, in nats.
    """
    rows = []
    for pair in {id(pair): pair for batch in steps for pair in dpo.pairs_of(batch)}.values():
        if pair.history:
            rows.append(row_of(pair) | dict(first=pair.history[0], last=pair.history[-1]))
    return rows


# ----------------------------------------------------------------- checks before the first phase


def given_models(s, base: Path) -> dict[str, Path]:
    """Returns the initial models of a run, {command-line flag: path}."""
    return {"--model": base} | ({"--failure-from": Path(s.failure_from)} if s.failure_from else {})


def check_same_tokenizer(base: Path, encoder, agent: Path) -> None:
    """Raises UsageError if the tokenizer or chat template of the --failure-from agent differs from
    that of the base model."""
    with models.naming_flag("--failure-from"):
        fingerprint = models.read_encoder(agent).fingerprint()
    if fingerprint != encoder.fingerprint():
        raise UsageError(f"--failure-from {agent}: its tokenizer or chat template is not that of "
                         f"--model {base}, which encodes the episodes; give an agent of that model")


def select_backends(s, base: Path, machine: Machine, encoder) -> dict:
    """Returns the backends that give correct results for all initial models of a run."""
    selected = []
    for flag, model in given_models(s, base).items():
        with models.naming_flag(flag):
            selected.append(model_backends(s, model, machine, encoder))
    replies = max((backends["replies"] for backends in selected), key=REPLY_BACKENDS.index)
    passes = [name for name in self_check.PASS_BACKENDS
              if all(name in backends["passes"] for backends in selected)]
    return dict(replies=replies, passes=passes)


def model_backends(s, model: Path, machine: Machine, encoder) -> dict:
    """Returns the backends that give correct results for a model (see `engine.self_check`).

    Raises UsageError if no backend does, or if transformers cannot save the model.
    """
    if model == models.MODELS["tiny"]:
        return ALL_BACKENDS
    config = models.read_config(model)
    positions = models.positions_of(config)
    if s.max_tokens > positions:
        print(f"--model {model} has {positions:,} positions, and it never learned to read longer "
              f"episodes; lower --max-tokens {s.max_tokens}")
    device = machine.device
    if device.type == "cuda" and not fits_in_fp32(config, models.parameter_count(config),
                                                  free_memory(), s.max_tokens):
        device = "cpu"
    causal_lm = models.read_model(model, device=device).eval()
    backends = self_check.select_backends(causal_lm, encoder, s.max_tokens)
    models.check_can_be_saved(causal_lm, encoder)
    return backends


@contextmanager
def agent_errors(run: Run, agent):
    """Adds a remedy to a UsageError about a model that this run has trained and can train again."""
    try:
        yield
    except UsageError as error:
        if run.folder not in Path(agent).parents:
            raise
        cause = str(error).removeprefix(f"--model {agent}: ")
        raise UsageError(f"{agent}: this agent of the run is damaged; delete the folder and rerun "
                         f"the same command to make it again; the cause: {cause}") from error
