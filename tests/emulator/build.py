# SPDX-License-Identifier: Apache-2.0
"""Builds the emulation for the CUDA that an interpreter's torch was built for, once, into `.cache/emulator/`.

Knows nothing of torch but where it lies: nothing here imports it. Standard library only, any Python >= 3.10.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = HERE.parent.parent / ".cache" / "emulator"
if set(str(CACHE)) & set(" :"):  # LD_PRELOAD and LD_LIBRARY_PATH cannot hold such a path
    CACHE = Path(tempfile.gettempdir()) / f"emulated-cuda-{os.getuid()}"
PRELOAD = "libemulated_cuda.so"
SOURCES = {
    PRELOAD: ["state.c", "work.c", "runtime.c", "cudnn.c"],
    "libcuda.so.1": ["driver.c", "unsupported.c"],
    "libnvidia-ml.so.1": ["nvml.c"],
}
FLAGS = ["-std=gnu11", "-O2", "-g", "-fPIC", "-shared", "-fvisibility=hidden", "-Wall", "-Wextra"]
# Linear algebra goes through these libraries; each function of theirs that torch calls becomes one that
# succeeds and does nothing. Which functions those are differs between releases: torch's own libraries tell.
NOTHING = re.compile(r"\b(cublas\w+)(?:@\S+)?$")


class CannotBuild(Exception):
    """What is missing, and what would help."""


@dataclass(frozen=True, slots=True)
class Torch:
    """An installed torch, described without importing it."""

    version: str
    cuda: str
    packages: Path
    """The site-packages directory it lies in: CUDA's headers come in wheels beside it."""

    @property
    def cuda_major(self) -> int:
        return int(self.cuda.split(".")[0])


def find_torch(python: str = sys.executable) -> Torch | None:
    """The torch that this interpreter would import, or None."""
    ask = "import importlib.util as u; s = u.find_spec('torch'); print(s.origin if s and s.origin else '')"
    try:
        answer = subprocess.run([python, "-c", ask], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    origin = answer.stdout.strip()
    if not origin:
        return None
    text = (Path(origin).parent / "version.py").read_text()
    version = re.search(r"^__version__\s*=\s*'([^']*)'", text, re.MULTILINE)
    cuda = re.search(r"^cuda\s*(?::[^=]*)?=\s*'([^']*)'", text, re.MULTILINE)
    return Torch(version[1] if version else "unknown", cuda[1] if cuda else "", Path(origin).parent.parent)


def _header_version(directory: Path) -> int | None:
    """CUDART_VERSION of a complete set of headers."""
    header = directory / "cuda_runtime_api.h"
    needed = ("cuda.h", "driver_types.h")
    if not header.is_file() or not all((directory / name).is_file() for name in needed):
        return None
    found = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", header.read_text(errors="replace"))
    return int(found[1]) if found else None


def find_headers(torch: Torch) -> tuple[list[Path], int]:
    """The headers of torch's CUDA: from torch's own wheels, else a toolkit of the same major version."""
    packages, major = torch.packages, torch.cuda_major
    compiler = packages / "nvidia" / "cuda_nvcc" / "include"  # crt/, where the runtime's wheel is without
    places = [
        packages / "triton" / "backends" / "nvidia" / "include",
        packages / "nvidia" / f"cu{major}" / "include",
        packages / "nvidia" / "cuda_runtime" / "include",
    ]
    if toolkit := os.environ.get("CUDA_HOME"):
        places.append(Path(toolkit) / "include")
    places += [Path("/usr/local/cuda/include"), Path(f"/usr/local/cuda-{major}/include")]
    for place in places:
        version = _header_version(place)
        if version is not None and version // 1000 == major:
            found = [one for one in (place, compiler) if (one / "crt" / "host_defines.h").is_file()]
            if found:
                return list(dict.fromkeys([place, *found])), version
    looked = "\n  ".join(str(place) for place in places)
    raise CannotBuild(
        f"no complete headers of CUDA {major} (cuda_runtime_api.h, cuda.h, crt/) for torch {torch.version}; "
        f"the triton that this torch asks for brings them, and so do nvidia-cuda-runtime and -nvcc together, "
        f"else set CUDA_HOME. Looked in:\n  {looked}"
    )


def _do_nothing_source(torch: Torch) -> str:
    names: set[str] = set()
    for library in sorted((torch.packages / "torch" / "lib").glob("libtorch_cuda*.so")):
        listing = subprocess.run(
            ["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True, check=True
        ).stdout
        names.update(found[1] for line in listing.splitlines() if (found := NOTHING.search(line)))
    written = (HERE / "cublas.c").read_text()
    lines = [f'#include "{HERE / "cublas.c"}"']
    lines += [f"NOTHING({name})" for name in sorted(names) if not re.search(rf"\b{name}\(", written)]
    return "\n".join(lines) + "\n"


def build(python: str = sys.executable) -> Path:
    """The directory with the three libraries for this interpreter's torch, built if it is not there yet."""
    torch = find_torch(python)
    if torch is None:
        raise CannotBuild(f"{python} has no torch: the emulation is built for the torch that is to run on it")
    if not torch.cuda:
        raise CannotBuild(f"torch {torch.version} of {python} is without CUDA; a CUDA build is needed")
    headers, version = find_headers(torch)

    digest = hashlib.sha256(f"{torch.version} {version} {FLAGS}".encode())
    for source in sorted([*HERE.glob("*.c"), *HERE.glob("*.h"), HERE / "build.py"]):
        digest.update(source.read_bytes())
    key = f"torch-{torch.version}-cuda{version // 1000}-{digest.hexdigest()[:12]}"
    target = CACHE / re.sub(r"[^A-Za-z0-9.+-]", "_", key)
    if target.is_dir():
        return target
    for tool in ("gcc", "nm"):
        if shutil.which(tool) is None:
            raise CannotBuild(f"{tool} is not on PATH (on Debian and Ubuntu: apt-get install gcc libc6-dev)")

    # Built aside and renamed into place: two test runs at once never see half a library.
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="building-") as aside:
        out = Path(aside) / "out"
        out.mkdir()
        nothing = Path(aside) / "nothing.c"
        nothing.write_text(_do_nothing_source(torch))
        for library, sources in SOURCES.items():
            command = ["gcc", *FLAGS, "-I", str(HERE), f"-Wl,-soname,{library}"]
            command += [part for place in headers for part in ("-isystem", str(place))]
            command += ["-o", str(out / library), *(str(HERE / source) for source in sources)]
            if library == PRELOAD:
                command += [str(nothing), "-lpthread", "-ldl"]
            else:
                command += [str(out / PRELOAD), "-Wl,-rpath,$ORIGIN", "-ldl"]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                raise CannotBuild(f"gcc could not build {library} for torch {torch.version}:\n{done.stderr}")
            if done.stderr:
                sys.stderr.write(done.stderr)
        try:
            out.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    return target


def environment(libraries: Path, base: dict[str, str] | None = None) -> dict[str, str]:
    """`base` (this process's environment) with the emulation put in front of whatever is there."""
    env = dict(os.environ if base is None else base)
    for name, value, separator in (
        ("LD_PRELOAD", str(libraries / PRELOAD), " "),
        ("LD_LIBRARY_PATH", str(libraries), ":"),
    ):
        rest = [part for part in env.get(name, "").split(separator) if part and part != value]
        env[name] = separator.join([value, *rest])
    return env


def has_real_gpu() -> bool:
    """Whether the driver of this machine has a GPU: asked of a process that does not see the emulation."""
    ask = (
        "import ctypes; driver = ctypes.CDLL('libcuda.so.1'); count = ctypes.c_int(); driver.cuInit(0); "
        "driver.cuDeviceGetCount(ctypes.byref(count)); print(count.value)"
    )
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    path = [part for part in env.get("LD_LIBRARY_PATH", "").split(":") if not part.startswith(str(CACHE))]
    env["LD_LIBRARY_PATH"] = ":".join(path)
    answer = subprocess.run([sys.executable, "-c", ask], env=env, capture_output=True, text=True)
    return answer.returncode == 0 and int(answer.stdout or 0) > 0


if __name__ == "__main__":
    try:
        print(build(*sys.argv[1:2]))
    except CannotBuild as error:
        sys.exit(f"emulated CUDA: {error}")
