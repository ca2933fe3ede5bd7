"""A rollout: one model, many slots, a cache of keys and values over all turns."""

import random
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch
from torch import Tensor

from lab import play_env as envs
from lab.engine.cache import next_token_logits, sample, slot_cache
from lab.engine.packing import shared_beginning
from lab.playing.conversation import before_stops, take
from lab.tokens import Encoder, Trajectory

# A prompt waits a pass for another one if so many tokens less are read then [ours].
WORTH_WAITING = 32


@dataclass(frozen=True)
class Sampling:
    """How replies are sampled, where they and episodes end, and how many run side by side."""

    temperature: float
    max_tokens: int       # of an episode
    max_new_tokens: int   # of a reply
    tokens_per_forward: int
    slots: int
    stops: tuple[str, ...] = envs.STOPS["ours"]  # a reply ends before one of these texts
    chunk: int = 0        # so many episodes begin when those before have ended; 0: no chunks


@torch.inference_mode()
def rollout(model, encoder: Encoder, make_env, trajectories: list[Trajectory], sampling: Sampling,
            *, of: int = 0, ended: Callable[[Trajectory], None] = lambda t: None,
            ) -> list[Trajectory]:
    """Plays the episodes, `slots` side by side, and returns them in the order given.

    Every episode has its own random generator, so what runs beside it changes nothing but rounding.
    An episode whose environment breaks ends "lost"; EnvError where too many are, of these episodes
    or of so many on all ranks (`of`). Episodes that have ended already stay as they are. A chunk
    depends on nothing in the chunks before it. ended(trajectory) is called when one ends.
    """
    size = sampling.chunk or len(trajectories) or 1
    chunks = [[t for t in trajectories[first:first + size] if not t.ended]
              for first in range(0, len(trajectories), size)]
    if not any(chunks):  # an empty share of a rank, or all have ended before
        return trajectories
    loop = Rollout(model, encoder, make_env, sampling, min(sampling.slots, len(trajectories)),
                   envs.LostEpisodes(of or len(trajectories)), ended)
    try:
        for chunk in filter(None, chunks):
            loop.play(chunk)
    finally:
        loop.close()
    return trajectories


class Slot:
    """A place in the cache: an environment, and the episode that is being played there."""

    def __init__(self, number: int, encoder: Encoder, sampling: Sampling):
        self.number, self.encoder, self.sampling = number, encoder, sampling
        self.env = None
        self.playing: Trajectory | None = None
        self.past, self.left = 0, []  # tokens of the episode in the cache; the last one's ids there
        self.reply_at = 0             # where the running reply begins
        self.answer: Future | None = None  # of the environment
        self.due = 0                  # the pass at which it is read

    def begin(self, trajectory: Trajectory) -> None:
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
        """How many tokens the model has to read."""
        return len(self.playing.ids) - self.past

    @property
    def opening(self) -> bool:
        """Whether its episode's prompt is still to be read."""
        t = self.playing
        return bool(t and t.ids) and not t.steps and len(t.ids) == self.reply_at

    def observe(self, answer: str | envs.Step) -> None:
        """The episode reads what its environment answered: to `reset` a text, to `step` a Step."""
        t = self.playing
        if isinstance(answer, str):
            t.messages, new = envs.opening(self.env, answer, playing=True), []
            ids = self.encoder.start(t.messages)
        else:
            take(t, answer, self.env.max_steps)
            if t.ended:
                return
            new = [{"role": "user", "content": answer.observation}]
            ids = self.encoder.observation(answer.observation)
        if len(t.ids) + len(ids) >= self.sampling.max_tokens:  # no reply would fit after it
            t.ended = "context"
            return
        t.messages += new
        t.ids += ids
        t.action_mask += [0] * len(ids)
        self.reply_at = len(t.ids)

    def write(self, token: int) -> str | None:
        """The episode goes on with a sampled token; the text of the reply that it completes. An end
        of turn that was not sampled gets action_mask 0. A reply that fills the context is taken
        back and ends the episode."""
        t, at, s = self.playing, self.reply_at, self.sampling
        self.past = len(t.ids)
        t.ids.append(token)
        t.action_mask.append(1)
        if token != self.encoder.end_of_turn:
            if len(t.ids) >= s.max_tokens - 1:
                del t.ids[at:], t.action_mask[at:]
                t.ended = "context"
                return None
            if not self.cut_at_stop():
                if len(t.ids) - at < s.max_new_tokens:
                    return None
                t.cut_replies += 1
            t.ids.append(self.encoder.end_of_turn)
            t.action_mask.append(0)
            self.past = min(self.past, len(t.ids) - 1)
        return self.encoder.decode(t.ids[at:])

    def cut_at_stop(self) -> bool:
        """Ends the running reply before a stop, if it has one."""
        t, at, stops = self.playing, self.reply_at, self.sampling.stops
        decode, last = self.encoder.tokenizer.decode, self.encoder.text_of(t.ids[-1])
        tail = t.ids[max(at, len(t.ids) - 1 - max(map(len, stops))):]
        if not (any(stop[-1] in last for stop in stops)
                and any(stop in decode(tail) for stop in stops)):
            return False
        kept = before_stops(decode(t.ids[at:]), stops)
        while len(decode(t.ids[at:])) > len(kept):
            t.ids.pop()
            t.action_mask.pop()
        return True


class Rollout:
    """Episodes in slots; each turn of the loop is one forward pass over all that is new in them: of
    a slot one sampled token, or a page. As far as a prompt begins like what some slot holds, it is
    copied from there and not read.
    """

    def __init__(self, model, encoder: Encoder, make_env, sampling: Sampling, slots: int,
                 lost: envs.LostEpisodes, ended: Callable[[Trajectory], None]):
        self.model, self.make_env, self.sampling = model.eval(), make_env, sampling
        self.lost, self.ended = lost, ended
        self.slots = [Slot(n, encoder, sampling) for n in range(slots)]
        self.cache = slot_cache(model, slots, sampling.max_tokens)
        vocabulary = model.config.get_text_config().vocab_size
        self.suppress_tokens = torch.tensor(encoder.suppress_tokens(vocabulary), dtype=torch.long,
                                            device=model.device)
        self.threads = ThreadPoolExecutor(slots)
        self.now = 0  # the number of passes so far

    def play(self, episodes: list[Trajectory]) -> None:
        self.queue = episodes[::-1]
        for slot in self.slots:  # as if nothing had been read before
            slot.left = []
        while self.begin_episodes():
            self.read_answers()
            self.now += 1
            if chosen := self.choose():
                openings = [slot for slot in chosen if slot.opening]
                self.sample(chosen, self.forward(chosen))
                for slot in self.slots:
                    self.borrow(slot, openings)

    def begin_episodes(self) -> bool:
        """Free slots take what waits; whether anything is still being played."""
        for slot in self.slots:
            if slot.playing is None and self.queue:
                slot.env = slot.env or self.make_env()
                slot.begin(self.queue.pop())
                self.ask(slot, slot.env.reset, slot.playing.task)
        return any(slot.playing for slot in self.slots)

    def ask(self, slot: Slot, call, text: str) -> None:
        slot.due, slot.answer = self.now + slot.env.latency, self.threads.submit(call, text)

    def read_answers(self) -> None:
        """The answers of environments that are due: those of a slow one a fixed number of passes
        later, not when they are there, since batches, and so rounding, must not depend on time."""
        playing = [slot for slot in self.slots if slot.playing]
        asked = [slot for slot in playing if slot.answer]
        if len(asked) == len(playing):
            self.now = max(self.now, min(slot.due for slot in asked))
        for slot in [slot for slot in asked if slot.due <= self.now]:
            answer, slot.answer = slot.answer, None
            try:
                slot.observe(answer.result())
                self.lost.answered()
                self.borrow(slot, self.slots)
            except envs.EnvError as error:
                slot.playing.ended = "lost"
                self.lost.add(error)
            self.end_if_over(slot)

    def choose(self) -> list[Slot]:
        """What this pass reads: every single token that waits, then pages while they fit, at least
        one. A prompt that begins like one of this pass waits for it, and is then copied."""
        chosen, openings, room = [], [], self.sampling.tokens_per_forward
        for slot in sorted((slot for slot in self.slots if slot.playing and not slot.answer),
                           key=lambda slot: (slot.waiting, slot.number)):
            n = slot.waiting
            if n > 1 and n > room and room < self.sampling.tokens_per_forward:
                continue
            if slot.opening:
                if any(shared_beginning(slot.playing.ids, other.playing.ids)
                       >= slot.past + WORTH_WAITING for other in openings):
                    continue
                openings.append(slot)
            chosen.append(slot)
            room -= n if n > 1 else 0
        return chosen

    def forward(self, chosen: list[Slot]) -> Tensor:
        """Logits (S, V) of the next token of each of S slots."""
        logits = next_token_logits(self.model, self.cache, [
            (slot.number, slot.past, slot.playing.ids[slot.past:]) for slot in chosen])
        if not (logits < torch.inf).all():  # nor nan
            tasks = ", ".join(slot.playing.task for slot in chosen)
            raise FloatingPointError(f"logits that are no numbers on tasks {tasks}")
        logits[:, self.suppress_tokens] = -torch.inf
        return logits

    def sample(self, chosen: list[Slot], logits: Tensor) -> None:
        """A token for each slot; a reply that is whole goes to its environment."""
        temperature = self.sampling.temperature
        draws = [slot.rng.random() for slot in chosen] if temperature else None
        for slot, token in zip(chosen, sample(logits, temperature, draws).tolist()):
            if (reply := slot.write(token)) is not None:
                slot.playing.messages.append({"role": "assistant", "content": reply})
                self.ask(slot, slot.env.step, reply)
            self.end_if_over(slot)

    def borrow(self, slot: Slot, others: list[Slot]) -> None:
        """A prompt that is still to be read: its beginning comes from the slot with most of it. Its
        last token is read in any case, which gives the logits."""
        if not slot.opening:
            return
        prompt = slot.playing.ids[:-1]
        n, itself, source = max(((shared_beginning(other.held, prompt), other is slot, other.number)
                                 for other in others), default=(0, True, 0))
        if n > slot.past:
            if not itself:
                self.cache.copy(source, slot.number, n)
            slot.past = n

    def end_if_over(self, slot: Slot) -> None:
        if slot.playing.ended:
            self.ended(slot.playing)
            slot.end()

    def close(self) -> None:
        """Closes the environments but those that hang, for which nobody waits."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        wait([slot.answer for slot in self.slots if slot.answer], timeout=1)
        for slot in self.slots:
            if slot.env and (slot.answer is None or slot.answer.done()):
                slot.env.close()
