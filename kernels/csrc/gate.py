#!/usr/bin/env python3
"""Compiles every kernel for every GPU we name, without a GPU: gfx942 and gfx950 with clang, sm_90a with NVRTC, gfx90a
with ROCm's own run-time compiler; those with values of the 16-bit type also with f16, but for gfx90a. Fails on a warning, on products of warpgroups that are serialised, on a spilled register, on stack memory, and on a missing tool.

    gate.py [FOLDER...]     only the kernels in these folders of kernels/csrc

Needs (Debian): clang-22 lld-22 llvm-22 libamdhip64-5 libhiprtc-builtins5, and
    pip install --target $NVRTC nvidia-cuda-nvrtc==13.0.88     (NVRTC defaults to /opt/nvrtc)
"""
import collections, ctypes, glob, multiprocessing, os, re, shutil, subprocess, sys, tempfile, time

ROOT = os.path.dirname(os.path.abspath(__file__))
HEADER_TEST = os.path.join(ROOT, "../tests/emulator/kernels/header.hip")
TARGETS = ["gfx942", "gfx950", "sm_90a", "gfx90a"]
F16_TARGETS = TARGETS[:3]
# Variants of a kernel share one list of arguments; not all of them use all.
CLANG = ("clang-22 -x hip --offload-device-only -nogpuinc -nogpulib -mcode-object-version=5 -O3 -std=c++17 "
         "-ffp-contract=fast -Wall -Wextra -Wno-unused-parameter -Werror --no-gpu-bundle-output").split()
Job = collections.namedtuple("Job", "source options target")


def variants(source):
    """(targets, options) of each line of the `variants` file beside a source; see README.md."""
    path = os.path.join(os.path.dirname(source), "variants")
    if not os.path.exists(path):
        return [(TARGETS, [])]
    found = []
    for line in open(path):
        line = line.split("#")[0].strip()
        if not line:
            continue
        targets, colon, options = line.rpartition(":")
        targets = targets.split() if colon else TARGETS
        unknown = [t for t in targets if t not in TARGETS]
        if unknown:
            sys.exit(f"{path}: unknown target {unknown[0]}; there are {' '.join(TARGETS)}")
        found.append((targets, options.split()))
    return found


def has_half(source):
    """Whether a source, or a header of kernels that it includes, names the 16-bit type."""
    text = open(source).read()
    if re.search(r"\b(half_\w+|\w+_half|ACTV?)\b", text):
        return True
    included = re.findall(r'^#\s*include "((?!dev).+)"', text, re.MULTILINE)
    return any(has_half(os.path.join(ROOT, header)) for header in included)


def jobs_of(source):
    jobs = [Job(source, tuple(o), t) for targets, o in variants(source) for t in targets]
    if has_half(source):
        narrow = [j for j in jobs if j.target in F16_TARGETS and "-DACT_F32=1" not in j.options]
        jobs += [j._replace(options=(*j.options, "-DHALF_F16=1")) for j in narrow]
    return jobs


def headers():
    paths = glob.glob(ROOT + "/**/*.h", recursive=True)
    return [(os.path.relpath(p, ROOT).encode(), open(p, "rb").read()) for p in sorted(paths)]


def run_time_compile(library, prefix, job, options):
    """Log and success of one compile by hiprtc or NVRTC, whose calls are twins."""
    call = lambda name: getattr(library, prefix + name)
    listed, options = headers(), [o.encode() for o in options]
    array = lambda values: (ctypes.c_char_p * len(values))(*values)
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    names, texts = array([n for n, _ in listed]), array([t for _, t in listed])
    text, name = open(job.source, "rb").read(), os.path.basename(job.source).encode()
    code = call("CreateProgram")(ctypes.byref(program), text, name, len(listed), texts, names)
    assert code == 0, f"{prefix}CreateProgram answers {code}"
    code = call("CompileProgram")(program, len(options), array(options))
    call("GetProgramLogSize")(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value + 1)
    call("GetProgramLog")(program, log)
    return log.value.decode(errors="replace"), code == 0


def hiprtc(job):
    library = ctypes.CDLL("libamdhip64.so.5")
    log, good = run_time_compile(library, "hiprtc", job, ["--gpu-architecture=gfx90a", "-O3", "-std=c++17", *job.options])
    return "" if good and "warning:" not in log else log or "failed without a word"


def nvrtc(job):
    folder = glob.glob(os.environ.get("NVRTC", "/opt/nvrtc") + "/nvidia/*/lib")[0]
    # By path before NVRTC itself, which would look for it in the system's folders.
    ctypes.CDLL(glob.glob(folder + "/libnvrtc-builtins.so.13*")[0], mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(folder + "/libnvrtc.so.13")
    options = ["--gpu-architecture=sm_90a", "--std=c++17", "--extra-device-vectorization", "--ptxas-options=-v", *job.options]
    log, good = run_time_compile(library, "nvrtc", job, options)
    # Products of warpgroups that ptxas waits for one by one are told of as information.
    if not good or "warning" in log or "Performance Loss" in log:
        return log
    stacks = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if not stacks or any(figure != ("0", "0", "0") for figure in stacks):
        return "spills or uses the stack:\n" + log
    return ""


def clang(job):
    with tempfile.NamedTemporaryFile(suffix=".co") as out:
        command = [*CLANG, "--offload-arch=" + job.target, "-I", ROOT, *job.options, "-o", out.name, job.source]
        compiled = subprocess.run(command, capture_output=True, text=True)
        if compiled.returncode or compiled.stderr:
            return compiled.stderr
        notes = subprocess.run(["llvm-readelf-22", "--notes", out.name], capture_output=True, text=True).stdout
    limits = re.findall(r"\.(vgpr_spill_count|sgpr_spill_count|private_segment_fixed_size):\s+(\d+)", notes)
    over = [f"{name} {value}" for name, value in limits if value != "0" and name != "sgpr_spill_count"]
    return "spills or uses scratch memory: " + ", ".join(over) if over or not limits else ""


def compile_one(job):
    compiler = {"sm_90a": nvrtc, "gfx90a": hiprtc}.get(job.target, clang)
    return job, compiler(job)


def missing_tools():
    missing = [tool for tool in ["clang-22", "ld.lld-22", "llvm-readelf-22"] if not shutil.which(tool)]
    if not glob.glob(os.environ.get("NVRTC", "/opt/nvrtc") + "/nvidia/*/lib/libnvrtc.so.13"):
        missing.append("nvidia-cuda-nvrtc 13")
    try:
        ctypes.CDLL("libamdhip64.so.5")
    except OSError:
        missing.append("libamdhip64.so.5")
    return missing


def main():
    if missing := missing_tools():
        sys.exit("missing: " + ", ".join(missing) + "\n" + __doc__)
    folders = sys.argv[1:] or sorted(f for f in os.listdir(ROOT) if os.path.isdir(os.path.join(ROOT, f)))
    sources = [s for f in folders for s in sorted(glob.glob(os.path.join(ROOT, f, "*.hip")))]
    if not sys.argv[1:]:
        sources.append(HEADER_TEST)
    jobs = [job for source in sources for job in jobs_of(source)]
    began, failed = time.time(), 0
    # A process per compile: hiprtc keeps state, and compiles one program at a time.
    with multiprocessing.Pool(os.cpu_count(), maxtasksperchild=1) as pool:
        for job, complaint in pool.imap_unordered(compile_one, jobs):
            if complaint:
                failed += 1
                print(f"{os.path.relpath(job.source, ROOT)} {' '.join(job.options)} for {job.target}:\n{complaint}\n")
    print(f"{len(jobs)} compiles of {len(sources)} sources, {failed} failed, {time.time() - began:.0f} s")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
