// global.cpp - scalar loads, and loads, stores and atomic operations on global memory. A load writes its
// registers immediately, but the registers stay pending until an s_waitcnt covers the load.
#include <algorithm>

#include "rules.h"
#include "workgroup.h"

namespace emu::isa {

namespace {

template <class T> T load_at(const u8* from) {
    T value;
    memcpy(&value, from, sizeof value);
    return value;
}

// Returns the address of a lane: a 64-bit vector address, or a scalar base plus a 32-bit vector offset.
u64 address_of(Wave& w, const Operand& address, const Operand& base, i32 offset, u32 lane) {
    const u32 low = row(w, address)[lane];
    if (base.bank == OperandKind::SCALAR) return w.pair(base.index) + low + (i64)offset;
    return join(low, row(w, address, 1)[lane]) + (i64)offset;
}

// Calls access(lane, memory) for each active lane.
template <class Access> void for_lanes(Wave& w, const Instruction& in, u32 address, u32 bytes, Access access) {
    for (u32 l = 0; l < LANES; ++l) {
        if (!w.active(l)) continue;
        const u64 a = address_of(w, in.operands[address], in.operands[2], in.offset, l);
        access(l, w.group->global_access(a, bytes, l));
    }
}

// Loads WORDS 32-bit words per lane. Like store_words, accesses each aligned 8-byte unit atomically, because
// kernels that share memory between devices rely on this.
template <u32 WORDS> void load_words(Wave& w, const Instruction& in) {
    u32* rows[WORDS];
    for (u32 i = 0; i < WORDS; ++i) rows[i] = row(w, in.operands[0], i);
    for_lanes(w, in, 1, 4 * WORDS, [&](u32 l, const u8* from) {
        for (u32 i = 0; i + 1 < WORDS; i += 2) {
            const u64 pair = (u64)from % 8 ? load_at<u64>(from + 4 * i) : __atomic_load_n((const u64*)(from + 4 * i), __ATOMIC_ACQUIRE);
            rows[i][l] = (u32)pair;
            rows[i + 1][l] = (u32)(pair >> 32);
        }
        if (WORDS % 2) rows[WORDS - 1][l] = load_at<u32>(from + 4 * (WORDS - 1));
    });
    w.pending.add(MemoryQueueKind::VECTOR, in, true, false);
}

template <u32 WORDS> void store_words(Wave& w, const Instruction& in) {
    const u32* rows[WORDS];
    for (u32 i = 0; i < WORDS; ++i) rows[i] = row(w, in.operands[1], i);
    for_lanes(w, in, 0, 4 * WORDS, [&](u32 l, u8* to) {
        for (u32 i = 0; i + 1 < WORDS; i += 2) {
            const u64 pair = join(rows[i][l], rows[i + 1][l]);
            if ((u64)to % 8) memcpy(to + 4 * i, &pair, 8);
            else __atomic_store_n((u64*)(to + 4 * i), pair, __ATOMIC_RELEASE);
        }
        if (WORDS % 2) memcpy(to + 4 * (WORDS - 1), &rows[WORDS - 1][l], 4);
    });
    w.pending.add(MemoryQueueKind::VECTOR, in, false, false);
}

// Loads of 8 and 16 bits into part of a register. KEEP: mask of the destination bits that keep their value.
template <class T, u32 SHIFT, u32 KEEP> void load_part(Wave& w, const Instruction& in) {
    u32* to = row(w, in.operands[0]);
    for_lanes(w, in, 1, sizeof(T), [&](u32 l, const u8* from) {
        const u32 value = (u32)(i32)load_at<T>(from);
        to[l] = (to[l] & KEEP) | value << SHIFT;
    });
    w.pending.add(MemoryQueueKind::VECTOR, in, true, false);
}

template <class T, u32 SHIFT> void store_part(Wave& w, const Instruction& in) {
    const u32* from = row(w, in.operands[1]);
    for_lanes(w, in, 0, sizeof(T), [&](u32 l, u8* to) {
        const T value = (T)(from[l] >> SHIFT);
        memcpy(to, &value, sizeof value);
    });
    w.pending.add(MemoryQueueKind::VECTOR, in, false, false);
}

// Operands of an atomic operation: destination of the old value (if `returns_old`), address, data, scalar
// base address.
template <class T, T (*OPERATION)(T old, T data, T compared)> void atomic(Wave& w, const Instruction& in) {
    const u32 first = in.returns_old ? 1 : 0;
    const Operand& data = in.operands[first + 1];
    for (u32 l = 0; l < LANES; ++l) {
        if (!w.active(l)) continue;
        const u64 a = address_of(w, in.operands[first], in.operands[first + 2], in.offset, l);
        T* at = (T*)w.group->global_access(a, sizeof(T), l);
        u32 words[4] = {};
        for (u32 i = 0; i < sizeof(T) / 2; ++i)
            if (i < data.count) words[i] = row(w, data, i)[l];
        T value[2];
        memcpy(value, words, sizeof value);
        T old = __atomic_load_n(at, __ATOMIC_RELAXED);
        while (!__atomic_compare_exchange_n(at, &old, OPERATION(old, value[0], value[1]), false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {}
        for (u32 i = 0; first && i < sizeof(T) / 4; ++i) memcpy(&row(w, in.operands[0], i)[l], (u8*)&old + 4 * i, 4);
    }
    w.pending.add(MemoryQueueKind::VECTOR, in, in.returns_old, false);
}

template <class T> T add(T old, T data, T) { return old + data; }
template <class T> T subtract(T old, T data, T) { return old - data; }
template <class T> T bits_and(T old, T data, T) { return old & data; }
template <class T> T bits_or(T old, T data, T) { return old | data; }
template <class T> T bits_xor(T old, T data, T) { return old ^ data; }
template <class T> T maximum(T old, T data, T) { return std::max(old, data); }
template <class T> T minimum(T old, T data, T) { return std::min(old, data); }
template <class T> T exchange(T, T data, T) { return data; }
template <class T> T compare_exchange(T old, T data, T compared) { return old == compared ? data : old; }
u32 signed_maximum(u32 old, u32 data, u32) { return (u32)std::max((i32)old, (i32)data); }
u32 signed_minimum(u32 old, u32 data, u32) { return (u32)std::min((i32)old, (i32)data); }
u32 float_add(u32 old, u32 data, u32) { return as_bits(as_float(old) + as_float(data)); }

template <u32 WORDS> void scalar_load(Wave& w, const Instruction& in) {
    const Operand& offset = in.operands[2];
    u64 at = w.pair(in.operands[1].index) + (i64)in.offset;
    if (offset.bank == OperandKind::LITERAL) at += (i64)(i32)(u32)offset.literal;
    if (offset.bank == OperandKind::SCALAR) at += w.scalar[offset.index];
    const u8* from = w.group->global_access(at, 4 * WORDS, 0);
    for (u32 i = 0; i < WORDS; ++i) w.set_scalar(in.operands[0].index + i, load_at<u32>(from + 4 * i));
    w.pending.add(MemoryQueueKind::SCALAR, in, true, false);
}

const u32 LOW = 0xffff, HIGH = 0xffff0000;
const InstructionHandlerEntry RULES[] = {
    {"s_load_dword", scalar_load<1>, ExecutionUnit::SCALAR_LOAD}, {"s_load_dwordx2", scalar_load<2>, ExecutionUnit::SCALAR_LOAD},
    {"s_load_dwordx4", scalar_load<4>, ExecutionUnit::SCALAR_LOAD}, {"s_load_dwordx8", scalar_load<8>, ExecutionUnit::SCALAR_LOAD},
    {"s_load_dwordx16", scalar_load<16>, ExecutionUnit::SCALAR_LOAD},
    {"global_load_dword", load_words<1>, ExecutionUnit::LOAD}, {"global_load_dwordx2", load_words<2>, ExecutionUnit::LOAD},
    {"global_load_dwordx3", load_words<3>, ExecutionUnit::LOAD}, {"global_load_dwordx4", load_words<4>, ExecutionUnit::LOAD},
    {"global_load_ubyte", load_part<u8, 0, 0>, ExecutionUnit::LOAD},
    {"global_load_sbyte", load_part<signed char, 0, 0>, ExecutionUnit::LOAD},
    {"global_load_ushort", load_part<u16, 0, 0>, ExecutionUnit::LOAD},
    {"global_load_sshort", load_part<short, 0, 0>, ExecutionUnit::LOAD},
    {"global_load_short_d16", load_part<u16, 0, HIGH>, ExecutionUnit::LOAD},
    {"global_load_short_d16_hi", load_part<u16, 16, LOW>, ExecutionUnit::LOAD},
    {"global_load_ubyte_d16", load_part<u8, 0, HIGH>, ExecutionUnit::LOAD},
    {"global_load_ubyte_d16_hi", load_part<u8, 16, LOW>, ExecutionUnit::LOAD},
    {"global_store_dword", store_words<1>, ExecutionUnit::STORE}, {"global_store_dwordx2", store_words<2>, ExecutionUnit::STORE},
    {"global_store_dwordx3", store_words<3>, ExecutionUnit::STORE}, {"global_store_dwordx4", store_words<4>, ExecutionUnit::STORE},
    {"global_store_byte", store_part<u8, 0>, ExecutionUnit::STORE},
    {"global_store_byte_d16_hi", store_part<u8, 16>, ExecutionUnit::STORE},
    {"global_store_short", store_part<u16, 0>, ExecutionUnit::STORE},
    {"global_store_short_d16_hi", store_part<u16, 16>, ExecutionUnit::STORE},
    {"global_atomic_add", atomic<u32, add<u32>>, ExecutionUnit::ATOMIC},
    {"global_atomic_sub", atomic<u32, subtract<u32>>, ExecutionUnit::ATOMIC},
    {"global_atomic_and", atomic<u32, bits_and<u32>>, ExecutionUnit::ATOMIC},
    {"global_atomic_or", atomic<u32, bits_or<u32>>, ExecutionUnit::ATOMIC},
    {"global_atomic_xor", atomic<u32, bits_xor<u32>>, ExecutionUnit::ATOMIC},
    {"global_atomic_umax", atomic<u32, maximum<u32>>, ExecutionUnit::ATOMIC},
    {"global_atomic_umin", atomic<u32, minimum<u32>>, ExecutionUnit::ATOMIC},
    {"global_atomic_smax", atomic<u32, signed_maximum>, ExecutionUnit::ATOMIC},
    {"global_atomic_smin", atomic<u32, signed_minimum>, ExecutionUnit::ATOMIC},
    {"global_atomic_swap", atomic<u32, exchange<u32>>, ExecutionUnit::ATOMIC},
    {"global_atomic_cmpswap", atomic<u32, compare_exchange<u32>>, ExecutionUnit::ATOMIC},
    {"global_atomic_add_f32", atomic<u32, float_add>, ExecutionUnit::ATOMIC},
    {"global_atomic_add_x2", atomic<u64, add<u64>>, ExecutionUnit::ATOMIC},
    {"global_atomic_or_x2", atomic<u64, bits_or<u64>>, ExecutionUnit::ATOMIC},
    {"global_atomic_umax_x2", atomic<u64, maximum<u64>>, ExecutionUnit::ATOMIC},
    {"global_atomic_swap_x2", atomic<u64, exchange<u64>>, ExecutionUnit::ATOMIC},
};

}  // namespace

RuleList<InstructionHandlerEntry> global_rules() { return list_of(RULES); }

}  // namespace emu::isa
