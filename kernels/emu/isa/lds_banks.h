// lds_banks.h - cycles of an LDS access, from the addresses of its lanes.
//
// LDS is served in groups of lanes. In each cycle, each bank gives one 4-byte word to the lanes of a group that access
// this word. Groups and numbers of banks depend on the architecture, on the width of the access and on its direction:
//
//   reads per lane    gfx942                            gfx950
//   up to 4 bytes     32 lanes, 32 banks       [1, 2]   32 lanes, 32 banks                  [4]
//   8 bytes           16 lanes, 32 banks       [1, 2]   32 lanes, 64 banks                  [2, 3, 4]
//   16 bytes          8 lanes: READ_128_GFX942 [1, 2]   16 lanes: READ_128_GFX950, 64 banks [2, 3]
//   writes per lane
//   up to 4 bytes     32 lanes, 32 banks       [4]      32 lanes, 32 banks                  [4]
//   8 bytes           16 lanes, 32 banks       [4]      16 lanes, 32 banks                  [3, 4]
//   16 bytes          8 lanes, 32 banks        [1]      8 lanes, 32 banks                   [4]
//
// The lanes of a group are consecutive, but for reads of 16 bytes.
//   [1] AMD's blog on LDS bank conflicts with CK-Tile and the documentation of Composable Kernel: rocm.blogs.amd.com
//       (software-tools-optimization/lds-bank-conflict); kernel optimization guide of nod-ai/amd-shark-ai
//   [2] measurements on an MI300X and an MI350X: nod-ai/amd-shark-ai, docs/empirical-lds; the groups of 16-byte reads
//       are also those of triton-lang/triton pull request 11365
//   [3] measurements of HipKittens on an MI355X: analysis/paper_experiments/phases
//   [4] model of AMD's rocRoller (Scheduling/LDSBankModel.cpp), which its tests compare with counters of a GPU. For
//       4-byte reads of gfx950, [2] states 64 lanes and 64 banks, without a captured measurement.
//
// ds_read2 and ds_write2 are two accesses [1]. Assumed, without a source: atomic operations are served as writes, accesses
// of 12 bytes in groups of 8 consecutive lanes with 32 banks.
#pragma once
#include "lds_races.h"
#include "number.h"

namespace emu::isa {

// Cycles of an LDS access of a wave, and the cycles that it would take without bank conflicts.
struct LdsAccessCycles {
    u32 cycles = 0, ideal = 0;
};

// Returns the cycles of an access of `bytes` bytes per lane by the lanes in `active`.
LdsAccessCycles lds_access_cycles(u32 gfx, LdsAccessKind kind, u32 bytes, const u32* addresses, u64 active);

}  // namespace emu::isa
