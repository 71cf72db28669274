// elements.cpp - runs operations with one 32-bit result per lane, with operand modifiers, DPP, SDWA and
// clamp.
#include "rules.h"

namespace emu::isa {

alignas(64) static const u32 ZEROS[LANES] = {};

const u32* sub_dword_source(const u32* from, u32 select, bool sign_extend, u32* scratch) {
    if (select == 6) return from;
    const u32 width = select < 4 ? 8 : 16, shift = select < 4 ? 8 * select : 16 * (select - 4);
    const u32 unused = 32 - width;
    for (u32 l = 0; l < LANES; ++l) {
        const u32 field = from[l] >> shift << unused;
        scratch[l] = sign_extend ? (u32)((i32)field >> unused) : field >> unused;
    }
    return scratch;
}

// Applies the modifiers of source operand `index` (from 0), which has 32 or 16 bits.
static const u32* modified(const Instruction& in, u32 index, const u32* from, u32* scratch) {
    const Operand& o = in.operands[index + 1];
    const bool high = in.is_16_bit && in.op_sel >> index & 1;
    if (!high && !o.absolute && !o.negate) return from;
    const u32 sign = in.is_16_bit ? 0x8000 : 0x80000000, all = in.is_16_bit ? 0xffff : ~0u;
    const u32 keep = o.absolute ? all & ~sign : all, flip = o.negate ? sign : 0;
    for (u32 l = 0; l < LANES; ++l) scratch[l] = (from[l] >> (high ? 16 : 0) & keep) ^ flip;
    return scratch;
}

// Writes source 0 of a DPP instruction to `shuffled`: for each lane, the value of the lane from which it
// reads. Returns the mask of lanes whose result may be written.
static u64 shuffle_source(Wave& w, const DppLaneMapping& shuffle, const u32* from, u32* shuffled) {
    u64 present = 0;
    for (u32 l = 0; l < LANES; ++l) {
        const u32 s = shuffle.source[l];
        const bool valid = (shuffle.valid >> l & 1) && w.active(s);
        shuffled[l] = valid ? from[s] : 0;
        present |= (u64)valid << l;
    }
    return shuffle.written & (shuffle.zero_invalid ? ~0ull : present);
}

static void finish_float(const Instruction& in, u32* result) {
    if (in.multiplier != 1)
        for (u32 l = 0; l < LANES; ++l) result[l] = as_bits(as_float(result[l]) * in.multiplier);
    if (!in.clamp) return;
    for (u32 l = 0; l < LANES; ++l) {
        const float value = as_float(result[l]);
        result[l] = as_bits(value > 0 ? value < 1 ? value : 1.f : 0.f);
    }
}

// Moves a result into the destination byte or word that SDWA selects.
static void place_sub_dword(const SdwaSelect& s, const u32* old, u32* result) {
    const u32 width = s.destination < 4 ? 8 : 16;
    const u32 shift = s.destination < 4 ? 8 * s.destination : 16 * (s.destination - 4);
    const u32 mask = ((1u << width) - 1) << shift;
    if (s.unused == SdwaSelect::SIGN) fault("dst_unused:UNUSED_SEXT is not supported");
    for (u32 l = 0; l < LANES; ++l)
        result[l] = (result[l] << shift & mask) | (s.unused == SdwaSelect::KEEP ? old[l] & ~mask : 0);
}

void run_element(Wave& w, const Instruction& in) {
    alignas(64) u32 scratch[3][LANES], selected[3][LANES], changed[3][LANES], shuffled[LANES], result[LANES];
    const u32* sources[3] = {ZEROS, ZEROS, ZEROS};
    u64 written = ~0ull;
    for (u32 i = 0; i + 1 < in.operand_count && i < 3; ++i) {
        const u32* from = source(w, in.operands[i + 1], scratch[i]);
        if (in.is_dpp && i == 0) {
            written = shuffle_source(w, in.shuffle, from, shuffled);
            from = shuffled;
        }
        if (in.is_sdwa && i < 2) from = sub_dword_source(from, in.sub_dword.source[i], in.operands[i + 1].sign_extend, selected[i]);
        sources[i] = modified(in, i, from, changed[i]);
    }
    in.element(sources[0], sources[1], sources[2], result);
    u32* destination = row(w, in.operands[0]);
    if (in.clamp || in.multiplier != 1) finish_float(in, result);
    if (in.is_sdwa && in.sub_dword.destination != 6) place_sub_dword(in.sub_dword, destination, result);
    if (in.is_16_bit && in.op_sel & 8)
        for (u32 l = 0; l < LANES; ++l) result[l] = (result[l] << 16) | (destination[l] & 0xffff);
    if (written == ~0ull) return write_lanes(w, destination, result);
    for (u32 l = 0; l < LANES; ++l)
        if (w.active(l) && written >> l & 1) destination[l] = result[l];
}

}  // namespace emu::isa
