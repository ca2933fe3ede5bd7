"""What a training step and rollouts cost, beside textbook code, TRL and `generate`.

    bash run.sh bench [--quick] [train | rollout]

An alternative, which must first give the same losses, gradients or tokens, runs in turn with ours;
the table shows the median of the ratios within the repeats and their range, in CPU seconds of one
thread. A GPU is measured by lab/bench/gpu.py.
"""

import argparse
import functools
import importlib.util
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch.nn.utils.rnn import pad_sequence
from transformers import Qwen3Config, Qwen3ForCausalLM

from lab import play_env as envs
from lab import tokens as dpo
from lab.harness.report import section
from lab.playing.rollout import Sampling, rollout
from lab.pretrain.pretrain import make_tokenizer

VOCABULARY, WORDS = 2048, 1748  # tokens, and how many of them are words
BETA, LR = 0.1, 1e-6
TRL = importlib.util.find_spec("trl")


def seconds(work) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def in_turn(repeats: int, works: dict) -> dict[str, list[float]]:
    """Seconds of each work() in each repeat, after a round that warms up (of 0 repeats: in it)."""
    rounds = [{name: seconds(work) for name, work in works.items()} for _ in range(repeats + 1)]
    return {name: [r[name] for r in rounds[-max(repeats, 1):]] for name in works}


def check(what: str, difference: float, bound: float) -> None:
    if not difference <= bound:
        raise SystemExit(f"bench: {what} differ by {difference:.1e}, more than {bound:.0e}; "
                         "the alternative does not do the same work")


def compared(what, against, unit, amounts, times) -> dict:
    """A row: `amounts` and `times`, ours and the other's, are work done and seconds per repeat."""
    (ours, other), (our_times, other_times) = amounts, times
    ratios = [(b / other) / (a / ours) for a, b in zip(our_times, other_times)]
    return dict(what=what, against=against, unit=unit, ours=ours / statistics.median(our_times),
                other=other / statistics.median(other_times),
                ratio=[statistics.median(ratios), min(ratios), max(ratios)])


def make_model(attention: str) -> Qwen3ForCausalLM:
    """2.16 M parameters, drawn large enough that every token matters for what follows."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=192, intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=6, num_key_value_heads=6, head_dim=32, max_position_embeddings=4096,
        tie_word_embeddings=True, eos_token_id=None, bos_token_id=None, pad_token_id=None)
    model = Qwen3ForCausalLM._from_config(config, attn_implementation=attention)
    for p in model.parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=0.08)
    return model


def make_groups(instructions: int, length: int, actions: int, common: float = 1 / 7,
                vocabulary: int = VOCABULARY) -> list[dpo.Group]:
    """Instructions with an expert and a failure of each of two agents, in five turns, in 3 pairs.

    `length` and `actions` are mean tokens of a trajectory; `common` is the share of `length` with
    which an instruction's trajectories begin alike.
    """
    rng, groups, alike = random.Random(0), [], int(common * length)

    def trajectory():
        scale, prompt = rng.uniform(0.8, 1.2), length // 7
        action = round(scale * actions / 5)
        page = round((scale * length - prompt - 5 * action) / 4)
        mask = [0] * prompt + [1] * action + ([0] * page + [1] * action) * 4
        return [rng.randrange(vocabulary) for _ in mask], mask

    for task in range(instructions):
        (ids, mask), *others = (trajectory() for _ in range(3))
        sequences = [dpo.Trajectory(ids=ids, action_mask=mask)] + [
            dpo.Trajectory(ids=ids[:alike] + other[alike:],
                           action_mask=mask[:alike] + other_mask[alike:])
            for other, other_mask in others]
        pairs = [dpo.Pair("expert", 0, 1), dpo.Pair("expert", 0, 2), dpo.Pair("failures", 1, 2)]
        groups.append(dpo.Group(str(task), sequences, pairs))
    return groups


def fit(accelerator, model, batches, tokens_per_forward=4096, log=lambda event: None) -> None:
    """Preference steps as the program takes them, one a batch of groups, the log included."""
    loss = functools.partial(dpo.preference_loss, beta=BETA)
    how = dpo.Optimisation(lr=LR, warmup=0, schedule="constant", weight_decay=0.0,
                           max_grad_norm=1.0, tokens_per_forward=tokens_per_forward)
    dpo.fit(accelerator, model, [batches], dpo.Objective(loss, dpo.count_pairs), how, log)


def batch_of_pair(group: dpo.Group, pair: dpo.Pair) -> dict:
    """The tensors of a pair as TRL's collator names them, chosen before rejected."""
    def padded(rows):
        return pad_sequence([torch.tensor(row) for row in rows], batch_first=True)

    sides = [group.sequences[i] for i in (pair.chosen, pair.rejected)]
    return dict(input_ids=padded(s.ids for s in sides),
                attention_mask=padded([1] * len(s.ids) for s in sides),
                completion_mask=padded(s.action_mask for s in sides),
                ref_chosen_logps=torch.tensor([group.reference[pair.chosen]]),
                ref_rejected_logps=torch.tensor([group.reference[pair.rejected]]))


def textbook_backward(model, batches: list[dict]) -> float:
    """Loss and gradient pair by pair, all logits, as most DPO code: both sides in one pass."""
    total = 0.0
    for b in batches:
        ids, mask = b["input_ids"], b["completion_mask"]
        logits = model(input_ids=ids, attention_mask=b["attention_mask"], use_cache=False).logits
        each = logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
        pi_w, pi_l = (each.double() * mask[:, 1:]).sum(1)
        gain = (pi_w - b["ref_chosen_logps"]) - (pi_l - b["ref_rejected_logps"])
        loss = -F.logsigmoid(BETA * gain).mean() / len(batches)
        loss.backward()
        total += loss.item()
    return total


def step(model, optimizer, backward) -> float:
    """One optimiser step after backward(), which returns the loss."""
    loss = backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def trl_step(batches: list[dict]):
    """A function that takes one step of TRL's DPOTrainer, as its own loop does; it gives the loss.
    """
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    class Trainer(DPOTrainer):  # the batches are made already
        _prepare_dataset = _precompute_ref_logps = lambda self, dataset, *_, **__: dataset

    settings = DPOConfig(
        output_dir=tempfile.gettempdir(), per_device_train_batch_size=1, beta=BETA, bf16=False,
        learning_rate=LR, lr_scheduler_type="constant", precompute_ref_log_probs=True,
        gradient_checkpointing=False, use_cpu=True, report_to="none", disable_tqdm=True)
    trainer = Trainer(make_model("sdpa"), args=settings, processing_class=word_tokenizer(),
                      train_dataset=Dataset.from_list([dict(unused=0)]))
    optimizer = trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = len(batches)
    return lambda: step(trainer.model, optimizer, lambda: sum(
        trainer.training_step(trainer.model, dict(batch)).item() for batch in batches))


def train_rows(quick: bool) -> list[dict]:
    """With the prompt alone in common; then with half of a trajectory, about as in real runs."""
    if not TRL:
        print("bench: TRL is not installed, its rows are left out (pip install trl)")
    return [row for share in ("1/7", "1/2")
            for row in step_rows(share, *(2, 200, 32, 0) if quick else (4, 698, 112, 5))]


def step_rows(share: str, instructions: int, length: int, actions: int, repeats: int) -> list[dict]:
    common, accelerator = 1 / int(share[-1]), Accelerator(cpu=True)
    groups = make_groups(instructions, length, actions, common)
    pairs = dpo.count_pairs(groups)
    ours, other = make_model("ragged"), make_model("sdpa")
    for g, found in zip(groups, dpo.log_probs_of(accelerator, ours, groups, 4096)):
        g.reference = found
    for g in groups:  # margins other than 0
        g.reference = [log_prob + n for n, log_prob in enumerate(g.reference)]
    loss = dpo.preference_loss(ours, groups, beta=BETA)[0] / pairs
    loss.backward()
    batches = [batch_of_pair(g, p) for g in groups for p in g.pairs]
    check("losses", abs(loss.item() - textbook_backward(other, batches)), 1e-5)
    check("gradients", max((a.grad - b.grad).abs().max().item() for a, b in zip(
        ours.parameters(), other.parameters())), 1e-5)
    ours.zero_grad()
    other.zero_grad()

    optimizer = torch.optim.AdamW(other.parameters(), lr=LR, weight_decay=0.0)
    works = {"ours": lambda: fit(accelerator, ours, [groups]),
             "pair by pair, padded, all logits": lambda: step(
                 other, optimizer, lambda: textbook_backward(other, batches))}
    if TRL:
        works[f"TRL, batch 1 x accumulation {pairs}"] = trl = trl_step(batches)
        check("losses of ours and TRL", abs(loss.item() - trl()), 1e-4)
    times = in_turn(repeats, works)
    return [compared(f"train step, {share} in common", name, "pairs/s", (pairs, pairs),
                     (times["ours"], times[name])) for name in [*works][1:]]


def word_tokenizer():
    return make_tokenizer([" ".join(f"w{i}" for i in range(WORDS))])


class Pages(envs.World):
    """Episodes of 4-6 turns with pages of 60-150 tokens that depend on the task alone."""

    max_steps, lengths = 6, (60, 150)

    def reset(self, task):
        self.rng, self.left = random.Random(task), self.max_steps - 2 + int(task) % 3
        return self.page()

    def step(self, reply):
        self.left -= 1
        return envs.Step(self.page(), 0.0, self.left == 0)

    def page(self):
        return " ".join(f"w{self.rng.randrange(WORDS)}"
                        for _ in range(self.rng.randint(*self.lengths)))


def make_player(attention: str, encoder) -> Qwen3ForCausalLM:
    """A model whose replies end by themselves after some 20 tokens."""
    model = make_model(attention).eval()
    with torch.no_grad():  # suppressed: of 2,000 logits the best is always above 0
        model.lm_head.weight[list(encoder.suppress_tokens(VOCABULARY))] = 0
        model.lm_head.weight[encoder.end_of_turn] *= 1.9
    return model


def our_rollout(model, encoder, tasks, slots) -> list[dpo.Trajectory]:
    return rollout(model, encoder, Pages, [dpo.Trajectory(task=str(task)) for task in tasks],
                   Sampling(0.0, max_tokens=1280, max_new_tokens=30, tokens_per_forward=4096,
                            slots=slots))


@torch.inference_mode()
def generate_rollout(model, encoder, task) -> list[int]:
    """The ids of one episode; each turn generates from all that was said before."""
    env, end = Pages(), encoder.end_of_turn
    ids = encoder.start(envs.opening(env, env.reset(str(task))))
    while True:
        written = model.generate(
            input_ids=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)).long(),
            do_sample=False, max_new_tokens=30, eos_token_id=end, pad_token_id=end,
            suppress_tokens=list(encoder.suppress_tokens(VOCABULARY)))[0].tolist()
        reply = written[len(ids):] + [end] * (written[-1] != end)
        ids += reply
        answer = env.step(encoder.decode(reply))
        if answer.done:
            return ids
        ids += encoder.observation(answer.observation)


def rollout_rows(quick: bool) -> list[dict]:
    """All our episodes against the first few one by one."""
    many, few, slots, repeats = (4, 2, 4, 0) if quick else (192, 12, 64, 5)
    encoder = dpo.Encoder(word_tokenizer())
    ours, other = make_player("ragged", encoder), make_player("sdpa", encoder)
    played = our_rollout(ours, encoder, range(many), slots)
    single = [generate_rollout(other, encoder, task) for task in range(few)]
    check("the tokens of episodes", sum(t.ids != ids for t, ids in zip(played, single)), 0)
    times = in_turn(repeats, {
        "ours": lambda: our_rollout(ours, encoder, range(many), slots),
        "other": lambda: [generate_rollout(other, encoder, task) for task in range(few)]})
    return [compared(f"rollout, {slots} slots", "generate, one episode at a time", "tokens/s",
                     (sum(len(t.ids) for t in played), sum(map(len, single))),
                     (times["ours"], times["other"]))]


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], prog="run.sh bench")
    parser.add_argument("section", nargs="?", choices=("train", "rollout"), help="none: both")
    parser.add_argument("--quick", action="store_true", help="less of everything, no repeats")
    asked = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows = train_rows(asked.quick) if asked.section != "rollout" else []
    rows += rollout_rows(asked.quick) if asked.section != "train" else []
    print(section("Ours beside others", "<work <against <unit ours other ratio (range)", [
        (r["what"], r["against"], r["unit"], f"{r['ours']:,.4g}", f"{r['other']:,.4g}",
         "{:.2f}".format(r["ratio"][0]), "({1:.2f}-{2:.2f})".format(*r["ratio"])) for r in rows]))


if __name__ == "__main__":
    main(sys.argv[1:])
