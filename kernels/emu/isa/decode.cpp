// decode.cpp - decodes instructions from the output of llvm-objdump: operands, modifiers and used registers.
#include <algorithm>
#include <cstdlib>

#include "instruction.h"

namespace emu::isa {

namespace {

bool begins(const std::string& text, const char* prefix) { return text.compare(0, strlen(prefix), prefix) == 0; }
bool ends(const std::string& text, const char* suffix) {
    const size_t n = strlen(suffix);
    return text.size() >= n && text.compare(text.size() - n, n, suffix) == 0;
}
bool strip(std::string& text, const char* suffix) {
    if (!ends(text, suffix) || text.size() == strlen(suffix)) return false;
    text.resize(text.size() - strlen(suffix));
    return true;
}
u32 to_number(const std::string& text) { return (u32)strtoul(text.c_str(), nullptr, 0); }

// Splits `text` at each `separator` that is outside brackets. Empty parts are dropped.
std::vector<std::string> split(const std::string& text, char separator) {
    std::vector<std::string> parts(1);
    int depth = 0;
    for (const char c : text) {
        depth += c == '[' || c == '(' ? 1 : c == ']' || c == ')' ? -1 : 0;
        if (c == separator && depth == 0) parts.emplace_back();
        else parts.back() += c;
    }
    parts.erase(std::remove(parts.begin(), parts.end(), std::string()), parts.end());
    return parts;
}

// A named scalar register: its name, the number of its first 32-bit register, and its number of 32-bit
// registers.
struct NamedRegister { const char* name; u32 index, count; };
const NamedRegister NAMED[] = {{"vcc", VCC, 2}, {"vcc_lo", VCC, 1}, {"vcc_hi", VCC + 1, 1}, {"exec", EXEC, 2},
{"exec_lo", EXEC, 1},
                               {"exec_hi", EXEC + 1, 1}, {"m0", M0, 1}, {"src_scc", SCC, 1}, {"scc", SCC, 1}};

// Parses a register operand such as v7, a[0:3] or s[4:5]. Returns false if `text` is not a register.
bool read_register(const std::string& text, Operand& o) {
    for (const NamedRegister& r : NAMED)
        if (text == r.name) {
            o.bank = OperandKind::SCALAR;
            o.index = (u16)r.index;
            o.count = (u8)r.count;
            return true;
        }
    if (text.size() < 2 || !(isdigit(text[1]) || text[1] == '[')) return false;
    if (text[0] == 'v') o.bank = OperandKind::VECTOR;
    else if (text[0] == 'a') o.bank = OperandKind::ACCUMULATOR;
    else if (text[0] == 's') o.bank = OperandKind::SCALAR;
    else return false;
    const size_t at = text[1] == '[' ? 2 : 1, colon = text.find(':');
    o.index = (u16)to_number(text.substr(at));
    o.count = colon == std::string::npos ? 1 : (u8)(to_number(text.substr(colon + 1)) - o.index + 1);
    return true;
}

Operand read_operand(std::string text) {
    Operand o;
    if (begins(text, "sext(")) {
        o.sign_extend = true;
        text = text.substr(5, text.size() - 6);
    }
    if (begins(text, "neg(")) {
        o.negate = true;
        text = text.substr(4, text.size() - 5);
    }
    if (text.size() > 1 && text[0] == '-' && strchr("vsa|", text[1])) {
        o.negate = true;
        text = text.substr(1);
    }
    if (text[0] == '|' && text.size() > 2) {
        o.absolute = true;
        text = text.substr(1, text.size() - 2);
    }
    if (text == "off" || text == "null" || read_register(text, o)) return o;
    o.bank = OperandKind::LITERAL;
    if (begins(text, "0x")) o.literal = strtoull(text.c_str(), nullptr, 16);
    else if (text.find('.') != std::string::npos) {
        // The disassembly abbreviates the constant 1 / (2 pi), so the exact bits are used.
        const u32 bits = begins(text, "0.15915494") ? 0x3e22f983 : as_bits(strtof(text.c_str(), nullptr));
        o.is_float = true;
        o.literal = bits;
    } else if (isdigit(text[0]) || text[0] == '-') o.literal = (u64)strtoll(text.c_str(), nullptr, 10);
    else fault("unknown operand " + text);
    return o;
}

u8 read_select(const std::string& value) {
    if (value == "DWORD") return 6;
    return (u8)((begins(value, "WORD_") ? 4 : 0) + (value.back() - '0'));
}
// Returns the bits of a list such as [0,1]; the first element is bit 0.
u8 read_bits(const std::string& value) {
    u8 bits = 0;
    u32 count = 0;
    for (const char c : value)
        if (c == '0' || c == '1') bits |= (u8)((c - '0') << count++);
    return bits;
}

// Sets the source lanes of a DPP control. Returns false if `key` is not a DPP control.
bool read_shuffle(DppLaneMapping& s, const std::string& key, const std::string& value) {
    u32 quad[4] = {}, count = 0;
    for (const char c : value)
        if (isdigit(c) && count < 4) quad[count++] = (u32)(c - '0');
    const u32 n = to_number(value);
    for (u32 l = 0; l < LANES; ++l) {
        const u32 row = l & ~15u, column = l & 15;
        i32 from;
        if (key == "quad_perm") from = (i32)((l & ~3u) | quad[l & 3]);
        else if (key == "row_mirror") from = (i32)(row | (15 - column));
        else if (key == "row_half_mirror") from = (i32)((l & ~7u) | (7 - (l & 7)));
        else if (key == "row_ror") from = (i32)(row | ((column - n) & 15));
        else if (key == "row_shl") from = column + n < 16 ? (i32)(l + n) : -1;
        else if (key == "row_shr") from = column >= n ? (i32)(l - n) : -1;
        else if (key == "row_newbcast") from = (i32)(row | n);
        else if (key == "row_bcast") from = l <= n ? -1 : (i32)((l / (n + 1)) * (n + 1) - 1);
        else return false;
        s.source[l] = (u8)(from < 0 ? 0 : from);
        if (from < 0) s.valid &= ~(1ull << l);
    }
    return true;
}

void read_row_mask(DppLaneMapping& s, u32 mask, bool banks) {
    for (u32 l = 0; l < LANES; ++l)
        if (!(mask >> (banks ? l / 4 % 4 : l / 16) & 1)) s.written &= ~(1ull << l);
}

// Sets the source lanes of a ds_swizzle from the pattern in its offset. Patterns apply to groups of 32 lanes.
void read_swizzle(Instruction& in, const std::string& value) {
    const std::vector<std::string> parts = split(value.substr(8, value.size() - 9), ',');
    for (u32 l = 0; l < LANES; ++l) {
        u32 from;
        if (parts[0] == "SWAP") from = l ^ to_number(parts[1]);
        else if (parts[0] == "REVERSE") from = l ^ (to_number(parts[1]) - 1);
        else if (parts[0] == "BROADCAST") from = (l & ~(to_number(parts[1]) - 1)) + to_number(parts[2]);
        else if (parts[0] == "QUAD_PERM") from = (l & ~3u) | to_number(parts[1 + l % 4]);
        else fault("unknown swizzle " + value);
        in.shuffle.source[l] = (u8)from;
    }
}

void read_modifier(Instruction& in, const std::string& text) {
    const size_t colon = text.find(':');
    const std::string key = text.substr(0, colon), value = colon == std::string::npos ? "" : text.substr(colon + 1);
    if (key == "offset" && begins(value, "swizzle(")) read_swizzle(in, value);
    else if (key == "offset" || key == "offset0") in.offset = (i32)strtol(value.c_str(), nullptr, 0);
    else if (key == "offset1") in.second_offset = (i32)to_number(value);
    else if (key == "op_sel") in.op_sel = read_bits(value);
    else if (key == "op_sel_hi") in.op_sel_hi = read_bits(value);
    else if (key == "neg_lo") in.neg_lo = read_bits(value);
    else if (key == "neg_hi") in.neg_hi = read_bits(value);
    else if (key == "clamp") in.clamp = true;
    else if (key == "sc0" || key == "glc") in.returns_old = true;
    else if (key == "sc1" || key == "nt") {}  // caches are not emulated
    else if (key == "mul") in.multiplier = (float)to_number(value);
    else if (key == "div") in.multiplier = 0.5f;
    else if (key == "dst_sel") in.sub_dword.destination = read_select(value);
    else if (key == "src0_sel") in.sub_dword.source[0] = read_select(value);
    else if (key == "src1_sel") in.sub_dword.source[1] = read_select(value);
    else if (key == "dst_unused" && value == "UNUSED_PRESERVE") in.sub_dword.unused = SdwaSelect::KEEP;
    else if (key == "dst_unused" && value == "UNUSED_SEXT") in.sub_dword.unused = SdwaSelect::SIGN;
    else if (key == "dst_unused") in.sub_dword.unused = SdwaSelect::ZERO;
    else if (key == "row_mask") read_row_mask(in.shuffle, to_number(value), false);
    else if (key == "bank_mask") read_row_mask(in.shuffle, to_number(value), true);
    else if (key == "bound_ctrl") in.shuffle.zero_invalid = true;
    else if (key == "bitop3") in.truth_table = to_number(value);
    else if (key == "cbsz") in.format_a = to_number(value);
    else if (key == "blgp") in.format_b = to_number(value);
    else if (!read_shuffle(in.shuffle, key, value)) fault("unknown modifier " + text);
}

// Returns the limit that an s_waitcnt gives for one counter (such as vmcnt), or `none` if the instruction
// does not name the counter.
u32 read_limit(const std::string& text, const char* counter, u32 none) {
    const size_t at = text.find(counter);
    return at == std::string::npos ? none : to_number(text.substr(at + strlen(counter)));
}

void read_operands(Instruction& in, const std::string& text) {
    bool first = true;
    for (const std::string& word : split(text, ' ')) {
        const bool has_key = word.find(':') != std::string::npos && word.find('[') == std::string::npos;
        const bool is_modifier = !first || has_key || word == "sc0" || word == "sc1";
        first = false;
        if (is_modifier) {
            read_modifier(in, word);
            continue;
        }
        for (const std::string& part : split(word, ',')) {
            if (in.operand_count == sizeof in.operands / sizeof *in.operands) fault("too many operands");
            in.operands[in.operand_count++] = read_operand(part);
        }
    }
}

// ---- Registers used

u16 number_of(const Operand& o) {
    return (u16)(o.index + (o.bank == OperandKind::ACCUMULATOR ? 256 : o.bank == OperandKind::SCALAR ? 512 : 0));
}

// Whether the instruction has no destination, so that operand 0 is a source.
bool has_no_destination(const Instruction& in) {
    const std::string& n = in.name;
    return in.unit == ExecutionUnit::STORE || (in.unit == ExecutionUnit::ATOMIC && !in.returns_old) || begins(n, "s_cmp") || begins(n, "s_bitcmp") ||
           in.unit == ExecutionUnit::BRANCH || in.unit == ExecutionUnit::WAIT || begins(n, "ds_write") ||
           (in.unit == ExecutionUnit::LDS && !begins(n, "ds_read") && n.find("_rtn_") == std::string::npos);
}

void list_registers(Instruction& in) {
    const bool none = has_no_destination(in);
    for (u32 i = 0; i < in.operand_count; ++i) {
        const Operand& o = in.operands[i];
        if (o.bank == OperandKind::NONE || o.bank == OperandKind::LITERAL || (o.bank == OperandKind::SCALAR && o.index == SCC)) continue;
        in.registers.push_back({number_of(o), o.count, i == 0 && !none});
    }
    if (in.name == "v_div_fmas_f32" || begins(in.name, "s_cbranch_vcc")) in.registers.push_back({512 + VCC, 2, false});
}

// Renames instructions whose meaning depends on a modifier, or whose name differs between assembler versions.
void adjust(Instruction& in) {
    std::string& n = in.name;
    if (n == "v_mfma_f32_16x16x16bf16_1k") n = "v_mfma_f32_16x16x16_bf16";
    if (n == "v_mfma_f32_32x32x8bf16_1k") n = "v_mfma_f32_32x32x8_bf16";
    const bool is_integer = n == "v_add_u32" || n == "v_sub_u32" || n == "v_add_u16" || n == "v_sub_u16";
    if (is_integer && in.clamp) {
        n += "_clamp";
        in.clamp = false;
    }
    if (n == "v_fmac_f32" || n == "v_fmac_f16") in.operands[in.operand_count++] = in.operands[0];
    in.is_16_bit = ends(n, "_f16") || ends(n, "_u16") || ends(n, "_i16") || ends(n, "_b16") || n == "v_mad_legacy_u16";
    if (begins(n, "v_cvt_") && n != "v_cvt_f32_f16") in.is_16_bit = false;
    if (n == "v_mad_u32_u16") in.is_16_bit = false;
    // Inline constants of f16 operations are converted from f32 to f16.
    for (Operand& o : in.operands)
        if (o.is_float && in.is_16_bit && !begins(n, "v_pk_")) o.literal = half_bits(as_float((u32)o.literal));
    if (begins(n, "v_mfma_")) in.matrix_cycles = (n.find("32x32") != std::string::npos ? 32 : 16) * (ends(n, "x4_f32") || ends(n, "x2_f32") ? 2 : 1);
}

}  // namespace

Instruction decode(const std::string& text, u32 address, u32 bytes) {
    Instruction in;
    in.text = text;
    in.address = address;
    in.bytes = bytes;
    const size_t space = text.find(' ');
    in.name = text.substr(0, space);
    std::string rest = space == std::string::npos ? "" : text.substr(space + 1);
    for (size_t at; (at = rest.find(", ")) != std::string::npos;) rest.erase(at + 1, 1);
    if (strip(in.name, "_sdwa")) in.is_sdwa = true;
    else if (strip(in.name, "_dpp")) in.is_dpp = true;
    else if (!strip(in.name, "_e32")) strip(in.name, "_e64");
    if (begins(in.name, "v_fma_mix")) in.op_sel_hi = 0;
    try {
        if (in.name == "s_waitcnt") {
            in.vector_limit = read_limit(rest, "vmcnt(", 63);
            in.lds_limit = read_limit(rest, "lgkmcnt(", 15);
        } else {
            read_operands(in, rest);
        }
        adjust(in);
        bind(in);
        list_registers(in);
    } catch (const EmulationFault& f) {
        in.text += " (" + f.text + ")";
        in.run = nullptr;
    }
    return in;
}

}  // namespace emu::isa
