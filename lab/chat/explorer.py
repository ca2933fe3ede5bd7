"""An explorer at an endpoint: what another model makes of the signals, does there and proposes.

    --explorer https://host/v1 --explorer-model NAME        in place of the agent, by the same loop

What it says is data: its actions go through the environment's own reader; its proposals are JSON
that is read strictly and whose solutions are played before they count.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Optional

import envs
import evolve
from coevolve import Run, bar, scores, write
from common.files import read_jsonl
from common.settings import Method, Stated, limited
from evolve import Explored, begin_exploring, by_one_rank, env_with, picks_of, rng_of, rows_of
from lab.chat.endpoint import ContextFull, Endpoint, NotAnswered
from lab.chat.evaluate import Paid, Text, is_endpoint
from worlds import is_web_address

LONGEST = 6000  # characters of a conversation that the endpoint is shown [ours]
OPENING, TURN = 1500, 1000  # of them at most of its first message, and of another one
REPLY = 1024  # tokens of an answer, at most [ours]

REFLECT = """\
An agent works in an environment. Here is where it is weak: {signal}.

{evidence}

Answer with one JSON object in a ```json block: "where" (the page, table or place that matters), \
"what" (what was done), "how" (how it failed or varied, and what the success did differently) and \
"try" (what somebody who goes back there should look into)."""

ACT = """\
You explore: you need not solve the task below, but find out what can be done around it{context}.

Do something that was not done there yet, one action a turn.{form}

{opening}"""

ABSTRACT = """\
Somebody explored an environment. This is what happened:

{conversation}

Write new tasks that a user could have had in mind for what was done, each concrete enough to be \
checked, without steps that only explore. {form} Do not repeat any of these:
{known}

Answer with a JSON list of objects in a ```json block, each with "intent" (the aim in a sentence), \
"query" (the text of the task) and "action_sequence" (the list of all actions, exactly as they \
have to be written, that solve it from the start)."""

WEAK = {"forgetting": "it solved this task before and no longer does",
        "boundary": "of several tries of one policy some succeed and some fail"}
OBJECT = re.compile(r'\{\s*"')  # where one begins; one of a proposal's, not of an action in it:
PROPOSAL = re.compile(r'\{\s*"(intent|query|action_sequence)"')


def find_tasks(run: Run, i: int, agent: Path, task_set: list[Path], signals: list[Path]) -> Path:
    """Proposals without verdicts, as `evolve.find_tasks`, whoever explores."""
    if not is_endpoint(run.settings.explorer):
        return evolve.find_tasks(run, i, agent, task_set, signals)
    contexts = []
    if signals and run.settings.guide == "signals":
        contexts = [run.once(f"iter{i}/contexts.jsonl", reflect, *signals, i=i)]
    explored = run.once(f"iter{i}/explored.jsonl", explore_there, task_set, signals, contexts, i=i)
    return run.once(f"iter{i}/finds.jsonl", write_tasks, task_set, explored, i=i)


# ---------------------------------------------------------------------------------- the phases


@by_one_rank
def reflect(run: Run, out: Path, signals: Path, i: int) -> dict:
    """What the endpoint makes of each picked signal and its evidence, else the signal's name."""
    picks = picks_of([signals])

    def one(pick, ask):
        return ask(REFLECT.format(signal=describe(pick), evidence=evidence(pick)))

    answers, spent = ask_about(run, picks, one)
    rows = []
    unreadable = 0
    for pick, answer in zip(picks, answers):
        contexts = [found for found in objects(answer or "") if found]
        unreadable += not contexts
        rows.append(dict(task=pick["task"], context=contexts[0] if contexts else describe(pick)))
    write(run, out, rows)
    return spent | dict(unreadable=unreadable)


@by_one_rank
def explore_there(run: Run, out: Path, task_set: list[Path], signals: list[Path],
                  contexts: list[Path], i: int) -> dict:
    """Lets the endpoint play the episodes of `begin_exploring`; one that it refuses is not kept."""
    led = {row["task"]: row["context"] for row in rows_of(contexts)}
    form = ""
    if not run.env.prompt:
        actions = run.env.task_generator().actions
        form = f" Answer with the action and nothing else: {actions}."
    make_env = partial(env_with, run, rows_of(task_set))

    def play(t, ask):
        context = f", above all:\n{json.dumps(led[t.task])}" if t.task in led else ""

        def answer(asked):
            opening, *rest = t.messages
            reply = ask(ACT.format(context=context, form=form, opening=opening["content"]), rest)
            return [None if reply is None else (reply, [])]

        envs.play(make_env, Text(), [t], answer, 1, run.settings.max_tokens)
        return t

    played, spent = ask_about(run, begin_exploring(run, signals, 1, i), play)
    kept = [t for t in played if t.ended != "context"]
    write(run, out, kept)
    found = scores(kept, run) if kept else dict(episodes=0)
    return found | spent | dict(refused=len(played) - len(kept))


@by_one_rank
def write_tasks(run: Run, out: Path, task_set: list[Path], explored: Path, i: int) -> dict:
    """The tasks that the endpoint proposes after each episode, {signal, source, text, task,
    solution}, in random order. Those of another form have no task: counted, never mended."""
    d = rows_of(task_set)
    episodes = [Explored(**row) for row in read_jsonl(explored)]
    generator = env_with(run, d).task_generator()
    known = "\n".join(row["text"] for row in d if "text" in row)[-LONGEST:] or "(none yet)"

    def one(t, ask):
        return ask(ABSTRACT.format(conversation=told(t.messages, LONGEST), form=generator.form,
                                   known=known))

    answers, spent = ask_about(run, episodes, one)
    rows = []
    unreadable = 0
    for n in rng_of(run, "propose", i).sample(range(len(episodes)), len(episodes)):
        t = episodes[n]
        for value in objects(answers[n]) if answers[n] else []:
            if value is None:
                unreadable += 1
            else:
                rows.append(dict(signal=t.signal, source=t.task,
                                 **written(generator, t.task, value)))
    write(run, out, rows)
    return spent | dict(finds=len(rows), unreadable=unreadable)


def ask_about(run: Run, things: list, work: Callable) -> tuple[list, dict]:
    """Asks the endpoint about some things, side by side.

    Args:
        run: The run.
        things: What is asked about.
        work: work(thing, ask) -> result; ask(text, what was said then) -> the reply, None where the
            endpoint refuses to answer that.

    Returns:
        The results, and what all requests of the phase took.
    """
    s = run.settings
    paid = Paid(run, Endpoint(s.explorer, s.explorer_model, s.explorer_temperature, REPLY))

    def one(n):
        def ask(text, rest=()):
            try:
                return paid.ask((run.name, n), [dict(role="user", content=text), *rest])["reply"]
            except (ContextFull, NotAnswered):
                return None

        found = work(things[n], ask)
        progress.update()
        return found

    with bar(run, len(things)) as progress:
        found = paid.side_by_side([partial(one, n) for n in range(len(things))])
    return found, paid.spent()


# ----------------------------------------------------------------------------------- its words


def describe(pick: dict) -> str:
    return WEAK.get(pick["signal"]) or (
        f"it hardly ever does this: {pick['pattern']}" if "pattern" in pick else pick["signal"])


def evidence(pick: dict) -> str:
    won = pick.get("success") or pick.get("success_then")
    return "\n\n".join(f"A {name}:\n{told(messages, LONGEST // 2)}" for name, messages in
                       (("success", won), ("failure", pick["failure"])) if messages)


def told(messages: list[dict], most: int) -> str:
    """A conversation in at most so many characters: the ends of its opening and of the rest."""
    opening, *rest = messages
    first = f"user: {opening['content'][-OPENING:]}"
    later = "".join(f"\n{m['role']}: {m['content'][:TURN]}" for m in rest)
    return first + later[-(most - len(first)):]


def objects(reply: str) -> list[dict | None]:
    """The JSON objects in a reply; None for each that is broken or cut, or where nothing is said.
    After such a one the next begins as a proposal does: what stands in it is not another."""
    found, at = [], 0
    while start := (PROPOSAL if found[-1:] == [None] else OBJECT).search(reply, at):
        try:
            value, at = json.JSONDecoder().raw_decode(reply, start.start())
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # half a surrogate pair
        except (ValueError, RecursionError):
            value, at = None, max(at, start.end())
        found.append(value)
    return found or [None] * ("[]" not in reply)


def written(generator, task: str, value: dict) -> dict:
    """The proposal {text, task, solution} of an object; its task is None if it is of no form."""
    query, actions = value.get("query"), value.get("action_sequence")
    if not (isinstance(query, str) and query.strip() and len(query) <= evolve.LONGEST_TEXT
            and isinstance(actions, list)):
        return dict(text="", task=None, solution=[])
    actions = [action if isinstance(action, str) else json.dumps(action) for action in actions]
    return generator.written(task, dict(query=query, action_sequence=actions)) or dict(
        text=query, task=None, solution=[])


# ------------------------------------------------------------------------------------ settings

Who = limited(str, "must be policy, aimed, http://host:port/v1 or https://host/v1",
              lambda text: text in ("policy", "aimed") or is_web_address(text))


@dataclass(frozen=True)
class Explorer(evolve.Evolution, Stated):
    """An explorer in place of the agent"""
    # Who explores: policy, the agent itself; aimed, first the agent, later nobody, since what is
    # picked is varied by script; or https://host/v1, an endpoint [ours; D: Qwen3-Max]
    explorer: Who = "policy"
    # The name of the explorer's model at its endpoint [none]
    explorer_model: Optional[str] = None

    def conflicts(self, s) -> list[tuple[bool, str, str]]:
        return [*super().conflicts(s),
                (is_endpoint(s.explorer) and not s.explorer_model, "--explorer-model",
                 "give the explorer's name at its endpoint")]


def methods() -> dict[str, Method]:
    """The methods of the second system, whoever explores."""
    found = {}
    for name, method in evolve.METHODS.items():
        found[name] = method._replace(loop=partial(method.loop, find=find_tasks),
                                      reads=(*method.reads, "explorer_model"))
    return found


METHODS = methods()
