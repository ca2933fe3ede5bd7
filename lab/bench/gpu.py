"""Measures a GPU in 25 minutes: speed, memory against the dry run, repeatability.

    python lab/bench/gpu.py          Qwen3 at 0.6B and 4B, Llama-2's width with fewer layers; random
    python lab/bench/gpu.py --small  a few thousand parameters, on any machine: the path only

Texts are random tokens, about 3,000 an episode; training is sharded over one GPU, as in a run. The
most important figure comes first; each is printed, and appended to a file, as soon as it is there.
"""

import argparse
import json
import operator
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from lab import tokens as dpo
from lab.bench.bench import Pages, fit, make_groups, word_tokenizer
from lab.engine import cache, sharding
from lab.harness.files import ROOT
from lab.harness.settings import Settings
from lab.playing.rollout import Sampling, rollout
from lab.program import dry_run
from lab.training.models import make_accelerator

QWEN3 = dict(vocab_size=151936, head_dim=128, num_key_value_heads=8, tie_word_embeddings=True,
             max_position_embeddings=262144)
MODELS = {  # in the order in which they are measured
    "Qwen3-4B": Qwen3Config(**QWEN3, hidden_size=2560, intermediate_size=9728,
                            num_hidden_layers=36, num_attention_heads=32),
    "Qwen3-0.6B": Qwen3Config(**QWEN3, hidden_size=1024, intermediate_size=3072,
                              num_hidden_layers=28, num_attention_heads=16),
    "7B's width, 12 layers": LlamaConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=12,
        num_attention_heads=32, num_key_value_heads=32)}  # all 32 take 108 GB
SMALL = Qwen3Config(vocab_size=2048, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                    num_attention_heads=4, num_key_value_heads=2, head_dim=16)


def build(config, dtype, device):
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="ragged")


def forward_flops(model, tokens: int, seen: int, projected: int) -> float:
    """FLOP of one pass, 2 a multiply-add, over `tokens` tokens that attend to `seen` in all; the
    vocabulary is projected for `projected` of them."""
    c = model.config.get_text_config()
    layers, _, d = cache.cache_shape(c)
    weights = sum(p.numel() for p in sharding.layers_of(model).parameters() if p.ndim == 2)
    attention = 2 * layers * c.num_attention_heads * d * seen
    return 2 * (weights * tokens + attention + projected * c.hidden_size * c.vocab_size)


def training(config, accelerator, length: int, steps: int) -> list[tuple[str, str]]:
    """Steps over two instructions each: memory as planned and taken, tokens/s, utilisation."""
    device, events = accelerator.device, []
    groups = make_groups(2 * steps, length, length // 3, vocabulary=config.vocab_size)
    with FakeTensorMode():
        empty = build(config, torch.bfloat16, "cpu")
    longest = max(groups, key=lambda g: g.tokens)
    predicted = sum(dry_run.training_memory(empty, longest.sequences, 1, True).values())
    model = sharding.shard_model(accelerator, build(config, torch.float32, device), True,
                                 recompute=True)
    for g, found in zip(groups, dpo.log_probs_of(accelerator, model, groups, 1)):
        g.reference = found
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    fit(accelerator, model, [groups[2 * i:2 * i + 2] for i in range(steps)], 1, events.append)
    rates = [event["tokens_per_second"] for event in events[1:]]  # the first one warms up
    rows = [("training, tokens/s",
             f"{statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})")]
    name = torch.cuda.get_device_name() if device.type == "cuda" else ""
    if known := next((gpu for gpu in dry_run.GPUS if gpu in name), None):
        sequences, peak = [s for g in groups for s in g.sequences], dry_run.GPUS[known][1]
        tokens = sum(len(s.ids) for s in sequences)
        flops = forward_flops(empty, tokens, sum(len(s.ids) ** 2 // 2 for s in sequences),
                              sum(s.action_tokens for s in sequences))
        rows.append((f"model FLOPs utilisation, of {peak / 1e12:.0f} TFLOP/s",
                     f"{3 * flops / tokens * statistics.median(rates) / peak:.0%}"))
    if device.type == "cuda":
        peak, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        rows += [("training memory, GB", f"{peak / 1e9:.1f}, reserved {reserved / 1e9:.1f}"),
                 ("the dry run's prediction, GB",
                  f"{predicted / 1e9:.1f} ({predicted / peak - 1:+.0%})")]
    return rows


def rollouts(config, accelerator, slots: int, words: int, reply: int) -> list[tuple[str, str]]:
    """Twice as many episodes as slots: pages of so many words, replies of so many tokens."""
    device = accelerator.device
    model = build(config, torch.bfloat16 if device.type == "cuda" else torch.float32, device)
    Pages.max_steps, Pages.lengths = 8, (words, words)
    played = [dpo.Trajectory(str(n), seed=n) for n in range(2 * slots)]
    started = time.perf_counter()
    rollout(model, dpo.Encoder(word_tokenizer()), Pages, played, Sampling(
        1.0, max_tokens=4096, max_new_tokens=reply, tokens_per_forward=4096, slots=slots))
    seconds = time.perf_counter() - started  # the last tokens have been read from the device
    sampled, tokens = sum(t.action_tokens for t in played), sum(len(t.ids) for t in played)
    return [(f"rollouts, {slots} slots, sampled tokens/s", f"{sampled / seconds:,.0f}"),
            ("rollouts, tokens an episode", f"{tokens / len(played):,.0f}")]


def with_cudnn(*arguments) -> list[tuple[str, str]]:
    """Training with cuDNN's attention, which the program turns off."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    rows = training(*arguments)
    torch.backends.cuda.enable_cudnn_sdp(False)
    return [(f"{what}, cuDNN's attention", value) for what, value in rows[:1]]


def without_flash(*arguments) -> list[tuple[str, str]]:
    """Rollouts with the attention of CPUs, over the cache as tables."""
    flash, cache.varlen_attn = cache.varlen_attn, None
    rows = rollouts(*arguments)
    cache.varlen_attn = flash
    return [(f"{what}, read as tables", value) for what, value in rows[:1]]


def to_the_bit(folder: Path) -> list[tuple[str, str]]:
    """Whether a run of the tiny model gives the same weights and episodes twice."""
    runs = []
    for n in "12":
        subprocess.run([sys.executable, "lab/loop.py", "--env", "webshop", "--quick", "--out",
                        folder / n], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        files = sorted([*(folder / n).rglob("*.safetensors"), *(folder / n).glob("iter*/*.jsonl")])
        runs.append([file.read_bytes() for file in files])
    same = len(runs[0]) == len(runs[1]) and sum(map(operator.eq, *runs))
    return [("files of the tiny model's two runs that are equal", f"{same} of {len(runs[0])}")]


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", default="gpu.jsonl")
    asked = parser.parse_args(argv)
    if not asked.small and not torch.cuda.is_available():
        sys.exit("gpu.py: this machine has no GPU; --small shows that the script works")
    torch.set_num_threads(1)
    accelerator = make_accelerator(Settings(model="of this size"))
    steps, length, playing = (2, 150, (2, 20, 8)) if asked.small else (6, 3000, (32, 300, 100))
    models = dict(small=SMALL) if asked.small else MODELS
    first, *others = models.items()
    plan = [(training, *first, length, steps), (with_cudnn, *first, length, steps),
            (rollouts, *first, *playing), (without_flash, *first, *playing)]
    plan += [(training, *model, length, steps) for model in others]

    def note(model, rows):
        for what, value in rows:
            print(f"| {model:22} | {what:52} | {value:24} |", flush=True)
            with open(asked.out, "a") as file:
                file.write(json.dumps([model, what, value]) + "\n")

    name = torch.cuda.get_device_name() if accelerator.device.type == "cuda" else "CPU"
    note("", [("device", name), ("torch", torch.__version__)])
    for measure, model, config, *sizes in plan:
        try:
            note(model, measure(config, accelerator, *sizes))
        except RuntimeError as error:  # out of memory, say; the others are measured
            note(model, [(f"{measure.__name__} failed", str(error).split(". ")[0])])
        accelerator.free_memory()
    if not asked.small:
        with tempfile.TemporaryDirectory() as folder:
            note("tiny", to_the_bit(Path(folder)))


if __name__ == "__main__":
    main(sys.argv[1:])
