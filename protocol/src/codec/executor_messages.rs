//! Bodies of the messages between an engine and an executor.

use super::{CodecError, WireMessage, decode_body, encode_body, expect_end, kind};
use crate::{ExecutorCommand, ExecutorEvent, ExecutorSettings};

impl WireMessage for ExecutorSettings {
    fn kind(&self) -> u16 {
        kind::SETTINGS
    }

    fn encode(&self, out: &mut Vec<u8>) -> Result<(), CodecError> {
        encode_body(kind::SETTINGS, self, out)
    }

    fn decode(kind: u16, body: &[u8]) -> Result<Self, CodecError> {
        match kind {
            kind::SETTINGS => decode_body(kind, body),
            other => Err(CodecError::UnknownKind(other)),
        }
    }
}

impl WireMessage for ExecutorCommand {
    fn kind(&self) -> u16 {
        match self {
            Self::Endpoints(_) => kind::ENDPOINTS,
            Self::AllocateKv { .. } => kind::ALLOCATE_KV,
            Self::Batch(_) => kind::BATCH,
            Self::Bitmask(_) => kind::GRAMMAR_BITMASK,
            Self::Profile { .. } => kind::PROFILE,
            Self::Shutdown => kind::SHUTDOWN,
        }
    }

    fn encode(&self, out: &mut Vec<u8>) -> Result<(), CodecError> {
        let kind = self.kind();
        match self {
            Self::Endpoints(endpoints) => encode_body(kind, endpoints, out),
            Self::AllocateKv { blocks } => encode_body(kind, &(blocks,), out),
            Self::Batch(batch) => encode_body(kind, batch, out),
            Self::Bitmask(mask) => encode_body(kind, mask, out),
            Self::Profile { enabled } => encode_body(kind, &(enabled,), out),
            Self::Shutdown => Ok(()),
        }
    }

    fn decode(kind: u16, body: &[u8]) -> Result<Self, CodecError> {
        match kind {
            kind::ENDPOINTS => decode_body(kind, body).map(Self::Endpoints),
            kind::ALLOCATE_KV => {
                decode_body(kind, body).map(|(blocks,)| Self::AllocateKv { blocks })
            }
            kind::BATCH => decode_body(kind, body).map(Self::Batch),
            kind::GRAMMAR_BITMASK => decode_body(kind, body).map(Self::Bitmask),
            kind::PROFILE => decode_body(kind, body).map(|(enabled,)| Self::Profile { enabled }),
            kind::SHUTDOWN => expect_end(kind, body, Self::Shutdown),
            other => Err(CodecError::UnknownKind(other)),
        }
    }
}

impl WireMessage for ExecutorEvent {
    fn kind(&self) -> u16 {
        match self {
            Self::Hello(_) => kind::HELLO,
            Self::Progress { .. } => kind::PROGRESS,
            Self::Endpoint(_) => kind::ENDPOINT,
            Self::WeightsLoaded(_) => kind::WEIGHTS_LOADED,
            Self::WarmUpDone(_) => kind::WARM_UP_DONE,
            Self::Ready(_) => kind::READY,
            Self::Drafts(_) => kind::DRAFTS,
            Self::StepOutput(_) => kind::STEP_OUTPUT,
            Self::StepDone { .. } => kind::STEP_DONE,
            Self::ProfilerStatus(_) => kind::PROFILER_STATUS,
            Self::Fault { .. } => kind::FAULT,
            Self::Heartbeat => kind::HEARTBEAT,
        }
    }

    fn encode(&self, out: &mut Vec<u8>) -> Result<(), CodecError> {
        let kind = self.kind();
        match self {
            Self::Hello(hello) => encode_body(kind, hello, out),
            Self::Progress { phase, done, total } => encode_body(kind, &(phase, done, total), out),
            Self::Endpoint(endpoint) => encode_body(kind, endpoint, out),
            Self::WeightsLoaded(digest) => encode_body(kind, digest, out),
            Self::WarmUpDone(report) => encode_body(kind, report, out),
            Self::Ready(ready) => encode_body(kind, ready, out),
            Self::Drafts(drafts) => encode_body(kind, drafts, out),
            Self::StepOutput(output) => encode_body(kind, output, out),
            Self::StepDone { step, duration_ns } => encode_body(kind, &(step, duration_ns), out),
            Self::ProfilerStatus(status) => encode_body(kind, status, out),
            Self::Fault { step, text } => encode_body(kind, &(step, text), out),
            Self::Heartbeat => Ok(()),
        }
    }

    fn decode(kind: u16, body: &[u8]) -> Result<Self, CodecError> {
        match kind {
            kind::HELLO => decode_body(kind, body).map(Self::Hello),
            kind::PROGRESS => decode_body(kind, body).map(|(phase, done, total)| Self::Progress {
                phase,
                done,
                total,
            }),
            kind::ENDPOINT => decode_body(kind, body).map(Self::Endpoint),
            kind::WEIGHTS_LOADED => decode_body(kind, body).map(Self::WeightsLoaded),
            kind::WARM_UP_DONE => decode_body(kind, body).map(Self::WarmUpDone),
            kind::READY => decode_body(kind, body).map(Self::Ready),
            kind::DRAFTS => decode_body(kind, body).map(Self::Drafts),
            kind::STEP_OUTPUT => decode_body(kind, body).map(Self::StepOutput),
            kind::STEP_DONE => decode_body(kind, body)
                .map(|(step, duration_ns)| Self::StepDone { step, duration_ns }),
            kind::PROFILER_STATUS => decode_body(kind, body).map(Self::ProfilerStatus),
            kind::FAULT => decode_body(kind, body).map(|(step, text)| Self::Fault { step, text }),
            kind::HEARTBEAT => expect_end(kind, body, Self::Heartbeat),
            other => Err(CodecError::UnknownKind(other)),
        }
    }
}
