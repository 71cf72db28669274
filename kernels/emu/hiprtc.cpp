// hiprtc.cpp - the hiprtc ABI. Kernels are compiled for the host with the system's C++ compiler and the emu.h
// that is embedded in this library, or to GPU machine code with clang.
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <spawn.h>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include "hip.h"
#include "settings.h"

// The emulator's headers, embedded in this library as text. EMU_FOLDER is the folder of the headers at build
// time.
#define TEXT(label, file) \
    asm(".section .rodata\n" label ":\n.incbin \"" EMU_FOLDER "/" file "\"\n" label "_end:\n.byte 0\n.text\n")
TEXT("emu_header", "emu.h");
TEXT("lane_header", "lane.h");
extern "C" {
#pragma GCC visibility push(hidden)
extern const char emu_header[], emu_header_end[], lane_header[], lane_header_end[];
#pragma GCC visibility pop
}
extern char** environ;

namespace fs = std::filesystem;
using namespace emu;

namespace {

// Result codes of the run-time compiler.
enum RtcCode : int { RTC_OK = 0, RTC_OUT_OF_MEMORY = 1, RTC_INVALID_INPUT = 3, RTC_COMPILATION = 6 };

// A run-time compilation: source, headers, log and compiled code.
struct Program {
    std::string name, source, log, code;
    std::vector<std::pair<std::string, std::string>> headers;
};

// A temporary folder, deleted with the object.
struct TemporaryFolder {
    fs::path path;
    TemporaryFolder() {
        std::string pattern = (fs::temp_directory_path() / "hiprtc-XXXXXX").string();
        if (mkdtemp(pattern.data())) path = pattern;
    }
    ~TemporaryFolder() {
        std::error_code ignored;
        if (!path.empty() && !settings().keep && !settings().sanitize) fs::remove_all(path, ignored);
    }
    bool write(const fs::path& name, const char* text, size_t bytes) const {
        std::error_code failed;
        fs::create_directories((path / name).parent_path(), failed);
        std::ofstream file(path / name, std::ios::binary);
        file.write(text, (std::streamsize)bytes);
        return file.good();
    }
};

std::string read(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    std::stringstream text;
    text << file.rdbuf();
    return text.str();
}

// Whether an option is also valid for a host C++ compiler.
bool for_host(const std::string& option) {
    for (const char* prefix : {"-D", "-U", "-std=", "--std=", "-W", "-w", "-g"})
        if (option.compare(0, strlen(prefix), prefix) == 0) return true;
    return false;
}

std::string own_path() {
    Dl_info info{};
    dladdr((const void*)&own_path, &info);
    std::error_code failed;
    return info.dli_fname ? fs::canonical(info.dli_fname, failed).string() : std::string();
}

// Returns the command that compiles a kernel to GPU machine code, with the same flags as
// kernels/csrc/gate.py.
std::vector<std::string> machine_command(const TemporaryFolder& folder, const std::string& source, int count, const char** options) {
    char arch[32];
    snprintf(arch, sizeof arch, "--offload-arch=gfx%x", settings().isa);
    std::vector<std::string> c{settings().clang, "-x", "hip", "--offload-device-only", "-nogpuinc", "-nogpulib", "-mcode-object-version=5",
                               "-O3", "-std=c++17", "-ffp-contract=fast", "--no-gpu-bundle-output", arch, "-I", folder.path.string()};
    // -DWARP_SIZE is dropped: dev.h derives the wave size from the architecture.
    for (int i = 0; i < count; ++i)
        if (for_host(options[i]) && strncmp(options[i], "-DWARP_SIZE=", 12) != 0) c.push_back(options[i]);
    for (const std::string& last : {source, std::string("-o"), (folder.path / "kernel.so").string()}) c.push_back(last);
    return c;
}

std::vector<std::string> command(const TemporaryFolder& folder, const std::string& source, int count, const char** options) {
    const EmulatorSettings& s = settings();
    // With a sanitizer, kernels are compiled with -O1: at -O2, the additional time for compiling the
    // instrumented code is longer than the run time that it saves.
    std::vector<std::string> c{s.compiler, "-x", "c++", "-std=c++17", s.sanitize ? "-O1" : "-O2", "-g1", "-fPIC", "-shared", "-fno-gnu-unique",
                               "-fno-strict-aliasing", "-fvisibility=hidden", "-DDEV_EMU=1", "-I", folder.path.string()};
    bool wave = false;
    for (int i = 0; i < count; ++i) {
        const std::string option = options[i];
        wave |= option.compare(0, 12, "-DWARP_SIZE=") == 0;
        if (for_host(option)) c.push_back(option);
    }
    if (!wave) c.push_back("-DWARP_SIZE=" + std::to_string(s.wave));
    char gfx[32];
    snprintf(gfx, sizeof gfx, "-DDEV_EMU_GFX=0x%x", s.gfx);
    if (s.gfx) c.push_back(gfx);
    if (s.sanitize && !strcmp(s.sanitize, "thread")) c.push_back("-fsanitize=thread");
    if (s.sanitize && !strcmp(s.sanitize, "address"))
        c.insert(c.end(), {"-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=undefined"});
    for (const std::string& last : {source, std::string("-x"), std::string("none"), own_path(), std::string("-o"),
                                    (folder.path / "kernel.so").string()})
        c.push_back(last);
    return c;
}

// Runs a command with its output redirected to the file `log`; returns the exit status of the command.
int run(const std::vector<std::string>& command, const fs::path& log) {
    std::vector<char*> words;
    for (const std::string& word : command) words.push_back(const_cast<char*>(word.c_str()));
    words.push_back(nullptr);
    posix_spawn_file_actions_t files;
    posix_spawn_file_actions_init(&files);
    posix_spawn_file_actions_addopen(&files, 1, log.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    posix_spawn_file_actions_adddup2(&files, 1, 2);
    // Removes LD_PRELOAD from the compiler's environment: a sanitizer that is preloaded into this process
    // must not be loaded into the compiler.
    std::vector<char*> variables;
    for (char** v = environ; *v; ++v)
        if (strncmp(*v, "LD_PRELOAD=", 11) != 0) variables.push_back(*v);
    variables.push_back(nullptr);
    pid_t child;
    const int failed = posix_spawnp(&child, words[0], &files, nullptr, words.data(), variables.data());
    posix_spawn_file_actions_destroy(&files);
    if (failed) return -failed;
    int status = 0;
    while (waitpid(child, &status, 0) < 0)
        if (errno != EINTR) return -errno;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128;
}

// Disassembles kernel.so and stores the text in its section .disassembly. Returns an exit status.
int add_disassembly(const TemporaryFolder& folder) {
    const std::string clang = settings().clang, suffix = clang.substr(std::min(clang.size(), clang.find("clang") + 5));
    const std::string code = (folder.path / "kernel.so").string(), text = (folder.path / "disassembly").string();
    if (int status = run({"llvm-objdump" + suffix, "-d", code}, text)) return status;
    return run({"llvm-objcopy" + suffix, "--add-section=.disassembly=" + text, code}, folder.path / "log");
}

// Compiles `source` to kernel.so in the temporary folder, and writes compiler messages to its file `log`.
// Returns an exit status.
int compile(const TemporaryFolder& folder, const std::string& source, int count, const char** options) {
    if (!settings().isa) return run(command(folder, source, count, options), folder.path / "log");
    if (int status = run(machine_command(folder, source, count, options), folder.path / "log")) return status;
    for (int i = 0; i < count; ++i)
        if (strncmp(options[i], "-DWARP_SIZE=", 12) == 0 && strcmp(options[i] + 12, "64") != 0) {
            folder.write("log", "machine code has waves of 64 lanes\n", 35);
            return 1;
        }
    return add_disassembly(folder);
}

}  // namespace

// The version encodes the emulator's sources, of which the name of EMU_FOLDER contains a hash, and the settings
// that change the compiled code, so that callers can use it as part of a cache key.
HIP int hiprtcVersion(int* major, int* minor) {
    const EmulatorSettings& s = settings();
    const u32 sources = (u32)(std::hash<std::string>()(EMU_FOLDER) & 0x7fff);
    *major = s.isa ? 8 : 7;
    *minor = (int)(sources << 16 | s.gfx << 4) | (s.sanitize ? s.sanitize[0] == 't' ? 2 : 1 : 0);
    return RTC_OK;
}

HIP int hiprtcCreateProgram(Program** out, const char* source, const char* name, int count, const char** headers,
                            const char** names) {
    if (!source || count < 0) return RTC_INVALID_INPUT;
    auto* p = new Program;
    p->source = source;
    p->name = name && *name ? name : "kernel.hip";
    for (int i = 0; i < count; ++i) p->headers.emplace_back(names[i], headers[i]);
    *out = p;
    return RTC_OK;
}

HIP int hiprtcCompileProgram(Program* p, int count, const char** options) {
    TemporaryFolder folder;
    bool written = !folder.path.empty();
    for (auto& [name, text] : p->headers) written = written && folder.write(name, text.data(), text.size());
    written = written && folder.write("emu.h", emu_header, (size_t)(emu_header_end - emu_header));
    written = written && folder.write("lane.h", lane_header, (size_t)(lane_header_end - lane_header));
    written = written && folder.write(p->name, p->source.data(), p->source.size());
    if (!written) {
        p->log = "cannot write to " + fs::temp_directory_path().string();
        return RTC_OUT_OF_MEMORY;
    }
    const std::string source = (folder.path / p->name).string();
    const int status = compile(folder, source, count, options);
    p->log = read(folder.path / "log");
    if (status < 0) p->log += std::string(settings().isa ? settings().clang : settings().compiler) + ": " + strerror(-status);
    // Removes the temporary folder from paths in the log.
    const std::string prefix = folder.path.string() + "/";
    for (size_t at; (at = p->log.find(prefix)) != std::string::npos;) p->log.erase(at, prefix.size());
    if (status != 0) return RTC_COMPILATION;
    p->code = read(folder.path / "kernel.so");
    return RTC_OK;
}

HIP int hiprtcGetProgramLogSize(Program* p, size_t* bytes) {
    *bytes = p->log.size() + 1;
    return RTC_OK;
}
HIP int hiprtcGetProgramLog(Program* p, char* text) {
    memcpy(text, p->log.c_str(), p->log.size() + 1);
    return RTC_OK;
}
HIP int hiprtcGetCodeSize(Program* p, size_t* bytes) {
    *bytes = p->code.size();
    return RTC_OK;
}
HIP int hiprtcGetCode(Program* p, char* code) {
    memcpy(code, p->code.data(), p->code.size());
    return RTC_OK;
}
HIP int hiprtcDestroyProgram(Program** p) {
    delete *p;
    *p = nullptr;
    return RTC_OK;
}
HIP const char* hiprtcGetErrorString(int code) {
    switch (code) {
        case RTC_OK: return "HIPRTC_SUCCESS";
        case RTC_OUT_OF_MEMORY: return "HIPRTC_ERROR_OUT_OF_MEMORY";
        case RTC_INVALID_INPUT: return "HIPRTC_ERROR_INVALID_INPUT";
        case RTC_COMPILATION: return "HIPRTC_ERROR_COMPILATION";
        default: return "HIPRTC_ERROR_INTERNAL_ERROR";
    }
}
