//! The demo checkpoint, carried inside the binary so that `hadron serve` works anywhere.

use std::fs::{self, DirBuilder};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// Name it is served under.
pub const NAME: &str = "hadron-demo";

macro_rules! file {
    ($name:literal) => {
        ($name, include_bytes!(concat!("../../tests/data/demo/", $name)) as &[u8])
    };
}

const FILES: &[(&str, &[u8])] = &[
    file!("config.json"),
    file!("generation_config.json"),
    file!("model.safetensors"),
    file!("tokenizer.json"),
    file!("tokenizer_config.json"),
];

/// The demo model unpacked into a private folder that goes away with this value.
#[derive(Debug)]
pub struct Unpacked {
    dir: PathBuf,
}

impl Unpacked {
    /// Writes the files into a fresh folder of the system's temporary one.
    pub fn new() -> io::Result<Self> {
        let random = RandomState::new().hash_one(std::process::id());
        let dir = std::env::temp_dir().join(format!("hadron-demo-{random:016x}"));
        DirBuilder::new().mode(0o700).create(&dir)?;
        let unpacked = Self { dir };
        for (name, bytes) in FILES {
            fs::write(unpacked.dir.join(name), bytes)?;
        }
        Ok(unpacked)
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

impl Drop for Unpacked {
    fn drop(&mut self) {
        // Files that are mapped stay readable; what cannot be removed the system will clear.
        let _ = fs::remove_dir_all(&self.dir);
    }
}
