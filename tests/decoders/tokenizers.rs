//! Fuzz target: `tokenizer.json` of a model folder.

use std::path::Path;
use text::Tokenizer;

pub(crate) fn run(data: &[u8]) {
    // The tokenizer is written to an in-memory file system, if there is one, to avoid disk writes for each
    // fuzz input.
    let memory = Path::new("/dev/shm");
    let folder = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    let folder = folder.unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), data).unwrap();
    let Ok(tokenizer) = Tokenizer::load(folder.path()) else { return };
    for text in ["", "two words", "<|im_end|>\u{1f980}\n\n 1234"] {
        let Ok(ids) = tokenizer.encode(text, true) else { continue };
        assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocab_size()));
        let _ = tokenizer.decode(&ids, false);
    }
}
