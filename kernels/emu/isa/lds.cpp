// lds.cpp - loads, stores and atomic operations on LDS, and exchanges between lanes.
#include <algorithm>

#include "lds_banks.h"
#include "rules.h"
#include "workgroup.h"

namespace emu::isa {

namespace {

void count_cycles(Wave& w, LdsAccessKind kind, const u32* addresses, u32 bytes) {
    const LdsAccessCycles access = lds_access_cycles(w.gfx, kind, bytes, addresses, w.exec);
    w.counters->lds_cycles += access.cycles;
    w.counters->lds_ideal_cycles += access.ideal;
}

// Calls access(lane, memory) for each active lane. Each lane accesses `bytes` bytes, at the LDS address in
// operand `address` plus `offset`.
template <class Access> void for_lanes(Wave& w, const Instruction& in, u32 address, u32 offset, u32 bytes, LdsAccessKind kind, Access access) {
    const u32* base = row(w, in.operands[address]);
    u32 addresses[LANES];
    for (u32 l = 0; l < LANES; ++l) addresses[l] = base[l] + offset;
    count_cycles(w, kind, addresses, bytes);
    for (u32 l = 0; l < LANES; ++l) {
        if (!w.active(l)) continue;
        if (addresses[l] % std::min(bytes, 4u)) fault("LDS address " + std::to_string(addresses[l]) + " is not aligned");
        access(l, w.group->lds_access(w, addresses[l], bytes, kind));
    }
}

template <u32 WORDS> void read_words(Wave& w, const Instruction& in, u32 first_word, u32 offset) {
    u32* rows[WORDS];
    for (u32 i = 0; i < WORDS; ++i) rows[i] = row(w, in.operands[0], first_word + i);
    for_lanes(w, in, 1, offset, 4 * WORDS, LdsAccessKind::READ, [&](u32 l, const u8* from) {
        for (u32 i = 0; i < WORDS; ++i) memcpy(&rows[i][l], from + 4 * i, 4);
    });
}
template <u32 WORDS> void write_words(Wave& w, const Instruction& in, u32 data, u32 offset) {
    const u32* rows[WORDS];
    for (u32 i = 0; i < WORDS; ++i) rows[i] = row(w, in.operands[data], i);
    for_lanes(w, in, 0, offset, 4 * WORDS, LdsAccessKind::WRITE, [&](u32 l, u8* to) {
        for (u32 i = 0; i < WORDS; ++i) memcpy(to + 4 * i, &rows[i][l], 4);
    });
}

template <u32 WORDS> void read(Wave& w, const Instruction& in) {
    read_words<WORDS>(w, in, 0, (u32)in.offset);
    w.pending.add(MemoryQueueKind::LDS, in, true, true);
}
template <u32 WORDS> void write(Wave& w, const Instruction& in) {
    write_words<WORDS>(w, in, 1, (u32)in.offset);
    w.pending.add(MemoryQueueKind::LDS, in, false, true);
}
// Reads WORDS words at each of two addresses; the offsets of the addresses are in units of STRIDE * WORDS
// words. The address register is copied first, because the first result may overwrite it.
template <u32 WORDS, u32 STRIDE> void read_two(Wave& w, const Instruction& in) {
    u32 address[LANES], result[WORDS][LANES], *base = row(w, in.operands[1]);
    memcpy(address, base, sizeof address);
    read_words<WORDS>(w, in, 0, (u32)in.offset * WORDS * 4 * STRIDE);
    for (u32 i = 0; i < WORDS; ++i) memcpy(result[i], row(w, in.operands[0], i), sizeof result[i]);
    memcpy(base, address, sizeof address);
    read_words<WORDS>(w, in, WORDS, (u32)in.second_offset * WORDS * 4 * STRIDE);
    for (u32 i = 0; i < WORDS; ++i) write_lanes(w, row(w, in.operands[0], i), result[i]);
    w.pending.add(MemoryQueueKind::LDS, in, true, true);
}
template <u32 WORDS, u32 STRIDE> void write_two(Wave& w, const Instruction& in) {
    write_words<WORDS>(w, in, 1, (u32)in.offset * WORDS * 4 * STRIDE);
    write_words<WORDS>(w, in, 2, (u32)in.second_offset * WORDS * 4 * STRIDE);
    w.pending.add(MemoryQueueKind::LDS, in, false, true);
}

template <class T, u32 SHIFT, u32 KEEP> void read_part(Wave& w, const Instruction& in) {
    u32* to = row(w, in.operands[0]);
    for_lanes(w, in, 1, (u32)in.offset, sizeof(T), LdsAccessKind::READ, [&](u32 l, const u8* from) {
        T value;
        memcpy(&value, from, sizeof value);
        to[l] = (to[l] & KEEP) | (u32)(i32)value << SHIFT;
    });
    w.pending.add(MemoryQueueKind::LDS, in, true, true);
}
template <class T, u32 SHIFT> void write_part(Wave& w, const Instruction& in) {
    const u32* from = row(w, in.operands[1]);
    for_lanes(w, in, 0, (u32)in.offset, sizeof(T), LdsAccessKind::WRITE, [&](u32 l, u8* to) {
        const T value = (T)(from[l] >> SHIFT);
        memcpy(to, &value, sizeof value);
    });
    w.pending.add(MemoryQueueKind::LDS, in, false, true);
}

template <u32 (*OPERATION)(u32, u32), bool RETURNS> void atomic(Wave& w, const Instruction& in) {
    const u32 address = RETURNS ? 1 : 0;
    const u32* data = row(w, in.operands[address + 1]);
    for_lanes(w, in, address, (u32)in.offset, 4, LdsAccessKind::ATOMIC, [&](u32 l, u8* at) {
        u32 old;
        memcpy(&old, at, 4);
        const u32 value = OPERATION(old, data[l]);
        memcpy(at, &value, 4);
        if (RETURNS) row(w, in.operands[0])[l] = old;
    });
    w.pending.add(MemoryQueueKind::LDS, in, RETURNS, true);
}

u32 add(u32 old, u32 data) { return old + data; }
u32 maximum(u32 old, u32 data) { return std::max(old, data); }
u32 minimum(u32 old, u32 data) { return std::min(old, data); }
u32 signed_maximum(u32 old, u32 data) { return (u32)std::max((i32)old, (i32)data); }
u32 bits_or(u32 old, u32 data) { return old | data; }
u32 bits_and(u32 old, u32 data) { return old & data; }
u32 exchange(u32, u32 data) { return data; }
u32 float_add(u32 old, u32 data) { return as_bits(as_float(old) + as_float(data)); }

// ds_bpermute: each lane reads the data of the lane that its address selects. Data of an inactive lane is
// zero.
void pull_from_lane(Wave& w, const Instruction& in) {
    const u32 *address = row(w, in.operands[1]), *data = row(w, in.operands[2]);
    u32 result[LANES];
    for (u32 l = 0; l < LANES; ++l) {
        const u32 from = (address[l] + (u32)in.offset) / 4 % LANES;
        result[l] = w.active(from) ? data[from] : 0;
    }
    write_lanes(w, row(w, in.operands[0]), result);
    w.pending.add(MemoryQueueKind::LDS, in, true, false);
}

void push_to_lane(Wave& w, const Instruction& in) {
    const u32 *address = row(w, in.operands[1]), *data = row(w, in.operands[2]);
    u32 result[LANES] = {};
    for (u32 l = 0; l < LANES; ++l)
        if (w.active(l)) result[(address[l] + (u32)in.offset) / 4 % LANES] = data[l];
    write_lanes(w, row(w, in.operands[0]), result);
    w.pending.add(MemoryQueueKind::LDS, in, true, false);
}

void swizzle(Wave& w, const Instruction& in) {
    const u32* data = row(w, in.operands[1]);
    u32 result[LANES];
    for (u32 l = 0; l < LANES; ++l) result[l] = w.active(in.shuffle.source[l]) ? data[in.shuffle.source[l]] : 0;
    write_lanes(w, row(w, in.operands[0]), result);
    w.pending.add(MemoryQueueKind::LDS, in, true, false);
}

const u32 LOW = 0xffff, HIGH = 0xffff0000;
const InstructionHandlerEntry RULES[] = {
    {"ds_read_b32", read<1>, ExecutionUnit::LDS}, {"ds_read_b64", read<2>, ExecutionUnit::LDS}, {"ds_read_b96", read<3>, ExecutionUnit::LDS},
    {"ds_read_b128", read<4>, ExecutionUnit::LDS}, {"ds_write_b32", write<1>, ExecutionUnit::LDS}, {"ds_write_b64", write<2>, ExecutionUnit::LDS},
    {"ds_write_b96", write<3>, ExecutionUnit::LDS}, {"ds_write_b128", write<4>, ExecutionUnit::LDS},
    {"ds_read2_b32", read_two<1, 1>, ExecutionUnit::LDS}, {"ds_read2_b64", read_two<2, 1>, ExecutionUnit::LDS},
    {"ds_read2st64_b32", read_two<1, 64>, ExecutionUnit::LDS}, {"ds_read2st64_b64", read_two<2, 64>, ExecutionUnit::LDS},
    {"ds_write2_b32", write_two<1, 1>, ExecutionUnit::LDS}, {"ds_write2_b64", write_two<2, 1>, ExecutionUnit::LDS},
    {"ds_write2st64_b32", write_two<1, 64>, ExecutionUnit::LDS}, {"ds_write2st64_b64", write_two<2, 64>, ExecutionUnit::LDS},
    {"ds_read_u8", read_part<u8, 0, 0>, ExecutionUnit::LDS}, {"ds_read_i8", read_part<signed char, 0, 0>, ExecutionUnit::LDS},
    {"ds_read_u16", read_part<u16, 0, 0>, ExecutionUnit::LDS}, {"ds_read_i16", read_part<short, 0, 0>, ExecutionUnit::LDS},
    {"ds_read_u8_d16", read_part<u8, 0, HIGH>, ExecutionUnit::LDS}, {"ds_read_u8_d16_hi", read_part<u8, 16, LOW>, ExecutionUnit::LDS},
    {"ds_read_u16_d16", read_part<u16, 0, HIGH>, ExecutionUnit::LDS}, {"ds_read_u16_d16_hi", read_part<u16, 16, LOW>, ExecutionUnit::LDS},
    {"ds_write_b8", write_part<u8, 0>, ExecutionUnit::LDS}, {"ds_write_b8_d16_hi", write_part<u8, 16>, ExecutionUnit::LDS},
    {"ds_write_b16", write_part<u16, 0>, ExecutionUnit::LDS}, {"ds_write_b16_d16_hi", write_part<u16, 16>, ExecutionUnit::LDS},
    {"ds_add_u32", atomic<add, false>, ExecutionUnit::LDS}, {"ds_add_rtn_u32", atomic<add, true>, ExecutionUnit::LDS},
    {"ds_max_u32", atomic<maximum, false>, ExecutionUnit::LDS}, {"ds_max_rtn_u32", atomic<maximum, true>, ExecutionUnit::LDS},
    {"ds_min_u32", atomic<minimum, false>, ExecutionUnit::LDS}, {"ds_min_rtn_u32", atomic<minimum, true>, ExecutionUnit::LDS},
    {"ds_max_i32", atomic<signed_maximum, false>, ExecutionUnit::LDS}, {"ds_or_b32", atomic<bits_or, false>, ExecutionUnit::LDS},
    {"ds_or_rtn_b32", atomic<bits_or, true>, ExecutionUnit::LDS}, {"ds_and_b32", atomic<bits_and, false>, ExecutionUnit::LDS},
    {"ds_wrxchg_rtn_b32", atomic<exchange, true>, ExecutionUnit::LDS}, {"ds_add_f32", atomic<float_add, false>, ExecutionUnit::LDS},
    {"ds_add_rtn_f32", atomic<float_add, true>, ExecutionUnit::LDS},
    {"ds_bpermute_b32", pull_from_lane, ExecutionUnit::LANES}, {"ds_permute_b32", push_to_lane, ExecutionUnit::LANES},
    {"ds_swizzle_b32", swizzle, ExecutionUnit::LANES},
};

}  // namespace

RuleList<InstructionHandlerEntry> lds_rules() { return list_of(RULES); }

}  // namespace emu::isa
