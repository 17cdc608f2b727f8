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


Functions = dict[str, set[str]]
"""By the version that torch asks for; an empty text where it asks for none."""


def missing(torch: build.Torch) -> dict[str, Functions]:
    """The libraries that torch wants and that lie nowhere in its environment, each with its functions."""
    own = sorted((torch.packages / "torch" / "lib").glob("*.so*"))
    there = {path.name for path in (*own, *torch.packages.glob("nvidia/**/lib/*.so*"))} | OURS
    wanted: dict[str, Functions] = {}
    asked: Functions = defaultdict(set)
    for library in own:
        for name in re.findall(r"NEEDED.*\[(.*)\]", _said("readelf", "-d", str(library))):
            if NVIDIA.fullmatch(name) and name not in there:
                wanted.setdefault(name, {"": set()})
        needed = _said("readelf", "-V", "--wide", str(library)).partition("Version needs")[2]
        for name, versions in re.findall(r"File: (\S+) (.*?)(?=File:|\Z)", needed, re.DOTALL):
            if name in wanted:
                wanted[name] |= {version: set[str]() for version in re.findall(r"Name: (\S+)", versions)}
        for symbol in re.findall(r"^\s+U (\S+)$", _said("nm", "-D", str(library)), re.MULTILINE):
            function, _, version = symbol.partition("@")
            asked[version].add(function)
    for name, functions in wanted.items():
        stem = name[3:].split(".")[0].split("-")[0].lower()  # libnccl.so.2: its functions are nccl...
        for version in functions:
            functions[version] = {
                function for function in asked[version] if version or function.lower().startswith(stem)
            }
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
            source, versions = Path(scratch) / "standin.c", Path(scratch) / "versions"
            names = sorted(set().union(*functions.values()))
            source.write_text("".join(f"int {name}(void) {{ return 1; }}\n" for name in names))
            versions.write_text(
                "".join(
                    f"{version} {{ {' '.join(f'{name};' for name in sorted(there))} }};\n"
                    for version, there in functions.items()
                    if version
                )
            )
            command = ["gcc", "-shared", "-fPIC", "-w", "-fno-builtin", f"-Wl,-soname,{library}"]
            command += [f"-Wl,--version-script={versions}"] if versions.stat().st_size else []
            command += ["-o", str(torch.packages / "torch" / "lib" / library), str(source)]
            done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise build.CannotBuild(f"gcc could not build a stand-in for {library}:\n{done.stderr}")
    return sorted(wanted)


if __name__ == "__main__":
    try:
        print(*make(sys.argv[1]), sep="\n")
    except build.CannotBuild as error:
        sys.exit(f"emulated CUDA: {error}")
