"""A small inference server with the interface of vLLM's, which replies by `dpo.replies`.

    python small_server.py AGENT --port PORT [--log FILE] [--fault WHAT [--after REQUESTS]]

It refuses what vLLM refuses, and also fields that vLLM would overlook. Without an AGENT that is a
folder it loads no model and writes the reply that says which request it is. FILE gets a line of
JSON for its environment, and then one for each request. The faults are those of a bad server.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIELDS = {"model", "prompt", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop",
          "stop_token_ids", "logit_bias", "logprobs", "return_token_ids", "repetition_penalty",
          "presence_penalty", "frequency_penalty"}
NEUTRAL = dict(top_p=1, top_k=0, min_p=0, repetition_penalty=1, presence_penalty=0,
               frequency_penalty=0)


class Refused(Exception):
    """Status and message."""


class Model:
    """Replies of the agent in a folder."""

    def __init__(self, folder: Path, fault: str):
        sys.path.insert(0, str(ROOT))  # the run takes PYTHONPATH from its servers
        import torch
        from transformers import AutoTokenizer

        import dpo

        torch.set_num_threads(1)
        self.dpo, self.fault, self.lock = dpo, fault, threading.Lock()
        self.model = dpo.read_model(folder).eval()
        config = self.model.config.get_text_config()
        self.encoder = dpo.Encoder(AutoTokenizer.from_pretrained(folder), config.vocab_size)
        self.vocabulary, self.longest = config.vocab_size, config.max_position_embeddings

    def check(self, body: dict) -> None:
        """Refused where vLLM answers with status 400."""
        ids = {*body["prompt"], *body["stop_token_ids"], *map(int, body["logit_bias"])}
        if not body["prompt"] or not all(0 <= i < self.vocabulary for i in ids):
            raise Refused(400, "token ids out of the vocabulary")
        if len(body["prompt"]) >= self.longest:
            raise Refused(400, f"maximum context length is {self.longest} tokens")
        if "" in body["stop"] or body["max_tokens"] < 1 or body["temperature"] < 0:
            raise Refused(400, "stop, max_tokens or temperature")
        if len(body["logit_bias"]) > 1024:
            raise Refused(500, "Too many logit bias tokens")
        assert body["stop_token_ids"] == [self.encoder.end_of_turn]
        assert set(body["logit_bias"].values()) <= {-100}

    def reply(self, body: dict) -> tuple[list[int], list[float]]:
        dpo, never = self.dpo, tuple(sorted(map(int, body["logit_bias"])))
        temperature, prompt = body["temperature"], body["prompt"]
        most = min(body["max_tokens"], self.longest - len(prompt))
        if self.fault == "forbidden":
            return [never[0]], [-1.0]
        with self.lock:
            (ids, log_probs), = dpo.replies(
                self.model, self.encoder, dpo.Sampler(temperature, never), most,
                tuple(body["stop"]), [(prompt, random.Random(body.get("seed")))])
            if self.fault == "raw" or not temperature:
                t = dpo.Trajectory(ids=prompt + ids, action_mask=[0] * len(prompt) + [1] * len(ids))
                sampler = dpo.Sampler() if self.fault == "raw" else dpo.Sampler(0.0, never)
                log_probs = dpo.token_log_probs(self.model, [t], sampler).tolist()
        if self.fault == "nan":
            log_probs = [float("nan")] * len(ids)
        return ids, log_probs[1:] if self.fault == "short" else log_probs


class Words:
    """Stands in for a model: it tells nothing and knows every id."""
    longest = 4096

    def check(self, body):
        pass

    def reply(self, body):
        return [len(body["prompt"])], [-1.0]


class Service:
    """What the server answers."""

    def __init__(self, agent: str, fault: str = "", after: int = 0, log: str | None = None):
        self.agent, self.fault, self.after, self.log = agent, fault, after, log
        self.model = Model(Path(agent), fault) if Path(agent).exists() else Words()
        self.lock, self.requests = threading.Lock(), 0

    def note(self, row: dict) -> None:
        if self.log:
            with self.lock, open(self.log, "a") as file:
                file.write(json.dumps(row) + "\n")

    def __call__(self, path: str, text: str) -> tuple[int, dict]:
        """Status and answer."""
        try:
            if path == "/v1/models":
                return 200, dict(data=[dict(id=self.agent, max_model_len=self.model.longest)])
            return 200, self.complete(path, json.loads(text))
        except Refused as refused:
            status, message = refused.args
            return status, dict(error=dict(message=message))

    def complete(self, path: str, body: dict) -> dict:
        self.note(body)
        if path != "/v1/completions" or body["model"] != self.agent:
            raise Refused(404, "unknown path or model")
        if unknown := {*body} - FIELDS:
            raise Refused(400, f"unknown fields {unknown}")
        assert {name: body[name] for name in NEUTRAL} == NEUTRAL
        self.model.check(body)
        with self.lock:
            self.requests += 1
        if self.fault == "die" and self.requests > self.after:
            os.kill(os.getpid(), signal.SIGKILL)
        ids, log_probs = self.model.reply(body)
        if self.fault == "plain":
            return dict(choices=[dict(text="hello")])
        asked = body["prompt"] if self.fault != "bos" else [1, *body["prompt"]]
        return dict(choices=[dict(logprobs=dict(token_logprobs=log_probs), token_ids=ids,
                                  prompt_token_ids=asked)])


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 1 << 16  # one packet an answer

    def do_POST(self):
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        status, answer = service(self.path, text)
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("agent")
    parser.add_argument("--port", type=int)
    parser.add_argument("--log")
    parser.add_argument("--fault", default="")
    parser.add_argument("--after", type=int, default=0)
    flags = parser.parse_args()
    if flags.fault == "start":
        sys.exit("no room on the card")
    # As vLLM's workers, a process that ends with nobody's terminal or session.
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    service = Service(flags.agent, flags.fault, flags.after, flags.log)
    service.note(dict(pid=os.getpid(), child=child.pid, agent=flags.agent,
                      environment=dict(os.environ)))
    Server(("127.0.0.1", flags.port), Handler).serve_forever()
