"""Hard negatives by design: what a script plays that fails an expert's task by one mistake.

In the method `designed` they stand where co-evolution has the failure agent's rollouts. If they do
not help the target, hardness is not what helps; if they do, a failure agent is not hard enough.
"""

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import envs
from coevolve import (
    Common,
    Preferences,
    Run,
    evaluations,
    explore,
    make_pairs,
    read,
    scores,
    train_preferences,
    write,
)
from common.files import seed_of
from common.settings import Method, Refused, Stated
from dpo import Trajectory
from lab.baselines import begin
from worlds import World, first_reply, replay
from worlds.intercodesql.questions import VALUES

# ------------------------------------------------------------------------------------ the loop


def designed(run: Run) -> None:
    """ETO's loop, with near misses of the experts beside the target's own rollouts."""
    once = run.once
    experts, after_sft = begin(run)
    agent = after_sft
    for i in range(1, run.settings.iterations + 1):
        explored = once(f"iter{i}/target.jsonl", explore, agent, experts, name="target", i=i)
        made = once(f"iter{i}/designed.jsonl", make_near_misses, experts, name="designed", i=i)
        played = {"target": explored, "designed": made}
        pairs = once(f"iter{i}/pairs-target.jsonl", make_pairs, experts, played, [],
                     trains="target", role="D_tgt")
        start = dict(agent=agent, after_sft=after_sft)
        trajectories = dict(experts=experts, others=[explored, made])
        agent = once(f"iter{i}/target-agent", train_preferences, start, pairs, trajectories,
                     name="target", role="D_tgt", i=i)
        evaluations(run, {"target": agent}, i)


def make_near_misses(run: Run, out: Path, experts: Path, name: str, i: int) -> dict:
    """As many near misses of each expert as a failure agent has rollouts, or fewer: those that
    exist. They are played through the environment, as rollouts are."""
    s = run.settings
    env = run.make_env()
    scripts = {}  # task, rollout -> the replies
    for expert in read(experts):
        rng = random.Random(seed_of(s.seed, name, i, expert.task))
        found = near_misses(env, expert, rng, s.hard_threshold, s.rollouts)
        for rollout, replies in enumerate(found):
            scripts[expert.task, rollout] = replies
    env.close()
    if not scripts:
        raise Refused("--method designed: no mistake in an expert's replies fails and earns "
                      f"--hard-threshold {s.hard_threshold} or more; lower it, or give more "
                      "experts (--train-tasks) or others (--experts)")

    def answer(asked):
        """The script's next reply in each episode; nobody has drawn it."""
        texts = [scripts[t.task, t.rollout][t.steps] for t, _ in asked]
        return [(run.encoder.reply(text), []) for text in texts]

    episodes = [Trajectory(task, name, i, rollout) for task, rollout in scripts]
    envs.play(run.make_env, run.encoder, episodes, answer, run.slots, s.max_tokens)
    write(run, out, episodes)
    return scores(episodes, run)


def near_misses(env: World, expert: Trajectory, rng: random.Random, least: float,
                most: int) -> list[list[str]]:
    """At most so many conversations, as replies, that end and fail the expert's task by one
    mistake.

    Args:
        env: plays each to learn its reward.
        expert: whose replies are changed.
        rng: which of the mistakes are tried first.
        least: the reward from which a failure is near.
        most: how many are enough.
    """
    opening = first_reply(expert.messages, expert.steps)
    replies = [m["content"] for m in expert.messages[opening:] if m["role"] == "assistant"]
    tried = [*MISTAKES[env.name](env, expert.task, replies)]
    rng.shuffle(tried)
    found = []
    for changed in tried:
        end = replay(env, env.find(expert.task), changed)[-1]
        if end.done and least <= end.reward < env.success:
            found.append(changed)
        if len(found) == most:
            break
    return found


# -------------------------------------------------------------------------------- the mistakes


def shop_mistakes(env: World, task: str, replies: list[str]) -> Iterator[list[str]]:
    """The replies with one option exchanged or left out, or with a twin of the product."""
    pages = []
    env.reset(task)
    for reply in replies:
        pages.append(env.page)
        env.step(reply)
    bought = pages[-1].item
    for k, page in enumerate(pages):
        before, after = replies[:k], replies[k + 1:]
        clicked = page.links.get(argument(env, replies[k]))
        if page.kind == "item" and clicked and clicked.kind == "item":
            yield before + after
            for other in others(env.world.products[bought], argument(env, replies[k])):
                yield [*before, env.reply(f"click[{other}]"), *after]
        if page.kind == "results" and clicked and clicked.item == bought:
            for behind in page.links.values():
                if is_twin(env.world.products, behind.item, bought):
                    twin = env.world.products[behind.item]
                    yield [*before, env.reply(f"click[{twin['asin']}]"), *offered(env, twin, after)]


def argument(env: World, reply: str) -> str:
    """What a reply searches for or clicks on, in lower case; nothing where it does neither, as an
    agent's may that is an expert."""
    found = re.search(r"\[(.+)\]", env.action(reply))
    return found[1].lower() if found else ""


def others(product: dict, value: str) -> list[str]:
    """The values that could be chosen in place of one."""
    for values in product["options"].values():
        if value in values:
            return [other for other in values if other != value]
    return []


def is_twin(products: list[dict], item: int, bought: int) -> bool:
    """Whether this is another product under the same title."""
    return item not in (-1, bought) and products[item]["Title"] == products[bought]["Title"]


def offered(env: World, product: dict, replies: list[str]) -> list[str]:
    """The replies without the options that the product does not have."""
    values = sum(product["options"].values(), [])
    return [reply for reply in replies if argument(env, reply) in (*values, "buy now")]


def query_mistakes(env: World, task: str, replies: list[str]) -> Iterator[list[str]]:
    """The replies with one wrong condition in the query that is submitted."""
    asked = replies[-2] if len(replies) > 1 else ""
    query = env.action(asked) or ""  # an agent that is an expert may have said something else
    for wrong in wrong_queries(query):
        yield [*replies[:-2], asked.replace(query, wrong), replies[-1]]


def wrong_queries(query: str) -> Iterator[str]:
    """The query with one condition left out, turned round, or on another number or value."""
    for pattern, exchanged in EXCHANGED:
        for match in re.finditer(pattern, query):
            for other in exchanged(match[0]):
                yield query[:match.start()] + other + query[match.end():]


def nothing(text: str) -> list[str]:
    return [""]


def opposite(text: str) -> list[str]:
    return [{"<": ">", ">": "<", "AND": "OR", "OR": "AND"}[text]]


def near_numbers(text: str) -> list[str]:
    """Those at most ten away, and above 0."""
    number = int(text)
    return [str(n) for n in range(max(1, number - 10), number + 11) if n != number]


def other_values(text: str) -> list[str]:
    """The quoted values of the same kind."""
    for values in VALUES.values():
        if text.strip("'") in values:
            return [f"'{value}'" for value in values if f"'{value}'" != text]
    return []


# What stands in a query, and what may stand there by mistake.
EXCHANGED = [
    (r"(?<=WHERE ).+? (?:AND|OR) ", nothing),                          # the first condition
    (r" (?:AND|OR) .+?(?=$| AND | OR | ORDER | LIMIT )", nothing),     # another one
    (r" DESC\b", nothing),
    (r"[<>]", opposite),
    (r"\b(?:AND|OR)\b", opposite),
    (r"\b\d+\b", near_numbers),
    (r"'\w+'", other_values),
]
MISTAKES = {"webshop": shop_mistakes, "intercodesql": query_mistakes}  # the world's name -> them


# ------------------------------------------------------------------------------------ settings


@dataclass(frozen=True)
class NearMisses(Stated):
    """Near misses of the experts"""

    def conflicts(self, s) -> list[tuple[bool, str, str]]:
        why = why_none(s) if s.method in METHODS else ""
        return [*super().conflicts(s), (bool(why), f"--method {s.method}", why)]


def why_none(s) -> str:
    """Why no script makes near misses in a run of these settings; nothing where one does."""
    if s.env not in MISTAKES:
        return f"no script knows a mistake in {s.env}; give --env {' or '.join(MISTAKES)}"
    if s.env == "webshop" and s.webshop_url:
        return "its script exchanges products of the embedded shop; leave out --webshop-url"
    if s.env == "webshop" and s.protocol == "eto":
        return "its script plays the shop by this project's texts only; leave out --protocol eto"
    return ""


METHODS = {"designed": Method(designed, (Common, Preferences),
                              "ETO beside near misses of the experts, which a script plays")}
