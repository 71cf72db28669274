"""Counts what the machine code of AMD GPUs does: registers and occupancy of each kernel, and per hot loop the
instructions, the widths of memory accesses, the waits for global memory and the loads in flight at these waits.

`gate.py` compares these counts with `machine_code.txt` and fails if they differ, so a change that worsens one shows it:

    gate.py --record [FOLDER...]     write the counts of the kernels in these folders to machine_code.txt

The counts are static. Instructions of a loop are counted once each, in the order of their addresses, whether or not a
branch skips them. Bank conflicts depend on addresses: the emulator of machine code counts them. Waves per SIMD by LDS count
static LDS only, because the host chooses the dynamic LDS of a launch; amd_isa.md has the LDS of the launches of the tests.

Cycles of vector and of matrix instructions are those of one wave alone. A SIMD has 16 lanes, so a vector instruction of a wave
takes 4 cycles; transcendental ones take four times as many. `mfma per valu cycle` is the ratio of both: below 1, the vector
instructions of a wave take longer than its matrix instructions.

Another version of clang 22 than the recorded one has other counts; `worse_counts` finds those that are clearly worse.
"""
import collections, math, re, subprocess
import lds_waits

WAVE_REGISTERS = 512  # per lane and SIMD of CDNA 3 and 4, shared by VGPRs and AGPRs
WAVES_MAX = 8         # per SIMD
REGISTER_UNIT = 8     # registers are allocated in units of this size
SIMDS = 4             # per compute unit
LDS_BYTES = {"gfx942": 64 << 10, "gfx950": 160 << 10}  # per compute unit
LDS_UNIT = {"gfx942": 512, "gfx950": 1280}             # LDS is allocated in units of this size
WAVE_LANES = 64
VALU_CYCLES = 4            # of a vector instruction
TRANSCENDENTAL_CYCLES = 16
TRANSCENDENTAL = re.compile(r"v_(exp|log|rcp|rcp_iflag|rsq|sqrt|sin|cos)_(f16|f32|f64)")

# Cycles of the matrix unit by shape; four times the passes of the ISA guides of CDNA 3 and CDNA 4. 16x16x128 and 32x32x64
# (f8f6f4) take the cycles of fp8, the slowest of their formats.
MFMA_CYCLES = {
    "4x4x4": 8, "16x16x4": 32, "16x16x16": 16, "16x16x32": 16, "16x16x128": 32,
    "32x32x2": 64, "32x32x4": 64, "32x32x8": 32, "32x32x16": 32, "32x32x64": 64,
}
Instruction = collections.namedtuple("Instruction", "address op args simm16")


def disassemble(code_object):
    """Returns the instructions of each function of a code object by name."""
    return parse_disassembly(subprocess.run(["llvm-objdump-22", "-d", code_object], capture_output=True, text=True, check=True).stdout)


def parse_disassembly(text):
    """Returns the instructions of each function of a text of llvm-objdump by name."""
    functions, current = {}, None
    for line in text.splitlines():
        if symbol := re.match(r"^[0-9a-f]+ <(.+)>:$", line):
            current = functions.setdefault(symbol[1], [])
        elif found := re.match(r"^\t(\S+)\s*(.*?)\s*// ([0-9A-F]+): ([0-9A-F]{8})", line):
            op, args, address, word = found.groups()
            current.append(Instruction(int(address, 16), op, args, int(word, 16) & 0xFFFF))
    return functions


def loops_of(instructions):
    """Returns the loops, each as a tuple of the indices of its instructions. A loop is a region of the control flow in which each
    instruction can be reached from each other one, so a branch to an earlier address alone is none. Two loops are nested or have no
    instruction in common."""
    blocks = basic_blocks(instructions)
    index = {instruction.address: i for i, instruction in enumerate(instructions)}
    after = {first: lds_waits.successors(instructions, index, last) for first, last in blocks.items()}
    loops, regions = [], [set(blocks)]
    while regions:
        region = regions.pop()
        for found in strongly_connected(region, after):
            if len(found) == 1 and not found & set(after[min(found)]):
                continue
            loops.append(tuple(i for first in sorted(found) for i in range(first, blocks[first] + 1)))
            # Without the blocks where the loop begins, the rest of it has only its inner loops.
            entries = {j for first in blocks if first not in found for j in after[first] if j in found}
            regions.append(found - (entries or {min(found)}))
    return sorted(loops)


def basic_blocks(instructions):
    """Returns the index of the last instruction of each basic block by that of its first one."""
    index = {instruction.address: i for i, instruction in enumerate(instructions)}
    firsts = {0} if instructions else set()
    for i, instruction in enumerate(instructions):
        if instruction.op.startswith(("s_branch", "s_cbranch", "s_endpgm")):
            firsts |= {i + 1, *lds_waits.successors(instructions, index, i)}
    ordered = sorted(first for first in firsts if first < len(instructions))
    return {first: next_first - 1 for first, next_first in zip(ordered, [*ordered[1:], len(instructions)])}


def strongly_connected(nodes, after):
    """Returns the strongly connected sets of the graph of `nodes` with the edges `after` (Kosaraju)."""
    before, order, seen = collections.defaultdict(list), [], set()
    for node in nodes:
        for other in after[node]:
            before[other].append(node)
    for root in sorted(nodes):
        reached(root, nodes, after, seen, order)
    sets, seen = [], set()
    for root in reversed(order):
        if found := reached(root, nodes, before, seen, []):
            sets.append(set(found))
    return sets


def reached(root, nodes, edges, seen, order):
    """Appends the nodes that are reached from `root` and not yet seen to `order`, each after those reached from it."""
    work = [(root, False)]
    while work:
        node, is_done = work.pop()
        if is_done:
            order.append(node)
        elif node in nodes and node not in seen:
            seen.add(node)
            work += [(node, True), *((other, False) for other in edges[node])]
    return order


def is_inside(inner, outer):
    return inner != outer and set(inner) <= set(outer)


def innermost(loops):
    """Returns the loops that contain no other one."""
    return [loop for loop in loops if not any(is_inside(other, loop) for other in loops)]


def mfma_cycles(op):
    shape = re.search(r"\d+x\d+x\d+", op)
    if not shape or shape[0] not in MFMA_CYCLES:
        raise ValueError(f"{op}: unknown matrix instruction")
    return MFMA_CYCLES[shape[0]]


def valu_cycles(op):
    return TRANSCENDENTAL_CYCLES if TRANSCENDENTAL.match(op) else VALU_CYCLES


def access_width(op):
    """Returns the width of a memory access as the instruction names it: "b128", "2_b64", "dwordx4", "u16"."""
    width = re.sub(r"^(ds|global|flat|buffer|scratch)_(load|store|read|write)_?", "", op)
    return re.sub(r"_(e32|e64)$", "", width)


def is_vector_load(instruction):
    return re.match(r"(global|flat|buffer)_load", instruction.op)


def is_wide_load(instruction):
    return is_vector_load(instruction) and "dwordx" in instruction.op


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
    in_vector, in_matrix = sum(valu_cycles(i.op) for i in vector), sum(mfma_cycles(i.op) for i in matrix)
    parts = [
        f"valu {len(vector)} (sdwa {sum('sdwa' in i.op for i in vector)}, {in_vector} cycles)",
        f"salu {len(scalar)}",
        f"mfma {len(matrix)} ({in_matrix} cycles)",
        *([f"mfma per valu cycle {in_matrix / in_vector:.2f}"] if in_matrix and in_vector else []),
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
    loops that multiply, the smallest loops around those that load nothing, and those that copy vectors to LDS, unlike searches of a
    row, which write a result there; otherwise the four innermost loops that load most."""
    body = lambda loop: [instructions[i] for i in loop]
    loads = lambda loop: sum(bool(is_vector_load(i)) for i in body(loop))
    loops = loops_of(instructions)
    if not any(map(is_matrix, instructions)):
        hot = sorted(filter(loads, innermost(loops)), key=loads, reverse=True)[:4]
        return [body(loop) for loop in sorted(hot)]
    multiplies = innermost([loop for loop in loops if any(map(is_matrix, body(loop)))])
    is_copy = lambda loop: any(map(is_wide_load, body(loop))) and any(i.op.startswith("ds_write") for i in body(loop))
    copies = list(filter(is_copy, innermost(loops)))
    around = [smallest_around(loop, filter(loads, loops)) for loop in multiplies if not loads(loop)]
    return [body(loop) for loop in sorted({*multiplies, *copies, *filter(None, around)})]


def smallest_around(inner, loops):
    """Returns the smallest of the loops that contain another one, or None."""
    return min((loop for loop in loops if is_inside(inner, loop)), key=len, default=None)


def waves_by_lds(target, static_bytes, threads):
    """Returns how many waves of blocks of `threads` threads are resident on a SIMD, if only static LDS limits them."""
    if static_bytes == 0:
        return WAVES_MAX
    allocated = math.ceil(static_bytes / LDS_UNIT[target]) * LDS_UNIT[target]
    waves = LDS_BYTES[target] // allocated * math.ceil(threads / WAVE_LANES)
    return min(WAVES_MAX, math.ceil(waves / SIMDS))


def resources(code_object):
    """Returns a text of the resources of each kernel by name."""
    notes = subprocess.run(["llvm-readelf-22", "--notes", code_object], capture_output=True, text=True, check=True).stdout
    found, target = {}, re.search(r"amdhsa\.target:.*--(gfx\w+)", notes)[1]
    for entry in re.split(r"\n  - \.agpr_count:", notes)[1:]:
        field = lambda name: re.search(rf"\.{name}:\s+(\S+)", entry)[1]
        agprs, registers = int(entry.split()[0]), int(field("vgpr_count"))
        allocated = math.ceil(max(registers, 1) / REGISTER_UNIT) * REGISTER_UNIT
        found[field("name")] = (
            f"vgpr {registers}, agpr {agprs}, sgpr {field('sgpr_count')}, "
            f"waves per SIMD by registers {min(WAVES_MAX, WAVE_REGISTERS // allocated)}, "
            f"static lds {field('group_segment_fixed_size')}, sgpr spills {field('sgpr_spill_count')}, "
            f"waves per SIMD by static lds {waves_by_lds(target, int(field('group_segment_fixed_size')), int(field('max_flat_workgroup_size')))}")
    return found


def report(code_object):
    """Returns the lines of machine_code.txt for one compilation."""
    functions, lines = disassemble(code_object), []
    for kernel, text in sorted(resources(code_object).items()):
        lines.append(f"{kernel}: {text}")
        lines += [f"  loop: {loop_text(body)}" for body in hot_loops(functions[kernel])]
    return lines


def number_in(line, pattern):
    found = re.search(pattern, line)
    return float(found[1]) if found else None


def worse_counts(recorded, counts):
    """Returns texts about counts that are worse than recorded ones beyond the differences between versions of clang 22."""
    if len(recorded) != len(counts):
        return [f"{len(counts)} rows, recorded are {len(recorded)}"]
    limits = [("vgpr", r"vgpr (\d+)", 1.15), ("valu", r"valu (\d+)", 1.25), ("valu cycles", r"sdwa \d+, (\d+) cycles", 1.25),
              ("mfma per valu cycle", r"mfma per valu cycle ([\d.]+)", -0.8), ("sgpr spills", r"sgpr spills (\d+)", 2.0),
              ("waves per SIMD", r"by registers (\d+)", -1.0), ("loads in flight, mean", r"mean ([\d.]+)", -0.75)]
    found = []
    for old, new in zip(recorded, counts):
        for name, pattern, limit in limits:
            before, now = number_in(old, pattern), number_in(new, pattern)
            if before is None or now is None:
                continue
            if now > before * limit + 2 if limit > 0 else now < before * -limit:
                found.append(f"{name}: {now:g}, recorded is {before:g}")
    return found


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
