//! `--trace-requests FILE`: one JSON line for each request that ended, written by a thread of its own.
//!
//! A disk that cannot keep up costs lines, which are counted in the log, and never a request.

use protocol::Token;
use scheduler::TokenEvent;
use serde_json::{Value, json};
use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::time::{Duration, Instant};

/// Lines that may wait for the disk.
const LINES_WAITING_MAX: usize = 4_096;
/// How often whoever waits for the disk looks for a place among them.
const PLACE_POLL: Duration = Duration::from_millis(10);
/// Between two words in the log about lines that were lost.
const WORD_INTERVAL: Duration = Duration::from_secs(10);

enum Message {
    Line(Value),
    /// Answered once everything before it is written: whether no line was ever lost.
    Flush(SyncSender<bool>),
}

/// Road to the file; clones share it.
#[derive(Debug, Clone)]
pub struct Tracer {
    lines: SyncSender<Message>,
    dropped: Arc<AtomicU64>,
    /// Whether lines hold token ids.
    pub with_ids: bool,
}

impl Tracer {
    /// Opens the file, whose lines are kept, and starts its thread.
    ///
    /// Errors: the file cannot be opened, or no thread is left.
    pub fn open(path: &Path, with_ids: bool) -> io::Result<Self> {
        let file = OpenOptions::new().append(true).create(true).open(path)?;
        let (lines, waiting) = sync_channel(LINES_WAITING_MAX);
        let dropped = Arc::new(AtomicU64::new(0));
        let lost = Arc::clone(&dropped);
        std::thread::Builder::new()
            .name("request-trace".to_owned())
            .spawn(move || write_lines(BufWriter::new(file), &waiting, &lost))?;
        Ok(Self { lines, dropped, with_ids })
    }

    /// Waits until what was sent is written, but not beyond `limit`; whether every line so far is.
    #[must_use]
    pub fn flush(&self, limit: Duration) -> bool {
        let deadline = Instant::now() + limit;
        let (done, written) = sync_channel(1);
        let mut message = Message::Flush(done);
        while let Err(unsent) = self.lines.try_send(message) {
            let TrySendError::Full(unsent) = unsent else { return false };
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(PLACE_POLL);
            message = unsent;
        }
        let left = deadline.saturating_duration_since(Instant::now());
        written.recv_timeout(left).unwrap_or(false)
    }

    fn write(&self, line: Value) {
        if self.lines.try_send(Message::Line(line)).is_err() {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

fn write_lines(mut file: BufWriter<File>, waiting: &Receiver<Message>, lost: &AtomicU64) {
    let (mut word_at, mut told) = (Instant::now(), 0);
    while let Ok(mut message) = waiting.recv() {
        loop {
            match message {
                Message::Line(line) => {
                    if writeln!(file, "{line}").is_err() {
                        lost.fetch_add(1, Ordering::Relaxed);
                    }
                }
                Message::Flush(done) => {
                    let is_written = file.flush().is_ok() && lost.load(Ordering::Relaxed) == 0;
                    // Whoever asked may have stopped waiting.
                    let _ = done.try_send(is_written);
                }
            }
            match waiting.try_recv() {
                Ok(next) => message = next,
                Err(_) => break,
            }
        }
        let flushed = file.flush();
        let count = lost.load(Ordering::Relaxed) - told;
        if (count > 0 || flushed.is_err()) && word_at.elapsed() >= WORD_INTERVAL {
            word_at = Instant::now();
            told += count;
            tracing::warn!(count, error = ?flushed.err(), "lines of --trace-requests were lost");
        }
    }
}

/// What one request's line will say. Dropping it writes the line.
#[derive(Debug)]
pub struct RequestTrace {
    tracer: Tracer,
    received: Instant,
    head: Value,
    first_token: Option<Instant>,
    queued_ms: Option<u32>,
    cached_tokens: Option<u32>,
    preemptions: u32,
    prompt_tokens: Vec<u32>,
    prompts: Vec<Vec<Token>>,
    choices: Vec<Told>,
}

/// One choice.
#[derive(Debug, Clone, Default)]
struct Told {
    tokens: u32,
    ids: Vec<Token>,
    finish: Option<&'static str>,
}

impl RequestTrace {
    /// A request that came in at `received` and was accepted as so many choices.
    ///
    /// `head`: what identifies it.
    pub fn new(
        tracer: &Tracer,
        received: Instant,
        head: Value,
        prompt_tokens: Vec<u32>,
        choices: usize,
    ) -> Self {
        Self {
            tracer: tracer.clone(),
            received,
            head,
            first_token: None,
            queued_ms: None,
            cached_tokens: None,
            preemptions: 0,
            prompt_tokens,
            prompts: Vec::new(),
            choices: vec![Told::default(); choices],
        }
    }

    /// The prompts, for a file that is to hold them.
    pub fn set_prompts(&mut self, prompts: &[Vec<Token>]) {
        if self.tracer.with_ids {
            self.prompts = prompts.to_vec();
        }
    }

    /// Takes note of an event of one choice.
    pub fn note(&mut self, choice: usize, event: &TokenEvent) {
        if let Some(run) = event.first_run {
            self.queued_ms.get_or_insert(run.queued_ms);
            self.cached_tokens.get_or_insert(run.cached_tokens);
        }
        self.preemptions = self.preemptions.max(event.preemptions);
        if event.tokens.is_empty() {
            return;
        }
        self.first_token.get_or_insert_with(Instant::now);
        let Some(told) = self.choices.get_mut(choice) else { return };
        told.tokens += event.tokens.len() as u32;
        if self.tracer.with_ids {
            told.ids.extend(event.tokens.iter());
        }
    }

    /// A choice has ended.
    pub fn end(&mut self, choice: usize, finish: &'static str) {
        if let Some(told) = self.choices.get_mut(choice) {
            told.finish.get_or_insert(finish);
        }
    }

    fn line(&mut self) -> Value {
        let ms = |at: Instant| at.duration_since(self.received).as_secs_f64() * 1e3;
        let mut line = self.head.take();
        let counts = self.choices.iter().map(|told| told.tokens);
        // What nobody ended was left by its client.
        let ends = self.choices.iter().map(|told| told.finish.unwrap_or("client_gone"));
        line["prompt_tokens"] = json!(self.prompt_tokens);
        line["cached_tokens"] = json!(self.cached_tokens);
        line["completion_tokens"] = counts.collect();
        line["finish_reasons"] = ends.collect();
        line["preemptions"] = json!(self.preemptions);
        line["queued_ms"] = json!(self.queued_ms);
        line["first_token_ms"] = json!(self.first_token.map(ms));
        line["latency_ms"] = json!(ms(Instant::now()));
        if self.tracer.with_ids {
            line["prompt_ids"] = json!(self.prompts);
            line["completion_ids"] = self.choices.iter().map(|told| json!(told.ids)).collect();
        }
        line
    }
}

impl Drop for RequestTrace {
    fn drop(&mut self) {
        let line = self.line();
        self.tracer.write(line);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::fd::AsRawFd;

    #[test]
    fn whoever_flushes_hears_whether_all_is_written() {
        let (mut disk, end) = io::pipe().unwrap();
        let path = format!("/proc/self/fd/{}", end.as_raw_fd());
        let tracer = Tracer::open(Path::new(&path), false).unwrap();
        let (written, rest) = (json!("a line"), "x".repeat(100_000));
        tracer.write(written.clone());
        assert!(tracer.flush(Duration::from_mins(1)));
        let mut line = [0; 9];
        disk.read_exact(&mut line).unwrap();
        assert_eq!(line[..], *format!("{written}\n").as_bytes());

        // A pipe takes 64 KiB of it.
        tracer.write(json!(rest));
        let short = Duration::from_millis(50);
        assert!(!tracer.flush(short), "the disk has stopped");
        (0..=LINES_WAITING_MAX).for_each(|_| tracer.write(json!(0)));
        assert!(!tracer.flush(short), "nor is there a place to wait in");

        let reader = std::thread::spawn(move || disk.read_to_end(&mut Vec::new()));
        assert!(!tracer.flush(Duration::from_mins(1)), "a line found no place");
        drop((tracer, end));
        assert!(reader.join().unwrap().unwrap() > rest.len());
    }
}
