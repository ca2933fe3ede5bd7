"""An explorer at an endpoint: what another model makes of the signals, does there and proposes.

    --explorer https://host/v1 --explorer-model NAME        in place of the agent, by the same loop

What it says is data: its actions go through the environment's own reader; its proposals are JSON
that is read strictly and whose solutions are played before they count.
"""

import json
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Optional

import evolve
from coevolve import outcomes
from common.files import read_jsonl
from common.settings import Stated, limited
from engine.records import write
from engine.run import Run
from environments import is_web_address
from evolve import by_one_rank, env_with, rows_of
from lab.chat.endpoint import ContextFull, Endpoint, NotAnswered
from lab.chat.evaluate import Paid, is_endpoint

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
    picks = evolve.picks_of([signals])
    asked = [REFLECT.format(signal=weakness(pick), evidence=evidence(pick)) for pick in picks]
    answers, spent = ask_all(run, asked)
    rows = []
    unreadable = 0
    for pick, answer in zip(picks, answers):
        contexts = [found for found in objects(answer or "") if found]
        unreadable += not contexts
        rows.append(dict(task=pick["task"], context=contexts[0] if contexts else weakness(pick)))
    write(run, out, rows)
    return spent | dict(unreadable=unreadable)


@by_one_rank
def explore_there(run: Run, out: Path, task_set: list[Path], signals: list[Path],
                  contexts: list[Path], i: int) -> dict:
    """Lets the endpoint play the episodes of `begin_exploring`; one that it refuses is not kept."""
    explorer = Player(run, {row["task"]: row["context"] for row in rows_of(contexts)})
    begun = evolve.begin_exploring(run, signals, 1, i)
    make_env = partial(env_with, run, rows_of(task_set))
    explorer.paid.play(begun, make_env, explorer.answer)
    kept = [t for t in begun if t.ended != "context"]
    write(run, out, kept)
    found = outcomes(kept, run.settings.hard_threshold) if kept else dict(episodes=0)
    return found | explorer.paid.spent() | dict(refused=len(begun) - len(kept))


@by_one_rank
def write_tasks(run: Run, out: Path, task_set: list[Path], explored: Path, i: int) -> dict:
    """The tasks that the endpoint proposes after each episode, {signal, source, text, task,
    solution}, in random order. Those of another form have no task: counted, never mended."""
    d = rows_of(task_set)
    episodes = [evolve.Explored(**row) for row in read_jsonl(explored)]
    generator = env_with(run, d).task_generator()
    known = "\n".join(row["text"] for row in d if "text" in row)[-LONGEST:] or "(none yet)"
    ask = partial(ABSTRACT.format, form=generator.form, known=known)
    asked = [ask(conversation=told(t.messages, LONGEST)) for t in episodes]
    answers, spent = ask_all(run, asked)
    rows = []
    unreadable = 0
    for n in evolve.rng_of(run, "propose", i).sample(range(len(episodes)), len(episodes)):
        t = episodes[n]
        for value in objects(answers[n]) if answers[n] else []:
            if value is None:
                unreadable += 1
            else:
                found = written(generator, t.task, value)
                rows.append(dict(signal=t.signal, source=t.task, **found))
    write(run, out, rows)
    return spent | dict(finds=len(rows), unreadable=unreadable)


def endpoint_of(run: Run) -> Paid:
    s = run.settings
    return Paid(run, Endpoint(s.explorer, s.explorer_model, evolve.EXPLORER_TEMPERATURE, REPLY))


def reply_to(paid: Paid, what: tuple, text: str, rest: list[dict]) -> str | None:
    """The reply to a text, and what was said after it; None where it is refused."""
    try:
        return paid.ask(what, [dict(role="user", content=text), *rest])["reply"]
    except (ContextFull, NotAnswered):
        return None


def ask_all(run: Run, texts: list[str]) -> tuple[list[str | None], dict]:
    """The replies to some texts, and what all requests took."""
    paid = endpoint_of(run)
    works = [partial(reply_to, paid, (run.name, n), text, []) for n, text in enumerate(texts)]
    return paid.side_by_side(works), paid.spent()


class Player:
    """Plays episodes that are led to something, by context; led: task -> its context."""

    def __init__(self, run: Run, led: dict[str, dict | str]):
        self.paid = endpoint_of(run)
        self.led = led
        self.form = ""
        if not run.env.prompt:
            actions = run.env.task_generator().actions
            self.form = f" Answer with the action and nothing else: {actions}."

    def answer(self, asked: list) -> list:
        """What the endpoint does next in one episode; None where it refuses to."""
        (t, _), = asked
        opening, *rest = t.messages
        context = f", above all:\n{json.dumps(self.led[t.task])}" if t.task in self.led else ""
        text = ACT.format(context=context, form=self.form, opening=opening["content"])
        reply = reply_to(self.paid, (t.agent, t.iteration, t.task, t.rollout), text, rest)
        return [None if reply is None else (reply, [])]


# ----------------------------------------------------------------------------------- its words


def weakness(pick: dict) -> str:
    if "pattern" in pick:
        return f"it hardly ever does this: {pick['pattern']}"
    return WEAK.get(pick["signal"], pick["signal"])


def evidence(pick: dict) -> str:
    found = dict(success=pick.get("success") or pick.get("success_then"), failure=pick["failure"])
    return "\n\n".join(f"A {name}:\n{told(messages, LONGEST // 2)}"
                       for name, messages in found.items() if messages)


def told(messages: list[dict], most: int) -> str:
    """A conversation in at most so many characters: the ends of its opening and of the rest."""
    opening, *rest = messages
    first = f"user: {opening['content'][-OPENING:]}"
    later = "".join(f"\n{m['role']}: {m['content'][:TURN]}" for m in rest)
    return first + later[-(most - len(first)):]


def objects(reply: str) -> list[dict | None]:
    """The JSON objects in a reply; None for each that is broken or cut, or where nothing is said.
    After such a one the next begins as a proposal does: what stands in it is not another."""
    found = []
    at = 0
    begins = OBJECT
    while start := begins.search(reply, at):
        try:
            value, at = json.JSONDecoder().raw_decode(reply, start.start())
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # half a surrogate pair
        except (ValueError, RecursionError):
            value = None
            at = max(at, start.end())
        found.append(value)
        begins = PROPOSAL if value is None else OBJECT
    return found or [None] * ("[]" not in reply)


def written(generator, task: str, value: dict) -> dict:
    """The proposal {text, task, solution} of an object; its task is None if it is of no form."""
    query = value.get("query")
    actions = value.get("action_sequence")
    is_text = isinstance(query, str) and query.strip() and len(query) <= evolve.LONGEST_TEXT
    if not is_text or not isinstance(actions, list):
        return dict(text="", task=None, solution=[])
    actions = [action if isinstance(action, str) else json.dumps(action) for action in actions]
    found = generator.written(task, dict(query=query, action_sequence=actions))
    return found or dict(text=query, task=None, solution=[])


# ------------------------------------------------------------------------------------ settings

Who = limited(str, "must be policy, http://host:port/v1 or https://host/v1",
              lambda text: text == "policy" or is_web_address(text))


@dataclass(frozen=True)
class Explorer(evolve.Evolution, Stated):
    """An explorer in place of the agent"""
    # Who explores: policy, the agent itself, or https://host/v1, an endpoint [ours; D: Qwen3-Max]
    explorer: Who = "policy"
    # The name of the explorer's model at its endpoint [none]
    explorer_model: Optional[str] = None

    def conflicts(self, s) -> list[tuple[bool, str, str]]:
        return [*super().conflicts(s),
                (is_endpoint(s.explorer) and not s.explorer_model, "--explorer-model",
                 "give the explorer's name at its endpoint")]


METHODS = {name: method._replace(loop=partial(method.loop, find=find_tasks),
                                 reads=(*method.reads, "explorer", "explorer_model"))
           for name, method in evolve.METHODS.items()}  # of the second system, whoever explores
