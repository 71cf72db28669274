// lds_races.h - detects data races in LDS: accesses to the same byte by two waves, at least one of them a
// write, without a barrier in between.
#pragma once
#include <vector>

#include "number.h"

namespace emu::isa {

// Kind of an access to LDS.
enum class LdsAccessKind : u8 { READ, WRITE, ATOMIC };

// Detector of data races in the LDS of a workgroup.
struct LdsRaceDetector {
    // Starts a workgroup.
    void begin(size_t bytes) {
        readers.assign(bytes + PADDING, 0);
        writers.assign(bytes + PADDING, 0);
    }
    // Forgets all recorded accesses, because all waves have reached a barrier.
    void begin_interval();
    // Records an access to at most 16 bytes. Throws if it conflicts with another wave's access.
    void note(u32 address, u32 bytes, u32 wave, LdsAccessKind access);

private:
    // For each byte of LDS, `readers` and `writers` contain 1 plus the index of the wave that accessed the
    // byte since the last barrier (0: none), or SEVERAL or ATOMICS. Atomic operations of several waves do not
    // conflict.
    static const u8 SEVERAL = 0xff, ATOMICS = 0xfe;
    static const size_t PADDING = 16;

    bool note_word(u32 address, u8 me, LdsAccessKind access);
    void note_bytes(u32 address, u32 end, u32 wave, LdsAccessKind access);

    std::vector<u8> readers, writers;
};

}  // namespace emu::isa
