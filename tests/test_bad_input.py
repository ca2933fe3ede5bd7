"""A user's mistakes: each is one line with object, value and remedy, before anything is written."""

import gc
import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import make_model, make_tokenizer
from safetensors.torch import load_file, save_file
from transformers import DiffLlamaConfig, DiffLlamaForCausalLM, MistralConfig, MistralForCausalLM

from lab import mutual
from lab import play_env as envs
from lab.harness.files import ROOT
from lab.program import start


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


OK = [("human", "rules"), ("gpt", "OK"), ("human", "Instruction: mug"), ("gpt", "Action: search[a]")]


def eto(turns=OK, id="webshop_17", **more):
    return json.dumps([{"id": id, "conversations": [{"from": f, "value": v} for f, v in turns], **more}])


def ours(task="webshop-train-17", roles=("user", "assistant"), **changed):
    messages = [{"role": role, "content": f"text {n}"} for n, role in enumerate(roles)]
    return json.dumps({"task": task, "messages": messages, "reward": 1.0, **changed})


EXPERTS = {  # what is wrong -> (content, where)
    "nothing": ("[]", ""), "no JSON": (ours() + "\n{'task'}\n", "line 2"),
    "half of a list": (eto()[:-9], ""), "deep": ("[" * 100_000, ""),
    "no text": (b'[{"id": "\xff"}]', ""), "no object": ("[null]", "entry 0"),
    "no field": ('{"task": "a"}', "line 1"), "no id": (eto(id="webshop"), "entry 0"),
    "another environment": (ours("scienceworld-train-boil-0"), "line 1"),
    "no such task": (eto(id="webshop_99999"), "entry 0"), "no reply": (eto(OK[:3]), "entry 0"),
    "an unknown sender": (eto([*OK[:3], ("system", "x")]), "entry 0"),
    "two replies in a row": (eto([*OK, ("gpt", "Action: b")]), "entry 0"),
    "half of a surrogate pair": (eto([*OK[:3], ("gpt", "\ud800")]), "entry 0"),
    "no turns": (ours(messages=[]), "line 1"), "half a turn": (ours(messages=[{}, {}]), "line 1"),
    "no content": (ours(messages=[dict(role="user", content=None)] * 2), "line 1"),
    "an endless number": ('{"a": ' + "9" * 5000 + "}", ""), "a reward of 70": (eto(reward=70), "reward 70"),
    "of NaN": (eto(reward=float("nan")), "reward nan"), "of true": (eto(reward=True), "reward True"),
    "a task twice": (ours() + "\n" + ours(), "line 2: webshop-train-17"),
}


@pytest.mark.parametrize("case", EXPERTS)
def test_an_experts_file_that_is_wrong_is_named(case, tmp_path):
    content, where = EXPERTS[case]
    path = tmp_path / "experts.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    for file in (path, tmp_path / "nowhere", tmp_path):
        with pytest.raises(envs.Refused) as error:
            envs.read_experts(file, envs.make("webshop", "short"))
        assert f"--experts {file}" in one_line(error.value)
        assert where in one_line(error.value) or file != path


def tree(folder):
    return {path: path.read_bytes() for path in folder.rglob("*")
            if path.is_file() and path.name != "lock"}


def flags(out, model, *more):
    return ["--model", model, "--view", "short", "--train-tasks", 2, "--eval-tasks", 1,
            "--iterations", 1, "--sft-epochs", 1, "--max-tokens", 2500, "--max-new-tokens", 4,
            "--threads", 1, "--out", out, *more]


def written(name, text):
    return lambda folder: (folder / name).write_text(text)


def without(name):
    return lambda folder: (folder / name).unlink()


def edited(name, **changed):
    def edit(folder):
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | changed))
    return edit


def pickled(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    without("model.safetensors")(folder)


def without_a_layer(folder):
    weights = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in weights.items() if "layers.1." not in k},
              folder / "model.safetensors", {"format": "pt"})


def other(kind, config, **more):
    def build(folder):
        kind(config(vocab_size=len(make_tokenizer("chatml")), hidden_size=32, intermediate_size=32,
                    num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
                    max_position_embeddings=4096, **more)).save_pretrained(folder)
    return build


CODE = {"auto_map": {"AutoModelForCausalLM": "evil.Model", "AutoTokenizer": ["evil.T", None]}}
MODELS = {  # what is done to a folder that is right -> what the line must name
    "no tokenizer": (without("tokenizer.json"), "tokenizer"),
    "no chat template": (without("chat_template.jinja"), "no chat template"),
    "a template without turns": (written("chat_template.jinja", "hello"), "chat template"),
    "no weights": (without("model.safetensors"), "safetensors"),
    "pickled weights": (pickled, "may hold code"),
    "half of the weights": (lambda f: os.truncate(f / "model.safetensors", 9999), "--model"),
    "a layer without weights": (without_a_layer, "weights"),
    "weights of another size": (edited("config.json", intermediate_size=64), "size"),
    "an unknown architecture": (edited("config.json", model_type="mystery"), "mystery"),
    "no causal LM": (edited("config.json", architectures=["BertModel"]), "not a causal LM"),
    "weights of 4 bits": (edited("config.json", quantization_config=dict(
        quant_method="gptq", bits=4)), "gptq"),
    "no token's number": (edited("config.json", pad_token_id="none"), "pad_token_id"),
    "attentions asked for": (edited("config.json", _attn_implementation="sdpa",
                                    output_attentions=True), "output_attentions"),
    "code in the config": (edited("config.json", **CODE), "its config.json"),
    "code in the tokenizer": (edited("tokenizer_config.json", **CODE), "its tokenizer_config.json"),
    "attention twice a layer": (other(DiffLlamaForCausalLM, DiffLlamaConfig), "attends more than"),
    "sliding windows": (other(MistralForCausalLM, MistralConfig, sliding_window=16), "--max-tokens"),
    "another tokenizer's model": (
        lambda f: make_model(100, dtype=torch.float32).save_pretrained(f), "--m"),
    "an empty folder": (lambda f: [p.unlink() for p in f.iterdir()], "--model"),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_model_that_cannot_be_used_is_named(case, small_model, tmp_path):
    folder = shutil.copytree(small_model, tmp_path / "model")
    change, says = MODELS[case]
    change(folder)
    before = tree(folder)
    line = refused(*flags(tmp_path / "run", folder))
    assert says in line and f"--model {folder}" in line, line
    # Nothing was trained or overwritten, and the next command may follow.
    assert tree(folder) == before and not any(tree(tmp_path / "run").values())


def test_a_model_that_is_no_folder_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "file").write_text("x")
    for model in (tmp_path / "nowhere", tmp_path / "file", "no/such/model", "a b", "x" * 200):
        assert f"--model {model}" in refused(*flags(tmp_path / "run", model))


def test_a_folder_for_the_run_that_is_none_is_named(small_model, tmp_path):
    (tmp_path / "file").write_text("x")
    for out in (tmp_path / "file", "/proc/run"):
        assert f"--out {out}" in refused(*flags(out, small_model))
    # A folder of something else: neither its files are taken for a run's nor overwritten.
    model = shutil.copytree(small_model, tmp_path / "model")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/experts.jsonl").write_text('{"a": 1}\n')
    for folder in (model, tmp_path / "other"):
        before = tree(folder)
        assert "config.json" in refused(*flags(folder, small_model))
        assert tree(folder) == before


def test_another_runs_folder_is_refused_with_what_differs(small_model, tmp_path):
    out, more = tmp_path / "run", ["--method", "sft"]
    start.main([str(f) for f in flags(out, small_model, *more)], mutual.loop_of)
    gc.collect()
    before = tree(out)
    retrained = shutil.copytree(small_model, tmp_path / "model")
    for changed, names in [(["--env", "intercodesql"], "env (webshop -> intercodesql)"),
                           (["--seed", 7], "seed (0 -> 7)"), (["--model", retrained], "model (")]:
        line = refused(*flags(out, small_model, *more, *changed))
        assert names in line and str(out) in line and "--out" in line
        assert tree(out) == before
    (retrained / "more").write_text("x")
    edited("config.json", settings={**json.loads((out / "config.json").read_text())["settings"],
                                    "model": str(retrained)})(out)
    assert f"another model than --model {retrained}" in refused(*flags(out, retrained, *more))
    edited("config.json", layout=2)(out)  # as of a program whose tiny model was another
    line = refused(*flags(out, retrained, *more))
    assert str(out) in line and "earlier version" in line and "--out" in line


def test_experts_that_do_not_fit_are_refused_before_anything_is_trained(small_model, tmp_path):
    opening = envs.make("webshop", "short").reset("webshop-train-17")
    turns = [dict(role="user", content=opening), dict(role="assistant", content="x")]
    command = flags(tmp_path / "run", small_model, "--experts", tmp_path / "e")
    (tmp_path / "e").write_text(ours(messages=turns, reward=0.5))
    assert "--expert-min-reward 0.7" in refused(*command)
    (tmp_path / "e").write_text(ours(messages=turns))
    assert "--max-tokens 8" in refused(*command, "--max-tokens", 8)
    assert not list((tmp_path / "run").glob("sft*"))
    # The same folder takes a corrected command, for nothing was done with the first one's.
    start.main([*map(str, command), "--method", "sft"], mutual.loop_of)


@pytest.mark.parametrize("more", [
    "--train-tasks 601", "--eval-tasks 251", "--experts /nowhere",
    "--split-file /nowhere --env scienceworld", "--intercode-data /nowhere --env intercodesql"])
def test_what_the_environment_does_not_have_is_named(more, small_model, tmp_path):
    line = refused(*flags(tmp_path / "run", small_model, *more.split()))
    assert all(word in line for word in more.split()[:2])
    assert not (tmp_path / "run/config.json").exists()


LISTS = ("boil 0", "[]", '[["brew", 0]]', '[["boil", 30]]', '[["boil", true]]',
         b'[["\xff", 1]]', "[" * 100_000, None)
QUESTION = {"query": "how many", "gold": "SELECT 1", "db": "d"}
ALL = dict.fromkeys(("ic_spider_train.json", "ic_spider_test.json"), json.dumps([QUESTION]))
WRONG = [  # environment, setting, files, what the line must name
    *(("scienceworld", "split_file", {} if text is None else {
        f"{split}_indices.json": text for split in ("train", "dev", "test")}, "--split-file")
      for text in LISTS),
    *(("intercodesql", "intercode_data", files, says) for files, says in [
        ({}, "ic_spider_dev.json"), ({"ic_spider_dev.json": '{"query": 1}'}, "ic_spider_dev.json"),
        ({"ic_spider_dev.json": json.dumps([QUESTION | {"gold": None}])}, "gold"),
        ({**ALL, "train_indices.json": "[7]"}, "train_indices.json"),
        ({**ALL, "train_indices.json": "{"}, "train_indices.json"),
        ({**ALL, "ic_spider_dbs.sql": b"\xff\xfe"}, "dump"), (ALL, "database d"),
        ({**ALL, "ic_spider_dbs.sql": "USE `d`;\nCREATE TABLE `a` (\n`b` nonsense (,\n);\n"}, "d")]),
]


@pytest.mark.parametrize("env, name, files, says", WRONG)
def test_a_folder_of_data_that_is_wrong_is_named(env, name, files, says, tmp_path):
    for file, content in files.items():
        (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(envs.Refused) as error:
        made = envs.make(env, **{name: str(tmp_path)})
        made.reset(made.tasks("train")[0])
    assert says in one_line(error.value)


def test_the_command_ends_with_2_and_one_line(tmp_path):
    for command in ([ROOT / "lab/loop.py", "--beta", "much"], ["-m", "lab.look.page", "nowhere"]):
        done = subprocess.run([sys.executable, *map(str, command)], text=True, cwd=tmp_path,
                              capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1, done.stderr
        assert str(command[-1]) in done.stderr
