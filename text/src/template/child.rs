//! Worker process that renders a chat template sent in a request.

use super::super::error::TextError;
use super::capabilities::TemplateCapabilities;
use super::conversation::adapt;
use super::engine::NamedTemplateSet;
use super::message::{TemplateRenderReply, TemplateRenderRequest};
use super::request_template::TEMPLATE_CPU_S;
use super::trial::TrialRenderer;
use grammar::worker_process::{EPOCH, limit_memory, lower_priority};
use protocol::link::{FrameReader, FrameWriter, LinkError, LinkSocket, MessageSender};
use rustix::process::{Resource, Rlimit, setrlimit};
use std::io;

/// Renders the chat template received through `stream`. A template that exceeds the memory or CPU time limit
/// terminates this process.
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
    let mut reader = FrameReader::<_, TemplateRenderRequest>::new(stream, EPOCH);
    let Some(request) = reader.receive()? else { return Ok(()) };
    limit_memory(request.memory_bytes).map_err(failed)?;
    writer.send(TemplateRenderReply(render_request(request)))
}

fn render_request(request: TemplateRenderRequest) -> Result<String, TextError> {
    let TemplateRenderRequest { template, mut variables, other_arguments, .. } = request;
    let engine = NamedTemplateSet::of_text(&template, request.output_bytes_max)?;
    let has_tools = !variables["tools"].is_null();
    let trial = TrialRenderer::new(&engine, &variables, has_tools);
    let capabilities = TemplateCapabilities::of(&trial);
    let messages = &mut variables["messages"];
    adapt(messages, other_arguments, &capabilities, |text| engine.mentions(text))?;
    engine.render(false, &variables)
}
