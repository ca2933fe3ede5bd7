"""What practice texts share: noisy players, and words that nobody can know by heart, since they are
exchanged at random in each conversation: so a reader learns to copy them from what it has read."""

import random
import re
from collections.abc import Generator
from dataclasses import dataclass


@dataclass(frozen=True)
class Words:
    """Words that are exchanged in each conversation, in a share of the conversations."""

    words: tuple[str, ...]  # of the practice text, in the singular
    pool: tuple[str, ...]   # what they become
    fresh: tuple[str, ...]  # what they become in the held-out table; in no practice text
    share: float = 1.0
    any: float = 0.0        # of these: the share in which they become any words


def play(env, page: str, actions: Generator[str, str, None]) -> list[dict]:
    """The conversation of a noisy player with `env`, which has just shown `page`. actions: yields a
    reply and is sent what it led to."""
    messages = [{"role": "user", "content": page}]
    reply = next(actions)
    for _ in range(env.max_steps):
        messages.append({"role": "assistant", "content": reply})
        step = env.step(reply)
        if step.done:
            return messages
        try:
            reply = actions.send(step.observation)
        except StopIteration:
            return messages
        messages.append({"role": "user", "content": step.observation})
    return messages[:-1]


def exchange(rng: random.Random, conversation: list[dict], kinds: list[Words],
             anything: tuple[str, ...] = (), fresh: bool = False) -> list[dict]:
    """The conversation with its words of each kind exchanged for others of the kind's pool; any
    words are drawn from `anything`. fresh: all kinds become fresh words, while they last."""
    text = "\n".join(m["content"] for m in conversation)
    new = {}
    for kind in kinds:
        if fresh or rng.random() < kind.share:
            found = sorted(set(pattern(kind.words).findall(text)))
            pool = kind.fresh if fresh else anything if rng.random() < kind.any else kind.pool
            new |= dict(zip(found, rng.sample(pool, min(len(pool), len(found)))))
    if not new:
        return conversation
    words = pattern(tuple(new))
    return [dict(m, content=words.sub(lambda match: new[match[0]], m["content"]))
            for m in conversation]


def pattern(words: tuple[str, ...]) -> re.Pattern:
    """Finds these words, each as a whole, also in the plural and as a part of doctor_id."""
    longest = sorted(words, key=len, reverse=True)
    return re.compile(rf"(?<![^\W_])(?:{'|'.join(longest)})(?=s?(?![^\W_]))")
