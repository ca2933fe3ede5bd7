"""Eight minutes of checks and figures of one GPU, with random weights and without a network.

    bash run.sh first-gpu            models of Qwen3's shapes and vocabulary
    bash run.sh first-gpu --small    small ones on any machine: the path only

Each step is a process with a limit of its own. It writes its figures into OUT/STEP.json as they
come, so that a step that is cut off keeps what it has, and its line is printed in the end.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator
from transformers import Qwen3Config

import dpo
from common.files import read_json, read_jsonl
from dpo import Trajectory
from engine import machine, models, trial
from engine.chat import Encoder
from engine.passes import log_probs_in_passes
from engine.sampling import Draw, Sampler
from lab.bench import bench

PEAK = 989e12  # FLOP/s of an H100 in bf16, by its data sheet
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if CUDA else torch.device("cpu")
WORDS = 151_936 if CUDA else 2400  # of the vocabulary
PASS = 8192                        # tokens of a training pass, as the program has them


class Figures:
    """The figures of a step, in a file from the first one on."""

    def __init__(self, file: Path, step: str):
        self.file = file
        self.begun = time.time()
        self.found = dict(step=step)

    def note(self, name: str, value) -> None:
        self.found |= {name: value, "s": round(time.time() - self.begun)}
        text = json.dumps(self.found)
        short = json.loads(text, parse_float=lambda number: float(f"{float(number):.4g}"))
        self.file.write_text(json.dumps(short))


def wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


def seconds(work: Callable, times: int = 1) -> float:
    """Of one call, the mean of so many after one that warms up."""
    work()
    wait()
    begun = time.perf_counter()
    for _ in range(times):
        work()
    wait()
    return (time.perf_counter() - begun) / times


def peak_gb() -> list[float]:
    """The most that was allocated, and reserved, since this was asked last."""
    models.collect()
    if not CUDA:
        return [0.0, 0.0]
    found = [torch.cuda.max_memory_allocated() / 1e9, torch.cuda.max_memory_reserved() / 1e9]
    torch.cuda.reset_peak_memory_stats()
    return found


def shape(*sizes: int) -> Qwen3Config:
    """A Qwen3 of so many hidden and inside, layers and heads; a small one without a GPU."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
             "num_key_value_heads", "head_dim")
    sizes = (*sizes, 8, 128) if CUDA else (64, 96, 2, 4, 2, 16)
    return Qwen3Config(vocab_size=WORDS, tie_word_embeddings=True, max_position_embeddings=40960,
                       **dict(zip(names, sizes)))


SMALL_SHAPE = shape(1024, 3072, 28, 16)   # 0.6 B
MIDDLE_SHAPE = shape(2048, 6144, 28, 16)  # 1.7 B
LARGE_SHAPE = shape(2560, 9728, 36, 32)   # 4 B


def encoder_and_draw(temperature: float = 0.7) -> tuple[Encoder, Draw]:
    """tiny's tokens, and what draws them; never an end of turn, so that replies are as long as they
    may be."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(models.MODELS["tiny"])
    encoder = Encoder(tokenizer, WORDS)
    return encoder, Draw(Sampler(temperature, trial.never_of(encoder)), encoder, ())


def conversations(lengths: list[int]) -> list[tuple[Trajectory, random.Random]]:
    """Random texts of so many tokens, which somebody is to go on."""
    found = []
    for n, length in enumerate(lengths):
        ids = random.Random(n).choices(range(300, 2000), k=length)
        found.append((Trajectory(ids=ids, action_mask=[0] * length), random.Random(n)))
    return found


# ------------------------------------------------------------------------------------- the steps


def ceilings(figures: Figures, work: Path) -> None:
    """Versions, and what the card can do at most: read memory, and multiply in bf16."""
    figures.note("torch", torch.__version__)
    figures.note("transformers", transformers.__version__)
    if CUDA:
        figures.note("device", torch.cuda.get_device_name())
        figures.note("free GB", machine.free_memory() / 1e9)
    n = 8192 if CUDA else 512
    x = torch.randn(n, n, dtype=torch.bfloat16, device=DEVICE)
    figures.note("bf16 TFLOP/s", 2 * n ** 3 / seconds(lambda: x @ x, 20) / 1e12)
    large = torch.ones(2 ** (30 if CUDA else 20), device=DEVICE)
    figures.note("read TB/s", large.nbytes / seconds(large.sum, 10) / 1e12)


def run_of(out: Path, *flags, **variables: str) -> subprocess.Popen:
    command = [sys.executable, "coevolve.py", "--env", "webshop", "--out", str(out), *flags]
    return subprocess.Popen(command, env=os.environ | variables, stdin=subprocess.DEVNULL)


def tiny(figures: Figures, work: Path) -> None:
    """An iteration with the tiny model on the card, and its numbers beside the CPU's."""
    flags = "--train-tasks 24 --eval-tasks 20 --iterations 1 --rollouts 1 --slots 8".split()
    other = run_of(work / "cpu", *flags, CUDA_VISIBLE_DEVICES="")
    figures.note("ends with", [run_of(work / "card", *flags).wait(), other.wait()])
    card, cpu = (read_json(work / name / "phases.json") for name in ("card", "cpu"))
    for phase, row in cpu.items():
        names = [name for name in ("first_loss", "loss", "reward", "pairs") if name in row]
        if names:
            figures.note(phase, [[card[phase].get(name), row[name]] for name in names])
        if phase.endswith(".jsonl") and "episodes" in row:
            rows = [read_jsonl(work / name / phase) for name in ("card", "cpu")]
            equal = sum(a["ids"] == b["ids"] for a, b in zip(*rows))
            figures.note(f"{phase}: equal episodes", [equal, len(rows[0])])


def numbers(figures: Figures, work: Path) -> None:
    """What only a card can show: its kernels, replies and padded passes against plain ones,
    gradients in bf16 against fp32, the trial, and how often the host waits for a token."""
    encoder, draw = encoder_and_draw()
    model = bench.make_model(SMALL_SHAPE, torch.bfloat16, DEVICE)
    lengths = [*range(100, 1700, 200)] if CUDA else [40, 23, 31]
    ways = trial.REPLIES[:2]
    whole = []
    for dtype in torch.bfloat16, torch.float32:
        model.to(dtype)
        for way in ways:
            asked = conversations(lengths)
            answer = trial.answer_of(way, model, draw, len(asked), 2048, 32, 4096)
            with torch.no_grad():
                whole, off = off_plain_passes(model, draw.sampler, asked, answer(asked))
            model.set_attn_implementation("sdpa")
            figures.note(f"{dtype}, {way}: nats off a plain pass, rms and most; padded, most", off)
    figures.note("trial", trial.trial(model, encoder, 2048 if CUDA else 100))
    model.set_attn_implementation("sdpa")
    cosines_of_gradients(figures, model, whole[:3])
    if CUDA:
        model.bfloat16()
        for way in ways:
            figures.note(f"host waits for one more token, {way}", waits(model, draw, way, lengths))


def off_plain_passes(model, sampler: Sampler, asked: list, sampled: list) -> tuple[list, list]:
    """The texts with their replies, and how far the replies' log-probabilities are off."""
    whole = []
    drawn = []
    for (t, _), (ids, log_probs) in zip(asked, sampled):
        t.extend(ids, is_action=True)
        whole.append(t)
        drawn += log_probs
    plain = torch.cat([dpo.token_log_probs(model, [t], sampler.scores) for t in whole])
    off = plain - plain.new_tensor(drawn)
    padded = dpo.token_log_probs(model, whole, sampler.scores) - plain
    rms = off.square().mean().sqrt().item()
    return whole, [rms, off.abs().max().item(), padded.abs().max().item()]


def cosines_of_gradients(figures: Figures, model, trajectories: list[Trajectory]) -> None:
    """Of bf16 passes, without and with recomputed layers, against fp32."""
    found = []
    for mixed, recompute in ("no", False), ("bf16", False), ("bf16", True):
        models.prepare(model, recompute)
        one = SimpleNamespace(num_processes=1, process_index=0, device=DEVICE,
                              mixed_precision=mixed)  # a process has but one of accelerate's
        loss = -log_probs_in_passes(one, model, trajectories, PASS).mean()
        loss.backward()
        found.append(torch.cat([p.grad.flatten() for p in model.parameters()]).double())
        figures.note(f"loss, {mixed}{', recomputed' if recompute else ''}", loss.item())
        model.zero_grad()
    figures.note("gradients against fp32: cosines",
                 [F.cosine_similarity(found[0], other, 0).item() for other in found[1:]])


def waits(model, draw: Draw, way: str, lengths: list[int]) -> int:
    """How often the host waits for one more token of all replies."""
    counts = []
    torch.cuda.set_sync_debug_mode("warn")
    for tokens in 8, 8, 9:  # the first warms up
        asked = conversations(lengths)
        answer = trial.answer_of(way, model, draw, len(asked), 2048, tokens, 4096)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            answer(asked)
        counts.append(sum("synchroniz" in str(warning.message) for warning in caught))
    torch.cuda.set_sync_debug_mode("default")
    model.set_attn_implementation("sdpa")
    return counts[2] - counts[1]


def training(figures: Figures, work: Path) -> None:
    """Steps of SFT and DPO: tokens a second, and the peak of memory beside the plan."""
    os.environ |= dict(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1",
                       MASTER_PORT="29531")
    accelerator = Accelerator(cpu=not CUDA, mixed_precision="bf16")
    groups = bench.make_groups(12, *((1850, 260) if CUDA else (60, 20)))
    for name, config in ("0.6 B", SMALL_SHAPE), ("1.7 B", MIDDLE_SHAPE):
        bench.make_model(config, torch.bfloat16, DEVICE).save_pretrained(work / name)
        for kind, shard, recompute in (("dpo", True, True), ("dpo", False, True),
                                       ("dpo", True, False), ("sft", True, False)):
            label = f"{name} {kind}, {'FSDP2' if shard else 'whole'}, recomputed {recompute}"
            with suppress(torch.OutOfMemoryError):
                load = partial(models.load, accelerator, work / name, recompute, shard)
                figures.note(label, train(accelerator, load, config, groups, kind, recompute))
    torch.distributed.destroy_process_group()


def train(accelerator, load: Callable, config, groups: list, kind: str, recompute: bool) -> dict:
    """Three steps of four tasks, of which the first warms up."""
    peak_gb()
    model = load()
    log_probs = partial(log_probs_in_passes, accelerator, tokens=PASS)
    loss = partial(dpo.preference_loss, beta=0.1)
    size = dpo.pair_count
    fits = partial(dpo.fits_in_pass, tokens=PASS)
    if kind == "sft":
        groups = [dpo.Group([t]) for t in dpo.trajectories_of(groups)]
        loss = dpo.sft_loss
        size = dpo.action_count
    else:
        dpo.add_references(model, groups, log_probs, fits)
    each = len(groups) // 3
    steps = [groups[n:n + each] for n in range(0, len(groups), each)]
    ends = []
    for line in dpo.train(model, dpo.adamw(model), steps, [1e-6] * 3, loss, size, log_probs,
                          fits=fits):
        wait()
        ends.append(time.perf_counter())
    some = dpo.trajectories_of(groups[each:])
    tokens = sum(len(t.ids) for t in some)
    parameters = models.parameter_count(config)
    head = config.vocab_size * config.hidden_size  # which runs for action tokens alone
    acting = sum(t.action_count for t in some)
    flop = 6 * ((parameters - head) * tokens + head * acting)  # attention's left out
    took = ends[2] - ends[0]
    plan = sum(machine.training_bytes(config, parameters, 1, PASS, recompute)) / 1e9
    return dict(tokens_s=tokens / took, mfu=flop / took / PEAK, loss=line["loss"],
                planned_gb=plan, peak_gb=peak_gb())


@torch.inference_mode()
def playing(figures: Figures, work: Path) -> None:
    """Replies of a 4 B in the program's slots, beside what reading memory allows."""
    _, draw = encoder_and_draw()
    model = bench.make_model(LARGE_SHAPE, torch.bfloat16, DEVICE)
    free = machine.free_memory() if CUDA else 10e9
    longest, new = (2048, 33) if CUDA else (60, 9)
    slots = machine.slots_that_fit(LARGE_SHAPE, free, 4352) if CUDA else 4
    figures.note("slots of 4,352 tokens", slots)
    ways = trial.REPLIES[:2]
    sizes = [(slots, longest), (min(slots, 32), longest // 2), (min(slots, 8), longest // 2)]
    for way in ways:
        for rows, length in sizes:
            figures.note(f"{way}, {rows} x {length}", decoding(model, draw, way, rows, length, new))
    for tokens in (4096, 16384) if CUDA else (64,):
        rows = machine.slots_that_fit(LARGE_SHAPE, free, tokens + 256) if CUDA else 4
        peak_gb()
        begun = time.perf_counter()
        answer = trial.answer_of(ways[0], model, draw, rows, tokens + 256, 2, 4096)
        answer(conversations([tokens] * (rows - 1) + [tokens // 2]))
        wait()
        figures.note(f"longest reading, {rows} x {tokens}: s, GB", [time.perf_counter() - begun,
                                                                    *peak_gb(), free / 1e9])
        model.set_attn_implementation("sdpa")
        answer = None
    figures.note("an exploration of 134 episodes of 5 turns, s",
                 {way: seconds(partial(explore, model, draw, way, slots)) / 2 for way in ways})


def decoding(model, draw: Draw, way: str, rows: int, length: int, new: int) -> dict:
    """How long reading so many texts takes, and each token of all replies after them."""
    lengths = [length - n * length // (2 * rows) for n in range(rows)]  # from half of the longest

    def reply(tokens: int) -> float:
        asked = conversations(lengths)
        answer = trial.answer_of(way, model, draw, rows, length + 64, tokens, 4096)
        answer(asked)
        begun = time.perf_counter()  # again, with what was captured and allocated
        for t, _ in asked:
            t.extend([300] * 20, is_action=False)
        answer(asked)
        wait()
        return time.perf_counter() - begun

    read = reply(1)
    ms = 1e3 * (reply(new) - read) / (new - 1)
    model.set_attn_implementation("sdpa")
    parameters = model.num_parameters()
    keys = 4 * LARGE_SHAPE.num_hidden_layers * machine.Sizes(LARGE_SHAPE).keys  # bytes a token
    least = 1e3 * (2 * parameters + rows * length * keys) / 3.0e12
    return dict(read_20_s=read, ms_a_token=ms, tokens_s=1e3 * rows / ms, times_the_least=ms / least)


def explore(model, draw: Draw, way: str, slots: int) -> None:
    """Two rounds of slots of episodes: 5 turns of 300 tokens that are read and 45 written."""
    turns, told, written = (5, 300, 45) if CUDA else (2, 10, 4)
    answer = trial.answer_of(way, model, draw, slots, 4096, written, 4096)
    for _ in range(2):
        asked = conversations([told] * slots)
        for _ in range(turns):
            for (t, rng), (ids, _) in zip(asked, answer(asked)):
                t.extend(ids, is_action=True)
                t.extend(rng.choices(range(300, 2000), k=told), is_action=False)
    model.set_attn_implementation("sdpa")


def program(figures: Figures, work: Path) -> None:
    """The program itself with a 0.6 B, as a person starts it."""
    encoder, _ = encoder_and_draw()
    bench.make_model(SMALL_SHAPE, torch.bfloat16, DEVICE).save_pretrained(work / "program")
    encoder.tokenizer.save_pretrained(work / "program")
    flags = ("--method eto --view short --train-tasks 8 --eval-tasks 2 --iterations 1 --sft-epochs "
             "1 --dpo-epochs 1 --max-tokens 1024 --max-new-tokens 16").split()
    process = run_of(work / "run", "--model", str(work / "program"), *flags)
    figures.note("ends with", process.wait())
    figures.note("ways", read_json(work / "run/config.json")["ways"])
    for phase, row in read_json(work / "run/phases.json").items():
        names = [name for name in ("seconds", "first_loss", "loss", "episodes") if name in row]
        figures.note(phase, {name: row[name] for name in names})


# step -> its limit in seconds
STEPS = {ceilings: 40, tiny: 75, numbers: 75, training: 120, playing: 120, program: 80}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.sh first-gpu", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="small models, on the CPU")
    names = [step.__name__ for step in STEPS]
    parser.add_argument("--steps", nargs="+", default=names, help=f"some of {', '.join(names)}")
    parser.add_argument("--out", type=Path, default=Path("first-gpu"), help="[first-gpu]")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args(argv)
    steps = {step.__name__: step for step in STEPS}
    if asked.step:
        steps[asked.step](Figures(asked.out / f"{asked.step}.json", asked.step), asked.work)
        return
    if asked.small:
        os.environ |= dict(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    asked.out.mkdir(parents=True, exist_ok=True)
    root = Path(__file__).parents[2]
    with tempfile.TemporaryDirectory() as work, open(asked.out / "log", "a") as log:
        for name in asked.steps:
            file = (asked.out / f"{name}.json").resolve()
            command = [sys.executable, "-m", "lab.bench.first_gpu", "--step", name,
                       "--out", str(file.parent), "--work", work]
            step = subprocess.Popen(command, cwd=root, stdout=log, stderr=log,
                                    start_new_session=True)
            try:
                status = step.wait(STEPS[steps[name]])
            except subprocess.TimeoutExpired:
                status = "cut off"
                os.killpg(step.pid, signal.SIGKILL)  # and what it has started
            found = read_json(file) if file.exists() else dict(step=name)
            print(json.dumps(found | {"ends with": status} if status else found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
