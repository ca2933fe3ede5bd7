"""What training and rollouts cost, beside other ways.

    bash run.sh bench [--quick]

Training stands beside passes that are padded, and beside a step of TRL's DPOTrainer, where TRL is
installed; rollouts beside transformers' `generate`. All must first give the same losses, gradient
norms and tokens; then they run in turn. Printed are speeds in CPU seconds of one thread, and how
many times as fast ours is: median and range of the repeats.
"""

import argparse
import importlib.util
import random
import statistics
import tempfile
import time
from copy import deepcopy
from functools import partial
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.utils.logging import disable_progress_bar

import coevolve
import dpo
from dpo import Group, Pair, Trajectory
from engine import playing
from engine.passes import log_probs_in_passes
from engine.run import Run
from lab.pretrain.pretrain import make_tokenizer
from worlds import Step, World, environment

BETA = 0.1
TOKENS = 1280  # of an episode, at most
REPLY = 30     # and of a reply
WORDS = 1748  # of the tokenizer's 2,048 tokens
# 2.16 M parameters.
MODEL = Qwen3Config(
    vocab_size=2048, hidden_size=192, intermediate_size=512, num_hidden_layers=4,
    num_attention_heads=6, num_key_value_heads=6, head_dim=32, max_position_embeddings=4096,
    tie_word_embeddings=True, eos_token_id=None, bos_token_id=None, pad_token_id=None)


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


def compare(what: str, unit: str, repeats: int, works: dict) -> None:
    """Runs works, which have run before, in turn; a line for the first beside each of the others.

    Args:
        what: What they do.
        unit: Of what they do.
        repeats: How often each runs.
        works: name -> (what works, how much of the unit it does).
    """
    rounds = []
    for _ in range(repeats):
        speeds = {}
        for name, (work, amount) in works.items():
            started = time.process_time()
            work()
            speeds[name] = amount / (time.process_time() - started)
        rounds.append(speeds)
    first, *others = works
    for name in others:
        ratios = sorted(speeds[first] / speeds[name] for speeds in rounds)
        both = [statistics.median(speeds[one] for speeds in rounds) for one in (first, name)]
        print(f"{what}, {unit}: {first} {both[0]:8,.4g}   {name} {both[1]:8,.4g}   ratio "
              f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})")


def check(what: str, same: bool) -> None:
    if not same:
        raise SystemExit(f"bench: {what} differ; the two do not do the same work")


# ------------------------------------------------------------------------------------- training


def train(run: Run, quick: bool) -> None:
    """Steps with the prompt alone in common, and with half of a trajectory, as in real runs."""
    tasks, length, actions, repeats = (2, 200, 32, 1) if quick else (4, 698, 112, 5)
    padded = partial(log_probs_in_passes, run.machine.accelerator,
                     tokens=run.machine.tokens_per_forward)
    for share in 1 / 7, 1 / 2:
        groups = make_groups(tasks, length, actions, share)
        dpo.add_references(make_model(), groups, padded, run.fits)
        for n, t in enumerate(dpo.trajectories_of(groups)):
            t.reference += n % 3  # so that margins are other than 0
        steps = {"ours": our_step(run.load(run.base), groups, run.log_probs, run.fits),
                 "padded": our_step(make_model(), groups, padded, run.machine.tokens_per_forward)}
        if importlib.util.find_spec("trl"):
            steps["TRL"] = trl_step(groups)
        found = torch.tensor([step() for step in steps.values()])
        check(f"losses and gradients of {', '.join(steps)}: {found.tolist()}",
              torch.allclose(found, found[0], rtol=1e-4))
        amount = len(dpo.pairs_of(groups))
        compare(f"train step, {share:.0%} in common", "pairs/s", repeats,
                {name: (step, amount) for name, step in steps.items()})


def our_step(model, groups: list[Group], log_probs, fits):
    """What takes a step of our training, and gives the loss and the gradient's norm."""
    optimizer = dpo.adamw(model)
    loss = partial(dpo.preference_loss, beta=BETA, lambda_sft=0.0)

    def step():
        line, = dpo.train(model, optimizer, [groups], [1e-6], loss, dpo.pair_count, log_probs,
                          fits=fits)
        return line["loss"], line["norm"]

    return step


def trl_step(groups: list[Group]):
    """The same of TRL's DPOTrainer, as its own loop does: a pair a batch, accumulated."""
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
    model = trainer.model
    optimizer = trainer.create_optimizer()
    batches = [batch_of(pair) for pair in dpo.pairs_of(groups)]
    trainer.current_gradient_accumulation_steps = len(batches)

    def step():
        losses = [trainer.training_step(model, dict(batch)).item() for batch in batches]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        optimizer.step()
        optimizer.zero_grad()
        return sum(losses), norm

    return step


def batch_of(pair: Pair) -> dict:
    """The tensors of a pair as TRL's collator names them, chosen before rejected."""
    def padded(rows):
        return pad_sequence([torch.tensor(row) for row in rows], batch_first=True)

    sides = [pair.chosen, pair.rejected]
    return dict(input_ids=padded(t.ids for t in sides),
                attention_mask=padded([1] * len(t.ids) for t in sides),
                completion_mask=padded(t.action_mask for t in sides),
                ref_chosen_logps=torch.tensor([pair.chosen.reference]),
                ref_rejected_logps=torch.tensor([pair.rejected.reference]))


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


def by_generate(model, encoder):
    """What answers one conversation: transformers reads all of it again, and writes."""
    end = encoder.end_of_turn
    never = list(encoder.sampler().never)

    def answer(asked):
        (t, _), = asked
        ids = model.generate(
            torch.tensor([t.ids]), attention_mask=torch.ones(1, len(t.ids)).long(),
            do_sample=False, max_new_tokens=REPLY, eos_token_id=end, pad_token_id=end,
            suppress_tokens=never)
        return [(ids[0, len(t.ids):].tolist(), [])]

    return answer


def rollout(run: Run, quick: bool) -> None:
    """Greedy episodes; by `generate` of transformers the first few, one at a time."""
    many, few, repeats = (4, 1, 1) if quick else (192, 12, 3)
    encoder = run.encoder
    model = make_model()
    with torch.no_grad():  # so that replies end after some 20 tokens
        model.lm_head.weight[list(encoder.sampler().never)] = 0  # the best is above 0
        model.lm_head.weight[encoder.end_of_turn] *= 1.9
    other = deepcopy(model)
    slots = min(many, run.slots(model))

    def play(count: int, slots: int, begin) -> list[Trajectory]:
        episodes = [Trajectory(str(task)) for task in range(count)]
        playing.play(Pages, encoder, episodes, begin(), slots, TOKENS)
        return episodes

    works = {"ours": partial(play, many, slots, partial(run.answer, model, 0.0, slots)),
             "generate": partial(play, few, 1, partial(by_generate, other, encoder))}
    found = {name: [t.ids for t in work()] for name, work in works.items()}
    check("tokens of ours and generate", found["ours"][:few] == found["generate"])
    compare("rollout", "tokens/s", repeats,
            {name: (work, sum(map(len, found[name]))) for name, work in works.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], prog="run.sh bench")
    parser.add_argument("--quick", action="store_true", help="less of everything, once")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    disable_progress_bar()
    if not importlib.util.find_spec("trl"):
        print("bench: TRL is not installed, its rows are left out (pip install trl)")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "model")
        make_model().save_pretrained(folder)
        make_tokenizer([" ".join(f"w{i}" for i in range(WORDS))]).save_pretrained(folder)
        settings = coevolve.Settings(model=str(folder), out=str(Path(name, "run")),
                                     max_tokens=TOKENS, max_new_tokens=REPLY)
        run = Run(settings, environment("webshop")())
        train(run, quick)
        rollout(run, quick)


if __name__ == "__main__":
    main()
