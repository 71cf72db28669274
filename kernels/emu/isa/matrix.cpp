// matrix.cpp - matrix products (MFMA). Lane layouts are those of the CDNA 3 and CDNA 4 ISA guides,
// implemented independently of the kernels' layouts (csrc/dev/mfma.h). Sums are f32, in ascending order of
// the index k of the K dimension; the order in hardware is not documented.
//
// A [SIDE, K] and B [K, SIDE]: lane l holds row (of A) or column (of B) l % SIDE, for group l / SIDE of
// consecutive indices k. C [SIDE, SIDE]: lane l holds column l % SIDE. Element i of the lane is in row l / 16
// * 4 + i if SIDE is 16, and in row i / 4 * 8 + l / 32 * 4 + i % 4 if SIDE is 32.
#include "rules.h"

namespace emu::isa {

namespace {

template <u32 SIDE, u32 K> struct Tile {
    alignas(64) float a[SIDE][K], b[K][SIDE], c[SIDE][SIDE];

    static u32 row_of(u32 lane, u32 i) { return SIDE == 16 ? lane / 16 * 4 + i : i / 4 * 8 + lane / 32 * 4 + i % 4; }

    void read_c(Wave& w, const Operand& o) {
        u32 scratch[LANES];
        for (u32 i = 0; i < SIDE * SIDE / LANES; ++i) {
            const u32* from = source(w, o, scratch, o.bank == OperandKind::LITERAL ? 0 : i);
            for (u32 l = 0; l < LANES; ++l) c[row_of(l, i)][l % SIDE] = as_float(from[l]);
        }
    }
    void multiply() {
        for (u32 row = 0; row < SIDE; ++row)
            for (u32 k = 0; k < K; ++k)
                for (u32 col = 0; col < SIDE; ++col) c[row][col] += a[row][k] * b[k][col];
    }
    // The result is written in all lanes, active or not.
    void write_c(Wave& w, const Operand& o) const {
        for (u32 i = 0; i < SIDE * SIDE / LANES; ++i) {
            u32* to = isa::row(w, o, i);
            for (u32 l = 0; l < LANES; ++l) to[l] = as_bits(c[row_of(l, i)][l % SIDE]);
        }
    }
};

// Decoder of bf16 elements of a matrix operand: number of elements per 32-bit word, and value of each
// element.
struct Bf16Element {
    enum : u32 { PER_WORD = 2 };
    static float value(const Wave&, u32 word, u32 i) { return bf16_value(word >> 16 * i & 0xffff); }
};
// Decoder of f16 elements of a matrix operand.
struct F16Element {
    enum : u32 { PER_WORD = 2 };
    static float value(const Wave&, u32 word, u32 i) { return half_value(word >> 16 * i & 0xffff); }
};
// Decoder of fp8 elements of a matrix operand.
struct Fp8Element {
    enum : u32 { PER_WORD = 4 };
    static float value(const Wave& w, u32 word, u32 i) { return fp8_values(w.fnuz())[word >> 8 * i & 0xff]; }
};
// Decoder of f32 elements of a matrix operand.
struct F32Element {
    enum : u32 { PER_WORD = 1 };
    static float value(const Wave&, u32 word, u32) { return as_float(word); }
};

template <u32 SIDE, u32 K, class Element> void product(Wave& w, const Instruction& in) {
    const u32 per_lane = K * SIDE / LANES;
    Tile<SIDE, K> tile;
    for (u32 i = 0; i < per_lane; ++i) {
        const u32 *a = row(w, in.operands[1], i / Element::PER_WORD), *b = row(w, in.operands[2], i / Element::PER_WORD);
        for (u32 l = 0; l < LANES; ++l) {
            const u32 k = l / SIDE * per_lane + i;
            tile.a[l % SIDE][k] = Element::value(w, a[l], i % Element::PER_WORD);
            tile.b[k][l % SIDE] = Element::value(w, b[l], i % Element::PER_WORD);
        }
    }
    tile.read_c(w, in.operands[3]);
    tile.multiply();
    tile.write_c(w, in.operands[0]);
    w.counters->matrix_cycles += in.matrix_cycles;
}

// Element formats, indexed by the instruction fields cbsz (format of A) and blgp (format of B).
const MinifloatFormat* const FORMATS[] = {&FP8_OCP, &BF8_OCP, &FP6, &BF6, &FP4};

// Returns the value of a scale byte (E8M0).
float scale_value(u32 byte) { return byte == 0xff ? NAN : std::ldexp(1.f, (int)byte - 127); }

// Returns the bits of element `i` that a lane holds. The elements of a lane are packed without gaps, the
// first in the lowest bits.
u32 small_bits(Wave& w, const Operand& o, u32 lane, u32 i, u32 bits) {
    const u32 at = i * bits, word = at / 32, shift = at % 32;
    const u32 low = row(w, o, word)[lane], high = shift + bits > 32 ? row(w, o, word + 1)[lane] : 0;
    return (u32)(join(low, high) >> shift) & ((1u << bits) - 1);
}

// Returns the index along K of element `i` that a lane holds. A lane holds two ranges of 16 consecutive
// indices for 8-bit elements, and one range of 32 indices for narrower elements.
template <u32 SIDE, u32 K> u32 small_k(u32 lane, u32 i, u32 bits) {
    return bits == 8 ? i / 16 * (K / 2) + lane / SIDE * 16 + i % 16 : lane / SIDE * 32 + i;
}

// Products with elements of 8, 6 or 4 bits (f8f6f4 instructions). If SCALED, operands 4 and 5 are the scales
// of A and B: lane l has the scale of row (of A) or column (of B) l % SIDE for elements l / SIDE * 32 to l /
// SIDE * 32 + 31 along K. op_sel (low bit) and op_sel_hi (high bit) select the byte that contains the scale.
template <u32 SIDE, u32 K, bool SCALED> void small_product(Wave& w, const Instruction& in) {
    Tile<SIDE, K> tile;
    for (u32 side = 0; side < 2; ++side) {
        const u32 code = side ? in.format_b : in.format_a;
        if (code >= sizeof FORMATS / sizeof *FORMATS) fault("unknown format of a matrix operand");
        const MinifloatFormat& format = *FORMATS[code];
        const u32 byte = (in.op_sel >> side & 1) | (in.op_sel_hi >> side & 1) << 1;
        u32 scratch[LANES];
        const u32* scales = SCALED ? source(w, in.operands[4 + side], scratch) : nullptr;
        for (u32 l = 0; l < LANES; ++l)
            for (u32 i = 0; i < 32; ++i) {
                const u32 k = small_k<SIDE, K>(l, i, format.bits()), line = l % SIDE;
                const float scale = SCALED ? scale_value(scales[k / 32 * SIDE + line] >> 8 * byte & 0xff) : 1;
                const float value = scale * small_value(small_bits(w, in.operands[1 + side], l, i, format.bits()), format);
                if (side) tile.b[k][line] = value;
                else tile.a[line][k] = value;
            }
    }
    tile.read_c(w, in.operands[3]);
    tile.multiply();
    tile.write_c(w, in.operands[0]);
    // A product takes half the cycles if both operand formats have at most six bits.
    w.counters->matrix_cycles += in.matrix_cycles * (in.format_a > 1 && in.format_b > 1 ? 1 : 2);
}

const InstructionHandlerEntry RULES[] = {
    {"v_mfma_f32_16x16x16_bf16", product<16, 16, Bf16Element>, ExecutionUnit::MATRIX},
    {"v_mfma_f32_16x16x16_f16", product<16, 16, F16Element>, ExecutionUnit::MATRIX},
    {"v_mfma_f32_32x32x8_bf16", product<32, 8, Bf16Element>, ExecutionUnit::MATRIX},
    {"v_mfma_f32_32x32x8_f16", product<32, 8, F16Element>, ExecutionUnit::MATRIX},
    {"v_mfma_f32_16x16x32_bf16", product<16, 32, Bf16Element>, ExecutionUnit::MATRIX},
    {"v_mfma_f32_16x16x32_f16", product<16, 32, F16Element>, ExecutionUnit::MATRIX},
    {"v_mfma_f32_32x32x16_bf16", product<32, 16, Bf16Element>, ExecutionUnit::MATRIX},
    {"v_mfma_f32_32x32x16_f16", product<32, 16, F16Element>, ExecutionUnit::MATRIX},
    {"v_mfma_f32_16x16x32_fp8_fp8", product<16, 32, Fp8Element>, ExecutionUnit::MATRIX},
    {"v_mfma_f32_32x32x16_fp8_fp8", product<32, 16, Fp8Element>, ExecutionUnit::MATRIX},
    {"v_mfma_f32_16x16x4_f32", product<16, 4, F32Element>, ExecutionUnit::MATRIX},
    {"v_mfma_f32_32x32x2_f32", product<32, 2, F32Element>, ExecutionUnit::MATRIX},
    {"v_mfma_f32_16x16x128_f8f6f4", small_product<16, 128, false>, ExecutionUnit::MATRIX},
    {"v_mfma_f32_32x32x64_f8f6f4", small_product<32, 64, false>, ExecutionUnit::MATRIX},
    {"v_mfma_scale_f32_16x16x128_f8f6f4", small_product<16, 128, true>, ExecutionUnit::MATRIX},
    {"v_mfma_scale_f32_32x32x64_f8f6f4", small_product<32, 64, true>, ExecutionUnit::MATRIX},
};

}  // namespace

RuleList<InstructionHandlerEntry> matrix_rules() { return list_of(RULES); }

}  // namespace emu::isa
