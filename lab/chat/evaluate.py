"""Evaluation alone: of the agent in a folder as it is, or of a chat endpoint.

    --method evaluate --model FOLDER --temperature 1 --rollouts 4
    --method chat --model https://api.openai.com/v1 --model-name gpt-4 --examples 1
"""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Optional

from tqdm import tqdm

from coevolve import outcomes
from common.files import hashed, seed_of, whole_lines
from common.settings import Free, Method, Refused, Stated, limited
from dpo import Trajectory
from engine import playing
from engine.experts import evaluated_tasks
from engine.records import write
from engine.run import Run
from environments import is_web_address
from environments.expert_files import experts
from envs import Environment
from evolve import by_one_rank
from lab.chat.endpoint import USAGE, ContextFull, Endpoint, NotAnswered, OnlyThoughts

SLOTS = 16  # requests at once, if not said otherwise [ours]


def evaluations(run: Run) -> None:
    """Evaluates the model that is given on all evaluated splits."""
    for split in run.splits:
        run.once(f"eval-0-target-{split}.jsonl", evaluate, run.base, name="target", i=0,
                 split=split)


def evaluate(run: Run, out: Path, agent: Path, name: str, i: int, split: str) -> dict:
    """Lets an agent play the tasks of a split, some rollouts each.

    Returns:
        Means over the episodes; of several rollouts also of the best of each task.
    """
    s = run.settings
    episodes = []
    for task in run.env.tasks(split)[:s.eval_tasks or None]:
        for rollout in range(s.rollouts):
            seed = seed_of(s.seed, name, i, task, rollout)
            episodes.append(Trajectory(task, name, i, rollout, seed))
    spent = {}
    if s.method == "chat":
        episodes, spent = play_at_endpoint(run, episodes)
    else:
        episodes = run.play(agent, episodes, s.temperature)
    write(run, out, episodes)
    return outcomes(episodes, s.hard_threshold) | spent | best_of(episodes, s.rollouts)


def best_of(episodes: list[Trajectory], rollouts: int) -> dict:
    """The means over tasks of the best of several rollouts, which stand one after another."""
    if rollouts == 1:
        return {}
    best = []
    for n in range(0, len(episodes), rollouts):
        best.append(max(episodes[n:n + rollouts], key=lambda t: t.reward))
    return dict(best=sum(t.reward for t in best) / len(best),
                best_success=sum(not t.is_failure for t in best) / len(best))


# --------------------------------------------------------------------------------- an endpoint


class Paid:
    """An endpoint's answers, in the run's answers.jsonl as soon as they are there: a run that was
    stopped takes them where it asks for the same, and pays for the others alone."""

    def __init__(self, run: Run, endpoint: Endpoint):
        self.endpoint = endpoint
        self.run = run
        self.slots = run.settings.slots or SLOTS
        self.file = run.folder / "answers.jsonl"
        self.lock = threading.Lock()
        self.rows = {row["asked"]: row for row in whole_lines(self.file)}
        self.last = {}  # conversation -> (messages, row) of its last request
        self.noticed = Counter()

    def ask(self, what: tuple, messages: list[dict]) -> dict:
        """The reply to these messages, of the conversation `what`, and its usage."""
        asked = hashed([*what, messages])
        row = self.rows.get(asked)
        if row is None:
            try:
                reply, used = self.endpoint(messages)
            except OnlyThoughts as error:
                self.notice("only_thoughts", f"{error}; such requests are counted")
                raise
            cut = self.is_cut(what, messages, used["prompt_tokens"])
            row = dict(asked=asked, phase=self.run.name, reply=reply, cut_prompts=int(cut), **used)
            with self.lock, open(self.file, "a") as file:
                file.write(json.dumps(row) + "\n")
                self.rows[asked] = row
        self.last[what] = len(messages), row
        return row

    def is_cut(self, what: tuple, messages: list[dict], tokens: int) -> bool:
        """Whether a conversation has grown, and the endpoint has read no more tokens of it."""
        if what not in self.last:
            return False
        count, before = self.last[what]
        cut = len(messages) > count and 0 < tokens <= before["prompt_tokens"]
        if cut:
            self.notice("cut_prompts", f"{self.endpoint.url}: a conversation grew, and {tokens:,} "
                        "tokens of it were read as before; it leaves some out, unless it can read "
                        "more (ollama: num_ctx); such requests are counted")
        return cut

    def notice(self, name: str, said: str) -> None:
        """Counts what is said once."""
        with self.lock:
            self.noticed[name] += 1
            if self.noticed[name] == 1:
                tqdm.write(said, file=sys.stderr)

    def play(self, episodes: list[Trajectory], make_env: Callable, answer: Callable) -> None:
        """Lets the endpoint play episodes, `slots` at a time, in environments of `make_env`; answer
        is that of `playing.play`."""
        most = self.run.settings.max_tokens
        works = []
        with self.run.bar(len(episodes)) as progress:
            for slot in range(self.slots):
                works.append(partial(playing.play, make_env, Text(), episodes[slot::self.slots],
                                     answer, 1, most, lambda t: progress.update()))
            self.side_by_side(works)

    def side_by_side(self, works: list[Callable]) -> list:
        """What these return, `slots` at a time. After an error nobody asks any more."""
        threads = ThreadPoolExecutor(self.slots)
        try:
            results = [threads.submit(work) for work in works]
            for done in as_completed(results):
                done.result()
            return [result.result() for result in results]
        finally:
            self.endpoint.stopped.set()
            threads.shutdown(wait=False, cancel_futures=True)

    def spent(self) -> dict:
        """What all answers of the phase took, by the names in USAGE; and, where there are any, how
        many requests were answered by thoughts alone, and how many replies were empty."""
        rows = [row for row in self.rows.values() if row["phase"] == self.run.name]
        found = {name: sum(row.get(name, 0) for row in rows) for name in USAGE}
        others = dict(only_thoughts=self.noticed["only_thoughts"],
                      empty_replies=sum(not row["reply"].strip() for row in rows))
        return found | {name: n for name, n in others.items() if n}


class Text:
    """Stands in for the encoder of an agent that reads and writes text."""

    def start(self, said) -> list[int]:
        return []

    observation = start

    def close(self, text: str, stops: tuple[str, ...]) -> tuple[list[int], list[int], str]:
        first = min((text.index(stop) for stop in stops if stop in text), default=len(text))
        return [], [], text[:first].strip()


class Player:
    """Plays episodes at an endpoint, in the place of an agent."""

    def __init__(self, run: Run):
        s = run.settings
        self.settings = s
        self.env = run.env
        self.examples = examples(run)
        self.paid = Paid(run, Endpoint(s.model, s.model_name, s.temperature, s.max_new_tokens))
        self.refusals = []

    def answer(self, asked: list) -> list:
        """What the endpoint says to one episode; None where it can read no further."""
        (t, _), = asked
        s = self.settings
        what = t.task, t.rollout
        if t.steps:
            _, last = self.paid.last[what]
            if last["prompt_tokens"] + last["completion_tokens"] >= s.max_tokens:
                return [None]
        messages = t.messages
        if self.examples:  # which open with the rules
            messages = [*self.examples, without_rules(messages[0], self.env), *messages[1:]]
        try:
            return [(self.paid.ask(what, messages)["reply"], [])]
        except ContextFull as error:
            if t.steps == 0:
                self.refuse(t, Refused, f"its first request can never fit: {error}; lower "
                            f"--max-new-tokens {s.max_new_tokens} or --examples {s.examples}, or "
                            "give a model that reads more")
        except NotAnswered as error:
            self.refuse(t, NotAnswered, str(error))
        return [None]

    def refuse(self, t: Trajectory, kind: type, why: str) -> None:
        """Ends an episode that the endpoint refuses, or the run, by an error of this kind."""
        self.refusals.append(f"{t.task}: {why}")
        if self.settings.refused == "stop":
            raise kind(f"{self.refusals[-1]}; --refused zero goes on, and counts such tasks as "
                       "reward 0")
        t.ended = "refused"
        t.reward = 0.0


@by_one_rank
def play_at_endpoint(run: Run, episodes: list[Trajectory]) -> tuple[list[Trajectory], dict]:
    """The episodes, played, and what all requests of the phase took."""
    player = Player(run)
    make_env = partial(run.make_env, examples=run.settings.examples)
    player.paid.play(episodes, make_env, player.answer)
    numbers = player.paid.spent()
    if player.refusals and not numbers["requests"]:
        raise Refused(f"the endpoint answers no request; {player.refusals[0]}")
    if player.refusals:
        numbers["refused"] = sum(t.ended == "refused" for t in episodes)
    return episodes, numbers


def examples(run: Run) -> list[dict]:
    """The conversations of the first experts that succeed on tasks which are not evaluated. The
    rules open the first of them. By ETO's protocol the opening has its own examples."""
    env = run.env
    count = run.settings.examples
    if run.options.protocol == "eto" or count == 0:
        return []
    evaluated = evaluated_tasks(env, run.splits)
    found = []  # conversations
    for task, messages, reward in experts(env, run.settings.experts, 0):
        if reward >= 1 and repr(env.find(task)) not in evaluated:
            found.append(messages)
        if len(found) == count:
            break
    if len(found) < count:
        raise Refused(f"--examples {count}: successful experts on tasks that are not "
                      f"evaluated: {len(found)}; give fewer")
    turns = found[0]
    for opening, *rest in found[1:]:
        turns = [*turns, without_rules(opening, env), *rest]
    return turns


def without_rules(message: dict, env: Environment) -> dict:
    return message | dict(content=message["content"].removeprefix(env.prompt).strip())


# ------------------------------------------------------------------------------------ settings


def is_endpoint(model: str) -> bool:
    return model.startswith(("http://", "https://"))


@dataclass(frozen=True)
class Chat(Stated):
    """A chat endpoint"""
    # The name of the model at its endpoint [none]
    model_name: Optional[str] = None
    # Conversations that are shown first: of experts, or by --protocol eto of its prompts [ETO; 0 in
    # the code of IPR on WebShop]
    examples: limited(int, "must be 0, 1 or 2", lambda n: 0 <= n <= 2) = 1
    # What a task does that the endpoint refuses for good: it ends the run, or counts as reward 0
    # [ours]
    refused: Free[Literal["stop", "zero"]] = "stop"

    def conflicts(self, s) -> list[tuple[bool, str, str]]:
        chats = s.method == "chat"
        return [*super().conflicts(s),
                (is_web_address(s.model) != chats, f"--model {s.model} --method {s.method}",
                 "an endpoint, http://host:port/v1 or https://host/v1, needs --method chat, and "
                 "chat an endpoint"),
                (chats and not s.model_name, "--model-name",
                 "give the model's name at the endpoint")]


PLAYED = ("env", "method", "model", "out", "eval_tasks", "eval_splits", "view", "max_tokens",
          "max_new_tokens", "slots", "temperature", "rollouts", "track")
METHODS = {
    "evaluate": Method(evaluations, (*PLAYED, "seed", "bf16", "tokens_per_forward"),
                       "nothing is trained: the model, or an agent's folder, plays as it is"),
    "chat": Method(evaluations, (*PLAYED, "experts", "model_name", "examples", "refused"),
                   "nothing is trained: the model at a chat endpoint, --model https://host/v1"),
}
