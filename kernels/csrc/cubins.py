#!/usr/bin/env python3
"""Compares the machine code of the kernels of the work tree for NVIDIA GPUs (sm_90a) with that of a commit, without a GPU.
Kernels whose machine code is equal byte for byte need no new measurement, unless the host code that launches them changed.

    cubins.py COMMIT [FOLDER...]     all kernels, or those in these folders of kernels/csrc

Prints the compilations that differ or exist in one version only, and the number of equal ones. Exit status: 0 if all are
equal, 1 otherwise. Needs git and NVRTC (see gate.py); COMMIT must have kernels/csrc/gate.py.
"""
import collections, ctypes, glob, hashlib, importlib.util, multiprocessing, os, subprocess, sys, tempfile

ROOT = os.path.dirname(os.path.abspath(__file__))
# Compilation of one source; `root` is the folder kernels/csrc of its version.
Compilation = collections.namedtuple("Compilation", "root source options")


def gate_of(root):
    """Imports the gate.py of one version, which knows its headers and variants."""
    sys.path.insert(0, root)
    spec = importlib.util.spec_from_file_location("gate", os.path.join(root, "gate.py"))
    gate = importlib.util.module_from_spec(spec)
    sys.modules["gate"] = gate
    spec.loader.exec_module(gate)
    return gate


def nvrtc():
    folder = glob.glob(os.environ.get("NVRTC", "/opt/nvrtc") + "/nvidia/*/lib")[0]
    ctypes.CDLL(glob.glob(folder + "/libnvrtc-builtins.so.13*")[0], mode=ctypes.RTLD_GLOBAL)
    return ctypes.CDLL(folder + "/libnvrtc.so.13")


def machine_code(compilation):
    """Returns the cubin of one compilation. Errors: RuntimeError with the log of the compiler."""
    library, array = nvrtc(), lambda values: (ctypes.c_char_p * len(values))(*values)
    headers, program, size = gate_of(compilation.root).headers(), ctypes.c_void_p(), ctypes.c_size_t()
    options = ["--gpu-architecture=sm_90a", "--std=c++17", "--extra-device-vectorization", *compilation.options]
    names, texts = array([name for name, _ in headers]), array([text for _, text in headers])
    source = open(compilation.source, "rb").read()
    library.nvrtcCreateProgram(ctypes.byref(program), source, b"kernel.hip", len(headers), texts, names)
    if library.nvrtcCompileProgram(program, len(options), array([option.encode() for option in options])):
        library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value + 1)
        library.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"{compilation}: {log.value.decode(errors='replace')}")
    library.nvrtcGetCUBINSize(program, ctypes.byref(size))
    code = ctypes.create_string_buffer(size.value)
    library.nvrtcGetCUBIN(program, code)
    return code.raw


def hash_of(compilation):
    name = " ".join([os.path.relpath(compilation.source, compilation.root), *compilation.options])
    return name, hashlib.sha256(machine_code(compilation)).hexdigest()


def hashes(root, folders):
    """Returns the hash of the machine code of every compilation of one version, by its name."""
    gate = gate_of(root)
    sources = [source for folder in folders or ["*"] for source in glob.glob(os.path.join(root, folder, "*.hip"))]
    jobs = [job for source in sources for job in gate.jobs_of(source) if job.target == "sm_90a"]
    compilations = [Compilation(root, job.source, job.options) for job in jobs]
    with multiprocessing.Pool(maxtasksperchild=1) as pool:
        return dict(pool.imap_unordered(hash_of, compilations))


def main():
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    commit, folders = sys.argv[1], sys.argv[2:]
    with tempfile.TemporaryDirectory() as old:
        archive = subprocess.run(["git", "archive", commit, "kernels/csrc"], cwd=os.path.join(ROOT, "../.."), check=True, capture_output=True)
        subprocess.run(["tar", "-x", "-C", old], input=archive.stdout, check=True)
        before = hashes(os.path.join(old, "kernels/csrc"), folders)
    after = hashes(ROOT, folders)
    if not before | after:
        sys.exit(f"no kernels in {' '.join(folders)}")
    differ = sorted(name for name in before | after if before.get(name) != after.get(name))
    for name in differ:
        print(name, "" if name in before and name in after else "(one version only)")
    print(f"{len(before | after) - len(differ)} of {len(before | after)} compilations for sm_90a have the machine code of {commit}")
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
