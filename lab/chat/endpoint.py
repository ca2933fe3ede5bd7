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
from urllib3.util import Retry

from common.settings import Refused
from envs import EnvError

KEY = "OPENAI_API_KEY"  # the environment variable
TRIES = 8
SECONDS = 300     # for an answer [ours]
LONGEST = 120     # seconds between two tries [ours]
MOST = 1_000_000  # bytes of an answer [ours]
# What is summed over the answers of a phase; cut_prompts are found by who asks.
USAGE = ("requests", "retries", "unreported", "cut_replies", "cut_prompts", "prompt_tokens",
         "completion_tokens")
NO_REPLY = "(no reply)"  # in place of an empty turn, which some servers refuse

PASSING = {408, 409, 425, 429}  # statuses that may be gone in a moment, as 500 and above
REFUSING = {400, 403, 413, 422, 451}  # which may be about these messages alone
OF_LENGTH = {400, 413, 422}  # which may be about their length, as 500 and above

# How servers and providers say that messages, or a reply as long as asked for, are too long.
TOO_LONG = re.compile(
    r"context.?(length|window|size|limit|overflow)|exceeds? context|"
    r'(prompt|input(?! should)|message|conversation|request|token)[^.;:"]{0,70}'
    r"(too (long|large)|exceed|longer|greater than|less than|fewer|over the|at most|maximum|"
    r"should be shorter|<|length is)|only supports (prompt|up to)|"
    r'(too many|number of|reduce|range of)[^.;:"]{0,30}(token|length|prompt)|'
    r"max\w*tokens\b.{0,60}(too large|at most|less than|maximum|<)|at least 1, got -|"
    r"content'?: string too long", re.I)
# What is told in such words and is about something else: rates, other parts of a request.
OTHERWISE = re.compile(
    r"per (second|min|hour|day)|\b[TR]P[MD]\b|rate.?limit|quota|concurren|queue|took too long|"
    r"timed? ?out|deadline|request (id|header)|\b(an?|the) image\b|unrecogni[sz]ed|not permitted|"
    r"(unknown|unsupported) (param|arg|field|request)", re.I)
# What may be left out of a request, and how a refusal says of such a field that it has to be.
FIELDS = ("temperature", "max_tokens", "max_completion_tokens")
UNWANTED = ("(incompatib|deprecat|extra|unknown|unrecogni|unexpected|valid|support|permit|allow|"
            "accept|availab|must|should|between|range|only|cannot|remov|disabl|forbid|no longer)")

# How an endpoint says in the finish_reason of a choice that it is no reply, or one that was cut.
FAILED = re.compile("error|fail|abort|cancel|network|resource|overload|timeout|rate.?limit|"
                    "unavailable", re.I)
FILTERED = re.compile("filter|safety|sensitive|refus|prohibit|recitation|blocklist|guardrail|spii|"
                      "language|malformed|unexpected", re.I)
CUT = re.compile("length|max_?(output_?)?tokens|context", re.I)
WHOLE = re.compile("|stop.*|eos.*|end.*|complete.*", re.I)

# Names of thoughts: in one of a field, or of a tag.
THINKS = ("think|thought|reason|reflect|analysis|deliberat|rationale|scratchpad|monologue|ponder|"
          "planning")
MORE = r"[\w:.-]{0,20}"
NAME = f"{MORE}(?:{THINKS}){MORE}"
ATTRIBUTES = r"""(?:\s+[\w:-]+\s*=\s*(?:"[^"]*"|'[^']*'|[^\s"'>]+))*\s*"""
ENDING = r"(?:<\|?|◁)(?:/|end_(?:of_)?)"  # of what such a mark begins with
# Marks in a text, of tags and of control tokens. The first one counts, then the next behind it.
MARKS = re.compile(rf"""
    (?P<thought>  # up to its end; or without one, up to the text's
        (?:<\|?|◁)(?!end){MORE}(?P<kind>{THINKS}){MORE}{ATTRIBUTES}
        (?: /> | (?:\|?>|▷) (?: .*? {ENDING}{MORE}(?P=kind){MORE}\s*(?:\|?>|▷) | .* ))
      | \[(?P<name>{NAME})\] .{{0,9999}}? \[/(?P=name)\] | \A\s* (?-i:\[THINK\]) .*
      | <\|channel\|>(?!\s*final) .*? (?: <\|end\|> | (?=<\|(?:start|channel)\|>) | \Z)
      | <\|channel> .*? (?: <channel\|> | \Z))
  | (?P<begins>  # a reply: before it are thoughts without a beginning, or it says whose reply it is
        {ENDING}{NAME}\s*(?:\|?>|▷) | \[/{NAME}\] | \Aanalysis .* assistantfinal
      | <\|(?:begin_of|start)_(?:solution|response|answer)\|>
      | (?:<\|end\|>\s*)? (?:<\|start\|>\s*assistant\s*)? <\|channel\|>\s*final [^<]*
        (?:<\|constrain\|>[^<]*)? <\|message\|>
      | \A\s*<\|(?:im_start|start|start_header_id)\|>\s*assistant\s*(?:<\|end_header_id\|>)?)
  | (?P<ends>  # a reply
        </s> | <eos> | <turn\|> | <(?:end|start)_of_(?:turn|utterance)>
      | <[|｜](?:im_(?:end|start)|eot_id|eom_id|end|return|call|start(?:_header_id)?|user
        |end[_▁]?(?:of[_▁]?)?(?:text|turn|sentence|solution|response|answer)(?:_token)?)[|｜]>)
  | (?P<quoted>  # in which there are no marks: an action, a string of code, a page
        \[(?:[^\[\]\n]|\[[^\[\]\n]*\])*\] | (?<!\d)"(?:\\.|[^"\\\n])*" | (?<!\w)'[^'\n]*'(?!\w)
      | (?<!`)`[^`\n]+`(?!`) | <s>[^<\n]*</s>)
""", re.I | re.S | re.X)


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

    def __init__(self, problem: str, wait: float = 0.0):
        super().__init__(problem)
        self.wait = wait  # seconds that the endpoint asks for


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
            The reply, and its usage by the names in USAGE, but for cut_prompts; `unreported` is 1
            where the endpoint reports no tokens.

        Raises:
            ContextFull: The messages are too long for the model.
            NotAnswered: The endpoint refuses these messages alone.
            EndpointError: The last attempt failed, too.
        """
        said = []
        for message in messages:
            said.append(message if message["content"].strip() else message | {"content": NO_REPLY})
        problem = "stopped"
        for attempt in range(TRIES):
            if self.stopped.is_set():
                break
            try:
                reply, used = self.ask_once(said)
                return reply, dict(used, retries=attempt)
            except Passing as fault:
                problem = f"{fault} (attempt {attempt + 1})"
                wait = max(fault.wait, min(2.0**attempt, 60) * random.uniform(0.5, 1))
            if attempt + 1 < TRIES:
                self.stopped.wait(wait)
        raise EndpointError(self.told(problem))

    def ask_once(self, messages: list[dict]) -> tuple[str, dict]:
        """The reply to one request and its usage; else one of the errors above. A field that the
        endpoint doesn't take is left out, and it is asked again."""
        while True:
            sent = self.body | dict(messages=messages)
            try:
                status, text, wait = self.post(sent)
                if status == 200:
                    answer = json.loads(text)
                    status = status_in(answer)
                if status == 200:
                    return self.read(answer, text)
            except (requests.RequestException, HTTPError, LookupError, TypeError, ValueError,
                    AttributeError, OverflowError, RecursionError) as error:
                raise Passing(f"{type(error).__name__}: {error}") from None
            problem = f"status {status}: {self.without_key(text)[:200]}"
            long = TOO_LONG.search(text) and not OTHERWISE.search(text)
            if long and (status in OF_LENGTH or status >= 500):
                raise ContextFull(self.told(problem))
            if status in PASSING or status >= 500:
                raise Passing(problem, wait)
            if not self.leaves_out(status, text, sent):
                kind = NotAnswered if status in REFUSING else EndpointError
                raise kind(self.told(problem))

    def post(self, body: dict) -> tuple[int, str, float]:
        """Status, text, and the seconds to wait that it asks for. NotAnswered where the text is too
        long."""
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
            return answer.status_code, text.decode(errors="replace"), wait_of(answer.raw)

    def leaves_out(self, status: int, text: str, sent: dict) -> bool:
        """Whether a refusal is about fields that were sent. From now on they are not, which is
        said, or they are by the name that the endpoint asks for."""
        if status not in (400, 422):
            return False
        refused = [name for name in FIELDS if name in sent and is_unwanted(name, text)]
        for name in refused:
            value = self.body.pop(name, None)  # None: beside others that have done it
            if value is None:
                continue
            if name == "max_tokens" and "max_completion_tokens" in text:
                self.body["max_completion_tokens"] = value
            else:
                tqdm.write(f"{self.url} takes no {name}: its own is used", file=sys.stderr)
        return bool(refused)

    def read(self, answer: dict, text: str) -> tuple[str, dict]:
        """The reply and the usage in an answer; an error of any kind where it is none.

        Raises:
            Passing: It is one that failed halfway.
            ContextFull, NotAnswered, OnlyThoughts: It says so.
        """
        said = self.without_key(text)[:200]
        choice = answer["choices"][0]
        used = answer.get("usage") or {}
        message = choice["message"]
        ends = str(choice.get("finish_reason") or "")
        if FAILED.search(ends):
            raise Passing(f"finish_reason {ends}: {said}")
        if FILTERED.search(ends) or any(part.get("refusal") for part in parts_of(message)):
            raise NotAnswered(self.told(f"a filter took the reply: {said}"))
        if message.get("tool_calls") or message.get("function_call"):
            raise NotAnswered(self.told(
                f"it calls functions, where a reply has to be text: {said}; start the server "
                "without a parser of tool calls"))

        reply, thought = reply_in(text_of(message.get("content")))
        if not reply.strip():
            if "context" in ends.lower():
                raise ContextFull(self.told(f"finish_reason {ends}: {said}"))
            if thought or CUT.search(ends) or thinks(message, used):
                raise OnlyThoughts(self.told(
                    f"it thought and said nothing (finish_reason {ends or 'none'}); raise "
                    "--max-new-tokens, or let it think less"))
            if not WHOLE.fullmatch(ends):
                raise NotAnswered(self.told(f"there is no reply: {said}"))
        if len(self.key) >= 16:  # shorter ones, such as EMPTY, are words and no secrets
            reply = self.without_key(reply)
        usage = dict(requests=1, unreported=int(not used), cut_replies=int(bool(CUT.search(ends))))
        for name in "prompt_tokens", "completion_tokens":
            usage[name] = max(0, int(used.get(name) or 0))
        return reply, usage

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


def wait_of(answer) -> float:
    """Seconds that a Retry-After asks for, 0 where there is none or it is nonsense."""
    try:
        return min(Retry().get_retry_after(answer) or 0.0, LONGEST)
    except (HTTPError, ValueError, OverflowError):
        return 0.0


def is_unwanted(name: str, text: str) -> bool:
    """Whether a text names a field, and says close by that it is not wanted as it is."""
    close = rf"\b{name}\b.{{0,100}}{UNWANTED}|{UNWANTED}.{{0,100}}\b{name}\b"
    return bool(re.search(close, text, re.I | re.S))


def status_in(answer: dict) -> int:
    """The status that an answer of status 200 should have: that of an error at its top, in its
    choice, or in the message of that; 500, where it has no choice or the error has none."""
    if answer.get("choices"):
        choice = answer["choices"][0]
        fault = answer.get("error") or choice.get("error") or choice["message"].get("error")
        if not fault:
            return 200
    else:
        fault = answer.get("error") or answer
    code = str(fault.get("code")) if isinstance(fault, dict) else ""
    return int(code) if re.fullmatch(r"[45]\d\d", code) else 500


def parts_of(message: dict) -> list[dict]:
    """A message and the parts of its content, where it has some that are more than text."""
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return [message, *(part for part in parts if isinstance(part, dict))]


def text_of(content: str | list | None) -> str:
    """The text of a message's content, which may stand in parts; those of thoughts are none. Half
    a surrogate pair, which is no text, becomes the mark of what cannot be shown."""
    if isinstance(content, list):
        texts = []
        for part in content:
            if isinstance(part, str):
                texts.append(part)
            elif part.get("type") in (None, "text", "output_text") and not part.get("thought"):
                texts.append(part.get("text") or "")
        content = "".join(texts)
    if not isinstance(content, str | None):
        raise TypeError(f"content is {content!r:.40}, which is no text.")
    return (content or "").encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def reply_in(text: str) -> tuple[str, bool]:
    """What is said in a text, without thoughts and end tokens; whether there are thoughts. A text
    without either stays as it is."""
    said = ""
    thought = False
    at = 0
    for mark in MARKS.finditer(text):
        kind = mark.lastgroup
        if kind == "quoted":
            continue
        said += text[at:mark.start()]
        at = mark.end()
        if kind == "thought":
            thought = True
        elif kind == "begins":
            thought = thought or said.strip() != ""
            said = ""
        else:
            at = len(text)
            break
    said += text[at:]
    return (text if said == text else said.strip()), thought


def thinks(message: dict, used: dict) -> bool:
    """Whether a field of a message, or of a part of its content, holds thoughts, or tokens were
    spent on some that no message shows."""
    details = used.get("completion_tokens_details") or {}
    if details.get("reasoning_tokens"):
        return True
    for part in parts_of(message):
        for name, value in part.items():
            called = value if name == "type" else name
            if value and re.search(THINKS, str(called), re.I):
                return True
    return False
