"""Client for an OpenAI-compatible chat endpoint. It sends messages and returns a reply.

The API key is read from an environment variable. It is never written to a file, a log or an error
message.
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
from environments.user_files import FAULTS
from envs import EnvError

KEY = "OPENAI_API_KEY"  # name of the environment variable
TRIES = 8               # maximum number of attempts per call [ours]
TIMEOUT = 300           # maximum time for one response, in seconds [ours]
MAX_WAIT = 120          # maximum wait between two attempts, in seconds [ours]
MAX_BYTES = 1_000_000   # maximum size of a response, in bytes [ours]
BYTES_PER_TOKEN = 4     # the average that token counts are estimated with [OpenAI, for English]
MAX_ERROR = 4000        # only this many characters of an error message are classified [ours]
END_TOKENS = 16         # maximum number of special tokens that a reply's usage may include [ours]
# Usage numbers that are summed over the responses of a phase. `Endpoint` returns all of them except
# cut_prompts, which `Paid` in evaluate.py adds.
USAGE = ("requests", "retries", "unreported", "cut_replies", "cut_prompts", "prompt_tokens",
         "completion_tokens")
NO_REPLY = "(no reply)"  # sent instead of an empty message, which some servers reject

# HTTP statuses by their possible meaning. Transient errors and prompts that are too long may also
# have a status of 500 or above.
PASSING = {408, 409, 425, 429}        # transient error
REFUSING = {400, 403, 413, 422, 451}  # the server refuses these messages, but not all messages
OF_LENGTH = {400, 413, 422}           # the prompt is too long

# Fields that are read in the body of an error. Other fields are skipped, because they may quote the
# prompt, whose words would be mistaken for the reason of the error.
CODES = ("code", "error_code", "status")
TYPES = ("type", "error_type")
PARAMS = ("param", "loc")
NESTED = ("error", "errors", "innererror", "message", "msg", "error_message", "detail", "details",
          "metadata", "raw", "choices")
# Patterns that classify an error by its code or type. They are tried in this order, and the first
# one that matches gives the kind of the error.
KINDS = {
    "filter": re.compile("filter|policy|moderat|safety|sensitiv|inspect|flagg|prohibit|block|harm|"
                         "jailbreak|inappropriate|guardrail|censor", re.I),
    "other": re.compile("rate_?limit|quota|billing|throttl|too_?many_?requests|api_?key|auth|image|"
                        "per_?(second|min|hour|day)|permission|not_?found|time_?out|overload",
                        re.I),
    "length": re.compile(r"context|(prompt|input|message|content|token)\w*(long|large|length|"
                         r"exceed|limit|overflow)|(request|entity|payload)_?too_?large", re.I),
}
# Matches error messages about a prompt that is too long for the context, or about a value of
# max_tokens that is too large.
TOO_LONG = re.compile(
    r"context.?(length|window|size|limit|overflow)|exceeds? context|"
    r'(prompt|input(?! should)|message|conversation|request|token)[^.;:"]{0,70}'
    r"(too (long|large)|exceed|longer|greater than|less than|fewer|over the|at most|maximum|"
    r"should be shorter|<|length is)|only supports (prompt|up to)|"
    r'(too many|number of|reduce|range of)[^.;:"]{0,30}(token|length|prompt)|'
    r"max\w{0,20}tokens\b.{0,60}(too large|at most|less than|maximum|<)|at least 1, got -|"
    r"content'?: string too long", re.I)
# Matches error messages that TOO_LONG would match by mistake. They are about another problem, such
# as rate limits, timeouts or unknown parameters.
OTHERWISE = re.compile(
    r"per (second|min|hour|day)|\b[TR]P[MD]\b|rate.?limit|quota|concurren|queue|took too long|"
    r"timed? ?out|deadline|request (id|header)|\b(an?|the) image\b|unrecogni[sz]ed|not permitted|"
    r"(unknown|unsupported) (param|arg|field|request)", re.I)
OF_FILTER = re.compile(r"filter|\bpolic(y|ies)|flagged|moderation|safety|inappropriate|harmful|"
                       "prohibited", re.I)
QUOTED_PARAM = re.compile(r"[\w.\[\]-]{0,60}")  # a quoted string that may be a parameter's name
# Matches a quoted string. If its closing quote was cut off, it extends to the end of the text. An
# apostrophe inside a word does not close a quoted string.
QUOTES = re.compile(r"""
    ```.*?(?:```|\Z) | `([^`]*)` | (?<!\d)"((?:\\.|[^"\\])*)\\?(?:"|\Z) | “([^”]*)”? | «([^»]*)»?
  | „([^“”]*)[“”]? | (?<!\w)'((?:[^']|(?<=\w)'(?=\w))*)'(?!\w) | ‘((?:[^’]|’(?=\w))*)(?:’|\Z)
""", re.S | re.X)
# Optional fields of a request. If an error message has the name of such a field close to a word in
# UNWANTED, the endpoint does not accept the field.
FIELDS = ("temperature", "max_tokens", "max_completion_tokens")
UNWANTED = ("(incompatib|deprecat|extra|unknown|unrecogni|unexpected|valid|support|permit|allow|"
            "accept|availab|must|should|between|range|only|cannot|remov|disabl|forbid|no longer)")

# Patterns for finish_reason: the response failed, was filtered, was truncated, or is complete.
FAILED = re.compile("error|fail|abort|cancel|network|resource|overload|timeout|rate.?limit|"
                    "unavailable", re.I)
FILTERED = re.compile("filter|safety|sensitive|refus|prohibit|recitation|blocklist|guardrail|spii|"
                      "language|malformed|unexpected", re.I)
CUT = re.compile("length|max_?(output_?)?tokens|context", re.I)
WHOLE = re.compile("|stop.*|eos.*|end.*|complete.*", re.I)

# Fields and tags whose name contains one of these words hold reasoning content. Examples of such
# tags are <think>, [THINK], ◁think▷, <seed:think>, <|begin_of_thought|> and <|END_THINKING|>. All
# repetitions in the tag pattern are bounded, so that matching takes linear time.
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
# The header of the final channel in gpt-oss's harmony format. The reply follows it.
FINAL = (r"(?:<\|end\|>\s{0,9})?(?:<\|start\|>\s{0,9}assistant\s{0,9})?<\|channel\|>\s{0,9}final"
         r"[^<]{0,40}(?:<\|constrain\|>[^<]{0,40})?<\|message\|>")
# If a server removes the special tokens from this header, only the text "assistantfinal" remains.
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
    """The endpoint refuses all requests, or the last attempt failed. The error message is one
    line."""


class NotAnswered(EndpointError):
    """The endpoint permanently refuses these messages, for example because of a content filter."""


class OnlyThoughts(NotAnswered):
    """The response has reasoning content, but no reply."""


class ContextFull(Exception):
    """The messages and the requested reply do not fit into the model's context."""


class Passing(Exception):
    """A transient error, after which the request is sent again."""

    def __init__(self, problem: str, wait: float = 0.0):
        super().__init__(problem)
        self.wait = wait  # seconds to wait, from the Retry-After header


class Endpoint:
    """A model at a chat endpoint. Calling an `Endpoint` with messages returns (reply, usage).
    Requests are retried with exponential backoff after transient errors."""

    def __init__(self, url: str, name: str, temperature: float, max_tokens: int):
        path = "/chat/completions"
        self.url = url.rstrip("/").removesuffix(path) + path
        self.body = dict(model=name, temperature=temperature, max_tokens=max_tokens)
        self.stopped = threading.Event()  # once set, no request is sent and waiting ends
        self.key = os.environ.get(KEY, "").strip()
        if re.search(r"[^!-~]", self.key):
            raise UsageError(f"{KEY} has a character that no key has; set it again")

    def __call__(self, messages: list[dict]) -> tuple[str, dict]:
        """Sends messages and returns the model's reply. Transient errors are retried.

        Returns:
            The reply, and a dict of usage numbers. The dict has the keys of USAGE except
            cut_prompts. `unreported` is 1 if the endpoint reports no token counts. The dict also
            has `context_tokens`, the length of the conversation up to the end of this reply,
            without reasoning tokens.

        Raises:
            ContextFull: The messages are too long for the model.
            NotAnswered: The endpoint refuses these messages. It may accept others.
            EndpointError: The endpoint refuses all requests, or the last attempt failed.
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
                return reply, dict(usage, retries=attempt)
            except Passing as error:
                problem = f"{error} (attempt {attempt + 1})"
                wait = max(error.wait, min(2.0**attempt, 60) * random.uniform(0.5, 1))
                if attempt + 1 < TRIES:
                    self.stopped.wait(wait)
            except (ContextFull, EndpointError) as error:
                raise type(error)(self.in_one_line(str(error))) from None
        raise EndpointError(self.in_one_line(problem))

    def request_once(self, messages: list[dict]) -> tuple[str, dict]:
        """Sends a request without retries, and returns the reply and its usage.

        Only if the endpoint rejects an optional field, such as temperature, the request is sent
        again without this field. Raises Passing if the error may be transient, ContextFull if the
        prompt is too long, NotAnswered if the endpoint refuses the messages, and EndpointError
        otherwise.
        """
        while True:
            body = self.body | dict(messages=messages)
            try:
                status, text, wait = self.post(body)
                excerpt = self.without_key(text)[:200]
                if status == 200:
                    response = json.loads(text)
                    status = status_in(response)
                if status == 200:
                    return self.read(response, messages, excerpt)
            except (HTTPError, *FAULTS) as error:
                raise Passing(f"{type(error).__name__}: {error}") from None
            problem = f"status {status}: {excerpt}"
            fault = Fault.read(text)
            kind = fault.kind()
            if kind == "length" and (status in OF_LENGTH or status >= 500):
                raise ContextFull(problem)
            if kind == "filter" and (status in REFUSING or status >= 500):
                raise NotAnswered(problem)
            if status in PASSING or status >= 500:
                raise Passing(problem, wait)
            if kind or status not in (400, 422) or not self.leaves_out(fault, body):
                error = NotAnswered if status in REFUSING else EndpointError
                raise error(problem)

    def post(self, body: dict) -> tuple[int, str, float]:
        """Sends one HTTP request. Returns the status, the text of the response, and the seconds to
        wait that its Retry-After header requests. Raises NotAnswered if the text is longer than
        MAX_BYTES."""
        text = bytearray()
        deadline = time.monotonic() + TIMEOUT
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        with requests.post(self.url, json=body, headers=headers, timeout=(10, TIMEOUT),
                           auth=lambda request: request,  # so that .netrc does not replace the key
                           allow_redirects=False, stream=True) as response:
            while part := response.raw.read1(1 << 16, True):
                text += part
                if len(text) > MAX_BYTES:
                    raise NotAnswered(f"the response is longer than {MAX_BYTES:,} bytes")
                if time.monotonic() > deadline:
                    raise requests.Timeout(f"the response took more than {TIMEOUT} seconds")
            return response.status_code, text.decode(errors="replace"), wait_of(response.raw)

    def leaves_out(self, fault: "Fault", body: dict) -> bool:
        """Checks if an error rejects optional fields of the request, and removes these fields from
        later requests.

        A message is printed for each removed field. If the endpoint expects max_completion_tokens
        instead of max_tokens, the field is renamed. Returns True if any field was rejected.
        """
        refused = [name for name in FIELDS if name in body and fault.refuses(name)]
        for name in refused:
            value = self.body.pop(name, None)  # None if another thread has removed the field
            if value is None:
                continue
            if name == "max_tokens" and "max_completion_tokens" in fault.message:
                self.body["max_completion_tokens"] = value
            else:
                tqdm.write(f"{self.url} refuses {name}: its own default is used", file=sys.stderr)
        return bool(refused)

    def read(self, response: dict, messages: list[dict], excerpt: str) -> tuple[str, dict]:
        """Extracts the reply and the usage from a response.

        A malformed response raises an exception such as KeyError or TypeError. The caller catches
        it and repeats the request.

        Args:
            response: The parsed JSON of the response.
            messages: The messages that were sent.
            excerpt: The start of the response as text, for error messages.

        Raises:
            Passing: The finish_reason reports an error that may be transient.
            ContextFull, NotAnswered, OnlyThoughts: The response has no reply.
        """
        choice = response["choices"][0]
        usage = response.get("usage")
        usage = usage if isinstance(usage, dict) else {}
        message = choice["message"]
        finish = str(choice.get("finish_reason") or "")
        if FAILED.search(finish):
            raise Passing(f"finish_reason {finish}: {excerpt}")
        if FILTERED.search(finish) or any(part.get("refusal") for part in parts_of(message)):
            raise NotAnswered(f"the reply was filtered: {excerpt}")
        if message.get("tool_calls") or message.get("function_call"):
            raise NotAnswered(f"the response calls functions, but a reply must be text: {excerpt}; "
                              "start the server without a tool call parser")

        reply, reasons = reply_in(text_of(message.get("content")))
        reasons = reasons or thinks(message, usage)
        if not reply.strip():
            if "context" in finish.lower():
                raise ContextFull(f"finish_reason {finish}: {excerpt}")
            if reasons or CUT.search(finish):
                raise OnlyThoughts(
                    "the response has reasoning content and no reply (finish_reason "
                    f"{finish or 'none'}); raise --max-new-tokens, or limit the reasoning")
            if not WHOLE.fullmatch(finish):
                raise NotAnswered(f"there is no reply: {excerpt}")
        if len(self.key) >= 16:  # a shorter key, such as EMPTY, is a placeholder and not a secret
            reply = self.without_key(reply)
        prompt, completion = count(usage, "prompt_tokens"), count(usage, "completion_tokens")
        sent = prompt or sum(estimated_tokens(message["content"]) for message in messages)
        return reply, dict(
            requests=1, unreported=int(prompt + completion == 0),
            cut_replies=int(bool(CUT.search(finish))), prompt_tokens=prompt,
            completion_tokens=completion,
            context_tokens=sent + reply_tokens(reply, usage, reasons))

    def in_one_line(self, problem: str) -> str:
        """Formats a problem as one line of text. The API key is masked, and hints at common causes
        are added, such as a missing /v1 in the address."""
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
    """The parsed body of an error response.

    Codes and types are more reliable than the message, because a message may quote the prompt.
    Quoted strings in the message are therefore ignored.
    """
    words: list[str]   # error codes, then error types
    params: list[str]  # request fields that the error names, such as messages.0.content
    message: str       # text of the error without quoted strings

    @classmethod
    def read(cls, text: str) -> "Fault":
        """Parses the body of an error. The body is JSON, or text that contains JSON or a Python
        dict, because proxies forward errors in this form."""
        codes, types, params, messages = [], [], [], []
        pending = deque([text])  # breadth-first: outer parts are read before nested parts
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
        # Numeric codes are skipped, because they only repeat the HTTP status.
        words = [str(word) for word in codes + types if re.match("[A-Za-z][^ ]*$", str(word))]
        paths = [".".join(map(str, p)) if isinstance(p, list) else str(p or "") for p in params]
        paths = [re.sub(r"^body\.?", "", path) for path in paths]
        return cls(words, [path for path in paths if re.search("[a-z]", path)],
                   QUOTES.sub(quoted_name, " ".join(messages))[:MAX_ERROR])

    def kind(self) -> str:
        """Returns the kind of the error. It is "length", "filter" (a content filter), "other", or
        "" if the kind cannot be determined."""
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
        """Returns True if the error rejects a field of the request.

        Args:
            name: The name of the field, for example "temperature".
        """
        if self.params:
            return any(re.search(rf"\b{name}\b", param) for param in self.params)
        close = rf"\b{name}\b.{{0,100}}{UNWANTED}|{UNWANTED}.{{0,100}}\b{name}\b"
        return (not OF_FILTER.search(self.message)
                and re.search(close, self.message, re.I | re.S) is not None)


def parsed(text: str) -> tuple[str, list, str]:
    """Parses the JSON objects or Python dicts in a text. Returns the text before the first object,
    the list of objects, and the text after the last object."""
    start, end = text.find("{"), text.rfind("}") + 1
    if 0 <= start < end:
        for parse in json.loads, ast.literal_eval:
            try:
                return text[:start], list(parse(f"[{text[start:end]}]")), text[end:]
            except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
                pass
    return text, [], ""


def quoted_name(quote: re.Match) -> str:
    """Returns the replacement for a quoted string in an error message. A quoted name, such as the
    name of a parameter, is kept. Any other quoted string becomes a space."""
    inside = quote[quote.lastindex] if quote.lastindex else quote[0]
    return quote[0] if QUOTED_PARAM.fullmatch(inside) else " "


def status_in(response: dict) -> int:
    """Returns the actual status of a response that has the HTTP status 200.

    Some endpoints report an error inside such a response: at the top level, in the choice, or in
    the choice's message. The code of this error is returned, or 500 if the error has no valid code.
    A response without choices counts as an error. Otherwise the status is 200.
    """
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
    """Returns the seconds to wait according to the Retry-After header, at most MAX_WAIT. Returns 0
    if the header is absent or malformed."""
    try:
        return min(Retry().get_retry_after(response) or 0.0, MAX_WAIT)
    except (HTTPError, ValueError, OverflowError):
        return 0.0


# ------------------------------------------------------------------------------------- replies


def parts_of(message: dict) -> list[dict]:
    """Returns a list with the message itself and the parts of its content that are JSON objects.
    The content of a message is a text or a list of parts."""
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
    """Extracts the reply from a text that may contain reasoning and special tokens.

    Returns:
        The reply without reasoning, up to the first end-of-turn token, and True if the text has
        reasoning. A text without reasoning and special tokens is returned unchanged.
    """
    closings = defaultdict(list)  # word in a tag -> end positions of closing tags with this word
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
            is_first = mark["word"] == "THINK" and mark.start() == first
            if mark["square"] and later == len(ends) and not is_first:
                pieces.append(mark[0])  # not a tag, but brackets in code, such as x = [reason]
                continue
            reasons = True
            if not mark["empty"]:
                position = ends[later] if later < len(ends) else len(text)
        elif kind in ("tag", "final", "channel"):  # all text before this mark is reasoning
            reasons = reasons or kind == "channel" or any(piece.strip() for piece in pieces)
            pieces = []
            if kind == "channel":
                final = FINALS.search(text, position)
                position = final.end() if final else len(text)
        elif kind == "end" or any(piece.strip() for piece in pieces):
            position = len(text)
        else:  # The reply begins after this start token. Drop the whitespace before the token.
            pieces = []
    reply = "".join(pieces) + text[position:]
    return (text if reply == text else reply.strip()), reasons


def word_of(tag: re.Match) -> str:
    return (tag["word"] or tag["word2"] or tag["closes2"]).lower()


def thinks(message: dict, usage: dict) -> bool:
    """Returns True if the response has reasoning: the usage reports reasoning tokens, or the
    message or a part of its content has a reasoning field."""
    if reasoning_tokens(usage):
        return True
    for part in parts_of(message):
        for name, value in part.items():
            label = value if name == "type" else name
            if value and re.search(REASONING, str(label), re.I):
                return True
    return False


def count(usage: dict, name: str) -> int:
    """Returns the token count `name` from the usage of a response, or 0 if the count is absent or
    not a positive number."""
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
    """Returns the number of tokens in a reply, without its reasoning.

    The number is estimated from the text if the usage has no token counts, or if the completion
    includes an unknown number of reasoning tokens. A text has at most as many tokens as bytes. If
    the completion has more tokens than bytes (plus END_TOKENS), it must include hidden reasoning.
    """
    completion, reasoning = count(usage, "completion_tokens"), reasoning_tokens(usage)
    if 0 < reasoning < completion:
        return completion - reasoning
    estimate = estimated_tokens(reply)
    if completion == 0:
        return estimate
    hides = reasons or completion > len(reply.encode()) + END_TOKENS
    return min(estimate, completion) if hides else completion
