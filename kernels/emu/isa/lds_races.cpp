// lds_races.cpp - conflicts between waves in LDS.
#include "lds_races.h"

#include <algorithm>
#include <string>

#include "instruction.h"

namespace emu::isa {

void LdsRaceDetector::begin_interval() {
    std::fill(readers.begin(), readers.end(), 0);
    std::fill(writers.begin(), writers.end(), 0);
}

[[noreturn]] static void race(u32 address, u32 wave, u8 other, const char* what) {
    const std::string name = other >= 0xfe ? "another wave" : "wave " + std::to_string(other - 1);
    fault("LDS race: wave " + std::to_string(wave) + " " + what + " byte " + std::to_string(address) + " that " + name +
          " accessed since the last barrier");
}

// Fast path for an access to four bytes that no other wave has written. Returns false if the bytes must be
// checked one by one.
bool LdsRaceDetector::note_word(u32 address, u8 me, LdsAccessKind access) {
    const u32 mine = me * 0x01010101u, several = SEVERAL * 0x01010101u;
    u32 reader, writer;
    memcpy(&reader, &readers[address], 4);
    memcpy(&writer, &writers[address], 4);
    if (writer != 0 && writer != mine) return false;
    if (access == LdsAccessKind::READ) {
        if (reader != 0 && reader != mine && reader != several) return false;
        if (reader == 0) memcpy(&readers[address], &mine, 4);
        return true;
    }
    if (access != LdsAccessKind::WRITE || (reader != 0 && reader != mine)) return false;
    memcpy(&writers[address], &mine, 4);
    return true;
}

void LdsRaceDetector::note(u32 address, u32 bytes, u32 wave, LdsAccessKind access) {
    const u8 me = (u8)(wave + 1);
    const u32 end = address + bytes;
    while (address + 4 <= end && note_word(address, me, access)) address += 4;
    if (address < end) note_bytes(address, end, wave, access);
}

void LdsRaceDetector::note_bytes(u32 address, u32 end, u32 wave, LdsAccessKind access) {
    const u8 me = (u8)(wave + 1);
    for (u32 a = address; a < end; ++a) {
        u8 &reader = readers[a], &writer = writers[a];
        if (access == LdsAccessKind::READ) {
            if (writer && writer != me) race(a, wave, writer, "reads");
            reader = reader == 0 || reader == me ? me : SEVERAL;
        } else if (access == LdsAccessKind::WRITE) {
            if (writer && writer != me) race(a, wave, writer, "writes");
            if (reader && reader != me) race(a, wave, reader, "writes");
            writer = me;
        } else {
            if (writer && writer != me && writer != ATOMICS) race(a, wave, writer, "changes atomically");
            if (reader && reader != me) race(a, wave, reader, "changes atomically");
            if (!writer) writer = ATOMICS;
        }
    }
}

}  // namespace emu::isa
