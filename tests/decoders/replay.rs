//! Runs the fuzz targets on the committed corpora in `fuzz/corpus` and on mutations of them. The number of
//! mutations is bounded and the seed is fixed, unless both are given (`just decoders TARGET COUNT SEED`).

use std::collections::BTreeMap;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::{Duration, Instant};

/// Maximum time for the mutations of one fuzz target, also on a loaded machine.
const TIME_MAX: Duration = Duration::from_secs(8);
/// Maximum size of a mutated input in bytes.
const BYTES_MAX: usize = 16 << 10;

/// Random number generator of the mutations: splitmix64.
struct MutationRng(u64);

impl MutationRng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z ^ (z >> 27)
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n.max(1) as u64) as usize
    }
}

/// Strings that often break parsers; mutations insert them.
const DICTIONARY: &[&str] = &[
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

/// A mutated copy of one input, or of parts of two inputs.
fn mutate(rng: &mut MutationRng, corpus: &[Vec<u8>]) -> Vec<u8> {
    let mut bytes = corpus[rng.below(corpus.len())].clone();
    for _ in 0..=rng.below(4) {
        let (at, to) = (rng.below(bytes.len()), rng.below(bytes.len()));
        let (from, to) = (at.min(to), at.max(to));
        match rng.below(7) {
            0 if !bytes.is_empty() => bytes[at] ^= 1 << rng.below(8),
            1 if !bytes.is_empty() => bytes[at] = rng.next() as u8,
            2 => drop(bytes.drain(from..to)),
            3 => {
                let part = bytes[from..to].to_vec();
                bytes.splice(at..at, part);
            }
            4 => {
                let other = &corpus[rng.below(corpus.len())];
                let begin = rng.below(other.len());
                bytes.splice(from..to, other[begin..].iter().copied());
            }
            5 => bytes.truncate(at),
            _ => drop(bytes.splice(at..at, DICTIONARY[rng.below(DICTIONARY.len())].bytes())),
        }
        bytes.truncate(BYTES_MAX);
    }
    bytes
}

/// Fuzz target.
#[derive(Clone, Copy)]
struct FuzzTarget {
    /// Name of the target and of its corpus.
    name: &'static str,
    /// Decodes one input.
    run: fn(&[u8]),
}

const TARGETS: [FuzzTarget; 9] = [
    FuzzTarget { name: "frames", run: crate::frames::run },
    FuzzTarget { name: "kv_replays", run: crate::kv_replays::run },
    FuzzTarget { name: "requests", run: crate::requests::run },
    FuzzTarget { name: "headers", run: crate::headers::run },
    FuzzTarget { name: "configs", run: crate::configs::run },
    FuzzTarget { name: "tokenizers", run: crate::tokenizers::run },
    FuzzTarget { name: "templates", run: crate::templates::run },
    FuzzTarget { name: "grammars", run: crate::grammars::run },
    FuzzTarget { name: "outputs", run: crate::outputs::run },
];

/// Returns the contents of the files of a fuzz target in `folder`, by file name; empty if the folder does not
/// exist.
fn files(folder: &str, target: &str) -> BTreeMap<String, Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder).join(target);
    let read = |entry: fs::DirEntry| {
        (entry.file_name().to_string_lossy().into_owned(), fs::read(entry.path()).unwrap())
    };
    fs::read_dir(folder).into_iter().flatten().map(|entry| read(entry.unwrap())).collect()
}

/// Runs a fuzz target on one input, and prints the input if the decoder panics.
fn run_input(target: FuzzTarget, input: &str, bytes: &[u8]) {
    let FuzzTarget { name, run } = target;
    let done = catch_unwind(AssertUnwindSafe(|| run(bytes)));
    assert!(done.is_ok(), "{name}, {input}: {:?}", String::from_utf8_lossy(bytes));
}

/// Runs a fuzz target on its corpus, then on at most `mutations` mutations, fewer if the time limit
/// `TIME_MAX` is reached.
fn replay_and_mutate(name: &str, mutations: usize) {
    let target = TARGETS.into_iter().find(|target| target.name == name).unwrap();
    let files = files("fuzz/corpus", name);
    assert!(files.len() >= 3, "{name}: {} files", files.len());
    for (file, bytes) in &files {
        run_input(target, file, bytes);
    }
    let corpus: Vec<Vec<u8>> = files.into_values().collect();
    let (mut rng, start, mut done) = (MutationRng(7), Instant::now(), 0);
    while done < mutations && start.elapsed() < TIME_MAX {
        run_input(target, "a mutation", &mutate(&mut rng, &corpus));
        done += 1;
    }
    println!("{name}: {} files, {done} mutations in {:?}", corpus.len(), start.elapsed());
    assert!(done >= 20, "{name} takes too long: {done} mutations");
}

/// Runs the fuzz target `HADRON_DECODERS_TARGET` on `HADRON_DECODERS_COUNT` mutations with the seed
/// `HADRON_DECODERS_SEED`. Mutated are the corpus and the inputs that libFuzzer has added to it.
#[test]
#[ignore = "runs COUNT inputs: `just decoders TARGET COUNT`"]
#[allow(clippy::disallowed_methods, reason = "what to do comes from `just`")]
fn unbounded_mutations() {
    let env_var = |name: &str| std::env::var(name).ok();
    let number = |name: &str| env_var(name).map(|text| text.parse::<u64>().unwrap());
    let name = env_var("HADRON_DECODERS_TARGET").unwrap();
    let target = TARGETS.into_iter().find(|target| target.name == name).unwrap();
    let count = number("HADRON_DECODERS_COUNT").unwrap_or(1_000_000);
    let seed = number("HADRON_DECODERS_SEED").unwrap_or(8);
    let corpus: Vec<Vec<u8>> = ["fuzz/corpus", "target/fuzz"]
        .iter()
        .flat_map(|folder| files(folder, &name).into_values())
        .collect();
    let (mut rng, start) = (MutationRng(seed), Instant::now());
    let mut slowest = Duration::ZERO;
    for _ in 0..count {
        let bytes = mutate(&mut rng, &corpus);
        let since = Instant::now();
        run_input(target, "a mutation", &bytes);
        slowest = slowest.max(since.elapsed());
    }
    println!(
        "{name}: {count} mutations of {} files, seed {seed}, in {:.1} s; the slowest took {slowest:?}",
        corpus.len(),
        start.elapsed().as_secs_f64()
    );
}

#[test]
fn frame_decoder_survives_mutations() {
    replay_and_mutate("frames", 200_000);
}

#[test]
fn kv_replay_decoder_survives_mutations() {
    replay_and_mutate("kv_replays", 200_000);
}

#[test]
fn request_decoder_survives_mutations() {
    replay_and_mutate("requests", 100_000);
}

#[test]
fn header_decoder_survives_mutations() {
    replay_and_mutate("headers", 200_000);
}

#[test]
fn config_decoder_survives_mutations() {
    replay_and_mutate("configs", 100_000);
}

#[test]
fn tokenizer_loader_survives_mutations() {
    replay_and_mutate("tokenizers", 5_000);
}

#[test]
fn template_renderer_survives_mutations() {
    replay_and_mutate("templates", 20_000);
}

#[test]
fn grammar_compiler_survives_mutations() {
    replay_and_mutate("grammars", 2_000);
}

#[test]
fn output_parser_is_independent_of_splits() {
    replay_and_mutate("outputs", 100_000);
}
