"""An OpenAI-compatible chat endpoint: messages in, a reply out. The key, of the environment, stands
in no file, log or message."""

import os
import random
import re
import sys
import threading

import requests
from tqdm import tqdm
from urllib3.exceptions import HTTPError
from urllib3.util import Retry

from common.settings import Refused
from worlds import EnvError

KEY = "OPENAI_API_KEY"  # the environment variable
TRIES = 8
SECONDS = 300  # that an endpoint may be silent [ours]
LONGEST = 120  # seconds between two tries [ours]
# What is summed over the answers of a phase; cut_prompts are found by who asks.
USAGE = ("requests", "cut_replies", "cut_prompts", "prompt_tokens", "completion_tokens")
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

# What an endpoint calls the end of a choice, its finish_reason: of a whole reply, of one that was
# cut, and of a fault that may be gone in a moment. All else is no reply, as what a filter took.
WHOLE = re.compile("|stop.*|eos.*|end.*|complete.*", re.I)
CUT = re.compile("length|max_?(output_?)?tokens|.*context.*", re.I)
FAILED = re.compile("error|fail|abort|cancel|network|resource|overload|timeout|rate.?limit|"
                    "unavailable", re.I)

# Where thoughts begin and end, as a server shows them that has no parser of thoughts: <think>,
# </seed:think>, [THINK], <|START_THINKING|>, or all channels up to the one called `final`.
THINKING = r"[\w:.-]*(?:think|thought|reason|reflection|analysis|scratchpad|monologue)[\w:.-]*"
BEGINS = rf"(?:<\|?|◁)(?!end){THINKING}\s*(?:\|?>|▷)|(?-i:\[THINK\])|<\|channel\|?>(?!final)"
CLOSES = (rf"(?:<\|?|◁)(?:/|end_(?:of_)?){THINKING}\s*(?:\|?>|▷)|(?-i:\[/THINK\])|<channel\|>|"
          r"<\|channel\|>final[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>|assistantfinal")
# Tokens that end a turn.
OVER = (r"</s>|<eos>|<turn\|>|<end_of_(?:turn|utterance)>|"
        r"<[|｜](?:im_end|eot_id|eom_id|end|return|end[_▁]?of[_▁]?(?:text|turn|sentence)(?:_token)?|"
        r"endoftext)[|｜]>")


class EndpointError(EnvError):
    """The endpoint could not be reached after all tries, or takes nothing; one line."""


class NotAnswered(EndpointError):
    """The endpoint refuses these messages for good, as a filter of contents does."""


class ContextFull(NotAnswered):
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
            The reply, and its usage by the names in USAGE, but for cut_prompts.

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
                return self.ask_once(said)
            except Passing as fault:
                problem = f"{fault} (attempt {attempt + 1})"
                wait = max(fault.wait, min(2.0**attempt, 60) * random.uniform(0.5, 1))
            if attempt + 1 < TRIES:
                self.stopped.wait(wait)
        raise EndpointError(self.told(problem))

    def ask_once(self, messages: list[dict]) -> tuple[str, dict]:
        """The reply to one request and its usage; else one of the errors above. A field that the
        endpoint doesn't take is left out, and it is asked again."""
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        while True:
            sent = self.body | dict(messages=messages)
            try:
                answer = requests.post(self.url, json=sent, headers=headers, timeout=(10, SECONDS),
                                       auth=lambda request: request,  # no .netrc takes its place
                                       allow_redirects=False)
                text = self.without_key(answer.content.decode(errors="replace"))
                status = answer.status_code
                if status == 200:
                    status = status_in(answer.json())
                if status == 200:
                    return self.read(answer.json(), text)
            except (requests.RequestException, LookupError, TypeError, ValueError,
                    AttributeError) as error:
                raise Passing(f"{type(error).__name__}: {error}") from None
            problem = f"status {status}: {text[:200]}"
            long = TOO_LONG.search(text) and not OTHERWISE.search(text)
            if long and (status in OF_LENGTH or status >= 500):
                raise ContextFull(self.told(problem))
            if status in PASSING or status >= 500:
                raise Passing(problem, wait_of(answer.raw))
            if status not in OF_LENGTH or not self.leaves_out(text, sent):
                kind = NotAnswered if status in REFUSING else EndpointError
                raise kind(self.told(problem))

    def leaves_out(self, text: str, sent: dict) -> bool:
        """Whether a refusal is about fields that were sent. From now on they are not, which is
        said, or they are by the name that the endpoint asks for."""
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
            ContextFull, NotAnswered: It says so.
        """
        choice = answer["choices"][0]
        message = choice["message"]
        used = answer.get("usage") or {}
        ends = str(choice.get("finish_reason") or "")
        said = f"finish_reason {ends or 'none'}: {text[:200]}"
        if FAILED.search(ends):
            raise Passing(said)
        is_cut = CUT.fullmatch(ends) is not None
        ended = is_cut or WHOLE.fullmatch(ends)
        if not ended or message.get("refusal") or message.get("tool_calls"):
            raise NotAnswered(self.told(f"there is no reply in its answer, {said}"))
        reply = reply_in(text_of(message.get("content")))
        if is_cut and not reply.strip():
            kind = ContextFull if "context" in ends.lower() else NotAnswered
            raise kind(self.told(f"nothing was said before the end, {said}; raise "
                                 "--max-new-tokens, or let it think less"))
        if len(self.key) >= 16:  # shorter ones, such as EMPTY, are words and no secrets
            reply = self.without_key(reply)
        usage = dict(requests=1, cut_replies=int(is_cut))
        for name in "prompt_tokens", "completion_tokens":
            usage[name] = int(used.get(name) or 0)
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
    """Whether a text names a field, and says close by that it is not wanted as it is. A refusal
    may name it otherwise, where it repeats the messages."""
    close = rf"\b{name}\b.{{0,100}}{UNWANTED}|{UNWANTED}.{{0,100}}\b{name}\b"
    return bool(re.search(close, text, re.I | re.S))


def status_in(answer: dict) -> int:
    """The status that an answer of status 200 should have: that of an error at its top or in its
    choice; 500 where it has no choice, or the error no status."""
    choices = answer.get("choices") or [{}]
    fault = answer.get("error") or choices[0].get("error")
    if choices[0] and not fault:
        return 200
    code = str(fault.get("code")) if isinstance(fault, dict) else ""
    return int(code) if re.fullmatch(r"[45]\d\d", code) else 500


def text_of(content: str | list | None) -> str:
    """The text of a message's content, which may stand in parts; those of thoughts are none. Half
    a surrogate pair, which is no text, becomes the mark of what cannot be shown."""
    if isinstance(content, list):
        content = "".join(part["text"] for part in content if part["type"] == "text")
    if not isinstance(content, str | None):
        raise TypeError(f"content is {content!r:.40}, which is no text.")
    return (content or "").encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def reply_in(text: str) -> str:
    """What is said in a text, without thoughts and what follows the end of the turn. A text
    without either stays as it is."""
    said = re.sub(f"(?:{BEGINS}).*?(?:{CLOSES})", "", text, flags=re.S | re.I)
    said = re.split(CLOSES, said, flags=re.I)[-1]  # their beginning stood in the prompt
    said = re.split(BEGINS, said, flags=re.I)[0]   # they have no end
    said = re.split(OVER, said, flags=re.I)[0]
    return text if said == text else said.strip()
