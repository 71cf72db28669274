// hip_device.cpp - devices, contexts, attributes, errors.
#include <cstdio>
#include <cstring>

#include "hip.h"
#include "settings.h"

using namespace emu;

namespace emu {

// Created when the library is loaded, and never destroyed: threads may still call it while the process exits.
static Device* const the_device = new Device;
Device& device() { return *the_device; }

int shared_limit(u32 wave) {
    if (wave == 32) return 227 << 10;
    return settings().gfx == 0x950 ? 160 << 10 : 64 << 10;
}

}  // namespace emu

HIP int hipInit(unsigned) { return settings().devices ? OK : NO_DEVICE; }
HIP int hipDriverGetVersion(int* version) { *version = 70000000; return OK; }
HIP int hipGetDeviceCount(int* count) {
    *count = (int)settings().devices;
    return *count ? OK : NO_DEVICE;
}
HIP int hipDeviceGet(int* out, int index) {
    if (index < 0 || index >= (int)settings().devices) return INVALID_DEVICE;
    *out = index;
    return OK;
}
HIP int hipDeviceGetName(char* name, int bytes, int) {
    if (settings().isa) snprintf(name, (size_t)bytes, "machine-code emulator, gfx%x", settings().isa);
    else snprintf(name, (size_t)bytes, "SIMT emulator, waves of %u", settings().wave);
    return OK;
}
HIP int hipDeviceTotalMem(size_t* bytes, int) { *bytes = settings().memory_bytes; return OK; }
HIP int hipDevicePrimaryCtxRetain(void** context, int) { *context = &device(); return OK; }
HIP int hipDevicePrimaryCtxRelease(int) { return OK; }
HIP int hipCtxSetCurrent(void*) { return OK; }
HIP int hipSetDevice(int index) { return index >= 0 && index < (int)settings().devices ? OK : INVALID_DEVICE; }
// Another device of this process is another copy of this library, so its memory is accessible in any case.
HIP int hipCtxEnablePeerAccess(void* context, unsigned flags) {
    if (flags || !context) return INVALID_VALUE;
    if (context == &device()) return INVALID_DEVICE;
    Guard guard(device().lock);
    return device().peers.insert(context).second ? OK : PEER_ACCESS_ALREADY_ENABLED;
}
HIP int hipDeviceSynchronize() {
    Guard guard(device().lock);
    if (int code = reject_while_capturing()) return code;
    drain_all();
    return device().failure_code;
}
HIP int hipGetLastError() { return device().failure_code; }

HIP int hipDeviceGetAttribute(int* value, int attribute, int) {
    switch (attribute) {
        case 19: *value = 4 << 20; return OK;               // L2 cache size in bytes
        case 23: *value = 0; return OK;                     // architecture number: none
        case 61: *value = 0; return OK;
        case 56: *value = 1024; return OK;                  // maximum threads per block
        case 63: *value = 4; return OK;                     // number of SMs: small, so that grids exceed it
        case 74: *value = shared_limit(settings().wave); return OK;
        case 87: *value = (int)settings().wave; return OK;
        default: return INVALID_VALUE;
    }
}

HIP int hipGetDevicePropertiesR0600(u8* properties, int index) {
    memset(properties, 0, 1472);
    hipDeviceGetName((char*)properties, 256, index);
    memcpy(properties + 288, &settings().memory_bytes, 8);
    if (settings().gfx) snprintf((char*)properties + 1160, 256, "gfx%x", settings().gfx);
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
// As HIPEMU_ISA, for modules that are compiled from now on: 0x942, 0x950, or 0 for none.
HIP void hipemuSetIsa(u32 gfx) {
    Guard guard(device().lock);
    settings().isa = settings().gfx = gfx;
    if (gfx) settings().wave = 64;
}
// Makes the device usable after a failed launch.
HIP void hipemuClearFailure() {
    Guard guard(device().lock);
    device().failure_code = OK;
}
HIP const char* hipemuLastFailure() { return last_failure(); }
