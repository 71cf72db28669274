"""Counts what the machine code of AMD GPUs does: registers and occupancy of each kernel, and per hot loop the
instructions, the widths of memory accesses, the waits for global memory and the loads in flight at these waits.

`gate.py` compares these counts with `machine_code.txt` and fails if they differ, so a change that worsens one shows it:

    gate.py --record [FOLDER...]     write the counts of the kernels in these folders to machine_code.txt

The counts are static. Instructions of a loop are counted once each, in the order of their addresses, whether or not a
branch skips them. Bank conflicts depend on addresses: the emulator of machine code counts them.
"""
import collections, math, re, subprocess

WAVE_REGISTERS = 512  # per lane and SIMD of CDNA 3 and 4, shared by VGPRs and AGPRs
WAVES_MAX = 8         # per SIMD
REGISTER_UNIT = 8     # registers are allocated in units of this size

# Cycles of the matrix unit by shape; four times the passes of the ISA guides of CDNA 3 and CDNA 4. 16x16x128 and 32x32x64
# (f8f6f4) take the cycles of fp8, the slowest of their formats.
MFMA_CYCLES = {
    "4x4x4": 8, "16x16x4": 32, "16x16x16": 16, "16x16x32": 16, "16x16x128": 32,
    "32x32x2": 64, "32x32x4": 64, "32x32x8": 32, "32x32x16": 32, "32x32x64": 64,
}
Instruction = collections.namedtuple("Instruction", "address op args simm16")
Loop = collections.namedtuple("Loop", "first last")


def disassemble(code_object):
    """Returns the instructions of each function of a code object by name."""
    text = subprocess.run(["llvm-objdump-22", "-d", code_object], capture_output=True, text=True, check=True).stdout
    functions, current = {}, None
    for line in text.splitlines():
        if symbol := re.match(r"^[0-9a-f]+ <(.+)>:$", line):
            current = functions.setdefault(symbol[1], [])
        elif found := re.match(r"^\t(\S+)\s*(.*?)\s*// ([0-9A-F]+): ([0-9A-F]{8})", line):
            op, args, address, word = found.groups()
            current.append(Instruction(int(address, 16), op, args, int(word, 16) & 0xFFFF))
    return functions


def loops_of(instructions):
    """Returns the loops as inclusive ranges of indices. Two ranges are nested or have no instruction in common."""
    index = {instruction.address: i for i, instruction in enumerate(instructions)}
    loops = []
    for i, instruction in enumerate(instructions):
        if not instruction.op.startswith(("s_cbranch", "s_branch")):
            continue
        distance = instruction.simm16 - (instruction.simm16 >> 15 << 16)
        target = index.get(instruction.address + 4 + 4 * distance)
        if target is not None and target <= i:
            loops = merged(loops, Loop(target, i))
    return sorted(loops)


def merged(loops, new):
    """Adds a loop. Loops that overlap it in part, or begin at the same place (`continue`), become one with it."""
    for loop in loops:
        is_apart = loop.last < new.first or new.last < loop.first
        is_nested = (new.first < loop.first and loop.last <= new.last) or (loop.first < new.first and new.last <= loop.last)
        if not is_apart and not is_nested:
            rest = [other for other in loops if other != loop]
            return merged(rest, Loop(min(loop.first, new.first), max(loop.last, new.last)))
    return [*loops, new]


def innermost(loops):
    """Returns the loops that contain no other one."""
    inside = lambda inner, outer: inner != outer and outer.first <= inner.first and inner.last <= outer.last
    return [loop for loop in loops if not any(inside(other, loop) for other in loops)]


def mfma_cycles(op):
    shape = re.search(r"\d+x\d+x\d+", op)
    if not shape or shape[0] not in MFMA_CYCLES:
        raise ValueError(f"{op}: unknown matrix instruction")
    return MFMA_CYCLES[shape[0]]


def access_width(op):
    """Returns the width of a memory access as the instruction names it: "b128", "2_b64", "dwordx4", "u16"."""
    width = re.sub(r"^(ds|global|flat|buffer|scratch)_(load|store|read|write)_?", "", op)
    return re.sub(r"_(e32|e64)$", "", width)


def is_vector_load(instruction):
    return re.match(r"(global|flat|buffer)_load", instruction.op)


def counts_in_vmcnt(instruction):
    return re.match(r"(global|flat|buffer)_(load|store|atomic)", instruction.op)


class LoadQueue:
    """Loads and stores in flight, oldest first, and the number of loads at each wait for them."""

    def __init__(self):
        self.pending, self.loads_at_waits, self.full_waits = [], [], 0

    def issue(self, instruction):
        self.pending.append(bool(is_vector_load(instruction)))

    def wait(self, count):
        if len(self.pending) > count:
            self.loads_at_waits.append(sum(self.pending))
            self.full_waits += count == 0
            self.pending = self.pending[len(self.pending) - count:]


def loads_in_flight(body):
    """Returns a text for the waits of the second of two iterations: how many, how many for all loads, and the loads in
    flight at each."""
    queue = LoadQueue()
    for iteration in range(2):
        queue.loads_at_waits, queue.full_waits = [], 0
        for instruction in body:
            if counts_in_vmcnt(instruction):
                queue.issue(instruction)
            elif instruction.op == "s_waitcnt" and (found := re.search(r"vmcnt\((\d+)\)", instruction.args)):
                queue.wait(int(found[1]))
    waits = [loads for loads in queue.loads_at_waits if loads]
    if not waits:
        return "waits 0"
    mean = sum(waits) / len(waits)
    return f"waits {len(waits)} (for all {queue.full_waits}), loads in flight {min(waits)} to {max(waits)}, mean {mean:.1f}"


def widths_of(body, pattern):
    counts = collections.Counter(access_width(i.op) for i in body if re.match(pattern, i.op))
    return " ".join(f"{width}:{count}" for width, count in sorted(counts.items())) or "none"


def loop_text(body):
    """Returns the counts of one loop."""
    matrix = [i for i in body if is_matrix(i)]
    vector = [i for i in body if i.op.startswith("v_") and not is_matrix(i)]
    scalar = [i for i in body if i.op.startswith("s_") and not i.op.startswith(("s_waitcnt", "s_nop", "s_barrier"))]
    parts = [
        f"valu {len(vector)} (sdwa {sum('sdwa' in i.op for i in vector)})",
        f"salu {len(scalar)}",
        f"mfma {len(matrix)} ({sum(mfma_cycles(i.op) for i in matrix)} cycles)",
        f"global loads {widths_of(body, r'(global|flat|buffer)_load')}",
        f"stores {widths_of(body, r'(global|flat|buffer)_store')}",
        f"lds reads {widths_of(body, r'ds_read')}",
        f"writes {widths_of(body, r'ds_write')}",
        loads_in_flight(body),
        f"barriers {sum(i.op == 's_barrier' for i in body)}",
    ]
    return ", ".join(parts)


def is_matrix(instruction):
    return instruction.op.startswith(("v_mfma", "v_smfmac"))


def hot_loops(instructions):
    """Returns the bodies of the loops that decide the speed of a kernel. With matrix instructions these are the smallest
    loops that multiply, and those that copy to LDS; otherwise the four innermost loops that load most."""
    body = lambda loop: instructions[loop.first:loop.last + 1]
    loads = lambda loop: sum(bool(is_vector_load(i)) for i in body(loop))
    loops = loops_of(instructions)
    if not any(map(is_matrix, instructions)):
        hot = sorted(filter(loads, innermost(loops)), key=loads, reverse=True)[:4]
        return [body(loop) for loop in sorted(hot)]
    multiplies = innermost([loop for loop in loops if any(map(is_matrix, body(loop)))])
    copies = [loop for loop in innermost(loops) if loads(loop) and any(i.op.startswith("ds_write") for i in body(loop))]
    return [body(loop) for loop in sorted({*multiplies, *copies})]


def resources(code_object):
    """Returns a text of the resources of each kernel by name."""
    notes = subprocess.run(["llvm-readelf-22", "--notes", code_object], capture_output=True, text=True, check=True).stdout
    found = {}
    for entry in re.split(r"\n  - \.agpr_count:", notes)[1:]:
        field = lambda name: re.search(rf"\.{name}:\s+(\S+)", entry)[1]
        agprs, registers = int(entry.split()[0]), int(field("vgpr_count"))
        allocated = math.ceil(max(registers, 1) / REGISTER_UNIT) * REGISTER_UNIT
        found[field("name")] = (
            f"vgpr {registers}, agpr {agprs}, sgpr {field('sgpr_count')}, "
            f"waves per SIMD by registers {min(WAVES_MAX, WAVE_REGISTERS // allocated)}, "
            f"static lds {field('group_segment_fixed_size')}")
    return found


def report(code_object):
    """Returns the lines of machine_code.txt for one compilation."""
    functions, lines = disassemble(code_object), []
    for kernel, text in sorted(resources(code_object).items()):
        lines.append(f"{kernel}: {text}")
        lines += [f"  loop: {loop_text(body)}" for body in hot_loops(functions[kernel])]
    return lines


def read_recorded(path):
    """Returns the compiler version and the recorded lines by compilation."""
    version, recorded, current = "", {}, None
    for line in open(path).read().splitlines():
        if line.startswith("compiler: "):
            version = line.removeprefix("compiler: ")
        elif line.startswith("["):
            current = recorded.setdefault(line[1:-1], [])
        elif line and not line.startswith("#"):
            current.append(line)
    return version, recorded


def write_recorded(path, version, recorded):
    lines = ["# Counts of the machine code of AMD GPUs, written by `gate.py --record`; see machine_code.py.",
             f"compiler: {version}"]
    for compilation, report_lines in sorted(recorded.items()):
        lines += ["", f"[{compilation}]", *report_lines]
    with open(path, "w") as file:
        file.write("\n".join(lines) + "\n")
