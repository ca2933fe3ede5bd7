"""What training and rollouts cost, beside others' code: the textbook's loop, TRL (where it is
installed), and transformers' `generate`.

    bash run.sh bench [--quick] [train | rollout]

All must first give the same losses, gradients and tokens; then they run in turn. Printed are speeds
in CPU seconds of one thread, and how many times as fast ours is: median and range of the repeats.
"""

import argparse
import importlib.util
import random
import statistics
import sys
import tempfile
import time
from copy import deepcopy
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.utils.logging import disable_progress_bar

import coevolve
import dpo
from dpo import Group, Pair, Trajectory
from engine.chat import Encoder
from engine.playing import play
from engine.run import Run
from lab.pretrain.pretrain import make_tokenizer
from worlds import Step, World, environment

BETA = 0.1
WORDS = 1748  # of the tokenizer's 2,048 tokens
# 2.16 M parameters.
MODEL = Qwen3Config(
    vocab_size=2048, hidden_size=192, intermediate_size=512, num_hidden_layers=4,
    num_attention_heads=6, num_key_value_heads=6, head_dim=32, max_position_embeddings=4096,
    tie_word_embeddings=True, eos_token_id=None, bos_token_id=None, pad_token_id=None)
TRL = importlib.util.find_spec("trl")


def make_model(config=MODEL, dtype=torch.float32, device="cpu"):
    """A model with weights so large that every token matters for what follows."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(deepcopy(config), dtype=dtype)  # TRL changes it
    for p in model.parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=0.08)
    return model.eval()


def make_groups(tasks: int, length: int, actions: int, common: float = 1 / 7) -> list[Group]:
    """Tasks with an expert and a failure of each of two agents, in five turns, in 3 pairs.
    `length` and `actions` are mean tokens of a trajectory, of which the share `common` is alike."""
    rng = random.Random(0)
    alike = int(common * length)
    groups = []
    for task in range(tasks):
        trajectories = []
        for _ in range(3):
            scale = rng.uniform(0.8, 1.2)
            page = round(scale * (length - actions) / 5)
            action = round(scale * actions / 5)
            mask = ([0] * page + [1] * action) * 5
            ids = [rng.randrange(MODEL.vocab_size) for _ in mask]
            if trajectories:
                ids = trajectories[0].ids[:alike] + ids[alike:]
                mask = trajectories[0].action_mask[:alike] + mask[alike:]
            trajectories.append(Trajectory(str(task), ids=ids, action_mask=mask))
        e, a, b = trajectories
        groups.append(Group([e, a, b], [Pair("expert", e, a, sft_weight=0.5),
                                        Pair("expert", e, b, sft_weight=0.5),
                                        Pair("failures", a, b)]))
    return groups


def check(what: str, difference: float, bound: float) -> None:
    if not difference <= bound:
        raise SystemExit(f"bench: {what} differ by {difference:.1e}, more than {bound:.0e}; the "
                         "two do not do the same work")


def compare(what: str, unit: str, repeats: int, ours: tuple, others: dict) -> None:
    """Runs works, (work, how many of the unit it does), in turn, after a round that warms up, or,
    of 0 repeats, in it; and prints a line for ours beside each of the others."""
    rounds = []
    for _ in range(repeats + 1):
        speeds = {}
        for name, (work, amount) in {"ours": ours, **others}.items():
            started = time.process_time()
            work()
            speeds[name] = amount / (time.process_time() - started)
        rounds.append(speeds)
    rounds = rounds[-max(repeats, 1):]
    for name in others:
        ratios = sorted(speeds["ours"] / speeds[name] for speeds in rounds)
        both = [statistics.median(speeds[one] for speeds in rounds) for one in ("ours", name)]
        print(f"{what}, {unit}: ours {both[0]:8,.4g}   {name} {both[1]:8,.4g}   ratio "
              f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})")


# ------------------------------------------------------------------------------------- training


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


def batch_of_pair(pair: Pair) -> dict:
    """The tensors of a pair as TRL's collator names them, chosen before rejected."""
    def padded(rows):
        return pad_sequence([torch.tensor(row) for row in rows], batch_first=True)

    sides = [pair.chosen, pair.rejected]
    return dict(input_ids=padded(t.ids for t in sides),
                attention_mask=padded([1] * len(t.ids) for t in sides),
                completion_mask=padded(t.action_mask for t in sides),
                ref_chosen_logps=torch.tensor([pair.chosen.reference]),
                ref_rejected_logps=torch.tensor([pair.rejected.reference]))


def step(model, optimizer, backward) -> float:
    loss = backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def our_step(run: Run, model, groups: list[Group]) -> None:
    loss = partial(dpo.preference_loss, beta=BETA, lambda_sft=0.0)
    for _ in dpo.train(model, dpo.adamw(model), [groups], [1e-6], loss, dpo.pair_count,
                       run.log_probs, tokens=run.tokens_at_once):
        pass


def trl_step(batches: list[dict]):
    """What takes a step of TRL's DPOTrainer, as its own loop does, and gives the loss."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    class Trainer(DPOTrainer):  # the batches are made already
        _prepare_dataset = _precompute_ref_logps = lambda self, dataset, *_, **__: dataset

    settings = DPOConfig(
        output_dir=tempfile.gettempdir(), per_device_train_batch_size=1, beta=BETA,
        bf16=False, learning_rate=1e-6, lr_scheduler_type="constant", precompute_ref_log_probs=True,
        gradient_checkpointing=False, use_cpu=True, report_to="none", disable_tqdm=True)
    trainer = Trainer(make_model(), args=settings, processing_class=make_tokenizer(["w"]),
                      train_dataset=Dataset.from_list([dict(unused=0)]))
    optimizer = trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = len(batches)
    return lambda: step(trainer.model, optimizer, lambda: sum(
        trainer.training_step(trainer.model, dict(batch)).item() for batch in batches))


def train(run: Run, folder: Path, quick: bool) -> None:
    """Steps with the prompt alone in common, and with half of a trajectory, as in real runs."""
    tasks, length, actions, repeats = (2, 200, 32, 0) if quick else (4, 698, 112, 5)
    for share in 1 / 7, 1 / 2:
        groups = make_groups(tasks, length, actions, share)
        other = make_model()
        pairs = dpo.pairs_of(groups)
        trajectories = dpo.trajectories_of(groups)
        for n, t in enumerate(trajectories):  # one by one; margins other than 0
            with torch.no_grad():
                t.reference = dpo.token_log_probs(other, [t]).double().sum().item() + n % 3
        batches = [batch_of_pair(pair) for pair in pairs]
        expected = textbook_backward(other, batches)
        check_ours(run, run.load(folder / "model"), groups, other, expected)
        other.zero_grad()
        optimizer = torch.optim.AdamW(other.parameters(), lr=1e-6, weight_decay=0.0)
        backward = partial(textbook_backward, other, batches)
        others = {"pair by pair, padded, all logits": (
            partial(step, other, optimizer, backward), len(pairs))}
        if TRL:
            of_trl = trl_step(batches)
            check("losses of TRL and the textbook", abs(of_trl() - expected), 1e-4)
            others[f"TRL, batch 1 x accumulation {len(pairs)}"] = of_trl, len(pairs)
        ours = partial(our_step, run, run.load(folder / "model"), groups), len(pairs)
        compare(f"train step, {share:.0%} in common", "pairs/s", repeats, ours, others)


def check_ours(run: Run, model, groups: list[Group], other, expected: float) -> None:
    """Our loss and gradient are those of the textbook, whose gradient is in the other model."""
    policy = run.log_probs(model, dpo.trajectories_of(groups))
    loss, _ = dpo.preference_loss(policy, groups, BETA, lambda_sft=0.0)
    loss = loss / dpo.pair_count(groups)
    loss.backward()
    check("losses of ours and the textbook", abs(loss.item() - expected), 1e-5)
    for p, q in zip(model.parameters(), other.parameters()):
        check("gradients of ours and the textbook", (p.grad - q.grad).abs().max().item(), 1e-5)


# ------------------------------------------------------------------------------------- rollouts


class Pages(World):
    """Episodes of 4-6 turns with pages of 60-150 tokens that depend on the task alone."""
    max_steps, stops = 6, ()

    def reset(self, task):
        self.rng, self.left = random.Random(task), self.max_steps - 2 + int(task) % 3
        return self.page()

    def step(self, reply):
        self.left -= 1
        return Step(self.page(), 0.0, self.left == 0)

    def page(self):
        return " ".join(f"w{self.rng.randrange(WORDS)}" for _ in range(self.rng.randint(60, 150)))


def played(encoder: Encoder, begin, count: int, slots: int) -> list[Trajectory]:
    """Episodes; begin() gives what answers, which knows of no earlier ones."""
    episodes = [Trajectory(str(task)) for task in range(count)]
    play(Pages, encoder, episodes, begin(), slots, 1280)
    return episodes


def by_generate(model, encoder: Encoder):
    """What answers one episode; each turn generates from all that was said before."""
    end, never = encoder.end_of_turn, list(encoder.sampler().never)

    def answer(asked):
        (t, _), = asked
        ids = model.generate(
            input_ids=torch.tensor([t.ids]), attention_mask=torch.ones(1, len(t.ids)).long(),
            do_sample=False, max_new_tokens=30, eos_token_id=end, pad_token_id=end,
            suppress_tokens=never)
        return [(ids[0, len(t.ids):].tolist(), [])]

    return answer


def rollout(run: Run, folder: Path, quick: bool) -> None:
    """All of our episodes beside the first few one by one."""
    many, few, repeats = (2, 1, 0) if quick else (192, 12, 5)
    encoder = run.encoder
    player = make_model()
    with torch.no_grad():  # so that replies end after some 20 tokens
        player.lm_head.weight[list(encoder.sampler().never)] = 0  # the best is above 0
        player.lm_head.weight[encoder.end_of_turn] *= 1.9
    player.save_pretrained(folder / "player")
    model = run.replica(folder / "player")
    slots = 2 if quick else run.slots(model)
    other = partial(played, encoder, partial(by_generate, player, encoder), few, 1)
    work = partial(played, encoder, partial(run.answer, model, 0.0, slots), many, slots)
    episodes, single = work(), other()
    check("tokens of ours and generate",
          sum(t.ids != s.ids for t, s in zip(episodes, single)), 0)
    compare("rollout", "tokens/s", repeats, (work, sum(len(t.ids) for t in episodes)), {
        "generate, one episode at a time": (other, sum(len(s.ids) for s in single))})


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], prog="run.sh bench")
    parser.add_argument("section", nargs="?", choices=("train", "rollout"), help="none: both")
    parser.add_argument("--quick", action="store_true", help="less of everything, no repeats")
    asked = parser.parse_args(argv)
    torch.set_num_threads(1)
    disable_progress_bar()
    if not TRL:
        print("bench: TRL is not installed, its rows are left out (pip install trl)")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model().save_pretrained(folder / "model")
        make_tokenizer([" ".join(f"w{i}" for i in range(WORDS))]).save_pretrained(folder / "model")
        settings = coevolve.Settings(model=str(folder / "model"), out=str(folder / "run"),
                                     max_tokens=1280, max_new_tokens=30)
        run = Run(settings, environment("webshop")())
        for part in train, rollout:
            if asked.section in (None, part.__name__):
                part(run, folder, asked.quick)


if __name__ == "__main__":
    main(sys.argv[1:])
