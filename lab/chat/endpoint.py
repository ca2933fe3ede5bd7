"""An OpenAI-compatible chat endpoint: messages in, a reply out. The key, of the environment, stands
in no file, log or message."""

import json
import os
import random
import re
import sys
import threading
import time
from email.utils import parsedate_to_datetime

import requests
from tqdm import tqdm
from urllib3.exceptions import HTTPError

from envs import EnvError, Refused

KEY = "OPENAI_API_KEY"  # the environment variable
TRIES = 8
SECONDS = 300     # for an answer [ours]
MOST = 1_000_000  # bytes of an answer [ours]
USAGE = ("requests", "retries", "unreported", "cut_replies", "prompt_tokens", "completion_tokens")
NO_REPLY = "(no reply)"  # in place of an empty turn, which some servers refuse

PASSING = {408, 409, 425, 429}  # statuses that may be gone in a moment, as 500 and above
REFUSING = {400, 403, 413, 422, 451}  # which may be about these messages alone
OF_LENGTH = {400, 413, 422}  # which may be about their length

# How servers and providers say that messages are too long: of a context, whatever the status, ...
CONTEXT = re.compile("context.?(length|window|size|limit)|prompt (is )?too long|"
                     "input is too (long|large) to", re.I)
# ... or of a prompt, by a status that blames the request. A reply that is asked for may be too long
# as well, and then every request is.
TOO_LONG = re.compile("|".join([
    r'(prompt|input|messages?\b|conversation|request|token)\w*[^.;:"]{0,60}'
    r"(too (long|large)|exceed|longer than|greater than|is over|should be shorter)",
    r"(prompt|input)\w*.{0,40}must (be|have) (less|fewer|<)",
    r"(prompt|input)[^.]{0,60}only supports",
    r"max\w* (prompt|input) (length|limit)",
    r"maximum number of tokens",
    r"input length should be",
    r"too many (\w+ )?tokens",
    r"content'?: string too long",
    r"reduce (the length|your prompt)",
    r"tokens must be at least 1, got -",
    r"max_?(completion|new|output)?_?tokens\b.{0,60}(too large|at most|<|less than|maximum|range)",
    r"range of max_tokens"]), re.I | re.S)
# What is told in such words and is about something else: rates, other parts of a request.
OTHERWISE = re.compile(r"per (second|min|hour|day)|\b[TR]P[MD]\b|rate.?limit|quota|concurren|queue|"
                       r"took too long|timed? ?out|deadline|request (id|header)|"
                       r"\b(an?|the) image\b|(unknown|unsupported) (param|arg|field|request)|"
                       r"unrecogni[sz]ed|not permitted", re.I)

# How an endpoint says in the finish_reason of a choice that it is no reply, or one that was cut.
FAILED = re.compile("error|fail|abort|cancel|network|resource|overload|timeout|rate.?limit|"
                    "unavailable", re.I)
FILTERED = re.compile("filter|safety|sensitive|refus|prohibit|recitation|blocklist|guardrail|spii|"
                      "language|malformed|unexpected", re.I)
CUT = re.compile("length|max_?(output_?)?tokens|context", re.I)
WHOLE = re.compile("|stop.*|eos.*|end.*|complete.*", re.I)
# Names of what a model thinks, of a field of its message and of a part of that.
THOUGHTS = re.compile("reason|think|thought", re.I)


class EndpointError(EnvError):
    """The endpoint could not be reached after all tries, or takes nothing; one line."""


class NotAnswered(EndpointError):
    """The endpoint refuses these messages for good, as a filter of contents does."""


class OnlyThoughts(NotAnswered):
    """The endpoint has thought, and said nothing."""


class ContextFull(Exception):
    """The messages are longer than the model can read, beside the reply that is asked for."""


class Passing(Exception):
    """A fault that may be gone in a moment."""

    def __init__(self, problem: str, wait: float | None = None):
        super().__init__(problem)
        self.wait = wait  # seconds; None: as many as after other faults


class Endpoint:
    """Calls the model: messages -> (reply, usage), with retries and growing waits between them."""

    def __init__(self, url: str, name: str, temperature: float, max_tokens: int):
        path = "/chat/completions"
        self.url = url.rstrip("/").removesuffix(path) + path
        self.body = dict(model=name, temperature=temperature, max_tokens=max_tokens)
        self.stopped = threading.Event()  # once set, nothing is asked or waited for any more
        self.key = os.environ.get(KEY, "").strip()
        if re.search(r"[^!-~]", self.key):
            raise Refused(f"the key in {KEY} holds a character that no key has")

    def __call__(self, messages: list[dict]) -> tuple[str, dict]:
        """Asks, again where a fault may pass.

        Returns:
            The reply, and its usage by the names in USAGE; `unreported` is 1 where the endpoint
            reports no tokens.

        Raises:
            ContextFull: The messages are too long for the model.
            NotAnswered: The endpoint refuses these messages alone.
            EndpointError: The last attempt failed, too.
        """
        problem = "stopped"
        attempt = 0
        while attempt < TRIES and not self.stopped.is_set():
            attempt += 1
            try:
                reply, used = self.ask_once(messages)
                return reply, dict(used, retries=attempt - 1)
            except Passing as fault:
                problem = str(fault)
                wait = fault.wait
            if wait is None:
                wait = min(2.0 ** (attempt - 1), 60) * random.uniform(0.5, 1)
            if attempt < TRIES:
                self.stopped.wait(wait)
        raise EndpointError(self.told(f"{problem} (attempt {attempt})"))

    def ask_once(self, messages: list[dict]) -> tuple[str, dict]:
        """The reply to one request and its usage; else one of the errors above."""
        sent = []
        for message in messages:
            sent.append(message if message["content"].strip() else message | {"content": NO_REPLY})
        body = {**self.body, "messages": sent}
        try:
            status, text, asked_to_wait = self.post(body)
        except (requests.RequestException, HTTPError, ValueError) as error:
            raise Passing(f"{type(error).__name__}: {error}") from None
        if status == 200:
            return self.read(text)

        problem = f"status {status}: {self.without_key(text)[:200]}"
        of_length = not OTHERWISE.search(text)
        if of_length and (status in OF_LENGTH or status >= 500) and CONTEXT.search(text):
            raise ContextFull(self.told(problem))
        if status in PASSING or status >= 500:
            raise Passing(problem, seconds_of(asked_to_wait))
        if status == 400 and self.refuses_parameter(body, text):
            raise Passing(problem, wait=0)
        if of_length and status in OF_LENGTH and TOO_LONG.search(text):
            raise ContextFull(self.told(problem))
        if status in REFUSING:
            raise NotAnswered(self.told(problem))
        raise EndpointError(self.told(problem))

    def post(self, body: dict) -> tuple[int, str, str]:
        """Status, text and Retry-After. NotAnswered where the text is too long."""
        text = b""
        ends = time.monotonic() + SECONDS
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        with requests.post(self.url, json=body, headers=headers, timeout=(10, SECONDS),
                           auth=lambda request: request,  # so that no .netrc takes its place
                           allow_redirects=False, stream=True) as answer:
            while part := answer.raw.read1(1 << 16, True):
                text += part
                if len(text) > MOST:
                    raise NotAnswered(f"{self.url}: an answer is longer than {MOST:,} bytes")
                if time.monotonic() > ends:
                    raise requests.Timeout(f"it took more than {SECONDS} seconds")
            return (answer.status_code, text.decode(errors="replace"),
                    answer.headers.get("Retry-After", ""))

    def read(self, text: str) -> tuple[str, dict]:
        """The reply and the usage in an answer of status 200.

        Raises:
            Passing: It is no answer, or one that failed halfway.
            ContextFull, NotAnswered, OnlyThoughts: It says so.
        """
        said = self.without_key(text)[:200]
        try:
            answer = json.loads(text)
            fault = fault_in(answer)
            if fault:
                self.raise_fault(fault, f"an error in an answer of status 200: {said}")
            return self.read_choice(answer["choices"][0], answer.get("usage") or {}, said)
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError,
                RecursionError) as error:
            raise Passing(f"{type(error).__name__}: {error} {said}") from None

    def raise_fault(self, fault: dict | str, problem: str) -> None:
        """Raises what an error in an answer of status 200 is; its `code` is a status."""
        text = str(fault)
        code = fault.get("code") if isinstance(fault, dict) else None
        long = CONTEXT.search(text) or code not in PASSING and TOO_LONG.search(text)
        if long and not OTHERWISE.search(text):
            raise ContextFull(self.told(problem))
        if code in (403, 451):
            raise NotAnswered(self.told(problem))
        raise Passing(problem)

    def read_choice(self, choice: dict, used: dict, said: str) -> tuple[str, dict]:
        """`read` of a choice that has no error; an error of any kind where it is none."""
        message = choice["message"]
        ends = str(choice.get("finish_reason") or "")
        if FAILED.search(ends):
            raise Passing(f"finish_reason {ends}: {said}")
        if FILTERED.search(ends) or refuses(message):
            raise NotAnswered(self.told(f"a filter took the reply: {said}"))
        if message.get("tool_calls") or message.get("function_call"):
            raise NotAnswered(self.told(
                f"it calls functions, where a reply has to be text: {said}; start the server "
                "without a parser of tool calls"))

        reply = text_of(message.get("content"))
        if not without_thoughts(reply).strip():
            self.refuse_empty(message, used, ends, said)
        if len(self.key) >= 16:  # shorter ones, such as EMPTY, are words and no secrets
            reply = self.without_key(reply)
        usage = dict(requests=1, unreported=int(not used), cut_replies=int(bool(CUT.search(ends))))
        for name in "prompt_tokens", "completion_tokens":
            usage[name] = max(0, int(used.get(name) or 0))
        return reply, usage

    def refuse_empty(self, message: dict, used: dict, ends: str, said: str) -> None:
        """Raises what a message without a text is, if it is not just the reply of one who has
        nothing to say."""
        if "context" in ends.lower():
            raise ContextFull(self.told(f"finish_reason {ends}: {said}"))
        if CUT.search(ends) or thinks(message) or hidden_thoughts(used):
            raise OnlyThoughts(self.told(
                f"it thought and said nothing (finish_reason {ends or 'none'}); raise "
                "--max-new-tokens, or let it think less"))
        if not WHOLE.fullmatch(ends):
            raise NotAnswered(self.told(f"there is no reply: {said}"))

    def refuses_parameter(self, body: dict, text: str) -> bool:
        """Whether `text` refuses a parameter of `body`; from now on it is sent as asked for."""
        if "max_completion_tokens" in text and "max_tokens" in body:
            self.body = {"max_completion_tokens" if name == "max_tokens" else name: value
                         for name, value in self.body.items()}
        elif "temperature" in body and re.search(
                r"temperature\W.{0,40}(support|allow|range|must|between)", text, re.S):
            if "temperature" in self.body:
                tqdm.write(f"{self.url} takes no temperature: its own is used", file=sys.stderr)
            self.body = {name: self.body[name] for name in self.body if name != "temperature"}
        else:
            return False
        return True

    def told(self, problem: str) -> str:
        """A problem in one line, without the key, with what often causes it."""
        line = f"{self.url}: {self.without_key(' '.join(problem.split()))}"
        if problem.startswith("status 404") and "/v1/" not in self.url:
            line += " (most addresses end in /v1)"
        if not self.key:
            line += f" (without a key: {KEY} is not set)"
        return line

    def without_key(self, text: str) -> str:
        return text.replace(self.key, "***") if self.key else text


def fault_in(answer: dict) -> dict | str | None:
    """The error in an answer of status 200: at its top, in its choice, in the message of that; or
    the answer itself, where it has no choice. None: there is none."""
    if not answer.get("choices"):
        return answer.get("error") or answer
    choice = answer["choices"][0]
    return answer.get("error") or choice.get("error") or choice["message"].get("error")


def refuses(message: dict) -> bool:
    """Whether a message says that it is no answer, in a field or in a part of its content."""
    parts = message.get("content")
    found = [message, *parts] if isinstance(parts, list) else [message]
    return any(isinstance(part, dict) and part.get("refusal") for part in found)


def text_of(content: str | list | None) -> str:
    """The text of a message's content, which may stand in parts; those of thoughts are none. Half
    a surrogate pair, which is no text, becomes the mark of what cannot be shown."""
    if isinstance(content, list):
        texts = []
        for part in content:
            if isinstance(part, str):
                texts.append(part)
            elif part.get("type") in (None, "text", "output_text"):
                texts.append(part.get("text") or "")
        content = "".join(texts)
    if not isinstance(content, str | None):
        raise TypeError(f"content is {content!r:.40}, which is no text.")
    return (content or "").encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def thinks(message: dict) -> bool:
    """Whether there are thoughts in a message: a field, a part of its content or tags in it."""
    if any(value for name, value in message.items() if THOUGHTS.search(name)):
        return True
    content = message.get("content")
    if isinstance(content, list):
        return any(isinstance(part, dict) and THOUGHTS.search(str(part.get("type")))
                   for part in content)
    return "<think>" in (content or "")


def without_thoughts(reply: str) -> str:
    """A reply without the thoughts in tags that it begins with, closed or not."""
    if not reply.lstrip().startswith("<think>"):
        return reply
    return reply.partition("</think>")[2]


def seconds_of(asked_to_wait: str) -> float | None:
    """Seconds that a Retry-After asks for, by a number or a date, at most 120; None: it doesn't."""
    if re.fullmatch(r"\d+(\.\d+)?", asked_to_wait):
        return min(float(asked_to_wait), 120)
    try:
        until = parsedate_to_datetime(asked_to_wait).timestamp()
    except (ValueError, TypeError):
        return None
    return min(max(until - time.time(), 0), 120)


def hidden_thoughts(used: dict) -> bool:
    """Whether tokens were spent on thoughts that no message shows."""
    details = used.get("completion_tokens_details") or {}
    return bool(details.get("reasoning_tokens"))
