"""A simulated GPU: its tensors report the device "cuda", and store their values on the CPU.

An operation that mixes devices raises the error of a GPU, and host-device synchronisations are
counted. pretend_guard.cpp must be loaded before torch, see `on_card`.
"""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.utils import _pytree as trees
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

HERE = Path(__file__).parent
CARD = torch.device("cuda", 0)
MEMORY = 80 * 10**9  # bytes
ACROSS = {"copy_", "_to_copy", "set_"}  # operations that may mix devices
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
WAITING = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select"}
waits = Counter()  # operation -> number of host-device synchronisations


class OnCard(torch.Tensor):
    """A tensor on the simulated GPU. `held` is the CPU tensor with its values."""

    @staticmethod
    def __new__(cls, held):
        return torch.Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(),
            dtype=held.dtype, device=CARD)

    def __init__(self, held):
        self.held = held

    def __repr__(self):
        return f"OnCard({tuple(self.shape)}, {self.dtype})"

    def tolist(self):
        waits["tolist"] += 1
        return self.data.held.tolist()

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        return run(operation, args, kwargs or {})


class Card(TorchDispatchMode):
    """Dispatches the operations that create tensors from no other tensor."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        return run(operation, args, kwargs or {})


def run(operation, args, kwargs):
    """Runs an operation on the CPU tensors."""
    name = operation.overloadpacket.__name__
    if operation._can_decompose():  # in inference mode it is not decomposed yet
        with Card():
            result = operation.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result

    leaves = trees.tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    here = [tensor for tensor in tensors if isinstance(tensor, OnCard)]
    elsewhere = [t for t in tensors if not isinstance(t, OnCard) and t.dim() > 0]
    if here and elsewhere and name not in ACROSS | INDEXING:
        raise RuntimeError(f"Expected all tensors to be on the same device, but {name} has "
                           f"{sorted({str(tensor.device) for tensor in tensors})}")

    asked = [torch.device(leaf) for leaf in leaves if isinstance(leaf, torch.device)]
    made_here = asked[0].type == "cuda" if asked else bool(here)
    if name == "copy_":
        made_here = isinstance(args[0], OnCard)
    count_wait(name, args, kwargs, bool(here), made_here)

    held_args, held_kwargs = trees.tree_map(held_by, (args, kwargs))
    with torch._C._DisableTorchDispatch():
        result = operation(*held_args, **held_kwargs)
    if made_here:
        result = trees.tree_map_only(torch.Tensor, OnCard, result)
    aliases = any(returned.alias_info for returned in operation._schema.returns)
    if here and aliases:  # for autograd, views and in-place operations
        return return_and_correct_aliasing(operation, args, kwargs, result)
    return result


def held_by(leaf):
    """Returns the argument on the CPU that replaces an argument."""
    if isinstance(leaf, OnCard):
        if leaf.held.dtype != leaf.dtype:  # model.float() changes only the dtype of the wrapper
            leaf.held = leaf.held.to(leaf.dtype)
        return leaf.held
    return torch.device("cpu") if isinstance(leaf, torch.device) else leaf


def count_wait(name: str, args, kwargs, here: bool, made_here: bool) -> None:
    """Counts an operation if the host waits for its result or copy."""
    masked = name in INDEXING and any(
        index is not None and index.dtype == torch.bool for index in args[1])
    if here and (name in WAITING or masked):
        waits[name] += 1
    elif name == "_to_copy" and here != made_here and not kwargs.get("non_blocking"):
        waits["copy"] += 1


def install() -> Card:
    """Patches torch.cuda. Returns the dispatch mode, which has to be entered."""
    torch._C._set_only_lift_cpu_tensors(True)
    described = SimpleNamespace(total_memory=MEMORY, name="pretended", major=9, minor=0,
                                multi_processor_count=132)
    answers = dict(
        _lazy_init=None, is_available=True, is_initialized=True, device_count=1, current_device=0,
        set_device=None, is_bf16_supported=True, get_device_capability=(9, 0), synchronize=None,
        get_device_name="pretended", mem_get_info=(MEMORY, MEMORY), memory_allocated=0,
        memory_reserved=0, max_memory_allocated=0, empty_cache=None, manual_seed=None,
        manual_seed_all=None, get_rng_state_all=[], _is_in_bad_fork=False,
        get_device_properties=described)
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    return Card()


def compile_guard(folder: Path) -> Path:
    """Compiles pretend_guard.cpp to a shared library in a folder, and returns its path."""
    torch_folder, library = Path(torch.__file__).parent, folder / "pretend_guard.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-std=c++20", "-w", f"-I{torch_folder}/include",
                    HERE / "pretend_guard.cpp", "-o", library, f"-L{torch_folder}/lib", "-lc10",
                    "-ltorch_cpu", f"-Wl,-rpath,{torch_folder}/lib"], check=True)
    return library


def on_card(library: Path, script: str, *arguments) -> str:
    """Runs a script in a process with the simulated GPU. Returns its stdout."""
    begin = "import pretend_gpu; card = pretend_gpu.install(); card.__enter__()\n"
    environment = dict(
        LD_PRELOAD=str(library), PYTHONPATH=f"{HERE}{os.pathsep}{HERE.parent}",
        HF_DEACTIVATE_ASYNC_LOAD="1",  # loader threads would lack the dispatch mode
        TORCHDYNAMO_DISABLE="1", OMP_NUM_THREADS="1")
    done = subprocess.run([sys.executable, "-c", begin + script, *map(str, arguments)],
                          env=os.environ | environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return done.stdout
