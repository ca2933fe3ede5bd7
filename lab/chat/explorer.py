"""Explores environments with a model at a chat endpoint, for the second system (evolve.py).

    --explorer https://host/v1 --explorer-model NAME

By default, the agent itself explores. With these settings, the model at the endpoint interprets the
signals, explores, and proposes new tasks. A signal indicates a weakness of the agent, such as a
task that it solved before and no longer solves.

The output of the endpoint is treated as untrusted data. The environment parses the endpoint's
actions in the same way as an agent's. Proposals must be valid JSON, and a proposed task is used
only after its solution has been played successfully.
"""

import json
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Optional

import evolve
from coevolve import summarise
from common.settings import Stated, limited
from engine.run import Run
from environments import is_web_address
from evolve import Rows, by_one_rank, env_with
from lab.chat.endpoint import Endpoint, NotAnswered
from lab.chat.evaluate import Paid, stop_if_all

LONGEST = 6000  # maximum number of characters of a conversation in a prompt [ours]
# Maximum number of characters of the first message of such a conversation, and of each later
# message [ours]
OPENING, TURN = 1500, 1000
REPLY = 1024  # maximum number of tokens in a reply [ours]
LONGEST_REPLY = 20_000  # maximum number of parsed characters of a reply [ours]

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
OBJECT = re.compile(r'\{\s*"')  # start of a JSON object
# Start of a JSON object that proposes a task. The actions inside such an object do not match.
PROPOSAL = re.compile(r'\{\s*"(intent|query|action_sequence)"')


def find_tasks(run: Run, i: int, agent: Path, task_set: Rows, signals: Rows) -> Rows:
    """Returns tasks that the agent (see `evolve.find_tasks`) or an endpoint has proposed."""
    if run.settings.explorer == "policy":
        return evolve.find_tasks(run, i, agent, task_set, signals)
    contexts = []
    if signals and run.settings.guide == "signals":
        contexts = run.once(f"iter{i}/contexts.jsonl", reflect, signals, i=i)
    explored = run.once(f"iter{i}/explored.jsonl", explore_there, task_set, signals, contexts, i=i)
    return run.once(f"iter{i}/finds.jsonl", write_tasks, task_set, explored, i=i)


# ---------------------------------------------------------------------------------- the phases


@by_one_rank
def reflect(run: Run, signals: Rows, i: int) -> tuple[Rows, dict]:
    """Returns the endpoint's interpretation of each chosen signal. Each request contains a signal
    and the conversations in which it was found. If a reply cannot be parsed, our own description of
    the signal is used instead (see `weakness`)."""
    picks = evolve.picks_of(signals)
    prompts = [REFLECT.format(signal=weakness(pick), evidence=evidence(pick)) for pick in picks]
    replies, usage = ask_all(run, prompts)
    rows = []
    unreadable = 0
    for pick, reply in zip(picks, replies):
        contexts = [value for value in objects(reply or "") if value]
        unreadable += not contexts
        rows.append(dict(task=pick["task"], context=contexts[0] if contexts else weakness(pick)))
    return rows, usage | dict(unreadable=unreadable)


@by_one_rank
def explore_there(run: Run, task_set: Rows, signals: Rows, contexts: Rows,
                  i: int) -> tuple[list[evolve.Explored], dict]:
    """Plays the episodes of `evolve.begin_exploring` with the replies of the endpoint. Episodes in
    which the endpoint refuses a request are dropped."""
    paid = endpoint_of(run)
    hints = {row["task"]: json.dumps(row["context"]) for row in contexts}
    form = ""
    if not run.env.prompt:
        actions = run.env.task_generator().actions
        form = f" Answer with the action and nothing else: {actions}."

    def request(t: evolve.Explored) -> list[dict]:
        opening, *rest = t.messages
        context = f", above all:\n{hints[t.task]}" if t.task in hints else ""
        prompt = ACT.format(context=context, form=form, opening=opening["content"])
        return [dict(role="user", content=prompt), *rest]

    begun = evolve.begin_exploring(run, signals, 1, i)
    refused = []
    paid.play(begun, partial(env_with, run, task_set), request,
              lambda t, error: refused.append(error))
    stop_if_all(refused, begun)
    kept = [t for t in begun if t.ended != "context_limit"]
    numbers = summarise(kept, run.settings.hard_threshold) if kept else dict(episodes=0)
    return kept, numbers | paid.spent() | dict(refused=len(begun) - len(kept))


@by_one_rank
def write_tasks(run: Run, task_set: Rows, explored: list[evolve.Explored],
                i: int) -> tuple[Rows, dict]:
    """Returns the endpoint's proposals for new tasks, {signal, source, text, task, solution}, in a
    random order of the episodes. Each request quotes one explored episode. The task of a malformed
    proposal is None. Proposals are never repaired."""
    generator = env_with(run, task_set).task_generator()
    known = "\n".join(row["text"] for row in task_set if "text" in row)[-LONGEST:] or "(none yet)"
    prompts = [ABSTRACT.format(conversation=told(t.messages, LONGEST), form=generator.form,
                               known=known) for t in explored]
    replies, usage = ask_all(run, prompts)
    rows = []
    unreadable = 0
    answered = [*zip(explored, replies)]
    for t, reply in evolve.rng_of(run, "propose", i).sample(answered, len(answered)):
        for value in objects(reply) if reply else []:
            if value is None:
                unreadable += 1
            else:
                proposal = written(generator, t.task, value)
                rows.append(dict(signal=t.signal, source=t.task, **proposal))
    return rows, usage | dict(finds=len(rows), unreadable=unreadable)


def endpoint_of(run: Run) -> Paid:
    s = run.settings
    return Paid(run, Endpoint(s.explorer, s.explorer_model, evolve.EXPLORER_TEMPERATURE, REPLY,
                              s.timeout))


def ask_all(run: Run, prompts: list[str]) -> tuple[list[str | None], dict]:
    """Sends prompts to the endpoint concurrently. Returns the replies in the same order (None if
    refused), and the total usage of all API calls in this phase."""
    paid = endpoint_of(run)
    requests = [[dict(role="user", content=prompt)] for prompt in prompts]
    refused = []

    def reply_to(n: int) -> str | None:
        try:
            return paid.ask((run.name, n), requests[n])["reply"]
        except NotAnswered as error:
            refused.append(error)
            return None

    paid.openings = [partial(requests.__getitem__, n) for n in range(len(requests))]
    replies = paid.side_by_side([partial(reply_to, n) for n in range(len(requests))])
    stop_if_all(refused, requests)
    return replies, paid.spent()


# ------------------------------------------------------------------------- prompts and replies


def weakness(pick: dict) -> str:
    if "pattern" in pick:
        return f"it hardly ever does this: {pick['pattern']}"
    return WEAK.get(pick["signal"], pick["signal"])


def evidence(pick: dict) -> str:
    conversations = dict(success=pick.get("success") or pick.get("success_then"),
                         failure=pick["failure"])
    return "\n\n".join(f"A {name}:\n{told(messages, LONGEST // 2)}"
                       for name, messages in conversations.items() if messages)


def told(messages: list[dict], size: int) -> str:
    """Returns at most `size` characters of a conversation: the end of its first message, and the
    end of the text of all later messages."""
    opening, *rest = messages
    first = f"user: {opening['content'][-OPENING:]}"
    later = "".join(f"\n{m['role']}: {m['content'][:TURN]}" for m in rest)
    return first + later[-(size - len(first)):]


def objects(reply: str) -> list[dict | None]:
    """Parses the JSON objects in a reply. A malformed or truncated object is returned as None.

    After a malformed object, the search continues at the next start of a proposal, because any
    object before it is nested in the malformed one. Returns [] for an empty JSON list, and [None]
    for any other reply without objects.
    """
    reply = reply[:LONGEST_REPLY]
    values = []
    position = 0
    opening = OBJECT
    while start := opening.search(reply, position):
        try:
            value, position = json.JSONDecoder().raw_decode(reply, start.start())
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()  # no lone surrogate
        except (ValueError, RecursionError):
            value = None
            position = max(position, start.end())
        values.append(value)
        opening = PROPOSAL if value is None else OBJECT
    return values or [None] * ("[]" not in reply)


def written(generator, task: str, value: dict) -> dict:
    """Converts a JSON object into {text, task, solution}. The task is None if the object is
    malformed."""
    query = value.get("query")
    actions = value.get("action_sequence")
    is_text = isinstance(query, str) and query.strip() and len(query) <= evolve.LONGEST_TEXT
    if not is_text or not isinstance(actions, list):
        return dict(text="", task=None, solution=[])
    actions = [action if isinstance(action, str) else json.dumps(action) for action in actions]
    proposal = generator.written(task, dict(query=query, action_sequence=actions))
    return proposal or dict(text=query, task=None, solution=[])


# ------------------------------------------------------------------------------------ settings

Who = limited(str, "must be policy, http://host:port/v1 or https://host/v1",
              lambda text: text == "policy" or is_web_address(text))


@dataclass(frozen=True)
class Explorer(evolve.Evolution, Stated):
    """The explorer"""
    # Explorer: "policy" (the agent itself) or the address of a chat endpoint, such as
    # https://host/v1 [ours; D: Qwen3-Max]
    explorer: Who = "policy"
    # Model name that is sent to the explorer's endpoint; required if the explorer is an endpoint
    # [none]
    explorer_model: Optional[str] = None

    def conflicts(self, s) -> list[tuple[bool, str, str]]:
        return [*super().conflicts(s),
                (s.explorer != "policy" and not s.explorer_model, "--explorer-model",
                 "give the explorer's name at its endpoint")]


METHODS = {name: method._replace(loop=partial(method.loop, find=find_tasks),
                                 reads=(*method.reads, "explorer", "explorer_model",
                                        "timeout"))
           for name, method in evolve.METHODS.items()}  # the second system, with any explorer
