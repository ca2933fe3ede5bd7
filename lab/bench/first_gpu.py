"""The first minutes of a GPU, most important first; first_gpu.jsonl gets each figure too.

    bash run.sh first-gpu            Qwen3-4B with random weights, SmolLM2 for what needs real ones
    bash run.sh first-gpu --small    a small model on any machine: the path only
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from functools import partial
from importlib.util import find_spec

import torch
import transformers
from accelerate import Accelerator
from transformers import Qwen3Config

import coevolve
import dpo
from lab.bench import bench
from lab.careful import machine, store
from lab.pretrain import smollm2

MODEL = Qwen3Config(num_key_value_heads=8, hidden_size=2560, intermediate_size=9728,
                    num_hidden_layers=36, num_attention_heads=32, tie_word_embeddings=True)
PEAK = 989e12  # FLOP/s of an H100 in bf16, by its data sheet
PASS = 4096    # tokens of a training pass
RUN = "-m coevolve --env webshop --view short --model ./tiny --iterations 1 --max-tokens 1024"


class Playing:
    """A bf16 model of random weights, and random texts that it goes on from."""

    def __init__(self, config, device, lengths: list[int]):
        rng = random.Random(0)
        self.encoder = dpo.Encoder(bench.word_tokenizer(), config.vocab_size)
        self.sampler = dpo.Sampler(1.0, (*self.encoder.sampler().never, self.encoder.end_of_turn))
        self.model = bench.make_model(config, torch.bfloat16, device)
        self.texts = [rng.choices(range(bench.WORDS), k=n) for n in lengths]

    def replies(self, tokens: int, cache: bool | str = True):
        """Writes so many tokens after each text."""
        asked = [(ids, random.Random(n)) for n, ids in enumerate(self.texts)]
        return dpo.replies(self.model, self.encoder, self.sampler, tokens, (), asked, False, cache)


def trial(config, device, small: bool):
    """How the core has to ask a real model, which it finds in fp32 before a run's first phase."""
    folder = coevolve.MODELS["tiny"] if small else smollm2.base()
    encoder = dpo.Encoder(transformers.AutoTokenizer.from_pretrained(folder))
    started = time.perf_counter()
    model = dpo.read_model(folder, torch.bfloat16, device).eval()
    ways = dpo.trial(model, encoder, 64 if small else 4096)
    yield "trial: passes alone, replies alone, with a cache", ways
    yield "trial, s", f"{time.perf_counter() - started:.0f}"


@torch.no_grad()
def correctness(config, device, small: bool):
    """Padded passes and batches of `generate` against one text at a time, all in bf16, and fp32."""
    playing = Playing(config, device, [40, 23, 31] if small else [*range(100, 1700, 200)])
    model = playing.model
    whole, drawn = [], []
    for ids, (reply, log_probs) in zip(playing.texts, playing.replies(32)):
        mask = [0] * len(ids) + [1] * len(reply)
        whole.append(dpo.Trajectory(ids=ids + reply, action_mask=mask))
        drawn += log_probs
    padded = dpo.token_log_probs(model, whole, playing.sampler)
    alone = torch.cat([dpo.token_log_probs(model, [t], playing.sampler) for t in whole])
    model.float()
    fp32 = torch.cat([dpo.token_log_probs(model, [t], playing.sampler) for t in whole])
    drawn = torch.tensor(drawn, device=device)
    for name, values in ("a padded pass", padded), ("generate", drawn), ("fp32", fp32):
        off = (values - alone).abs()
        yield f"{name} against single texts in bf16, nats a token: rms, largest", (
            f"{off.pow(2).mean().sqrt():.4f}, {off.max():.4f}")


def training(config, device, small: bool):
    """Steps over two tasks each, of which the first warms up. Trajectories have all lengths, so
    that cuDNN, which plans for each, is measured as it would be met."""
    accelerator = Accelerator(cpu=small, mixed_precision="no" if small else "bf16")
    parameters, states, token = machine.costs(config, ranks=1)
    for cudnn in False, True:
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        model = dpo.prepare(bench.make_model(config, device=device), recompute=True)
        groups = bench.make_groups(8, *((150, 50) if small else (3000, 1000)))
        steps = [groups[n:n + 2] for n in range(0, 8, 2)]
        objective = dpo.Objective(partial(dpo.preference_loss, s=bench.SETTINGS),
                                  coevolve.pair_count, lr=1e-6)
        log_probs = partial(dpo.log_probs_in_passes, accelerator, tokens=PASS)
        ended = []
        for _ in dpo.training(model, dpo.adamw(model, objective), steps, objective, log_probs):
            ended.append(time.perf_counter())
        read = sum(len(t.ids) for t in dpo.trajectories_of(groups[2:]))
        rate = read / (ended[-1] - ended[0])
        yield f"training, cuDNN's attention {'on' if cudnn else 'off'}, tokens/s", f"{rate:,.0f}"
        if device == "cuda":
            yield "MFU, of an H100's", f"{6 * parameters * rate / PEAK:.3f}"
        del model, log_probs  # two do not fit
        dpo.collect()
    torch.backends.cuda.enable_cudnn_sdp(False)
    if device == "cuda":
        yield "peak memory, GB", f"{torch.cuda.max_memory_allocated() / 1e9:.1f}"
        yield "planned, GB", f"{(states + PASS * token) / 1e9:.1f}"


def lengths_of(slots: int, small: bool) -> list[int]:
    """Tokens of the conversations of so many slots, of all lengths."""
    longest = 30 if small else 1500
    return [longest - n % (longest // 2) for n in range(slots)]


def decoding(config, device, small: bool):
    """By batches of `generate`; what the first token of a reply takes, the prompt, is taken off."""
    for slots in (2, 4) if small else (32, 128):
        playing = Playing(config, device, lengths_of(slots, small))
        for cache, name in (True, "dynamic"), ("static", "static"):
            times = [time.perf_counter()]
            for tokens in 1, 1, 8 if small else 128:  # one to warm up
                written = sum(len(ids) for ids, _ in playing.replies(tokens, cache))
                times.append(time.perf_counter())
            rate = (written - slots) / (times[3] - 2 * times[2] + times[1])
            yield f"decoding, {slots} slots, {name} cache, tokens/s", f"{rate:,.0f}"


def by_vllm(config, device, small: bool):
    """The same replies by vLLM, where it is installed."""
    if small or find_spec("vllm") is None:
        return
    from vllm import LLM, SamplingParams
    with tempfile.TemporaryDirectory() as folder:
        bench.make_model(config, torch.bfloat16).save_pretrained(folder)
        bench.word_tokenizer().save_pretrained(folder)
        engine = LLM(folder, max_model_len=2048)
        rng = random.Random(0)
        for slots in 32, 128:
            texts = []
            for length in lengths_of(slots, small):
                texts.append(dict(prompt_token_ids=rng.choices(range(bench.WORDS), k=length)))
            seconds = []
            for tokens in 1, 1, 128:
                started = time.perf_counter()
                engine.generate(texts, SamplingParams(max_tokens=tokens, ignore_eos=True))
                seconds.append(time.perf_counter() - started)
            yield f"decoding, {slots} slots, vLLM, tokens/s", (
                f"{slots * 127 / (seconds[2] - seconds[1]):,.0f}")


def whole_run(config, device, small: bool):
    """Co-evolution with the tiny model by its folder, so that it computes as a large one."""
    tasks = "--train-tasks 4 --eval-tasks 2" if small else "--train-tasks 200 --eval-tasks 100"
    with tempfile.TemporaryDirectory() as out:
        run = f"{sys.executable} {RUN} {tasks} --out {out} > /dev/null"
        started = time.time()
        subprocess.run(f"timeout -s KILL {10 if small else 60} {run}; {run}", shell=True,
                       check=True, cwd=store.ROOT)
        yield "co-evolution, killed and gone on, s", f"{time.time() - started:.0f}"


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="run.sh first-gpu", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true",
                        help="a small model on the CPU, which shows that this works")
    small = parser.parse_args(argv).small
    device, name, config = "cpu", "CPU", bench.MODEL
    if not small:
        if not torch.cuda.is_available():
            sys.exit(machine.check_torch() or "there is no GPU; --small shows that this works")
        device, name, config = "cuda", torch.cuda.get_device_name(), MODEL

    def note(what, value):
        print(f"{what:75} {value}", flush=True)
        with open("first_gpu.jsonl", "a") as file:
            print(json.dumps([what, value]), file=file)

    note("device, torch, layers", f"{name}, {torch.__version__}, {config.num_hidden_layers}")
    for part in trial, correctness, training, decoding, by_vllm, whole_run:
        try:
            for row in part(config, device, small):
                note(*row)
        except (RuntimeError, dpo.Unusable, subprocess.CalledProcessError) as error:
            note(f"{part.__name__} failed", str(error).split("\n")[0])  # the others are measured


if __name__ == "__main__":
    main(sys.argv[1:])
