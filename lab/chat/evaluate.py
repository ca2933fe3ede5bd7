"""Evaluates an agent without training it. The agent is a model's folder or a chat endpoint.

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

from coevolve import summarise
from common.files import hash_of, seed_of, whole_lines
from common.settings import Free, Method, Stated, UsageError, limited
from dpo import Trajectory
from engine import rollouts
from engine.experts import best_of_tasks, evaluated_tasks
from engine.run import Run
from environments import is_web_address
from environments.expert_files import experts
from envs import Environment
from evolve import by_one_rank
from lab.chat.endpoint import USAGE, ContextFull, Endpoint, NotAnswered, OnlyThoughts

SLOTS = 16  # concurrent requests, unless --slots is given [ours]


def evaluations(run: Run) -> None:
    """Evaluates the model given by --model on all splits that the run evaluates."""
    for split in run.splits:
        run.once(f"eval-0-target-{split}.jsonl", evaluate, run.base, name="target", i=0,
                 split=split)


def evaluate(
    run: Run,
    agent: Path,
    name: str,
    i: int,
    split: str,
) -> tuple[list[Trajectory], dict]:
    """Evaluates an agent on the tasks of a split, with --rollouts episodes per task.

    Returns:
        The trajectories, and metrics averaged over all episodes. With --method chat, the API usage is included. With
        several rollouts, `best` and `best_success` are the reward and the success rate of each
        task's best rollout, averaged over tasks.
    """
    s = run.settings
    episodes = []
    for task in run.env.tasks(split)[:s.eval_tasks or None]:
        for rollout in range(s.rollouts):
            seed = seed_of(s.seed, name, i, task, rollout)
            episodes.append(Trajectory(task, name, i, rollout, seed))
    usage = {}
    if s.method == "chat":
        episodes, usage = play_at_endpoint(run, episodes)
    else:
        episodes = run.play(agent, episodes, s.temperature)
    numbers = summarise(episodes, s.hard_threshold) | usage
    if s.rollouts > 1:
        best = summarise(best_of_tasks(episodes), s.hard_threshold)
        numbers |= dict(best=best["reward"], best_success=best["success"])
    return episodes, numbers


# --------------------------------------------------------------------------------- an endpoint


class Paid:
    """Calls an endpoint and caches its responses on disk, because API calls cost money.

    Each response is written to the run's answers.jsonl as soon as it arrives. A resumed run finds
    the responses to the same messages there, and calls the endpoint only for the other messages.
    """

    def __init__(self, run: Run, endpoint: Endpoint):
        self.endpoint = endpoint
        self.run = run
        self.slots = run.settings.slots or SLOTS
        self.file = run.folder / "answers.jsonl"
        self.lock = threading.Lock()
        self.rows = {row["asked"]: row for row in whole_lines(self.file)}
        # Maps a conversation to its latest request: (number of messages, row of answers.jsonl)
        self.last = {}
        self.noticed = Counter()

    def ask(self, what: tuple, messages: list[dict]) -> dict:
        """Returns the endpoint's reply to some messages, with its usage, as a row of answers.jsonl.

        Args:
            what: Identifies the conversation, for example by task and rollout.
            messages: All messages of the conversation so far.
        """
        asked = hash_of([*what, messages])
        row = self.rows.get(asked)
        if row is None:
            try:
                reply, usage = self.endpoint(messages)
            except OnlyThoughts as error:
                self.notice("only_thoughts", f"{error}; such requests are counted")
                raise
            cut = self.is_cut(what, messages, usage["prompt_tokens"])
            row = dict(asked=asked, phase=self.run.name, reply=reply, cut_prompts=int(cut), **usage)
            with self.lock, open(self.file, "a") as file:
                file.write(json.dumps(row) + "\n")
                self.rows[asked] = row
        self.last[what] = len(messages), row
        return row

    def is_cut(self, what: tuple, messages: list[dict], tokens: int) -> bool:
        """Returns True if the server seems to truncate the conversation. This is the case if the
        conversation has more messages than in its last request, but the server reports no more
        prompt tokens."""
        if what not in self.last:
            return False
        count, before = self.last[what]
        cut = len(messages) > count and 0 < tokens <= before["prompt_tokens"]
        if cut:
            self.notice("cut_prompts", f"{self.endpoint.url}: a conversation grew, but its "
                        f"prompt did not ({tokens:,} tokens); the server truncates it, so raise "
                        "its context length (ollama: num_ctx); such requests are counted")
        return cut

    def notice(self, name: str, message: str) -> None:
        """Counts an event by its name. The message is printed only for the first event."""
        with self.lock:
            self.noticed[name] += 1
            if self.noticed[name] == 1:
                tqdm.write(message, file=sys.stderr)

    def play(self, episodes: list[Trajectory], make_env: Callable, reply_to: Callable) -> None:
        """Runs `slots` episodes at a time against the endpoint.

        Args:
            episodes: New trajectories. The episodes are recorded in them.
            make_env: Function that creates an environment.
            reply_to: Function reply_to(trajectory) that returns the next reply of an episode. If it
                returns None, the episode ends.
        """
        def answer(requests: list) -> list:  # in `rollouts.play`, each slot has one episode
            (t, _), = requests
            reply = reply_to(t)
            return [None if reply is None else (reply, [])]

        max_tokens = self.run.settings.max_tokens
        works = []
        with self.run.bar(len(episodes)) as progress:
            for slot in range(self.slots):
                works.append(partial(rollouts.play, make_env, Text(), episodes[slot::self.slots],
                                     answer, 1, max_tokens, lambda t: progress.update()))
            self.side_by_side(works)

    def side_by_side(self, works: list[Callable]) -> list:
        """Calls functions concurrently in `slots` threads, and returns their results in order. If
        one of them raises an error, no further request is sent."""
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
        """Returns the total usage of all responses of the current phase, with the keys of USAGE.
        If there are empty replies, or responses with reasoning only, their numbers are included."""
        rows = [row for row in self.rows.values() if row["phase"] == self.run.name]
        usage = {name: sum(row[name] for row in rows) for name in USAGE}
        events = dict(only_thoughts=self.noticed["only_thoughts"],
                      empty_replies=sum(not row["reply"].strip() for row in rows))
        return usage | {name: n for name, n in events.items() if n}


class Text:
    """Replacement for the tokenizer's encoder. An endpoint sends and receives text, so its episodes
    have no token ids and all methods return empty lists of ids."""

    def start(self, messages) -> list[int]:
        return []

    observation = start

    def close(self, text: str, stops: tuple[str, ...]) -> tuple[list[int], list[int], str]:
        first = min((text.index(stop) for stop in stops if stop in text), default=len(text))
        return [], [], text[:first].strip()


@by_one_rank
def play_at_endpoint(run: Run, episodes: list[Trajectory]) -> tuple[list[Trajectory], dict]:
    """Plays the episodes with the replies of the endpoint. Returns the episodes, and the total
    usage of all API calls in this phase.

    If the endpoint refuses a request, --refused stop ends the run with an error, and --refused zero
    ends the episode with reward 0.
    """
    s = run.settings
    paid = Paid(run, Endpoint(s.model, s.model_name, s.temperature, s.max_new_tokens))
    shown = examples(run)
    refusals = []

    def next_reply(t: Trajectory) -> str | None:
        what = t.task, t.rollout
        if t.turns:
            _, last = paid.last[what]
            if last["context_tokens"] >= s.max_tokens:
                return None
        messages = t.messages
        if shown:  # the first example already contains the environment's rules
            messages = [*shown, without_rules(messages[0], run.env), *messages[1:]]
        try:
            return paid.ask(what, messages)["reply"]
        except ContextFull as error:
            if t.turns:
                return None
            refusal = UsageError(f"{t.task}: its first request never fits: {error}; lower "
                                 f"--max-new-tokens {s.max_new_tokens} or --examples {s.examples}, "
                                 "or use a model with a longer context")
        except NotAnswered as error:
            refusal = NotAnswered(f"{t.task}: {error}")
        if s.refused == "stop":
            raise type(refusal)(f"{refusal}; to continue and count such tasks as reward 0, add "
                                "--refused zero")
        refusals.append(refusal)
        t.ended = "refused"
        t.reward = 0.0
        return None

    paid.play(episodes, partial(run.make_env, examples=s.examples), next_reply)
    usage = paid.spent()
    if refusals and not usage["requests"]:
        raise UsageError(f"the endpoint refuses every request; {refusals[0]}")
    if refusals:
        usage["refused"] = sum(t.ended == "refused" for t in episodes)
    return episodes, usage


def examples(run: Run) -> list[dict]:
    """Returns the messages of the few-shot examples. The setting --examples is their number.

    The examples are the first successful expert trajectories of tasks that the run does not
    evaluate. Only the first example contains the environment's rules. With --protocol eto there
    are no examples, because the opening messages of this protocol already have some.
    """
    env = run.env
    count = run.settings.examples
    if run.options.protocol == "eto" or count == 0:
        return []
    evaluated = evaluated_tasks(env, run.splits)
    conversations = []
    for task, messages, reward in experts(env, run.settings.experts, 0):
        if reward >= 1 and repr(env.find(task)) not in evaluated:
            conversations.append(messages)
        if len(conversations) == count:
            break
    if len(conversations) < count:
        raise UsageError(f"--examples {count}: expert trajectories that succeed on tasks that "
                      f"are not evaluated: {len(conversations)}; lower --examples")
    turns = conversations[0]
    for opening, *rest in conversations[1:]:
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
    # Name of the model at its endpoint [none]
    model_name: Optional[str] = None
    # Number of few-shot examples at the start of each conversation. They are expert trajectories,
    # or with --protocol eto the examples in ETO's prompts [ETO; 0 in the code of IPR on WebShop]
    examples: limited(int, "must be 0, 1 or 2", lambda n: 0 <= n <= 2) = 1
    # Action if the endpoint permanently refuses a request: "stop" ends the run, "zero" ends only
    # the episode, with reward 0 [ours]
    refused: Free[Literal["stop", "zero"]] = "stop"

    def conflicts(self, s) -> list[tuple[bool, str, str]]:
        chats = s.method == "chat"
        return [*super().conflicts(s),
                (is_web_address(s.model) != chats, f"--model {s.model} --method {s.method}",
                 "an endpoint, http://host:port/v1 or https://host/v1, needs --method chat, and "
                 "--method chat needs an endpoint"),
                (chats and not s.model_name, "--model-name",
                 "give the model's name at the endpoint")]


PLAYED = ("env", "method", "model", "out", "eval_tasks", "eval_splits", "view", "max_tokens",
          "max_new_tokens", "slots", "temperature", "rollouts", "track")
METHODS = {
    "evaluate": Method(evaluations, (*PLAYED, "seed", "bf16", "tokens_per_forward"),
                       "no training: evaluates a model or an agent's folder"),
    "chat": Method(evaluations, (*PLAYED, "experts", "model_name", "examples", "refused"),
                   "no training: evaluates a chat endpoint, --model https://host/v1"),
}
