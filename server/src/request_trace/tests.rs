//! Tests of trace lines.

use super::*;
use crate::deadlines::BoundedJoin as _;
use std::io::Read;
use std::os::fd::AsRawFd;

#[test]
fn flush_reports_whether_every_line_was_written() {
    let (mut disk, end) = io::pipe().unwrap();
    let path = format!("/proc/self/fd/{}", end.as_raw_fd());
    let tracer = RequestTracer::open(Path::new(&path), false).unwrap();
    let (written, rest) = (json!("a line"), "x".repeat(100_000));
    tracer.write(written.clone());
    assert!(tracer.flush(Duration::from_mins(1)));
    let mut line = [0; 9];
    disk.read_exact(&mut line).unwrap();
    assert_eq!(line[..], *format!("{written}\n").as_bytes());

    // The pipe buffers only 64 KiB of the line, so the writer thread blocks on the rest.
    tracer.write(json!(rest));
    let short = Duration::from_millis(50);
    assert!(!tracer.flush(short), "the disk is stalled");
    (0..=LINES_QUEUED_MAX).for_each(|_| tracer.write(json!(0)));
    assert!(!tracer.flush(short), "the queue is full");

    let reader = std::thread::spawn(move || disk.read_to_end(&mut Vec::new()));
    assert!(!tracer.flush(Duration::from_mins(1)), "a line was dropped");
    drop((tracer, end));
    assert!(reader.join_bounded().unwrap() > rest.len());
}
