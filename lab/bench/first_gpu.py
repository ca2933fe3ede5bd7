"""The first ten minutes of a GPU, most important first; first_gpu.jsonl gets each figure too.

    bash run.sh first-gpu            Qwen3-4B with random weights
    bash run.sh first-gpu --small    a small model on any machine: the path only
"""

import json
import random
import subprocess
import sys
import tempfile
import time
from functools import partial

import torch
from accelerate import Accelerator
from transformers import Qwen3Config

import dpo
from lab.bench import bench
from lab.careful import machine, store

MODEL = Qwen3Config(num_key_value_heads=8, hidden_size=2560, intermediate_size=9728,
                    num_hidden_layers=36, num_attention_heads=32, tie_word_embeddings=True)
PEAK = 989e12  # FLOP/s of an H100 in bf16, by its data sheet
RUN = "-m coevolve --env webshop --view short --model ./tiny --iterations 1 --max-tokens 1024"


def playing(config, device, lengths: list[int]):
    """A bf16 model, its sampler, random texts of these lengths; what writes n tokens after each."""
    encoder, rng = dpo.Encoder(bench.word_tokenizer()), random.Random(0)
    sampler = dpo.Sampler(1.0, (*encoder.never(config.vocab_size), encoder.end_of_turn))
    model = bench.make_model(config, torch.bfloat16, device)
    texts = [[rng.randrange(bench.WORDS) for _ in range(n)] for n in lengths]
    asked = [(ids, random.Random(k)) for k, ids in enumerate(texts)]
    return model, sampler, texts, lambda n: dpo.replies(model, encoder, sampler, n, (), asked)


@torch.no_grad()
def correctness(config, device, small: bool):
    """Padded passes and batches of `generate` against one text at a time, all in bf16, and fp32."""
    model, sampler, texts, reply = playing(
        config, device, [40, 23, 31] if small else [*range(100, 1700, 200)])
    made = reply(32)
    whole = [dpo.Trajectory(ids=ids + new, action_mask=[0] * len(ids) + [1] * len(new))
             for ids, (new, _) in zip(texts, made)]
    drawn = torch.tensor([x for _, row in made for x in row], device=device)
    padded = dpo.token_log_probs(model, whole, sampler)
    alone = torch.cat([dpo.token_log_probs(model, [t], sampler) for t in whole])
    model.float()
    fp32 = torch.cat([dpo.token_log_probs(model, [t], sampler) for t in whole])
    for name, x in ("a padded pass", padded), ("generate", drawn), ("fp32", fp32):
        off = (x - alone).abs()
        yield f"{name} against single texts in bf16, nats a token: rms, largest", (
            f"{off.pow(2).mean().sqrt():.4f}, {off.max():.4f}")


def training(config, device, small: bool):
    """Steps over two instructions each, of which the first warms up."""
    accelerator = Accelerator(cpu=small, mixed_precision="no" if small else "bf16")
    model, ended = dpo.prepare(bench.make_model(config, device=device), recompute=True), []
    groups = bench.make_groups(8, *((150, 50) if small else (3000, 1000)))
    how = dpo.Objective(partial(dpo.preference_loss, s=bench.SETTINGS), lambda g: 3, lr=1e-6)
    dpo.fit(model, [groups[n:n + 2] for n in range(0, 8, 2)],
            partial(dpo.log_probs, accelerator, tokens=4096), how,
            lambda event: ended.append(time.perf_counter()))
    parameters, states, token = machine.costs(config, ranks=1)
    rate = sum(len(t.ids) for t in dpo.trajectories(groups[2:])) / (ended[-1] - ended[0])
    yield "training, tokens/s", f"{rate:,.0f}"
    if device == "cuda":
        yield "MFU, of an H100's", f"{6 * parameters * rate / PEAK:.3f}"
        yield "peak memory, GB", f"{torch.cuda.max_memory_allocated() / 1e9:.1f}"
        yield "planned, GB", f"{(states + 4096 * token) / 1e9:.1f}"


def decoding(config, device, small: bool):
    """By batches of `generate`; what the first token of a reply takes, the prompt, is taken off."""
    for slots in (2, 4) if small else (32, 128):
        *_, reply = playing(config, device, [30 if small else 1500] * slots)
        times = [time.perf_counter()]
        for n in 1, 1, 8 if small else 128:  # one to warm up
            written = sum(len(ids) for ids, _ in reply(n))
            times.append(time.perf_counter())
        rate = (written - slots) / (times[3] - 2 * times[2] + times[1])
        yield f"decoding, {slots} slots, tokens/s", f"{rate:,.0f}"


def whole_run(config, device, small: bool):
    """Co-evolution with the tiny model by its folder, so that it computes as a large one."""
    tasks = "--train-tasks 4 --eval-tasks 2" if small else "--train-tasks 200 --eval-tasks 100"
    with tempfile.TemporaryDirectory() as out:
        run, started = f"{sys.executable} {RUN} {tasks} --out {out} > /dev/null", time.time()
        subprocess.run(f"timeout -s KILL {10 if small else 60} {run}; {run}", shell=True,
                       check=True, cwd=store.ROOT)
        yield "co-evolution, killed and gone on, s", f"{time.time() - started:.0f}"


def main(argv: list[str]) -> None:
    small, device, name, config = "--small" in argv, "cpu", "CPU", bench.MODEL
    if not small:
        if not torch.cuda.is_available():
            sys.exit(machine.check_torch() or "there is no GPU; --small shows that this works")
        device, name, config = "cuda", torch.cuda.get_device_name(), MODEL

    def note(what, value):
        print(f"{what:75} {value}", flush=True)
        with open("first_gpu.jsonl", "a") as file:
            print(json.dumps([what, value]), file=file)

    note("device, torch, layers", f"{name}, {torch.__version__}, {config.num_hidden_layers}")
    for part in correctness, training, decoding, whole_run:
        try:
            for row in part(config, device, small):
                note(*row)
        except (RuntimeError, subprocess.CalledProcessError) as error:  # the others are measured
            note(f"{part.__name__} failed", str(error).split("\n")[0])


if __name__ == "__main__":
    main(sys.argv[1:])
