"""The first ten minutes of a GPU, most important first: is it right, and what does it cost?

    bash run.sh first-gpu            Qwen3-4B, or 0.6B on smaller cards, with random weights
    bash run.sh first-gpu --small    a small model on any machine: the path only

Each figure is printed, and appended to first_gpu.jsonl, as soon as it is there.
"""

import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from transformers import Qwen3Config

import dpo
from lab import bench, machine

MODELS = [Qwen3Config(vocab_size=151936, head_dim=128, num_key_value_heads=8, hidden_size=hidden,
                      intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
                      tie_word_embeddings=True)
          for hidden, inner, layers, heads in ((2560, 9728, 36, 32), (1024, 3072, 28, 16))]
PEAK = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # FLOP/s in bf16, of the vendor's sheets
RUN = ("-m coevolve --env webshop --view short --iterations 1 --sft-epochs 2 --dpo-epochs 1 "
       "--sft-batch 16 --dpo-batch 16 --sft-lr 3e-4 --dpo-lr 1e-4").split()


def playing(config, device, lengths: list[int]):
    """A bf16 model, its sampler, random texts of these lengths; what writes n tokens after some."""
    encoder, rng = dpo.Encoder(bench.word_tokenizer()), random.Random(0)
    sampler = dpo.Sampler(1.0, (*encoder.never(config.vocab_size), encoder.end_of_turn))
    model = bench.make_model(config, torch.bfloat16, device)
    texts = [[rng.randrange(bench.WORDS) for _ in range(n)] for n in lengths]
    return model, sampler, texts, lambda n, some=range(len(texts)): dpo.replies(
        model, encoder, sampler, n, (), [(texts[k], random.Random(k)) for k in some])


@torch.no_grad()
def correctness(config, device, small: bool):
    """Padded passes and batches of `generate` in bf16 against one text at a time, beside what bf16
    itself is off fp32: root mean square and maximum over tokens, in nats."""
    lengths = [40, 23, 31] if small else [*range(100, 1700, 200)]
    model, sampler, texts, reply = playing(config, device, lengths)
    made = reply(32)
    whole = [dpo.Trajectory(ids=ids + new, action_mask=[0] * len(ids) + [1] * len(new))
             for ids, (new, _) in zip(texts, made)]
    found = {"a padded pass": dpo.token_log_probs(model, whole, sampler),
             "generate": torch.tensor([x for _, row in made for x in row], device=device)}
    alone = torch.cat([dpo.token_log_probs(model, [t], sampler) for t in whole])
    same = sum(reply(32, [n])[0][0] == new for n, (new, _) in enumerate(made))
    model.float()
    found["fp32"] = torch.cat([dpo.token_log_probs(model, [t], sampler) for t in whole])
    rows = [(f"{name} against single texts in bf16, nats a token: rms, largest",
             f"{(x - alone).pow(2).mean().sqrt():.4f}, {(x - alone).abs().max():.4f}")
            for name, x in found.items()]
    return [*rows, ("sampled replies that are the same alone", f"{same} of {len(made)}")]


def training(config, device, small: bool):
    """Steps over two instructions each; utilisation counts nothing that is computed again."""
    accelerator = Accelerator(cpu=device == "cpu", mixed_precision="no" if small else "bf16")
    model, ended = dpo.prepare(bench.make_model(config, device=device), True), []
    groups = bench.make_groups(8, *((150, 50) if small else (3000, 1000)))
    dpo.fit(model, [groups[n:n + 2] for n in range(0, 8, 2)],
            partial(dpo.log_probs, accelerator, tokens=4096),
            dpo.Objective(partial(dpo.preference_loss, s=bench.SETTINGS), lambda g: len(g.pairs),
                          lr=1e-6), lambda event: ended.append(time.perf_counter()))
    seconds = statistics.median(b - a for a, b in zip(ended, ended[1:]))
    lengths = [len(s.ids) for s in dpo.trajectories(groups)]
    rate, plan = sum(lengths) / 4 / seconds, 16 * model.num_parameters()
    yield "training, tokens/s", f"{rate:,.0f}"
    if device == "cuda":  # FLOPs as PaLM counts them: 6 N + 12 layers x heads x size x length
        wide = config.num_hidden_layers * config.num_attention_heads * config.head_dim
        flops = 6 * plan / 16 + 12 * wide * sum(n * n for n in lengths) / sum(lengths)
        for peak in (PEAK[card] for card in PEAK if card in torch.cuda.get_device_name()):
            yield f"model FLOPs, of {peak / 1e12:.0f} TFLOP/s", f"{flops * rate / peak:.1%}"
        taken = torch.cuda.max_memory_allocated()
        yield "peak memory; 16 bytes a parameter, GB", f"{taken / 1e9:.1f}; {plan / 1e9:.1f}"


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
    """Co-evolution with the tiny model under another name, so that it computes as a large one does;
    then the same, killed in its middle and gone on."""
    root, (train, test) = Path(__file__).resolve().parents[1], (4, 2) if small else (200, 100)
    with tempfile.TemporaryDirectory() as folder:
        model = shutil.copytree(root / "tiny", f"{folder}/model")
        for out in Path(folder, "whole"), Path(folder, "killed"):
            command = [sys.executable, *RUN, "--model", model, "--out", str(out),
                       "--train-tasks", str(train), "--eval-tasks", str(test)]
            how, started = dict(cwd=root, stdout=subprocess.DEVNULL), time.perf_counter()
            if out.name == "killed":
                process = subprocess.Popen(command, **how)
                while process.poll() is None and not (out / "sft-failure").exists():
                    time.sleep(0.05)
                process.kill()
                process.wait()
            subprocess.run(command, check=True, **how)
            yield f"co-evolution, {out.name}, s", f"{time.perf_counter() - started:.0f}"
        files = [file.relative_to(out) for file in out.rglob("*.jsonl")]
        same = sum((out / f).read_bytes() == (out.parent / "whole" / f).read_bytes() for f in files)
        yield "files that both runs have alike", f"{same} of {len(files)}"


def main(argv: list[str]) -> None:
    device, name, config = "cpu", "CPU", bench.MODEL
    if "--small" not in argv:
        if not torch.cuda.is_available():
            sys.exit(machine.check_torch() or "there is no GPU; --small shows that this works")
        card = torch.cuda.get_device_properties(0)
        device, name, config = "cuda", card.name, next((c for c in MODELS if not (
            machine.check_memory(c, 1, card.total_memory, 4096))), MODELS[-1])

    def note(what, value):
        print(f"{what:75} {value}", flush=True)
        with open("first_gpu.jsonl", "a") as file:
            file.write(json.dumps([what, value]) + "\n")

    note("device, torch, layers", f"{name}, {torch.__version__}, {config.num_hidden_layers}")
    for part in correctness, training, decoding, whole_run:
        try:
            for row in part(config, device, "--small" in argv):
                note(*row)
        except (RuntimeError, subprocess.CalledProcessError) as error:  # the others are measured
            note(f"{part.__name__} failed", str(error).split("\n")[0])


if __name__ == "__main__":
    main(sys.argv[1:])
