#include "settings.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

namespace emu {

static u64 number(const char* name, u64 otherwise) {
    const char* text = getenv(name);
    if (!text || !*text) return otherwise;
    char* end;
    u64 value = strtoull(text, &end, 0);
    if (*end == 'K') value <<= 10;
    if (*end == 'M') value <<= 20;
    if (*end == 'G') value <<= 30;
    return value;
}

static const char* text(const char* name, const char* otherwise) {
    const char* value = getenv(name);
    return value && *value ? value : otherwise;
}

static Settings read() {
    Settings s;
    s.seed = number("HIPEMU_SEED", 0);
    s.threads = (u32)number("HIPEMU_THREADS", std::max(1u, std::thread::hardware_concurrency()));
    s.progress_timeout_ms = number("HIPEMU_PROGRESS_TIMEOUT_MS", 10000);
    s.wave = (u32)number("HIPEMU_WAVE", 64);
    s.gfx = (u32)strtoul(text("HIPEMU_GFX", "0"), nullptr, 16);
    const char* isa = text("HIPEMU_ISA", "");
    s.isa = !strcmp(isa, "gfx942") ? 0x942 : !strcmp(isa, "gfx950") ? 0x950 : 0;
    if (*isa && !s.isa) fprintf(stderr, "hipemu: HIPEMU_ISA=%s is neither gfx942 nor gfx950\n", isa), abort();
    if (s.isa) s.gfx = s.isa, s.wave = 64;
    s.clang = text("HIPEMU_CLANG", "clang-22");
    s.counters = text("HIPEMU_COUNTERS", nullptr);
    s.devices = (u32)number("HIPEMU_DEVICES", 1);
    s.memory_bytes = number("HIPEMU_MEMORY", 1ull << 30);
    s.graph_bytes = number("HIPEMU_GRAPH_BYTES", 0);
    s.lazy = (int)number("HIPEMU_LAZY", 0);
    s.sanitize = text("HIPEMU_SANITIZE", nullptr);
    s.compiler = text("HIPEMU_CXX", "c++");
    s.keep = number("HIPEMU_KEEP", 0) != 0;
    return s;
}

static Settings the_settings = read();
Settings& settings() { return the_settings; }

}  // namespace emu
