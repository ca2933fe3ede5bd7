"""What is accepted and what is refused, with and without packages installed."""

import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from harness.settings import PRESETS, Settings, SettingsError, parse

ROOT = Path(__file__).parent.parent
REFUSED = {
    "--lamda-sft 0.5": "unknown: --lamda-sft",
    "--iter 3": "unknown: --iter",  # no abbreviations: a new setting must not change their meaning
    "--method dpo": "invalid choice: 'dpo'",
    "--iterations 1.5": "invalid int value: '1.5'",
    "--dpo-warmup 1": "must be at least 0 and below 1",
    "--expert-min-reward 70": "must be at least 0 and at most 1",
    "--max-new-tokens 768": "must be below --max-tokens 768",
    "--webshop-url localhost:3000": "--webshop-url localhost:3000: must be http://host:port",
    "--webshop-url ftp://shop:3000": "must be http://host:port",
    "--webshop-url http://": "must be http://host:port",
    "--webshop-url http://shop:port": "must be http://host:port",
    "--webshop-url http://shop/?q=1": "must be http://host:port",
    "--model https://me:secret@host/v1 --model-name m": "must be http://host:port/path",
    "--model https://host/v1?key=1 --model-name m": "must be http://host:port/path",
    "--dry-run 8xH100 --model a/b --method ppo": "--dry-run: plans no ppo",
}


@pytest.mark.parametrize("line", REFUSED)
def test_refused(line):
    with pytest.raises(SettingsError) as error:
        parse(line.split())
    assert REFUSED[line] in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("line", ["", "--quick", "--method eto --seed 3", "--lambda_sft 0.5",
                                  "--model some/folder", "--quick --train-tasks 7", "--quick false",
                                  "--webshop-url http://127.0.0.1:3000/ --experts a --model b",
                                  "--model https://host/v1 --model-name m"])
def test_a_machine_without_packages_accepts_what_it_should(line):
    """-I -S: the standard library and nothing else."""
    done = subprocess.run([sys.executable, "-I", "-S", str(ROOT / "harness/settings.py"),
                           *line.split()], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    parse(line.split())


def test_a_flag_beats_quick_and_quick_beats_the_tiny_preset():
    assert parse([]).train_tasks == PRESETS["tiny webshop"]["train_tasks"]
    assert parse(["--quick"]).train_tasks == PRESETS["quick"]["train_tasks"]
    assert parse(["--quick", "--train-tasks", "7"]).train_tasks == 7


def test_another_model_gets_the_papers_values():
    s = parse(["--model", "meta-llama/Llama-2-7b-chat-hf"])
    assert (s.sft_epochs, s.sft_batch, s.sft_lr, s.sft_warmup) == (3, 48, 1e-5, 0.03)
    assert (s.dpo_epochs, s.dpo_batch, s.dpo_lr, s.dpo_lr_later) == (3, 32, 1e-6, 5e-7)
    assert (s.beta, s.beta_later, s.lambda_dpo, s.lambda_sft) == (0.1, 0.5, 1.0, 0.1)
    assert (s.iterations, s.rollouts, s.view) == (3, 1, "full")


def test_every_setting_says_where_its_value_comes_from():
    for f in fields(Settings):
        help = f.metadata["help"]
        assert "[" in help or f.name in ("env", "method", "model", "seed", "quick", "eval_splits"), f


def test_presets_name_settings():
    for values in PRESETS.values():
        assert set(values) <= {f.name for f in fields(Settings)}
