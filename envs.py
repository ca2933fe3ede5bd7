"""The interface of environments, and the function that runs an episode.

In an episode, the agent and the environment exchange text. Each environment has a folder in
`environments/`, with a subclass of the class `Environment` below. A good example to read first is
`environments/webshop/shop.py`. The function `episode` uses no tensors, so the agent can be a model,
an API endpoint or a person. The module `engine.rollouts` runs many episodes in parallel.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from common.settings import UsageError

# ------------------------------------------------------------------ the interface


class EnvError(Exception):
    """The environment itself failed, so the episode is discarded.

    The message must be a single line that explains how to fix the problem.
    """


class Stuck(Exception):
    """Raised by a scripted expert that does not know how to reply to an observation."""


@dataclass(frozen=True)
class Step:
    """The result of `Environment.step`, the environment's response to one reply."""
    observation: str  # the next message to the agent
    reward: float     # the episode's reward so far, in [0, 1]; in [-1, 1] with ETO's protocol
    done: bool        # True if the episode has ended
    raw: float | None = None  # the reward before clipping, if the environment clips it to [0, 1]
    # True if the reply changed nothing in the environment. The reply has no action, or its action
    # is unknown, not available, or has no effect. Idle replies are counted, but have no other
    # consequence. Comparisons of two Steps ignore this field.
    idle: bool = field(default=False, compare=False)


class Environment:
    """The base class of environments.

    An object plays one episode at a time. Episodes are deterministic: the same task and the same
    replies must always give the same observations and rewards.

    A subclass sets `name`, `splits`, `test_splits` and `max_turns`, and implements `start` and
    `step`. It implements `expert` if there is a scripted expert. All other attributes and methods
    have defaults. Commands find the environment by its folder `environments/NAME`.
    docs/environments.md has a complete example.

    If the environment itself fails, for example because a server stops, the method raises EnvError
    immediately. Calling `close` and then `reset` restarts the environment.

    Each task has an id of the form NAME-SPLIT-KEY, and a value, which `find` returns. The value can
    have any type. It may be a goal, a question or a number, for example. New tasks that are made
    during a run are in the split "added".
    """
    name: str
    # A dict {split: {key: value of the task}}, the same in every process. The splits are "train",
    # "validation" and the test splits.
    splits: dict[str, dict]
    test_splits: tuple[str, ...]  # names of the test splits, which a run evaluates by default
    max_turns: int                # maximum number of replies per episode, enforced by the caller
    stops = ("Observation:",)     # stop strings; a reply ends before the first stop string [ours]
    rules = ""                    # instructions at the start of the prompt, only in the full view
    # A regular expression for random text in observations. An example is the price limits of
    # WebShop, which a real server chooses at random each time it starts. Text that matches is
    # ignored when an observation is compared with a published trajectory. The default matches
    # nothing.
    drawn_anew = "(?!)"
    # Two attributes for reading files of published expert trajectories. `published_types` lists the
    # task types, in the order of their numeric ids. `task_of` is a function that converts a key
    # into the task's value, for tasks that are in no split.
    published_types = ()
    task_of = None

    def __init__(self, view: str = "full"):
        self.view = view
        self.prompt = self.rules if view == "full" else ""
        self._added = {}  # the split "added", {key: value of the task}

    # ---------------------------------------------------------------- an episode

    def reset(self, task: str) -> str:
        """Starts an episode of the task with this id, and returns the first observation."""
        return self.start(self.find(task))

    def start(self, what) -> str:
        """Starts an episode of the task with this value, and returns the first observation.

        Subclasses implement this method, and callers use `reset`.
        """
        raise NotImplementedError(f"{type(self).__name__}.start")

    def opening(self, observation: str, playing: bool = False) -> list[dict]:
        """Returns the first messages of an episode, with the prompt and the first observation.

        Args:
            observation: The first observation.
            playing: True returns the messages for acting in the environment. False returns the
                messages for training. They differ only if the prompt for acting has examples.
        """
        content = f"{self.prompt}\n\n{observation}" if self.prompt else observation
        return [{"role": "user", "content": content}]

    def action(self, reply: str) -> str | None:
        """Extracts the action from a reply. Returns None if the reply has no action.

        The action is the text after the first label "Action:", up to the end of the line. If there
        is no label, the whole reply is the action. Lines after the action are ignored, because the
        agent wrote them before it saw the next observation. Markdown emphasis, quotes and code
        marks around the action are removed.
        """
        label = LABEL.search(reply) or re.search("Action:", reply)
        if label:
            return unmarked(NEXT.split(unmarked(reply[label.end():]), 1)[0])
        return unmarked(reply) if reply.lstrip()[:1] in {*MARKS} else reply

    def step(self, reply: str) -> Step:
        """Executes the action in a reply, and returns the result.

        The caller calls this method at most `max_turns` times per episode.
        """
        raise NotImplementedError(f"{type(self).__name__}.step")

    def close(self) -> None:
        """Stops the processes and connections of the environment. `reset` starts them again."""

    # ---------------------------------------------------------------- its tasks

    def tasks(self, split: str) -> list[str]:
        """Returns the task ids of a split, in order."""
        if split not in self.splits and split != "added":
            raise UsageError(f"{self.name}: unknown split {split!r}; choose from: "
                          f"{', '.join(self.splits)}")
        return [f"{self.name}-{split}-{key}" for key in self.splits.get(split, self._added)]

    def find(self, task: str):
        """Returns the value of the task with this id. Raises ValueError if the id is unknown."""
        try:
            name, split, key = task.split("-", 2)
            values = {self.name: {**self.splits, "added": self._added}}[name][split]
            if key not in values and split != "added" and self.task_of:
                return self.task_of(key)
            return values[key]
        except (KeyError, ValueError):
            raise ValueError(f"unknown task {task!r}; tasks(split) lists them") from None

    def add(self, task: dict) -> str:
        """Adds a new task to the split "added" of this object, and returns its id, NAME-added-N.

        Other objects of the same class do not get the task. If an equal task was added before, its
        id is returned.
        """
        added = [*self._added.values()]
        key = str(added.index(task) if task in added else len(added))
        self._added[key] = task
        return f"{self.name}-added-{key}"

    def task_generator(self):
        """Returns the environment's TaskGenerator, which makes new tasks from agents' episodes.

        It is defined in the file `tasks.py` of the environment. Raises UsageError if the
        environment has no TaskGenerator.
        """
        raise UsageError(f"{self.name}: this environment makes no new tasks; give --method grpo "
                      "--start-from train, or an environment that makes some, such as the built-in "
                      "webshop")

    # ---------------------------------------------------------------- experts and people

    def expert(self) -> Callable[[str], str]:
        """Returns the scripted expert of the current episode.

        The expert is a function that takes an observation and returns a reply. It raises Stuck or
        StopIteration if it has no next reply. This method raises UsageError if the environment has
        no scripted expert.
        """
        raise UsageError(f"{self.name}: it has no scripted expert; give --experts FILE")

    def possible(self) -> tuple[list[str], str]:
        """Returns help for a person who plays the episode.

        Returns:
            A list of actions that are available now, and a text that describes the format of all
            other actions, one per line.
        """
        return [], ""

    def reply(self, action: str) -> str:
        """Converts an action that a person typed into a reply. Adds the label if it is missing."""
        return action if self.view == "short" or "Action:" in action else f"Action: {action}"


# ------------------------------------------------------------------ the action in a reply

MARKS = "*_`\"'"  # marks that chat models write around an action
# LABEL matches the label of an action, such as "Action:", "**Action**:" or "Action 2:".
# NEXT matches the end of the action, which is a line break or the next label.
LABEL = re.compile(r"^[^a-z\n]*action[^a-z\n:：]*[:：\n]", re.I | re.M)
NEXT = re.compile(r"\n|(?:Thought|Action|Observation):")


def unmarked(text: str) -> str:
    """Removes emphasis marks, quotes and whitespace around a text.

    If the text starts with code marks (`...` or ```...```), returns the text between the code
    marks.
    """
    opening = re.match(rf"[\s{MARKS}]*?(`+)(?:\w*\n)?", text)
    inside = text[opening.end():].split(opening[1], 1)[0] if opening else text
    spaces = "".join(filter(str.isspace, {*inside}))  # all kinds of whitespace in the text
    return inside.strip(MARKS + spaces)


# ------------------------------------------------------------------ the episode


def episode(env: Environment, encoder, t, max_tokens: int):
    """Runs one episode of the task t.task, and records it in the trajectory t.

    This function is a generator. It yields when it needs the agent's next reply, and the caller
    sends the reply back with `send`.

    Args:
        env: The environment.
        encoder: An `engine.chat.Encoder`, which turns messages into token ids.
        t: A `dpo.Trajectory` with a task and a seed. The episode fills in the other fields.
        max_tokens: The context length. The trajectory always has fewer tokens than this.

    Yields:
        The trajectory so far, and the random number generator of the episode. The caller must send
        the sampled reply as (token ids, log-probabilities of these tokens). It sends None if a chat
        endpoint reports that the context is full.
    """
    clear(t)
    rng = random.Random(t.seed)
    first_observation = env.reset(t.task)
    opening = env.opening(first_observation, playing=True)
    messages = opening
    input_ids = encoder.start(opening)
    while len(t.ids) + len(input_ids) < max_tokens:  # continue while there is room for a reply
        # The prompt and the observations are context. They are not trained on.
        t.messages += messages
        t.extend(input_ids, is_action=False)
        sampled = yield t, rng
        if sampled is None:
            break
        ids, log_probs = sampled
        # Cut the reply before its first stop string. `end_ids` has an end-of-turn token if the
        # reply does not end with one, and is empty otherwise.
        reply_ids, end_ids, reply = encoder.close(ids, env.stops)
        if len(t.ids) + len(reply_ids) + len(end_ids) >= max_tokens:
            break  # discard the reply; an episode that fills the context is not trained on anyway

        # Replies are action tokens, which are trained on. An added end-of-turn token is not an
        # action token, because the agent did not sample it.
        t.extend(reply_ids, is_action=True)
        t.extend(end_ids, is_action=False)
        t.log_probs += log_probs[:len(reply_ids)]
        t.messages.append(dict(role="assistant", content=reply))

        step = env.step(reply)
        t.reward = step.reward
        t.raw_reward = step.raw
        t.turns += 1
        t.idle += step.idle
        if step.done:
            t.ended = "done"
            break
        if t.turns == env.max_turns:
            t.ended = "turn_limit"
            break
        messages = [dict(role="user", content=step.observation)]
        input_ids = encoder.observation(step.observation)
    t.ended = t.ended or "context_limit"

    replace_opening(t, encoder, opening, env.opening(first_observation))


def clear(t) -> None:
    """Clears the results in a trajectory.

    This is necessary because an earlier, interrupted episode may have filled some of the fields.
    """
    t.messages = []
    t.ids = []
    t.action_mask = []
    t.log_probs = []
    t.reward = 0.0
    t.raw_reward = None
    t.turns = 0
    t.idle = 0
    t.ended = ""


def replace_opening(t, encoder, played: list[dict], trained: list[dict]) -> None:
    """Replaces the opening of a finished trajectory with the opening used for training.

    In the protocol of ETO (Song et al. 2024), the prompt has examples when agents act, but not when
    they are trained. Only the token ids and the action mask are changed. The messages keep the
    examples.

    Args:
        t: The trajectory.
        encoder: An `engine.chat.Encoder`.
        played: The messages of the opening that the agent saw in the episode.
        trained: The messages of the opening for training.
    """
    if played == trained:
        return
    size = len(encoder.start(played))
    start = encoder.start(trained)
    t.ids[:size] = start
    t.action_mask[:size] = [0] * len(start)
