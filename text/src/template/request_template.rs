//! The template that a request brings, where the operator allows it (`--trust-request-chat-template`).
//!
//! The template engine bounds instructions and output, but a template can double a string with each instruction. Each such template is
//! rendered by a worker process of its own (`hadron template-worker`), which the system ends at its limits.

use super::context::SpecialTokens;
use super::message::{TemplateReply, TemplateRequest};
use super::{ChatInput, RenderedChat};
use crate::error::TextError;
use crate::text_memory::TextMemory;
use crate::tokenizer::Tokenizer;
use grammar::worker_process::{ARENA_RESERVE, EPOCH, WorkerProgram};
use protocol::link::{FrameReader, FrameWriter, LinkError, MessageReceiver, MessageSender};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

/// Address space that a template may take; its process takes as much of `--max-text-memory` meanwhile.
const TEMPLATE_MEMORY: u64 = 512 << 20;
/// Templates rendered at a time: they wait for processes, and the threads of the text pool wait with them.
const TEMPLATES_MAX: u64 = 2;
/// Time that a template waits for others, and for memory that long texts hold.
const TURN_TIME: Duration = Duration::from_secs(1);
/// Seconds of processor time that it may take.
pub(super) const TEMPLATE_CPU_S: u64 = 5;
/// Time without a reply after which it is ended in any case.
const TEMPLATE_TIME: Duration = Duration::from_secs(30);

/// Renders templates of requests.
#[derive(Debug)]
pub struct RequestTemplates {
    program: WorkerProgram,
    special: SpecialTokens,
    output_bytes_max: usize,
    /// Counts templates, not bytes.
    turns: TextMemory,
}

impl RequestTemplates {
    /// Templates for prompts of `tokenizer` of at most `output_bytes_max` bytes, rendered by `program`.
    ///
    /// Errors: the special tokens are too many to be searched for.
    pub fn new(
        program: WorkerProgram,
        tokenizer: &Tokenizer,
        output_bytes_max: usize,
    ) -> Result<Self, TextError> {
        let special = SpecialTokens::new(tokenizer).map_err(TextError::Template)?;
        let turns = TextMemory::new(TEMPLATES_MAX);
        Ok(Self { program, special, output_bytes_max, turns })
    }

    /// Renders a conversation with a template.
    ///
    /// Errors: it is no template, it fails or refuses, it takes more than it may, or there is no process or memory for it now.
    pub fn render(
        &self,
        template: String,
        input: ChatInput,
        tokenizer: &Tokenizer,
    ) -> Result<RenderedChat, TextError> {
        let mut context = self.special.context(input)?;
        let memory_bytes = tokenizer.memory().limit().min(TEMPLATE_MEMORY);
        let busy = |_| TextError::TemplatesBusy(TEMPLATES_MAX);
        let _turn = self.turns.acquire_within(1, 0, TURN_TIME).map_err(busy)?;
        let _share = tokenizer.memory().acquire_within(memory_bytes, template.len(), TURN_TIME)?;
        let request = TemplateRequest {
            template,
            variables: std::mem::take(&mut context.variables),
            output_bytes_max: self.output_bytes_max,
            memory_bytes,
        };
        let text = TemplateProcess::start(&self.program)
            .map_err(|error| TextError::NoTemplateProcess(error.to_string()))?
            .render(request)?;
        context.finish(text)
    }
}

/// A worker process. Dropping it kills it and waits for its end.
struct TemplateProcess {
    child: Child,
    to: FrameWriter<UnixStream, TemplateRequest>,
    from: FrameReader<UnixStream, TemplateReply>,
}

impl TemplateProcess {
    /// Starts it. It ends with the thread that calls this.
    ///
    /// Errors: no process or descriptor is left.
    fn start(program: &WorkerProgram) -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_write_timeout(Some(TEMPLATE_TIME))?;
        let to = FrameWriter::new(ours.try_clone()?, EPOCH);
        let from = FrameReader::new(ours, EPOCH);
        let child = Command::new(&program.path)
            .arg0("hadron")
            .args(&program.args)
            .env_remove(program.secret_variable)
            .env(ARENA_RESERVE.0, ARENA_RESERVE.1)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .stderr(Stdio::null()) // An allocation that fails says so there.
            .spawn()?;
        Ok(Self { child, to, from })
    }

    fn render(mut self, request: TemplateRequest) -> Result<String, TextError> {
        let memory_bytes = request.memory_bytes;
        let sent = self.to.send(request);
        match sent.and_then(|()| self.from.recv(TEMPLATE_TIME)) {
            Ok(Some(TemplateReply(rendered))) => rendered,
            Ok(None) | Err(LinkError::Io(io::ErrorKind::WouldBlock)) => {
                tracing::warn!(
                    seconds = TEMPLATE_TIME.as_secs(),
                    "a template of a request is not done"
                );
                Err(TextError::TemplateTime(TEMPLATE_TIME.as_secs()))
            }
            Err(_) => Err(self.cause_of_end(memory_bytes)),
        }
    }

    /// The error for a process that ended without a reply.
    fn cause_of_end(&mut self, memory_bytes: u64) -> TextError {
        use rustix::process::Signal;
        let is = |status: &ExitStatus, signal: Signal| status.signal() == Some(signal.as_raw());
        let _ = self.child.kill(); // One that has ended by itself keeps its status.
        match self.child.wait() {
            Ok(status) if is(&status, Signal::XCPU) => TextError::TemplateTime(TEMPLATE_CPU_S),
            // Rust aborts where an allocation fails.
            Ok(status) if is(&status, Signal::ABORT) => TextError::TemplateMemory(memory_bytes),
            Ok(status) => TextError::Template(format!("its process ended: {status}")),
            Err(error) => TextError::Template(error.to_string()),
        }
    }
}

impl Drop for TemplateProcess {
    fn drop(&mut self) {
        let _ = self.child.kill(); // It may have ended by now.
        let _ = self.child.wait();
    }
}
