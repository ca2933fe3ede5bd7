"""How fast training and rollouts are: against textbook code, TRL, generate and the arithmetic.

    python tests/bench.py [--quick] [--out runs/bench.json]

Alternatives run in turn with ours inside every repeat, and a ratio is formed within a repeat; the
table shows the median and its range. Seconds are those of this process's CPU time on one thread
(what else the machine runs does not count), or device time between CUDA events on a GPU. Every
alternative must give the same losses, gradients and tokens first, or the benchmark stops.

The floor is the time of the matrix products that the task needs, at the speed of a large product
measured in the same run: each distinct trajectory once through the layers (times three to train),
each token attending to its past, and the vocabulary projection at action tokens alone.
"""

import argparse
import importlib.util
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from transformers import Qwen3Config, Qwen3ForCausalLM

import coevolve
import dpo
import envs
import tiny
import worlds

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
VOCABULARY = 2048
BETA, LR = 0.1, 1e-6
REPLY_TOKENS = 22  # of each action in the mock episodes, so that batches in lockstep lose nothing


# ------------------------------------------------------------------------------------- measuring


def mark():
    """A point in time: CPU seconds of this process, or an event on the device."""
    if not CUDA:
        return time.process_time()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(a, b) -> float:
    """Seconds from mark a to mark b."""
    if not CUDA:
        return b - a
    b.synchronize()
    return a.elapsed_time(b) / 1000


def seconds(work) -> float:
    start = mark()
    work()
    return between(start, mark())


def spread(values) -> list[float]:
    """Median, smallest and largest."""
    return [statistics.median(values), min(values), max(values)]


def check(what: str, difference: float, bound: float) -> float:
    if not difference <= bound:
        raise SystemExit(f"bench: {what} differ by {difference:.1e}, more than {bound:.0e}; "
                         "what is timed is not the same work")
    return difference


def peak_flops() -> float:
    """Operations per second of a large matrix product, the best of several."""
    n = 8192 if CUDA else 1024
    a, b = torch.randn(n, n, device=DEVICE), torch.randn(n, n, device=DEVICE)
    return 2 * n ** 3 / min(seconds(lambda: a @ b) for _ in range(8))


def forward_flops(model, lengths, projected: int) -> float:
    """Operations of the matrix products in one pass over trajectories of these lengths."""
    c, tokens = model.config, sum(lengths)
    weights = sum(p.numel() for name, p in model.model.layers.named_parameters() if p.ndim == 2)
    attended = sum(n * (n + 1) / 2 for n in lengths)
    attention = 2 * c.num_hidden_layers * c.num_attention_heads * c.head_dim * attended
    return 2 * (weights * tokens + attention + projected * c.hidden_size * c.vocab_size)


# ------------------------------------------------------------------------------------ train step


def make_model(attention: str, seed: int = 0, std: float = 0.08) -> Qwen3ForCausalLM:
    """2.16 M parameters, drawn large enough that every token matters for what follows."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=192, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=6, num_key_value_heads=6, head_dim=32, max_position_embeddings=4096,
        tie_word_embeddings=True, eos_token_id=None, bos_token_id=None, pad_token_id=None)
    model = Qwen3ForCausalLM._from_config(config, attn_implementation=attention)
    for p in model.parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=std)
    return model.to(DEVICE)


def make_groups(instructions: int, length=698, actions=112, rollouts=1) -> list[dpo.Group]:
    """Instructions with an expert and `rollouts` failures of each agent, in five turns.

    `length` and `actions` are mean tokens of a trajectory. Pairs: the expert above each failure,
    and each of the target's above each of the failure agent's.
    """
    rng, groups = random.Random(0), []
    for task in range(instructions):
        prompt = [rng.randrange(VOCABULARY) for _ in range(length // 7)]
        sequences = []
        for _ in range(1 + 2 * rollouts):
            scale = rng.uniform(0.8, 1.2)
            action = round(scale * actions / 5)
            page = round((scale * length - len(prompt) - 5 * action) / 4)
            mask = ([0] * len(prompt) + [1] * action + ([0] * page + [1] * action) * 4)
            ids = prompt + [rng.randrange(VOCABULARY) for _ in mask[len(prompt):]]
            sequences.append(dpo.Sequence(ids, mask))
        failures = range(1, 1 + 2 * rollouts)
        pairs = [dpo.Pair("expert", 0, f) for f in failures]
        pairs += [dpo.Pair("failures", t, f) for t in failures[:rollouts]
                  for f in failures[rollouts:]]
        groups.append(dpo.Group(str(task), sequences, pairs))
    return groups


def objective(model, groups):
    return dpo.preference_objective(model, groups, beta=BETA)


def our_step(accelerator, model, groups) -> None:
    """One optimiser step as the program takes it, its log included."""
    dpo.fit(accelerator, model, [[groups]], objective, lambda batch: sum(len(g.pairs) for g in batch),
            lr=LR, warmup=0, schedule="constant", weight_decay=0.0, max_grad_norm=1.0,
            tokens_per_forward=4096, log=lambda event: None)


def padded(rows: list[list[int]]) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [0] * (width - len(row)) for row in rows], device=DEVICE)


def textbook_log_prob(model, sequence: dpo.Sequence, width: int):
    """log pi of one padded trajectory from all its logits, summed in float64."""
    pad = [0] * (width - len(sequence.ids))
    ids = torch.tensor([sequence.ids + pad], device=DEVICE)
    real = torch.tensor([[1] * len(sequence.ids) + pad], device=DEVICE)
    mask = torch.tensor([sequence.mask + pad], device=DEVICE)
    log_probs = model(input_ids=ids, attention_mask=real, use_cache=False).logits.log_softmax(-1)
    each = log_probs[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    return (each.double() * mask[:, 1:]).sum()


def textbook_backward(model, groups) -> float:
    """Loss and gradient, pair by pair: two passes a pair, as most DPO code does."""
    count, total = sum(len(g.pairs) for g in groups), 0.0
    for g in groups:
        for p in g.pairs:
            chosen, rejected = g.sequences[p.chosen], g.sequences[p.rejected]
            width = max(len(chosen.ids), len(rejected.ids))
            pi_w = textbook_log_prob(model, chosen, width)
            pi_l = textbook_log_prob(model, rejected, width)
            gain = (pi_w - g.reference[p.chosen]) - (pi_l - g.reference[p.rejected])
            loss = -F.logsigmoid(BETA * gain) / count
            loss.backward()
            total += loss.item()
    return total


def textbook_step(model, optimizer, groups) -> None:
    textbook_backward(model, groups)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def trl_trainer(groups, between_steps, steps: int, batch: int, folder: str):
    """TRL's DPOTrainer on the same pairs, with the reference known as it is to the others.

    Each optimiser step sees all pairs, `batch` at a time. Returns the trainer; after train(), its
    `losses` and `spans` hold each step's loss and marks. between_steps() runs after each step.
    """
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import DPOConfig, DPOTrainer

    class Trainer(DPOTrainer):
        losses, spans = [], []

        def _prepare_dataset(self, dataset, *args, **kwargs):  # it is tokenised
            return dataset

        def _precompute_ref_logps(self, dataset, *args, **kwargs):  # it is in the dataset
            return dataset

        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            self.losses.append(loss.item())
            return loss

    class Interleave(TrainerCallback):
        def on_step_begin(self, *args, **kwargs):
            self.start = self.start or mark()

        def on_step_end(self, *args, **kwargs):
            trainer.spans.append((self.start, mark()))
            between_steps()
            self.start = mark()  # reading the next batch counts: it is part of a step

        start = None

    def collate(rows):
        ids = [r["chosen"] for r in rows] + [r["rejected"] for r in rows]
        masks = [r["chosen_mask"] for r in rows] + [r["rejected_mask"] for r in rows]
        return dict(input_ids=padded(ids), attention_mask=padded([[1] * len(i) for i in ids]),
                    completion_mask=padded(masks),
                    ref_chosen_logps=torch.tensor([r["ref_chosen"] for r in rows]),
                    ref_rejected_logps=torch.tensor([r["ref_rejected"] for r in rows]))

    rows = [dict(chosen=w.ids, rejected=l.ids, chosen_mask=w.mask, rejected_mask=l.mask,
                 ref_chosen=g.reference[p.chosen], ref_rejected=g.reference[p.rejected])
            for g in groups for p in g.pairs
            for w, l in [(g.sequences[p.chosen], g.sequences[p.rejected])]]
    settings = DPOConfig(
        output_dir=folder, per_device_train_batch_size=batch,
        gradient_accumulation_steps=len(rows) // batch, max_steps=steps, learning_rate=LR,
        lr_scheduler_type="constant", beta=BETA, max_grad_norm=1.0, precompute_ref_log_probs=True,
        gradient_checkpointing=False, bf16=False, use_cpu=not CUDA, remove_unused_columns=False,
        logging_steps=10 ** 6, save_strategy="no", report_to="none", disable_tqdm=True,
        dataloader_pin_memory=False)
    trainer = Trainer(make_model("sdpa"), args=settings, train_dataset=Dataset.from_list(rows),
                      processing_class=word_tokenizer(), data_collator=collate,
                      callbacks=[Interleave()])
    return trainer


def word_tokenizer():
    words = [f"w{i}" for i in range(VOCABULARY)]
    tokenizer = tiny.make_tokenizer([" ".join(words)])
    return tokenizer
