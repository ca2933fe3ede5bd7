"""What `--dry-run` prints: if a run fits its GPUs, what it reads and writes, how long it takes.

No weights are loaded. Memory of a training pass is that of the model's own code, run on tensors
without data; hours follow from the experts' lengths and from two assumptions, which are printed.
"""

import math
import re
import weakref
from dataclasses import dataclass

import psutil
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import dpo
import envs
from engine import sharding
from engine.cache import slot_bytes, slots_that_fit
from engine.checkpoint import SHARE
from harness.models import in_bf16
from harness.settings import (
    EVOLVING,
    Settings,
    SettingsError,
    agents_of,
    is_endpoint,
    options_of,
    segments_of,
    start_episodes,
)
from harness.tasks import survey

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
    """Means over expert trajectories: tokens, tokens of replies, replies."""

    experts: int
    tokens: float
    action_tokens: float
    turns: float


def dry_run(s: Settings) -> None:
    """Prints the plan; SettingsError, naming what to change, if it cannot fit."""
    count, name, memory, flops, bandwidth = machine(s.dry_run)
    config, cpu = AutoConfig.from_pretrained(s.model), name == CPU
    auto = "off" if cpu else "on"
    shard, recompute = (flag.replace("auto", auto) == "on"
                        for flag in (s.shard, s.gradient_checkpointing))
    half = not cpu or in_bf16(s)
    dtype, width = (torch.bfloat16, 2) if half else (torch.float32, 4)
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="ragged")
    numbers = sum(p.numel() for p in model.parameters())
    found = lengths(s, AutoTokenizer.from_pretrained(s.model))
    agents, evolving = len(agents_of(s.method)), s.method in EVOLVING

    # One pass holds --tokens-per-forward, but an instruction's trajectories stay together: an
    # expert and rollouts for the target, for the failure agent those of all iterations, perhaps;
    # in GRPO the episodes of a task in a step.
    rollouts = agents * s.rollouts
    together = (s.step_rollouts if evolving else
                max(1 + rollouts, rollouts * s.iterations if buffered(s) else 0))
    # On a GPU all must fit as long as it may get; a CPU's memory has to hold what is usual.
    usual = math.ceil(found.tokens) if cpu else s.max_tokens
    longest = max(s.tokens_per_forward, together * usual)
    share = found.action_tokens / found.tokens
    n = longest // together
    written = int(share * n)
    sequences = [dpo.Trajectory(ids=[k] * n, action_mask=[0] * (n - written) + [1] * written)
                 for k in range(together)]  # without the prompt that they share: the worst case
    training = training_memory(model, sequences, count if shard else 0, recompute)
    slot = slot_bytes(config, width) * s.max_tokens
    exploring = {(replica := f"{'bf16' if half else 'fp32'} replica"): width * numbers,
                 f"cache of {s.slots} slots": slot * s.slots}
    if not half:  # what computes in the format of the weights
        del training[OF_A_PASS]
    if cpu:
        training |= (program := {"the program": PROGRAM})
        exploring |= program
    if evolving:  # which plays between two steps, with what they need in memory
        training["the first policy, fp32"] = training["weights, fp32"]
        exploring |= {part: training[part] for part in (
            "weights, fp32", "the first policy, fp32", "Adam's moments, fp32")}
        if cpu and not shard:  # the live weights play
            del exploring[replica]

    lines = [f"{s.model}: {numbers / 1e9:.2f} B parameters on {count} x {name}; "
             f"{'sharded' if shard else 'whole on each'}, "
             f"{'with' if recompute else 'without'} gradient checkpointing", "",
             f"{'GB of memory' if cpu else 'GB per GPU':42}{'training':>10}{'exploring':>11}"]
    lines += [f"{part:42}{gb(training.get(part)):>10}{gb(exploring.get(part)):>11}".rstrip()
              for part in training | exploring]
    totals = sum(training.values()), sum(exploring.values())
    lines += [f"{f'total, of {memory / 1e9:.1f}':42}{totals[0] / 1e9:10.1f}{totals[1] / 1e9:11.1f}"]
    lines += ["", f"experts: {found.experts:,}, on average {found.turns:.1f} replies, "
              f"{found.tokens:,.0f} tokens, {found.action_tokens:,.0f} of them in replies"]
    lines += phases(s, found, agents, numbers, slot, (count, flops, bandwidth), recompute)
    kept, inside = disk_bytes(s, numbers)
    state = inside / 2e9  # GB, and seconds at 1 GB/s
    lines += [f"disk: {kept / 1e9:,.0f} GB of agents, {inside / 1e9:,.0f} GB for checkpoints "
              f"inside a phase; one of {state:,.1f} GB every {s.checkpoint_minutes:g} minutes, "
              f"or more if writing takes over {SHARE:.0%} of the time: at 1 GB/s {state:,.0f} s, "
              f"so every {max(s.checkpoint_minutes, state / SHARE / 60):,.0f} minutes"]
    room = FITS * memory
    if cpu:
        more = sum(size for part, size in training.items() if part.startswith("activations"))
        lines += [f"activations are of {longest:,} tokens in a pass; {together} trajectories of "
                  f"--max-tokens {s.max_tokens:,}, which one pass may hold, take "
                  f"{more / longest * together * s.max_tokens / 1e9:,.1f} GB"]
        print("\n".join(lines))
        if max(totals) > room:
            raise SettingsError(f"--dry-run: it takes {max(totals) / 1e9:.0f} GB of this machine's "
                                f"{memory / 1e9:.0f}; lower --max-tokens, --tokens-per-forward or "
                                "--slots, or use a smaller --model")
        return
    lines += [f"host memory while a model is loaded, beside the programs: {4 * numbers / 1e9:.1f} "
              "GB, by the first rank"]  # in fp32; it hands out a layer at a time
    fit = slots_that_fit(room - totals[1] + slot * s.slots, slot)
    if fit < s.slots:
        lines += [f"{s.slots} slots do not fit beside the replica: {max(fit, 1)} will be used"]
    print("\n".join(lines))
    if totals[0] > room:
        raise SettingsError(f"--dry-run: training takes {totals[0] / 1e9:.0f} GB of "
                            f"{memory / 1e9:.0f}; use more GPUs, or lower --max-tokens")
    if fit < 1:
        raise SettingsError("--dry-run: a bf16 replica and one episode do not fit a GPU; lower "
                            "--max-tokens, or use a smaller --model")


def gb(size: float | None) -> str:
    return "" if size is None else f"{size / 1e9:.1f}"


def buffered(s: Settings) -> bool:
    """Whether the failure agent learns from earlier iterations' rollouts, too."""
    return s.method == "coevolve" and s.d_fail == "buffer"


def training_memory(model, sequences: list[dpo.Trajectory], ranks: int,
                    recompute: bool) -> dict[str, float]:
    """Bytes on a GPU in a pass over `sequences`; ranks: that share out the weights, 0 if whole."""
    numbers, layer, outside = sizes(model)
    # Shards are gathered for two layers at a time; gradients are made in bf16 and added in fp32.
    gathered = 2 * (outside + 2 * layer) + 6 * max(outside, layer) if ranks else 2 * numbers
    tokens = sum(len(s.ids) for s in sequences)
    return {"weights, fp32": 4 * numbers / max(ranks, 1),
            "gradients, fp32": 4 * numbers / max(ranks, 1),
            "Adam's moments, fp32": 8 * numbers / max(ranks, 1),
            OF_A_PASS: gathered,
            f"activations of {tokens:,} tokens": activations(model, sequences, recompute)}


def sizes(model) -> tuple[int, int, int]:
    """Numbers of a model, of a layer, and outside of layers: embeddings, mostly."""
    numbers = sum(p.numel() for p in model.parameters())
    layers = sharding.layers_of(model)
    layer = sum(p.numel() for p in layers[0].parameters())
    return numbers, layer, numbers - layer * len(layers)


def machine(asked: str) -> tuple[int, str, int, float, float]:
    """(GPUs, name, bytes of memory, FLOP/s, bytes/s) of `here`, or of an 8xH100 somewhere else.

    Where there is no GPU, `here` is the CPU with the machine's memory; its speed is not known.
    """
    elsewhere = re.fullmatch(rf"(\d+)x({'|'.join(GPUS)})", asked)
    if elsewhere:
        return int(elsewhere[1]), elsewhere[2], *GPUS[elsewhere[2]]
    if asked != "here":
        raise SettingsError(f"--dry-run: {asked!r} is no machine; name one to plan for, such as "
                            f"--dry-run 8xH100 ({', '.join(GPUS)}), or here")
    if not torch.cuda.is_available():
        return 1, CPU, psutil.virtual_memory().total, math.nan, math.nan
    here = torch.cuda.get_device_properties(0)
    known = next((name for name in GPUS if name in here.name), None)
    speeds = GPUS[known][1:] if known else (math.nan, math.nan)
    return torch.cuda.device_count(), here.name, here.total_memory, *speeds


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
    n = len(encoded)
    return Lengths(count, sum(len(ids) for ids, _ in encoded) / n,
                   sum(sum(mask) for _, mask in encoded) / n,
                   sum(m["role"] == "assistant" for c in conversations for m in c[first:]) / n)


def phases(s: Settings, found: Lengths, agents: int, numbers: int, slot: int, gpus,
           recompute: bool) -> list[str]:
    """Tokens and hours of the run's phases: 6 FLOP a parameter and token to train (8 if layers are
    computed again), 2 to read; a sampled token reads all weights and half-full caches of the slots.
    """
    count, flops, bandwidth = gpus
    iterations = s.iterations * (s.method != "sft")

    def hours_of_training(tokens, references=0.0):
        work = numbers * ((8 if recompute else 6) * tokens + 2 * references)
        return work / (ARITHMETIC * flops * count) / 3600

    def hours_of_playing(episodes):
        passes = episodes * found.action_tokens / max(min(s.slots * count, episodes), 1)
        reading = 2 * numbers + min(s.slots, episodes) * slot * found.tokens / s.max_tokens / 2
        prompts = 2 * numbers * episodes * found.tokens / (ARITHMETIC * flops * count)
        return (passes * reading / (BANDWIDTH * bandwidth) + prompts) / 3600

    sft = agents * s.sft_epochs * found.experts * found.tokens
    rows = [("SFT", sft, hours_of_training(sft))] * (
        s.method not in EVOLVING or s.warm_start == "sft")
    explored = (agents + (agents - 1) * s.explore_again) * s.rollouts * found.experts
    # The target learns from an instruction's expert and rollouts, the failure agent from these, or
    # in iteration i from those of i iterations.
    seen = (agents - 1) * ((iterations + 1) / 2 if buffered(s) else 1)
    own, other = (found.experts * found.tokens * trajectories for trajectories in (
        1 + agents * s.rollouts, agents * s.rollouts * seen))
    read, trained = own + other, (own + other) * s.dpo_epochs
    if s.dpo_steps:  # of the target; a pair has two trajectories
        unit = 2 if s.batch_unit == "pairs" else 1 + agents * s.rollouts
        trained = s.dpo_steps * s.dpo_batch * unit * found.tokens + other * s.dpo_epochs
    if s.method in EVOLVING:
        most = s.start_tasks + (segments_of(s) - 1) * s.add_most * (s.method == "evolve")
        step = min(s.step_tasks, most) * s.step_rollouts  # episodes, each read by both policies
        unguided = start_episodes(s) * (s.start_from == "explore")
        guided = (s.method == "evolve") * (segments_of(s) - 1) * len(
            s.signals.split(",")) * s.picks * s.explorer_episodes
        if is_endpoint(s.explorer) and guided:
            print(f"explorer: at most {guided:,} episodes at its endpoint, with a request a turn")
            guided = 0
        explored = unguided + guided
        rows += [("exploration", explored * found.tokens, hours_of_playing(explored)),
                 ("rollouts", step * found.tokens * s.grpo_steps,
                  hours_of_playing(step) * s.grpo_steps),
                 ("GRPO", step * found.tokens * s.grpo_steps,
                  hours_of_training(step * found.tokens, 2 * step * found.tokens) * s.grpo_steps)]
    else:
        rows += [("exploration", explored * found.tokens * iterations,
                  hours_of_playing(explored) * iterations),
                 ("preferences", trained * iterations,
                  hours_of_training(trained, read) * iterations)]
    lines = [f"{phase:14}{tokens / 1e6:10.1f} M tokens" + f"{hours:10.2f} h" * (flops > 0)
             for phase, tokens, hours in rows]
    if not flops > 0:
        return lines + ["hours are known for " + ", ".join(GPUS)]
    return lines + [f"{'together':34}{sum(row[2] for row in rows):9.2f} h, without evaluation and "
                    f"environments, at {ARITHMETIC:.0%} of the GPUs' bf16 rate in training and "
                    f"{BANDWIDTH:.0%} of their bandwidth in rollouts (assumed), if agents' "
                    "episodes are as long as experts'"]


def disk_bytes(s: Settings, numbers: int) -> tuple[int, int]:
    """What a run with a model of so many numbers writes: its agents, and states inside a phase.

    Agents are fp32, those of GRPO with two moments; a state has both, and is there while the next
    is written.
    """
    if s.method in EVOLVING:
        return 4 * numbers * (1 + 3 * segments_of(s)), 2 * 12 * numbers
    rounds = 1 + {"sft": 0, "rft": 1, "dart": 1}.get(s.method, s.iterations)
    return 4 * numbers * len(agents_of(s.method)) * rounds, 2 * 12 * numbers


class Live(TorchDispatchMode):
    """Counts the bytes of tensors made inside it that are alive; `peak` is the most at once."""

    def __init__(self, known):
        super().__init__()
        self.known = {t.untyped_storage()._cdata for t in known}  # made before
        self.sizes, self.now, self.peak = {}, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self.sizes and key not in self.known:
                self.sizes[key] = storage.nbytes()
                self.now += self.sizes[key]
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, key)
        return result

    def _gone(self, key):
        self.now -= self.sizes.pop(key)


def activations(model, sequences: list[dpo.Trajectory], recompute: bool) -> int:
    """Most bytes that a pass forward and back holds beside weights, gradients and moments.

    model: of tensors without data (FakeTensorMode), in the format it computes in. Gradients of
    weights count while they are made, since they are handed on at once.
    """
    if recompute:
        sharding.recompute_layers(model)
    model.train()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with FakeTensorMode(allow_non_fake_inputs=True):
        with Live([*model.parameters(), *model.buffers()]) as live:
            dpo.action_log_probs(model, sequences).sum().backward()
    return live.peak
