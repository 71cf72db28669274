"""Finds barriers of AMD machine code that a wavefront can reach while its LDS accesses are in flight.

LDS accesses of several wavefronts can be reordered, so another wavefront could read an old value after such a barrier. The fence
in sync() (dev/amd.h) waits for them, but clang 22 removes this wait where a loop that writes LDS ends at the barrier;
wait_shared() before sync() keeps it.
"""
import re


def accesses_lds(op):
    """Whether an instruction reads or writes LDS memory; exchanges between lanes do not."""
    return op.startswith("ds_") and not op.startswith(("ds_bpermute", "ds_permute", "ds_swizzle"))


def successors(instructions, index, i):
    """Returns the indices of the instructions that can follow instruction `i`; `index` is by address."""
    instruction = instructions[i]
    found = []
    if instruction.op.startswith(("s_branch", "s_cbranch")):
        distance = instruction.simm16 - (instruction.simm16 >> 15 << 16)
        found.append(index.get(instruction.address + 4 + 4 * distance))
    if instruction.op not in ("s_branch", "s_endpgm"):
        found.append(i + 1)
    return [j for j in found if j is not None and j < len(instructions)]


def barriers_without_wait(instructions):
    """Returns the addresses of barriers that some path reaches after an LDS access without lgkmcnt(0) in between."""
    index = {instruction.address: i for i, instruction in enumerate(instructions)}
    in_flight = {0: False}  # before each instruction that is reached
    work, found = [0], set()
    while work:
        i = work.pop()
        pending, instruction = in_flight[i], instructions[i]
        if instruction.op == "s_barrier" and pending:
            found.add(instruction.address)
        if accesses_lds(instruction.op):
            pending = True
        if instruction.op == "s_waitcnt" and re.search(r"lgkmcnt\(0\)", instruction.args):
            pending = False
        for j in successors(instructions, index, i):
            if j not in in_flight or (pending and not in_flight[j]):
                in_flight[j] = pending
                work.append(j)
    return sorted(found)


def error(functions):
    """Returns an error text for the functions of a code object, or an empty one."""
    found = {name: barriers_without_wait(instructions) for name, instructions in functions.items() if instructions}
    lines = [f"{name}: barriers at {', '.join(hex(a) for a in addresses)}" for name, addresses in found.items() if addresses]
    return "\n".join(["a barrier does not wait for LDS; see lds_waits.py:", *lines]) if lines else ""
