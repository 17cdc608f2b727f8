# SPDX-License-Identifier: Apache-2.0
"""Stands small libraries in for CUDA's large ones, so that a torch installed alone can be imported and run.

A CUDA build of torch wants cuBLAS, cuDNN, cuFFT and a dozen others, 3 GB of them, and on the emulated GPU
none of their functions ever runs. What is missing is made from what torch's own libraries ask for: each
function is there, and says that it failed. They lie beside torch's: only in an environment made for it.
Standard library only, any Python >= 3.10; torch is not imported.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import build

OURS = {"libcuda.so.1", "libnvidia-ml.so.1"}
"""The driver's, which the emulation brings and a machine without a GPU must not have."""
NVIDIA = re.compile(r"lib(cu|nv|nccl)\w*(-\w+)?\.so\.\d+")


def _said(tool: str, *arguments: str) -> str:
    return subprocess.run([tool, *arguments], capture_output=True, text=True, check=True).stdout


def missing(torch: build.Torch) -> dict[str, set[str]]:
    """The libraries that torch wants and that lie nowhere in its environment, each with its functions."""
    directory = torch.packages / "torch" / "lib"
    own = sorted(directory.glob("*.so*"))
    there = {path.name for path in (*own, *torch.packages.glob("nvidia/**/lib/*.so*"))}
    wanted: dict[str, set[str]] = {}
    unversioned: set[str] = set()
    versioned: dict[str, set[str]] = defaultdict(set)
    for library in own:
        for name in re.findall(r"NEEDED.*\[(.*)\]", _said("readelf", "-d", str(library))):
            if NVIDIA.fullmatch(name) and name not in there | OURS:
                wanted[name] = set()
        for symbol in re.findall(r"^\s+U (\S+)$", _said("nm", "-D", str(library)), re.MULTILINE):
            function, _, version = symbol.partition("@")
            if version:
                versioned[version].add(function)
            else:
                unversioned.add(function)
    for name, functions in wanted.items():
        functions |= versioned[name]
        stem = name[3:].split(".")[0].split("-")[0].lower()  # libnccl.so.2: the functions are nccl...
        functions |= {function for function in unversioned if function.lower().startswith(stem)}
    return wanted


def make(python: str) -> list[str]:
    """Make what is missing; the names of the libraries made.

    Raises:
        build.CannotBuild: there is no CUDA build of torch, or gcc refuses.
    """
    torch = build.find_torch(python)
    if torch is None or not torch.cuda:
        raise build.CannotBuild(f"{python} has no CUDA build of torch")
    wanted = missing(torch)
    for library, functions in wanted.items():
        with tempfile.TemporaryDirectory() as scratch:
            source = Path(scratch) / "standin.c"
            lines = (f"int {function}(void) {{ return 1; }}" for function in sorted(functions))
            source.write_text("\n".join(lines) + "\n")
            # the version that torch asks for is the library's own name, as this flag has it
            command = ["gcc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{library}", "-Wl,--default-symver"]
            command += ["-fno-builtin", "-o", str(torch.packages / "torch" / "lib" / library), str(source)]
            done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise build.CannotBuild(f"gcc could not build a stand-in for {library}:\n{done.stderr}")
    return sorted(wanted)


if __name__ == "__main__":
    try:
        print(*make(sys.argv[1]), sep="\n")
    except build.CannotBuild as error:
        sys.exit(f"emulated CUDA: {error}")
