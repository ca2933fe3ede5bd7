"""From what an agent wrote to what its calls return: no text of a model is ever evaluated.

A call is JSON; its name is looked up among the documented functions of the task's simulators, and
the method is called with the arguments by name. What cannot be is a result that says so.
"""

import copy
import decimal
import json
import math
import threading
from contextlib import suppress
from datetime import datetime, timedelta, timezone

import mpmath

from environments.bfcl.data import (
    documents,
    simulator_class,
    start_state,
    trading_bot,
    travel_booking,
)

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FORM = (f'a call is {OPEN}{{"name": "...", "arguments": {{...}}}}{CLOSE} with the name of a '
        "function and its arguments by name")
DONE = "That is done."
MISSING = "I cannot do this yet: a function or a value that I would need is missing."
MOST_REPLIES = 20       # with calls, in one turn of the user [BFCL]
MOST_CALLS = 50         # of a reply, also blocks; ground truths have at most 34 in a turn [ours]
LONGEST = 100_000       # characters of a reply with calls [ours]
DEEPEST = 20            # of lists and objects in arguments [ours]
TOO_DEEP = "nested too deeply"
DIGITS = 20             # of a whole number in arguments [ours]
PRECISION = 1000        # largest exponent, precision, number of decimal places [ours]
MOST_PATHS = 5000       # of a file tree: the file system copies directories into themselves [ours]
LOCK = threading.Lock()  # the maths simulator sets the precision of the whole process


class Clock(datetime):
    """What two simulators take for the time: without today's date and the local time zone."""

    def timestamp(self):
        return datetime.timestamp(self.replace(tzinfo=timezone.utc))

    @classmethod
    def fromtimestamp(cls, seconds):
        return cls(1970, 1, 1) + timedelta(seconds=seconds)

    @classmethod
    def today(cls):
        return cls(2024, 9, 1)


trading_bot.CURRENT_TIME = Clock(2024, 9, 1, 10, 30)  # as it was
trading_bot.datetime = travel_booking.datetime = Clock


def parse_calls(reply: str) -> list[dict | str]:
    """The calls in a reply, in order; a text in place of one that cannot be made says why. They
    stand in blocks <tool_call>...</tool_call>, else ```json ... ```, else the reply is nothing
    else; each holds one call or a list. What a model thought, up to </think>, does not count."""
    said = reply.rpartition("</think>")[2].partition("<think>")[0]
    if OPEN in said:
        blocks = [block.partition(CLOSE)[0] for block in said.split(OPEN)[1:] if CLOSE in block]
    elif "```json" in said:
        blocks = [block.partition("```")[0] for block in said.split("```json")[1:]]
    else:
        blocks = [said]
    found = []
    for block in blocks[:MOST_CALLS + 1]:
        found += _calls_in(block)
    if all(call is None for call in found):
        return []
    if len(reply) > LONGEST:
        return [f"the reply has {len(reply)} characters; at most {LONGEST} are read"]
    calls = [f"not a call; {FORM}" if call is None else call for call in found[:MOST_CALLS]]
    if len(found) > MOST_CALLS:
        calls.append(f"not made; a reply has at most {MOST_CALLS} calls")
    return calls


def _calls_in(block: str) -> list[dict | str | None]:
    """The calls in a block; None in place of what is none, a text for one that cannot be read."""
    try:
        value = _from_json(block)
    except ValueError:
        return [None]
    except RecursionError:
        return [TOO_DEEP]
    return [_as_call(call) for call in (value if isinstance(value, list) else [value])]


def _from_json(text: str):
    """The value of JSON text; a number of too many digits is none."""
    def whole(digits):
        return int(digits) if len(digits.lstrip("-")) <= DIGITS else math.nan

    return json.loads(text, parse_int=whole)


def _as_call(value) -> dict | None:
    """Name and arguments of a call in JSON, as bfcl-eval's own handlers read it: other keys do not
    count, and arguments may be JSON text. None where it is none."""
    if not isinstance(value, dict) or not {"name", "arguments"} <= value.keys():
        return None
    arguments = value["arguments"]
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # else `problem` says what is wrong
            arguments = _from_json(arguments)
    return {"name": value["name"], "arguments": arguments}


def problem(call: dict) -> str | None:
    """Why the values in a call are none that a simulator may be given; None if they may be."""
    name, arguments = call["name"], call["arguments"]
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return FORM
    for key in ("exponent", "precision", "decimal_places"):
        with suppress(TypeError, ValueError, OverflowError):  # what is no number the simulator says
            if abs(int(arguments.get(key))) > PRECISION:
                return f"{key} must be a number of at most {PRECISION}"
    if _deep(arguments, DEEPEST):
        return TOO_DEEP
    try:
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        return "half of a surrogate pair is no character"
    except ValueError:
        return f"a number that is infinite, none, or of more than {DIGITS} digits"
    return None


def _deep(value, most: int) -> bool:
    inside = (value.values() if isinstance(value, dict) else
              value if isinstance(value, list) else ())
    return most < 0 or any(_deep(item, most - 1) for item in inside)


class Simulators:
    """The simulators of a task, fresh from a start state; nobody else has these instances."""

    def __init__(self, start: str):
        where = start_state(start)
        self.instances = {name: simulator_class(name)() for name in where["classes"]}
        for name, instance in self.instances.items():
            if hasattr(instance, "_load_scenario"):  # the maths one has no state
                instance._load_scenario(copy.deepcopy(where["config"].get(name, {})),
                                        long_context=where["long_context"])
        if where["long_context"]:  # it is shared by all instances of the process
            self.instances = copy.deepcopy(self.instances)
        self.functions = {name: getattr(instance, name)
                          for simulator, instance in self.instances.items()
                          for name in documents(simulator)}

    def knows(self, call: dict | str) -> bool:
        """Whether a call of `parse_calls` is one of a function that is there."""
        return not isinstance(call, str) and not problem(call) and call["name"] in self.functions

    def run(self, call: dict | str) -> str:
        """What a call of `parse_calls` returns, as the package writes it."""
        wrong = call if isinstance(call, str) else problem(call)
        if wrong:
            return f"Error: {wrong}"
        function = self.functions.get(call["name"])
        if function is None:
            return f"Error during execution: name {call['name'][:60]!r} is not defined"
        files = self.instances.get("GorillaFileSystem")
        if files is function.__self__ and _paths(files) > MOST_PATHS:
            return f"Error: beyond {MOST_PATHS} paths the file system takes no calls"
        with LOCK, mpmath.workdps(15), decimal.localcontext():
            try:
                result = _in_order(function(**copy.deepcopy(call["arguments"])))
                with suppress(Exception):  # as the package: JSON has no form for it
                    return json.dumps(result) if type(result) is dict else str(result)
                return str(result)
            except RecursionError:  # its text depends on who called whom
                return "Error during execution: maximum recursion depth exceeded"
            except Exception as error:
                return f"Error during execution: {error}"

    def states(self) -> str:
        """All that the checks compare, and the directory one is in, as a text that can be kept."""
        files = self.instances.get("GorillaFileSystem")
        try:
            return repr([(name, {key: value for key, value in vars(instance).items()
                                 if not key.startswith("_")})
                         for name, instance in self.instances.items()]
                        + ([files.pwd()] if files else []))
        except RecursionError:  # directories in directories, a thousand deep
            return "too deep"


def _in_order(result):
    """A result; one that prints a set, whose order differs between processes, in one order."""
    error = result.get("error") if type(result) is dict else None
    for lead, end in (("Invalid fields for update: ", ""),
                      ("Invalid travel class. Must be one of {", "}")):
        if isinstance(error, str) and error.startswith(lead):
            words = sorted(error[len(lead):len(error) - len(end)].split(", "))
            return {**result, "error": lead + ", ".join(words) + end}
    return result


def _paths(files) -> int:
    """Paths below the root, and below where one is, as far as MOST_PATHS."""
    found, left = 0, [files.root, files._current_dir]
    while left and found <= MOST_PATHS:
        inside = getattr(left.pop(), "contents", {}).values()
        found += len(inside)
        left += inside
    return found


def failed(result: str) -> bool:
    value = json_of(result)
    return (result.lstrip("[{'\" ").lower().startswith("error")
            or isinstance(value, dict) and "error" in value)


def json_of(result: str):
    """The value that a result is in JSON; None where it is not."""
    try:
        return json.loads(result)
    except (ValueError, RecursionError):
        return None


def script(calls: list[list[dict]]) -> list[str]:
    """The replies, MOST_REPLIES at most, of one who makes these calls and ends turns in words."""
    replies = []
    for turn in calls:
        at_once = -(-len(turn) // MOST_REPLIES) or 1
        replies += [as_reply(turn[n:n + at_once]) for n in range(0, len(turn), at_once)]
        replies.append(DONE if turn else MISSING)
    return replies


def as_reply(calls: list[dict]) -> str:
    return "\n".join(f"{OPEN}\n{json.dumps(call)}\n{CLOSE}" for call in calls)
