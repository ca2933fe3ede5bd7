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
SECONDS, MOST = 300, 1_000_000  # for an answer, and bytes of it [ours]
USAGE = ("requests", "retries", "unreported", "cut_replies", "prompt_tokens", "completion_tokens")
PASSING = {408, 409, 425, 429}  # statuses that may be gone in a moment, as 500 and above
REFUSING = {400, 403, 413, 422, 451}  # which may be about these messages alone


class EndpointError(EnvError):
    """The endpoint could not be reached after all tries, or takes nothing; one line."""


class NotAnswered(EndpointError):
    """The endpoint refuses these messages for good, as a filter of contents does."""


class ContextFull(Exception):
    """The messages are longer than the model can read."""


class Endpoint:
    """Calls the model: messages -> (reply, usage), with retries and growing waits between them.
    usage: by the names in USAGE; `unreported` is 1 where the endpoint reports no tokens."""

    def __init__(self, url: str, name: str, temperature: float, max_tokens: int):
        path = "/chat/completions"
        self.url = url.rstrip("/").removesuffix(path) + path
        self.body = dict(model=name, temperature=temperature, max_tokens=max_tokens)
        self.stopped = threading.Event()  # once set, nothing is asked or waited for any more
        self.key = os.environ.get(KEY, "").strip()
        if re.search(r"[^!-~]", self.key):
            raise Refused(f"the key in {KEY} holds a character that no key has")

    def __call__(self, messages: list[dict]) -> tuple[str, dict]:
        """ContextFull if they are too long for the model; NotAnswered if it refuses these alone;
        EndpointError after the last attempt."""
        problem = "stopped"
        for attempt in range(TRIES):
            status, said, wait = 0, "", min(2.0 ** attempt, 60) * random.uniform(0.5, 1)
            if self.stopped.is_set():
                break
            body = {**self.body, "messages": messages}
            try:
                status, text, asked_to_wait = self.post(body)
                said = self.without_key(text)[:200]
                problem = f"status {status}: {said}"
                if status == 200:
                    reply, used = self.read(json.loads(text))
                    return reply, dict(used, retries=attempt)
                if status == 400 and re.search("context.?(length|size|window)|too long", text,
                                               re.I):
                    raise ContextFull
                if status == 400 and self.refuses_parameter(body, text):
                    continue
                if status not in PASSING and status < 500:
                    break
                if re.fullmatch(r"\d+(\.\d+)?", asked_to_wait):
                    wait = min(float(asked_to_wait), 120)
            except (requests.RequestException, HTTPError, ValueError, LookupError, TypeError,
                    AttributeError, OverflowError, RecursionError) as error:
                problem = f"{type(error).__name__}: {error} {said}"
            if attempt < TRIES - 1:
                self.stopped.wait(wait)
        problem = self.without_key(" ".join(problem.split()))
        if problem.startswith("status 404") and "/v1/" not in self.url:
            problem += " (most addresses end in /v1)"
        problem += f" (without a key: {KEY} is not set)" * (not self.key)
        raise (NotAnswered if status in REFUSING else EndpointError)(
            f"{self.url}: {problem} (attempt {attempt + 1})")

    def post(self, body: dict) -> tuple[int, str, str]:
        """Status, text and Retry-After. NotAnswered where the text is too long."""
        text, ends = b"", time.monotonic() + SECONDS
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

    def read(self, answer: dict) -> tuple[str, dict]:
        """The reply and the usage in an answer; an error of any kind where it is no answer."""
        choice, used = answer["choices"][0], answer.get("usage") or {}
        reply = choice["message"].get("content") or ""
        if isinstance(reply, list):  # of parts
            reply = "".join(part.get("text") or "" for part in reply)
        if len(self.key) >= 16:  # shorter ones, such as EMPTY, are words and no secrets
            reply = self.without_key(str(reply))
        return str(reply), dict(
            requests=1, unreported=int(not used),
            cut_replies=int(choice.get("finish_reason") == "length"),
            **{name: max(0, int(used.get(name) or 0))
               for name in ("prompt_tokens", "completion_tokens")})

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

    def without_key(self, text: str) -> str:
        return text.replace(self.key, "***") if self.key else text
