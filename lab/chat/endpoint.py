"""Client for an OpenAI-compatible chat endpoint. It sends messages and returns a reply.

Errors are classified by the HTTP status and the finish_reason alone. Their texts are printed, but
never parsed, because each provider words them differently, and because they may quote the prompt. A
status does not distinguish a refused conversation from a refused account. `Paid.send` in
evaluate.py decides this by repeating a request that was answered before.

The API key is read from an environment variable. It is never written to a file, a log or an error
message.
"""

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
from urllib3.util import Retry

from common.settings import UsageError
from environments.user_files import FAULTS
from envs import EnvError

KEY = "OPENAI_API_KEY"  # environment variable with the API key
TRIES = 8               # maximum number of attempts per call [ours]
MAX_WAIT = 120          # a longer Retry-After is shortened to this, in seconds [ours]
SHOWN = 200             # number of characters of a response that an error message quotes [ours]
NO_REPLY = "(no reply)"  # sent instead of an empty message, which some servers reject
# Usage numbers that are summed over the responses of a phase. `Endpoint` returns all of them except
# cut_prompts, which `Paid` in evaluate.py adds.
USAGE = ("requests", "retries", "unreported", "cut_replies", "cut_prompts", "prompt_tokens",
         "completion_tokens")

# Sets of HTTP statuses, named by their meaning. Any other status means that the endpoint refuses
# this request's messages, or all requests.
TRANSIENT = {408, 409, 425, 429, *range(500, 600)}
OF_ALL_REQUESTS = {401, 402, 404, 407}  # errors of the key, payment, address or proxy
OF_THE_BODY = {400, 422}  # an optional field may be the cause (see `Endpoint.bodies`)


class EndpointError(EnvError):
    """The endpoint refuses all requests. The message is one line."""


class NotAnswered(EndpointError):
    """The endpoint does not reply to these messages. It may reply to others."""


class Refused(NotAnswered):
    """The endpoint refuses these messages, or all messages, or the last attempt failed."""


class OnlyThoughts(NotAnswered):
    """The response contains reasoning, but no reply."""


class Transient(Exception):
    """An error after which the request is sent again."""

    def __init__(self, problem: str, wait: float = 0.0):
        super().__init__(problem)
        self.wait = wait  # minimum time until the next attempt, in seconds


class Endpoint:
    """A model at a chat endpoint. Calling the object with messages returns (reply, usage)."""

    def __init__(self, url: str, name: str, temperature: float, max_tokens: int, timeout: float):
        path = "/chat/completions"
        self.url = url.rstrip("/").removesuffix(path) + path
        self.timeout = timeout  # maximum time until the next part of a response, in seconds
        # Request bodies without messages. Some models need a different name for the token limit, or
        # accept no temperature. Only the first body that the endpoint answers is kept.
        limited = dict(model=name, max_tokens=max_tokens)
        renamed = dict(model=name, max_completion_tokens=max_tokens)
        sampling = dict(temperature=temperature)
        self.bodies = [limited | sampling, renamed | sampling, limited, renamed]
        self.stopped = threading.Event()  # once set, no request is sent and waiting ends
        self.key = os.environ.get(KEY, "").strip()
        if re.search(r"[^!-~]", self.key):
            raise UsageError(f"{KEY} has a character that no key has; set it again")

    def __call__(self, messages: list[dict]) -> tuple[str, dict]:
        """Sends messages and returns the model's reply. Transient errors are retried.

        Returns:
            The reply, and a dict of usage numbers. The dict contains the keys of USAGE except
            cut_prompts. `unreported` is 1 if the endpoint reports no token counts.

        Raises:
            Refused: The endpoint refuses the request, or the last attempt failed.
            NotAnswered, OnlyThoughts: The response contains no reply.
            EndpointError: The endpoint refuses all requests.
        """
        filled = []
        for message in messages:
            is_empty = not message["content"].strip()
            filled.append(message | {"content": NO_REPLY} if is_empty else message)
        problem = ""
        for attempt in range(TRIES):
            if self.stopped.is_set():
                raise EndpointError(self.in_one_line("stopped"))
            try:
                reply, usage = self.request(filled)
                return reply, dict(usage, retries=attempt)
            except Transient as error:
                problem = self.in_one_line(str(error))
                wait = max(error.wait, 2.0**attempt * random.uniform(0.5, 1))
            except EndpointError as error:
                raise type(error)(self.in_one_line(str(error))) from None
            if attempt + 1 < TRIES:
                tqdm.write(f"{problem}; retry {attempt + 1} of {TRIES - 1} in {wait:.0f} s",
                           file=sys.stderr)
                self.stopped.wait(wait)
        raise Refused(f"{problem} (attempt {TRIES})")

    def request(self, messages: list[dict]) -> tuple[str, dict]:
        """Sends a request without retries, and returns the reply and its usage. Until the first
        answer, a request that gets a status in OF_THE_BODY is sent again with the next body."""
        problems = []
        for body in self.bodies:
            response = self.post(body | dict(messages=messages))
            text = response.content.decode(errors="replace")
            status = response.status_code
            problems.append(f"status {status}: {self.without_key(text)[:SHOWN]}")
            if status == 200:
                try:
                    return self.read(json.loads(text), body)
                except FAULTS as error:
                    raise Transient(f"{problems[-1]}, no usable choice ({error!r:.80})") from None
            if status not in OF_THE_BODY:
                break
        if status in TRANSIENT:
            raise Transient(problems[-1], wait_of(response.raw))
        if status in OF_ALL_REQUESTS:
            raise EndpointError(problems[-1])
        raise Refused(problems[0])

    def post(self, body: dict) -> requests.Response:
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        started = time.monotonic()
        try:
            return requests.post(self.url, json=body, headers=headers, timeout=(10, self.timeout),
                                 auth=lambda request: request,  # .netrc does not replace the key
                                 allow_redirects=False)
        except OSError as error:
            problem = f"{type(error).__name__}: {error}"
            if time.monotonic() - started >= self.timeout:
                problem += f"; raise --timeout {self.timeout:g}, or lower --slots"
            raise Transient(problem) from None

    def keep(self, body: dict) -> None:
        """Keeps the body of an answered request for all later requests. Prints a message if it is
        not the first body, because replies to a body without temperature are not greedy."""
        if body != self.bodies[0]:
            changes = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
            if "temperature" not in body:
                changes += " and without temperature, so replies are sampled at its own temperature"
            tqdm.write(f"{self.url}: it accepts only requests with {changes}", file=sys.stderr)
        self.bodies = [body]

    def read(self, response: dict, body: dict) -> tuple[str, dict]:
        """Extracts the reply and the usage from the response to a request with this body. Raises an
        exception in FAULTS if there is no usable choice."""
        choice = response["choices"][0]
        message = choice["message"]
        finish = str(choice.get("finish_reason") or "stop").lower()
        if finish == "error" or any(part.get("error") for part in (response, choice, message)):
            raise ValueError(f"finish_reason {finish}")
        self.keep(body)
        if finish == "content_filter":
            raise Refused("finish_reason content_filter")
        if message.get("tool_calls"):
            raise NotAnswered("the response calls functions, but a reply must be text; start the "
                              "server without a tool call parser")
        text, in_fields = contents(message)
        reply, in_text = reply_in(text)
        if not reply and (in_fields or in_text or finish == "length"):
            raise OnlyThoughts(
                f"there is no reply, only reasoning (finish_reason {finish}); limit the reasoning, "
                "or raise --max-new-tokens (for an explorer, REPLY in lab/chat/explorer.py)")
        if not reply and finish != "stop":
            raise ValueError(f"no text, finish_reason {finish}")
        usage = response.get("usage") or {}
        prompt = int(usage.get("prompt_tokens") or 0)
        completion = int(usage.get("completion_tokens") or 0)
        return reply, dict(
            requests=1, unreported=int(prompt + completion == 0),
            cut_replies=int(finish == "length"), prompt_tokens=prompt,
            completion_tokens=completion)

    def in_one_line(self, problem: str) -> str:
        """Formats a problem as one line, without the API key, and with hints at common causes."""
        line = f"{self.url}: {self.without_key(' '.join(problem.split()))}"
        if problem.startswith("status 404") and "/v1/" not in self.url:
            line += " (most addresses end in /v1)"
        if not self.key:
            line += f" (no key was sent: {KEY} is not set)"
        return line

    def without_key(self, text: str) -> str:
        return text.replace(self.key, "***") if self.key else text


def wait_of(response) -> float:
    """Returns the seconds to wait according to the Retry-After header, at most MAX_WAIT, or 0 if
    the header is absent or malformed."""
    try:
        return min(Retry().get_retry_after(response) or 0.0, MAX_WAIT)
    except (HTTPError, ValueError, OverflowError):
        return 0.0


# ------------------------------------------------------------------------------------- replies

# A tag that opens or closes reasoning content, such as <think>, </think>, [THINK], ◁think▷,
# <seed:think>, <|begin_of_thought|>, <|END_THINKING|>, or Gemma 4's <|channel> and <channel|>. In
# gpt-oss's harmony format, the header of the final channel closes the reasoning, and that of any
# other channel opens it. If a server removes special tokens, "assistantfinal" is all that remains
# of the final channel's header.
# All repetitions in the pattern are bounded, so that a search takes linear time.
NAME = r"[\w:.-]{0,20} (?:think|thought|reason|reflect) [\w:.-]{0,20}"
TAG = re.compile(rf"""
    (?P<closes>
        [<◁] [|｜]? (?: / | end_?(?:of_?)? ) {NAME} \s{{0,9}} [|｜]? [>▷]
      | <think \s{{0,9}} /> | (?-i: \[/THINK\] ) | <channel\|> | assistantfinal
      | <\|channel\|> \s{{0,9}} final [^<]{{0,40}} (?: <\|constrain\|> [^<]{{0,40}} )? <\|message\|>
    )
  | [<◁] [|｜]? {NAME} (?: \s [^<>]{{1,99}} = [^<>]{{1,99}} )? [|｜]? [>▷]
  | (?-i: \[THINK\] ) | <\|channel\|?>
""", re.I | re.X)
# A control token of a chat template, such as <|im_end|>, <end_of_turn>, <turn|>, </s> or [/INST].
CONTROL = r"""(?:
    <[|｜] [^\s<>|｜]{1,40} [|｜]? > | < [\w▁/.-]{1,40} [|｜] > | \[\| \w{1,20} \|\]
  | </? (?: s | bos | eos | pad | unk | sop | role | response | seed:[be]os ) >
  | < (?: (?:start|end)_of_\w{1,30} | (?:extra_id_|reserved_|unused)\d{1,5} ) >
  | \[ (?: /?INST | TOOL_CALLS | gMASK ) \] | \]~!?b[\[\]] | \[e~\[
)"""
END = re.compile(CONTROL, re.I | re.X)
# The control tokens before a reply. The name of the agent's role may follow each of them. A token
# before a different role is not matched, because it begins that role's turn.
OPENING = re.compile(rf"""(?:
    \s* (?! [<\[] [|｜] [^>\]]{{0,30}} (?:user|system) ) {CONTROL}
    (?! \s* (?:user|system|tool) \s* [\n<] )
    (?: \s* (?: assistant\b:? | (?:model|ai|chatbot) \s* (?: \n | \Z | (?=<) ) ) )?
)+ \s*""", re.I | re.X)


def contents(message: dict) -> tuple[str, bool]:
    """Returns the text of a message, and True if its other fields or parts contain reasoning. Lone
    surrogates are replaced with the replacement character."""
    content = message.get("content") or ""
    reasons = any(isinstance(value, str) and value for name, value in message.items()
                  if name not in ("role", "content"))
    if isinstance(content, list):
        texts = [part["text"] for part in content if part["type"] == "text"]
        reasons = reasons or len(texts) < len(content)
        content = "".join(texts)
    return content.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), reasons


def reply_in(text: str) -> tuple[str, bool]:
    """Extracts the reply from a text that may contain reasoning and control tokens.

    The reply starts after the last tag that closes reasoning. If reasoning is opened and not
    closed, there is no reply. Control tokens before the reply are skipped, and the next control
    token ends the reply. Returns the reply, and True if the text contains reasoning.
    """
    tags = [*TAG.finditer(text)]
    if tags and not tags[-1]["closes"]:
        return "", True
    if tags:
        text = text[tags[-1].end():]
    opening = OPENING.match(text)
    if opening:
        text = text[opening.end():]
    return END.split(text, 1)[0].strip(), bool(tags)
