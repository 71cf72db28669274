// instruction.h - a decoded instruction, a kernel, and a code object.
#pragma once
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "number.h"

namespace emu::isa {

// Kind of an operand: the register file in which it is, or a literal.
enum class OperandKind : u8 { NONE, VECTOR, ACCUMULATOR, SCALAR, LITERAL };

// An operand of an instruction: registers or a literal, with modifiers.
struct Operand {
    OperandKind bank = OperandKind::NONE;
    u8 count = 1;       // number of consecutive 32-bit registers
    u16 index = 0;      // first register
    u64 literal = 0;
    bool is_float = false, negate = false, absolute = false, sign_extend = false;
};

// Numbers of special scalar registers.
enum : u32 { VCC = 106, M0 = 124, EXEC = 126, SCALARS = 128, SCC = 253 };

// Hardware unit that executes an instruction. Only units that the counters or memory waits distinguish are
// listed. LANES: data moves between lanes through the LDS hardware, without access to LDS memory.
enum class ExecutionUnit : u8 {
    VECTOR, TRANSCENDENTAL, MATRIX, SCALAR, SCALAR_LOAD, LOAD, STORE, ATOMIC, LDS, LANES, BRANCH, WAIT, BARRIER, OTHER,
    COUNT
};

struct Wave;
struct Instruction;
typedef void (*Handler)(Wave&, const Instruction&);
// Computes one 32-bit result for each lane.
typedef void (*Element)(const u32* x, const u32* y, const u32* z, u32* result);

// A range of registers that an instruction reads or writes, numbered as in PendingRegisters (pending.h).
struct RegisterRange {
    u16 first;
    u8 count;
    bool is_destination;
};

// Data-parallel primitive (DPP): each lane reads source 0 from another lane.
struct DppLaneMapping {
    u8 source[LANES];
    u64 valid = ~0ull;          // lanes that have a source lane
    u64 written = ~0ull;        // lanes that the row and bank masks select
    bool zero_invalid = false;  // bound_ctrl: a missing source is zero; otherwise the lane is not written
};

// Sub-dword addressing (SDWA): selects a byte (0-3), a word (4, 5) or the dword (6) of an operand.
struct SdwaSelect {
    u8 destination = 6, source[2] = {6, 6};
    // Effect on the destination bits outside the selected byte or word (the SDWA modifier dst_unused).
    enum Unused : u8 { ZERO, SIGN, KEEP } unused = ZERO;
};

struct Instruction {
    std::string text, name;         // name: without suffixes that select an encoding
    u32 address = 0, bytes = 4;
    Operand operands[6];
    u32 operand_count = 0;
    Handler run = nullptr;          // null: unknown, `text` tells what
    Element element = nullptr;
    ExecutionUnit unit = ExecutionUnit::OTHER;
    std::vector<RegisterRange> registers;
    u32 target = 0;                 // index of the instruction that a branch jumps to
    i32 offset = 0, second_offset = 0;
    u8 op_sel = 0, op_sel_hi = 0xff, neg_lo = 0, neg_hi = 0;  // packed operands: bit i is operand i + 1
    bool clamp = false, returns_old = false, is_16_bit = false, is_dpp = false, is_sdwa = false;
    float multiplier = 1;           // of a float result
    DppLaneMapping shuffle;
    SdwaSelect sub_dword;
    u32 relation = 0;               // comparisons: bits less, equal, greater, unordered that make it true
    u32 truth_table = 0;            // v_bitop3
    u32 format_a = 0, format_b = 0; // cbsz and blgp of f8f6f4 products
    u32 vector_limit = 63, lds_limit = 15;  // s_waitcnt
    u32 matrix_cycles = 0;
};

struct KernelArgument {
    u32 offset, bytes;
    std::string kind;
    bool is_hidden() const { return kind.compare(0, 7, "hidden_") == 0; }
};

struct CodeObject;

// A kernel of a code object, with its resources and arguments.
struct Kernel {
    std::string name;
    const CodeObject* object = nullptr;
    u64 entry = 0;                  // address of the first instruction
    u32 lds_bytes = 0, argument_bytes = 0, private_bytes = 0;
    u32 setup = 0, properties = 0;  // COMPUTE_PGM_RSRC2 and KERNEL_CODE_PROPERTIES
    u32 max_threads = 0, vectors = 0, accumulators = 0, accumulator_offset = 0;
    std::vector<KernelArgument> arguments;
};

// A loaded code object: its memory, decoded instructions and kernels.
struct CodeObject {
    ~CodeObject();
    u32 gfx = 0;
    u8* memory = nullptr;           // loaded segments
    size_t bytes = 0;
    std::vector<Instruction> instructions;
    std::map<u64, u32> index_at;    // of an instruction, by address
    std::map<std::string, Kernel> kernels;
};

// Thrown to end a launch or the loading of a code object; `text` is the reason.
struct EmulationFault {
    std::string text;
};
[[noreturn]] inline void fault(const std::string& text) { throw EmulationFault{text}; }

// Sets the handler of an instruction according to its name. `in.run` stays null if the name is unknown.
void bind(Instruction& in);
// Decodes one line of llvm-objdump's disassembly.
Instruction decode(const std::string& text, u32 address, u32 bytes);
// Loads a code object with its disassembly in section `.disassembly`.
std::shared_ptr<CodeObject> load(const u8* image, size_t bytes);

}  // namespace emu::isa
