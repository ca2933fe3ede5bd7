"""Episodes side by side: text to and from environments, tokens to and from a model.

`play` gives the trajectories of a phase; `rollout` is the engine: one model, many slots, a cache of
keys and values that is kept over all turns of an episode.
"""

import random
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import torch
from accelerate.utils import gather_object
from transformers import AutoTokenizer

import envs
from dpo import Encoder, Trajectory
from engine.cache import SlotCache, next_token_logits, sample, slot_bytes, slots_that_fit
from engine.packing import shared_beginning
from engine.prepacked import prepack
from engine.sharding import hand_out
from harness import files
from harness.kept import CHUNK, Kept
from harness.settings import Settings
from program.run import Run
from training.models import load_model


def play(run: Run, folder: Path, trajectories: list[Trajectory],
         temperature: float) -> list[Trajectory]:
    """Plays what `trajectories` begin, in order, with the model in a folder.

    It is in memory only meanwhile, in bf16 where the machine computes in it.
    """
    device, bf16 = run.accelerator.device, run.accelerator.mixed_precision == "bf16"
    model = load_model(folder, torch.bfloat16 if bf16 else torch.float32, data=run.main)
    hand_out(model, device)  # one rank reads the weights
    prepack(model)
    encoder = Encoder(AutoTokenizer.from_pretrained(folder))
    return play_with(run, model, encoder, trajectories, temperature)


def play_with(run: Run, model, encoder: Encoder, trajectories: list[Trajectory],
              temperature: float) -> list[Trajectory]:
    """The same with a model that is whole on each rank.

    Each rank plays its share, all get all. Lost episodes are left out and logged; EnvError where
    they are too many.
    """
    processes, phase = run.accelerator.num_processes, run.folder.running
    share = trajectories[run.accelerator.process_index::processes]
    order = {(t.task, t.rollout): n for n, t in enumerate(trajectories)}
    with run.log.bar(phase, len(share), "episode") as progress:
        played = play_share(run, model, encoder, share, temperature, progress, len(trajectories))
    played = sorted(gather_object(played), key=lambda t: order[t.task, t.rollout])
    lost = [t.task for t in played if t.ended == "lost"]
    run.log.dropped(phase, envs.LOST, lost)
    if envs.too_many(len(lost), len(played)):
        raise envs.EnvError(f"{phase}: {len(lost)} of {len(played)} episodes were lost")
    if lost:
        run.log.say(f"{phase}: {len(played) - len(lost)} of {len(played)} episodes; "
                       f"{envs.LOST} on {', '.join(lost)}")
    log_full(run, sum(t.ended == "context" for t in played), len(played))
    return [t for t in played if t.ended != "lost"]


def log_full(run: Run, full: int, played: int) -> None:
    """Says so where most of the episodes played filled the context."""
    if 2 * full > played:
        run.log("full", phase=run.folder.running, episodes=full, of=played)
        run.log.say(f"{run.folder.running}: {full} of {played} episodes filled --max-tokens "
                       f"{run.settings.max_tokens} before they were over; raise --max-tokens")


def play_share(run: Run, model, encoder: Encoder, share: list[Trajectory],
               temperature: float, progress, of: int) -> list[Trajectory]:
    """`rollout` with as many slots and threads as pay. of: episodes of the phase on all ranks."""
    s, slots, threads = run.settings, run.settings.slots, torch.get_num_threads()
    if model.device.type == "cuda":  # episodes that do not fit beside the model wait
        torch.cuda.empty_cache()  # what training has freed, torch would keep for itself
        free = torch.cuda.mem_get_info(model.device)[0]
        slot = s.max_tokens * slot_bytes(model.config, model.dtype.itemsize)
        slots = max(1, min(slots, slots_that_fit(free, slot)))
    chunk = CHUNK * slots if model.device.type == "cpu" else 0
    kept = Kept(run.folder.path / f"playing/rank-{run.accelerator.process_index}.jsonl",
                [run.folder.inputs(), files.code_hash(), run.accelerator.num_processes, chunk])
    share = kept.fill(share, chunk or 1, run.tasks.make_env)
    if before := sum(bool(t.ended) for t in share):
        progress.update(before)
        run.log.say(f"{run.folder.running} goes on after {before} of {len(share)} episodes")
    if model.device.type == "cpu" and model.num_parameters() < 10_000_000:
        torch.set_num_threads(1)  # several would only wait for each other: 1.6 s against 3.6 s
    rollout(model, encoder, run.tasks.make_env, share, temperature=temperature, slots=slots,
            max_tokens=s.max_tokens, max_new_tokens=s.max_new_tokens,
            tokens_per_forward=s.tokens_per_forward, stops=envs.STOPS[s.options.protocol],
            progress=progress, of=of, chunk=chunk, keep=kept.add)
    torch.set_num_threads(threads)
    return share


def usable_rollouts(run: Run, names: list[str], dropped: Counter) -> dict[str, list[Trajectory]]:
    """task -> the trajectories of these files that can train; counts in `dropped` the others."""
    found = {}
    for t in (t for name in names for t in run.folder.trajectories(name)):
        if reason := unusable(t, run.settings):
            dropped[reason] += 1
        else:
            found.setdefault(t.task, []).append(t)
    return found


def unusable(t: Trajectory, s: Settings) -> str | None:
    """Why nobody can train on an episode; None if one can."""
    if t.ended == "context" and s.too_long == "drop":
        return "too long"
    return None if any(t.action_mask) else "no whole turn"


def reopened(t: Trajectory, like: Trajectory) -> Trajectory:
    """The trajectory's replies after the opening of another one of its task.

    So ETO trains: the example that a rollout was shown is left out, and the sides of a pair share
    the expert's first turn.
    """
    old, new = t.action_mask.index(1), like.action_mask.index(1)
    turns, others = (envs.first_reply(x.messages, x.steps) for x in (t, like))
    return replace(t, ids=like.ids[:new] + t.ids[old:],
                   action_mask=like.action_mask[:new] + t.action_mask[old:],
                   messages=like.messages[:others] + t.messages[turns:])


def before_stops(reply: str, stops) -> str:
    """The reply up to where one of the texts begins."""
    return reply[:min((reply.index(stop) for stop in stops if stop in reply), default=len(reply))]


# ---------------------------------------------------------------------------------- the engine


# A prompt waits a pass for another one if so many tokens less are read then [ours].
WORTH_WAITING = 32


class Slot:
    """A place in the cache: an environment, and the episode that is being played there."""

    def __init__(self, number: int):
        self.number, self.env = number, None
        self.playing: Trajectory | None = None
        self.past, self.left = 0, []  # tokens of the episode in the cache; the last one's ids there
        self.reply_at = 0             # where the running reply begins
        self.answer: Future | None = None  # of the environment
        self.due = 0                  # the pass at which it is read

    def begin(self, trajectory: Trajectory, make_env) -> None:
        self.env = self.env or make_env()
        self.playing, self.past = trajectory, 0
        self.rng = random.Random(trajectory.seed)

    def end(self) -> None:
        self.left, self.playing, self.past = self.held, None, 0

    @property
    def held(self) -> list[int]:
        """The tokens whose keys and values are in the cache."""
        return self.playing.ids[:self.past] if self.past else self.left

    @property
    def waiting(self) -> int:
        """How many tokens are to be read."""
        return len(self.playing.ids) - self.past

    @property
    def opening(self) -> bool:
        """Whether its episode's prompt is still to be read."""
        t = self.playing
        return bool(t and t.ids) and not t.steps and len(t.ids) == self.reply_at


@torch.inference_mode()
def rollout(model, encoder: Encoder, make_env, trajectories: list[Trajectory], *,
            temperature: float, slots: int, max_tokens: int, max_new_tokens: int,
            tokens_per_forward: int, stops=envs.STOPS["ours"], progress=None, of: int = 0,
            chunk: int = 0, keep=None) -> list[Trajectory]:
    """Plays the episodes, `slots` side by side, and returns them in the order given.

    Each turn of the loop is one forward pass over every slot with something new: one sampled token,
    or a page. A slot keeps its cache over an episode's turns and takes the next episode at once. As
    far as a prompt begins like what some slot holds, it is copied from there and not read. A reply
    ends before one of the texts in `stops`, since what follows is the environment's to say. Every
    episode has its own random generator, so what runs beside it changes nothing but rounding.
    `make_env()` gives each slot its environment. An episode whose environment breaks ends "lost",
    which is no failure of the agent's; EnvError is raised where `envs.Losses` says that too many
    are, of these episodes or of so many on all ranks (`of`).

    Episodes that have ended already stay as they are. A chunk of so many (0: all) begins when the
    one before has ended, and depends on nothing in it. keep(trajectory) is called when one ends.
    """
    size = chunk or len(trajectories) or 1
    chunks = [[t for t in trajectories[first:first + size] if not t.ended]
              for first in range(0, len(trajectories), size)]
    chunks, queue, now = [c[::-1] for c in reversed(chunks) if c], [], 0
    if not chunks:  # an empty share of a rank, or all have ended before
        return trajectories
    model.eval()
    places = [Slot(n) for n in range(min(slots, len(trajectories)))]
    cache, losses = SlotCache(model, len(places), max_tokens), envs.Losses(of or len(trajectories))
    never = torch.tensor(encoder.suppress_tokens(model.config.get_text_config().vocab_size),
                         dtype=torch.long, device=model.device)
    threads = ThreadPoolExecutor(len(places))

    def ask(slot, call, text):
        slot.due, slot.answer = now + slot.env.latency, threads.submit(call, text)

    def free_if_ended(slot):
        if slot.playing.ended:
            if keep is not None:
                keep(slot.playing)
            slot.end()
            if progress is not None:
                progress.update()

    try:
        while True:
            if chunks and not queue and not any(slot.playing for slot in places):
                queue = chunks.pop()
                for slot in places:  # as if nothing had been read before
                    slot.left = []
            for slot in places:
                if slot.playing is None and queue:
                    slot.begin(queue.pop(), make_env)
                    ask(slot, slot.env.reset, slot.playing.task)
            playing = [slot for slot in places if slot.playing]
            if not playing:
                return trajectories

            # A slow environment works while others generate. Its answer is read a fixed number of
            # passes later, not when it is there: batches, and so rounding, must not depend on time.
            asked = [slot for slot in playing if slot.answer]
            if len(asked) == len(playing):
                now = max(now, min(slot.due for slot in asked))
            for slot in [slot for slot in asked if slot.due <= now]:
                answer, slot.answer = slot.answer, None
                try:
                    observe(slot, encoder, answer.result(), max_tokens)
                    losses.answered()
                    borrow(cache, slot, places)
                except envs.EnvError as error:
                    slot.playing.ended = "lost"
                    losses.add(error)
                free_if_ended(slot)

            # Every single token that waits, then pages while they fit, but one page in any case. A
            # prompt that begins like one of this pass waits for it, and is then copied.
            chosen, openings, room = [], [], tokens_per_forward
            for slot in sorted((slot for slot in playing if slot.playing and not slot.answer),
                               key=lambda slot: (slot.waiting, slot.number)):
                n = slot.waiting
                if n == 1 or n <= room or room == tokens_per_forward:
                    if slot.opening:
                        if any(shared_beginning(slot.playing.ids, other.playing.ids)
                               >= slot.past + WORTH_WAITING for other in openings):
                            continue
                        openings.append(slot)
                    chosen.append(slot)
                    room -= n if n > 1 else 0
            now += 1
            if not chosen:
                continue
            logits = next_token_logits(
                model, cache, [(slot.number, slot.past, slot.playing.ids[slot.past:])
                               for slot in chosen])                                       # (S, V)
            if not (logits < torch.inf).all():  # nor nan
                tasks = ", ".join(slot.playing.task for slot in chosen)
                raise FloatingPointError(f"logits that are no numbers on tasks {tasks}")
            logits[:, never] = -torch.inf
            draws = [slot.rng.random() for slot in chosen] if temperature else None
            for slot, token in zip(chosen, sample(logits, temperature, draws).tolist()):
                slot.past = len(slot.playing.ids)
                slot.playing.ids.append(token)
                slot.playing.action_mask.append(1)
                if reply_ended(slot, encoder, token, max_tokens, max_new_tokens, stops):
                    reply = encoder.decode(slot.playing.ids[slot.reply_at:])
                    slot.playing.messages.append({"role": "assistant", "content": reply})
                    ask(slot, slot.env.step, reply)
                free_if_ended(slot)
            for slot in playing:
                borrow(cache, slot, openings)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        wait([slot.answer for slot in places if slot.answer], timeout=1)
        for slot in places:  # nobody waits for one that hangs
            if slot.env and (slot.answer is None or slot.answer.done()):
                slot.env.close()


def observe(slot: Slot, encoder: Encoder, answer, max_tokens: int) -> None:
    """The episode reads what its environment answered: to `reset` a text, to `step` a Step."""
    t = slot.playing
    if isinstance(answer, str):
        t.messages = envs.opening(slot.env, answer, playing=True)
        read(slot, encoder.start(t.messages), max_tokens)
        return
    t.reward, t.raw_reward, t.steps = answer.reward, answer.raw, t.steps + 1
    if answer.done or t.steps == slot.env.max_steps:
        t.ended = "done" if answer.done else "budget"
        return
    read(slot, encoder.observation(answer.observation), max_tokens)
    if not t.ended:
        t.messages.append({"role": "user", "content": answer.observation})


def borrow(cache: SlotCache, slot: Slot, others: list[Slot]) -> None:
    """A prompt that is still to be read: its beginning comes from the slot that holds most of it.

    Its last token is read in any case, which gives the logits.
    """
    if not slot.opening:
        return
    prompt = slot.playing.ids[:-1]
    n, itself, source = max(((shared_beginning(other.held, prompt), other is slot, other.number)
                             for other in others), default=(0, True, 0))
    if n > slot.past:
        if not itself:
            cache.copy(source, slot.number, n)
        slot.past = n


def read(slot: Slot, ids: list[int], max_tokens: int) -> None:
    """The episode reads `ids`, or ends if no reply would fit after them."""
    t = slot.playing
    if len(t.ids) + len(ids) >= max_tokens:
        t.ended = "context"
        return
    t.ids += ids
    t.action_mask += [0] * len(ids)
    slot.reply_at = len(t.ids)


def reply_ended(slot: Slot, encoder: Encoder, token: int, max_tokens: int,
                max_new_tokens: int, stops=envs.STOPS["ours"]) -> bool:
    """Whether the reply is complete; an end of turn that was not sampled gets action_mask 0.

    A reply that fills the context is taken back and ends the episode at its last whole turn.
    """
    t, at = slot.playing, slot.reply_at
    if token == encoder.end_of_turn:
        return True
    if len(t.ids) >= max_tokens - 1:
        del t.ids[at:], t.action_mask[at:]
        t.ended = "context"
        return False
    reply = t.ids[at:]
    decode, tail = encoder.tokenizer.decode, reply[-1 - max(map(len, stops)):]
    if (any(stop[-1] in encoder.text_of(token) for stop in stops)
            and any(stop in decode(tail) for stop in stops)):
        ours = before_stops(decode(reply), stops)
        while len(decode(t.ids[at:])) > len(ours):
            t.ids.pop()
            t.action_mask.pop()
    elif len(reply) < max_new_tokens:
        return False
    else:
        t.cut_replies += 1
    t.ids.append(encoder.end_of_turn)
    t.action_mask.append(0)
    slot.past = min(slot.past, len(t.ids) - 1)
    return True
