"""Measures a GPU with a model of billions of parameters: memory against the dry run, and speed.

    python bench/gpu.py                 Qwen3-4B's published size, random weights, on this GPU
    python bench/gpu.py --model FOLDER  the size in a hub folder's config.json
    python bench/gpu.py --small         a few thousand parameters, on any machine: the path only

Texts are random tokens, about 3,000 an episode; training is sharded over one GPU, as in a run.
Prints a Markdown table and writes it as JSON.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

import dpo
from bench.bench import Pages, fit, make_groups, word_tokenizer
from engine import sharding
from engine.cache import cache_shape
from harness.settings import Settings
from playing.rollout import Sampling, rollout
from program import dry_run
from training.models import make_accelerator

QWEN3_4B = dict(vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36,
                num_attention_heads=32, num_key_value_heads=8, head_dim=128,
                tie_word_embeddings=True, max_position_embeddings=262144)
SMALL = dict(vocab_size=2048, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
             num_attention_heads=4, num_key_value_heads=2, head_dim=16)


def build(config, dtype, device):
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="ragged")


def forward_flops(model, tokens: int, seen: int, projected: int) -> float:
    """FLOP of one pass, 2 a multiply-add, over `tokens` tokens that attend to `seen` in all.

    A token sees itself, too. The vocabulary is projected for `projected` tokens.
    """
    c = model.config.get_text_config()
    layers, _, d = cache_shape(c)
    weights = sum(p.numel() for p in sharding.layers_of(model).parameters() if p.ndim == 2)
    attention = 2 * layers * c.num_attention_heads * d * seen
    return 2 * (weights * tokens + attention + projected * c.hidden_size * c.vocab_size)


def training(config, accelerator, length: int, steps: int) -> list[tuple[str, str]]:
    """Steps over two instructions each: memory as planned and taken, tokens/s, utilisation."""
    device, rows, events = accelerator.device, [], []
    groups = make_groups(2 * steps, length, length // 3, vocabulary=config.vocab_size)
    with FakeTensorMode():
        empty = build(config, torch.bfloat16, "cpu")
    longest = max(groups, key=lambda g: g.tokens)
    predicted = sum(dry_run.training_memory(empty, longest.sequences, 1, True).values())
    model = sharding.shard_model(accelerator, build(config, torch.float32, device), True,
                                 recompute=True)
    dpo.add_reference(accelerator, model, groups, 1)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    fit(accelerator, model, [groups[2 * i:2 * i + 2] for i in range(steps)], 1, events.append)
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated()
        rows += [("training memory, GB", f"{peak / 1e9:.1f}"), ("the dry run's prediction, GB",
                 f"{predicted / 1e9:.1f} ({predicted / peak - 1:+.0%})")]
    rates = [event["tokens_per_second"] for event in events[1:]]  # the first one warms up
    rows.append(("training, tokens/s",
                 f"{statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})"))
    name = torch.cuda.get_device_name() if device.type == "cuda" else ""
    if known := next((gpu for gpu in dry_run.GPUS if gpu in name), None):
        sequences, peak = [s for g in groups for s in g.sequences], dry_run.GPUS[known][1]
        tokens = sum(len(s.ids) for s in sequences)
        flops = forward_flops(empty, tokens, sum(len(s.ids) ** 2 // 2 for s in sequences),
                              sum(s.action_tokens for s in sequences))
        rows.append((f"model FLOPs utilisation, of {peak / 1e12:.0f} TFLOP/s",
                     f"{3 * flops / tokens * statistics.median(rates) / peak:.0%}"))
    return rows


def agreement(config, accelerator, length: int) -> list[tuple[str, str]]:
    """Log-probabilities of the same trajectories in fp32 and with bf16 passes."""
    group = make_groups(1, length, length // 3, vocabulary=config.vocab_size)[0]
    model = build(config, torch.float32, accelerator.device).eval()
    with torch.no_grad():
        exact = dpo.action_log_probs(model, group.sequences)
        with torch.autocast(accelerator.device.type, torch.bfloat16):
            rounded = dpo.action_log_probs(model, group.sequences)
    off = ((rounded - exact) / exact).abs().max().item()
    return [("log-probability in bf16 against fp32, relative", f"{off:.1e}")]


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


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="hub folder whose config.json gives the size")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--out", default="gpu.json")
    asked = parser.parse_args(argv)
    if not asked.small and not torch.cuda.is_available():
        sys.exit("gpu.py: this machine has no GPU; --small shows that the script works")
    torch.set_num_threads(1)
    config = (AutoConfig.from_pretrained(asked.model) if asked.model else
              Qwen3Config(**QWEN3_4B | (SMALL if asked.small else {})))
    accelerator = make_accelerator(Settings(model="of this size"))
    length, playing = (150, (2, 20, 8)) if asked.small else (3000, (asked.slots, 300, 100))
    name = torch.cuda.get_device_name() if accelerator.device.type == "cuda" else "CPU"
    rows = [("device", name), ("torch", torch.__version__)]
    for measure, *sizes in ((training, length, asked.steps), (agreement, length),
                            (rollouts, *playing)):
        rows += measure(config, accelerator, *sizes)
        accelerator.free_memory()
    print("\n".join(f"| {what:50} | {value:24} |" for what, value in rows))
    Path(asked.out).write_text(json.dumps(dict(rows), indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
