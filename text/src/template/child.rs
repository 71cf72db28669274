//! Worker process that renders a chat template sent in a request.

use super::engine::TemplateEngine;
use super::message::{TemplateReply, TemplateRequest};
use super::request_template::TEMPLATE_CPU_S;
use grammar::worker_process::{EPOCH, limit_memory, lower_priority};
use protocol::link::{FrameReader, FrameWriter, LinkError, LinkSocket, MessageSender};
use rustix::process::{Resource, Rlimit, setrlimit};
use std::io;

/// Renders the chat template received through `stream`. A template that exceeds the limit of memory or CPU
/// time ends this process.
///
/// Errors: the limits cannot be set, or reading from or writing to `stream` fails.
pub fn serve(stream: LinkSocket) -> io::Result<()> {
    lower_priority();
    let cpu = Rlimit { current: Some(TEMPLATE_CPU_S), maximum: Some(TEMPLATE_CPU_S + 1) };
    setrlimit(Resource::Cpu, cpu)?;
    match render(stream) {
        Ok(()) | Err(LinkError::Closed) => Ok(()),
        Err(error) => Err(io::Error::other(error)),
    }
}

fn render(stream: LinkSocket) -> Result<(), LinkError> {
    let failed = |error: io::Error| LinkError::Io(error.kind());
    let mut writer = FrameWriter::new(stream.try_clone().map_err(failed)?, EPOCH);
    let mut reader = FrameReader::<_, TemplateRequest>::new(stream, EPOCH);
    let Some(request) = reader.receive()? else { return Ok(()) };
    let TemplateRequest { template, variables, output_bytes_max, memory_bytes } = request;
    limit_memory(memory_bytes).map_err(failed)?;
    let engine = TemplateEngine::of_text(&template, output_bytes_max);
    writer.send(TemplateReply(engine.and_then(|engine| engine.render(false, &variables))))
}
