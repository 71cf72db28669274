// launch.h - runs a kernel of a code object.
#pragma once
#include "address_space.h"
#include "instruction.h"

namespace emu::isa {

// Sizes of the arguments that a caller passes, and the other facts that the driver reports.
Launch::Sizes sizes_of(const Kernel& kernel);
// Runs the grid. Returns false if a wave failed; last_failure() describes it.
bool launch(const Kernel& kernel, const Launch& launch, AddressSpace memory);

}  // namespace emu::isa
