"""A run: its folder, its machine and its log. What happens in which order is in `coevolve.py`."""

import errno
import fcntl
import hashlib
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, broadcast_object_list
from jinja2 import TemplateError
from safetensors import SafetensorError
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.hub import cached_file, extract_commit_hash

import chat
import dpo
import envs
import report
import scale
import tiny
from experts import read_experts
from settings import Settings, SettingsError


# Settings that change nothing in the files of a run, and so may change when it goes on.
FREE = ("out", "checkpoint_minutes", "track")


class Run:
    """The run's folder and machine: phases that happen once, and the log."""

    def __init__(self, settings: Settings, accelerator: Accelerator):
        """Takes the folder, new or to go on in; SettingsError if it cannot be this run's.

        The order is: what the environment lacks, the lock, a first request, changed settings, and
        only then the base model, which may take minutes; settings are on disk before any phase.
        """
        self.settings, self.accelerator = settings, accelerator
        self.main = accelerator.is_main_process
        large = accelerator.device.type == "cuda" and settings.model != "tiny"
        self.shard, self.recompute = (
            large if flag == "auto" else flag == "on"
            for flag in (settings.shard, settings.gradient_checkpointing))
        self.path, self.logged = run_path(settings), 0
        self._try_environment()
        before = self._find_earlier()
        self.base = tiny.base(accelerator, self) if settings.model == "tiny" else settings.model
        self._record(before)
        if settings.track:
            accelerator.init_trackers("coevolve", {
                name: value for name, value in asdict(settings).items() if value is not None})
            self.logged = (self.path / "metrics.jsonl").read_text().count("\n") if self.main else 0
        n = accelerator.num_processes
        self.say(f"{n} process{'es' * (n > 1)} on {accelerator.device.type}"
                 f"{', weights sharded' * self.shard}; weights and AdamW float32, passes "
                 f"{'bfloat16' if accelerator.mixed_precision == 'bf16' else 'float32'}"
                 f"{', gradient checkpointing' * self.recompute}")
        accelerator.wait_for_everyone()

    def _try_environment(self) -> None:
        """Counts its tasks and, once the folder is locked, begins one: faults show at once."""
        s, env = self.settings, self.make_env()
        self.splits = env.test_splits if s.eval_splits == "test" else ("validation",)
        self._check_task_counts(env)
        self.say(f"{s.env}: " + ", ".join(
            f"{min(asked or math.inf, len(env.tasks(split)))} of {len(env.tasks(split))} {split}"
            for asked, split in [(s.train_tasks, "train"),
                                 *((s.eval_tasks, split) for split in self.splits)])
            + " tasks")
        tasks = ([task for task, _, _ in read_experts(s.experts, env)] if s.experts
                 else env.tasks("train"))
        if self.main:  # alone: a WebShop server must not load its catalogue twice at once
            self._lock()
            env.waits = ()
            env.reset(tasks[:s.train_tasks or None][-1])
        env.close()
        self.accelerator.wait_for_everyone()

    def _find_earlier(self) -> dict | None:
        """config.json of a run that goes on, its settings these; and its finished phases."""
        config, phases = self.path / "config.json", self.path / "phases.json"
        before = report.read_object(config, settings=dict, base=str) if config.exists() else None
        results = [name for name in ("metrics.jsonl", "phases.json", "experts.jsonl", "result.json")
                   if (self.path / name).exists() and (self.path / name).stat().st_size]
        if results and not (before and phases.exists()):
            lacks = "phases.json" if before else "config.json"
            raise SettingsError(f"{self.path} holds {results[-1]} but no {lacks}; restore it or "
                                "give another --out")
        self.phases = report.read_object(phases) if phases.exists() else {}
        for name, done in self.phases.items():
            report.need(f"{phases}, {name}", done, sha256=str, metrics_sha256=str,
                        metrics_bytes=int)
        if not self.phases and not (self.path / "chat.jsonl").exists():
            before = None  # nothing was finished with these settings, nor paid for
        if before:
            now = asdict(self.settings)
            self._refuse_changes({**before["settings"], **{n: now[n] for n in FREE}}, now)
        self.saving_works = any(name.startswith("sft-") for name in self.phases)
        self.finished = []  # phases found or done by this process
        self._drop_unfinished_events()
        return before

    def _record(self, before: dict | None) -> None:
        """Writes config.json and phases.json of a new run; of an old one the model must be this."""
        s = self.settings
        if s.method == "chat":
            made_from = {"base": f"{self.base} {s.model_name}"}
        else:
            check_model(self.base, s.max_tokens)
            made_from = {"base": self.first_says(lambda: identity(self.base))}
        if before:
            self._refuse_changes({"base": before["base"]}, made_from)
            if before.get("code") != code_hash():
                self.say(f"{self.path} was begun by other code: its finished phases stay as they "
                         "are. Give another --out to compute all with this code")
        elif self.main:
            write_text(self.path / "config.json", json.dumps(
                dict(settings=asdict(s), **made_from, code=code_hash(), commit=git_commit(),
                     versions=versions()), indent=1))
        if self.main and not (self.path / "phases.json").exists():
            write_text(self.path / "phases.json", "{}")

    def _check_task_counts(self, env) -> None:
        s = self.settings
        counted = [("eval", s.eval_tasks, self.splits)]
        if not s.experts:  # which otherwise say what the training tasks are
            counted.append(("train", s.train_tasks, ("train",)))
        for flag, asked, splits in counted:
            for split in splits:
                if asked > len(env.tasks(split)):
                    raise SettingsError(f"--{flag}-tasks {asked}: {s.env} has "
                                        f"{len(env.tasks(split))} {split} tasks; 0 takes all")

    def _lock(self) -> None:
        """Makes the folder and holds it for this process."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.lock = open(self.path / "lock", "w")
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingsError(f"{self.path}: another process is running in this folder; wait for "
                                "it or give another --out") from None
        except OSError as error:
            raise SettingsError(f"--out {self.path}: {error.strerror}; give a folder that can be "
                                "written") from None

    def _refuse_changes(self, before: dict, now: dict) -> None:
        changed = [f"{name} ({before.get(name)} -> {now.get(name)})"
                   for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
        if changed:
            raise SettingsError(f"{self.path} was made with other settings: {', '.join(changed)}; "
                                "give another --out, or these again")

    def make_env(self):
        return make_env(self.settings)

    # Phases

    def phase(self, name: str, output: str, work) -> None:
        """Runs work(temporary path) -> numbers for the log, unless it has been done before.

        Done means: recorded with a hash of `output` that still holds. The output appears by
        renaming, so a run killed at any moment has all of it or nothing.
        """
        path = self.path / output
        if self._done(name, path):
            return
        started, temporary = time.perf_counter(), path.with_name(path.name + ".tmp")
        if self.main:
            path.parent.mkdir(exist_ok=True)
            for old in (temporary, path, self.path / "result.json"):
                shutil.rmtree(old) if old.is_dir() else old.unlink(missing_ok=True)
        self.accelerator.wait_for_everyone()
        with writing(temporary):
            numbers = work(temporary)
        self.accelerator.wait_for_everyone()
        if self.main:
            os.replace(temporary, path)
        self.accelerator.wait_for_everyone()  # who reads it next finds it
        if not self.main:
            return
        seconds = time.perf_counter() - started
        self.log("phase", phase=name, seconds=round(seconds, 2), resident_mb=resident_mb(),
                 **numbers)
        metrics = self.path / "metrics.jsonl"
        self.phases[name] = dict(sha256=digest(path), metrics_sha256=digest(metrics),
                                 metrics_bytes=metrics.stat().st_size)
        write_text(self.path / "phases.json", json.dumps(self.phases, indent=1))
        self.say(f"{name:26}{seconds:7.1f} s  " + "  ".join(
            f"{key} {value:.3f}" if isinstance(value, float) else f"{key} {value:,}"
            for key, value in numbers.items()))

    def _done(self, name: str, path: Path) -> bool:
        """Whether the phase is recorded and its output unchanged; else forgets all that follows."""
        earlier = self.finished
        self.finished = [*earlier, name]
        found = name in self.phases and self.first_says(lambda: path.exists() and digest(path))
        if found:
            if found == self.phases[name]["sha256"]:
                return True
            raise SettingsError(f"{path} is not what phase {name} wrote; restore it, or delete it "
                                "to compute it and all that follows again")
        if set(self.phases) - set(earlier):
            self.say(f"{path} is gone: computing it and all that follows again")
            self.phases = {n: self.phases[n] for n in earlier if n in self.phases}
            if self.main:
                write_text(self.path / "phases.json", json.dumps(self.phases, indent=1))
            self._drop_unfinished_events()
        return False

    def _drop_unfinished_events(self) -> None:
        """Cuts the log after the last finished phase: the others will write theirs again."""
        if not self.main:
            return
        last = max(self.phases.values(), key=lambda done: done["metrics_bytes"], default=None)
        metrics = self.path / "metrics.jsonl"
        with open(metrics, "ab") as f:
            f.truncate(min(f.tell(), last["metrics_bytes"] if last else 0))
        if last and digest(metrics) != last["metrics_sha256"]:
            raise SettingsError(f"{metrics} is not what the finished phases wrote; restore it, or "
                                "give another --out")

    def train(self, phase: str, before, out: Path, epochs, objective, normaliser, *, lr, warmup,
              schedule, reference=None, groups=()) -> dict:
        """Trains the agent in folder `before` into folder `out`; returns numbers for the log.

        reference: the folder of pi_ref, whose log-probabilities of `groups` are computed first.
        """
        s, accelerator, last = self.settings, self.accelerator, {}
        tokens = sum(g.tokens for epoch in epochs for batch in epoch for g in batch)
        model = self.load_to_train(reference or before)
        if reference is not None:
            total = sum(g.tokens for g in groups)
            with self.bar(f"{phase} reference", total, "token") as progress:
                dpo.add_reference(accelerator, model, groups, s.tokens_per_forward, progress)
            if reference != before:
                del model
                accelerator.free_memory()
                model = self.load_to_train(before)
        self._check_saving(model, before)
        self.log("precision", phase=phase, processes=accelerator.num_processes, shards=self.shard,
                 **scale.dtypes(accelerator, model))

        def log(event):
            last.update(event)
            self.log("train", phase=phase, **event)

        checkpoint = scale.Checkpoint(accelerator, self.path / "checkpoint", self._inputs(phase),
                                      s.checkpoint_minutes)
        with self.bar(phase, tokens, "token") as progress:
            dpo.fit(accelerator, model, epochs, objective, normaliser, lr=lr, warmup=warmup,
                    schedule=schedule, weight_decay=s.weight_decay, max_grad_norm=s.max_grad_norm,
                    tokens_per_forward=s.tokens_per_forward, log=log, progress=progress,
                    checkpoint=checkpoint)
        if checkpoint.resumed_at:
            self.say(f"{phase} went on after step {checkpoint.resumed_at}")
        self._save(model, before, out)
        checkpoint.remove()
        del model
        accelerator.free_memory()
        return dict(steps=last["step"], tokens=tokens, loss=last["loss"])

    def load_to_train(self, folder):
        return scale.spread(self.accelerator, load_model(folder), self.shard, self.recompute)

    def _save(self, model, before, out: Path) -> None:
        """The model and the tokenizer it came with, as `from_pretrained` reads them."""
        scale.save(self.accelerator, model, out)
        if self.main:
            AutoTokenizer.from_pretrained(before).save_pretrained(out)

    def _check_saving(self, model, before) -> None:
        """Saves the first model once before it trains: what cannot be saved is known at once."""
        if self.saving_works:
            return
        s, trial = self.settings, self.path / "trial"
        if self.main:
            numbers = sum(p.numel() for p in model.parameters())
            needed = sum(scale.disk_bytes(s, numbers))
            if needed > (free := shutil.disk_usage(self.path).free):
                raise SettingsError(f"--out {self.path}: {free / 1e9:.1f} GB are free, and the "
                                    f"run's checkpoints take {needed / 1e9:.1f} GB; give a folder "
                                    "on another disk")
        self._save(model, before, trial)
        if self.main:
            first, again = (load_model(folder).state_dict() for folder in (before, trial))
            said = [dpo.Encoder(AutoTokenizer.from_pretrained(folder)).encode(
                        [{"role": "user", "content": "find a mug"},
                         {"role": "assistant", "content": "Action: search[mug]"}])
                    for folder in (before, trial)]
            wrong = [name for name in first if not torch.equal(first[name], again[name])]
            if wrong or said[0] != said[1]:
                raise SettingsError(f"--model {before}: saved and loaded again, "
                                    f"{wrong[0] if wrong else 'its tokenizer'} is not the same; "
                                    "use another model, or another version of transformers")
            shutil.rmtree(trial)
        self.saving_works = True
        self.accelerator.wait_for_everyone()

    def _inputs(self, phase: str) -> str:
        """Identifies a phase and what it starts from: the phases before it, with their hashes."""
        done = {name: recorded["sha256"] for name, recorded in self.phases.items()}
        return self.first_says(
            lambda: hashlib.sha256(json.dumps([phase, done]).encode()).hexdigest())

    def first_says(self, answer):
        """What `answer()` is on the main rank, on all ranks."""
        return broadcast_object_list([answer() if self.main else None])[0]

    def agent(self, agent: str, i: int) -> Path:
        """The folder of an agent's checkpoint after iteration i; 0 is after SFT."""
        if self.settings.method == "evaluate":
            return self.base
        return self.path / (f"iter{i}/{agent}-agent" if i else f"sft-{agent}")

    # Files and log

    def read_jsonl(self, name: str) -> list[dict]:
        return report.read_jsonl(self.path / name)

    def write_jsonl(self, path: Path, rows: list[dict]) -> None:
        if self.main:
            write_text(path, "".join(json.dumps(row) + "\n" for row in rows))

    def log(self, event: str, **fields) -> None:
        if self.main:
            metrics = self.path / "metrics.jsonl"
            with writing(metrics), open(metrics, "a") as f:
                f.write(json.dumps(dict(event=event, **fields)) + "\n")
            if self.settings.track:
                self.logged += 1  # trackers want steps that rise
                self.accelerator.log(dict(numbers(event, fields)), step=self.logged)

    def log_dropped(self, phase: str, reason: str, tasks: list[str]) -> None:
        if tasks:
            self.log("dropped", phase=phase, reason=reason, count=len(tasks), tasks=tasks[:10])

    def bar(self, phase: str, total: int, unit: str):
        return tqdm(total=total, unit=unit, desc=phase, leave=False, disable=not self.main,
                    unit_scale=unit == "token", dynamic_ncols=True)

    def say(self, line: str) -> None:
        if self.main:
            tqdm.write(line)


def make_accelerator(s: Settings) -> Accelerator:
    """The processes, device and precision that this machine offers; SettingsError if not usable."""
    gpu = torch.cuda.is_available()  # not MPS: log-probabilities are summed in float64
    # The tiny model computes alike everywhere, so that its results do not depend on the machine.
    bf16 = gpu and s.model != "tiny" and torch.cuda.is_bf16_supported(including_emulation=False)
    if torch.cuda.device_count() and not gpu and s.model != "tiny" and s.method != "chat":
        raise SettingsError(f"{torch.cuda.device_count()} GPUs are here, but torch "
                            f"{torch.__version__} cannot use them; update their driver, or set "
                            "CUDA_VISIBLE_DEVICES= to train on the CPU")
    try:
        accelerator = Accelerator(
            cpu=not gpu, mixed_precision="bf16" if bf16 else "no", log_with=s.track,
            project_dir=run_path(s),
            # One rank may play for hours longer than another. The launcher sees it if one dies.
            kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(days=7))])
    except ValueError as error:
        if not s.track:
            raise
        raise SettingsError(f"--track {s.track}: {error}") from None  # there is no such tracker
    if s.track and not accelerator.log_with:
        raise SettingsError(f"--track {s.track}: its package is not installed; "
                            f"pip install {s.track}")
    if accelerator.distributed_type not in ("NO", "MULTI_GPU", "MULTI_CPU"):
        raise SettingsError(f"accelerate is configured for {accelerator.distributed_type}; run "
                            "`accelerate config` without it: --shard shards the weights")
    return accelerator


def run_path(s: Settings) -> Path:
    return Path(s.out or f"runs/{s.env}-{s.method}-s{s.seed}{'-quick' * s.quick}")


def numbers(prefix: str, fields: dict):
    """(name, number) of all numbers in an event; its texts, such as the phase, lead the names."""
    prefix = "/".join([prefix, *(v for v in fields.values() if isinstance(v, str))])
    for key, value in fields.items():
        if isinstance(value, dict):
            yield from numbers(f"{prefix}/{key}", value)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield f"{prefix}/{key}", value


def make_env(s: Settings):
    return envs.Resumed(envs.make(
        s.env, s.view, webshop_url=s.webshop_url, task_types=s.task_types,
        split_file=s.split_file, intercode_data=s.intercode_data, mysql_url=s.mysql_url))


def load_model(folder, dtype=torch.float32):
    """A causal LM from a folder or hub name; fp32 to train: bf16 weights would not move at 1e-6."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="ragged")


def check_model(folder, max_tokens: int, weights: bool = True) -> None:
    """SettingsError if the model in `folder` (or on the hub) cannot be used.

    It is made without memory and runs on two sequences; no code but transformers' own is loaded.
    weights: whether it has to have them.
    """
    local = Path(folder).is_dir()
    try:
        if not local and not re.fullmatch(r"[\w-][\w.-]*(/[\w.-]+)?", str(folder)):  # of the hub
            raise ValueError("there is no such folder")
        for name in ("config.json", "tokenizer_config.json") if local else ():
            if "auto_map" in json.loads((Path(folder) / name).read_text(encoding="utf-8")):
                raise ValueError(f"its {name} has an auto_map, which names code to be run with it; "
                                 "use a model without code of its own")
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if not any(name.endswith("ForCausalLM") for name in config.architectures or []):
            raise ValueError(f"its architecture is {config.architectures}, not a causal LM")
        if not isinstance(getattr(config, "num_key_value_heads", None), int):
            raise ValueError(f"{config.architectures[0]} has no num_key_value_heads; use one built "
                             "like Llama, Qwen2 or Qwen3")
        if max_tokens > config.max_position_embeddings:
            raise ValueError(f"--max-tokens {max_tokens} is above its "
                             f"{config.max_position_embeddings} positions")
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        encoder = dpo.Encoder(tokenizer)
        used = max(tokenizer.vocab_size, encoder.end_of_turn + 1)  # others beyond are never used
        if used > config.vocab_size:
            raise ValueError(f"its tokenizer has {used:,} tokens, its model "
                             f"{config.vocab_size:,}; they do not belong together")
        if not weights:
            return
        if local and not any(Path(folder).glob("*.safetensors")):
            raise ValueError("no *.safetensors file with weights in it (files of other kinds may "
                             "hold code and are not read)")
        model, found = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="ragged", device_map="meta", output_loading_info=True,
            use_safetensors=True, trust_remote_code=False)
        if lacking := sorted(found["missing_keys"]) + sorted(map(str, found["mismatched_keys"])):
            raise ValueError(f"{len(lacking)} of its weights are missing or of another size, such "
                             f"as {lacking[0]}")
        ids = torch.zeros(1, 4, dtype=torch.long, device="meta")
        with suppress(RuntimeError):  # an operation that meta tensors do not have
            model(input_ids=ids, position_ids=ids, lengths=[2, 2], use_cache=False)
    # What a file that is not what it says makes of the libraries that read it.
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RuntimeError, RecursionError,
            TemplateError, SafetensorError) as error:
        problem = str(error).strip().splitlines() or [type(error).__name__]
        raise SettingsError(
            f"--model {folder}: {problem[0]}; give tiny, a hub name within reach, or a folder with "
            "config, weights and tokenizer") from None


def identity(folder) -> str:
    """A hash of a model's files, or the commit of one on the hub."""
    if Path(folder).is_dir():
        return digest(Path(folder))
    return f"{folder} {extract_commit_hash(cached_file(folder, 'config.json'), None)}"


def code_hash() -> str:
    """A hash of this project's Python files, changed by every edit."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256("".join(map(digest, files)).encode()).hexdigest()


def git_commit() -> str | None:
    """The commit of this copy, with -dirty if files differ from it."""
    if not shutil.which("git"):
        return None
    git = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
                         capture_output=True, text=True, cwd=Path(__file__).parent)
    return git.stdout.strip() or None


def versions() -> dict:
    return {"python": platform.python_version(),
            **{name: version(name) for name in ("torch", "transformers", "accelerate", "numpy")}}


def digest(path: Path) -> str:
    """sha256 over a file, or over the names and contents of a folder's files."""
    total = hashlib.sha256()
    for file in sorted(p for p in path.rglob("*") if p.is_file()) if path.is_dir() else [path]:
        total.update(f"{file.name} {file.stat().st_size} ".encode())
        with open(file, "rb") as f:
            while block := f.read(1 << 20):
                total.update(block)
    return total.hexdigest()


def write_text(path: Path, text: str) -> None:
    """The whole text or nothing: written beside `path`, then renamed."""
    temporary = path.with_name(path.name + ".part")
    with writing(path):
        temporary.write_text(text)
        os.replace(temporary, path)


# What a disk that is full, broken or not ours says.
UNWRITABLE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EACCES,
              errno.EPERM}


@contextmanager
def writing(path: Path):
    """Adds `path` to an error of the disk (UNWRITABLE) that names no file."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(errno.EIO, str(error), str(path)) from None
    except OSError as error:
        if error.errno not in UNWRITABLE or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def resident_mb() -> int:
    """This process's resident memory in MB (0 where /proc is not there)."""
    statm = Path("/proc/self/statm")
    pages = int(statm.read_text().split()[1]) if statm.exists() else 0
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


# ------------------------------------------------------------------------------- how a run ends

# What gloo and NCCL say where the process at the other end has died.
PEER_GONE = ("closed by peer", "reset by peer", "remote process exited", "Broken pipe")


def one_line(error: Exception) -> str | None:
    """The message for an expected error, the user's or the machine's; None: it is a bug."""
    if isinstance(error, (SettingsError, report.RunError)):
        return str(error)
    if isinstance(error, FloatingPointError):
        return (f"{error}; all finished phases are kept; look at these tasks, or lower the "
                "learning rate and give another --out")
    if isinstance(error, (envs.EnvError, chat.EndpointError)) or (
            isinstance(error, OSError) and error.errno in UNWRITABLE):
        return f"{error}. The same command goes on from here once that is mended"
    if isinstance(error, RuntimeError) and any(s in str(error) for s in PEER_GONE):
        return (f"process {os.environ.get('RANK', '0')} ends because another of this run has "
                "ended; its message says why")
    return None


def end(line: str, status: int) -> None:
    """Ends this process at once, with one line; it waits for no environment that hangs.

    Nothing is lost by it: what was finished is on the disk, simulators end with their parent, and
    servers see their connections close.
    """
    os.write(2, f"\rcoevolve.py: {line}\n".encode(errors="replace"))
    with suppress(Exception):
        sys.stdout.flush()
    os._exit(status)


def stop(number, _) -> None:  # by Ctrl-C or SIGTERM; of several ranks one speaks
    if os.environ.get("RANK", "0") == "0":
        end("stopped; the same command goes on from here", 128 + number)
    os._exit(128 + number)
