//! One executor process: started, watched, ended.

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

/// Longest piece of a log line passed on at a time.
const LOG_LINE_BYTES: u64 = 64 << 10;
/// A process whose link is closed has ended, or is about to.
const EXIT_WAIT: Duration = Duration::from_secs(1);
/// What NCCL calls its use of NVLink multicast, which an executor does without: a process that is killed in the middle
/// of it may leave the switch in a state that only a reset ends.
const NVLINK_MULTICAST: &str = "NCCL_NVLS_ENABLE";

/// How the process of an executor is started, and where its log goes.
#[derive(Debug, Clone, Copy)]
pub struct ExecutorProgram {
    /// The binary: this build.
    pub path: &'static str,
    /// Form of its log lines, as its command line says it.
    pub log_format: &'static str,
    /// Environment variable that holds a secret of the server, which the process does not inherit.
    pub secret_variable: &'static str,
    /// Opens what takes its log, a whole line at each write.
    pub open_log: fn() -> Box<dyn Write + Send>,
}

/// A child of this process that computes. Dropping it kills it.
pub(crate) struct ExecutorProcess {
    rank: Rank,
    pid: u32,
    pidfd: OwnedFd,
    exit: Arc<ProcessExit>,
}

#[derive(Default)]
struct ProcessExit {
    status: Mutex<Option<ExitStatus>>,
    exited: Condvar,
}

/// A process, and the two directions of its link.
pub(super) struct SpawnedExecutor {
    pub(super) process: ExecutorProcess,
    /// The settings have gone along.
    pub(super) to: LinkSocket,
    pub(super) from: FrameReader<LinkSocket, ExecutorEvent>,
}

impl ExecutorProcess {
    /// Starts the process and tells it what to become. Call it on the main thread: the child dies with
    /// the thread that started it.
    ///
    /// Errors: no process, thread or descriptor is left.
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
        let to = writer.into_stream();
        Ok(SpawnedExecutor { process, to, from: FrameReader::new(ours, epoch) })
    }

    /// Starts a process whose link is `stdin`, as `start`. `link` is any handle of that connection: it closes with the
    /// process.
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
        // Should anything below fail, the link closes and the child leaves.
        let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty())?;
        let end = Arc::new(ProcessExit::default());
        watch_exit(child, Arc::clone(&end), link)?;
        let process = Self { rank, pid, pidfd, exit: end };
        if let Some(stderr) = stderr {
            forward_log(stderr, rank, (program.open_log)())?;
        }
        Ok(process)
    }

    /// Waits up to `timeout` for the end of the process.
    pub(crate) fn wait(&self, timeout: Duration) -> Option<ExitStatus> {
        let status = self.exit.status.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.exit.exited.wait_timeout_while(status, timeout, |s| s.is_none());
        *waited.unwrap_or_else(PoisonError::into_inner).0
    }

    /// Sends a signal; one that has ended gets none.
    pub(crate) fn signal(&self, signal: Signal) {
        // It may have ended by now, which is what was wanted.
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

/// Starts the thread that waits for the child, so that it leaves no zombie and its end is an event.
fn watch_exit(mut child: Child, end: Arc<ProcessExit>, link: LinkSocket) -> io::Result<()> {
    let waiter = thread::Builder::new().name("executor-wait".to_owned());
    let started = waiter.spawn(move || {
        let status = child.wait();
        *end.status.lock().unwrap_or_else(PoisonError::into_inner) = status.ok();
        end.exited.notify_all();
        // Whoever still holds the other end, nobody is behind it: what has arrived is read, then the end.
        link.close();
    });
    started.map(drop)
}

/// Starts the thread that passes the child's log on, each line with its rank in front.
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
            // It is written or lost, never refused.
            let _ = log.write(line.as_bytes());
        }
    });
    started.map(drop)
}
