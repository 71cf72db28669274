//! Fuzz target: tokenizer files of a model folder. A first byte from 1 to 4 selects the file in `FILES`; any
//! other input is a `tokenizer.json`.

use std::path::Path;
use text::Tokenizer;

/// Files (name, tokenizer class) that the first byte of an input selects; byte 1 selects the first file.
const FILES: [(&str, &str); 4] = [
    ("tekken.json", "PreTrainedTokenizerFast"),
    ("tokenizer.model", "LlamaTokenizer"),
    ("tiktoken.model", "TikTokenTokenizer"),
    ("vocab.json", "GPT2Tokenizer"),
];

pub(crate) fn run(data: &[u8]) {
    // The tokenizer is written to an in-memory file system, if there is one, to avoid disk writes for each
    // fuzz input.
    let memory = Path::new("/dev/shm");
    let folder = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    let folder = folder.unwrap();
    let write = |name: &str, contents: &[u8]| {
        std::fs::write(folder.path().join(name), contents).unwrap();
    };
    let selected = data.split_first().and_then(|(first, rest)| {
        let index = usize::from(*first).checked_sub(1)?;
        Some((FILES.get(index)?, rest))
    });
    match selected {
        Some(((file, class), rest)) => {
            write(file, rest);
            write("merges.txt", b"#version: 0.2\na b\n");
            let config = format!("{{\"tokenizer_class\": \"{class}\"}}");
            write("tokenizer_config.json", config.as_bytes());
        }
        None => write("tokenizer.json", data),
    }
    let Ok(tokenizer) = Tokenizer::load(folder.path()) else { return };
    for text in ["", "two words", "<|im_end|>\u{1f980}\n\n 1234"] {
        let Ok(ids) = tokenizer.encode(text, true) else { continue };
        assert!(ids.iter().all(|&id| (id as usize) < tokenizer.vocab_size()));
        let _ = tokenizer.decode(&ids, false);
    }
}
