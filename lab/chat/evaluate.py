"""Evaluation alone: of the agent in a folder as it is, or of a chat endpoint.

    --method evaluate --model FOLDER --temperature 1 --rollouts 4
    --method chat --model https://api.openai.com/v1 --model-name gpt-4 --examples 1
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Literal, Optional

import envs
from coevolve import Run, bar, scores, write
from common.files import hashed, seed_of
from common.settings import Free, Method, limited
from dpo import Trajectory
from evolve import by_one_rank
from lab.careful.kept import whole_lines
from lab.careful.overlap import Overlap, marks
from lab.chat.endpoint import USAGE, ContextFull, Endpoint, NotAnswered
from worlds import is_web_address


def evaluations(run: Run) -> None:
    for split in run.splits:
        run.once(f"eval-0-target-{split}.jsonl", evaluate, run.base, name="target", i=0,
                 split=split)


def evaluate(run: Run, out: Path, agent: Path, name: str, i: int, split: str) -> dict:
    """Episodes on a split, and of several rollouts also the best: means over tasks."""
    s, numbers = run.settings, {}
    tasks = run.env.tasks(split)[:s.eval_tasks or None]
    episodes = [Trajectory(task, name, i, n, seed_of(s.seed, name, i, task, n))
                for task in tasks for n in range(s.rollouts)]
    if s.method == "chat":
        episodes, numbers = play_at_endpoint(run, episodes)
    else:
        episodes = run.play(agent, episodes, s.temperature)
    write(run, out, episodes)
    if s.rollouts > 1:
        most = [max(t.reward for t in episodes[n:n + s.rollouts])  # of a task, in their order
                for n in range(0, len(episodes), s.rollouts)]
        numbers |= dict(best=sum(most) / len(most),
                        best_success=sum(r >= run.env.success for r in most) / len(most))
    return scores(episodes, run) | numbers


# --------------------------------------------------------------------------------- an endpoint


class Paid:
    """An endpoint's answers, in the run's answers.jsonl as soon as they are there: a run that was
    stopped takes them where it asks for the same, and pays for the others alone."""

    def __init__(self, run: Run, endpoint: Endpoint):
        self.endpoint, self.slots, self.phase = endpoint, run.settings.slots, run.name
        self.file, self.lock = run.folder / "answers.jsonl", threading.Lock()
        self.rows = {row["asked"]: row for row in whole_lines(self.file)}

    def ask(self, what: list, messages: list[dict]) -> dict:
        """The reply to these messages and its usage, the same ones for the same `what`."""
        asked = hashed([*what, messages])
        if asked not in self.rows:
            reply, used = self.endpoint(messages)
            row = dict(asked=asked, phase=self.phase, reply=reply, **used)
            with self.lock, open(self.file, "a") as file:
                file.write(json.dumps(row) + "\n")
                self.rows[asked] = row
        return self.rows[asked]

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
        return {name: sum(row[name] for row in self.rows.values() if row["phase"] == self.phase)
                for name in USAGE}


class Text:
    """Stands in for the encoder of an agent that reads and writes text."""

    def start(self, said) -> list[int]:
        return []

    observation = start

    def close(self, text: str, stops: tuple[str, ...]) -> tuple[list[int], list[int], str]:
        first = min((text.index(stop) for stop in stops if stop in text), default=len(text))
        return [], [], text[:first].strip()


@by_one_rank
def play_at_endpoint(run: Run, episodes: list[Trajectory]) -> tuple[list[Trajectory], dict]:
    """The episodes, played, and what all requests of the phase took."""
    s, shown, read = run.settings, examples(run), {}  # read: the tokens of the last request
    paid = Paid(run, Endpoint(s.model, s.model_name, s.temperature, s.max_new_tokens))

    def answer(asked):
        """What the endpoint says to one episode; None where it can read no further."""
        (t, _), = asked
        messages = t.messages
        if shown:  # which open with the rules
            messages = [*shown, without_rules(messages[0], run.env), *messages[1:]]
        if t.steps and read[t.task, t.rollout] >= s.max_tokens:
            return [None]
        try:
            row = paid.ask([t.task, t.rollout], messages)
        except ContextFull:
            return [None]
        except NotAnswered as error:
            if s.refused == "stop":
                raise NotAnswered(f"{t.task}: {error}; --refused zero goes on, and counts such "
                                  "tasks as reward 0") from None
            t.ended, t.reward = "refused", 0.0
            return [None]
        read[t.task, t.rollout] = row["prompt_tokens"] + row["completion_tokens"]
        return [(row["reply"], [])]

    with bar(run, len(episodes)) as progress:
        paid.side_by_side([partial(
            envs.play, partial(run.make_env, examples=s.examples), Text(), episodes[k::s.slots],
            answer, 1, s.max_tokens, lambda t: progress.update()) for k in range(s.slots)])
    refused = sum(t.ended == "refused" for t in episodes)
    return episodes, paid.spent() | (dict(refused=refused) if refused else {})


def examples(run: Run) -> list[dict]:
    """The conversations of the first experts that succeed on tasks which are not evaluated. The
    rules open the first of them. By ETO's protocol the opening has its own examples."""
    env, count = run.env, 0 if run.options.protocol == "eto" else run.settings.examples
    evaluated = set().union(*(marks(env, task) for split in run.splits
                              for task in env.tasks(split)))
    good = (messages for task, messages, reward in envs.experts(env, run.settings.experts, 0)
            if reward >= env.success and not marks(env, task) & evaluated)
    if len(found := [*itertools.islice(good, count)]) < count:
        raise envs.Refused(f"--examples {count}: only {len(found)} experts succeed on tasks that "
                           "are not evaluated; give fewer")
    return [without_rules(m, env) if n and m is messages[0] else m
            for n, messages in enumerate(found) for m in messages]


def without_rules(message: dict, env: envs.World) -> dict:
    return message | dict(content=message["content"].removeprefix(env.prompt).strip())


# ------------------------------------------------------------------------------------ settings


def is_endpoint(model: str) -> bool:
    return model.startswith(("http://", "https://"))


@dataclass(frozen=True)
class Chat(Overlap):
    model_name: Optional[str] = None  # at its endpoint
    # conversations shown first: of experts, or by --protocol eto of its prompts [ETO; 0 in
    # the code of IPR on WebShop]
    examples: limited(int, "must be 0, 1 or 2", lambda n: 0 <= n <= 2) = 1
    # a task that the endpoint refuses for good ends the run, or counts as reward 0
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
          "max_new_tokens", "slots", "temperature", "rollouts")
METHODS = {
    "evaluate": Method(evaluations, (*PLAYED, "seed", "bf16", Overlap),
                       "a trained agent plays, and learns nothing"),
    "chat": Method(evaluations, (*PLAYED, "experts", *(
        f.name for f in fields(Chat) if f.name != "overlap")),
        "a model behind an endpoint plays, shown examples"),
}
