// hip_device.cpp - devices, contexts, attributes, errors.
#include <algorithm>
#include <cstdio>
#include <cstring>

#include "hip.h"
#include "settings.h"

using namespace emu;

namespace emu {

// The devices are never destroyed: threads may still make HIP calls while the process exits.
const std::vector<Device*>& devices() {
    static const auto* const all = [] {
        auto* list = new std::vector<Device*>;
        for (int i = 0; i < (int)std::max<size_t>(1, settings().devices.size()); ++i) {
            list->push_back(new Device);
            list->back()->ordinal = i;
        }
        return list;
    }();
    return *all;
}

static thread_local Device* current_device = nullptr;

Device& device() {
    if (!current_device) current_device = devices().front();
    return *current_device;
}

// Whether a device exists and is visible.
static bool exists(int index) { return index >= 0 && index < (int)settings().devices.size(); }

int shared_limit(u32 wave) {
    if (wave == 32) return 227 << 10;
    return settings().gfx == 0x950 ? 160 << 10 : 64 << 10;
}

}  // namespace emu

HIP int hipInit(unsigned) { return settings().devices.empty() ? NO_DEVICE : OK; }
HIP int hipDriverGetVersion(int* version) { *version = 70000000; return OK; }
HIP int hipGetDeviceCount(int* count) {
    *count = (int)settings().devices.size();
    return *count ? OK : NO_DEVICE;
}
HIP int hipDeviceGet(int* out, int index) {
    if (!exists(index)) return INVALID_DEVICE;
    *out = index;
    return OK;
}
HIP int hipDeviceGetName(char* name, int bytes, int) {
    if (settings().card) snprintf(name, (size_t)bytes, "%s", settings().card->product);
    else if (settings().isa) snprintf(name, (size_t)bytes, "machine-code emulator, gfx%x", settings().isa);
    else snprintf(name, (size_t)bytes, "SIMT emulator, waves of %u", settings().wave);
    return OK;
}
// The bus number is 1 plus the index of the device among all devices, visible or not.
HIP int hipDeviceGetPCIBusId(char* id, int bytes, int index) {
    if (!exists(index)) return INVALID_DEVICE;
    snprintf(id, (size_t)bytes, "0000:%02x:00.0", settings().devices[index] + 1);
    return OK;
}
HIP int hipDeviceTotalMem(size_t* bytes, int) { *bytes = settings().memory_bytes; return OK; }
// As in AMD's runtime, a context handle is the same as the device handle.
HIP int hipDevicePrimaryCtxRetain(void** context, int index) {
    if (!exists(index)) return INVALID_DEVICE;
    *context = devices()[index];
    return OK;
}
HIP int hipDevicePrimaryCtxRelease(int) { return OK; }
HIP int hipCtxSetCurrent(void* context) {
    if (context) current_device = (Device*)context;
    return OK;
}
HIP int hipSetDevice(int index) {
    if (!exists(index)) return INVALID_DEVICE;
    current_device = devices()[index];
    return OK;
}
HIP int hipGetDevice(int* index) { *index = device().ordinal; return OK; }

HIP int hipDeviceCanAccessPeer(int* can_access, int index, int peer) {
    if (!can_access) return INVALID_VALUE;
    *can_access = 0;
    if (index == peer) return OK;
    if (!exists(index) || !exists(peer)) return INVALID_DEVICE;
    *can_access = settings().peer_access;
    return OK;
}
// The result codes are those of AMD's runtime. A path over PCIe has two hops: to the host, and to the peer.
HIP int hipExtGetLinkTypeAndHopCount(int index, int peer, u32* type, u32* hops) {
    if (!type || !hops || index == peer || index < 0 || peer < 0) return INVALID_VALUE;
    if (!exists(index) || !exists(peer)) return INVALID_DEVICE;
    const DeviceLink link = settings().link;
    if (link == DeviceLink::NONE) return INVALID_HANDLE;
    *type = (u32)link;
    *hops = link == DeviceLink::XGMI ? 1 : 2;
    return OK;
}
HIP int hipDeviceEnablePeerAccess(int peer, unsigned flags) {
    Device& d = device();
    int can_access = 0;
    if (flags) return INVALID_VALUE;
    if (hipDeviceCanAccessPeer(&can_access, d.ordinal, peer) != OK || !can_access) return INVALID_DEVICE;
    Guard guard(d.lock);
    return d.peers.insert(peer).second ? OK : PEER_ACCESS_ALREADY_ENABLED;
}
// As in AMD's runtime, this call succeeds and does nothing.
HIP int hipCtxEnablePeerAccess(void*, unsigned) {
    Guard guard(device().lock);
    return reject_while_capturing();
}
HIP int hipDeviceSynchronize() {
    Guard guard(device().lock);
    if (int code = reject_while_capturing()) return code;
    drain_all();
    return device().failure_code;
}
HIP int hipGetLastError() { return device().failure_code; }

HIP int hipDeviceGetAttribute(int* value, int attribute, int) {
    const EmulatedCard* card = settings().card;
    switch (attribute) {
        case 16: *value = card && card->integrated; return OK;
        case 19: *value = 4 << 20; return OK;               // L2 cache size in bytes
        case 23: *value = 0; return OK;                     // architecture number: none
        case 61: *value = 0; return OK;
        case 56: *value = 1024; return OK;                  // maximum threads per block
        // Number of compute units. Without an emulated card the number is small, so that grids exceed it.
        case 63: *value = card ? card->compute_units : 4; return OK;
        case 74: *value = shared_limit(settings().wave); return OK;
        case 87: *value = (int)settings().wave; return OK;
        default: return INVALID_VALUE;
    }
}

HIP int hipGetDevicePropertiesR0600(u8* properties, int index) {
    memset(properties, 0, 1472);
    hipDeviceGetName((char*)properties, 256, index);
    memcpy(properties + 288, &settings().memory_bytes, 8);
    const char* features = settings().card ? ":sramecc+:xnack-" : "";
    if (settings().gfx) snprintf((char*)properties + 1160, 256, "gfx%x%s", settings().gfx, features);
    else strcpy((char*)properties + 1160, "emulated");
    return OK;
}

HIP const char* hipGetErrorName(int code) {
    switch (code) {
        case OK: return "hipSuccess";
        case INVALID_VALUE: return "hipErrorInvalidValue";
        case OUT_OF_MEMORY: return "hipErrorOutOfMemory";
        case INVALID_CONFIGURATION: return "hipErrorInvalidConfiguration";
        case NO_DEVICE: return "hipErrorNoDevice";
        case INVALID_DEVICE: return "hipErrorInvalidDevice";
        case INVALID_IMAGE: return "hipErrorInvalidImage";
        case INVALID_HANDLE: return "hipErrorInvalidHandle";
        case NOT_FOUND: return "hipErrorNotFound";
        case NOT_READY: return "hipErrorNotReady";
        case ILLEGAL_ADDRESS: return "hipErrorIllegalAddress";
        case PEER_ACCESS_ALREADY_ENABLED: return "hipErrorPeerAccessAlreadyEnabled";
        case LAUNCH_FAILURE: return "hipErrorLaunchFailure";
        case NOT_SUPPORTED: return "hipErrorNotSupported";
        case CAPTURE_UNSUPPORTED: return "hipErrorStreamCaptureUnsupported";
        case CAPTURE_INVALIDATED: return "hipErrorStreamCaptureInvalidated";
        case CAPTURE_UNMATCHED: return "hipErrorStreamCaptureUnmatched";
        case CAPTURE_UNJOINED: return "hipErrorStreamCaptureUnjoined";
        case CAPTURE_ISOLATION: return "hipErrorStreamCaptureIsolation";
        case CAPTURE_WRONG_THREAD: return "hipErrorStreamCaptureWrongThread";
        default: return "hipErrorUnknown";
    }
}

HIP void hipemuSetSeed(u64 seed) {
    Guard guard(device().lock);
    settings().seed = seed;
}
// Sets the architecture for which later modules are compiled to machine code (HIPEMU_ISA): 0x942, 0x950, or 0
// for no machine code.
HIP void hipemuSetIsa(u32 gfx) {
    Guard guard(device().lock);
    settings().isa = settings().gfx = gfx;
    if (gfx) settings().wave = 64;
}
// Clears the error of a failed launch, so that later calls succeed again.
HIP void hipemuClearFailure() {
    Guard guard(device().lock);
    device().failure_code = OK;
}
HIP const char* hipemuLastFailure() { return last_failure(); }
