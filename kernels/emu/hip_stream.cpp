// hip_stream.cpp - streams and events.
#include <chrono>

#include "hip.h"
#include "settings.h"

using namespace emu;

namespace emu {

int put(Stream* s, Work work) {
    Device& d = device();
    if (d.failure_code) return d.failure_code;
    if (!s) s = &d.default_stream;
    if (StreamCapture* c = s->capture) {
        if (c->invalid) return CAPTURE_INVALIDATED;
        c->graph->work.push_back(std::move(work));
        if (s != c->origin) c->unjoined.insert(s);
        return OK;
    }
    s->queue.push_back(std::move(work));
    if (!settings().lazy) drain(s);
    return d.failure_code;
}

void drain(Stream* s, const EventRecord* until) {
    if (!s) s = &device().default_stream;
    while (!s->queue.empty() && !(until && until->completed)) {
        Work work = std::move(s->queue.front());
        s->queue.pop_front();
        if (!device().failure_code) work();
    }
}

void drain_all() {
    drain(nullptr);
    for (Stream* s : device().streams) drain(s);
}

static double now_ms() {
    using namespace std::chrono;
    return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

static void step(Stream* s) {
    if (s->queue.empty()) return;
    Work work = std::move(s->queue.front());
    s->queue.pop_front();
    if (!device().failure_code) work();
}

// Runs the queued work of stream `s`. If HIPEMU_LAZY is 2, one queued item of every other stream runs before
// each item of `s`.
static void drain_interleaved(Stream* s) {
    if (!s) s = &device().default_stream;
    while (settings().lazy == 2 && !s->queue.empty()) {
        for (Stream* other : device().streams)
            if (other != s) step(other);
        step(s);
    }
    drain(s);
}

// Runs queued work of the record's stream until the event record is complete.
static void wait_for(const std::shared_ptr<EventRecord>& record) {
    if (record && !record->completed) drain(record->stream, record.get());
}

}  // namespace emu

HIP int hipStreamCreateWithFlags(Stream** out, unsigned) {
    Guard guard(device().lock);
    *out = new Stream;
    device().streams.insert(*out);
    return OK;
}

HIP int hipStreamDestroy(Stream* s) {
    Guard guard(device().lock);
    if (!device().streams.count(s)) return INVALID_HANDLE;
    if (s->capture) return CAPTURE_UNSUPPORTED;
    drain(s);
    device().streams.erase(s);
    delete s;
    return OK;
}

HIP int hipStreamSynchronize(Stream* s) {
    Guard guard(device().lock);
    if (s && s->capture) {
        s->capture->invalid = true;
        return CAPTURE_UNSUPPORTED;
    }
    drain_interleaved(s);
    return device().failure_code;
}

HIP int hipStreamQuery(Stream* s) {
    Guard guard(device().lock);
    if (s && s->capture) {
        s->capture->invalid = true;
        return CAPTURE_UNSUPPORTED;
    }
    if (s && !s->queue.empty()) {
        drain(s);  // The next query finds the stream ready.
        return NOT_READY;
    }
    return device().failure_code;
}

HIP int hipStreamWaitEvent(Stream* s, Event* e, unsigned) {
    Guard guard(device().lock);
    if (!e) return INVALID_HANDLE;
    if (StreamCapture* c = e->capture) {
        if (s && s->capture && s->capture != c) return CAPTURE_ISOLATION;
        if (!s) return CAPTURE_UNSUPPORTED;
        if (s == c->origin) {
            c->unjoined.erase(e->record->stream);
        } else if (!s->capture) {
            s->capture = c;
            c->joined.insert(s);
        }
        return OK;
    }
    if (s && s->capture) {  // An event from outside the capture cannot order its replays.
        s->capture->invalid = true;
        return CAPTURE_ISOLATION;
    }
    if (!e->record) return OK;
    return put(s, [record = e->record] { wait_for(record); });
}

HIP int hipEventCreateWithFlags(Event** out, unsigned flags) {
    *out = new Event{flags, nullptr};
    return OK;
}

HIP int hipEventDestroy(Event* e) {
    delete e;
    return OK;
}

HIP int hipEventRecord(Event* e, Stream* s) {
    Guard guard(device().lock);
    if (!e) return INVALID_HANDLE;
    e->capture = s ? s->capture : nullptr;
    auto record = std::make_shared<EventRecord>();
    record->stream = s;
    e->record = record;
    if (e->capture) return e->capture->invalid ? CAPTURE_INVALIDATED : OK;
    return put(s, [record] {
        record->time_ms = now_ms();
        record->completed = true;
    });
}

// With flag 1, the event record becomes a node of the captured graph and is executed by every replay.
HIP int hipEventRecordWithFlags(Event* e, Stream* s, unsigned flags) {
    Guard guard(device().lock);
    if (!e || flags > 1) return e ? INVALID_VALUE : INVALID_HANDLE;
    if (!s || !s->capture || flags == 0) return hipEventRecord(e, s);
    e->capture = nullptr;
    return put(s, [e] {
        e->record = std::make_shared<EventRecord>();
        e->record->time_ms = now_ms();
        e->record->completed = true;
    });
}

HIP int hipEventQuery(Event* e) {
    Guard guard(device().lock);
    if (!e) return INVALID_HANDLE;
    if (e->capture) return CAPTURE_UNSUPPORTED;
    if (!e->record || e->record->completed) return device().failure_code;
    wait_for(e->record);  // The next query finds the event completed.
    return device().failure_code ? device().failure_code : (int)NOT_READY;
}

HIP int hipEventSynchronize(Event* e) {
    Guard guard(device().lock);
    if (!e) return INVALID_HANDLE;
    if (e->capture) {
        e->capture->invalid = true;
        return CAPTURE_UNSUPPORTED;
    }
    wait_for(e->record);
    return device().failure_code;
}

HIP int hipEventElapsedTime(float* ms, Event* from, Event* to) {
    Guard guard(device().lock);
    if (!from || !to || !from->record || !to->record || ((from->flags | to->flags) & 2)) return INVALID_HANDLE;
    if (!from->record->completed || !to->record->completed) return NOT_READY;
    *ms = (float)(to->record->time_ms - from->record->time_ms);
    timed_fills().note_timing();
    return device().failure_code;
}
