"""The script of docs/library.md runs as it stands, and trains the model that it saves."""

import math
import re
import runpy
import sys

import pytest
from conftest import ROOT
from safetensors.torch import load_file


def test_the_script_trains_with_both_losses_and_saves_the_model(small_model, tmp_path, monkeypatch):
    saved = tmp_path / "saved"
    [script] = re.findall(r"```python\n(.*?)```", (ROOT / "docs/library.md").read_text(), re.S)
    (tmp_path / "script.py").write_text(script)
    monkeypatch.setattr(sys, "argv", ["script.py", str(small_model), str(saved)])
    names = runpy.run_path(str(tmp_path / "script.py"))
    *sft, preferences = names["log"]
    assert len(sft) == 6 and sft[5]["loss"] < sft[0]["loss"]
    # Eq. (9) at margin 0
    assert preferences["kinds"]["expert>target"]["count"] == 8
    assert preferences["dpo"] == pytest.approx(math.log(2), abs=1e-3) and preferences["sft"] > 0
    before, after = (load_file(folder / "model.safetensors") for folder in (small_model, saved))
    for name, weight in before.items():
        assert (after[name] - weight).abs().max() > 1e-3
    assert 0 < len(names["ids"]) <= 16
