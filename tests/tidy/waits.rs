//! Forbids waits without a deadline in end-to-end tests.
//!
//! `clippy.toml` disallows functions of the standard library that wait without a deadline, in all crates. This
//! rule covers reads: from the output of child processes, which must use the helpers of
//! `tests/support/bounded_child.rs`, and from sockets, which must be opened by functions that set timeouts.

use crate::source_tree::{SourceFile, code_lines, read_file, rust_files};

/// Text that begins a wait without a deadline, and the function to call instead.
struct UnboundedWait {
    text: &'static str,
    instead: &'static str,
}

const UNBOUNDED: &[UnboundedWait] = &[
    UnboundedWait { text: "ChildStdout", instead: "ChildPipe" },
    UnboundedWait { text: "ChildStderr", instead: "ChildPipe" },
    UnboundedWait { text: "stdout.take()", instead: "ChildPipe::start or read_lines" },
    UnboundedWait { text: "stderr.take()", instead: "ChildPipe::start or read_lines" },
    UnboundedWait { text: "TcpStream::connect", instead: "connect_within" },
    UnboundedWait { text: ".accept()", instead: "accept_within" },
];

/// Functions that read pipes with deadlines.
const PIPE_READERS: [&str; 2] = ["ChildPipe::start(", "read_lines("];

/// Methods that `clippy.toml` must disallow.
const DISALLOWED: &[&str] = &[
    "std::process::Child::wait",
    "std::process::Child::wait_with_output",
    "std::process::Command::output",
    "std::process::Command::status",
    "std::sync::Barrier::wait",
    "std::sync::mpsc::Receiver::recv",
    "std::thread::JoinHandle::join",
    "tokio::sync::oneshot::Receiver::blocking_recv",
];

fn unbounded_waits(file: &SourceFile) -> Vec<String> {
    let violation = |(number, code): (usize, &str)| {
        let wait = UNBOUNDED.iter().find(|wait| code.contains(wait.text))?;
        let is_bounded = PIPE_READERS.iter().any(|reader| code.contains(reader));
        let (path, code) = (&file.path, code.trim());
        (!is_bounded).then(|| format!("{path}:{number}: {code}: use {}", wait.instead))
    };
    code_lines(file).filter_map(violation).collect()
}

#[test]
fn end_to_end_tests_wait_with_deadlines() {
    let files = rust_files();
    let tests = files
        .iter()
        .filter(|file| file.path.starts_with("tests/e2e/") || file.path.starts_with("tests/wire/"));
    let found: Vec<String> = tests.flat_map(unbounded_waits).collect();
    assert!(found.is_empty(), "waits without a deadline:\n  {}", found.join("\n  "));
}

#[test]
fn waits_without_deadlines_are_disallowed_by_clippy() {
    let settings: toml::Table = read_file("clippy.toml").parse().unwrap();
    let methods = settings["disallowed-methods"].as_array().unwrap();
    let paths: Vec<&str> = methods.iter().filter_map(|method| method["path"].as_str()).collect();
    let missing: Vec<_> = DISALLOWED.iter().filter(|path| !paths.contains(path)).collect();
    assert!(missing.is_empty(), "{missing:?}");
    // An attribute for a whole crate would also allow waits.
    let allows_all = |file: &SourceFile| {
        file.text.contains("#![allow(clippy::disallowed_methods")
            && file.path != "tests/tidy/waits.rs"
    };
    let found: Vec<String> =
        rust_files().into_iter().filter(allows_all).map(|file| file.path).collect();
    assert!(found.is_empty(), "disallowed methods are allowed in whole crates: {found:?}");
}

#[test]
fn unbounded_waits_are_found() {
    let found = |text: &str| {
        let (path, text) = ("a.rs".to_owned(), text.to_owned());
        unbounded_waits(&SourceFile { path, text }).len()
    };
    assert_eq!(found("let a = TcpStream::connect(b);\nlet (c, _) = d.accept();\n"), 2);
    assert_eq!(found("let mut e = BufReader::new(f.stderr.take().unwrap());\n"), 1);
    assert_eq!(found("let e = ChildPipe::start(f.stderr.take().unwrap());\n"), 0);
    assert_eq!(found("connect_within(b, limit) // TcpStream::connect\n"), 0);
}
