#!/usr/bin/env python3
"""Compiles every kernel for every supported GPU, without a GPU: gfx942 and gfx950 with clang, sm_90a with NVRTC, gfx90a
with hiprtc. Kernels that use half_t are also compiled for f16, except for gfx90a. Fails on a compiler warning, on
serialised WGMMAs, on a spilled VGPR, on stack memory, on a missing tool, and if the machine code for gfx942 and gfx950
has other counts than machine_code.txt (see machine_code.py) or a barrier that does not wait for LDS (see lds_waits.py).
With another version of clang-22 than machine_code.txt names, counts differ without a change of a kernel: those that are
clearly worse are printed as notes, and do not fail.

    gate.py [FOLDER...]              only the kernels in these folders of kernels/csrc
    gate.py --record [FOLDER...]     write the counts of their machine code to machine_code.txt
    gate.py --turn N                 skip sources whose compilations compiled.txt lists, but one in eight, drawn by N

Successful compilations are cached by a hash of all their inputs, in the file given by GATE_KERNELS (default:
target/gate/kernels.txt), and are skipped in later runs. A run without --turn also writes compiled.txt, which is committed
(see compiled_list.py).

Needs (Debian): clang-22 lld-22 llvm-22 libamdhip64-5 libhiprtc-builtins5, and
    pip install --target $NVRTC nvidia-cuda-nvrtc==13.0.88     (NVRTC defaults to /opt/nvrtc)
"""
import argparse, collections, ctypes, difflib, functools, glob, hashlib, multiprocessing, os, re, shutil, subprocess, sys, tempfile, time
import compiled_list, lds_waits, machine_code

ROOT = os.path.dirname(os.path.abspath(__file__))
COUNTS = os.path.join(ROOT, "machine_code.txt")
# Identifies the checks that the compilations in compiled.txt have passed. With another text all of them are compiled
# again: a change of the scripts that rejects more than before needs one.
CHECKS = "5c0573864eb95156a8459fabc988bd848e235b781bff5175a745c9011fff5462"
HEADER_TEST = os.path.join(ROOT, "../tests/emulator/kernels/header.hip")
TARGETS = ["gfx942", "gfx950", "sm_90a", "gfx90a"]
F16_TARGETS = TARGETS[:3]
# All variants of a kernel have the same argument list, so some arguments are unused in some variants.
CLANG = ("clang-22 -x hip --offload-device-only -nogpuinc -nogpulib -mcode-object-version=5 -O3 -std=c++17 "
         "-ffp-contract=fast -Wall -Wextra -Wno-unused-parameter -Werror --no-gpu-bundle-output").split()
Job = collections.namedtuple("Job", "source options target")


def variants(source):
    """Returns (targets, options) of each line of the `variants` file in the folder of a source; see README.md."""
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
    """Whether a source, or a header outside dev/ that it includes, uses the 16-bit type."""
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


@functools.cache
def headers():
    paths = glob.glob(ROOT + "/**/*.h", recursive=True)
    return [(os.path.relpath(p, ROOT).encode(), open(p, "rb").read()) for p in sorted(paths)]


@functools.cache
def included_by(path):
    """Returns the paths of a file of csrc and of all headers that it includes, directly or not."""
    found, open_paths = {path}, [path]
    while open_paths:
        for header in re.findall(rb'^\s*#\s*include "(.+)"', open(open_paths.pop(), "rb").read(), re.MULTILINE):
            header = os.path.join(ROOT, header.decode())
            # The compilers supply emu.h.
            if header not in found and os.path.exists(header):
                found.add(header)
                open_paths.append(header)
    return sorted(found)


def run_time_compile(library, prefix, job, options):
    """Returns log and success of one compilation by hiprtc or NVRTC, which have equivalent APIs."""
    call = lambda name: getattr(library, prefix + name)
    listed, options = headers(), [o.encode() for o in options]
    array = lambda values: (ctypes.c_char_p * len(values))(*values)
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    names, texts = array([n for n, _ in listed]), array([t for _, t in listed])
    text, name = open(job.source, "rb").read(), os.path.basename(job.source).encode()
    code = call("CreateProgram")(ctypes.byref(program), text, name, len(listed), texts, names)
    assert code == 0, f"{prefix}CreateProgram returned {code}"
    code = call("CompileProgram")(program, len(options), array(options))
    call("GetProgramLogSize")(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value + 1)
    call("GetProgramLog")(program, log)
    return log.value.decode(errors="replace"), code == 0


def hiprtc(job):
    library = ctypes.CDLL("libamdhip64.so.5")
    log, good = run_time_compile(library, "hiprtc", job, ["--gpu-architecture=gfx90a", "-O3", "-std=c++17", *job.options])
    return "" if good and "warning:" not in log else log or "failed, and the compiler log is empty"


def nvrtc(job):
    folder = glob.glob(os.environ.get("NVRTC", "/opt/nvrtc") + "/nvidia/*/lib")[0]
    # libnvrtc-builtins is loaded by path, because NVRTC would search for it in the system's folders only.
    ctypes.CDLL(glob.glob(folder + "/libnvrtc-builtins.so.13*")[0], mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(folder + "/libnvrtc.so.13")
    options = ["--gpu-architecture=sm_90a", "--std=c++17", "--extra-device-vectorization", "--ptxas-options=-v", *job.options]
    log, good = run_time_compile(library, "nvrtc", job, options)
    # ptxas reports serialised WGMMAs ("Performance Loss") at information level only.
    if not good or "warning" in log or "Performance Loss" in log:
        return log
    stacks = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    if not stacks or any(figure != ("0", "0", "0") for figure in stacks):
        return "spills or uses the stack:\n" + log
    return ""


def compile_with_clang(job, path):
    command = [*CLANG, "--offload-arch=" + job.target, "-I", ROOT, *job.options, "-o", path, job.source]
    compiled = subprocess.run(command, capture_output=True, text=True)
    if compiled.returncode or compiled.stderr:
        return compiled.stderr or f"clang-22 ended with status {compiled.returncode}"
    notes = subprocess.run(["llvm-readelf-22", "--notes", path], capture_output=True, text=True).stdout
    limits = re.findall(r"\.(vgpr_spill_count|sgpr_spill_count|private_segment_fixed_size):\s+(\d+)", notes)
    exceeded = [f"{name} {value}" for name, value in limits if value != "0" and name != "sgpr_spill_count"]
    return "spills or uses scratch memory: " + ", ".join(exceeded) if exceeded or not limits else ""


def clang(job):
    """Returns an error text and the counts of the machine code."""
    with tempfile.NamedTemporaryFile(suffix=".co") as out:
        error = compile_with_clang(job, out.name) or lds_waits.error(machine_code.disassemble(out.name))
        return error, [] if error or not is_counted(job) else machine_code.report(out.name)


def is_counted(job):
    """Whether machine_code.txt has the counts of a compilation; those of f16 are the counts of bf16."""
    return job.target in ("gfx942", "gfx950") and "-DHALF_F16=1" not in job.options and job.source != HEADER_TEST


def compilation_name(job):
    return " ".join([os.path.relpath(job.source, ROOT), *job.options, "for", job.target])


@functools.cache
def recorded_file():
    """Returns the compiler version that machine_code.txt names, and its counts by compilation."""
    return machine_code.read_recorded(COUNTS) if os.path.exists(COUNTS) else ("", {})


def recorded_counts():
    """Returns the recorded counts by compilation; none if another compiler version wrote them."""
    version, recorded = recorded_file()
    return recorded if version == clang_version() else {}


def difference(job, counts):
    """Returns an error text if the machine code has other counts than the recorded ones."""
    if not is_counted(job) or not recorded_counts():
        return ""
    recorded = recorded_counts().get(compilation_name(job), [])
    if recorded == counts:
        return ""
    lines = difflib.unified_diff(recorded, counts, "machine_code.txt", "this source", lineterm="", n=0)
    return "\n".join(["the machine code has other counts; if they are right, record them with gate.py --record:", *lines])


def note(job, counts):
    """Returns a text about counts that are clearly worse than those recorded with another version of clang-22."""
    recorded = recorded_file()[1].get(compilation_name(job))
    if not is_counted(job) or recorded_counts() or not recorded:
        return ""
    return "; ".join(machine_code.worse_counts(recorded, counts))


def compile_one(job):
    """Returns the job, an error text, and the counts of its machine code."""
    if job.target in ("gfx942", "gfx950"):
        error, counts = clang(job)
    else:
        error, counts = (nvrtc if job.target == "sm_90a" else hiprtc)(job), []
    return job, error, counts


@functools.cache
def clang_version():
    return subprocess.run(["clang-22", "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]


def versions():
    """Returns a text per target that identifies its compiler version."""
    of = lambda tool: subprocess.run([tool, "--version"], capture_output=True, text=True).stdout
    lines = of("clang-22") + of("ld.lld-22") + of("llvm-readelf-22")
    nvrtc_files = glob.glob(os.environ.get("NVRTC", "/opt/nvrtc") + "/nvidia_cuda_nvrtc*")
    hiprtc_files = [path for name in ("libamdhip64.so.5.*", "libamd_comgr.so.2.*", "libhiprtc-builtins.so.5.*")
                    for folder in ("/usr/lib/*", "/opt/rocm*/lib") for path in glob.glob(os.path.join(folder, name))]
    names = lambda paths: repr(sorted(map(os.path.basename, paths)))
    return {"sm_90a": names(nvrtc_files), "gfx90a": names(hiprtc_files), "gfx942": lines, "gfx950": lines}


def hash_of(parts):
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def keys_of(jobs):
    """Returns a hash per compilation over the checks, the compiler version, the source with its headers, and the options."""
    compilers = versions()
    inputs = {source: hash_of(piece for path in included_by(source) for piece in (os.path.relpath(path, ROOT).encode(), open(path, "rb").read()))
              for source in {job.source for job in jobs}}
    counts = lambda job: recorded_counts().get(compilation_name(job), []) if is_counted(job) else []
    compared = str(bool(recorded_counts()))
    parts = lambda job: [CHECKS, compilers[job.target], compared, job.target, inputs[job.source], *job.options, *counts(job)]
    return {job: hash_of(part.encode() for part in parts(job)) for job in jobs}


def cache_path():
    target = os.environ.get("CARGO_TARGET_DIR", os.path.join(ROOT, "../../target"))
    return os.environ.get("GATE_KERNELS", os.path.join(target, "gate/kernels.txt"))


def missing_tools():
    missing = [tool for tool in ["clang-22", "ld.lld-22", "llvm-readelf-22"] if not shutil.which(tool)]
    if not glob.glob(os.environ.get("NVRTC", "/opt/nvrtc") + "/nvidia/*/lib/libnvrtc.so.13"):
        missing.append("nvidia-cuda-nvrtc 13")
    try:
        ctypes.CDLL("libamdhip64.so.5")
    except OSError:
        missing.append("libamdhip64.so.5")
    return missing


def record(every, counts):
    """Writes the counts of `every` job to machine_code.txt, and keeps those of other kernels that still exist."""
    known = {compilation_name(job) for source in sources_of([]) for job in jobs_of(source) if is_counted(job)}
    recorded = {name: lines for name, lines in recorded_counts().items() if name in known}
    machine_code.write_recorded(COUNTS, clang_version(), recorded | {compilation_name(job): counts[job] for job in every if job in counts})


def sources_of(folders):
    every = sorted(f for f in os.listdir(ROOT) if os.path.isdir(os.path.join(ROOT, f)))
    return [s for f in folders or every for s in sorted(glob.glob(os.path.join(ROOT, f, "*.hip")))]


def run(jobs, records):
    """Compiles jobs. Returns those that succeeded, their counts, and the number of those that failed."""
    succeeded, counts, failed = [], {}, 0
    # One process per compilation: hiprtc keeps state, and compiles one program at a time.
    with multiprocessing.Pool(os.cpu_count(), maxtasksperchild=1) as pool:
        for job, error, counted in pool.imap_unordered(compile_one, jobs):
            error = error or (not records and difference(job, counted))
            if error:
                failed += 1
                print(f"{compilation_name(job)}:\n{error}\n")
                continue
            if not records and (worse := note(job, counted)):
                print(f"note, {compilation_name(job)}: {worse}")
            succeeded.append(job)
            if is_counted(job):
                counts[job] = counted
    return succeeded, counts, failed


def comparison():
    """Returns a text for the last line if counts were not compared exactly."""
    return "" if recorded_counts() else f", counts not compared exactly: {clang_version()} is not {recorded_file()[0] or 'recorded'}"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--turn", type=int)
    parser.add_argument("folders", nargs="*")
    return parser.parse_args()


def main():
    if missing := missing_tools():
        sys.exit("missing: " + ", ".join(missing) + "\n" + __doc__)
    args = arguments()
    sources = sources_of(args.folders) + ([] if args.folders else [HEADER_TEST])
    every = [job for source in sources for job in jobs_of(source)]
    if args.record:
        record_counts(every, args.folders)
    if not recorded_counts():
        print(f"{os.path.basename(COUNTS)} is of {recorded_file()[0] or 'no compiler'}: counts of {clang_version()} do not fail")
    compile_changed(every, sources, args)


def record_counts(every, folders):
    if folders and os.path.exists(COUNTS) and not recorded_counts():
        sys.exit(f"{COUNTS} is of another compiler than {clang_version()}: record all kernels")
    _, counts, failed = run([job for job in every if is_counted(job)], True)
    record(every, counts)
    sys.exit(bool(failed))


def compile_changed(every, sources, args):
    """Compiles those of `every` job that no earlier run has compiled, and ends the process."""
    began, path, keys = time.time(), cache_path(), keys_of(every)
    cached = set(open(path).read().split()) if os.path.exists(path) else set()
    groups = compiled_list.group_by_source(every, keys, ROOT)
    skipped = set() if args.turn is None else compiled_list.skipped_in_turn(groups, args.turn)
    jobs = [job for job in every if keys[job] not in cached and job not in skipped]
    succeeded, _, failed = run(jobs, False)
    cached |= {keys[job] for job in succeeded}
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    with open(path, "w") as file:
        file.write("\n".join(sorted(cached if args.folders else cached & set(keys.values()))) + "\n")
    if args.turn is None:
        existing = [job for source in [*sources_of([]), HEADER_TEST] for job in jobs_of(source)]
        compiled_list.write(groups, compiled_list.group_by_source(existing, keys_of(existing), ROOT).keys(), cached)
    print(f"{len(jobs)} compiles of {len(sources)} sources, {failed} failed, {len(every) - len(jobs)} unchanged since earlier runs, "
          f"{time.time() - began:.0f} s{comparison()}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
