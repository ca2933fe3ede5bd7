"""What `--dry-run` prints: if a run fits its GPUs, what it reads and writes, how long it takes.

Memory of a training pass is that of the model's own code, run on tensors without data; hours follow
from the experts' lengths and from two assumptions, which are printed.
"""

import math
import random
import re
import weakref
from dataclasses import dataclass, replace

import psutil
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, AutoTokenizer

from lab import play_env as envs
from lab import tokens as dpo
from lab.engine import ranks, sharding
from lab.engine.cache import slot_bytes, slots_that_fit
from lab.engine.checkpoint import SHARE
from lab.harness.settings import (
    EVOLVING,
    Settings,
    SettingsError,
    agents_of,
    is_endpoint,
    options_of,
    segments_of,
    start_episodes,
    tokens_per_forward,
)
from lab.program.tasks import survey
from lab.training.models import config_of, in_bf16
from lab.training.trainer import disk_bytes

# GPU -> bytes of memory, dense bf16 FLOP/s, bytes/s of memory [NVIDIA's data sheets]
GPUS = {"A100": (79 << 30, 312e12, 2.0e12), "H100": (79 << 30, 989e12, 3.35e12),
        "H200": (139 << 30, 989e12, 4.8e12)}
ARITHMETIC, BANDWIDTH = 0.4, 0.5  # assumed shares of these peaks [ours]
FITS = 0.92                       # share of a GPU's memory that a plan may take [ours]
CPU, PROGRAM = "CPU", 0.5e9       # bytes of Python and its libraries [measured]
OF_A_PASS = "bf16 weights and gradients of a pass"
SAMPLE = 40                       # training tasks whose experts are played to know their lengths


@dataclass(frozen=True)
class Lengths:
    """Means over expert trajectories: tokens, tokens of replies, replies; the tokens of some."""

    experts: int
    tokens: float
    action_tokens: float
    turns: float
    sample: tuple[int, ...]


@dataclass(frozen=True)
class Machine:
    """GPUs of one kind, or the CPU; bytes of memory each, FLOP/s and bytes/s, NaN if not known."""

    count: int
    name: str
    memory: int
    flops: float = math.nan
    bandwidth: float = math.nan

    @property
    def cpu(self) -> bool:
        return self.name == CPU


def dry_run(s: Settings) -> None:
    """Prints the plan; SettingsError, naming what to change, if it cannot fit."""
    here, config = machine(s.dry_run), config_of(s.model)
    s = replace(s, tokens_per_forward=tokens_per_forward(s, not here.cpu))
    shard, recompute = (flag.replace("auto", "off" if here.cpu else "on") == "on"
                        for flag in (s.shard, s.gradient_checkpointing))
    half = not here.cpu or in_bf16(s)
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if half else torch.float32, attn_implementation="ragged")
    numbers = sum(p.numel() for p in model.parameters())
    found = lengths(s, AutoTokenizer.from_pretrained(s.model))
    sequences = longest_pass(s, found, here)
    training = training_memory(model, sequences, here.count if shard else 0, recompute)
    if not half:  # what computes in the format of the weights
        del training[OF_A_PASS]
    slot = slot_bytes(config, 2 if half else 4) * s.max_tokens
    exploring = exploring_memory(s, numbers, slot, half, training, here.cpu and not shard)
    for memory in (training, exploring) if here.cpu else ():
        memory["the program"] = PROGRAM
    totals = sum(training.values()), sum(exploring.values())

    print(f"{s.model}: {numbers / 1e9:.2f} B parameters on {here.count} x {here.name}; "
          f"{'sharded' if shard else 'whole on each'}, "
          f"{'with' if recompute else 'without'} gradient checkpointing\n")
    print(f"{'GB of memory' if here.cpu else 'GB per GPU':42}{'training':>10}{'exploring':>11}")
    for part in training | exploring:
        print(f"{part:42}{gb(training.get(part)):>10}{gb(exploring.get(part)):>11}".rstrip())
    print(f"{f'total, of {here.memory / 1e9:.1f}':42}{gb(totals[0]):>10}{gb(totals[1]):>11}\n")
    print(f"experts: {found.experts:,}, on average {found.turns:.1f} replies, "
          f"{found.tokens:,.0f} tokens, {found.action_tokens:,.0f} of them in replies")
    fit = slots_that_fit(FITS * here.memory - totals[1] + slot * s.slots, slot)
    used = s if here.cpu else replace(s, slots=max(1, min(fit, s.slots)))
    print_phases(phases(s, found, Hours(used, found, here, numbers, slot, recompute)), here)
    kept, inside = disk_bytes(s, numbers)
    state = inside / 2e9  # GB, and seconds at 1 GB/s
    print(f"disk: {kept / 1e9:,.0f} GB of agents, {inside / 1e9:,.0f} GB for checkpoints inside a "
          f"phase; one of {state:,.1f} GB every {s.checkpoint_minutes:g} minutes, or more if "
          f"writing takes over {SHARE:.0%} of the time: at 1 GB/s {state:,.0f} s, so every "
          f"{max(s.checkpoint_minutes, state / SHARE / 60):,.0f} minutes")
    check_fit(s, here, totals, numbers, fit)


def longest_pass(s: Settings, found: Lengths, here: Machine) -> list[dpo.Trajectory]:
    """A rank's trajectories of the largest pass, without what they begin alike.

    They have --tokens-per-forward, or more, because an instruction's trajectories run in one pass.
    On GPUs, which share them out, all must fit as long as they may get, with replies as long as
    they may be; a CPU's memory has to hold what is usual.
    """
    rollouts = len(agents_of(s.method)) * s.rollouts
    together = (s.step_rollouts if s.method in EVOLVING else
                max(1 + rollouts, rollouts * s.iterations if buffered(s) else 0))
    least = math.ceil(together / here.count)
    longest = math.ceil(found.tokens) if here.cpu else s.max_tokens
    count = max(least, 0 if here.cpu else s.tokens_per_forward // s.max_tokens)
    n = max(s.tokens_per_forward // count, longest)
    replies = found.action_tokens if here.cpu else found.turns * s.max_new_tokens
    written = int(n * replies / (found.tokens - found.action_tokens + replies))
    return [dpo.Trajectory(ids=[k] * n, action_mask=[0] * (n - written) + [1] * written)
            for k in range(count)]


def exploring_memory(s: Settings, numbers: int, slot: int, half: bool, training: dict,
                     live: bool) -> dict[str, float]:
    """Bytes while agents play. live: the weights that train play themselves."""
    exploring = {f"{'bf16' if half else 'fp32'} replica": (2 if half else 4) * numbers}
    if s.method in EVOLVING:  # which plays between two steps, with what they need in memory
        training["the first policy, fp32"] = training["weights, fp32"]
        held = "weights, fp32", "the first policy, fp32", "Adam's moments, fp32"
        exploring = {part: training[part] for part in held} | ({} if live else exploring)
    return exploring | {f"cache of {s.slots} slots": slot * s.slots}


def check_fit(s: Settings, here: Machine, totals, numbers: int, fit: int) -> None:
    """SettingsError if the run does not fit the memory; fewer slots are said."""
    training, room = totals[0], FITS * here.memory
    if here.cpu:
        if max(totals) > room:
            raise SettingsError(
                f"--dry-run: it takes {gb(max(totals))} GB of this machine's {gb(here.memory)}; "
                "lower --max-tokens, --tokens-per-forward or --slots, or use a smaller --model")
        return
    print(f"host memory while a model is loaded, beside the programs: {gb(4 * numbers)} "
          "GB, by the first rank")  # in fp32; it hands out a layer at a time
    if fit < s.slots:
        print(f"{s.slots} slots do not fit beside the replica: {max(fit, 1)} will be used")
    if training > room:
        raise SettingsError(f"--dry-run: training takes {gb(training)} GB of {gb(here.memory)}; "
                            "use more GPUs, or lower --max-tokens")
    if fit < 1:
        raise SettingsError("--dry-run: a bf16 replica and one episode do not fit a GPU; lower "
                            "--max-tokens, or use a smaller --model")


def gb(size: float | None) -> str:
    return "" if size is None else f"{size / 1e9:,.1f}"


def buffered(s: Settings) -> bool:
    """Whether the failure agent learns from earlier iterations' rollouts, too."""
    return s.method == "coevolve" and s.d_fail == "buffer"


def training_memory(model, sequences: list[dpo.Trajectory], ranks: int,
                    recompute: bool) -> dict[str, float]:
    """Bytes on a GPU in a pass over `sequences`; ranks: that share out the weights, 0 if whole."""
    numbers, layer, outside = sizes(model)
    held, more = activations(model, sequences, recompute), 2 * numbers
    if ranks:  # the most of three moments, in bf16, but gradients are added up in fp32
        hidden = sum(len(s.ids) for s in sequences) * model.config.get_text_config().hidden_size
        one = [replace(s, action_mask=[0] * (len(s.ids) - 1) + [1]) for s in sequences]
        more = max(
            2 * outside,  # at the logits
            # In the layers two of them are gathered; three more hidden states live [simulated].
            activations(model, one, recompute) - held
            + 2 * (outside + 2 * layer + 3 * hidden) + 6 * layer,
            # At the end the embeddings have gradients of both uses, their sum, and that in fp32.
            12 * outside - held)
    tokens = sum(len(s.ids) for s in sequences)
    return {"weights, fp32": 4 * numbers / max(ranks, 1),
            "gradients, fp32": 4 * numbers / max(ranks, 1),
            "Adam's moments, fp32": 8 * numbers / max(ranks, 1),
            OF_A_PASS: more,
            f"activations of {tokens:,} tokens": held}


def sizes(model) -> tuple[int, int, int]:
    """Numbers of a model, of a layer, and outside of layers: embeddings, mostly."""
    numbers = sum(p.numel() for p in model.parameters())
    layers = sharding.layers_of(model)
    layer = sum(p.numel() for p in layers[0].parameters())
    return numbers, layer, numbers - layer * len(layers)


def machine(asked: str) -> Machine:
    """`here`, or an 8xH100 somewhere else; the CPU where there is no GPU."""
    if elsewhere := re.fullmatch(rf"(\d+)x({'|'.join(GPUS)})", asked):
        return Machine(int(elsewhere[1]), elsewhere[2], *GPUS[elsewhere[2]])
    if asked != "here":
        raise SettingsError(f"--dry-run: {asked!r} is no machine; name one to plan for, such as "
                            f"--dry-run 8xH100 ({', '.join(GPUS)}), or here")
    if not torch.cuda.is_available():
        return Machine(1, CPU, psutil.virtual_memory().total)
    gpu = torch.cuda.get_device_properties(0)
    known = next((name for name in GPUS if name in gpu.name), None)
    return Machine(torch.cuda.device_count(), gpu.name, gpu.total_memory,
                   *(GPUS[known][1:] if known else ()))


def lengths(s: Settings, tokenizer) -> Lengths:
    """How long expert trajectories are; of scripted experts, from SAMPLE tasks spread evenly."""
    env, encoder = envs.make(s.env, s.view, **options_of(s)), dpo.Encoder(tokenizer)
    print(survey(s, env).counts)  # what a run would refuse is refused
    if s.experts:
        experts = envs.read_experts(s.experts, env)[:s.train_tasks or None]
        conversations, count = [messages for _, messages, _ in experts], len(experts)
    else:
        tasks = env.tasks("train")[:s.train_tasks or None]
        count = len(tasks)
        conversations = [envs.converse(env, env.reset(task), env.expert())[0]
                         for task in tasks[::-(-count // SAMPLE) or 1]]
    env.close()
    first = len(envs.opening(env, ""))
    encoded = [encoder.encode(messages, first) for messages in conversations]
    n, sample = len(encoded), tuple(len(ids) for ids, _ in encoded)
    return Lengths(count, sum(sample) / n, sum(sum(mask) for _, mask in encoded) / n,
                   sum(m["role"] == "assistant" for c in conversations for m in c[first:]) / n,
                   sample)


@dataclass(frozen=True)
class Hours:
    """6 FLOP a parameter and token to train (8 if layers are computed again), 2 to read; a sampled
    token reads all weights and half-full caches of the slots.
    """

    s: Settings
    found: Lengths
    machine: Machine
    numbers: int
    slot: int
    recompute: bool

    def training(self, tokens: float, batch: int, together: int = 1, read: float = 0.0) -> float:
        """batch: instructions of a step, of so many trajectories together. read: by a reference."""
        work = self.numbers * ((8 if self.recompute else 6) * tokens + 2 * read)
        return work / (self.busy(batch, together) * ARITHMETIC * self.machine.flops
                       * self.machine.count) / 3600

    def busy(self, batch: int, together: int) -> float:
        """The share of the GPUs' time that works, as the program deals trajectories like these."""
        rng, work, time = random.Random(0), 0, 0
        for _ in range(20):
            lengths = [rng.choices(self.found.sample, k=together) for _ in range(batch)]
            groups = [dpo.Group("", [dpo.Trajectory(ids=range(n)) for n in row]) for row in lengths]
            for pack, shares in ranks.passes(groups, self.machine.count, self.s.tokens_per_forward):
                sizes = [len(s.ids) for g in pack for s in g.sequences]
                loads = [sum(sizes[n] for n in share) for share in shares]
                work, time = work + sum(loads), time + len(loads) * max(loads)
        return work / time

    def playing(self, episodes: float) -> float:
        s, found, here = self.s, self.found, self.machine
        passes = episodes * found.action_tokens / max(min(s.slots * here.count, episodes), 1)
        reading = (2 * self.numbers
                   + min(s.slots, episodes) * self.slot * found.tokens / s.max_tokens / 2)
        prompts = 2 * self.numbers * episodes * found.tokens / (
            ARITHMETIC * here.flops * here.count)
        return (passes * reading / (BANDWIDTH * here.bandwidth) + prompts) / 3600


def phases(s: Settings, found: Lengths, hours: Hours) -> list[tuple[str, float, float]]:
    """(name, tokens, hours) of the run's phases."""
    agents = len(agents_of(s.method))
    sft = agents * s.sft_epochs * found.experts * found.tokens
    rows = [("SFT", sft, hours.training(sft, s.sft_batch))]
    if s.method in EVOLVING:
        return rows * (s.warm_start == "sft") + evolution(s, found, hours)
    iterations = s.iterations * (s.method != "sft")
    explored = (agents + (agents - 1) * s.explore_again) * s.rollouts * found.experts
    # The target learns from an instruction's expert and rollouts, the failure agent from these.
    seen = (agents - 1) * ((iterations + 1) / 2 if buffered(s) else 1)
    own, other = (found.experts * found.tokens * trajectories for trajectories in (
        1 + agents * s.rollouts, agents * s.rollouts * seen))
    other_trained = other * (s.failure_epochs or s.dpo_epochs)
    together, trained = 1 + agents * s.rollouts, own * s.dpo_epochs
    if s.dpo_steps:  # of the target; a pair has two trajectories
        unit = 2 if s.batch_unit == "pairs" else together
        trained = s.dpo_steps * s.dpo_batch * unit * found.tokens
    # An instruction has as many pairs as trajectories, about; a batch counts either.
    batch = max(1, s.dpo_batch // (together if s.batch_unit == "pairs" else 1))
    preferring = hours.training(trained, batch, together, own) + bool(other) * hours.training(
        other_trained, s.dpo_batch, agents * s.rollouts, other)
    return rows + [
        ("exploration", explored * found.tokens * iterations, hours.playing(explored) * iterations),
        ("preferences", (trained + other_trained) * iterations, preferring * iterations)]


def evolution(s: Settings, found: Lengths, hours: Hours) -> list[tuple[str, float, float]]:
    """The phases of GRPO; an endpoint's episodes take no time here."""
    most = s.start_tasks + (segments_of(s) - 1) * s.add_most * (s.method == "evolve")
    step = min(s.step_tasks, most) * s.step_rollouts  # episodes, each read by both policies
    explored = start_episodes(s) * (s.start_from == "explore")
    guided = (s.method == "evolve" and s.explorer != "aimed") * (segments_of(s) - 1) * len(
        s.signals.split(",")) * s.picks * s.explorer_episodes
    explored += guided
    if is_endpoint(s.explorer) and explored:
        print(f"explorer: at most {explored:,} episodes at its endpoint, with a request a turn")
        explored = 0
    explored += s.solve_check * most  # and those of what is refused
    read = step * found.tokens
    return [("exploration", explored * found.tokens, hours.playing(explored)),
            ("rollouts", read * s.grpo_steps, hours.playing(step) * s.grpo_steps),
            ("GRPO", read * s.grpo_steps, s.grpo_steps * hours.training(
                read, min(s.grpo_batch, most), s.step_rollouts, 2 * read))]


def print_phases(rows: list[tuple[str, float, float]], here: Machine) -> None:
    known = here.flops > 0
    for phase, tokens, hours in rows:
        print(f"{phase:14}{tokens / 1e6:10.1f} M tokens" + f"{hours:10.2f} h" * known)
    print(f"{'together':34}{sum(row[2] for row in rows):9.2f} h, without evaluation and "
          f"environments, at {ARITHMETIC:.0%} of the GPUs' bf16 rate in training and "
          f"{BANDWIDTH:.0%} of their bandwidth in rollouts (assumed), if agents' episodes are as "
          "long as experts'" if known else "hours are known for " + ", ".join(GPUS))


class Live(TorchDispatchMode):
    """Counts the bytes of tensors made inside it that are alive; `peak` is the most at once."""

    def __init__(self, known):
        super().__init__()
        self.known = {t.untyped_storage()._cdata for t in known}  # made before
        self.sizes, self.now, self.peak = {}, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor.untyped_storage())
        return result

    def add(self, storage) -> None:
        key = storage._cdata
        if key not in self.sizes and key not in self.known:
            self.set(key, storage.nbytes())
            weakref.finalize(storage, lambda: self.set(key, 0) or self.sizes.pop(key))

    def set(self, key, size: int) -> None:
        self.now += size - self.sizes.get(key, 0)
        self.sizes[key] = size
        self.peak = max(self.peak, self.now)


def activations(model, sequences: list[dpo.Trajectory], recompute: bool) -> int:
    """Most bytes that a pass forward and back holds beside weights, gradients and moments, with
    gradients while they are made. model: without data, in the format it computes in."""
    if recompute:
        sharding.recompute_layers(model)
    model.train()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with FakeTensorMode(allow_non_fake_inputs=True):
        with Live([*model.parameters(), *model.buffers()]) as live:
            dpo.action_log_probs(model, sequences).sum().backward()
    return live.peak
