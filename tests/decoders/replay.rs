//! The committed corpora of `fuzz/corpus`, and a bounded number of mutations of them, the same ones every time.

use std::collections::BTreeMap;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::{Duration, Instant};

/// A decoder takes this long at most, on a machine however busy.
const TIME_MAX: Duration = Duration::from_secs(8);
/// Longest input.
const BYTES_MAX: usize = 16 << 10;

/// splitmix64.
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z ^ (z >> 27)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
}

/// What readers trip over.
const SCRAPS: &[&str] = &[
    "0",
    "-1",
    "1e400",
    "18446744073709551615",
    "null",
    "true",
    "\"",
    "\\",
    "[",
    "]",
    "{",
    "}",
    "[[",
    "{}",
    ",",
    ":",
    "\u{0}",
    "\u{7f}",
    "\u{e9}",
    "\u{1f980}",
    " ",
    "\n",
    "<",
    ">",
    "</",
    "{{",
    "}}",
    "{%",
    "%}",
    "(",
    ")*",
    "{1,9}",
    "\\ud800",
    "NaN",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "|",
];

/// A child of one or two inputs.
fn mutated(chance: &mut Chance, corpus: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = corpus[chance.below(corpus.len())].clone();
    for _ in 0..=chance.below(4) {
        let (at, to) = (chance.below(bytes.len()), chance.below(bytes.len()));
        let (from, to) = (at.min(to), at.max(to));
        match chance.below(7) {
            0 if !bytes.is_empty() => bytes[at] ^= 1 << chance.below(8),
            1 if !bytes.is_empty() => bytes[at] = chance.next() as u8,
            2 => drop(bytes.drain(from..to)),
            3 => {
                let part = bytes[from..to].to_vec();
                bytes.splice(at..at, part);
            }
            4 => {
                let other = &corpus[chance.below(corpus.len())];
                let begin = chance.below(other.len());
                bytes.splice(from..to, other[begin..].iter().copied());
            }
            5 => bytes.truncate(at),
            _ => drop(bytes.splice(at..at, SCRAPS[chance.below(SCRAPS.len())].bytes())),
        }
        bytes.truncate(BYTES_MAX);
    }
    bytes
}

/// Files of a corpus by name.
fn corpus(target: &str) -> BTreeMap<String, Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target);
    let read = |entry: fs::DirEntry| {
        (entry.file_name().to_string_lossy().into_owned(), fs::read(entry.path()).unwrap())
    };
    fs::read_dir(folder).unwrap().map(|entry| read(entry.unwrap())).collect()
}

/// Runs the corpus, then mutations: so many, or as many as there is time for.
fn drill(target: &str, run: fn(&[u8]), mutations: usize) {
    let strict = |name: &str, bytes: &[u8]| {
        let done = catch_unwind(AssertUnwindSafe(|| run(bytes)));
        assert!(done.is_ok(), "{target}, {name}: {:?}", String::from_utf8_lossy(bytes));
    };
    let files = corpus(target);
    assert!(files.len() >= 3, "{target}: {} files", files.len());
    for (name, bytes) in &files {
        strict(name, bytes);
    }
    let corpus: Vec<Vec<u8>> = files.into_values().collect();
    let (mut chance, start, mut done) = (Chance(7), Instant::now(), 0);
    while done < mutations && start.elapsed() < TIME_MAX {
        strict("a mutation", &mutated(&mut chance, &corpus));
        done += 1;
    }
    println!("{target}: {} files, {done} mutations in {:?}", corpus.len(), start.elapsed());
    assert!(done >= 20, "{target} takes too long: {done} mutations");
}

#[test]
fn frames_are_refused_or_sound() {
    drill("frames", crate::frames::run, 200_000);
}

#[test]
fn kv_replays_are_refused_or_sound() {
    drill("kv_replays", crate::kv_replays::run, 200_000);
}

#[test]
fn requests_are_refused_or_sound() {
    drill("requests", crate::requests::run, 100_000);
}

#[test]
fn headers_are_refused_or_sound() {
    drill("headers", crate::headers::run, 200_000);
}

#[test]
fn configs_are_refused_or_sound() {
    drill("configs", crate::configs::run, 100_000);
}

#[test]
fn tokenizers_are_refused_or_sound() {
    drill("tokenizers", crate::tokenizers::run, 5_000);
}

#[test]
fn templates_are_refused_or_sound() {
    drill("templates", crate::templates::run, 20_000);
}

#[test]
fn grammars_are_refused_or_sound() {
    drill("grammars", crate::grammars::run, 2_000);
}

#[test]
fn outputs_are_told_alike_however_they_are_cut() {
    drill("outputs", crate::outputs::run, 100_000);
}
