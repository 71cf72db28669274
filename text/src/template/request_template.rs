//! Renders chat templates sent in requests, if the operator allows them (`--trust-request-chat-template`).
//!
//! The template engine limits instructions and output, but a template can double the size of a string with
//! each instruction. So each request template is rendered by a separate worker process (`hadron
//! template-worker`), which the kernel terminates if the process exceeds its memory or CPU time limit.

use super::context::SpecialTokens;
use super::message::{TemplateRenderReply, TemplateRenderRequest};
use super::{ChatInput, RenderedChat};
use crate::error::TextError;
use crate::text_memory::TextMemoryBudget;
use crate::tokenizer::Tokenizer;
use grammar::worker_process::{ARENA_RESERVE, EPOCH, WorkerProgram};
use protocol::link::{FrameReader, FrameWriter, LinkError, MessageReceiver, MessageSender};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

/// Address space limit of one worker process in bytes. The same number of bytes is reserved from
/// `--max-text-memory` while the process runs.
const TEMPLATE_MEMORY: u64 = 512 << 20;
/// Maximum number of templates rendered concurrently: each rendering blocks a thread of the text pool while
/// its worker process runs.
const TEMPLATES_MAX: u64 = 2;
/// Maximum time that a request waits for a rendering slot, and for memory in use by long texts.
const SLOT_WAIT: Duration = Duration::from_secs(1);
/// CPU time limit of one worker process, in seconds.
pub(super) const TEMPLATE_CPU_S: u64 = 5;
/// Maximum time until the worker process replies; after this time the process is killed.
const TEMPLATE_TIME: Duration = Duration::from_secs(30);

/// Renders chat templates sent in requests, each in a worker process.
#[derive(Debug)]
pub struct RequestTemplateRenderer {
    program: WorkerProgram,
    special_tokens: SpecialTokens,
    output_bytes_max: usize,
    /// Semaphore that limits the number of concurrent renderings to `TEMPLATES_MAX`. Each rendering acquires
    /// one unit; the units are not bytes.
    render_slots: TextMemoryBudget,
}

impl RequestTemplateRenderer {
    /// Creates a renderer of prompts for `tokenizer`, of at most `output_bytes_max` bytes. `program` is the
    /// worker executable.
    ///
    /// Errors: the search automaton over the special tokens would be too large.
    pub fn new(
        program: WorkerProgram,
        tokenizer: &Tokenizer,
        output_bytes_max: usize,
    ) -> Result<Self, TextError> {
        let special_tokens = SpecialTokens::new(tokenizer).map_err(TextError::Template)?;
        let render_slots = TextMemoryBudget::new(TEMPLATES_MAX);
        Ok(Self { program, special_tokens, output_bytes_max, render_slots })
    }

    /// Renders a conversation with the template of its request.
    ///
    /// Errors: the template is invalid, fails, raises an exception or exceeds a limit, or no process or
    /// memory is available now.
    pub fn render(
        &self,
        template: String,
        input: ChatInput,
        tokenizer: &Tokenizer,
    ) -> Result<RenderedChat, TextError> {
        let mut context = self.special_tokens.context(input)?;
        let memory_bytes = tokenizer.memory().limit().min(TEMPLATE_MEMORY);
        let busy = |_| TextError::TemplatesBusy(TEMPLATES_MAX);
        let _slot = self.render_slots.acquire_within(1, 0, SLOT_WAIT).map_err(busy)?;
        let _share = tokenizer.memory().acquire_within(memory_bytes, template.len(), SLOT_WAIT)?;
        let request = TemplateRenderRequest {
            template,
            variables: std::mem::take(&mut context.variables),
            other_arguments: std::mem::take(&mut context.other_arguments),
            output_bytes_max: self.output_bytes_max,
            memory_bytes,
        };
        let process = TemplateProcess::start(&self.program)
            .map_err(|error| TextError::NoTemplateProcess(error.to_string()))?;
        context.finish(process.render(request))
    }
}

/// Worker process that renders one template. Dropping this value kills the process and waits for its end.
struct TemplateProcess {
    child: Child,
    writer: FrameWriter<UnixStream, TemplateRenderRequest>,
    reader: FrameReader<UnixStream, TemplateRenderReply>,
}

impl TemplateProcess {
    /// Starts the worker process. The kernel terminates the process when the calling thread ends.
    ///
    /// Errors: no process or file descriptor is available.
    fn start(program: &WorkerProgram) -> io::Result<Self> {
        let (socket, child_socket) = UnixStream::pair()?;
        socket.set_write_timeout(Some(TEMPLATE_TIME))?;
        let writer = FrameWriter::new(socket.try_clone()?, EPOCH);
        let reader = FrameReader::new(socket, EPOCH);
        let child = Command::new(&program.path)
            .arg0("hadron")
            .args(&program.args)
            .env_remove(program.secret_variable)
            .env(ARENA_RESERVE.0, ARENA_RESERVE.1)
            .stdin(Stdio::from(OwnedFd::from(child_socket)))
            .stdout(Stdio::null())
            .stderr(Stdio::null()) // Discards the message that Rust prints if an allocation fails.
            .spawn()?;
        Ok(Self { child, writer, reader })
    }

    fn render(mut self, request: TemplateRenderRequest) -> Result<String, TextError> {
        let memory_bytes = request.memory_bytes;
        let sent = self.writer.send(request);
        match sent.and_then(|()| self.reader.recv(TEMPLATE_TIME)) {
            Ok(Some(TemplateRenderReply(rendered))) => rendered,
            Ok(None) | Err(LinkError::Io(io::ErrorKind::WouldBlock)) => {
                tracing::warn!(
                    seconds = TEMPLATE_TIME.as_secs(),
                    "rendering the chat template of a request timed out"
                );
                Err(TextError::TemplateTime(TEMPLATE_TIME.as_secs()))
            }
            Err(_) => Err(self.cause_of_end(memory_bytes)),
        }
    }

    /// Returns the error for a worker process that ended without a reply, from its exit status.
    #[expect(clippy::disallowed_methods, reason = "the process was killed")]
    fn cause_of_end(&mut self, memory_bytes: u64) -> TextError {
        use rustix::process::Signal;
        let is = |status: &ExitStatus, signal: Signal| status.signal() == Some(signal.as_raw());
        let _ = self.child.kill(); // If the process has already ended, its exit status is kept.
        match self.child.wait() {
            Ok(status) if is(&status, Signal::XCPU) => TextError::TemplateTime(TEMPLATE_CPU_S),
            // Rust aborts the process if an allocation fails.
            Ok(status) if is(&status, Signal::ABORT) => TextError::TemplateMemory(memory_bytes),
            Ok(status) => TextError::Template(format!("the worker process exited: {status}")),
            Err(error) => TextError::Template(error.to_string()),
        }
    }
}

impl Drop for TemplateProcess {
    #[expect(clippy::disallowed_methods, reason = "the process was killed")]
    fn drop(&mut self) {
        let _ = self.child.kill(); // The process may have ended already, so an error is ignored.
        let _ = self.child.wait();
    }
}
