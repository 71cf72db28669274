// code_object.cpp - loads a code object: its segments, the metadata and descriptors of its kernels, its instructions.
#include <elf.h>
#include <sys/mman.h>

#include <algorithm>

#include "instruction.h"
#include "metadata.h"

namespace emu::isa {

namespace {

// Bounds-checked view of an ELF file.
struct ElfImage {
    const u8* bytes;
    size_t size;

    const u8* at(u64 offset, u64 count) const {
        if (offset > size || count > size - offset) fault("the code object is truncated");
        return bytes + offset;
    }
    template <class T> T read(u64 offset) const {
        T value;
        memcpy(&value, at(offset, sizeof value), sizeof value);
        return value;
    }
    Elf64_Ehdr header() const { return read<Elf64_Ehdr>(0); }
    Elf64_Phdr segment(u32 i) const { return read<Elf64_Phdr>(header().e_phoff + i * sizeof(Elf64_Phdr)); }
    Elf64_Shdr section(u32 i) const { return read<Elf64_Shdr>(header().e_shoff + i * sizeof(Elf64_Shdr)); }
    std::string text(u64 offset) const {
        const u8* first = at(offset, 1);
        return std::string((const char*)first, strnlen((const char*)first, size - offset));
    }
    std::string section_name(u32 i) const { return text(section(header().e_shstrndx).sh_offset + section(i).sh_name); }
};

const u64 PAGE = 4096;

void load_segments(const ElfImage& image, CodeObject& object) {
    for (u32 i = 0; i < image.header().e_phnum; ++i) {
        const Elf64_Phdr segment = image.segment(i);
        if (segment.p_type == PT_LOAD) object.bytes = std::max<size_t>(object.bytes, segment.p_vaddr + segment.p_memsz);
    }
    object.bytes = (object.bytes + PAGE) / PAGE * PAGE;
    void* memory = mmap(nullptr, object.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) fault("no memory for a code object");
    object.memory = (u8*)memory;
    for (u32 i = 0; i < image.header().e_phnum; ++i) {
        const Elf64_Phdr segment = image.segment(i);
        if (segment.p_type != PT_LOAD) continue;
        memcpy(object.memory + segment.p_vaddr, image.at(segment.p_offset, segment.p_filesz), segment.p_filesz);
    }
}

// The metadata is an ELF note: a header of 12 bytes, the padded name, then MessagePack.
MetadataValue read_metadata(const ElfImage& image) {
    for (u32 i = 0; i < image.header().e_phnum; ++i) {
        const Elf64_Phdr segment = image.segment(i);
        if (segment.p_type != PT_NOTE) continue;
        const u64 name_bytes = (image.read<u32>(segment.p_offset) + 3) & ~3u, first = 12 + name_bytes;
        return unpack(image.at(segment.p_offset + first, segment.p_filesz - first), segment.p_filesz - first);
    }
    fault("the code object has no metadata");
}

// Kernel descriptor (64 bytes), as the AMDGPU ABI defines it.
void read_descriptor(const CodeObject& object, u64 address, Kernel& k) {
    const auto field = [&](u32 offset) {
        u32 value;
        if (address + 64 > object.bytes) fault("a kernel descriptor is outside of the code object");
        memcpy(&value, object.memory + address + offset, 4);
        return value;
    };
    k.lds_bytes = field(0);
    k.private_bytes = field(4);
    k.argument_bytes = field(8);
    k.entry = address + join(field(16), field(20));
    k.setup = field(52);
    k.properties = field(56) & 0xffff;
}

void read_kernel(const MetadataValue& entry, Kernel& k) {
    k.max_threads = (u32)entry.number(".max_flat_workgroup_size");
    // On gfx90a and newer, .vgpr_count includes the accumulator registers that .agpr_count counts.
    k.accumulators = std::min<u32>((u32)entry.number(".agpr_count"), 256);
    k.vectors = std::min<u32>((u32)entry.number(".vgpr_count"), 256);
    if (const MetadataValue* arguments = entry.find(".args"))
        for (const MetadataValue& a : arguments->list)
            k.arguments.push_back({(u32)a.number(".offset"), (u32)a.number(".size"), a.text_of(".value_kind")});
    if (k.private_bytes) fault("kernel " + k.name + " uses scratch memory, which is not emulated");
}

void read_kernels(const ElfImage& image, CodeObject& object) {
    const MetadataValue metadata = read_metadata(image);
    const MetadataValue* entries = metadata.find("amdhsa.kernels");
    for (u32 i = 0; i < image.header().e_shnum; ++i) {
        const Elf64_Shdr section = image.section(i);
        if (section.sh_type != SHT_DYNSYM) continue;
        const u64 names = image.section(section.sh_link).sh_offset;
        for (u64 at = 0; at + sizeof(Elf64_Sym) <= section.sh_size; at += sizeof(Elf64_Sym)) {
            const auto symbol = image.read<Elf64_Sym>(section.sh_offset + at);
            const std::string name = image.text(names + symbol.st_name);
            if (name.size() <= 3 || name.compare(name.size() - 3, 3, ".kd") != 0) continue;
            Kernel k;
            k.name = name.substr(0, name.size() - 3);
            k.object = &object;
            read_descriptor(object, symbol.st_value, k);
            for (const MetadataValue& entry : entries ? entries->list : std::vector<MetadataValue>())
                if (entry.text_of(".name") == k.name) read_kernel(entry, k);
            object.kernels.emplace(k.name, k);
        }
    }
}

// A line of the disassembly is "\tTEXT // ADDRESS: WORD WORD", with hexadecimal numbers.
void read_line(const std::string& line, CodeObject& object) {
    const size_t comment = line.rfind("// ");
    if (line.empty() || line[0] != '\t' || comment == std::string::npos) return;
    std::string text = line.substr(1, comment - 1);
    text.erase(text.find_last_not_of(" \t") + 1);
    const size_t colon = line.find(':', comment);
    if (colon == std::string::npos) return;
    const u32 address = (u32)strtoul(line.c_str() + comment + 3, nullptr, 16);
    u32 words = 0;
    for (size_t i = colon + 1; i + 8 < line.size() + 1 && line[i] == ' ' && isxdigit(line[i + 1]); i += 9) ++words;
    object.index_at[address] = (u32)object.instructions.size();
    object.instructions.push_back(decode(text, address, 4 * words));
}

void read_instructions(const ElfImage& image, CodeObject& object) {
    for (u32 i = 0; i < image.header().e_shnum; ++i) {
        if (image.section_name(i) != ".disassembly") continue;
        const Elf64_Shdr section = image.section(i);
        const char* text = (const char*)image.at(section.sh_offset, section.sh_size);
        const char* const end = text + section.sh_size;
        while (text < end) {
            const char* stop = std::find(text, end, '\n');
            read_line(std::string(text, stop), object);
            text = stop + (stop < end);
        }
    }
    if (object.instructions.empty()) fault("the code object has no section .disassembly");
    for (Instruction& in : object.instructions) {
        if (in.unit != ExecutionUnit::BRANCH || !in.run) continue;
        const u64 to = in.address + 4 + (i64)(short)in.operands[0].literal * 4;
        const auto found = object.index_at.find(to);
        if (found == object.index_at.end()) fault("branch to no instruction: " + in.text);
        in.target = found->second;
    }
}

}  // namespace

CodeObject::~CodeObject() {
    if (memory) munmap(memory, bytes);
}

std::shared_ptr<CodeObject> load(const u8* bytes, size_t size) {
    const ElfImage image{bytes, size};
    auto object = std::make_shared<CodeObject>();
    const Elf64_Ehdr header = image.header();
    if (header.e_machine != 224) fault("not a code object of AMDGPU");
    const u32 machine = header.e_flags & 0xff;  // EF_AMDGPU_MACH
    object->gfx = machine == 0x4c ? 0x942 : machine == 0x4f ? 0x950 : 0;
    if (!object->gfx) fault("the code object is neither of gfx942 nor of gfx950");
    load_segments(image, *object);
    read_kernels(image, *object);
    read_instructions(image, *object);
    return object;
}

}  // namespace emu::isa
