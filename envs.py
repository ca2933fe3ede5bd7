"""Environments: their interface, and the episode, in which agent and environment exchange text.

An environment is a folder of `environments/`, which extends the class `Environment` below; a good
one to read first is `environments/webshop/shop.py`. The function `episode` uses no tensors, so the
agent may be a model, an API endpoint or a person. The module `engine.rollouts` runs many episodes
in parallel.
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from common.settings import UsageError

# ------------------------------------------------------------------ the interface


class EnvError(Exception):
    """The environment failed, so the episode is void. The message is one line that says how to fix
    the problem."""


class Stuck(Exception):
    """A scripted expert has no next reply to an observation."""


@dataclass(frozen=True)
class Step:
    """What the environment returns for a reply."""
    observation: str  # the next message to the agent
    reward: float     # the episode's reward so far, in [0, 1]; with ETO's protocol from -1
    done: bool
    raw: float | None = None  # the reward before it was clipped to [0, 1], if that can differ
    # True if the reply changed nothing: it has no action, an unknown one, one that is not available
    # there, or one that leaves the state as it was. It is only counted, and ignored when steps are
    # compared.
    idle: bool = field(default=False, compare=False)


class Environment:
    """An environment. One object plays one episode at a time, and the same replies to the same task
    give the same episode.

    A subclass sets `name`, `splits`, `test_splits` and `max_turns`, and defines `start`, `step`
    and, if it has one, `expert`. Everything else has a default. `splits` has "train", "validation"
    and the test splits. The folder `environments/NAME` makes the environment known to all commands
    (docs/environments.md has a complete example). If the environment itself fails, a method raises
    EnvError at once. Call `close`, then `reset`, to restart it.

    A task has an id, NAME-SPLIT-KEY, and a value, which `find` returns. The value may be anything:
    a goal, a question, a number. Tasks that are made during a run have the split "added".
    """
    name: str
    splits: dict[str, dict]       # split -> key -> the task's value, the same in every process
    test_splits: tuple[str, ...]  # the splits that a run evaluates
    max_turns: int                # replies per episode of the current task; the caller counts them
    stops = ("Observation:",)     # stop strings: a reply ends before the first of them [ours]
    rules = ""                    # the instructions at the start of an episode, in the full view
    # A pattern for text in observations that a real server draws anew at each start, such as
    # WebShop's price limits. It is ignored when published trajectories are compared.
    drawn_anew = "(?!)"
    # For files of published expert trajectories: the task types in the order of their ids, and a
    # function key -> task for tasks outside all splits.
    published_types = ()
    task_of = None

    def __init__(self, view: str = "full"):
        self.view = view
        self.prompt = self.rules if view == "full" else ""
        self._added = {}  # key -> the task's value

    # ---------------------------------------------------------------- an episode

    def reset(self, task: str) -> str:
        """Begins an episode of the task with this id, and returns the first observation."""
        return self.start(self.find(task))

    def start(self, what) -> str:
        """Begins an episode of a task, given by its value, and returns the first observation."""
        raise NotImplementedError(f"{type(self).__name__}.start")

    def opening(self, observation: str, playing: bool = False) -> list[dict]:
        """Returns the messages that open an episode: the prompt and the first observation.

        Args:
            observation: The first observation.
            playing: True for the messages that an acting agent sees, False for those that it is
                trained on. They differ if the prompt has examples.
        """
        content = f"{self.prompt}\n\n{observation}" if self.prompt else observation
        return [{"role": "user", "content": content}]

    def action(self, reply: str) -> str | None:
        """Returns the action in a reply, or None if it has none.

        The action is the line after the first "Action:", or the whole reply if there is no such
        label. Later lines are ignored, because the agent wrote them without seeing the next
        observation. Emphasis, quotes and code marks around the action are removed.
        """
        label = LABEL.search(reply) or re.search("Action:", reply)
        if label:
            return unmarked(NEXT.split(unmarked(reply[label.end():]), 1)[0])
        return unmarked(reply) if reply.lstrip()[:1] in {*MARKS} else reply

    def step(self, reply: str) -> Step:
        """Executes the action of a reply. It is called at most `max_turns` times per episode."""
        raise NotImplementedError(f"{type(self).__name__}.step")

    def close(self) -> None:
        """Ends the processes and connections of the environment. `reset` restarts them."""

    # ---------------------------------------------------------------- its tasks

    def tasks(self, split: str) -> list[str]:
        """Returns the task ids of a split, in order."""
        if split not in self.splits and split != "added":
            raise UsageError(f"{self.name}: unknown split {split!r}; choose from: "
                          f"{', '.join(self.splits)}")
        return [f"{self.name}-{split}-{key}" for key in self.splits.get(split, self._added)]

    def find(self, task: str):
        """Returns the value of the task with this id. Raises ValueError if there is none."""
        try:
            name, split, key = task.split("-", 2)
            values = {self.name: {**self.splits, "added": self._added}}[name][split]
            if key not in values and split != "added" and self.task_of:
                return self.task_of(key)
            return values[key]
        except (KeyError, ValueError):
            raise ValueError(f"unknown task {task!r}; tasks(split) lists them") from None

    def add(self, task: dict) -> str:
        """Adds a task to this object alone, and returns its id, NAME-added-N. Equal tasks share an
        id."""
        added = [*self._added.values()]
        key = str(added.index(task) if task in added else len(added))
        self._added[key] = task
        return f"{self.name}-added-{key}"

    def task_generator(self):
        """Returns the TaskGenerator of the environment's `tasks.py`, which makes new tasks from
        what agents found. Raises UsageError if the environment has none."""
        raise UsageError(f"{self.name}: this environment makes no new tasks; give --method grpo "
                      "--start-from train, or an environment that makes some, such as the built-in "
                      "webshop")

    # ---------------------------------------------------------------- experts and people

    def expert(self) -> Callable[[str], str]:
        """Returns the scripted expert of the current episode, a function observation -> reply. The
        expert raises Stuck or StopIteration if it has no next reply."""
        raise UsageError(f"{self.name}: it has no scripted expert; give --experts FILE")

    def possible(self) -> tuple[list[str], str]:
        """Returns, for a person who plays, actions that are available now, and the forms of the
        others, one per line."""
        return [], ""

    def reply(self, action: str) -> str:
        """Returns the reply that executes an action, typed by a person with or without label."""
        return action if self.view == "short" or "Action:" in action else f"Action: {action}"


# ------------------------------------------------------------------ the action in a reply

MARKS = "*_`\"'"  # marks that chat models write around an action
# The label of an action, with or without marks and a number; and the text that ends the action.
LABEL = re.compile(r"^[^a-z\n]*action[^a-z\n:：]*[:：\n]", re.I | re.M)
NEXT = re.compile(r"\n|(?:Thought|Action|Observation):")


def unmarked(text: str) -> str:
    """Returns a text without emphasis and quotes around it. If it begins with code marks, returns
    what stands inside them."""
    opening = re.match(rf"[\s{MARKS}]*?(`+)(?:\w*\n)?", text)
    inside = text[opening.end():].split(opening[1], 1)[0] if opening else text
    spaces = "".join(filter(str.isspace, {*inside}))  # of any kind
    return inside.strip(MARKS + spaces)


# ------------------------------------------------------------------ the episode


def episode(env: Environment, encoder, t, max_tokens: int):
    """Runs one episode of the task t.task, and records it in the trajectory t.

    This is a generator that yields whenever it is the agent's turn.

    Args:
        env: The environment.
        encoder: An `engine.chat.Encoder`, which turns messages into token ids.
        t: A `dpo.Trajectory` with a task and a seed. Its other fields are filled in here.
        max_tokens: The context length. A trajectory always has fewer tokens.

    Yields:
        The trajectory so far, and the random number generator of the episode. The caller sends
        back the sampled reply as (ids, the log-probability of each), or None if a chat endpoint
        reports a full context.
    """
    clear(t)
    rng = random.Random(t.seed)
    first_observation = env.reset(t.task)
    opening = env.opening(first_observation, playing=True)
    messages = opening
    input_ids = encoder.start(opening)
    while len(t.ids) + len(input_ids) < max_tokens:  # otherwise no reply would fit
        # The prompt and the observations are context, which is not trained on ...
        t.messages += messages
        t.extend(input_ids, is_action=False)
        sampled = yield t, rng
        if sampled is None:
            break
        ids, log_probs = sampled
        # Cut the reply at the first stop string, and get an end-of-turn token if it lacks one.
        reply_ids, end_ids, reply = encoder.close(ids, env.stops)
        if len(t.ids) + len(reply_ids) + len(end_ids) >= max_tokens:
            break  # drop the reply, because episodes that fill the context are not trained on

        # ... and the replies are trained on, except for an end of turn that the agent did not
        # sample itself.
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
    """Clears a trajectory, since an interrupted episode may have left it partly filled."""
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
    """Replaces the token ids of the opening by those that the agent is trained on.

    In the protocol of ETO (Song et al. 2024), agents act with examples in the prompt but train
    without them. The messages keep the examples.

    Args:
        t: The trajectory.
        encoder: An `engine.chat.Encoder`.
        played: The opening that the agent saw.
        trained: The opening that it is trained on.
    """
    if played == trained:
        return
    size = len(encoder.start(played))
    start = encoder.start(trained)
    t.ids[:size] = start
    t.action_mask[:size] = [0] * len(start)
