"""Evaluates an agent without training it. The agent is a model's folder or a chat endpoint.

    --method evaluate --model FOLDER --temperature 1 --rollouts 4
    --method chat --model https://api.openai.com/v1 --model-name gpt-4 --examples 1
"""

import json
import sys
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, Optional

from tqdm import tqdm

from coevolve import summarise
from common.files import hash_of, seed_of, whole_lines
from common.settings import Free, Method, Rate, Stated, UsageError, limited
from dpo import Trajectory
from engine import rollouts
from engine.experts import best_of_tasks, evaluated_tasks
from engine.run import Run
from environments import is_web_address
from environments.expert_files import experts
from envs import Environment, episode
from evolve import by_one_rank
from lab.chat.endpoint import (
    USAGE,
    Endpoint,
    EndpointError,
    NotAnswered,
    OnlyThoughts,
    Refused,
)

BYTES_PER_TOKEN = 4  # average, used to estimate token counts [OpenAI, for English]
SLOTS = 16  # number of concurrent requests, unless --slots is given [ours]


def evaluate_model(run: Run) -> None:
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

    Returns the trajectories, and metrics averaged over all episodes. With several rollouts, `best`
    and `best_success` are the mean reward and the success rate of the best rollout of each task.
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
        self.first = threading.Lock()  # held by the thread that waits for the first answer
        self.rows = {row["asked"]: row for row in whole_lines(self.file)}
        # The messages of the first answered request. They are also in the first row of
        # answers.jsonl.
        self.answered = next((row["messages"] for row in self.rows.values() if "messages" in row),
                             None)
        self.openings = []  # functions that return the first messages of a conversation
        # Maps a conversation to its latest request: (number of messages, row of answers.jsonl)
        self.last = {}
        self.noticed = Counter()

    def ask(self, what: tuple, messages: list[dict]) -> dict:
        """Returns the endpoint's reply to some messages, with its usage, as a row of answers.jsonl.

        Args:
            what: Identifies the conversation, for example by task and rollout.

        Raises:
            NotAnswered: The endpoint does not reply to this conversation.
            EndpointError: The endpoint refuses all requests.
        """
        asked = hash_of([*what, messages])
        row = self.rows.get(asked)
        if row is None:
            try:
                reply, usage = self.send_in_turn(messages)
            except OnlyThoughts as error:
                self.notice("only_thoughts", f"{error}; such requests are counted")
                raise
            cut = self.is_cut(what, messages, usage["prompt_tokens"])
            row = self.record(asked, messages, reply, usage | dict(cut_prompts=int(cut)))
        self.last[what] = len(messages), row
        return row

    def send_in_turn(self, messages: list[dict]) -> tuple[str, dict]:
        """Calls `send`. Until the first answer, it is called by one thread at a time, because the
        first answer determines the body of all other requests."""
        with self.first:
            if len(self.endpoint.bodies) > 1:
                return self.send(messages)
        return self.send(messages)

    def send(self, messages: list[dict]) -> tuple[str, dict]:
        """Sends a request, and returns the reply and its usage. If the request is refused, checks
        whether the endpoint refuses this conversation or all requests.

        For this check, a request that was answered before is repeated. If the repetition is also
        refused, the endpoint refuses all requests, for example because of an empty account, and
        nothing is recorded. If it is answered, the refused request is sent once more, because the
        refusal may have been temporary. If no request was answered before, the opening of a
        different conversation is sent instead.

        Raises:
            Refused: The endpoint refuses this conversation, but not all requests.
            EndpointError: The endpoint refuses all requests.
        """
        try:
            return self.endpoint(messages)
        except Refused as refusal:
            probe = self.answered or self.other_opening(messages)
            if probe is None:
                raise EndpointError(str(refusal)) from None
            try:
                reply, usage = self.endpoint(probe)
                self.record("", probe, reply, usage | dict(cut_prompts=0))
            except Refused:
                raise EndpointError(f"{refusal}; another request is refused, too") from None
            except NotAnswered:
                pass  # a response without a reply is an answer
        reply, usage = self.endpoint(messages)
        return reply, usage | dict(retries=usage["retries"] + 1)

    def other_opening(self, messages: list[dict]) -> list[dict] | None:
        """Returns the opening of a conversation that differs from `messages`, or None."""
        openings = (opening() for opening in self.openings)
        return next((other for other in openings if other != messages), None)

    def record(self, asked: str, messages: list[dict], reply: str, usage: dict) -> dict:
        """Appends a response to answers.jsonl, and returns its row.

        Args:
            asked: The hash of the request, or "" for the request that `send` adds as a check. Its
                response is counted, but never reused.
        """
        with self.lock, open(self.file, "a") as file:
            asked = asked or f"repeated {len(self.rows)}"
            row = dict(asked=asked, phase=self.run.name, reply=reply, **usage)
            if self.answered is None:
                self.answered = row["messages"] = [*messages]  # a copy, because episodes grow
            file.write(json.dumps(row) + "\n")
            self.rows[asked] = row
        return row

    def is_cut(self, what: tuple, messages: list[dict], tokens: int) -> bool:
        """Returns True if the server seems to truncate the conversation. This is the case if the
        conversation contains more messages than in its last request, but the server reports no more
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

    def prompt_tokens(self, what: tuple, messages: list[dict]) -> int:
        """Returns the length of a request in tokens. For messages of the conversation's last
        request, the endpoint's count is used. The length of newer messages is estimated."""
        count, row = self.last.get(what, (0, {}))
        counted = row.get("prompt_tokens", 0)
        new = messages[count if counted else 0:]
        return counted + sum(-(-len(m["content"].encode()) // BYTES_PER_TOKEN) for m in new)

    def notice(self, name: str, message: str) -> None:
        """Counts events by name, and prints the message of the first event of each name."""
        with self.lock:
            self.noticed[name] += 1
            if self.noticed[name] == 1:
                tqdm.write(message, file=sys.stderr)

    def play(self, episodes: list[Trajectory], make_env: Callable, request: Callable,
             refuse: Callable) -> None:
        """Runs `slots` episodes at a time against the endpoint.

        Args:
            episodes: New trajectories. The episodes are recorded in them.
            request: Function request(trajectory) that returns the messages to send for the next
                reply. If it returns None, the episode ends.
            refuse: Function refuse(trajectory, error) that is called if the endpoint does not
                reply. The episode then ends.
        """
        max_tokens = self.run.settings.max_tokens

        def answer(requests: list) -> list:  # each slot plays one episode at a time
            (t, _), = requests
            messages = request(t)
            if messages is None:
                return [None]
            try:
                return [(self.ask(conversation_of(t), messages)["reply"], [])]
            except NotAnswered as error:
                refuse(t, error)
                return [None]

        def opening(t: Trajectory) -> list[dict] | None:
            t = replace(t)
            env = make_env()
            next(episode(env, Text(), t, max_tokens))
            env.close()
            return request(t)

        self.openings = [partial(opening, t) for t in episodes]
        works = []
        with self.run.bar(len(episodes)) as progress:
            for slot in range(self.slots):
                works.append(partial(
                    rollouts.play_episodes, make_env, Text(), episodes[slot::self.slots],
                    answer, 1, max_tokens, lambda t: progress.update()))
            self.side_by_side(works)

    def side_by_side(self, works: list[Callable]) -> list:
        """Calls functions in `slots` threads, and returns their results in the order of `works`. If
        a function raises an error, no further requests are sent."""
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
        """Returns the total usage of all responses in the current phase, with the keys of USAGE.
        Empty replies, and responses with only reasoning, are also counted if there are any."""
        rows = [row for row in self.rows.values() if row["phase"] == self.run.name]
        usage = {name: sum(row[name] for row in rows) for name in USAGE}
        events = dict(only_thoughts=self.noticed["only_thoughts"],
                      empty_replies=sum(not row["reply"].strip() for row in rows))
        return usage | {name: n for name, n in events.items() if n}


def conversation_of(t: Trajectory) -> tuple:
    return t.agent, t.iteration, t.task, t.rollout


class Text:
    """Replaces the tokenizer's encoder if the agent is an endpoint. An endpoint sends and receives
    text, so there are no token ids and all methods return empty lists of ids."""

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

    If the endpoint refuses a conversation at its first request, --refused stop ends the run with an
    error, and --refused zero ends the episode with reward 0. This also holds for a response without
    a reply in any turn. If the endpoint refuses a later request, the context of the episode counts
    as full, because the endpoint has replied to the earlier messages.
    """
    s = run.settings
    paid = Paid(run, Endpoint(s.model, s.model_name, s.temperature, s.max_new_tokens, s.timeout))
    shown = examples(run)
    refused = []
    refused_later = []

    def request(t: Trajectory) -> list[dict] | None:
        messages = t.messages
        if shown:  # the first example already contains the environment's rules
            messages = [*shown, without_rules(messages[0], run.env), *messages[1:]]
        tokens = paid.prompt_tokens(conversation_of(t), messages)
        return messages if tokens + s.max_new_tokens <= s.max_tokens else None

    def refuse(t: Trajectory, error: NotAnswered) -> None:
        line = f"{t.task}: {error}"
        if isinstance(error, Refused) and t.turns:
            refused_later.append(line)
        elif s.refused == "stop":
            raise NotAnswered(f"{line}; to continue and count such tasks as reward 0, add "
                              "--refused zero")
        else:
            refused.append(line)
            t.ended = "refused"
            t.reward = 0.0

    paid.play(episodes, partial(run.make_env, examples=s.examples), request, refuse)
    stop_if_all(refused, episodes)
    counts = dict(refused=len(refused), refused_later=len(refused_later))
    return episodes, paid.spent() | {name: n for name, n in counts.items() if n}


def stop_if_all(refused: list, conversations: list) -> None:
    """Raises EndpointError with the first refusal if all conversations of a phase are refused."""
    if refused and len(refused) == len(conversations):
        raise EndpointError(f"the endpoint replies to no conversation; {refused[0]}")


def examples(run: Run) -> list[dict]:
    """Returns the messages of the few-shot examples: the first --examples successful expert
    trajectories on tasks that the run does not evaluate. Only the first example contains the
    environment's rules. With --protocol eto, there are no messages, because the opening already
    contains examples."""
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
    # or, with --protocol eto, the examples in ETO's prompts [ETO; 0 in the code of IPR on WebShop]
    examples: limited(int, "must be 0, 1 or 2", lambda n: 0 <= n <= 2) = 1
    # What to do if the endpoint does not reply to a task, although it replies to others: "stop"
    # ends the run, "zero" ends only the episode, with reward 0 [ours]
    refused: Free[Literal["stop", "zero"]] = "stop"
    # Read timeout of an endpoint, including the explorer's: the maximum time without any data, in
    # seconds [ours]
    timeout: Free[Rate] = 300.0

    def conflicts(self, s) -> list[tuple[bool, str, str]]:
        chats = s.method == "chat"
        return [*super().conflicts(s),
                (is_web_address(s.model) != chats, f"--model {s.model} --method {s.method}",
                 "an endpoint, http://host:port/v1 or https://host/v1, needs --method chat, and "
                 "--method chat needs an endpoint"),
                (chats and not s.model_name, "--model-name",
                 "give the model's name at the endpoint")]


PLAYED = ("env", "method", "model", "out", "eval_tasks", "eval_splits", "view", "max_tokens",
          "max_new_tokens", "slots", "temperature", "rollouts", "hard_threshold", "seed", "track")
METHODS = {
    "evaluate": Method(evaluate_model, (*PLAYED, "bf16", "tokens_per_forward"),
                       "no training: evaluates a model or an agent's folder"),
    "chat": Method(evaluate_model, (*PLAYED, "experts", "model_name", "examples", "refused",
                                 "timeout"),
                   "no training: evaluates a chat endpoint, --model https://host/v1"),
}
