// hip_graph.cpp - HIP graphs (CUDA graphs on NVIDIA): stream capture, instantiation, replay.
#include <algorithm>

#include "hip.h"
#include "settings.h"

using namespace emu;

namespace emu {

int reject_while_capturing() {
    const auto me = std::this_thread::get_id();
    int code = OK;
    for (StreamCapture* c : device().captures) {
        if (c->mode == 2 || (c->mode == 1 && c->thread != me)) continue;
        c->invalid = true;
        code = CAPTURE_UNSUPPORTED;
    }
    return code;
}

}  // namespace emu

HIP int hipStreamBeginCapture(Stream* s, int mode) {
    Device& d = device();
    Guard guard(d.lock);
    if (!s || s->capture || mode < 0 || mode > 2) return s && s->capture ? INVALID_VALUE : CAPTURE_UNSUPPORTED;
    auto* c = new StreamCapture{new Graph, s, std::this_thread::get_id(), mode, false, {}, {}};
    d.captures.insert(c);
    s->capture = c;
    return OK;
}

HIP int hipStreamEndCapture(Stream* s, Graph** out) {
    Device& d = device();
    Guard guard(d.lock);
    *out = nullptr;
    if (!s || !s->capture || s->capture->origin != s) return CAPTURE_UNMATCHED;
    StreamCapture* c = s->capture;
    if (c->mode != 2 && c->thread != std::this_thread::get_id()) return CAPTURE_WRONG_THREAD;
    int code = c->invalid ? CAPTURE_INVALIDATED : !c->unjoined.empty() ? CAPTURE_UNJOINED : OK;
    s->capture = nullptr;
    for (Stream* joined : c->joined) joined->capture = nullptr;
    d.captures.erase(c);
    if (code == OK) *out = c->graph; else delete c->graph;
    delete c;
    return code;
}

// Writes to `status`: 0 = no capture, 1 = active capture, 2 = invalidated capture.
HIP int hipStreamIsCapturing(Stream* s, int* status) {
    Guard guard(device().lock);
    *status = !s || !s->capture ? 0 : s->capture->invalid ? 2 : 1;
    return OK;
}

HIP int hipGraphInstantiateWithFlags(Graph** out, Graph* graph, u64) {
    if (!graph) return INVALID_VALUE;
    Device& d = device();
    Guard guard(d.lock);
    *out = nullptr;
    const u64 bytes = settings().graph_bytes;
    if (bytes > settings().memory_bytes - d.bytes_used) return OUT_OF_MEMORY;
    d.bytes_used += bytes;
    *out = new Graph(*graph);
    return OK;
}

HIP int hipGraphLaunch(Graph* executable, Stream* s) {
    Guard guard(device().lock);
    if (!executable) return INVALID_VALUE;
    auto work = std::make_shared<std::vector<Work>>(executable->work);
    return put(s, [work] {
        for (Work& w : *work)
            if (!device().failure_code) w();
    });
}

HIP int hipGraphDestroy(Graph* graph) {
    delete graph;
    return OK;
}

HIP int hipGraphExecDestroy(Graph* executable) {
    Guard guard(device().lock);
    if (executable) device().bytes_used -= settings().graph_bytes;
    delete executable;
    return OK;
}
