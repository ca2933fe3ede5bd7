"""Parses the calls in a reply and runs them on the simulators, without evaluating any text.

A call is JSON. Its name is looked up among the documented functions of the task's simulators, and
the method is called with the arguments by name. If a call cannot be made, its result is an error
text.
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
MAX_REPLIES = 20        # replies with calls, in one turn of the user [BFCL]
MAX_CALLS = 50          # calls, or blocks, of a reply; ground truths have up to 34 a turn [ours]
MAX_CHARACTERS = 100_000  # characters of a reply with calls [ours]
MAX_DEPTH = 20          # depth of nested lists and objects in arguments [ours]
TOO_DEEP = "nested too deeply"
MAX_DIGITS = 20         # digits of a whole number in arguments [ours]
MAX_PRECISION = 1000    # largest exponent, precision and number of decimal places [ours]
MAX_PATHS = 5000        # paths of a file tree: a directory can be copied into itself [ours]
LOCK = threading.Lock()  # the maths simulator sets the precision of the whole process


class Clock(datetime):
    """The clock of two simulators, which does not depend on today's date or the local time zone."""

    def timestamp(self):
        return datetime.timestamp(self.replace(tzinfo=timezone.utc))

    @classmethod
    def fromtimestamp(cls, seconds):
        return cls(1970, 1, 1) + timedelta(seconds=seconds)

    @classmethod
    def today(cls):
        return cls(2024, 9, 1)


trading_bot.CURRENT_TIME = Clock(2024, 9, 1, 10, 30)  # the value that it has in the package
trading_bot.datetime = travel_booking.datetime = Clock


def parse_calls(reply: str) -> list[dict | str]:
    """Returns the calls in a reply, in order.

    Calls stand in blocks <tool_call>...</tool_call>. Without such a block they stand in blocks
    ```json ... ```, and without these the whole reply is a call. A block holds one call or a list.
    Reasoning up to </think> is skipped.

    Returns:
        Calls {name, arguments}. In place of a call that cannot be made there is an error text. The
        list is empty if nothing in the reply is a call.
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
    """Returns the calls in a block, with None for a value that is no call, and an error text for
    one that cannot be parsed."""
    try:
        value = _from_json(block)
    except ValueError:
        return [None]
    except RecursionError:
        return [TOO_DEEP]
    return [_as_call(call) for call in (value if isinstance(value, list) else [value])]


def _from_json(text: str):
    """Returns the value of JSON text. A whole number of too many digits becomes NaN."""
    def parse_int(digits):
        return int(digits) if len(digits.lstrip("-")) <= MAX_DIGITS else math.nan

    return json.loads(text, parse_int=parse_int)


def _as_call(value) -> dict | None:
    """Returns the name and arguments of a call, or None if the value is no call.

    Like bfcl-eval's own handlers, it ignores other keys, and the arguments may be JSON text.
    """
    if not isinstance(value, dict) or not {"name", "arguments"} <= value.keys():
        return None
    arguments = value["arguments"]
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # otherwise `problem` returns the error
            arguments = _from_json(arguments)
    return {"name": value["name"], "arguments": arguments}


def problem(call: dict) -> str | None:
    """Returns the reason why a call may not be passed to a simulator, or None if it may."""
    name, arguments = call["name"], call["arguments"]
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return FORM
    for key in ("exponent", "precision", "decimal_places"):
        with suppress(TypeError, ValueError, OverflowError):  # the simulator rejects other types
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
    """Returns True if lists and objects are nested more than `depth` times."""
    items = (value.values() if isinstance(value, dict) else
             value if isinstance(value, list) else ())
    return depth < 0 or any(_is_deeper(item, depth - 1) for item in items)


class Simulators:
    """The simulators of an episode, in their start state. Episodes share no instances.

    Args:
        start: Key of the start state, CATEGORY-NUMBER.
    """

    def __init__(self, start: str):
        state = start_state(start)
        self.instances = {name: simulator_class(name)() for name in state["classes"]}
        for name, instance in self.instances.items():
            if hasattr(instance, "_load_scenario"):  # the maths simulator has no state
                instance._load_scenario(copy.deepcopy(state["config"].get(name, {})),
                                        long_context=state["long_context"])
        if state["long_context"]:  # the package shares the long texts between all instances
            self.instances = copy.deepcopy(self.instances)
        self.functions = {name: getattr(instance, name)
                          for simulator, instance in self.instances.items()
                          for name in documents(simulator)}

    def has_function(self, call: dict | str) -> bool:
        """Returns True if an item of `parse_calls` is a valid call of an existing function."""
        return not isinstance(call, str) and not problem(call) and call["name"] in self.functions

    def run(self, call: dict | str) -> str:
        """Makes a call of `parse_calls`, and returns its result as the package prints it."""
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
                with suppress(Exception):  # like the package, if JSON cannot express the result
                    return json.dumps(result) if type(result) is dict else str(result)
                return str(result)
            except RecursionError:  # its own text depends on the depth of the caller's stack
                return "Error during execution: maximum recursion depth exceeded"
            except Exception as error:
                return f"Error during execution: {error}"

    def states(self) -> str:
        """Returns everything that the checks compare, and the current directory, as a text."""
        files = self.instances.get("GorillaFileSystem")
        try:
            return repr([(name, {key: value for key, value in vars(instance).items()
                                 if not key.startswith("_")})
                         for name, instance in self.instances.items()]
                        + ([files.pwd()] if files else []))
        except RecursionError:  # directories in directories, a thousand deep
            return "too deep"


def _in_order(result):
    """Returns a result with the sets that it prints in sorted order.

    Two error texts print a set, and its order differs between processes.
    """
    error = result.get("error") if type(result) is dict else None
    for start, end in (("Invalid fields for update: ", ""),
                      ("Invalid travel class. Must be one of {", "}")):
        if isinstance(error, str) and error.startswith(start):
            words = sorted(error[len(start):len(error) - len(end)].split(", "))
            return {**result, "error": start + ", ".join(words) + end}
    return result


def _count_paths(files) -> int:
    """Counts the paths below the root and below the current directory, up to MAX_PATHS."""
    count, remaining = 0, [files.root, files._current_dir]
    while remaining and count <= MAX_PATHS:
        inside = getattr(remaining.pop(), "contents", {}).values()
        count += len(inside)
        remaining += inside
    return count


def failed(result: str) -> bool:
    """Returns True if the result of a call is an error."""
    value = json_of(result)
    return (result.lstrip("[{'\" ").lower().startswith("error")
            or isinstance(value, dict) and "error" in value)


def json_of(result: str):
    """Returns the value of a result, or None if it is no JSON."""
    try:
        return json.loads(result)
    except (ValueError, RecursionError):
        return None


def script(calls: list[list[dict]]) -> list[str]:
    """Returns the replies of an expert that makes these calls and ends each turn in words.

    A turn has at most MAX_REPLIES replies with calls. If it has more calls, a reply holds several.
    The reply that ends a turn is DONE, or MISSING if the ground truth has no call in the turn.

    Args:
        calls: For each turn the calls {name, arguments}.
    """
    replies = []
    for turn in calls:
        size = -(-len(turn) // MAX_REPLIES) or 1  # calls per reply
        replies += [as_reply(turn[n:n + size]) for n in range(0, len(turn), size)]
        replies.append(DONE if turn else MISSING)
    return replies


def as_reply(calls: list[dict]) -> str:
    return "\n".join(f"{OPEN}\n{json.dumps(call)}\n{CLOSE}" for call in calls)
