"""What practice texts share: noisy players, and words that nobody can know by heart, since they are
exchanged at random in each conversation: so a reader learns to copy them from what it has read."""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass

from envs import Environment, Stuck

SKILLS = (0.95, 0.8, 0.6)  # of players: how often one does what it means to
ANYTHING = 0.3  # of exchanges, the share in which words become any words


@dataclass(frozen=True)
class Words:
    """Words that are exchanged in each conversation, in a share of the conversations."""
    words: tuple[str, ...]  # of the practice text, in the singular
    pool: tuple[str, ...]   # what they become
    share: float = 1.0


def play(env: Environment, page: str, means: Callable, slips: Callable,
         rng: random.Random) -> list[dict]:
    """The conversation of a noisy player, who may slip before each action: it does something else
    then, and goes on as if it had not.

    Args:
        env: The environment, in which an episode has just begun.
        page: Its first observation.
        means: means(observation) -> the reply that it means, given what the one before led to.
        slips: slips(observation) -> replies that leave it where it is.
        rng: Random numbers.
    """
    skill = rng.choice(SKILLS)
    messages = [dict(role="user", content=page)]
    slipped = []
    for _ in range(env.max_steps):
        if not slipped and rng.random() > skill:
            slipped = list(slips(messages[-1]["content"]))
        is_meant = not slipped
        try:
            reply = means(page) if is_meant else slipped.pop(0)
        except (Stuck, StopIteration):
            break
        step = env.step(reply)
        messages.append(dict(role="assistant", content=reply))
        messages.append(dict(role="user", content=step.observation))
        if step.done:
            break
        if is_meant:
            page = step.observation
    return messages[:-1]


def exchange(
    rng: random.Random,
    conversation: list[dict],
    kinds: list[Words],
    anything: list[str],
) -> list[dict]:
    """The conversation with its words of each kind exchanged for others of the kind's pool, or at
    times for any words, which are drawn from `anything`."""
    text = "\n".join(m["content"] for m in conversation)
    new = {}
    for kind in kinds:
        if rng.random() < kind.share:
            found = sorted(set(pattern(kind.words).findall(text)))
            pool = anything if rng.random() < ANYTHING else kind.pool
            new |= dict(zip(found, rng.sample(pool, min(len(pool), len(found)))))
    if not new:
        return conversation
    words = pattern(tuple(new))
    exchanged = []
    for m in conversation:
        content = words.sub(lambda match: new[match[0]], m["content"])
        exchanged.append(dict(role=m["role"], content=content))
    return exchanged


def pattern(words: tuple[str, ...]) -> re.Pattern:
    """Finds these words, each as a whole, also in the plural and as a part of doctor_id."""
    longest = sorted(words, key=len, reverse=True)
    return re.compile(rf"(?<![^\W_])(?:{'|'.join(longest)})(?=s?(?![^\W_]))")
