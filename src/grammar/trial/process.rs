//! The server's end: a process that tries grammars, started, asked, killed.

use super::message::{FromTrial, ToTrial};
use crate::config::SECRET_VARIABLE;
use crate::grammar::compile::{Findings, GrammarError};
use crate::grammar::constraint::Constraint;
use crate::grammar::limits::{COMPILE_TIME, TRIAL_CPU_LEAST, TRIAL_START_TIME, TRIAL_TIME_MAX};
use crate::worker_process::{ARENA_RESERVE, EPOCH, WorkerProgram};
use protocol::link::{FrameReader, FrameWriter, LinkError, Receiving, Sending};
use std::fs;
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A child of this process that tries grammars. Dropping it kills it and waits for its end.
pub(in crate::grammar) struct TrialProcess {
    child: Child,
    /// Killed, or ended.
    lost: bool,
    to: FrameWriter<UnixStream, ToTrial>,
    from: FrameReader<UnixStream, FromTrial>,
}

impl TrialProcess {
    /// Starts it and waits until it knows the vocabulary, for which it is of little priority if it `yields`. It dies
    /// with the thread that calls this.
    ///
    /// Errors: no process or descriptor is left, or it does not become ready.
    pub(in crate::grammar) fn start(
        program: &WorkerProgram,
        vocabulary: &[u8],
        yields: bool,
    ) -> io::Result<Self> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_write_timeout(Some(TRIAL_START_TIME))?;
        let child = Command::new(&program.path)
            .arg0("hadron")
            .args(&program.args)
            .env_remove(SECRET_VARIABLE)
            .env(ARENA_RESERVE.0, ARENA_RESERVE.1)
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .spawn()?;
        // From here on a failure kills it.
        let to = FrameWriter::new(ours.try_clone()?, EPOCH);
        let from = FrameReader::new(ours.try_clone()?, EPOCH);
        let mut process = Self { child, lost: false, to, from };
        if yields {
            process.to.send(ToTrial::Yield).map_err(io::Error::other)?;
        }
        (&ours).write_all(vocabulary)?;
        match process.from.recv(TRIAL_START_TIME).map_err(io::Error::other)? {
            Some(FromTrial::Ready) => {}
            Some(FromTrial::Verdict(_)) => return Err(io::ErrorKind::InvalidData.into()),
            None => return Err(io::ErrorKind::TimedOut.into()),
        }
        ours.set_write_timeout(Some(COMPILE_TIME))?;
        Ok(process)
    }

    /// Whether it can be asked.
    pub(in crate::grammar) fn is_alive(&mut self) -> bool {
        !self.lost && matches!(self.child.try_wait(), Ok(None))
    }

    /// Tries a grammar.
    ///
    /// Errors: it is not done in time, or ended. It has been killed then and is of no more use.
    pub(in crate::grammar) fn ask(
        &mut self,
        constraint: &Arc<Constraint>,
    ) -> Result<Result<Findings, GrammarError>, GrammarError> {
        let begun = (Instant::now(), self.processor_time());
        let told = self.to.send(ToTrial::Constraint(Arc::clone(constraint)));
        match told.and_then(|()| self.hear(begun)) {
            Ok(Some(FromTrial::Verdict(verdict))) => Ok(verdict),
            Ok(None) | Err(LinkError::Io(io::ErrorKind::WouldBlock)) => Err(self.late(begun)),
            Ok(Some(FromTrial::Ready)) | Err(_) => Err(self.fatal()),
        }
    }

    /// Waits for its answer as long as grammars may take, and longer while the processor is others'.
    fn hear(&mut self, begun: (Instant, Duration)) -> Result<Option<FromTrial>, LinkError> {
        const SLICE: Duration = Duration::from_millis(50);
        let mut wait = COMPILE_TIME;
        loop {
            let heard = self.from.recv(wait)?;
            let is_over = || {
                let (waited, spent) = self.since(begun);
                spent >= TRIAL_CPU_LEAST || waited >= TRIAL_TIME_MAX
            };
            if heard.is_some() || is_over() {
                return Ok(heard);
            }
            wait = SLICE;
        }
    }

    /// Time and processor time from then on.
    fn since(&self, (then, spent): (Instant, Duration)) -> (Duration, Duration) {
        (then.elapsed(), self.processor_time().saturating_sub(spent))
    }

    /// Kills it for a grammar that it is not done with; whether that is the grammar's fault.
    fn late(&mut self, begun: (Instant, Duration)) -> GrammarError {
        let (waited, spent) = self.since(begun);
        self.kill();
        let (waited_ms, processor_ms) = (waited.as_millis() as u64, spent.as_millis() as u64);
        tracing::warn!(
            process = self.child.id(),
            waited_ms,
            processor_ms,
            "a grammar takes too long"
        );
        if spent < TRIAL_CPU_LEAST {
            GrammarError::Starved { waited_ms, processor_ms }
        } else {
            GrammarError::TooSlow
        }
    }

    /// Processor time of all its threads, to ten milliseconds; nothing if it has ended.
    fn processor_time(&self) -> Duration {
        const TICK: Duration = Duration::from_millis(10); // On every architecture we run on.
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.child.id()));
        let stat = stat.unwrap_or_default();
        // Behind the name, which may hold spaces: the 3rd field and on; utime and stime are the 14th and 15th.
        let fields = stat.rsplit(") ").next().unwrap_or_default().split(' ');
        let ticks = fields.skip(11).take(2).filter_map(|field| field.parse::<u32>().ok());
        TICK * ticks.sum::<u32>()
    }

    /// What became of it.
    fn fatal(&mut self) -> GrammarError {
        self.kill(); // One that has ended by itself keeps its status.
        let status = self.child.wait();
        let how = status.map_or_else(|error| error.to_string(), |status| status.to_string());
        tracing::warn!(process = self.child.id(), how, "a grammar broke the process that tried it");
        GrammarError::Fatal { how }
    }

    fn kill(&mut self) {
        self.lost = true;
        let _ = self.child.kill(); // It may have ended by now, which is what was wanted.
    }
}

impl Drop for TrialProcess {
    fn drop(&mut self) {
        self.kill();
        let _ = self.child.wait();
    }
}
