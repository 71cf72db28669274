#!/usr/bin/env python3
"""Stand-ins for the CUDA libraries that torch's GPU wheel links: `cpu_stubs.py TORCH_LIB_FOLDER OUTPUT_FOLDER`.

With them on LD_LIBRARY_PATH, torch can be imported on a machine without CUDA, which saves 2.5 GB of wheels. Every
function of a stand-in returns an error code. Needs readelf and cc.
"""

import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

# Libraries of the system, and the CUDA runtime, whose wheel is small.
PRESENT = re.compile(r"(ld-linux|lib(c|dl|gcc_s|m|pthread|quadmath|rt|stdc\+\+|util|z|cudart))[.-]")
# First letters of the functions of a library.
PREFIXES = {
    "libcublas": "cublas",
    "libcublasLt": "cublasLt",
    "libcuda": "cu[A-Z]",
    "libcudnn": "cudnn",
    "libcufft": "cufft",
    "libcufile": "cuFile",
    "libcupti": "cupti",
    "libcurand": "curand",
    "libcusolver": "cusolver",
    "libcusparse": "cusparse",
    "libcusparseLt": "cusparseLt",
    "libnccl": "p?nccl",
    "libnvJitLink": "nvJitLink",
    "libnvrtc": "nvrtc",
    "libnvshmem_host": "nvshmem",
    "libnvToolsExt": "nvtx",
}


def readelf(*arguments: str) -> str:
    """Returns the output of readelf."""
    return subprocess.run(["readelf", "-W", *arguments], capture_output=True, text=True, check=False).stdout


def missing_libraries(folder: Path) -> set[str]:
    """Returns the libraries that those of `folder` need and that are neither there nor on every system."""
    needed = {name for file in folder.iterdir() for name in re.findall(r"NEEDED.*\[(.*?)\]", readelf("-d", str(file)))}
    return {name for name in needed if not (folder / name).exists() and not PRESENT.match(name)}


def undefined_functions(folder: Path) -> dict[str, str]:
    """Returns the undefined symbols of all libraries of `folder`, with their versions."""
    functions = {}
    for file in folder.iterdir():
        for line in readelf("--dyn-syms", str(file)).splitlines():
            fields = line.split()
            if len(fields) >= 8 and fields[6] == "UND":
                name, _, version = fields[7].partition("@")
                functions[name] = version.lstrip("@")
    return functions


def build(library: str, functions: dict[str, str], output: Path) -> None:
    """Compiles the stand-in of one library."""
    stem = library.partition(".so")[0]
    own = {name: version for name, version in functions.items() if re.match(PREFIXES.get(stem, "$"), name)}
    # cuBLAS and cuSPARSE do not have the functions of their Lt libraries.
    own = {
        name: version for name, version in own.items() if stem.endswith("Lt") or not re.match("cu(blas|sparse)Lt", name)
    }
    source = output / f"{stem}.c"
    source.write_text("".join(f"int {name}(void) {{ return 999; }}\n" for name in sorted(own)))
    command = ["cc", "-w", "-shared", "-fPIC", f"-Wl,-soname,{library}", "-o", str(output / library), str(source)]
    by_version = defaultdict(list)
    for name, version in own.items():
        by_version[version].append(name)
    if set(by_version) - {""}:
        script = output / f"{stem}.map"
        named = {version: names for version, names in by_version.items() if version}
        script.write_text(
            "".join(f"{version} {{ global: {'; '.join(names)}; }};\n" for version, names in named.items())
        )
        command.append(f"-Wl,--version-script={script}")
    subprocess.run(command, check=True)


def main(folder: Path, output: Path) -> None:
    """Builds all stand-ins."""
    output.mkdir(parents=True, exist_ok=True)
    functions = undefined_functions(folder)
    for library in sorted(missing_libraries(folder)):
        build(library, functions, output)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
