"""Client for an OpenAI-compatible chat endpoint: it sends messages and returns a reply.

The API key comes from an environment variable. It is written to no file, log or message.
"""

import ast
import bisect
import json
import os
import random
import re
import sys
import threading
import time
from collections import defaultdict, deque
from typing import NamedTuple

import requests
from tqdm import tqdm
from urllib3.exceptions import HTTPError
from urllib3.util import Retry

from common.settings import UsageError
from envs import EnvError

KEY = "OPENAI_API_KEY"  # name of the environment variable
TRIES = 8               # maximum number of attempts [ours]
TIMEOUT = 300           # timeout of a response, in seconds [ours]
MAX_WAIT = 120          # maximum wait between two attempts, in seconds [ours]
MAX_BYTES = 1_000_000   # maximum size of a response, in bytes [ours]
BYTES_PER_TOKEN = 4     # for our own estimate [OpenAI's rule of thumb for English]
MAX_ERROR = 4000        # maximum size of an error's message that is judged, in characters [ours]
END_TOKENS = 16         # allowance for special tokens that a server counts in a reply [ours]
# Numbers that are summed over the responses of a phase. The caller finds cut_prompts.
USAGE = ("requests", "retries", "unreported", "cut_replies", "cut_prompts", "prompt_tokens",
         "completion_tokens")
NO_REPLY = "(no reply)"  # replaces an empty turn, which some servers refuse

PASSING = {408, 409, 425, 429}        # transient statuses, beside 500 and above
REFUSING = {400, 403, 413, 422, 451}  # statuses that may concern these messages alone
OF_LENGTH = {400, 413, 422}           # statuses that may concern their length, beside 500 and above

# Fields of an error's body that are read. All others are skipped: they may quote the prompt.
CODES = ("code", "error_code", "status")
TYPES = ("type", "error_type")
PARAMS = ("param", "loc")
NESTED = ("error", "errors", "innererror", "message", "msg", "error_message", "detail", "details",
          "metadata", "raw", "choices")
# What a code or a type says about an error. The first pattern that matches decides.
KINDS = {
    "filter": re.compile("filter|policy|moderat|safety|sensitiv|inspect|flagg|prohibit|block|harm|"
                         "jailbreak|inappropriate|guardrail|censor", re.I),
    "other": re.compile("rate_?limit|quota|billing|throttl|too_?many_?requests|api_?key|auth|image|"
                        "per_?(second|min|hour|day)|permission|not_?found|time_?out|overload",
                        re.I),
    "length": re.compile(r"context|(prompt|input|message|content|token)\w*(long|large|length|"
                         r"exceed|limit|overflow)|(request|entity|payload)_?too_?large", re.I),
}
# How a message says that the prompt, or a reply of `max_tokens`, does not fit.
TOO_LONG = re.compile(
    r"context.?(length|window|size|limit|overflow)|exceeds? context|"
    r'(prompt|input(?! should)|message|conversation|request|token)[^.;:"]{0,70}'
    r"(too (long|large)|exceed|longer|greater than|less than|fewer|over the|at most|maximum|"
    r"should be shorter|<|length is)|only supports (prompt|up to)|"
    r'(too many|number of|reduce|range of)[^.;:"]{0,30}(token|length|prompt)|'
    r"max\w{0,20}tokens\b.{0,60}(too large|at most|less than|maximum|<)|at least 1, got -|"
    r"content'?: string too long", re.I)
# Messages in similar words about something else: rates, filters, other parts of a request.
OTHERWISE = re.compile(
    r"per (second|min|hour|day)|\b[TR]P[MD]\b|rate.?limit|quota|concurren|queue|took too long|"
    r"timed? ?out|deadline|request (id|header)|\b(an?|the) image\b|unrecogni[sz]ed|not permitted|"
    r"(unknown|unsupported) (param|arg|field|request)", re.I)
OF_FILTER = re.compile(r"filter|\bpolic(y|ies)|flagged|moderation|safety|inappropriate|harmful|"
                       "prohibited", re.I)
QUOTED_PARAM = re.compile(r"[\w.\[\]-]{0,60}")  # a quoted name is part of a message
# Quoted text. One whose end was cut off runs to the end; an apostrophe in a word ends none.
QUOTES = re.compile(r"""
    ```.*?(?:```|\Z) | `([^`]*)` | (?<!\d)"((?:\\.|[^"\\])*)\\?(?:"|\Z) | “([^”]*)”? | «([^»]*)»?
  | „([^“”]*)[“”]? | (?<!\w)'((?:[^']|(?<=\w)'(?=\w))*)'(?!\w) | ‘((?:[^’]|’(?=\w))*)(?:’|\Z)
""", re.S | re.X)
# Optional fields of a request, and words by which a message refuses one.
FIELDS = ("temperature", "max_tokens", "max_completion_tokens")
UNWANTED = ("(incompatib|deprecat|extra|unknown|unrecogni|unexpected|valid|support|permit|allow|"
            "accept|availab|must|should|between|range|only|cannot|remov|disabl|forbid|no longer)")

# Values of finish_reason: the response failed, was filtered, was cut, or is complete.
FAILED = re.compile("error|fail|abort|cancel|network|resource|overload|timeout|rate.?limit|"
                    "unavailable", re.I)
FILTERED = re.compile("filter|safety|sensitive|refus|prohibit|recitation|blocklist|guardrail|spii|"
                      "language|malformed|unexpected", re.I)
CUT = re.compile("length|max_?(output_?)?tokens|context", re.I)
WHOLE = re.compile("|stop.*|eos.*|end.*|complete.*", re.I)

# A field or a tag is of reasoning if its name has one of these words. Examples of tags are <think>,
# [THINK], ◁think▷, <seed:think>, <|begin_of_thought|> and <|END_THINKING|>. All repeats in the
# pattern of a tag are bounded, so that matching takes linear time.
REASONING = "think|thought|reason|reflect"
ATTRIBUTES = (r"""(?:\s{1,9}[\w:-]{1,30}\s?=\s?"""
              r"""(?:"[^"<>]{0,99}"|'[^'<>]{0,99}'|[^\s"'<>]{1,99})){0,9}""")
TAG = rf"""
    (?: (?P<square>\[) | (?P<triangle>◁) | <[|｜]? )
    (?P<closes>/|end_(?:of_)?)? [\w:.-]{{0,20}}? (?P<word>{REASONING}) [\w:.-]{{0,20}} {ATTRIBUTES}
    \s{{0,9}} (?P<empty>/)? (?(square)\]|(?(triangle)▷|[|｜]?>))
  | <\|(?P<word2>channel)> | <(?P<closes2>channel)\|>  # Gemma 4
"""
TAGS = re.compile(TAG, re.I | re.X)
# The start of harmony's final channel, which is the reply (gpt-oss).
FINAL = (r"(?:<\|end\|>\s{0,9})?(?:<\|start\|>\s{0,9}assistant\s{0,9})?<\|channel\|>\s{0,9}final"
         r"[^<]{0,40}(?:<\|constrain\|>[^<]{0,40})?<\|message\|>")
# A server that drops special tokens leaves "assistantfinal" of it.
FINALS = re.compile(rf"{FINAL}|assistantfinal", re.I)
MARKS = re.compile(rf"""
    (?P<tag> {TAG})
  | (?P<final> {FINAL})
  | (?P<channel> <\|channel\|> | \Aanalysis(?=.*assistantfinal))
  | (?P<start> <[|｜][\w▁]{{0,20}}(?:start|begin|assistant)[\w▁]{{0,20}}[|｜]>
        (?!\s{{0,9}}(?:user|system|tool)) \s{{0,9}} (?:assistant)? \s{{0,9}}
        (?:<\|end_header_id\|>)?)
  | (?P<end> </s> | <eos> | <(?:end|start)_of_\w{{1,30}}> | <[|｜][\w▁./-]{{1,40}}[|｜]?>
      | <[\w▁./-]{{1,40}}[|｜]> | (?-i:(?<!click)(?<!search)\[(?:EOS|EOT|END)\]) | \[/INST\])
  | (?P<quoted>  # an action, a string of code or a page, in which nothing is a mark
        \[(?:[^\[\]\n]|\[[^\[\]\n]*\])*\] | (?<![\d\\])"(?:\\.|[^"\\\n])*" | (?<!\w)'[^'\n]*'(?!\w)
      | (?<!`)`[^`\n]+`(?!`) | <s>[^<\n]*</s>)
""", re.I | re.S | re.X)


class EndpointError(EnvError):
    """The endpoint refuses all requests, or every attempt failed. The message is one line."""


class NotAnswered(EndpointError):
    """The endpoint refuses these messages for good, as a content filter does."""


class OnlyThoughts(NotAnswered):
    """The response has reasoning content and no reply."""


class ContextFull(Exception):
    """The messages and the requested reply do not fit into the model's context."""


class Passing(Exception):
    """A transient error."""

    def __init__(self, problem: str, wait: float = 0.0):
        super().__init__(problem)
        self.wait = wait  # seconds, as the endpoint requests


class Endpoint:
    """Calls the model: messages -> (reply, usage). It retries transient errors with backoff."""

    def __init__(self, url: str, name: str, temperature: float, max_tokens: int):
        path = "/chat/completions"
        self.url = url.rstrip("/").removesuffix(path) + path
        self.body = dict(model=name, temperature=temperature, max_tokens=max_tokens)
        self.stopped = threading.Event()  # once set, no request is sent and no wait goes on
        self.key = os.environ.get(KEY, "").strip()
        if re.search(r"[^!-~]", self.key):
            raise UsageError(f"{KEY} has a character that no key has; set it again")

    def __call__(self, messages: list[dict]) -> tuple[str, dict]:
        """Sends messages, and retries if an error is transient.

        Returns:
            The reply, and its usage with the keys of USAGE except cut_prompts. `unreported` is 1
            if the endpoint reports no tokens. `context_tokens` is the length of the conversation
            that ends with this reply, without reasoning.

        Raises:
            ContextFull: The messages are too long for the model.
            NotAnswered: The endpoint refuses these messages alone.
            EndpointError: The last attempt failed, too.
        """
        filled = []
        for message in messages:
            is_empty = not message["content"].strip()
            filled.append(message | {"content": NO_REPLY} if is_empty else message)
        problem = "stopped"
        for attempt in range(TRIES):
            if self.stopped.is_set():
                break
            try:
                reply, usage = self.request_once(filled)
            except Passing as error:
                problem = f"{error} (attempt {attempt + 1})"
                wait = max(error.wait, min(2.0**attempt, 60) * random.uniform(0.5, 1))
                if attempt + 1 < TRIES:
                    self.stopped.wait(wait)
                continue
            prompt_tokens = usage["prompt_tokens"] or sum(
                estimated_tokens(message["content"]) for message in filled)
            context_tokens = prompt_tokens + usage.pop("reply_tokens")
            return reply, dict(usage, retries=attempt, context_tokens=context_tokens)
        raise EndpointError(self.in_one_line(problem))

    def request_once(self, messages: list[dict]) -> tuple[str, dict]:
        """Returns the reply to one request and its usage, or raises one of the errors above. If
        the endpoint refuses an optional field, the request is sent again without it."""
        while True:
            body = self.body | dict(messages=messages)
            try:
                status, text, wait = self.post(body)
                if status == 200:
                    response = json.loads(text)
                    status = status_in(response)
                if status == 200:
                    return self.read(response, text)
            except (requests.RequestException, HTTPError, LookupError, TypeError, ValueError,
                    AttributeError, OverflowError, RecursionError) as error:
                raise Passing(f"{type(error).__name__}: {error}") from None
            problem = f"status {status}: {self.without_key(text)[:200]}"
            fault = Fault.read(text)
            kind = fault.kind()
            if kind == "length" and (status in OF_LENGTH or status >= 500):
                raise ContextFull(self.in_one_line(problem))
            if kind == "filter" and (status in REFUSING or status >= 500):
                raise NotAnswered(self.in_one_line(problem))
            if status in PASSING or status >= 500:
                raise Passing(problem, wait)
            if kind or status not in (400, 422) or not self.leaves_out(fault, body):
                error = NotAnswered if status in REFUSING else EndpointError
                raise error(self.in_one_line(problem))

    def post(self, body: dict) -> tuple[int, str, float]:
        """Sends one request. Returns the status, the text, and the seconds to wait that the
        endpoint requests. Raises NotAnswered if the text is too long."""
        text = bytearray()
        deadline = time.monotonic() + TIMEOUT
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        with requests.post(self.url, json=body, headers=headers, timeout=(10, TIMEOUT),
                           auth=lambda request: request,  # else .netrc would replace the key
                           allow_redirects=False, stream=True) as response:
            while part := response.raw.read1(1 << 16, True):
                text += part
                if len(text) > MAX_BYTES:
                    raise NotAnswered(
                        f"{self.url}: the response is longer than {MAX_BYTES:,} bytes")
                if time.monotonic() > deadline:
                    raise requests.Timeout(f"the response took more than {TIMEOUT} seconds")
            return response.status_code, text.decode(errors="replace"), wait_of(response.raw)

    def leaves_out(self, fault: "Fault", body: dict) -> bool:
        """Returns True if an error refuses optional fields of the request. Later requests leave
        these out, with a message, or send them by the name that the endpoint expects."""
        refused = [name for name in FIELDS if name in body and fault.refuses(name)]
        for name in refused:
            value = self.body.pop(name, None)  # None: another thread has removed it
            if value is None:
                continue
            if name == "max_tokens" and "max_completion_tokens" in fault.message:
                self.body["max_completion_tokens"] = value
            else:
                tqdm.write(f"{self.url} refuses {name}: its own default is used", file=sys.stderr)
        return bool(refused)

    def read(self, response: dict, text: str) -> tuple[str, dict]:
        """Returns the reply and the usage in a response. A malformed one raises any error.

        Raises:
            Passing: The response failed halfway.
            ContextFull, NotAnswered, OnlyThoughts: The response has no reply.
        """
        excerpt = self.without_key(text)[:200]
        choice = response["choices"][0]
        usage = response.get("usage")
        usage = usage if isinstance(usage, dict) else {}
        message = choice["message"]
        finish = str(choice.get("finish_reason") or "")
        if FAILED.search(finish):
            raise Passing(f"finish_reason {finish}: {excerpt}")
        if FILTERED.search(finish) or any(part.get("refusal") for part in parts_of(message)):
            raise NotAnswered(self.in_one_line(f"the reply was filtered: {excerpt}"))
        if message.get("tool_calls") or message.get("function_call"):
            raise NotAnswered(self.in_one_line(
                f"the response calls functions, but a reply must be text: {excerpt}; start the "
                "server without a tool call parser"))

        reply, reasons = reply_in(text_of(message.get("content")))
        reasons = reasons or thinks(message, usage)
        if not reply.strip():
            if "context" in finish.lower():
                raise ContextFull(self.in_one_line(f"finish_reason {finish}: {excerpt}"))
            if reasons or CUT.search(finish):
                raise OnlyThoughts(self.in_one_line(
                    "the response has reasoning content and no reply (finish_reason "
                    f"{finish or 'none'}); raise --max-new-tokens, or limit the reasoning"))
            if not WHOLE.fullmatch(finish):
                raise NotAnswered(self.in_one_line(f"there is no reply: {excerpt}"))
        if len(self.key) >= 16:  # shorter keys, such as EMPTY, are words and not secret
            reply = self.without_key(reply)
        prompt, completion = count(usage, "prompt_tokens"), count(usage, "completion_tokens")
        return reply, dict(
            requests=1, unreported=int(prompt + completion == 0),
            cut_replies=int(bool(CUT.search(finish))), prompt_tokens=prompt,
            completion_tokens=completion, reply_tokens=reply_tokens(reply, usage, reasons))

    def in_one_line(self, problem: str) -> str:
        """Returns a problem in one line, without the key, and with its usual causes."""
        line = f"{self.url}: {self.without_key(' '.join(problem.split()))}"
        if problem.startswith("status 404") and "/v1/" not in self.url:
            line += " (most addresses end in /v1)"
        if not self.key:
            line += f" (no key was sent: {KEY} is not set)"
        return line

    def without_key(self, text: str) -> str:
        return text.replace(self.key, "***") if self.key else text


# -------------------------------------------------------------------------------------- errors


class Fault(NamedTuple):
    """The body of an error, in parts. An error may quote the prompt, so its message counts least,
    and quoted text in it does not count."""
    words: list[str]   # the codes, then the types
    params: list[str]  # the fields of the request that it names, such as messages.0.content
    message: str       # the text outside quotes

    @classmethod
    def read(cls, text: str) -> "Fault":
        """Reads a body: JSON, or text that holds JSON or a Python dict, as proxies forward it."""
        codes, types, params, messages = [], [], [], []
        pending = deque([text])  # the outermost part comes first
        while pending:
            value = pending.popleft()
            if isinstance(value, list):
                pending.extend(value)
            elif isinstance(value, dict):
                codes += [value.get(name) for name in CODES]
                types += [value.get(name) for name in TYPES]
                params += [value.get(name) for name in PARAMS]
                pending.extend(value.get(name) for name in NESTED)
            elif isinstance(value, str):
                before, nested, after = parsed(value)
                pending.append(nested)
                messages.append(f"{before} {after}")
        # Codes that are numbers are skipped, because they repeat the HTTP status.
        words = [str(word) for word in codes + types if re.match("[A-Za-z][^ ]*$", str(word))]
        paths = [".".join(map(str, p)) if isinstance(p, list) else str(p or "") for p in params]
        paths = [re.sub(r"^body\.?", "", path) for path in paths]
        return cls(words, [path for path in paths if re.search("[a-z]", path)],
                   QUOTES.sub(quoted_name, " ".join(messages))[:MAX_ERROR])

    def kind(self) -> str:
        """Returns "length", "filter", "other", or "" if the error does not say."""
        for word in self.words:
            for kind, pattern in KINDS.items():
                if pattern.search(word):
                    return kind
        of_prompt = [p for p in self.params if re.search("message|prompt|input|content|token", p)]
        if self.params and not of_prompt or OF_FILTER.search(self.message):
            return ""
        is_long = TOO_LONG.search(self.message) and not OTHERWISE.search(self.message)
        return "length" if is_long else ""

    def refuses(self, name: str) -> bool:
        """Returns True if the error is about this field of the request."""
        if self.params:
            return any(re.search(rf"\b{name}\b", param) for param in self.params)
        close = rf"\b{name}\b.{{0,100}}{UNWANTED}|{UNWANTED}.{{0,100}}\b{name}\b"
        return (not OF_FILTER.search(self.message)
                and re.search(close, self.message, re.I | re.S) is not None)


def parsed(text: str) -> tuple[str, list, str]:
    """Parses the JSON objects or Python dicts in a text. Returns the text before them, the list of
    them, and the text after them."""
    start, end = text.find("{"), text.rfind("}") + 1
    if 0 <= start < end:
        for parse in json.loads, ast.literal_eval:
            try:
                return text[:start], list(parse(f"[{text[start:end]}]")), text[end:]
            except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
                pass
    return text, [], ""


def quoted_name(quote: re.Match) -> str:
    """Returns a quotation without its text, unless this is a name."""
    inside = quote[quote.lastindex] if quote.lastindex else quote[0]
    return quote[0] if QUOTED_PARAM.fullmatch(inside) else " "


def status_in(response: dict) -> int:
    """Returns the status that a response with status 200 should have. It is that of an error at
    the top level, in the choice or in its message. Without a choice or a status it is 500."""
    if response.get("choices"):
        choice = response["choices"][0]
        fault = response.get("error") or choice.get("error") or choice["message"].get("error")
        if not fault:
            return 200
    else:
        fault = response.get("error") or response
    code = str(fault.get("code")) if isinstance(fault, dict) else ""
    return int(code) if re.fullmatch(r"[45]\d\d", code) else 500


def wait_of(response) -> float:
    """Returns the seconds of a Retry-After header, or 0 if there is none or it is malformed."""
    try:
        return min(Retry().get_retry_after(response) or 0.0, MAX_WAIT)
    except (HTTPError, ValueError, OverflowError):
        return 0.0


# ------------------------------------------------------------------------------------- replies


def parts_of(message: dict) -> list[dict]:
    """Returns a message and those parts of its content that are objects."""
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    return [message, *(part for part in parts if isinstance(part, dict))]


def text_of(content: str | list | None) -> str:
    """Returns the text of a message. Its content may be a list of parts, of which reasoning parts
    are skipped. A lone surrogate becomes the replacement character."""
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
    """Extracts the reply from a text that may hold reasoning tags and special tokens.

    Returns:
        The reply up to the first end token, without reasoning; and True if there is reasoning. A
        text without either stays as it is.
    """
    closings = defaultdict(list)  # word of a tag -> the ends of its closing tags
    for tag in TAGS.finditer(text):
        if tag["closes"] or tag["closes2"]:
            closings[word_of(tag)].append(tag.end())
    first = len(text) - len(text.lstrip())
    pieces = []
    reasons = False
    position = 0
    while mark := MARKS.search(text, position):
        kind = mark.lastgroup
        pieces.append(text[position:mark.start()])
        position = mark.end()
        if kind == "quoted":
            pieces.append(mark[0])
        elif kind == "tag" and not (mark["closes"] or mark["closes2"]):
            ends = closings[word_of(mark)]
            later = bisect.bisect(ends, position)
            opens = mark["word"] and not mark["empty"]
            is_first = mark["word"] == "THINK" and mark.start() == first
            if opens and mark["square"] and later == len(ends) and not is_first:
                pieces.append(mark[0])  # brackets in code, such as x = [reason]
                continue
            reasons = True
            if not mark["empty"]:
                position = ends[later] if later < len(ends) else len(text)
        elif kind in ("tag", "final", "channel"):  # all text before it is reasoning
            reasons = reasons or kind == "channel" or any(piece.strip() for piece in pieces)
            pieces = []
            if kind == "channel":
                final = FINALS.search(text, position)
                position = final.end() if final else len(text)
        elif kind == "end" or any(piece.strip() for piece in pieces):
            position = len(text)
        else:  # the header of the reply
            pieces = []
    reply = "".join(pieces) + text[position:]
    return (text if reply == text else reply.strip()), reasons


def word_of(tag: re.Match) -> str:
    return (tag["word"] or tag["word2"] or tag["closes2"]).lower()


def thinks(message: dict, usage: dict) -> bool:
    """Returns True if a message, or a part of its content, has a field of reasoning content, or if
    the usage reports reasoning tokens."""
    if reasoning_tokens(usage):
        return True
    for part in parts_of(message):
        for name, value in part.items():
            label = value if name == "type" else name
            if value and re.search(REASONING, str(label), re.I):
                return True
    return False


def count(usage: dict, name: str) -> int:
    """Returns a number of tokens, or 0 if it is absent or not a positive number."""
    try:
        return max(0, int(usage[name]))
    except (LookupError, TypeError, ValueError, OverflowError):
        return 0


def reasoning_tokens(usage: dict) -> int:
    details = usage.get("completion_tokens_details")
    return count(details, "reasoning_tokens") or count(usage, "reasoning_tokens")


def estimated_tokens(text: str) -> int:
    return -(-len(text.encode()) // BYTES_PER_TOKEN)


def reply_tokens(reply: str, usage: dict, reasons: bool) -> int:
    """Returns the tokens of a reply without its reasoning.

    They are estimated if the usage reports no tokens, or has an unknown number of reasoning tokens.
    A text has at most as many tokens as bytes, so a larger number includes hidden reasoning.
    """
    completion, reasoning = count(usage, "completion_tokens"), reasoning_tokens(usage)
    if 0 < reasoning < completion:
        return completion - reasoning
    estimate = estimated_tokens(reply)
    if completion == 0:
        return estimate
    hides = reasons or completion > len(reply.encode()) + END_TOKENS
    return min(estimate, completion) if hides else completion
