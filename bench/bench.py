"""What training and rollouts cost, beside textbook code, TRL, `generate`, and the arithmetic.

    bash run.sh bench [--quick] [train rollout environments growth memory smollm2]

An alternative runs in turn with ours; the table shows the median of the ratios within the repeats
and their range. Seconds are this process's CPU time on one thread, so that what else the machine
runs counts little, with the simulators' where it says so, or device time on a GPU. An alternative
must first give the same losses, gradients, tokens or observations, or the benchmark stops. The
floor is the time of the matrix products that a task needs at the speed of a large one: a beginning
that trajectories share once through the layers (three times to train), the vocabulary at action
tokens alone.
"""

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import queue
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import psutil
import requests
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

import dpo
import envs
from engine.prepacked import prepack
from harness import files, play, smollm2, tiny

ROOT = Path(__file__).resolve().parents[1]
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
VOCABULARY, WORDS = 2048, 1748  # tokens, and how many of them are words
BETA, LR = 0.1, 1e-6


# ------------------------------------------------------------------------------------- measuring


def children_seconds() -> float:
    """CPU seconds so far of this process's children: Java simulators, a server of llama.cpp."""
    children = [p.cpu_times() for p in psutil.Process().children(recursive=True)]
    return sum(t.user + t.system for t in children)


def seconds(work) -> float:
    """CPU seconds of this process and its children, or seconds between events on the device."""
    if not CUDA:
        start = time.process_time() + children_seconds()
        work()
        return time.process_time() + children_seconds() - start
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


def in_turn(repeats: int, works: dict) -> dict[str, list[float]]:
    """Seconds of each work() in each repeat, after a round that warms up (of 0 repeats: in it)."""
    rounds = [{name: seconds(work) for name, work in works.items()} for _ in range(repeats + 1)]
    return {name: [r[name] for r in rounds[-max(repeats, 1):]] for name in works}


def check(what: str, difference: float, bound: float) -> float:
    if not difference <= bound:
        raise SystemExit(f"bench: {what} differ by {difference:.1e}, more than {bound:.0e}; "
                         "what is timed is not the same work")
    return difference


def peak_flops() -> float:
    """Operations per second of a large matrix product, the best of several."""
    n = 8192 if CUDA else 1024
    a, b = torch.randn(n, n, device=DEVICE), torch.randn(n, n, device=DEVICE)
    return 2 * n ** 3 / min(seconds(lambda: a @ b) for _ in range(20))


def forward_flops(model, seen: list[int], projected: int) -> float:
    """Operations of one pass, 2 a multiply-add: `seen` tokens, itself among them, by each token,
    and `projected` tokens to logits."""
    c = model.config
    weights = sum(p.numel() for p in model.model.layers.parameters() if p.ndim == 2)
    attention = 2 * c.num_hidden_layers * c.num_attention_heads * c.head_dim * sum(seen)
    return 2 * (weights * len(seen) + attention + projected * c.hidden_size * c.vocab_size)


def compared(what, against, unit, amounts, times, floor=None, **differences) -> dict:
    """A row: `amounts` and `times`, of ours and theirs, are work done and seconds per repeat."""
    (ours, theirs), (our_times, their_times) = amounts, times
    ratios = [(b / theirs) / (a / ours) for a, b in zip(our_times, their_times)]
    return dict(what=what, against=against, unit=unit, repeats=len(ratios),
                differences=differences, ours=ours / statistics.median(our_times),
                theirs=theirs / statistics.median(their_times),
                ratio=[statistics.median(ratios), min(ratios), max(ratios)],
                of_floor=None if floor is None else floor / statistics.median(our_times))


def markdown(rows: list[dict]) -> str:
    """One table: comparisons with their ratio, and what stands alone as text."""
    lines = [("", "ours", "against", "theirs", "ratio (range)", "of floor")]
    for r in rows:
        lines.append((r["what"], r["text"], "", "", "", "") if "text" in r else (
            r["what"], f"{r['ours']:,.4g} {r['unit']}", r["against"], f"{r['theirs']:,.4g}",
            "{:.2f} ({:.2f}-{:.2f})".format(*r["ratio"]),
            "" if r["of_floor"] is None else f"{r['of_floor']:.2f}"))
    widths = [max(map(len, column)) for column in zip(*lines)]
    lines.insert(1, ["-" * width for width in widths])
    return "\n".join("| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths)) + " |"
                     for line in lines)


# ------------------------------------------------------------------------------------ train step


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
    return model.to(DEVICE)


def make_groups(instructions: int, length=698, actions=112, rollouts=1, common=1 / 7):
    """Instructions with an expert and `rollouts` failures of each of two agents, in five turns.

    `length` and `actions` are mean tokens of a trajectory, the first seventh of which is the
    prompt; `common` is the share of `length` with which an instruction's trajectories begin alike.
    Pairs: the expert above each failure, and each of one agent's failures above the other's.
    """
    rng, groups = random.Random(0), []

    def trajectory():
        scale, prompt = rng.uniform(0.8, 1.2), length // 7
        action = round(scale * actions / 5)
        page = round((scale * length - prompt - 5 * action) / 4)
        mask = [0] * prompt + [1] * action + ([0] * page + [1] * action) * 4
        return [rng.randrange(VOCABULARY) for _ in mask], mask

    for task in range(instructions):
        (ids, mask), alike = trajectory(), int(common * length)
        sequences = [dpo.Trajectory(ids=ids, action_mask=mask)]
        for _ in range(2 * rollouts):
            other, its_mask = trajectory()
            sequences.append(dpo.Trajectory(ids=ids[:alike] + other[alike:],
                                            action_mask=mask[:alike] + its_mask[alike:]))
        failures = range(1, 1 + 2 * rollouts)
        pairs = [dpo.Pair("expert", 0, f) for f in failures]
        pairs += [dpo.Pair("failures", a, b) for a in failures[:rollouts]
                  for b in failures[rollouts:]]
        groups.append(dpo.Group(str(task), sequences, pairs, [-800.0] * len(sequences)))
    return groups


def our_step(model, groups) -> None:
    """One optimiser step as the program takes it, its log included."""
    dpo.fit(Accelerator(cpu=not CUDA), model, [[groups]],
            functools.partial(dpo.preference_objective, beta=BETA), dpo.count_pairs, lr=LR,
            warmup=0, schedule="constant", weight_decay=0.0, max_grad_norm=1.0,
            tokens_per_forward=4096, log=lambda event: None)


def padded(rows: list[list[int]]) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [0] * (width - len(row)) for row in rows], device=DEVICE)


def pairs_batch(groups) -> dict:
    """Each pair of the groups: its sides' tensors, chosen before rejected, and references."""
    sides = [[(g.sequences[i], g.reference[i]) for g in groups for p in g.pairs
              for i in [getattr(p, side)]] for side in ("chosen", "rejected")]
    both = [s for side in sides for s, _ in side]
    chosen, rejected = (torch.tensor([r for _, r in side], device=DEVICE) for side in sides)
    return dict(input_ids=padded([s.ids for s in both]),
                attention_mask=padded([[1] * len(s.ids) for s in both]),
                completion_mask=padded([s.action_mask for s in both]),
                ref_chosen_logps=chosen, ref_rejected_logps=rejected)


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
    loss = backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def trl_step(batches: list[dict], make):
    """A function that takes one step of TRL's DPOTrainer over the batches; returns the loss.

    The batches go to its training_step as its own loop hands them over, the reference known.
    make(attention): its model.
    """
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    class Trainer(DPOTrainer):
        def _prepare_dataset(self, dataset, *args, **kwargs):  # the batches are made already
            return dataset

        _precompute_ref_logps = _prepare_dataset

    settings = DPOConfig(
        output_dir=tempfile.gettempdir(), per_device_train_batch_size=1, beta=BETA, bf16=False,
        learning_rate=LR, lr_scheduler_type="constant", precompute_ref_log_probs=True,
        gradient_checkpointing=False, use_cpu=not CUDA, report_to="none", disable_tqdm=True)
    trainer = Trainer(make("sdpa"), args=settings, processing_class=word_tokenizer(),
                      train_dataset=Dataset.from_list([dict(unused=0)]))
    optimizer = trainer.create_optimizer()
    trainer.current_gradient_accumulation_steps = len(batches)
    return lambda: step(trainer.model, optimizer, lambda: sum(
        trainer.training_step(trainer.model, dict(batch)).item() for batch in batches))


def train_rows(quick: bool) -> list[dict]:
    """With the prompt alone in common; then with half of a trajectory, about as in real runs."""
    size = (2, 200, 32, 0) if quick else (4, 698, 112, 5)
    return (step_rows("1/7 in common", 1 / 7, (1, 2), *size)
            + step_rows("1/2 in common", 1 / 2, (1,), *size))


def step_rows(what: str, common: float, trl_batches: tuple, instructions: int, length: int,
              actions: int, repeats: int, make=make_model, bound=1e-5) -> list[dict]:
    """make(attention): the model that takes the steps. bound: of what may differ."""
    groups = make_groups(instructions, length, actions, common=common)
    pairs = dpo.count_pairs(groups)
    reference = make("ragged")
    with torch.no_grad():
        for p in reference.parameters():
            p.add_(1e-4 * torch.randn_like(p))
    dpo.add_reference(Accelerator(cpu=not CUDA), reference, groups, 4096)
    single = [dpo.Group(g.task, g.sequences, [p], g.reference) for g in groups for p in g.pairs]

    ours, theirs = make("ragged"), make("sdpa")
    loss = dpo.preference_objective(ours, groups, beta=BETA)[0] / pairs
    loss.backward()
    batches = [pairs_batch([g]) for g in single]
    loop_loss = textbook_backward(theirs, batches)
    same = zip(ours.parameters(), theirs.parameters())
    off = dict(loss=check("losses", abs(loss.item() - loop_loss), bound), gradient=check(
        "gradients", max((a.grad - b.grad).abs().max().item() for a, b in same), bound))
    for model in (ours, theirs):
        model.zero_grad()

    optimizer = torch.optim.AdamW(theirs.parameters(), lr=LR, weight_decay=0.0)
    rivals = {"pair by pair, padded, all logits": (off, functools.partial(
        step, theirs, optimizer, functools.partial(textbook_backward, theirs, batches)))}
    if importlib.util.find_spec("trl") and importlib.util.find_spec("datasets"):
        for size in trl_batches if repeats else trl_batches[:1]:
            trl = trl_step([pairs_batch(single[i:i + size]) for i in range(0, pairs, size)], make)
            off = dict(loss=check("losses of ours and TRL", abs(loss.item() - trl()),
                                  max(1e-4, bound)))
            rivals[f"TRL, batch {size} x accumulation {pairs // size}"] = off, trl
    else:
        print("bench: TRL is not installed, its rows are left out (pip install trl datasets)")
    times = in_turn(repeats, {"ours": lambda: our_step(ours, groups),
                              **{name: work for name, (_, work) in rivals.items()}})
    once = [(k + 1, s.action_mask[k]) for g in groups for i, s in enumerate(g.sequences)
            for k in range(int(common * length) if i else 0, len(s.ids))]
    floor = 3 * forward_flops(ours, [n for n, _ in once], sum(m for _, m in once)) / peak_flops()
    return [compared(f"train step, {what}", name, "pairs/s", (pairs, pairs),
                     (times["ours"], times[name]), floor, **off)
            for name, (off, _) in rivals.items()]


# -------------------------------------------------------------------------------------- rollouts


def word_tokenizer():
    return tiny.make_tokenizer([" ".join(f"w{i}" for i in range(WORDS))])


class MockEnv:
    """Episodes of 4-6 turns with pages of 60-150 tokens that depend on the task alone."""

    prompt, max_steps, latency = "", 6, 0
    words, page = [f"w{i}" for i in range(WORDS)], (60, 150)

    def reset(self, task):
        self.task, self.rng, self.left = task, random.Random(task), 4 + int(task) % 3
        return self._page()

    def step(self, reply):
        self.left -= 1
        return envs.Step(self._page(), 0.0, self.left == 0)

    def close(self):
        pass

    def _page(self):
        return " ".join(self.rng.choice(self.words) for _ in range(self.rng.randint(*self.page)))


def make_player(attention: str, encoder) -> Qwen3ForCausalLM:
    """A model whose replies end by themselves after some 20 tokens.

    Tokens that a rollout forbids get rows of zeros: of 2,000 logits the best is always above 0.
    """
    model = make_model(attention).eval()
    with torch.no_grad():
        model.lm_head.weight[encoder.forbidden] = 0
        model.lm_head.weight[len(encoder.tokenizer):] = 0
        model.lm_head.weight[encoder.end_of_turn] *= 1.9
    return model


def our_rollout(model, encoder, tasks, slots, make_env=MockEnv, reply_tokens=30):
    episodes = [dpo.Trajectory(task=str(t), agent="target") for t in tasks]
    return play.rollout(model, encoder, make_env, episodes, temperature=0.0, slots=slots,
                        max_tokens=1280, max_new_tokens=reply_tokens, tokens_per_forward=4096)


@torch.inference_mode()
def generate_rollout(model, encoder, tasks, batch, make_env, logits=None) -> list[list[int]]:
    """The ids of episodes played `batch` in lockstep; each turn generates from all the history."""
    histories, end = {}, encoder.end_of_turn
    for first in range(0, len(tasks), batch):
        playing = {task: make_env() for task in tasks[first:first + batch]}
        for task, env in playing.items():
            histories[task] = encoder.start(envs.opening(env, env.reset(str(task))))
        while playing:
            before = [histories[task] for task in playing]
            width = max(map(len, before))
            ids = [[end] * (width - len(row)) + row for row in before]
            real = [[0] * (width - len(row)) + [1] * len(row) for row in before]
            out = model.generate(
                input_ids=torch.tensor(ids, device=DEVICE), do_sample=False, max_new_tokens=30,
                attention_mask=torch.tensor(real, device=DEVICE), eos_token_id=end,
                pad_token_id=end, suppress_tokens=encoder.forbidden,
                return_dict_in_generate=True, output_logits=logits is not None)
            for i, (task, env) in enumerate(list(playing.items())):
                reply = out.sequences[i, width:].tolist() + [end]
                reply = reply[:reply.index(end) + 1]
                if logits is not None:
                    logits.setdefault(task, []).extend(x[i] for x in out.logits[:len(reply)])
                histories[task] += reply
                step = env.step(encoder.decode(reply))
                if step.done:
                    del playing[task]
                else:
                    histories[task] += encoder.observation(step.observation)
    return [histories[task] for task in tasks]


def rollout_rows(quick: bool) -> list[dict]:
    encoder = dpo.Encoder(word_tokenizer())
    return player_rows("", encoder, make_player("ragged", encoder), make_player("sdpa", encoder),
                       *((4, 4, 1, 4, 4, 0) if quick else (192, 64, 12, 32, 64, 5)))


def player_rows(what: str, encoder, ours, theirs, many: int, some: int, few: int, batch: int,
                slots: int, repeats: int, make_env=MockEnv, distinct=100) -> list[dict]:
    """Our `many` episodes against `some` in lockstep and `few` one by one.

    distinct: how many different tokens have to be said.
    """
    many, some, few = range(many), range(some), range(few)
    recorded, made, forward = {}, [], play.next_token_logits  # made: the environment of each slot

    def record(model, cache, segments):
        logits = forward(model, cache, segments)
        for (slot, _, _), row in zip(segments, logits.clone()):
            recorded.setdefault(int(made[slot].task), []).append(row)
        return logits

    play.next_token_logits = record
    played = our_rollout(ours, encoder, many, slots, lambda: made.append(make_env()) or made[-1])
    play.next_token_logits = forward
    said = [i for e in played for i, m in zip(e.ids, e.action_mask) if m]
    if len(set(said)) < distinct:
        raise SystemExit("bench: the model says too few distinct tokens, which would hide a wrong "
                         "cache; draw larger weights")
    print(f"bench: {len(many)} mock episodes of {sum(len(e.ids) for e in played) / len(many):.0f} "
          f"tokens, {len(said) / sum(e.steps for e in played):.0f} a reply")

    others = {"generate, one episode at a time": (few, 1),
              f"generate, lockstep batches of {batch}": (some, batch)}
    off = {}
    for name, (tasks, size) in others.items():
        logits = {}
        histories = generate_rollout(theirs, encoder, tasks, size, make_env, logits)
        wrong = sum(played[task].ids != ids for task, ids in zip(tasks, histories))
        off[name] = dict(episodes=check("the tokens of episodes", wrong, 0), logits=check(
            "logits", max((a - b).abs().max().item() for task in tasks
                          for a, b in zip(recorded[task], logits[task], strict=True)), 1e-3))
    recorded.clear()
    times = in_turn(repeats, {
        "ours": lambda: our_rollout(ours, encoder, many, slots, make_env),
        **{name: functools.partial(generate_rollout, theirs, encoder, *how, make_env)
           for name, how in others.items()}})
    tokens = {tasks: sum(len(played[t].ids) for t in tasks) for tasks in (many, some, few)}
    seen = [k + 1 for e in played for k in range(len(e.ids) - 1)]
    floor = forward_flops(ours, seen, len(said)) / peak_flops()
    return [compared(f"rollout{what}, {slots} slots", name, "tokens/s",
                     (tokens[many], tokens[tasks]), (times["ours"], times[name]), floor,
                     **off[name])
            for name, (tasks, _) in others.items()]


# ---------------------------------------------------------------------------------- environments


class Scripted:
    """An environment that plays its expert's replies, whatever the agent says, and is timed."""

    def __init__(self, env):
        self.env, self.spent = env, 0.0

    def __getattr__(self, name):
        return getattr(self.env, name)

    def reset(self, task):
        observation = self._timed(self.env.reset, task)
        self.expert = self.env.expert()
        self.reply = self.expert(observation)
        return observation

    def step(self, reply):
        step = self._timed(self.env.step, self.reply)
        self.reply = None if step.done else self.expert(step.observation)
        return step

    def _timed(self, call, argument):
        start = time.thread_time()
        result = call(argument)
        self.spent += time.thread_time() - start
        return result


def environment_rows(quick: bool) -> list[dict]:
    """Share of a rollout that is the environment's work, beside a model of the tiny one's size."""
    rows, science = [], functools.partial(envs.make, "scienceworld", "short", task_types="short")
    for make, counts, tasks in ((functools.partial(envs.make, "webshop", "short"), (64,), 192),
                                (science, (1, 2, 4), 24)):
        env = make()
        tasks = env.tasks("train")[:tasks // 6 if quick else tasks]
        played = [m for task in tasks for m in envs.converse(env, env.reset(task), env.expert())[0]]
        env.close()
        tokenizer = tiny.make_tokenizer([m["content"] for m in played])
        encoder = dpo.Encoder(tokenizer)
        config = Qwen3Config(vocab_size=len(tokenizer), **tiny.MODEL)
        model = Qwen3ForCausalLM._from_config(config, attn_implementation="ragged").to(DEVICE)
        reply = round(statistics.mean(  # an untrained model says as many tokens as it may
            len(encoder.reply(m["content"])) for m in played if m["role"] == "assistant"))
        for slots in counts:
            for _ in range(2):  # the first starts the simulators
                made, java, own = [], children_seconds(), time.process_time()
                wall = time.perf_counter()
                our_rollout(model, encoder, tasks, slots,
                            lambda: made.append(Scripted(make())) or made[-1], reply)
            wall, own = time.perf_counter() - wall, time.process_time() - own
            java, inside = children_seconds() - java, sum(e.spent for e in made)
            rows.append(dict(
                what=f"{env.name}, {slots} slots: environment's share",
                text=f"{(java + inside) / (own + java):.1%} of CPU time",
                slots=slots, episodes=len(tasks), wall_seconds=wall, java_seconds=java,
                environment_seconds=inside, model_seconds=own - inside))
    return rows + [simulator_row(science(), quick)]


def simulator_row(env, quick: bool) -> dict:
    """ScienceWorld episodes through our direct call against the package's own `step`."""
    import scienceworld.scienceworld as package

    from worlds.scienceworld.world import _Simulator

    launch = package.launch_gateway
    package.launch_gateway = functools.partial(launch, javaopts=_Simulator.options)
    official = package.ScienceWorldEnv(envStepLimit=1000)
    package.launch_gateway = launch
    tasks = env.tasks("train")[:1 if quick else 8]
    rooms = ["kitchen", "outside", "greenhouse", "art studio", "workshop", "foundry"]
    actions = [a for room in rooms for a in (f"teleport to {room}", "look around", "inventory")]
    seen = {}

    def ours():
        seen["ours"] = []
        for task in tasks:
            env.reset(task)
            seen["ours"] += [env.step(action).observation for action in actions]

    def packages():
        seen["package"] = []
        for task in tasks:
            kind, number = task.removeprefix("scienceworld-train-").rsplit("-", 1)
            official.load(kind, int(number), "easy")
            official.reset()
            seen["package"] += [official.step(action)[0] for action in actions]

    times = in_turn(0 if quick else 5, dict(ours=ours, package=packages))
    wrong = sum(a != b for a, b in zip(seen["ours"], seen["package"], strict=True))
    official.close()
    env.close()
    return compared(f"scienceworld, episodes of {len(actions)} steps", "the package's `step`",
                    "steps/s", (len(seen["ours"]),) * 2, (times["ours"], times["package"]),
                    observations=check("observations", wrong, 0))


# ------------------------------------------------------------------------------- a real model


class Shelf(MockEnv):
    """Pages of words that a real model has one token for; episodes of some 450 tokens."""

    page = 20, 60
    prompt = "Say in a few words what is new on the shelf, and what you would do with it."
    words = ("red blue green old new small large wooden glass paper cup lamp book chair table "
             "stone bread apple water coffee horse bird fish tree flower rain snow fire house door "
             "road bridge river mountain clock letter song coat ring key box bag map ship").split()


@contextlib.contextmanager
def llama_server(precision: str, slots: int):
    """The address of llama.cpp's server with SmolLM2 in `precision` (f32, bf16), on one thread.

    $LLAMA_CPP is a checkout of llama.cpp, in whose build/bin the server was built on this machine.
    """
    checkout = Path(os.environ["LLAMA_CPP"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        made = subprocess.run([sys.executable, checkout / "convert_hf_to_gguf.py", smollm2.base(),
                               "--outtype", precision, "--outfile", f"{folder}/model.gguf"],
                              capture_output=True, text=True)
        if made.returncode:
            raise SystemExit("bench: llama.cpp's convert_hf_to_gguf.py failed: "
                             + made.stderr.strip().splitlines()[-1])
        options = dict(model=f"{folder}/model.gguf", port=port, threads=1, threads_batch=1,
                       parallel=slots, ctx_size=slots * 1024, slot_save_path=folder, cache_ram=0)
        if precision == "f32":
            options |= dict(cache_type_k="f32", cache_type_v="f32")
        words = [[f"--{name.replace('_', '-')}", str(value)] for name, value in options.items()]
        server = subprocess.Popen([checkout / "build" / "bin" / "llama-server", *sum(words, [])],
                                  stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 60
            while True:
                with contextlib.suppress(requests.ConnectionError):
                    if requests.get(f"{address}/health", timeout=10).ok:
                        break
                if server.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit("bench: llama.cpp's server does not start")
                time.sleep(0.1)
            yield address
        finally:
            server.kill()
            server.wait()


def llama_rollout(address: str, encoder, tasks, slots: int, make_env) -> list[list[int]]:
    """The ids of episodes that llama.cpp's server continues, each in a slot that keeps its past."""
    free, end = queue.SimpleQueue(), encoder.end_of_turn
    for slot in range(slots):
        free.put(slot)

    def one(task):
        slot, env = free.get(), make_env()
        requests.post(f"{address}/slots/{slot}?action=erase", timeout=600).raise_for_status()
        ids, done = encoder.start(envs.opening(env, env.reset(str(task)))), False
        while not done:
            said = requests.post(f"{address}/completion", timeout=600, json=dict(
                prompt=ids, n_predict=30, temperature=0, id_slot=slot, return_tokens=True,
                logit_bias=[[i, False] for i in encoder.forbidden])).json()["tokens"]
            reply = [i for i in said if i != end] + [end]
            step = env.step(encoder.decode(reply))
            ids, done = ids + reply, step.done
            if not done:
                ids += encoder.observation(step.observation)
        free.put(slot)
        return ids

    with ThreadPoolExecutor(slots) as pool:
        return list(pool.map(one, tasks))


def llama_row(precision: str, model, encoder, slots: int, repeats: int) -> dict:
    """Our rollout of SmolLM2 against llama.cpp's server in one precision, an episode a slot."""
    tasks, played, continued = range(slots), [], []
    with llama_server(precision, slots) as address:
        times = in_turn(repeats, dict(
            ours=lambda: played.append(our_rollout(model, encoder, tasks, slots, Shelf)),
            theirs=lambda: continued.append(
                llama_rollout(address, encoder, tasks, slots, Shelf))))
    other = sum(ours.ids != ids for ours, ids in zip(played[-1], continued[-1], strict=True))
    print(f"bench: {other} of {len(tasks)} episodes of llama.cpp in {precision} are others")
    if precision == "f32":  # its sums round in another order, which may change a close choice
        check("the tokens of llama.cpp's episodes, as a share of them,", other / len(tasks), 0.25)
    return compared(f"rollout, SmolLM2, {precision}, {slots} slots", "llama.cpp's server",
                    "tokens/s",
                    (sum(len(e.ids) for e in played[-1]), sum(map(len, continued[-1]))),
                    (times["ours"], times["theirs"]), episodes=other)


def smollm2_rows(quick: bool) -> list[dict]:
    """SmolLM2-135M: in fp32 against textbook code, TRL, `generate` and llama.cpp; ours in bf16."""
    def make(attention):
        return AutoModelForCausalLM.from_pretrained(
            smollm2.base(), dtype=torch.float32, attn_implementation=attention).to(DEVICE)

    size = (1, 60, 20, 0) if quick else (2, 250, 50, 2)
    rows = step_rows("SmolLM2", 1 / 7, (1,), *size, make=make, bound=1e-3)
    ours, groups = make("ragged"), make_groups(*size[:3])
    low, high = make("ragged").to(torch.bfloat16), make("ragged")  # of a rollout: weights too
    prepack(low)
    prepack(high)
    encoder = dpo.Encoder(AutoTokenizer.from_pretrained(smollm2.base()))
    episodes = (2, 2, 1, 2, 2, 0) if quick else (8, 4, 2, 4, 8, 2)
    rows += player_rows(", SmolLM2", encoder, high, make("sdpa"), *episodes, Shelf,
                        distinct=20)

    def bf16_step():
        with torch.autocast(DEVICE, torch.bfloat16):
            our_step(ours, groups)

    tasks = range(episodes[0])
    steps = in_turn(size[3], dict(bf16=bf16_step, fp32=lambda: our_step(ours, groups)))
    pairs, played = dpo.count_pairs(groups), []
    times = in_turn(size[3], {
        name: lambda model=model: played.append(sum(
            len(e.ids) for e in our_rollout(model, encoder, tasks, len(tasks), Shelf)))
        for name, model in dict(bf16=low, fp32=high).items()})
    if "LLAMA_CPP" in os.environ:
        rows += [llama_row(precision, model, encoder, slots, size[3])
                 for precision, model, counts in (("f32", high, (2, 4, 8)),
                                                  ("bf16", low, (2, 4, 8, 32)))
                 for slots in (counts[:1] if quick else counts)]
    else:
        print("bench: LLAMA_CPP does not name a checkout of llama.cpp, its rows are left out")
    return rows + [
        compared("train step, SmolLM2, bf16", "the same in fp32", "pairs/s", (pairs, pairs),
                 (steps["bf16"], steps["fp32"])),
        compared("rollout, SmolLM2, bf16", "the same in fp32", "tokens/s", played[-2:],
                 (times["bf16"], times["fp32"]))]


# ----------------------------------------------------------------------------- growth and memory


def growth_rows(quick: bool) -> list[dict]:
    """Seconds at 1x, 2x and 4x of one thing at a time, in those of 1x; the least of repeats."""
    model, encoder = make_model("ragged"), dpo.Encoder(word_tokenizer())
    player = make_player("ragged", encoder)
    n, length = (4, 100) if quick else (32, 350)

    def train(i=1, length=length, **others):
        groups = make_groups(i, length, length // 6, **others)
        return seconds(lambda: our_step(model, groups))

    def roll_out(tasks, slots):
        return seconds(lambda: our_rollout(player, encoder, range(tasks), slots))

    rows = []
    for what, work in {
        "train step: 1, 2, 4 instructions": lambda i: train(i),
        "train step: 1, 2, 4 rollouts of an agent": lambda i: train(rollouts=i),
        f"train step: {length}, {2 * length}, {4 * length} tokens a trajectory":
            lambda i: train(length=length * i),
        f"rollout: {n}, {2 * n}, {4 * n} episodes": lambda i: roll_out(n * i, n),
        f"rollout: {n // 4}, {n // 2}, {n} slots": lambda i: roll_out(4 * n, n // 4 * i),
    }.items():
        times = [min(work(i) for _ in range(1 if quick else 2)) for i in (1, 2, 4)]
        rows.append(dict(what=what, seconds=times,
                         text="time " + " : ".join(f"{t / times[0]:.2f}" for t in times)))
    return rows


def memory_rows(quick: bool) -> list[dict]:
    """Resident memory after SFT and after each iteration of a --quick run of three iterations."""
    with tempfile.TemporaryDirectory() as folder:
        small = ["--train-tasks", "24", "--eval-tasks", "8", "--sft-epochs", "1"] if quick else []
        subprocess.run([sys.executable, ROOT / "coevolve.py", "--env", "webshop", "--quick",
                        "--threads", "1", "--iterations", "3", "--out", f"{folder}/run", *small],
                       check=True, capture_output=True)
        events = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    phases = [e for e in map(json.loads, events) if e["event"] == "phase"]
    ends = [e["resident_mb"] for e in phases if e["phase"].startswith("eval-")][3::4]
    peak = max(e["resident_mb"] for e in phases)
    return [dict(what="memory after SFT and iterations 1, 2, 3", end_mb=ends, peak_mb=peak,
                 text=f"{', '.join(map(str, ends))} MB; at most {peak} MB")]


# ----------------------------------------------------------------------------------------- table

SECTIONS = dict(train=train_rows, rollout=rollout_rows, environments=environment_rows,
                growth=growth_rows, memory=memory_rows, smollm2=smollm2_rows)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], prog="run.sh bench")
    parser.add_argument("sections", nargs="*", help=f"of {', '.join(SECTIONS)}; none: all "
                        "but the last, which fetches a model")
    parser.add_argument("--quick", action="store_true", help="less of everything, no repeats")
    parser.add_argument("--out", default=str(ROOT / "runs" / "bench.json"), help="the JSON file")
    arguments = parser.parse_args(argv)
    for name in arguments.sections:
        if name not in SECTIONS:
            parser.error(f"no section {name}; choose from {', '.join(SECTIONS)}")
    torch.set_num_threads(1)
    rows = [row for name in arguments.sections or list(SECTIONS)[:-1]
            for row in SECTIONS[name](arguments.quick)]
    table = markdown(rows)
    print(table)
    out = Path(arguments.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(dict(device=DEVICE, torch=torch.__version__, quick=arguments.quick,
                                   rows=rows), indent=1))


if __name__ == "__main__":
    files.command("bench", main)
