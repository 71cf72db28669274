// launch.h - runs a kernel of a machine code object.
#pragma once
#include "address_space.h"
#include "instruction.h"

namespace emu::isa {

// Returns the sizes of the arguments that a caller passes, and the other kernel attributes that the driver
// reports.
Launch::KernelAttributes sizes_of(const Kernel& kernel);
// Runs the grid. Returns false if a wave failed; last_failure() describes it.
bool launch(const Kernel& kernel, const Launch& launch, AddressSpace memory);

}  // namespace emu::isa
