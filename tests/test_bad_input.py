"""A user's mistakes: each is one line with object, value and remedy, before anything is written."""

import gc
import json
import os
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from conftest import make_model, make_tokenizer
from safetensors.torch import load_file, save_file
from transformers import (
    BartConfig,
    BartForCausalLM,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import envs
import mutual
from harness import settings
from harness.settings import Settings, SettingsError
from program import start

ROOT = Path(__file__).parent.parent
HINTS = get_type_hints(Settings)


def one_line(error) -> str:
    """What a user reads of an error; it must be theirs, whole and short."""
    line = start.one_line(error)
    assert line, repr(error)
    assert "\n" not in line and "Traceback" not in line and 20 < len(line) < 700, line
    return line


def refused(*flags) -> str:
    """The line with which a run is refused that would start with these flags."""
    try:
        start.main([str(flag) for flag in flags], mutual.loop_of)
    except Exception as error:
        line = one_line(error)
    gc.collect()  # of the run, which holds its folder
    return line


# ------------------------------------------------------------------------------ settings

LEAST = {  # of every number, the least that is possible; above: that is not possible itself
    "seed": 0, "iterations": 1, "train_tasks": 0, "eval_tasks": 0, "sft_epochs": 1, "sft_batch": 1,
    "dpo_epochs": 1, "dpo_batch": 1, "rollouts": 1, "max_tokens": 1, "max_new_tokens": 1,
    "slots": 1, "tokens_per_forward": 1, "threads": 0, "cut_turns": -1, "expert_min_reward": 0,
    "hard_threshold": 0, "sft_warmup": 0, "dpo_warmup": 0, "lambda_dpo": 0, "lambda_sft": 0,
    "weight_decay": 0, "temperature": 0, "sft_lr": "above 0", "dpo_lr": "above 0",
    "dpo_lr_later": "above 0", "beta": "above 0", "beta_later": "above 0",
    "max_grad_norm": "above 0", "checkpoint_minutes": 0, "dpo_steps": 0, "samples": 1,
    "dart_budget": 0, "ppo_rollouts": 2, "ppo_epochs": 1, "ppo_batch": 1, "ppo_lr": "above 0",
    "ppo_clip": "above 0", "ppo_kl": 0, "examples": 0, "price_in": 0, "price_out": 0,
    "start_tasks": 1, "grpo_steps": 1, "evolve_every": 1, "evaluate_every": 1, "step_tasks": 1,
    "step_rollouts": 2, "grpo_batch": 1, "grpo_lr": "above 0", "grpo_temperature": "above 0",
    "grpo_kl": 0, "clip_low": "above 0", "clip_high": "above 0", "window": 1,
    "rare_below": "above 0", "rare_min": 1, "picks": 1, "explorer_episodes": 1,
    "explorer_temperature": "above 0", "add_most": 0, "near_text": "above 0",
    "margins": 0,
}
MOST = {"expert_min_reward": 1, "hard_threshold": 1, "sft_warmup": 0.999, "dpo_warmup": 0.999,
        "threads": 1024, "examples": 2, "clip_low": 0.999, "rare_below": 100, "near_text": 1}


def settings_cases():
    """(flags, what the line must name) for every setting."""
    for f in fields(Settings):
        flag, hint = f"--{f.name.replace('_', '-')}", HINTS[f.name]
        if get_origin(hint) is Literal:
            yield [flag, "bogus"], "invalid choice: 'bogus'"
            yield [flag, get_args(hint)[0].upper()], "invalid choice"
        elif hint is bool:
            yield [flag, "maybe"], "maybe"
        elif hint in (int, float):
            least = LEAST[f.name]
            below = "0" if least == "above 0" else str(least - 1)
            yield [flag, "many"], f"invalid {hint.__name__} value: 'many'"
            yield [flag, ""], "''"
            yield [flag, below], f"{flag} {float(below) if hint is float else below}: must be"
            yield [flag, "1e400" if hint is float else "9" * 30], "must be"
            if hint is float:
                yield [flag, "nan"], f"{flag} nan: must be"
            if f.name in MOST:
                above = str(MOST[f.name] + 1)
                yield [flag, above], "must be"
        else:  # a name or an address
            yield [flag, ""], f"{flag} '': is empty"
        if hint is not bool:
            yield [flag], "expected one argument"


CONTRADICTIONS = {
    "--max-tokens 32 --max-new-tokens 32": "--max-new-tokens 32: must be below --max-tokens 32",
    "--lambda-dpo 0 --lambda-sft 0": "nothing would be trained",
    "--webshop-url http://h:1": "--webshop-url: give --experts FILE too",
    "--webshop-url http://h:1 --experts f": "--webshop-url: the tiny model knows",
    "--webshop-url http://u:p@h:1 --experts f --model m": "must be http://host:port",
    "--webshop-url http://h:70000 --experts f --model m": "must be http://host:port",
    "--webshop-url http://h:0 --experts f --model m": "must be http://host:port",
    "--webshop-url file:///etc/passwd --experts f --model m": "must be http://host:port",
    "--webshop-url http:\\\\h --experts f --model m": "must be http://host:port",
    "--webshop-url http://[::1 --experts f --model m": "must be http://host:port",
    "--env scienceworld --webshop-url http://h:1": "is for webshop, not for scienceworld",
    "--env webshop --mysql-url mysql://a@h": "is for intercodesql, not for webshop",
    "--env webshop --intercode-data d": "is for intercodesql, not for webshop",
    "--env intercodesql --task-types short": "is for scienceworld, not for intercodesql",
    "--env intercodesql --split-file f": "is for scienceworld and webshop, not for intercodesql",
    "--env intercodesql --mysql-url mysql://a@h --model m": "give --intercode-data FOLDER too",
    "--env intercodesql --intercode-data d": "the tiny model knows the generated databases' words",
    "--env intercodesql --intercode-data d --model m --mysql-url h": "must be mysql://user",
    "--env intercodesql --intercode-data d --model m --mysql-url mysql://a@h:70000": "mysql://user",
    "--env intercodesql --intercode-data d --model m --mysql-url mysql://a@h:0": "mysql://user",
    "--env intercodesql --intercode-data d --model m --mysql-url http://a@h": "mysql://user",
    "--env bfcl": "--model tiny: it cannot read the documents of functions; give another --model",
    "--env webshop --bfcl-split published": "is for bfcl, not for webshop",
    "--env intercodesql --bfcl-category all": "is for bfcl, not for intercodesql",
    "--env scienceworld --bfcl-reward turns": "is for bfcl, not for scienceworld",
    "--dry-run 8xH100": "--dry-run: is for a model to be trained here",
    "--method eto --failure-from r": "--failure-from: eto has no failure agent",
    "--method sft --explore-again": "--explore-again: sft has no second agent",
    "--method ppo --temperature 0": "--temperature 0: all rollouts of an instruction would be the same",
    "--method rft --temperature 0": "--temperature 0",
    "--method eto --temperature 0 --rollouts 2": "--temperature 0",
    "--model https://h/v1": "--model-name: give the model's name",
    "--model https://h/v1 --model-name m --method eto": "an endpoint needs --method chat",
    "--model https://u:p@h/v1 --model-name m": "must be http://host",
    "--method chat": "an endpoint needs --method chat, and chat an endpoint",
    "--sft-epochs 0 --dpo-epochs 0": "--sft-epochs 0, --dpo-epochs 0",
    "--no-such-flag": "unknown: --no-such-flag",
    "--seed 1 surplus": "unknown: surplus",
    "--webshop_urll http://h": "unknown: --webshop_urll",
}


def test_the_table_holds_every_number():
    numbers = {f.name for f in fields(Settings) if HINTS[f.name] in (int, float)}
    assert numbers == set(LEAST)


@pytest.mark.parametrize("flags, names", list(settings_cases()), ids=lambda x: " ".join(x)[:40])
def test_a_wrong_setting_is_named(flags, names):
    with pytest.raises(SettingsError) as error:
        settings.parse(flags)
    line = one_line(error.value)
    assert names in line and flags[0] in line, line


@pytest.mark.parametrize("flags", CONTRADICTIONS)
def test_settings_that_contradict_each_other_are_named(flags):
    with pytest.raises(SettingsError) as error:
        settings.parse(flags.split())
    for part in CONTRADICTIONS[flags].split(", "):
        assert part in one_line(error.value)


# ------------------------------------------------------------------------------ experts files

OK = [("human", "rules"), ("gpt", "OK"), ("human", "Instruction: mug"), ("gpt", "Action: search[a]")]


def eto(turns=OK, id="webshop_17", **more):
    return {"id": id, "conversations": [{"from": f, "value": v} for f, v in turns], **more}


def ours(task="webshop-train-17", roles=("user", "assistant"), **changed):
    messages = [{"role": role, "content": f"text {n}"} for n, role in enumerate(roles)]
    return {"task": task, "messages": messages, "reward": 1.0, **changed}


EXPERTS = {  # name -> (content, what the line must say)
    "empty": ("", "holds no trajectory"),
    "blank": (" \n ", "not a whole JSON object"),
    "an empty list": ("[]", "holds no trajectory"),
    "no JSON": ("task: webshop", "line 1: not a whole JSON object"),
    "half of a list": (json.dumps([eto()])[:-9], "give ETO's JSON list"),
    "half of a line": (json.dumps(ours())[:-9], "line 1: not a whole JSON object"),
    "a second line that is none": (json.dumps(ours()) + "\n{'task'}\n", "line 2: not a whole"),
    "a number": ("7", "not a whole JSON object"),
    "a text": ('"experts"', "not a whole JSON object"),
    "null": ("null", "not a whole JSON object"),
    "a list of numbers": ("[1, 2]", "entry 0: not a trajectory"),
    "a list of lists": ("[[]]", "entry 0: not a trajectory"),
    "a list of null": ("[null]", "entry 0: not a trajectory"),
    "an object of the wrong shape": ('{"experts": []}', "entry 0: not a trajectory (KeyError"),
    "a task alone": ('{"task": "a"}', "entry 0: not a trajectory (KeyError: 'messages')"),
    "deep brackets": ("[" * 100_000, "give ETO's JSON list"),
    "deep objects": ('{"a":' * 100_000, "line 1: not a whole JSON object"),
    "invalid UTF-8": (b'[{"id": "\xff"}]', "codec can't decode"),
    "UTF-16": ("[]".encode("utf-16"), "codec can't decode"),
    "a NUL": ("\0", "not a whole JSON object"),
    "half of a surrogate pair": (json.dumps([eto(OK[:3] + [("gpt", "Action: \ud800")])]),
                                 "entry 0: not a trajectory (UnicodeEncodeError"),
    "no id": (json.dumps([{"conversations": []}]), "KeyError: 'id'"),
    "an id without a number": (json.dumps([eto(id="webshop")]), "entry 0: not a trajectory"),
    "a goal that is not there": (json.dumps([eto(id="webshop_99999")]), "unknown task"),
    "a number of 5,000 digits": (json.dumps([eto(id="webshop_" + "9" * 5000)]), "entry 0: not a"),
    "a task of another environment": (json.dumps(ours("scienceworld-train-boil-0")), "unknown task"),
    "a task that is a number": (json.dumps(ours(17)), "entry 0: not a trajectory (TypeError"),
    "a task that is a list": (json.dumps(ours(["a"])), "entry 0: not a trajectory (TypeError"),
    "an unknown split": (json.dumps(ours("webshop-dev-3")), "unknown task 'webshop-dev-3'"),
    "no conversation": (json.dumps([eto([])]), "entry 0: not a trajectory"),
    "a conversation of one turn": (json.dumps([eto(OK[:1])]), "entry 0: not a trajectory"),
    "no reply": (json.dumps([eto(OK[:3])]), "entry 0: not a trajectory"),
    "an unknown sender": (json.dumps([eto(OK[:2] + [("system", "x"), ("gpt", "Action: a")])]),
                          "KeyError: 'system'"),
    "an unknown role": (json.dumps(ours(roles=("user", "tool"))), "not user and assistant in turn"),
    "a system turn": (json.dumps(ours(roles=("system", "user", "assistant"))), "not user and"),
    "two replies in a row": (json.dumps([eto(OK + [("gpt", "Action: b")])]), "not user and assi"),
    "two pages in a row": (json.dumps(ours(roles=("user", "user", "assistant"))), "not user and"),
    "a reply first": (json.dumps(ours(roles=("assistant", "user", "assistant"))), "not user and"),
    "turns that are texts": (json.dumps(ours(messages=["a", "b"])), "entry 0: not a trajectory"),
    "turns that are no list": (json.dumps(ours(messages=7)), "entry 0: not a trajectory"),
    "a turn without a text": (json.dumps(ours(messages=[{"role": "user"}, {"role": "assistant"}])),
                              "KeyError: 'content'"),
    "a turn of null": (json.dumps([eto(OK[:3] + [("gpt", None)])]), "entry 0: not a trajectory"),
    "a turn of numbers": (json.dumps([eto(OK[:3] + [("gpt", 3)])]), "entry 0: not a trajectory"),
    "a reward of 70": (json.dumps([eto(reward=70)]), "reward 70 is not a number in [0, 1]"),
    "a negative reward": (json.dumps([eto(reward=-0.1)]), "reward -0.1 is not a number in"),
    "a reward of NaN": (json.dumps([eto(reward=float("nan"))]), "reward nan is not a number in"),
    "an infinite reward": (json.dumps([eto(reward=float("inf"))]), "reward inf is not"),
    "a reward in words": (json.dumps([eto(reward="full")]), "reward 'full' is not a number"),
    "a reward of true": (json.dumps([eto(reward=True)]), "reward True is not a number"),
    "a reward of null": (json.dumps([eto(reward=None)]), "reward None is not a number"),
    "a reward that is a list": (json.dumps([eto(reward=[1] * 999)]), "is not a number in [0, 1]"),
    "no reward": (json.dumps({k: v for k, v in ours().items() if k != "reward"}), "'reward'"),
    "a task twice": (json.dumps([eto(), eto()]), "entry 1: webshop-train-17 is there twice"),
    "a task twice in two forms": (json.dumps([eto(), ours()]), "entry 1: webshop-train-17 is there"),
    "a line of 100 MB": (b'{"task": "' + b"x" * 100_000_000 + b'"', "line 1: not a whole JSON"),
}


@pytest.fixture(scope="module")
def shop():
    return envs.make("webshop", "short")


@pytest.mark.parametrize("case", EXPERTS)
def test_an_experts_file_that_is_wrong_is_named(case, shop, tmp_path):
    content, says = EXPERTS[case]
    path = tmp_path / "experts.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(envs.Refused) as error:
        envs.read_experts(path, shop)
    line = one_line(error.value)
    assert says in line and f"--experts {path}" in line, line


@pytest.mark.parametrize("kind, id, says", [
    ("scienceworld", "sciworld_99_0", "does not end in the numbers of a type and a variation"),
    ("scienceworld", "sciworld_0_999", "does not end in the numbers"),
    ("intercodesql", "intercode_99999", "unknown task 'intercodesql-train-99999'"),
])
def test_experts_of_tasks_that_do_not_exist_are_refused(kind, id, says, tmp_path):
    (tmp_path / "f").write_text(json.dumps([eto(id=id)]))
    with pytest.raises(envs.Refused, match=says):
        envs.read_experts(tmp_path / "f", envs.make(kind))


def test_a_missing_experts_file_and_a_folder_are_named(shop, tmp_path):
    for path in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(envs.Refused, match="--experts .*give ETO's JSON list") as error:
            envs.read_experts(path, shop)
        one_line(error.value)


# ------------------------------------------------------------------------------ whole commands

def tree(folder):
    return {path: path.read_bytes() for path in folder.rglob("*")
            if path.is_file() and path.name != "lock"}


def flags(out, model, *more):
    return ["--model", model, "--view", "short", "--train-tasks", 2, "--eval-tasks", 1,
            "--iterations", 1, "--sft-epochs", 1, "--max-tokens", 2500, "--max-new-tokens", 4,
            "--threads", 1, "--out", out, *more]


def edit(folder, name, **changed):
    """Sets (or with None removes) fields of a JSON file."""
    values = json.loads((folder / name).read_text()) | changed
    (folder / name).write_text(json.dumps({k: v for k, v in values.items() if v is not None}))


def without_weights(folder):
    (folder / "model.safetensors").unlink()


def pickled(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    without_weights(folder)


def without_a_layer(folder):
    weights = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in weights.items() if "layers.1." not in k},
              folder / "model.safetensors", {"format": "pt"})


def half_of_the_weights(folder):
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:len(whole) // 2])


def of_another_tokenizer(folder):
    model = make_model(100, dtype=torch.float32)
    model.config.max_position_embeddings = 4096
    model.save_pretrained(folder)


def other(make):
    def build(folder):
        make(len(make_tokenizer("chatml"))).save_pretrained(folder)
    return build


def small(vocabulary):
    return dict(vocab_size=vocabulary, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096)


CODE = {"auto_map": {"AutoModelForCausalLM": "evil.Model", "AutoTokenizer": ["evil.T", None]}}
MODELS = {  # what is done to a folder that is right -> what the line must say
    "no tokenizer": (lambda f: [p.unlink() for p in f.glob("tokenizer*")], "tokenizer"),
    "no tokenizer.json": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer"),
    "half of a tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), "--model"),
    "no chat template": (lambda f: (f / "chat_template.jinja").unlink(), "no chat template"),
    "a broken chat template": (lambda f: (f / "chat_template.jinja").write_text("{% for %}"),
                               "--model"),
    "a template without turns": (lambda f: (f / "chat_template.jinja").write_text("hello"),
                                 "chat template rewrites a turn"),
    "a template that forbids": (lambda f: (f / "chat_template.jinja").write_text(
        "{{ raise_exception('no') }}"), "no; give tiny"),
    "a template that thinks": (lambda f: (f / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content.split('</think>')[-1] }}<|im_end|>{% endfor %}"),
        "rewrites"),
    "no weights": (without_weights, "no *.safetensors file"),
    "pickled weights": (pickled, "files of other kinds may hold code"),
    "half of the weights": (half_of_the_weights, "--model"),
    "a layer without weights": (without_a_layer, "weights are missing or of another size"),
    "weights of another size": (lambda f: edit(f, "config.json", intermediate_size=64), "size"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json"),
    "half of a config": (lambda f: (f / "config.json").write_text('{"model_type"'), "--model"),
    "an empty config": (lambda f: (f / "config.json").write_text("{}"), "model_type"),
    "a config that is a list": (lambda f: (f / "config.json").write_text("[]"), "--model"),
    "an unknown architecture": (lambda f: edit(f, "config.json", model_type="mystery"), "mystery"),
    "no architecture": (lambda f: edit(f, "config.json", architectures=None), "not a causal LM"),
    "code in the config": (lambda f: edit(f, "config.json", **CODE),
                           "its config.json has an auto_map"),
    "code in the tokenizer": (lambda f: edit(f, "tokenizer_config.json", **CODE),
                              "its tokenizer_config.json has an auto_map"),
    "an encoder with a decoder": (other(lambda v: T5ForConditionalGeneration(T5Config(
        vocab_size=v, d_model=16, d_ff=16, num_layers=1, num_heads=2))), "not a causal LM"),
    "another causal LM": (other(lambda v: GPT2LMHeadModel(GPT2Config(
        vocab_size=v, n_embd=32, n_layer=1, n_head=2))), "--max-tokens 2500 is above 1024, its"),
    "convolutions": (other(lambda v: Lfm2ForCausalLM(Lfm2Config(**small(v), layer_types=["conv"]))),
                     "layers of type conv"),
    "positions of its own": (other(lambda v: BartForCausalLM(BartConfig(
        vocab_size=v, d_model=32, decoder_layers=1, decoder_attention_heads=4,
        max_position_embeddings=4096))),
        "nats off in training: the first numbers that differ are those of model.decoder."),
    "attention twice a layer": (other(lambda v: DiffLlamaForCausalLM(DiffLlamaConfig(**small(v)))),
                                "layer 0 attends more than once in a pass"),
    "sliding windows": (other(lambda v: MistralForCausalLM(MistralConfig(
        **small(v), sliding_window=16))), "--max-tokens 2500 is above 16, its sliding window"),
    "too few positions": (other(lambda v: LlamaForCausalLM(LlamaConfig(
        **{**small(v), "max_position_embeddings": 100}))), "--max-tokens 2500 is above 100, its positions"),
    "another tokenizer's model": (of_another_tokenizer, "do not belong together"),
    "an empty folder": (lambda f: [p.unlink() for p in f.iterdir()], "--model"),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_model_that_cannot_be_used_is_named(case, small_model, tmp_path):
    folder = shutil.copytree(small_model, tmp_path / "model")
    change, says = MODELS[case]
    change(folder)
    before = tree(tmp_path)
    line = refused(*flags(tmp_path / "run", folder))
    assert says in line and f"--model {folder}" in line, line
    found = tree(tmp_path)
    for name in ("metrics.jsonl", "phases.json"):  # empty
        found.pop(tmp_path / "run" / name, None)
    assert found == before  # nothing was trained or overwritten, and the next command may follow


def test_a_model_that_is_no_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "file").write_text("x")
    for model in (tmp_path / "nowhere", tmp_path / "file", "no/such/model", "~", "a b", "x" * 200):
        assert f"--model {model}" in refused(*flags(tmp_path / "run", model))


def test_a_folder_for_the_run_that_is_none_is_named(small_model, tmp_path):
    (tmp_path / "file").write_text("x")
    assert "give a folder that can be written" in refused(*flags(tmp_path / "file", small_model))
    assert "give a folder that can be written" in refused(*flags("/proc/run", small_model))
    # A folder of something else: neither its files are taken for a run's nor overwritten.
    model = shutil.copytree(small_model, tmp_path / "model")
    before = tree(model)
    assert "config.json: damaged" in refused(*flags(model, small_model))
    assert tree(model) == before
    for name in ("experts.jsonl", "phases.json", "result.json", "metrics.jsonl"):
        other = tmp_path / f"with {name}"
        other.mkdir()
        (other / name).write_text('{"a": 1}\n')
        assert f"holds {name} but no config.json" in refused(*flags(other, small_model))
        assert (other / name).read_text() == '{"a": 1}\n'


def test_another_runs_folder_is_refused_with_what_differs(small_model, tmp_path):
    out, more = tmp_path / "run", ["--method", "sft"]
    start.main([str(f) for f in flags(out, small_model, *more)], mutual.loop_of)
    gc.collect()
    before = tree(out)
    for changed, names in [(["--env", "intercodesql"], "env (webshop -> intercodesql)"),
                           (["--seed", 7], "seed (0 -> 7)"),
                           (["--sft-lr", 1e-4], "sft_lr (1e-05 -> 0.0001)")]:
        line = refused(*flags(out, small_model, *more, *changed))
        assert names in line and str(out) in line and "another --out" in line
        assert tree(out) == before
    config = json.loads((out / "config.json").read_text())
    del config["settings"]["rollouts"]  # of a version that did not have it
    (out / "config.json").write_text(json.dumps(config))
    assert "rollouts (None -> 1)" in refused(*flags(out, small_model, *more))
    retrained = shutil.copytree(small_model, tmp_path / "model")
    (retrained / "more").write_text("x")
    config["settings"].update(rollouts=1, model=str(retrained))
    (out / "config.json").write_text(json.dumps(config))
    assert "base (" in refused(*flags(out, retrained, *more))


def test_experts_that_do_not_fit_are_refused_before_anything_is_trained(small_model, tmp_path):
    expert = ours(reward=0.5)
    expert["messages"][0]["content"] = envs.make("webshop", "short").reset(expert["task"])
    (tmp_path / "e").write_text(json.dumps(expert))
    line = refused(*flags(tmp_path / "run", small_model, "--experts", tmp_path / "e"))
    assert "1 at or below --expert-min-reward 0.7" in line
    (tmp_path / "e").write_text(json.dumps(expert | {"reward": 1.0}))
    line = refused(*flags(tmp_path / "run", small_model, "--experts", tmp_path / "e",
                          "--max-tokens", 8))
    assert "1 longer than --max-tokens 8" in line
    assert not list((tmp_path / "run").glob("sft*"))
    # The same folder takes a corrected command, for nothing was done with the first one's.
    corrected = flags(tmp_path / "run", small_model, "--experts", tmp_path / "e", "--method", "sft")
    start.main([str(f) for f in corrected], mutual.loop_of)


@pytest.mark.parametrize("more, says", [
    (["--train-tasks", 601], "--train-tasks 601: webshop has 600 train tasks"),
    (["--eval-tasks", 251], "--eval-tasks 251: webshop has 250 test tasks"),
    (["--experts", "/nowhere"], "--experts /nowhere: "),
    (["--env", "scienceworld", "--split-file", "/nowhere"], "--split-file /nowhere"),
    (["--env", "intercodesql", "--intercode-data", "/nowhere"], "--intercode-data: /nowhere"),
])
def test_what_the_environment_does_not_have_is_named(more, says, small_model, tmp_path):
    assert says in refused(*flags(tmp_path / "run", small_model, *more))
    assert not (tmp_path / "run/config.json").exists()


# ------------------------------------------------------------------------------ task files

SPLITS = {
    "empty": ("", "Expecting value"), "no JSON": ("boil 0", "Expecting value"),
    "an object": ('{"boil": 0}', "it must be a JSON list"), "numbers": ("[1]", "JSON list of [task"),
    "an empty list": ("[]", "has no task"), "three of them": ('[["boil", 0, 1]]', "JSON list"),
    "an unknown task": ('[["brew", 0]]', "no task 'brew' with a variation 0"),
    "an unknown variation": ('[["boil", 30]]', "with a variation 30"),
    "a negative variation": ('[["boil", -1]]', "with a variation -1"),
    "a fraction": ('[["boil", 1.0]]', "with a variation 1.0"),
    "a truth": ('[["boil", true]]', "with a variation True"),
    "words": ('[["boil", "one"]]', "with a variation 'one'"), "null": ("null", "JSON list"),
    "twice": ('[["boil", 1], ["task-1-boil", 1]]', "is there twice"),
    "not UTF-8": (b'[["\xff", 1]]', "codec can't decode"), "deep": ("[" * 100_000, "JSON list"),
}


@pytest.mark.parametrize("case", SPLITS)
def test_a_split_file_that_is_wrong_is_named(case, tmp_path):
    content, says = SPLITS[case]
    for name in ("train", "dev", "test"):
        path = tmp_path / f"{name}_indices.json"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(envs.Refused) as error:
        envs.make("scienceworld", split_file=str(tmp_path))
    assert says in one_line(error.value) and f"--split-file {tmp_path}" in one_line(error.value)


QUESTION = {"query": "how many", "gold": "SELECT 1", "db": "d"}
DATA = {  # files -> what the line must say
    "no questions": ({}, "ic_spider_dev.json"),
    "no JSON": ({"ic_spider_dev.json": "x"}, "InterCode's list of records"),
    "an object": ({"ic_spider_dev.json": '{"query": 1}'}, "InterCode's list of records"),
    "a record without gold": ({"ic_spider_dev.json": '[{"query": "a", "db": "d"}]'}, "KeyError"),
    "a gold of null": ({"ic_spider_dev.json": json.dumps([QUESTION | {"gold": None}])}, "gold"),
    "indices of no question": ({"ic_spider_train.json": json.dumps([QUESTION]),
                                "ic_spider_test.json": json.dumps([QUESTION]),
                                "train_indices.json": "[7]"}, "train_indices.json"),
    "indices that are none": ({"ic_spider_train.json": json.dumps([QUESTION]),
                               "ic_spider_test.json": json.dumps([QUESTION]),
                               "train_indices.json": "{"}, "train_indices.json"),
    "a dump that is none": ({"ic_spider_dev.json": json.dumps([QUESTION]),
                             "ic_spider_dbs.sql": "CREATE TABLE a (b int);\n"}, "dump"),
    "a dump that is not text": ({"ic_spider_dev.json": json.dumps([QUESTION]),
                                 "ic_spider_dbs.sql": b"\xff\xfe"}, "dump"),
    "a dump without the database": ({"ic_spider_dev.json": json.dumps([QUESTION])}, "no database d"),
    "a dump of nonsense": ({"ic_spider_dev.json": json.dumps([QUESTION]), "ic_spider_dbs.sql":
                            "USE `d`;\nCREATE TABLE `a` (\n`b` nonsense (,\n);\n"}, "database d"),
}


@pytest.mark.parametrize("case", DATA)
def test_data_of_databases_that_is_wrong_is_named(case, tmp_path):
    contents, says = DATA[case]
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(envs.Refused) as error:
        env = envs.make("intercodesql", intercode_data=str(tmp_path))
        env.reset(next(t for split in env.world.questions for t in env.tasks(split)))
    assert says in one_line(error.value)


# ------------------------------------------------------------------------------ the command line

@pytest.mark.parametrize("arguments, says", [
    (["--beta", "much"], "--beta: invalid float value: 'much'"),
    (["--experts", "/nowhere"], "--experts /nowhere: "),
    (["-m", "look.page", "/nowhere"], "/nowhere: not a run"),
])
def test_the_command_ends_with_2_and_one_line(arguments, says, tmp_path):
    train = [str(ROOT / "coevolve.py"), "--out", str(tmp_path / "run")]
    command = [*([] if arguments[0] == "-m" else train), *arguments]
    done = subprocess.run([sys.executable, *command], text=True, capture_output=True, cwd=tmp_path,
                          env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=300)
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert says in done.stderr
