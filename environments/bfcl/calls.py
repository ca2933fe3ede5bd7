"""Parses the function calls in a reply and executes them on the simulators.

A call is a JSON object with the name of a documented function and its arguments by name. The
function is a method of a simulator. The text of a reply is never evaluated as Python. An invalid
call is not executed, and its result is an error message.
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
MAX_REPLIES = 20        # maximum number of replies with calls in one turn [BFCL]
MAX_CALLS = 50          # maximum number of calls in a reply; ground truths have up to 34 [ours]
MAX_CHARACTERS = 100_000  # maximum length of a reply with calls, in characters [ours]
MAX_DEPTH = 20          # maximum depth of nested lists and objects in arguments [ours]
TOO_DEEP = "nested too deeply"
MAX_DIGITS = 20         # maximum number of digits of an integer in arguments [ours]
MAX_PRECISION = 1000    # maximum exponent, precision and number of decimal places [ours]
# Maximum number of paths in the simulated file system. Copying a directory into itself could
# otherwise exhaust the memory [ours].
MAX_PATHS = 5000
LOCK = threading.Lock()  # the maths simulator changes the precision of mpmath for the whole process


class Clock(datetime):
    """Replaces `datetime` in the trading and travel simulators, so that their results do not depend
    on the current date or the local time zone."""

    def timestamp(self):
        return datetime.timestamp(self.replace(tzinfo=timezone.utc))

    @classmethod
    def fromtimestamp(cls, seconds):
        return cls(1970, 1, 1) + timedelta(seconds=seconds)

    @classmethod
    def today(cls):
        return cls(2024, 9, 1)


trading_bot.CURRENT_TIME = Clock(2024, 9, 1, 10, 30)  # the same time as in the package
trading_bot.datetime = travel_booking.datetime = Clock


def parse_calls(reply: str) -> list[dict | str]:
    """Parses the calls in a reply.

    The calls are in blocks of the form <tool_call>...</tool_call>, or else in blocks of the form
    ```json ... ```. If the reply has neither form, it is parsed as one block. A block contains one
    call or a JSON list of calls. Reasoning that ends with </think> or starts with <think> is
    skipped.

    Returns:
        A list of the calls {name, arguments}, in order, with an error message in place of each
        invalid call. If the reply contains no call at all, the list is empty.
    """
    text = reply.rpartition("</think>")[2].partition("<think>")[0]
    if OPEN in text:
        blocks = [block.partition(CLOSE)[0] for block in text.split(OPEN)[1:] if CLOSE in block]
    elif "```json" in text:
        blocks = [block.partition("```")[0] for block in text.split("```json")[1:]]
    else:
        blocks = [text]
    parsed = []
    for block in blocks[:MAX_CALLS + 1]:
        parsed += _calls_in(block)
    if all(call is None for call in parsed):
        return []
    if len(reply) > MAX_CHARACTERS:
        return [f"the reply has {len(reply)} characters; at most {MAX_CHARACTERS} are read"]
    calls = [f"not a call; {FORM}" if call is None else call for call in parsed[:MAX_CALLS]]
    if len(parsed) > MAX_CALLS:
        calls.append(f"not made; a reply has at most {MAX_CALLS} calls")
    return calls


def _calls_in(block: str) -> list[dict | str | None]:
    """Returns the call or an error message for each value in a block, or None for a value that is
    not a call."""
    try:
        value = _from_json(block)
    except ValueError:
        return [None]
    except RecursionError:
        return [TOO_DEEP]
    return [_as_call(call) for call in (value if isinstance(value, list) else [value])]


def _from_json(text: str):
    """Parses JSON. An integer of more than MAX_DIGITS digits becomes NaN, which `problem` rejects.
    """
    def parse_int(digits):
        return int(digits) if len(digits.lstrip("-")) <= MAX_DIGITS else math.nan

    return json.loads(text, parse_int=parse_int)


def _as_call(value) -> dict | None:
    """Returns the call {name, arguments} in a JSON value, or None if the value is not a call.

    As in bfcl-eval, other keys are ignored, and the arguments may be a JSON string.
    """
    if not isinstance(value, dict) or not {"name", "arguments"} <= value.keys():
        return None
    arguments = value["arguments"]
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # `problem` rejects invalid JSON later
            arguments = _from_json(arguments)
    return {"name": value["name"], "arguments": arguments}


def problem(call: dict) -> str | None:
    """Returns the reason why a call must not be executed, or None if the call is safe."""
    name, arguments = call["name"], call["arguments"]
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return FORM
    for key in ("exponent", "precision", "decimal_places"):
        # The simulator itself returns an error message if a value is not a number.
        with suppress(TypeError, ValueError, OverflowError):
            if abs(int(arguments.get(key))) > MAX_PRECISION:
                return f"{key} must be a number of at most {MAX_PRECISION}"
    if _is_deeper(arguments, MAX_DEPTH):
        return TOO_DEEP
    try:
        json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        return "half of a surrogate pair is no character"
    except ValueError:
        return f"a number that is infinite, none, or of more than {MAX_DIGITS} digits"
    return None


def _is_deeper(value, depth: int) -> bool:
    items = (value.values() if isinstance(value, dict) else
             value if isinstance(value, list) else ())
    return depth < 0 or any(_is_deeper(item, depth - 1) for item in items)


class Simulators:
    """New simulators in a start state, whose key is CATEGORY-NUMBER, such as "base-12"."""

    def __init__(self, start: str):
        state = start_state(start)
        self.instances = {name: simulator_class(name)() for name in state["classes"]}
        for name, instance in self.instances.items():
            if hasattr(instance, "_load_scenario"):  # the maths simulator has no state to load
                instance._load_scenario(copy.deepcopy(state["config"].get(name, {})),
                                        long_context=state["long_context"])
        # In the category "long_context", all instances share the objects with long texts, and a
        # call may change these objects.
        if state["long_context"]:
            self.instances = copy.deepcopy(self.instances)
        self.functions = {name: getattr(instance, name)
                          for simulator, instance in self.instances.items()
                          for name in documents(simulator)}

    def has_function(self, call: dict | str) -> bool:
        """Returns True for a valid call of a function of these simulators."""
        return not isinstance(call, str) and not problem(call) and call["name"] in self.functions

    def run(self, call: dict | str) -> str:
        """Executes one item of a list that `parse_calls` has returned.

        Returns the result as text, as in bfcl-eval.
        """
        error = call if isinstance(call, str) else problem(call)
        if error:
            return f"Error: {error}"
        function = self.functions.get(call["name"])
        if function is None:
            return f"Error during execution: name {call['name'][:60]!r} is not defined"
        files = self.instances.get("GorillaFileSystem")
        if files is function.__self__ and _count_paths(files) > MAX_PATHS:
            return f"Error: beyond {MAX_PATHS} paths the file system takes no calls"
        with LOCK, mpmath.workdps(15), decimal.localcontext():
            try:
                result = _in_order(function(**copy.deepcopy(call["arguments"])))
                if type(result) is dict:
                    with suppress(Exception):
                        return json.dumps(result)
                return str(result)
            except RecursionError:
                # Return a fixed message, because Python's message for this error varies.
                return "Error during execution: maximum recursion depth exceeded"
            except Exception as error:
                return f"Error during execution: {error}"

    def states(self) -> str:
        """Returns all attributes that BFCL's checks compare, and the current directory, as text."""
        files = self.instances.get("GorillaFileSystem")
        try:
            return repr([(name, {key: value for key, value in vars(instance).items()
                                 if not key.startswith("_")})
                         for name, instance in self.instances.items()]
                        + ([files.pwd()] if files else []))
        except RecursionError:  # about a thousand nested directories
            return "too deep"


def _in_order(result):
    """Returns the result of a call, with a deterministic error message.

    Two error messages of the simulators contain a printed Python set, whose order differs between
    processes.
    """
    error = result.get("error") if type(result) is dict else None
    for start, end in (("Invalid fields for update: ", ""),
                      ("Invalid travel class. Must be one of {", "}")):
        if isinstance(error, str) and error.startswith(start):
            words = sorted(error[len(start):len(error) - len(end)].split(", "))
            return {**result, "error": start + ", ".join(words) + end}
    return result


def _count_paths(files) -> int:
    """Counts the paths below the root and the current directory, and stops above MAX_PATHS."""
    count, remaining = 0, [files.root, files._current_dir]
    while remaining and count <= MAX_PATHS:
        inside = getattr(remaining.pop(), "contents", {}).values()
        count += len(inside)
        remaining += inside
    return count


def failed(result: str) -> bool:
    value = json_of(result)
    return (result.lstrip("[{'\" ").lower().startswith("error")
            or isinstance(value, dict) and "error" in value)


def json_of(result: str):
    try:
        return json.loads(result)
    except (ValueError, RecursionError):
        return None


def script(calls: list[list[dict]]) -> list[str]:
    """Returns the replies of the scripted expert, which makes the given calls in each turn.

    Each reply contains one call, or several calls if the turn has more than MAX_REPLIES calls. The
    last reply of each turn is in words, and ends the turn.
    """
    replies = []
    for turn in calls:
        size = -(-len(turn) // MAX_REPLIES) or 1  # calls per reply
        replies += [as_reply(turn[n:n + size]) for n in range(0, len(turn), size)]
        replies.append(DONE if turn else MISSING)
    return replies


def as_reply(calls: list[dict]) -> str:
    return "\n".join(f"{OPEN}\n{json.dumps(call)}\n{CLOSE}" for call in calls)
