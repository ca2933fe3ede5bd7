"""An OpenAI-compatible chat endpoint: messages in, a reply out. The key, of the environment, stands
in no file, log or message."""

import json
import os
import random
import re
import sys
import time

import requests
from tqdm import tqdm
from urllib3.exceptions import HTTPError

from lab import play_env as envs
from lab.harness.settings import SettingsError
from lab.playing.conversation import ContextFull

KEY = "OPENAI_API_KEY"  # the environment variable
TRIES = 8
PASSING = {408, 409, 425, 429}  # statuses that may be gone in a moment, as 500 and above
USAGE = ("requests", "retries", "unreported", "prompt_tokens", "completion_tokens")


class EndpointError(envs.EnvError):
    """The endpoint refused, or could not be reached after all tries; one line for the user."""


class Endpoint:
    """Calls the model: messages -> (reply, usage), with retries and growing waits between them.

    usage: what the call took, by the names in USAGE, and cut_replies, 1 where it was cut;
    `unreported` is 1 where the endpoint reports no tokens.
    """

    def __init__(self, s, url=None, name=None, temperature=0, max_tokens=None):
        """s: settings; url, name and the others in place of its model's."""
        path = "/chat/completions"
        self.url = (url or s.model).rstrip("/").removesuffix(path) + path
        self.seconds, self.most = s.answer_seconds, int(1000 * s.answer_kb)
        self.body = dict(model=name or s.model_name, temperature=temperature,
                         max_tokens=max_tokens or s.max_new_tokens)
        self.key = os.environ.get(KEY, "").strip()
        if re.search(r"[^!-~]", self.key):
            raise SettingsError(f"the key in {KEY} holds a character that no key has")

    def __call__(self, messages: list[dict], tries: int = TRIES) -> tuple[str, dict]:
        """ContextFull if they are too long for the model; EndpointError after the last attempt."""
        for attempt in range(tries):
            wait, text = min(2.0 ** attempt, 60) * random.uniform(0.5, 1), ""
            body = {**self.body, "messages": messages}
            try:
                status, text, asked_to_wait = self._post(body)
                problem = f"status {status}: {self._without_key(text)[:200]}"
                if status == 200:
                    reply, used = self._read(json.loads(text))
                    return reply, dict(used, retries=attempt)
                if status == 400 and re.search("context.?(length|size|window)|too long", text,
                                               re.I):
                    raise ContextFull
                if status == 400 and self._refused(body, text):
                    continue
                if status not in PASSING and status < 500:
                    break
                if re.fullmatch(r"\d+(\.\d+)?", asked_to_wait):
                    wait = min(float(asked_to_wait), 120)
            except (requests.RequestException, HTTPError, ValueError, LookupError, TypeError,
                    AttributeError, OverflowError, RecursionError) as error:
                problem = f"{type(error).__name__}: {error} {self._without_key(text)[:200]}"
            if attempt < tries - 1:
                time.sleep(wait)
        problem = self._without_key(" ".join(problem.split()))
        if problem.startswith("status 404") and "/v1/" not in self.url:
            problem += " (most addresses end in /v1)"
        problem += f" (without a key: {KEY} is not set)" * (not self.key)
        raise EndpointError(f"{self.url}: {problem} (attempt {attempt + 1})")

    def _post(self, body: dict) -> tuple[int, str, str]:
        """Status, text and Retry-After. EndpointError where the text is too long."""
        text, ends = b"", time.monotonic() + self.seconds
        with requests.post(self.url, json=body, auth=self._sign, timeout=(10, self.seconds),
                           allow_redirects=False, stream=True) as answer:
            while part := answer.raw.read1(1 << 16, True):
                text += part
                if len(text) > self.most:
                    raise EndpointError(f"{self.url}: an answer is longer than --answer-kb "
                                        f"{self.most / 1000:g}")
                if time.monotonic() > ends:
                    raise requests.Timeout(f"it took more than --answer-seconds {self.seconds:g}")
            return (answer.status_code, text.decode(errors="replace"),
                    answer.headers.get("Retry-After", ""))

    def _read(self, answer: dict) -> tuple[str, dict]:
        """The reply and the usage in an answer; an error of any kind where it is no answer."""
        choice, used = answer["choices"][0], answer.get("usage") or {}
        reply = choice["message"].get("content") or ""
        if isinstance(reply, list):  # of parts
            reply = "".join(part.get("text") or "" for part in reply)
        if len(self.key) >= 16:  # shorter ones, such as EMPTY, are words and no secrets
            reply = self._without_key(str(reply))
        return str(reply), dict(
            requests=1, unreported=int(not used),
            cut_replies=int(choice.get("finish_reason") == "length"),
            **{name: max(0, int(used.get(name) or 0)) for name in USAGE[-2:]})

    def _refused(self, body: dict, text: str) -> bool:
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

    def _without_key(self, text: str) -> str:
        return text.replace(self.key, "***") if self.key else text

    def _sign(self, request):  # as `auth`, so that no .netrc takes its place
        if self.key:
            request.headers["Authorization"] = f"Bearer {self.key}"
        return request


def explorer_of(s) -> Endpoint:
    """The model that `--explorer` names."""
    return Endpoint(s, url=s.explorer, name=s.explorer_model, temperature=s.explorer_temperature,
                    max_tokens=1024)
