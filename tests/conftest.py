"""Small models, tokenizers and environments for all tests. Nothing is downloaded."""

import faulthandler
import gc
import io
import json
import os
import random
import shlex
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from contextlib import redirect_stdout, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path

import psutil
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from family_models import tiny_model
from filelock import FileLock
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)

import coevolve  # noqa: E402
from common.settings import UsageError  # noqa: E402
from engine import run  # noqa: E402
from engine.chat import Encoder  # noqa: E402
from engine.models import MODELS, fuse_norms, read_tokenizer  # noqa: E402
from environments import environment  # noqa: E402
from envs import EnvError, Environment, Step  # noqa: E402

LIMIT = 900  # seconds that a test may take with its fixtures; the longest takes about 30 [ours]
DATA = ROOT / "tests" / "data"  # recordings of official code, see its README


def folder_of(variable):
    """Returns the folder that an environment variable names, with files of InterCode or ETO."""
    if variable not in os.environ:
        pytest.skip(f"{variable} names no folder; see tests/data/README.md")
    return Path(os.environ[variable])


CHATML = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
# The published templates, without the system message of Llama 2. Qwen3 uses ChatML.
LLAMA2 = ("{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
          "{{ raise_exception('roles must alternate') }}{% endif %}{% if m['role'] == 'user' %}"
          "{{ bos_token + '[INST] ' + m['content'].strip() + ' [/INST]' }}{% else %}"
          "{{ ' ' + m['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}")
LLAMA3 = ("{% for m in messages %}{% set text = '<|start_header_id|>' + m['role'] + "
          "'<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' %}{% if loop.first %}"
          "{% set text = bos_token + text %}{% endif %}{{ text }}{% endfor %}"
          "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
          "{% endif %}")
VICUNA = ("{% for m in messages %}{% if m.role == 'user' %}{{ 'USER: ' + m.content + ' ' }}"
          "{% else %}{{ 'ASSISTANT: ' + m.content + eos_token }}{% endif %}{% endfor %}"
          "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}")
TEMPLATES = {  # name -> (template, special tokens, of which the second one ends a turn)
    "chatml": (CHATML, ["<|im_start|>", "<|im_end|>", "<|pad|>"]),
    "system": ("<|im_start|>system\nYou shop.<|im_end|>\n" + CHATML, ["<|im_start|>", "<|im_end|>"]),
    "llama2": (LLAMA2, ["<s>", "</s>"]),
    "llama3": (LLAMA3, ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>",
                        "<|end_header_id|>"]),
    "vicuna": (VICUNA, ["<s>", "</s>"]),
}
CONVERSATION = [
    {"role": "user", "content": "find a red mug, price lower than 50.00 dollars"},
    {"role": "assistant", "content": "Thought: I search.\nAction: search[red mug]"},
    {"role": "user", "content": "Page 1 [SEP] B0AB [SEP] $36.0"},
    {"role": "assistant", "content": "click[B0AB]"},
    {"role": "user", "content": "red [SEP] blue [SEP] Buy Now"},
    {"role": "assistant", "content": "click[Buy Now]"},
]


def make_tokenizer(name: str, unigram=False, template="") -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE tokenizer (BPE of words for Llama 2), or a Unigram tokenizer like
    SentencePiece, with the named chat template or another one."""
    published, special = TEMPLATES[name]
    options = dict(special_tokens=special, vocab_size=400, show_progress=False)
    if unigram or name == "llama2":
        options["initial_alphabet"] = [*map(chr, range(32, 127)), *"▁\nÜï日本🙂"]
        space = dict(prepend_scheme="first")
        splits, joins = pre_tokenizers.Metaspace(**space), decoders.Metaspace(**space)
    else:
        options["initial_alphabet"] = pre_tokenizers.ByteLevel.alphabet()
        splits, joins = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    if unigram:
        options["special_tokens"] = [*special, "<unk>"]
        tokenizer = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(**options, unk_token="<unk>")
    else:
        tokenizer = Tokenizer(models.BPE())
        trainer = trainers.BpeTrainer(**options)
    tokenizer.pre_tokenizer, tokenizer.decoder = splits, joins
    text = [m["content"] for m in CONVERSATION] + ["[INST] user assistant system You shop. [/INST]"]
    tokenizer.train_from_iterator(text * 3, trainer)
    begin = special[0] if "bos_token" in published else None
    pad = special[2] if name == "chatml" else special[1]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=begin, eos_token=special[1], pad_token=pad,
        chat_template=template or published,
        additional_special_tokens=sorted({*special} - {begin, special[1], pad}))


def make_model(vocab_size: int, seed: int = 0, dtype=torch.float64):
    """Returns a random Qwen3 with grouped-query attention."""
    model = tiny_model("qwen3", vocab_size, seed, bos_token_id=None, eos_token_id=None,
                       pad_token_id=None).to(dtype)
    fuse_norms(model)  # transformers' own norm computes in float32
    return model


def plain_log_probs(model, ids, action_mask, never=(), temperature=1.0):
    """Returns log pi of each action token in nats, by a forward pass of transformers over `ids`."""
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1] / temperature
    logits = logits.index_fill(1, torch.tensor([*never], dtype=torch.long), -torch.inf)
    found = logits.log_softmax(-1)[range(len(ids) - 1), ids[1:]]
    return found[torch.tensor(action_mask[1:]) > 0]


def fork(work, said, **environment) -> int:
    """Forks a process that runs work(). Returns its id. Its output goes to the file `said`, and so
    does the stack of a process that does not end."""
    if process := os.fork():
        return process
    try:
        file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, 1), os.dup2(file, 2)
        sys.stdout, sys.stderr = open(1, "w"), open(2, "w")
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        faulthandler.register(signal.SIGALRM, file=2, chain=True)  # prints the stack
        signal.alarm(LIMIT // 3)
        os.environ.update(environment)
        AcceleratorState._reset_state(reset_partial_state=True)
        tqdm.set_lock(threading.RLock())  # the shared one stays locked if its holder is killed
        work()
        sys.stdout.flush()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(1)


@pytest.fixture(autouse=True)
def no_process_group():
    """Resets the state of accelerate after each test, for example its precision."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def end_of_ranks(ranks, work, said) -> list[int]:
    """Runs work() on some ranks (gloo), with the environment variables of torchrun. Returns their
    exit statuses. Their output goes to the file `said`."""
    if ranks == 1:
        return [ended(fork(work, said))]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started = [fork(work, said, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks),
                    LOCAL_WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
               for rank in range(ranks)]
    return [*map(ended, started)]


def ended(process) -> int:
    """Returns the exit status of a fork of this process, once it has ended."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def kills_until_it_ends(work, folder, said, seed=0) -> int:
    """Runs work() in forks, each of which resumes after the one before, until one ends by itself.

    A fork is killed at a random operation on a file in `folder`. No two forks are killed at the
    same kind of operation, so that the loop ends on every machine: no clock is read.

    Returns:
        The number of kills.
    """
    rng = random.Random(seed)
    killed = said.with_suffix(".kills")
    killed.write_text("")
    while True:
        numbers = random.Random(rng.random())
        status = ended(fork(lambda: (kill_in(folder, killed, numbers), work()), said))
        if status != -signal.SIGKILL:
            assert status == 0, said.read_text()[-3000:]
            return len(killed.read_text().splitlines())


def kill_in(folder, killed, rng):
    """Kills this process at an operation on a file in a folder: before it renames, deletes or
    creates something, or in the middle of writing a file.

    The file `killed` has a line for each kind of operation at which a process was killed, an event
    and the suffixes of the file."""
    before = killed.read_text().splitlines()

    def kill(event, arguments):  # an audit hook is called before the operation
        path = arguments[0] if arguments else None
        if isinstance(path, (str, Path)) and Path(path).is_relative_to(folder):
            kind = f"{event} {''.join(Path(path).suffixes)}"
            if kind not in before and rng.random() < 0.5:
                killed.write_text("\n".join([*before, kind]))
                if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR):
                    os.write(os.open(path, arguments[2], 0o666), b'{"torn')
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill)


def in_ranks(ranks, work, *arguments):
    """Runs work(accelerator, *arguments) on some ranks (gloo). Returns the result of rank 0."""
    def begin():
        os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # no threads that load weights
        accelerator = Accelerator(cpu=True)
        assert accelerator.num_processes == ranks
        result = work(accelerator, *arguments)
        if accelerator.is_main_process:
            (folder / "result.json").write_text(json.dumps(result))
        accelerator.wait_for_everyone()

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        statuses = end_of_ranks(ranks, begin, folder / "said")
        assert statuses == [0] * ranks, (folder / "said").read_text()[-3000:]
        return json.loads((folder / "result.json").read_text())


def wait_until(condition, what, seconds=300):
    """Waits until condition() is true. Fails with `what` it waited for after the seconds, which are
    enough on a busy machine."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain for {what}"
        time.sleep(0.01)


def wait_for_end(processes):
    """Waits until these processes of psutil have ended."""
    def lives(process):
        with suppress(psutil.NoSuchProcess):
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE

    wait_until(lambda: not any(map(lives, processes)), f"the end of {processes}")


def table(text):
    """Returns the rows of a table, one a line. Its cells are separated by `->`. Lines that begin
    with # are comments."""
    lines = [line for line in text.strip().splitlines() if not line.strip().startswith("#")]
    return [[*map(str.strip, line.split("->"))] for line in lines]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Fails a test that does not end. The traceback shows where it waits."""
    def fail(*_):
        pytest.fail(f"{item.nodeid} did not end in {LIMIT} s; the last line is what it waits for")

    signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, LIMIT, 60)  # again if the teardown waits, too
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@pytest.fixture(scope="session")
def words():
    """The encoder of tiny's tokenizer."""
    return Encoder(read_tokenizer(MODELS["tiny"]))


@pytest.fixture(scope="session")
def agent():
    """(model, encoder). The model's embedding has unused rows."""
    tokenizer = make_tokenizer("chatml")
    rows = len(tokenizer) + 5
    return make_model(rows, seed=1), Encoder(tokenizer, rows)


def pytest_collection_finish():
    """Saves 0.3 s in each load of a model, which otherwise collects garbage of all imports."""
    gc.freeze()


class Toy(Environment):
    """An environment with episodes of two replies, which determine the reward."""
    name, test_splits, max_turns, stops = "toy", ("test",), 2, ("Observation:",)
    splits = {split: {str(n): f"toy-{split}-{n}" for n in range(8)} for split in ("train", "test")}

    def reset(self, task):
        self.task, self.replies = self.find(task), []
        return f"task {task}: say the word"

    def step(self, reply):
        self.replies.append(reply)
        done = len(self.replies) == self.max_turns
        return Step(f"you said {len(reply)}", self.reward() if done else 0.0, done)

    def reward(self):
        solved = self.replies == ["the word"] * 2
        return 1.0 if solved else sum(map(ord, "".join(self.replies))) % 4 / 4

    def expert(self):
        return lambda observation: "the word"

    def close(self):
        self.replies = None


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    """The folder of a random model that is small enough for whole runs in a second."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = make_tokenizer("chatml")
    model = make_model(len(tokenizer), dtype=torch.float32)
    model.config.max_position_embeddings = 4096
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def files_of(folder) -> dict[str, bytes]:
    """Returns all that the phases of a run have made in a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*"))
            if path.suffix in (".jsonl", ".safetensors", ".pt") and path.name != "metrics.jsonl"}


TOY_SFT = ("--sft-epochs", 1, "--max-tokens", 256, "--max-new-tokens", 6, "--slots", 3)
TOY = (*TOY_SFT, "--iterations", 1, "--dpo-epochs", 1, "--dpo-lr", 1e-3)


def core(*flags, run_class=None):
    """Runs the core, which may be that of a changed program."""
    program, main = import_module("coevolve"), import_module("engine.command").run_program
    main([*map(str, flags)], program.Settings, run_class or program.Run, program.METHODS,
         "python coevolve.py")


def program(*flags, run_class=None):
    """Runs `python coevolve.py FLAGS` in this process. SystemExit has the line of an error."""
    def end(line, status):
        assert status == 2 and "\n" not in line and 30 < len(line) < 700, line
        raise SystemExit(line)

    command = import_module("engine.command")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "end", end)
        patch.setattr(command.signal, "signal", lambda *_: None)  # pytest's own stay
        try:
            core(*flags, run_class=run_class)
        finally:
            AcceleratorState._reset_state(reset_partial_state=True)


def in_toy(*flags, env=Toy):
    """Runs the core in the toy as `python coevolve.py` does, in a process of its own."""
    run.make = lambda *_, **__: env()
    core(*TOY, *flags)


def refusal(command, *arguments) -> str:
    """Returns the error of command(*arguments)."""
    try:
        command(*arguments)
    except (SystemExit, UsageError) as error:
        return str(error)
    pytest.fail(f"{arguments} is not refused")


def refused(command, rows):
    """Checks for each (arguments, line) that the error of command(*arguments) is one line that has
    this text. The arguments are written as in a shell."""
    for arguments, line in rows:
        said = refusal(command, *shlex.split(arguments))
        assert line in said and "\n" not in said, (arguments, said)


@pytest.fixture
def toy_run(small_model, tmp_path, monkeypatch):
    """toy_run(*flags, env=environment) runs the core in tmp_path/run, in this process."""
    def start(*flags, env=Toy):
        monkeypatch.setattr(run, "make", lambda *_, **__: env())
        own = TOY_SFT if flags[:2] == ("--method", "sft") else TOY
        program(*own, "--model", small_model, "--out", tmp_path / "run", *flags)
        return tmp_path / "run"

    return start


@pytest.fixture
def new_run(small_model, tmp_path, monkeypatch):
    """new_run(env, Settings, **values) -> a run in tmp_path/run, for phases of the test. The next
    one resumes it."""
    def start(env=Toy, settings=coevolve.Settings, **values):
        monkeypatch.setattr(run, "make", lambda *_, **__: env())
        given = dict(model=str(small_model), out=str(tmp_path / "run"), max_tokens=400)
        return run.Run(settings(**given | values), environment("webshop")())

    return start


@pytest.fixture(scope="session")
def toy(small_model, tmp_path_factory):
    """(folder of a run with the toy environment in place of WebShop, its printed output)."""
    out = tmp_path_factory.mktemp("toy") / "run"
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as said:
        said.reconfigure = lambda **_: None
        patch.setattr(run, "make", lambda *_, **__: Toy())
        program(*TOY, "--model", small_model, "--out", out)
    return out, said.getvalue()


class Again:
    """Wraps an environment as the core does: an episode that breaks is replayed from its start, at
    most twice."""

    def __init__(self, env):
        self.env = env

    def __getattr__(self, name):
        return getattr(self.env, name)

    def reset(self, task):
        self.calls = []
        return self.play(self.env.reset, task)

    def step(self, reply):
        return self.play(self.env.step, reply)

    def play(self, *call):
        """Returns the result of a call. Raises EnvError if the fault persists."""
        self.calls.append(partial(*call))
        calls = self.calls[-1:]
        for replays in reversed(range(3)):
            try:
                return [call() for call in calls][-1]
            except EnvError:
                self.env.close()
                if not replays:
                    raise
                calls = self.calls


@pytest.fixture
def serve():
    """serve(read, answer) -> a server on loopback, which closes at the end of the test.

    `seen` has read(handler, body) of each request. answer(*request) returns status, text, and
    headers or the address of a redirect. `faults` has one entry for each of the next requests: an
    answer, None (closes the connection), "cut" (sends half), seconds of delay, or False (no fault).
    """
    servers = []

    def start(read, answer, protocol="HTTP/1.0"):
        class Handler(BaseHTTPRequestHandler):
            protocol_version = protocol
            wbufsize = 1 << 16  # one packet an answer

            def setup(self):
                super().setup()
                server.connections += 1

            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
                request = read(self, body)
                with lock:
                    server.seen.append(request)
                    fault = server.faults.pop(0) if server.faults else False
                if fault is None:
                    self.close_connection = True
                    return
                if isinstance(fault, float):
                    time.sleep(fault)
                status, text, more = fault if isinstance(fault, tuple) else answer(*request)
                data, headers = text.encode(), {"Location": more} if isinstance(more, str) else more
                self.send_response(status)
                for name, value in {"Content-Length": len(data), **(headers or {})}.items():
                    self.send_header(name, value)
                self.end_headers()
                if fault == "cut":
                    self.close_connection, data = True, data[:len(data) // 2]
                self.wfile.write(data)

            do_GET = do_POST

            def log_message(self, *_):
                pass

        lock, server = threading.Lock(), ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.handle_error = lambda *_: None  # if the client has closed the connection
        server.seen, server.faults, server.connections = [], [], 0
        server.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


KEY = "sk-secret-0123456789"  # of the endpoint


@pytest.fixture
def endpoint(serve, monkeypatch):
    """endpoint.answer(messages) -> reply, or endpoint.respond(body) -> response, see `serve`;
    endpoint.seen are (path, authorization, body)."""
    def respond(body):
        said = dict(choices=[dict(message=dict(content=server.answer(body["messages"])))],
                    usage=dict(prompt_tokens=100, completion_tokens=7))
        return 200, json.dumps(said), {}

    def answer(path, authorization, body):
        return server.respond(body)

    server = serve(lambda handler, body: (
        handler.path, handler.headers.get("Authorization"), json.loads(body)), answer)
    server.answer, server.respond = lambda messages: "c", respond
    server.url += "/v1"
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    return server


SMALL_RUN = ("--env webshop --train-tasks 6 --eval-tasks 2 --iterations 1 --rollouts 2 "
             "--sft-epochs 2 --dpo-epochs 2 --sft-batch 3 --dpo-batch 4").split()


@pytest.fixture(scope="session")
def small_run(tmp_path_factory):
    """Returns the folder of a whole run in the built-in WebShop on a few tasks.

    If several test processes run in parallel, the first one makes it for all of them.
    """
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "shop"
    with FileLock(f"{folder}.lock"):
        program(*SMALL_RUN, "--out", folder)
    return folder
