"""An OpenAI-compatible chat endpoint: messages in, a reply out. The key, of the environment, stands
in no file, log or message."""

import json
import os
import random
import re
import sys
import threading
import time

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

# How servers and providers say that messages are too long: of a context, or of a prompt. A reply
# that is asked for may be too long as well, and then every request is.
CONTEXT = re.compile("context.?(length|window|size|limit)", re.I)
TOO_LONG = re.compile("|".join([
    r'(prompt|input|messages|request|token)\w*[^.;:"]{0,60}(too (long|large)|exceed|longer than)',
    r"(prompt|input)\w*.{0,40}must be (less|<)",
    r"max\w* (prompt|input) length",
    r"input length should be",
    r"too many tokens",
    r"reduce (the length|your prompt)",
    r"max_?(completion|new|output)?_?tokens\b.{0,60}(too large|at most|<|less than|maximum|range)",
    r"range of max_tokens"]), re.I | re.S)

# How an endpoint says in the finish_reason of a choice that it is no reply.
FAILED = re.compile("error|abort|cancel|network|resource|overload|timeout", re.I)
FILTERED = re.compile("filter|safety|sensitive|refus|prohibit|recitation|blocklist|guardrail", re.I)
# Where the thoughts of a model stand in a message, beside what it says.
THOUGHTS = ("reasoning_content", "reasoning", "reasoning_details", "thinking")


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
        if (status in OF_LENGTH or status >= 500) and CONTEXT.search(text):
            raise ContextFull(self.told(problem))
        if status in PASSING or status >= 500:
            asked = re.fullmatch(r"\d+(\.\d+)?", asked_to_wait)
            raise Passing(problem, min(float(asked_to_wait), 120) if asked else None)
        if status == 400 and self.refuses_parameter(body, text):
            raise Passing(problem, wait=0)
        if status in OF_LENGTH and TOO_LONG.search(text):
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
            fault = answer.get("error") or answer["choices"][0].get("error")
            if fault:
                self.raise_fault(str(fault), f"an error in an answer of status 200: {said}")
            return self.read_choice(answer["choices"][0], answer.get("usage") or {}, said)
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError,
                RecursionError) as error:
            raise Passing(f"{type(error).__name__}: {error} {said}") from None

    def raise_fault(self, fault: str, problem: str) -> None:
        if CONTEXT.search(fault):
            raise ContextFull(self.told(problem))
        raise Passing(problem)

    def read_choice(self, choice: dict, used: dict, said: str) -> tuple[str, dict]:
        """`read` of a choice that has no error; an error of any kind where it is none."""
        message = choice["message"]
        ends = str(choice.get("finish_reason") or "")
        if FAILED.search(ends):
            raise Passing(f"finish_reason {ends}: {said}")
        if FILTERED.search(ends) or message.get("refusal"):
            raise NotAnswered(self.told(f"a filter took the reply: {said}"))

        reply = message.get("content") or ""
        thought = any(message.get(name) for name in THOUGHTS) or hidden_thoughts(used)
        if isinstance(reply, list):  # of parts
            thought = thought or bool(reply)
            reply = "".join(part.get("text") or "" for part in reply)
        reply = str(reply)
        if thought and not reply.strip():
            raise OnlyThoughts(self.told(
                f"it thought and said nothing (finish_reason {ends or 'none'}); raise "
                "--max-new-tokens, or let it think less"))
        if len(self.key) >= 16:  # shorter ones, such as EMPTY, are words and no secrets
            reply = self.without_key(reply)
        usage = dict(requests=1, unreported=int(not used), cut_replies=int(ends == "length"))
        for name in "prompt_tokens", "completion_tokens":
            usage[name] = max(0, int(used.get(name) or 0))
        return reply, usage

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


def hidden_thoughts(used: dict) -> bool:
    """Whether tokens were spent on thoughts that no message shows."""
    details = used.get("completion_tokens_details") or {}
    return bool(details.get("reasoning_tokens"))
