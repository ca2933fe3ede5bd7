"""Replies by vLLM's /v1/completions: token ids in, token ids and log-probabilities out.

What the server samples from has to be what `dpo.Sampler` states, since log-probabilities of other
distributions would train silently wrong; so its first replies are compared with the training
forward, and each later one is looked at.
"""

import random

import requests
import torch
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

import dpo
from lab.serve.server import ENDING, Server, ServerError, plain_session

PATIENCE = 3600   # seconds for one reply; hundreds may wait before it [ours]
FORBIDDEN = -100  # the least bias that a server takes: a factor of e^-100
MOST_FORBIDDEN = 1024  # ids with a bias that vLLM takes with a request
# Of the trial: texts of random tokens, whose first tokens behind them are far from certain, and
# the tokens of a reply.
TEXTS, TRIAL = 16, 2
# Mean distance from the training forward in nats a token. Rounding makes up to 4e-5 in fp32 and
# 0.06 in bf16; a temperature of 0.7 that is left out makes 0.15 and more.
LIMIT = {False: 1e-3, True: 0.1}  # by whether the server computes in bf16


class Engine:
    """Asks a server for replies, from many threads at once."""

    def __init__(self, server: Server, encoder: dpo.Encoder, sampler: dpo.Sampler,
                 max_new_tokens: int, stops: tuple[str, ...]):
        self.server, self.encoder, self.sampler = server, encoder, sampler
        self.max_new_tokens, self.stops = max_new_tokens, stops
        self.session = plain_session()
        # A server closes connections that nobody used for seconds, perhaps as a request goes out.
        # A request has its seed, so that asking again changes nothing.
        again = Retry(total=1, allowed_methods=None)
        self.session.mount("http://", HTTPAdapter(pool_maxsize=1024, max_retries=again))
        never = {str(token): FORBIDDEN for token in sampler.never}
        # All that a model's generation_config.json could set is stated here.
        self.body = dict(
            temperature=sampler.temperature, top_p=1.0, top_k=0, min_p=0.0,
            repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0,
            stop=[*stops], stop_token_ids=[encoder.end_of_turn], logit_bias=never,
            logprobs=0, return_token_ids=True)

    def __call__(self, ids: list[int], rng: random.Random) -> tuple[list[int], list[float]]:
        """A reply to a conversation: what `dpo.replies` gives, sampled ids and each one's
        log-probability in nats (none at temperature 0). ServerError where there is none."""
        reply, log_probs = self.ask(ids, rng)
        return reply, log_probs if self.sampler.temperature else []

    def ask(self, ids: list[int], rng: random.Random) -> tuple[list[int], list[float]]:
        """As above, at temperature 0 with log-probabilities, too."""
        room = self.server.longest - len(ids)
        body = self.body | dict(model=self.server.name, prompt=ids,
                                max_tokens=min(self.max_new_tokens, room))
        if self.sampler.temperature:
            body["seed"] = rng.getrandbits(32)  # the reply does not depend on what runs beside it
        answer = self.post(body)
        try:
            choice = answer["choices"][0]
            asked, reply = choice["prompt_token_ids"], choice["token_ids"]
            log_probs = choice["logprobs"]["token_logprobs"]
            wrong = self.wrong(reply, log_probs, body["max_tokens"])
        except (LookupError, TypeError):
            raise ServerError(f"--serve: {self.server.url} answers without token ids or "
                              "log-probabilities; give a server that takes return_token_ids and "
                              "logprobs, as vLLM does") from None
        if asked != ids:
            wrong = "read other token ids than it was sent"
        if wrong:
            raise ServerError(f"--serve: {self.server.url} {wrong}; give a server that samples as "
                              "asked, such as vLLM")
        return reply, log_probs

    def post(self, body: dict) -> dict:
        """The server's answer; ServerError with what it says where it refuses or is gone."""
        url = f"{self.server.url}/v1/completions"
        try:
            answer = self.session.post(url, json=body, timeout=(10, PATIENCE))
            if answer.status_code == 200:
                return answer.json()
            problem = f"status {answer.status_code}: {answer.text[:300]}"
        except (requests.RequestException, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
            self.server.check_alive(ENDING)
        raise ServerError(f"--serve: {url}: {' '.join(problem.split())}")

    def wrong(self, reply: list[int], log_probs: list[float], most: int) -> str | None:
        """What is wrong with a reply, or None."""
        if not 0 < len(reply) <= most:
            return f"wrote {len(reply)} tokens where 1 to {most} were asked for"
        if len(log_probs) != len(reply):
            return f"gives {len(log_probs)} log-probabilities for {len(reply)} tokens"
        for token, log_prob in zip(reply, log_probs):
            if token in self.sampler.never:
                return f"drew token {token}, which is never to be drawn"
            if not -9999 < log_prob < 1e-3:  # what JSON has for -inf, and nan
                return f"gives a log-probability of {log_prob}"
        return None


def check_forbidden(sampler: dpo.Sampler) -> None:
    """ServerError where a model has more ids that are never drawn than a server takes."""
    if len(sampler.never) > MOST_FORBIDDEN:
        raise ServerError(f"--serve: {len(sampler.never)} ids of this model are never drawn, and a "
                          f"server takes {MOST_FORBIDDEN:,} with a request; leave --serve out")


@torch.inference_mode()
def check(engine: Engine, longest: int, bf16: bool) -> float:
    """Compares the server's first replies, to texts of random tokens, with the training forward.

    The forward runs in fp32 on the CPU, because the card is the server's.

    Args:
        engine: Asks the server that is running.
        longest: Of how many tokens an episode may be.
        bf16: Whether the server may compute in bf16.

    Returns:
        The mean distance of log-probabilities, in nats a token.

    Raises:
        ServerError: It is further than rounding explains, or the server reads less than `longest`.
    """
    server, encoder = engine.server, engine.encoder
    if server.longest < longest:
        raise ServerError(f"--serve: the server reads {server.longest:,} tokens, and an episode "
                          f"may have --max-tokens {longest:,}; start it with --max-model-len "
                          f"{longest}, or lower --max-tokens")
    sampler = dpo.Sampler(engine.sampler.temperature,
                          (*engine.sampler.never, encoder.end_of_turn))
    check_forbidden(sampler)
    trial = Engine(server, encoder, sampler, TRIAL, ())
    known = sorted(encoder.known - {*sampler.never})
    replies, drawn = [], []
    for n in range(1, TEXTS + 1):
        rng = random.Random(n)
        text = rng.choices(known, k=n * (min(longest, 512) - TRIAL) // TEXTS)
        reply, log_probs = trial.ask(text, rng)
        mask = [0] * len(text) + [1] * len(reply)
        replies.append(dpo.Trajectory(ids=text + reply, action_mask=mask))
        drawn += log_probs
    model = dpo.read_model(server.agent).eval()
    forward = torch.cat([dpo.token_log_probs(model, [t], sampler) for t in replies])
    off = (forward - forward.new_tensor(drawn)).abs().mean().item()
    if not off < LIMIT[bf16]:
        raise ServerError(
            f"--serve: {server.url} samples from another distribution: the training forward of "
            f"{server.agent} is {off:.2g} nats a token off its log-probabilities; start it with "
            "this agent, its dtype, and --logprobs-mode processed_logprobs")
    return off
