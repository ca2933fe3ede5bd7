"""The interface of environments, and the function that runs an episode.

In an episode, the agent and the environment exchange text. Each environment has a folder in
`environments/`, with a subclass of the class `Environment` below. A good example to read first is
`environments/webshop/shop.py`. The function `episode` runs no model, so the agent can be a language
model, an API endpoint or a person. The module `engine.rollouts` runs many episodes in parallel.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from common.settings import UsageError

# ------------------------------------------------------------------ the interface


class EnvError(Exception):
    """Raised if the environment itself fails, for example because a server stops.

    The episode is then discarded and played again. If it fails again and again, the run stops. The
    message must be a single line that explains how to fix the problem.
    """


class Stuck(Exception):
    """Raised by a scripted expert that does not know how to reply to an observation."""


@dataclass(frozen=True)
class Step:
    """The result of `Environment.step`, the environment's response to one reply."""
    observation: str  # the next message to the agent
    reward: float     # the episode's reward so far, in [0, 1]; in [-1, 1] with ETO's protocol
    done: bool        # True if the episode has ended
    raw: float | None = None  # the reward before clipping to [0, 1], or None without clipping
    # True if the reply changed nothing in the environment: the reply contains no action, or its
    # action is unknown, not available, or without effect. Idle replies are counted, but not
    # penalised. Two Steps that differ only in this field compare as equal.
    idle: bool = field(default=False, compare=False)


class Interaction:
    """The part of an environment that an episode uses.

    One object runs one episode at a time. Episodes are deterministic: the same task and the same
    replies must always give the same observations and rewards. If the environment itself fails, for
    example because a server stops, `start` and `step` must raise EnvError immediately. Calling
    `close` and then `reset` restarts the environment.
    """
    max_turns: int             # maximum number of replies per episode, enforced by the caller
    stops = ("Observation:",)  # stop strings; a reply ends before the first stop string [ours]
    prompt = ""                # instructions before the first observation

    def reset(self, task: str) -> str:
        """Starts an episode of the task with this id, and returns the first observation."""
        return self.start(self.find(task))

    def start(self, value) -> str:
        """Starts an episode of the task with this value, and returns the first observation.

        Subclasses implement this method, and callers use `reset`.
        """
        raise NotImplementedError(f"{type(self).__name__}.start")

    def step(self, reply: str) -> Step:
        """Executes the action in a reply, and returns the result.

        The caller calls this method at most `max_turns` times per episode.
        """
        raise NotImplementedError(f"{type(self).__name__}.step")

    def opening(self, observation: str, playing: bool = False) -> list[dict]:
        """Returns the first messages of an episode, with the prompt and the first observation.

        If `playing` is True, they are the messages for acting in the environment, and otherwise
        those for training. The two differ only if the prompt for acting has examples.
        """
        content = f"{self.prompt}\n\n{observation}" if self.prompt else observation
        return [{"role": "user", "content": content}]

    def action(self, reply: str) -> str | None:
        """Extracts the action from a reply. A subclass may return None if there is none.

        The action is the text after the first label "Action:", up to the end of the line. Later
        lines are ignored, because the agent wrote them before it saw the next observation. If there
        is no label, the whole reply is the action. Markdown emphasis, quotes, backticks and code
        fences around the action are removed.
        """
        label = LABEL.search(reply) or re.search("Action:", reply)
        if label:
            return unmarked(NEXT.split(unmarked(reply[label.end():]), 1)[0])
        return unmarked(reply) if reply.lstrip()[:1] in {*MARKS} else reply

    def close(self) -> None:
        """Stops all processes and closes all connections of the environment.

        A later call of `reset` starts them again.
        """


# ------------------------------------------------------------------ the episode


def episode(env: Interaction, encoder, t, max_tokens: int):
    """Runs one episode of the task t.task, and records it in the trajectory t.

    This function is a generator. It yields each time it needs the agent's next reply. The caller
    then passes the reply to the generator with `send`.

    Args:
        encoder: An `engine.chat.Encoder`, which turns messages into token ids.
        t: A `dpo.Trajectory` with a task and a seed. This function sets the fields that `clear`
            resets.
        max_tokens: The context length. The trajectory always has fewer than `max_tokens` tokens.

    Yields:
        The trajectory so far, and the random number generator of the episode. The caller must send
        the sampled reply as a tuple (token ids, log-probabilities of these tokens). If a chat
        endpoint reports that the context is full, the caller must send None instead.
    """
    clear(t)
    rng = random.Random(t.seed)
    first_observation = env.reset(t.task)
    opening = env.opening(first_observation, playing=True)
    messages = opening
    input_ids = encoder.start(opening)
    while len(t.ids) + len(input_ids) < max_tokens:  # the context has room for another reply
        # The prompt and the observations are context, so agents are not trained on these tokens.
        t.messages += messages
        t.extend(input_ids, is_action=False)
        sampled = yield t, rng
        if sampled is None:
            break
        ids, log_probs = sampled
        # Cut the reply before its first stop string. If the reply does not end with an end-of-turn
        # token, `end_ids` contains one. Otherwise it is empty.
        reply_ids, end_ids, reply = encoder.close(ids, env.stops)
        if len(t.ids) + len(reply_ids) + len(end_ids) >= max_tokens:
            break  # discard the reply, because agents are not trained on an interrupted episode

        # The tokens of a reply are action tokens, which agents are trained on. An added end-of-turn
        # token is not an action token, because the agent did not sample it.
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
    """Resets all fields of a trajectory that an episode sets.

    The reset is necessary if an earlier attempt at the episode was interrupted, because this
    attempt may have set some of the fields.
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
    """Replaces the first messages of a finished trajectory with the first messages for training.

    In the protocol of ETO (Song et al. 2024), the prompt contains examples when agents act, but not
    when they are trained. This function changes only the token ids and the action mask. The field
    `messages` still contains the examples.

    `played` are the first messages of the episode, and `trained` those for training.
    """
    if played == trained:
        return
    size = len(encoder.start(played))
    start = encoder.start(trained)
    t.ids[:size] = start
    t.action_mask[:size] = [0] * len(start)


# ------------------------------------------------------------------ the action in a reply

MARKS = "*_`\"'"  # markdown and quote characters that chat models write around an action
# LABEL matches the label of an action, such as "Action:", "**Action**:" or "Action 2:".
# NEXT matches the end of the action, which is a line break or the next label.
LABEL = re.compile(r"^[^a-z\n]*action[^a-z\n:：]*[:：\n]", re.I | re.M)
NEXT = re.compile(r"\n|(?:Thought|Action|Observation):")


def unmarked(text: str) -> str:
    """Removes emphasis marks, quotes, backticks and whitespace around a text.

    If the text starts with a code span (`...`) or a code fence (```...```), returns only the text
    inside it.
    """
    opening = re.match(rf"[\s{MARKS}]*?(`+)(?:\w*\r?\n)?", text)
    inside = text[opening.end():].split(opening[1], 1)[0] if opening else text
    spaces = "".join(filter(str.isspace, {*inside}))  # all whitespace characters of the text
    return inside.strip(MARKS + spaces)


# ------------------------------------------------------------------ tasks, experts and people


class Environment(Interaction):
    """The base class of environments: an `Interaction` with tasks.

    A subclass sets `name`, `splits`, `test_splits` and `max_turns`, and implements `start` and
    `step`. If there is a scripted expert, the subclass also implements `expert`. All other
    attributes and methods have defaults. The commands accept NAME if the file
    `environments/NAME/__init__.py` defines a settings class `Options` that creates the environment.
    docs/environments.md contains a complete example.

    Each task has an id of the form NAME-SPLIT-KEY, and a value. The method `find` returns the value
    for an id. The value can have any type, for example a goal, a question or a number. New tasks
    that are made during a run are in the split "added".
    """
    name: str
    # A dict {split: {key: value of the task}}. It must be the same in every process. The splits are
    # "train", "validation" and the test splits.
    splits: dict[str, dict]
    test_splits: tuple[str, ...]  # names of the test splits, which a run evaluates by default
    rules = ""                    # instructions for the prompt, used only with the view "full"
    # A regular expression for text that differs each time a server starts, such as the random price
    # limits of a real WebShop server. This text is ignored when --experts compares the observations
    # of a published trajectory with those of the environment. The default matches no text.
    drawn_anew = "(?!)"
    # The next two attributes are used to read files of published expert trajectories.
    # `published_types` lists the task types, in the order of their numeric ids. `task_of` is a
    # function for tasks that are in no split. It converts the key of a task into the task's value.
    published_types = ()
    task_of = None

    def __init__(self, view: str = "full"):
        self.view = view
        self.prompt = self.rules if view == "full" else ""
        self._added = {}  # the split "added", {key: value of the task}

    def tasks(self, split: str) -> list[str]:
        """Returns the task ids of a split, in order."""
        if split not in self.splits and split != "added":
            raise UsageError(f"{self.name}: unknown split {split!r}; choose from: "
                          f"{', '.join(self.splits)}")
        return [f"{self.name}-{split}-{key}" for key in self.splits.get(split, self._added)]

    def check(self, splits: list[str]) -> str:
        """Checks the tasks of some splits before a run, and returns a line to print, or "".

        Raises UsageError if they cannot be used.
        """
        return ""

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

        Other objects of the same class do not get the task. If an identical task was added before,
        its id is returned.
        """
        added = [*self._added.values()]
        key = str(added.index(task) if task in added else len(added))
        self._added[key] = task
        return f"{self.name}-added-{key}"

    def task_generator(self):
        """Returns the environment's TaskGenerator, which makes new tasks from agents' episodes.

        The class TaskGenerator is defined in the file `tasks.py` of the environment. Its text
        `form` describes a task to an explorer model, and `actions` describes the actions, for an
        environment without a prompt. Raises UsageError if the environment has no TaskGenerator.
        """
        raise UsageError(f"{self.name}: this environment makes no new tasks; give --method grpo "
                      "--start-from train, or an environment that makes some, such as the built-in "
                      "webshop")

    # ---------------------------------------------------------------- experts and people

    def expert(self) -> Callable[[str], str]:
        """Returns the scripted expert of the current episode.

        The scripted expert is a function that gets an observation and returns a reply. The function
        raises Stuck or StopIteration if it has no next reply. This method raises UsageError if the
        environment has no scripted expert.
        """
        raise UsageError(f"{self.name}: it has no scripted expert; give --experts FILE")

    def possible(self) -> tuple[list[str], str]:
        """Returns help for a person who plays the episode.

        The list contains the actions that are available now. The text describes the formats of all
        other actions.
        """
        return [], ""

    def reply(self, action: str) -> str:
        """Returns a reply for an action that a person typed.

        Adds the label "Action:" if it is missing, except with the view "short".
        """
        return action if self.view == "short" or "Action:" in action else f"Action: {action}"
