"""What is accepted and what is refused, with and without packages installed."""

import os
import subprocess
import sys
from dataclasses import fields
from typing import Literal, get_args, get_origin, get_type_hints

import pytest

from lab.harness import settings
from lab.harness.files import ROOT
from lab.harness.settings import PRESETS, Settings, SettingsError, check, from_flat, parse
from worlds import ENVIRONMENTS, environment

PARTS = (Settings, *map(environment, ENVIRONMENTS))
FIELDS = {f.name: (f, get_type_hints(part)[f.name], part) for part in PARTS for f in fields(part)
          if f.name != "options"}
BEYOND = {"at_least": -1, "above": 0, "at_most": 1, "below": 0}  # what to add to a limit to pass it


def flags_of(name) -> list[str]:
    part = FIELDS[name][2]
    env = [e for e in ENVIRONMENTS if environment(e) is part or name in
           {f.name for f in fields(environment(e))}] or ["webshop"]
    return ["--env", env[0], settings.flag(name)]


def wrong_values():
    """(flag of a setting, a value that it cannot have, what the refusal must name)."""
    for name, (f, hint, _) in FIELDS.items():
        number = hint in (int, float)
        yield name, None if hint is not bool else "maybe", settings.flag(name)
        if get_origin(hint) is Literal:
            yield name, get_args(hint)[0].upper(), "invalid choice"
        elif hint is not bool:
            yield name, "", "''"
        for limit, more in BEYOND.items():
            if limit in f.metadata:
                yield name, str(hint(f.metadata[limit] + more)), "must be"
        for value in ["many", "9" * 30] * number + ["nan", "1e400"] * (hint is float):
            yield name, value, value if value == "many" else "must be"
        if "like" in f.metadata:
            yield name, "http://u:p@h", "must be"


@pytest.mark.parametrize("name, value, says", list(wrong_values()))
def test_a_wrong_value_is_named(name, value, says):
    with pytest.raises(SettingsError) as error:
        parse([*flags_of(name), *([] if value is None else [value])])
    line = str(error.value)
    assert settings.flag(name) in line and says in line and "\n" not in line and len(line) < 700


@pytest.mark.parametrize("address", [
    "localhost:3000", "http://", "http://shop:port", "http://shop/?q=1", "http://u:p@h",
    "http://h:70000", "file:///etc/passwd", "http:\\\\h", "http://[::1"])
def test_an_address_is_http_with_host_and_path_alone(address):
    with pytest.raises(SettingsError, match="--webshop-url .*must be http://host:port"):
        parse(["--webshop-url", address])


@pytest.mark.parametrize("line, says", [
    ("--lamda-sft 0.5", "unknown: --lamda-sft"), ("--seed 1 surplus", "unknown: surplus"),
    ("--iter 3", "unknown: --iter"),  # no abbreviations: a new setting must not change their sense
    ("--env scienceworld --webshop-url http://h:1", "is for webshop, not for scienceworld"),
    ("--env bfcl --protocol eto", "is for webshop and scienceworld and intercodesql, not for bfcl"),
    ("--webshop-url http://h:1", "--experts FILE"),
    ("--webshop-url http://h:1 --experts f", "another --model"),
    ("--split-file f", "--webshop-url"),
    ("--env intercodesql --mysql-url mysql://a@h --model m", "--intercode-data"),
    ("--env intercodesql --intercode-data d", "another --model"),
    ("--env intercodesql --intercode-data d --model m --mysql-url mysql://a@h:70000", "mysql://u"),
    ("--env bfcl", "another --model"),
    ("--protocol eto --model m", "--prompts"), ("--prompts p --model m", "--protocol eto"),
    ("--protocol eto --prompts p", "another --model"),
    ("--protocol eto --prompts p --model m --view short", "--view full"),
    ("--protocol eto --prompts p --model m --method evolve", "--protocol eto"),
    ("--dry-run 8xH100", "--model"), ("--dry-run here --model m --method ppo", "--method"),
    ("--method eto --failure-from r", "--failure-from"),
    ("--method sft --explore-again", "--explore-again"),
    ("--method rft --temperature 0", "--temperature 0"),
    ("--method eto --temperature 0 --rollouts 2", "--temperature 0"),
    ("--lambda-dpo 0 --lambda-sft 0", "--lambda-sft 0"),
    ("--model https://h/v1", "--model-name"), ("--method chat", "endpoint"),
    ("--model https://h/v1 --model-name m --method eto", "--method chat"),
    ("--model https://h/v1?key=1 --model-name m", "must be http://host"),
    ("--max-tokens 32 --max-new-tokens 32", "--max-tokens 32"),
    ("--method evolve --explorer https://h/v1", "--explorer-model"),
    ("--method evolve --explorer somebody", "must be policy, aimed or"),
    ("--method evolve --grpo-steps 10", "--evolve-every 10"),
    ("--method grpo --solve-check 1", "--solve-check 1"), ("--signals rare,rare", "each once"), ("--signals rare,other", "each once"),
])
def test_settings_that_do_not_go_together_are_named(line, says):
    with pytest.raises(SettingsError) as error:
        parse(line.split())
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_password_stands_in_no_setting_and_no_message(monkeypatch):
    monkeypatch.setenv("MYSQL_PWD", "")
    url = "mysql://me:se%40cret@h:3306"
    s = parse(f"--env intercodesql --intercode-data d --model m --mysql-url {url}".split())
    assert s.options.mysql_url == "mysql://me@h:3306" and os.environ["MYSQL_PWD"] == "se@cret"
    for line in (f"--mysql-url {url}", "--env intercodesql --model m --mysql-url mysql://me:x@h:0",
                 "--model https://me:secret@host/v1", "--webshop-url http://user:se%40cret@shop:3000",
                 "--env intercodesql --mysql-url mysql://agent:se@cret@h:1 --model m",
                 "--env intercodesql --mysql-url mysql://agent:se/cret@h:1 --model m",
                 "--mysql-urll mysql://a:secret@h:1", "--experts http://u:secret@h/f --seed -1"):
        with pytest.raises(SettingsError) as error:
            parse(line.split())
        assert "cret" not in str(error.value) and ":x@" not in str(error.value)


@pytest.mark.parametrize("line", ["--quick --train-tasks 7", "--help", "--model https://h/v1 --model-name m",
                                  "--webshop-url http://127.0.0.1:3000/ --experts a --model b"])
def test_a_machine_without_packages_accepts_what_it_should(line):
    """-S: the standard library and nothing else."""
    done = subprocess.run([sys.executable, "-S", str(ROOT / "lab/harness/settings.py"),
                           *line.split()], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stderr) == (0, "")


def test_help_shows_what_the_method_reads():
    def shown(*argv):
        return settings.usage([*argv, "--help"])

    for method in settings.METHODS:
        text = shown("--method", method)
        for group, methods in settings.GROUPS.items():
            assert (group.__doc__ + "\n" in text) == (method in methods)
            for f in fields(group):
                assert (f"  {settings.flag(f.name)} " in text) == (method in methods)
    assert "--webshop-url" in shown() and "--webshop-url" not in shown("--env", "bfcl")


def test_a_flag_beats_quick_and_quick_beats_the_tiny_preset():
    tiny = environment("webshop").presets["tiny"]
    assert parse([]).train_tasks == tiny["train_tasks"]
    assert parse(["--quick"]).train_tasks == PRESETS["quick tiny"]["train_tasks"]
    assert parse(["--quick", "--train-tasks", "7"]).train_tasks == 7


def test_another_model_gets_the_papers_values():
    s = parse(["--model", "meta-llama/Llama-2-7b-chat-hf"])
    assert (s.sft_epochs, s.sft_batch, s.sft_lr, s.sft_warmup) == (3, 48, 1e-5, 0.03)
    assert (s.dpo_epochs, s.dpo_batch, s.dpo_lr, s.dpo_lr_later) == (3, 32, 1e-6, 5e-7)
    assert (s.beta, s.beta_later, s.lambda_dpo, s.lambda_sft) == (0.1, 0.5, 1.0, 0.1)
    assert (s.iterations, s.rollouts, s.view) == (3, 1, "full")
    assert check(s) is s and from_flat(**s.flat()) == s


def test_every_setting_says_where_its_value_comes_from():
    plain = {"env", "method", "model", "seed", "quick", "eval_splits", "dry_run", "reuse"}
    for name, (f, _, _) in FIELDS.items():
        assert "[" in f.metadata["help"] or name in plain, name


def test_presets_name_settings():
    for part in PARTS[1:]:
        for values in (*PRESETS.values(), *part.presets.values()):
            known = {f.name for f in (*fields(Settings), *fields(part))}
            assert set(values) <= known
