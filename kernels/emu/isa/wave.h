// wave.h - state of one wave of 64 lanes, and access to operands.
#pragma once
#include "counters.h"
#include "pending.h"

namespace emu::isa {

struct Workgroup;

// State of a wave: ready, done, sleeping (s_sleep) or waiting at a barrier.
enum class WaveState : u8 { READY, SLEEPING, AT_BARRIER, DONE };

// State of a wave: registers, next instruction and memory operations in flight.
struct Wave {
    alignas(64) u32 vector[512][LANES];   // accumulator registers from 256
    alignas(64) u32 lane_mask[LANES];     // all ones for lanes in `exec`
    u32 scalar[SCALARS];
    u64 exec;
    bool scc;
    u32 next;                             // index of the instruction that runs next
    u32 number;                           // in its workgroup
    WaveState state;
    Workgroup* group;
    PerformanceCounters* counters;
    u32 gfx;
    PendingRegisters pending;

    bool fnuz() const { return gfx == 0x942; }
    bool active(u32 lane) const { return exec >> lane & 1; }
    void set_exec(u64 mask) {
        exec = mask;
        scalar[EXEC] = (u32)mask;
        scalar[EXEC + 1] = (u32)(mask >> 32);
        for (u32 l = 0; l < LANES; ++l) lane_mask[l] = 0u - (u32)(mask >> l & 1);
    }
    u64 pair(u32 index) const { return join(scalar[index], scalar[index + 1]); }
    void set_scalar(u32 index, u32 value) {
        scalar[index] = value;
        if (index == EXEC || index == EXEC + 1) set_exec(pair(EXEC));
    }
    void set_pair(u32 index, u64 value) {
        scalar[index] = (u32)value;
        scalar[index + 1] = (u32)(value >> 32);
        if (index == EXEC) set_exec(value);
    }
};

inline u32 scalar_source(const Wave& w, const Operand& o) {
    if (o.bank == OperandKind::LITERAL) return (u32)o.literal;
    if (o.bank != OperandKind::SCALAR) fault("operand is not scalar");
    return o.index == SCC ? (u32)w.scc : w.scalar[o.index];
}
inline u64 scalar_source_64(const Wave& w, const Operand& o) {
    return o.bank == OperandKind::SCALAR && o.index != SCC ? w.pair(o.index) : o.bank == OperandKind::LITERAL ? o.literal : scalar_source(w, o);
}

// Returns the 64 lanes of a vector or accumulator register.
inline u32* row(Wave& w, const Operand& o, u32 word = 0) {
    if (o.bank != OperandKind::VECTOR && o.bank != OperandKind::ACCUMULATOR) fault("operand is not a vector register");
    return w.vector[(o.bank == OperandKind::ACCUMULATOR ? FIRST_ACCUMULATOR : 0) + o.index + word];
}
// Returns the values of all 64 lanes of 32-bit word `word` of a source operand. A scalar or literal is copied
// to all 64 entries of `scratch`.
inline const u32* source(Wave& w, const Operand& o, u32* scratch, u32 word = 0) {
    if (o.bank == OperandKind::VECTOR || o.bank == OperandKind::ACCUMULATOR) return row(w, o, word);
    u32 value;
    if (o.bank == OperandKind::LITERAL) value = (u32)(o.literal >> 32 * word);
    else value = word ? w.scalar[o.index + word] : scalar_source(w, o);
    for (u32 l = 0; l < LANES; ++l) scratch[l] = value;
    return scratch;
}
// As source(), with the absolute-value and negation modifiers of an f32 operand applied.
inline const u32* float_source(Wave& w, const Operand& o, u32* scratch, u32 word = 0) {
    const u32* from = source(w, o, scratch, word);
    if (!o.absolute && !o.negate) return from;
    const u32 keep = o.absolute ? 0x7fffffff : ~0u, flip = o.negate ? 0x80000000 : 0;
    for (u32 l = 0; l < LANES; ++l) scratch[l] = (from[l] & keep) ^ flip;
    return scratch;
}
// Writes `result` to `destination` for the active lanes only, those in EXEC.
inline void write_lanes(Wave& w, u32* destination, const u32* result) {
    for (u32 l = 0; l < LANES; ++l)
        destination[l] = (result[l] & w.lane_mask[l]) | (destination[l] & ~w.lane_mask[l]);
}
// Returns the byte or word of the source that SDWA selects.
const u32* sub_dword_source(const u32* from, u32 select, bool sign_extend, u32* scratch);

}  // namespace emu::isa
