// counters.cpp - execution counters of the process, per kernel; written to HIPEMU_COUNTERS at process exit.
#include "counters.h"

#include <cstdio>
#include <map>
#include <mutex>
#include <set>

#include "../hip.h"
#include "../settings.h"

namespace emu::isa {

// Counters of all launches of a kernel, and the sizes of its workgroups.
struct KernelTotals {
    PerformanceCounters counters;
    std::set<WorkgroupSize> sizes;
};

static std::mutex lock;
static std::map<std::string, KernelTotals>& totals() {
    static auto* const all = new std::map<std::string, KernelTotals>;
    return *all;
}

void PerformanceCounters::add(const PerformanceCounters& other) {
    for (u32 i = 0; i < (u32)ExecutionUnit::COUNT; ++i) instructions[i] += other.instructions[i];
    waves += other.waves;
    matrix_cycles += other.matrix_cycles;
    vector_waits += other.vector_waits;
    vector_in_flight += other.vector_in_flight;
    lds_waits += other.lds_waits;
    lds_in_flight += other.lds_in_flight;
    lds_cycles += other.lds_cycles;
    lds_ideal_cycles += other.lds_ideal_cycles;
}

void add_counters(const std::string& kernel, u32 gfx, const PerformanceCounters& counters, const WorkgroupSize& size) {
    char arch[16];
    snprintf(arch, sizeof arch, "gfx%x\t", gfx);
    std::lock_guard<std::mutex> guard(lock);
    KernelTotals& total = totals()[arch + kernel];
    total.counters.add(counters);
    total.sizes.insert(size);
}

std::string counter_table() {
    std::string table = "arch\tkernel\twaves\tVALU\ttranscendental\tMFMA\tMFMA cycles\tSALU\tscalar loads\tloads\tstores\t"
                        "atomics\tLDS\tlane exchanges\tvector waits\tin flight\tLDS waits\tin flight\tLDS cycles\tideal LDS cycles\tworkgroups\n";
    const ExecutionUnit units[] = {ExecutionUnit::VECTOR, ExecutionUnit::TRANSCENDENTAL, ExecutionUnit::MATRIX};
    const ExecutionUnit others[] = {ExecutionUnit::SCALAR, ExecutionUnit::SCALAR_LOAD, ExecutionUnit::LOAD, ExecutionUnit::STORE, ExecutionUnit::ATOMIC, ExecutionUnit::LDS, ExecutionUnit::LANES};
    std::lock_guard<std::mutex> guard(lock);
    for (const auto& [name, total] : totals()) {
        const PerformanceCounters& c = total.counters;
        const auto cell = [&](u64 number) { table += "\t" + std::to_string(number); };
        table += name;
        cell(c.waves);
        for (const ExecutionUnit unit : units) cell(c.instructions[(u32)unit]);
        cell(c.matrix_cycles);
        for (const ExecutionUnit unit : others) cell(c.instructions[(u32)unit]);
        for (const u64 number : {c.vector_waits, c.vector_in_flight, c.lds_waits, c.lds_in_flight, c.lds_cycles, c.lds_ideal_cycles})
            cell(number);
        table += "\t";
        for (const WorkgroupSize& size : total.sizes) table += std::to_string(size.lds_bytes) + "/" + std::to_string(size.threads) + " ";
        table.back() = '\n';
    }
    return table;
}

// For tests: the counter table. The text changes in the next call only.
HIP const char* hipemuCounterTable() {
    static std::string table;
    table = counter_table();
    return table.c_str();
}

namespace {

// Appends the counter table to the file named by HIPEMU_COUNTERS at process exit.
struct CounterTableWriter {
    ~CounterTableWriter() {
        const char* path = settings().counters;
        if (!path) return;
        const std::string table = counter_table();
        if (FILE* file = fopen(path, "a")) {
            fwrite(table.data(), 1, table.size(), file);
            fclose(file);
        }
    }
} write_at_exit;

}  // namespace

}  // namespace emu::isa
