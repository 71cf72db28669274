//! Handle of a grammar worker process in the server: starts the process, sends requests to it and kills it.

use super::message::{GrammarWorkerReply, GrammarWorkerRequest};
use crate::compile::{DryRunReport, GrammarError};
use crate::constraint::OutputConstraint;
use crate::limits::{COMPILE_TIME, DRY_RUN_CPU_TIME_MIN, DRY_RUN_TIME_MAX, WORKER_START_TIME};
use crate::worker_process::{ARENA_RESERVE, EPOCH, WorkerProgram};
use protocol::link::{FrameReader, FrameWriter, LinkError, MessageReceiver, MessageSender};
use std::fs;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Child process that performs dry runs (test compilations) of grammars. Dropping it kills the process and
/// waits for its exit.
pub(crate) struct GrammarWorkerProcess {
    child: Child,
    /// Whether the process was killed or has exited.
    ended: bool,
    requests: FrameWriter<UnixStream, GrammarWorkerRequest>,
    replies: FrameReader<UnixStream, GrammarWorkerReply>,
}

/// Wall-clock time and processor time at the start of a dry run (test compilation of a grammar).
#[derive(Clone, Copy)]
struct DryRunStart {
    at: Instant,
    /// Processor time used by the worker process before the dry run (test compilation).
    child_cpu: Duration,
}

/// Wall-clock time and processor time spent on a dry run (test compilation of a grammar).
struct DryRunElapsed {
    wall: Duration,
    /// Processor time of the worker process.
    child_cpu: Duration,
}

/// Starts the program of the worker process with `connection` as its standard input.
fn spawn_worker(program: &WorkerProgram, connection: UnixStream) -> io::Result<Child> {
    Command::new(&program.path)
        .arg0("hadron")
        .args(&program.args)
        .env_remove(program.secret_variable)
        .env(ARENA_RESERVE.0, ARENA_RESERVE.1)
        .stdin(Stdio::from(OwnedFd::from(connection)))
        .stdout(Stdio::null())
        .spawn()
}

impl GrammarWorkerProcess {
    /// Starts the process and waits until it has loaded the vocabulary; `low_priority` applies to this
    /// loading. The process dies with the calling thread.
    ///
    /// Errors: the process cannot be started, or does not become ready in time.
    pub(crate) fn start(
        program: &WorkerProgram,
        vocabulary: &[u8],
        low_priority: bool,
    ) -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_write_timeout(Some(WORKER_START_TIME))?;
        let child = spawn_worker(program, theirs)?;
        // From here on, an error drops `process`, which kills the process.
        let requests = FrameWriter::new(ours.try_clone()?, EPOCH);
        let replies = FrameReader::new(ours.try_clone()?, EPOCH);
        let mut process = Self { child, ended: false, requests, replies };
        if low_priority {
            process.requests.send(GrammarWorkerRequest::LowerPriority).map_err(io::Error::other)?;
        }
        (&ours).write_all(vocabulary)?;
        match process.replies.recv(WORKER_START_TIME).map_err(io::Error::other)? {
            Some(GrammarWorkerReply::Ready) => {}
            Some(GrammarWorkerReply::Verdict(_)) => return Err(io::ErrorKind::InvalidData.into()),
            None => return Err(io::ErrorKind::TimedOut.into()),
        }
        ours.set_write_timeout(Some(COMPILE_TIME))?;
        Ok(process)
    }

    /// Whether the process can receive requests.
    pub(crate) fn is_alive(&mut self) -> bool {
        !self.ended && matches!(self.child.try_wait(), Ok(None))
    }

    /// Performs the dry run (test compilation) of a grammar in the process.
    ///
    /// Errors: the dry run exceeds its time limit, or the process exited. In both cases the process is
    /// killed and cannot be used again.
    pub(crate) fn dry_run(
        &mut self,
        constraint: &Arc<OutputConstraint>,
    ) -> Result<Result<DryRunReport, GrammarError>, GrammarError> {
        let start = DryRunStart { at: Instant::now(), child_cpu: self.child_cpu_time() };
        let sent = self.requests.send(GrammarWorkerRequest::Constraint(Arc::clone(constraint)));
        match sent.and_then(|()| self.wait_reply(start)) {
            Ok(Some(GrammarWorkerReply::Verdict(verdict))) => Ok(verdict),
            Ok(None) | Err(LinkError::Io(io::ErrorKind::WouldBlock)) => {
                Err(self.kill_overdue(start))
            }
            Ok(Some(GrammarWorkerReply::Ready)) | Err(_) => Err(self.exit_error()),
        }
    }

    /// Waits up to `COMPILE_TIME` for the reply, or up to `DRY_RUN_TIME_MAX` while the process has had less
    /// than `DRY_RUN_CPU_TIME_MIN` of processor time. Returns `None` on timeout.
    fn wait_reply(&mut self, start: DryRunStart) -> Result<Option<GrammarWorkerReply>, LinkError> {
        const POLL_INTERVAL: Duration = Duration::from_millis(50);
        let mut wait = COMPILE_TIME;
        loop {
            let reply = self.replies.recv(wait)?;
            let is_over = || {
                let elapsed = self.elapsed_since(start);
                elapsed.child_cpu >= DRY_RUN_CPU_TIME_MIN || elapsed.wall >= DRY_RUN_TIME_MAX
            };
            if reply.is_some() || is_over() {
                return Ok(reply);
            }
            wait = POLL_INTERVAL;
        }
    }

    /// Returns the wall-clock time and processor time since `start`.
    fn elapsed_since(&self, start: DryRunStart) -> DryRunElapsed {
        DryRunElapsed {
            wall: start.at.elapsed(),
            child_cpu: self.child_cpu_time().saturating_sub(start.child_cpu),
        }
    }

    /// Kills the process because a dry run (test compilation) exceeds its time limit. The returned error
    /// distinguishes a grammar that is too slow from a process that got too little processor time.
    fn kill_overdue(&mut self, start: DryRunStart) -> GrammarError {
        let DryRunElapsed { wall, child_cpu } = self.elapsed_since(start);
        self.kill();
        let (waited_ms, processor_ms) = (wall.as_millis() as u64, child_cpu.as_millis() as u64);
        tracing::warn!(
            process = self.child.id(),
            waited_ms,
            processor_ms,
            "dry run of a grammar timed out"
        );
        if child_cpu < DRY_RUN_CPU_TIME_MIN {
            GrammarError::Starved { waited_ms, processor_ms }
        } else {
            GrammarError::TooSlow
        }
    }

    /// Returns the processor time of all threads of the process, with a resolution of ten milliseconds; 0 if
    /// the process has exited.
    fn child_cpu_time(&self) -> Duration {
        const TICK: Duration = Duration::from_millis(10); // USER_HZ is 100 on all supported architectures.
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.child.id()));
        let stat = stat.unwrap_or_default();
        // In `/proc/PID/stat`, the process name may contain spaces and ends with `) `. The next field is the
        // 3rd; utime and stime are the 14th and 15th.
        let fields = stat.rsplit(") ").next().unwrap_or_default().split(' ');
        let ticks = fields.skip(11).take(2).filter_map(|field| field.parse::<u32>().ok());
        TICK * ticks.sum::<u32>()
    }

    /// Kills the process and returns its exit status as an error.
    #[expect(clippy::disallowed_methods, reason = "the process was killed")]
    fn exit_error(&mut self) -> GrammarError {
        self.kill(); // A process that has already exited keeps its status.
        let status = self.child.wait();
        let how = status.map_or_else(|error| error.to_string(), |status| status.to_string());
        tracing::warn!(
            process = self.child.id(),
            how,
            "grammar worker process ended during a dry run"
        );
        GrammarError::WorkerCrashed { how }
    }

    fn kill(&mut self) {
        self.ended = true;
        let _ = self.child.kill(); // An error means that the process has already exited.
    }
}

impl Drop for GrammarWorkerProcess {
    #[expect(clippy::disallowed_methods, reason = "the process was killed")]
    fn drop(&mut self) {
        self.kill();
        let _ = self.child.wait();
    }
}
