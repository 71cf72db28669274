//! Executor processes: start, supervision and termination.

use super::ExecutorProcessHandle;
use protocol::link::{FrameReader, FrameWriter, LinkSocket, MessageSender};
use protocol::{Epoch, ExecutorEvent, ExecutorSettings, Rank};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

/// Maximum number of bytes of a log line that are forwarded at once; a longer line is split.
const LOG_LINE_BYTES: u64 = 64 << 10;
/// Maximum wait for a process to exit after its link was closed.
const EXIT_WAIT: Duration = Duration::from_secs(1);
/// NCCL variable for NVLink multicast (NVLS), which executors disable: if a process is killed while it uses
/// NVLS, the NVSwitch can remain in a state that only a reset clears.
const NVLINK_MULTICAST: &str = "NCCL_NVLS_ENABLE";

/// Program of an executor process and the destination of its log.
#[derive(Debug, Clone, Copy)]
pub struct ExecutorProgram {
    /// Path of the running `hadron` executable.
    pub path: &'static str,
    /// Log format of the executor: the value of its flag `--log-format`.
    pub log_format: &'static str,
    /// Name of an environment variable that contains a secret of the server; the variable is removed from the
    /// environment of the process.
    pub secret_variable: &'static str,
    /// Opens the log destination; each write is a whole line.
    pub open_log: fn() -> Box<dyn Write + Send>,
}

/// Executor child process. Dropping it kills the process.
pub(crate) struct ExecutorProcess {
    rank: Rank,
    pid: u32,
    pidfd: OwnedFd,
    exit: Arc<ProcessExitState>,
}

/// Exit status of an executor process, once it has exited, and the condition on which threads wait for it.
#[derive(Default)]
struct ProcessExitState {
    status: Mutex<Option<ExitStatus>>,
    exited: Condvar,
}

/// Started executor process and both directions of the link to it.
pub(super) struct SpawnedExecutor {
    pub(super) process: ExecutorProcess,
    /// Sending direction of the link; the executor settings have been sent over it.
    pub(super) sender: LinkSocket,
    pub(super) messages: FrameReader<LinkSocket, ExecutorEvent>,
}

impl ExecutorProcess {
    /// Starts the process and sends its settings. Must be called on the main thread: the child is killed when
    /// the thread that started it ends.
    ///
    /// Errors: no process, thread or file descriptor is available.
    pub(super) fn start(
        settings: ExecutorSettings,
        program: &ExecutorProgram,
    ) -> io::Result<SpawnedExecutor> {
        let (rank, epoch) = (settings.rank, settings.epoch);
        let (ours, theirs) = UnixStream::pair()?;
        let ours = LinkSocket::from(ours);
        let process = Self::spawn(rank, epoch, program, theirs.into(), ours.try_clone()?)?;
        let mut writer = FrameWriter::new(ours.try_clone()?, epoch);
        writer.send(settings).map_err(io::Error::other)?;
        let sender = writer.into_stream();
        Ok(SpawnedExecutor { process, sender, messages: FrameReader::new(ours, epoch) })
    }

    /// Starts a process whose standard input is its end of the link; does not send the executor settings.
    /// `link` is a handle to the opposite end of the link, which is closed when the process exits.
    pub(super) fn spawn(
        rank: Rank,
        epoch: Epoch,
        program: &ExecutorProgram,
        stdin: OwnedFd,
        link: LinkSocket,
    ) -> io::Result<Self> {
        let mut child = Command::new(program.path)
            .arg0("hadron")
            .args(["executor", "--rank", &rank.0.to_string(), "--epoch", &epoch.0.to_string()])
            .args(["--log-format", program.log_format])
            .env_remove(program.secret_variable)
            .env(NVLINK_MULTICAST, "0")
            .stdin(Stdio::from(stdin))
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()?;
        let pid = child.id();
        let stderr = child.stderr.take();
        // If a later call in this function fails, this process closes its end of the link, and the child then
        // exits.
        let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty())?;
        let exit = Arc::new(ProcessExitState::default());
        watch_exit(child, Arc::clone(&exit), link)?;
        let process = Self { rank, pid, pidfd, exit };
        if let Some(stderr) = stderr {
            forward_log(stderr, rank, (program.open_log)())?;
        }
        Ok(process)
    }

    /// Waits up to `timeout` for the process to exit; returns its exit status, or `None` if it is still
    /// running.
    pub(crate) fn wait(&self, timeout: Duration) -> Option<ExitStatus> {
        let status = self.exit.status.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.exit.exited.wait_timeout_while(status, timeout, |s| s.is_none());
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Sends a signal, unless the process has exited.
    pub(crate) fn signal(&self, signal: Signal) {
        // The process may have exited already, which is the desired outcome.
        let _ = pidfd_send_signal(&self.pidfd, signal);
    }
}

impl ExecutorProcessHandle for ExecutorProcess {
    fn exit_reason(&self) -> String {
        match self.wait(EXIT_WAIT) {
            Some(status) => format!("{self} ended: {status}"),
            None => format!("{self} closed its link"),
        }
    }

    fn has_exited(&self) -> bool {
        self.wait(Duration::ZERO).is_some()
    }
}

impl fmt::Display for ExecutorProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "executor rank {} (process {})", self.rank.0, self.pid)
    }
}

impl Drop for ExecutorProcess {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
    }
}

/// Starts the thread that waits for the exit of the child, reports it and closes the link.
#[expect(clippy::disallowed_methods, reason = "the thread only waits for this process")]
fn watch_exit(mut child: Child, exit: Arc<ProcessExitState>, link: LinkSocket) -> io::Result<()> {
    let waiter = thread::Builder::new().name("executor-wait".to_owned());
    let started = waiter.spawn(move || {
        let status = child.wait();
        *exit.status.lock().unwrap_or_else(PoisonError::into_inner) = status.ok();
        exit.exited.notify_all();
        // Close the link even if another process still has the child's end open: no executor reads from it
        // any more. The reader thread still receives the data sent earlier, then EOF.
        link.close();
    });
    started.map(drop)
}

/// Starts the thread that forwards the child's log, each line prefixed with its rank.
fn forward_log(stderr: ChildStderr, rank: Rank, mut log: Box<dyn Write + Send>) -> io::Result<()> {
    let started = thread::Builder::new().name("executor-log".to_owned()).spawn(move || {
        let mut reader = BufReader::new(stderr);
        let mut line = Vec::new();
        loop {
            line.clear();
            match reader.by_ref().take(LOG_LINE_BYTES).read_until(b'\n', &mut line) {
                Ok(0) | Err(_) => return,
                Ok(_) => {}
            }
            let text = String::from_utf8_lossy(&line);
            let text = text.trim_end();
            let line = match text.strip_prefix('{') {
                Some(event) => format!("{{\"executor_rank\":{},{event}\n", rank.0),
                None => format!("executor {}: {text}\n", rank.0),
            };
            // The log destination writes the whole line or drops it, so the result is ignored.
            let _ = log.write(line.as_bytes());
        }
    });
    started.map(drop)
}
