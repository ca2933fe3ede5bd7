"""Measures a GPU with a model of billions of parameters: memory against the dry run, and speed.

    python bench/gpu.py                 Qwen3-4B's published size, random weights, on this GPU
    python bench/gpu.py --model FOLDER  the size in a hub folder's config.json
    python bench/gpu.py --small         a few thousand parameters, on any machine: the path only

Texts are random tokens of real lengths (2,000 to 4,000 tokens an episode). Prints a Markdown table
and writes it as JSON. Training takes preference steps as the program does, sharded over one GPU.
"""

import argparse
import functools
import json
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from conftest import make_tokenizer
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

import dpo
import envs
from engine import sharding
from harness import dry_run
from harness.models import make_accelerator
from harness.play import rollout
from harness.settings import Settings

QWEN3_4B = dict(vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36,
                num_attention_heads=32, num_key_value_heads=8, head_dim=128,
                tie_word_embeddings=True, max_position_embeddings=262144)
SMALL = dict(vocab_size=600, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=True,
             max_position_embeddings=8192)


class Pages:
    """An environment that answers any reply with a page of random words, eight times."""

    max_steps, prompt, latency, words = 8, "You shop.", 0, 60

    def _page(self):
        return " ".join(self.rng.choice(("red", "mug", "price", "Buy")) for _ in range(self.words))

    def reset(self, task):
        self.rng, self.step_number = random.Random(task), 0
        return self._page()

    def step(self, reply):
        self.step_number += 1
        return envs.Step(self._page(), 0.5, self.step_number == self.max_steps)

    def close(self):
        pass


def build(config, dtype, device):
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="ragged")


def make_groups(vocabulary, count, low, high):
    """Instructions of three trajectories and three pairs; a third of the tokens are replies."""
    rng, groups = random.Random(0), []
    for n in range(count):
        sequences = []
        for _ in range(3):
            length = rng.randint(low, high)
            sequences.append(dpo.Trajectory(
                ids=[rng.randrange(vocabulary) for _ in range(length)],
                action_mask=[int(i % 90 >= 60) for i in range(length)]))
        pairs = [dpo.Pair("expert>target", 0, 1, 0.5, 0.5), dpo.Pair("expert>failure", 0, 2, 0.5,
                 0.5), dpo.Pair("failure>failure", 1, 2)]
        groups.append(dpo.Group(str(n), sequences, pairs))
    return groups


def forward_flops(config, sequences) -> float:
    """FLOP of one forward pass: 2 a weight and token, and the attention of each token to half.

    Embeddings are looked up, and the vocabulary is projected for action tokens alone.
    """
    with FakeTensorMode():
        model = AutoModelForCausalLM.from_config(config)
    weights = sum(p.numel() for p in model.get_decoder().layers.parameters())
    head = model.get_output_embeddings().weight.numel()
    c = config
    attention = 2 * c.num_hidden_layers * c.num_attention_heads * c.head_dim
    return sum(2 * weights * len(s.ids) + 2 * head * s.action_tokens + attention * len(s.ids) ** 2
               for s in sequences)


def training(config, accelerator, low, high, steps) -> list[tuple]:
    device = accelerator.device
    groups = make_groups(config.vocab_size, 2 * steps, low, high)
    with FakeTensorMode():
        empty = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16,
                                                 attn_implementation="ragged")
    longest = max(groups, key=lambda g: g.tokens)
    predicted = sum(dry_run.training_memory(empty, longest.sequences, 1, True).values())
    model = sharding.shard_model(accelerator, build(config, torch.float32, device), True,
                                 recompute=True)
    dpo.add_reference(accelerator, model, groups, 1)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times, clock = [], [time.perf_counter()]

    def log(event):
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - clock[0])
        clock[0] = time.perf_counter()

    batches = [groups[2 * i:2 * i + 2] for i in range(steps)]
    dpo.fit(accelerator, model, [batches],
            functools.partial(dpo.preference_objective, beta=0.1, lambda_sft=0.1),
            dpo.count_pairs, lr=1e-6, warmup=0, schedule="constant", weight_decay=0.0,
            max_grad_norm=1.0, tokens_per_forward=1, log=log)
    rows = []
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
        rows += [("training memory, GB", f"{peak / 1e9:.1f}"),
                 ("the dry run's prediction, GB", f"{predicted / 1e9:.1f} "
                  f"({predicted / peak - 1:+.0%})")]
    rates, shares = [], []
    for batch, seconds in list(zip(batches, times))[1:]:  # the first one warms up
        sequences = [s for g in batch for s in g.sequences]
        rates.append(sum(len(s.ids) for s in sequences) / seconds)
        shares.append(3 * forward_flops(config, sequences) / seconds)
    rows.append(("training, tokens/s", f"{statistics.median(rates):,.0f} ({min(rates):,.0f} to "
                                       f"{max(rates):,.0f})"))
    known = device.type == "cuda" and next(
        (gpu for gpu in dry_run.GPUS if gpu in torch.cuda.get_device_name()), None)
    if known:
        rows.append((f"model FLOPs utilisation, of {dry_run.GPUS[known][1] / 1e12:.0f} TFLOP/s",
                     f"{statistics.median(shares) / dry_run.GPUS[known][1]:.0%}"))
    return rows


def agreement(config, accelerator, low, high) -> list[tuple]:
    """Log-probabilities of the same trajectories in fp32 and with bf16 passes."""
    group = make_groups(config.vocab_size, 1, low, high)[0]
    model = build(config, torch.float32, accelerator.device).eval()
    with torch.no_grad():
        exact = dpo.action_log_probs(model, group.sequences)
        with torch.autocast(accelerator.device.type, torch.bfloat16):
            rounded = dpo.action_log_probs(model, group.sequences)
    off = ((rounded - exact) / exact).abs().max().item()
    return [("log-probability in bf16 against fp32, relative", f"{off:.1e}")]


def rollouts(config, accelerator, slots, episodes, small) -> list[tuple]:
    device, tokenizer = accelerator.device, make_tokenizer("chatml")
    model = build(config, torch.float32 if small else torch.bfloat16, device)
    Pages.words = 20 if small else 300
    played = [dpo.Trajectory(str(n), "target", 1, 0, seed=n) for n in range(episodes)]
    started = time.perf_counter()
    rollout(model, dpo.Encoder(tokenizer), Pages, played, temperature=1.0, slots=slots,
            max_tokens=4096, max_new_tokens=8 if small else 100, tokens_per_forward=4096)
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    sampled, all_ = (sum(map(count, played)) for count in (lambda e: sum(e.action_mask),
                                                           lambda e: len(e.ids)))
    return [(f"rollouts, {slots} slots, sampled tokens/s", f"{sampled / seconds:,.0f}"),
            ("rollouts, tokens an episode", f"{all_ / episodes:,.0f}")]


def main(argv) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="hub folder whose config.json gives the size")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--out", default="gpu.json")
    asked = parser.parse_args(argv)
    if not asked.small and not torch.cuda.is_available():
        sys.exit("gpu.py: this machine has no GPU; --small shows that the script works")
    config = (AutoConfig.from_pretrained(asked.model) if asked.model else
              Qwen3Config(**SMALL if asked.small else QWEN3_4B))
    accelerator = make_accelerator(Settings(model="of this size"))
    low, high = (100, 200) if asked.small else (2000, 4000)
    name = torch.cuda.get_device_name() if accelerator.device.type == "cuda" else "CPU"
    rows = [("device", name), ("torch", torch.__version__)]
    for part in (lambda: training(config, accelerator, low, high, asked.steps),
                 lambda: agreement(config, accelerator, low, high),
                 lambda: rollouts(config, accelerator, 2 if asked.small else asked.slots,
                                  4 if asked.small else 2 * asked.slots, asked.small)):
        rows += part()
        accelerator.free_memory()
    print("\n".join(f"| {what:50} | {value:24} |" for what, value in rows))
    Path(asked.out).write_text(json.dumps(dict(rows), indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
