//! Digest of a model folder. Processes compare their digests to check that they serve the same model.

use crate::weights::weight_files;
use crate::{LoadFormat, ModelLoadError};
use ops::digest_bytes;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Maximum number of header bytes of a weight file that are hashed. The header contains the names, dtypes,
/// shapes and offsets of the tensors.
const HEADER_BYTES: u64 = 16 << 20;
/// Number of samples that are hashed in a weight file, spread evenly over the file.
const SAMPLES: u64 = 32;
/// Number of bytes of one sample of a weight file.
const SAMPLE_BYTES: u64 = 256;

/// Digest of `config.json` and, if the weights are files, of the name, size, header and samples of each file.
///
/// Only the header and 8 KiB of samples of each file are read, before weights are loaded. A different
/// checkpoint or an incomplete copy changes the digest, but a difference of a few bytes may go undetected;
/// [`protocol::WeightsDigest`] covers all bytes that are loaded. The digest detects mistakes (different
/// mounts, an incomplete download), not manipulation.
///
/// Errors: a file cannot be read, or the folder has no weights.
pub fn manifest(dir: &Path, format: LoadFormat) -> Result<u64, ModelLoadError> {
    let path = dir.join("config.json");
    let config = fs::read(&path).map_err(|error| ModelLoadError::Io { path, error })?;
    let mut digest = digest_bytes(&config, 0);
    match format {
        LoadFormat::Synth { seed } => digest = digest_bytes(&seed.to_le_bytes(), digest),
        LoadFormat::Safetensors => {
            for path in weight_files(dir)? {
                let name = path.file_name().unwrap_or_default().as_encoded_bytes();
                digest = digest_bytes(name, digest);
                digest = file_digest(&path, digest)
                    .map_err(|error| ModelLoadError::Io { path: path.clone(), error })?;
            }
        }
    }
    Ok(digest)
}

/// Digest of the size, the header and the samples of a weight file, seeded with `seed`. The file content is
/// not validated here, but when the weights are loaded.
fn file_digest(path: &Path, seed: u64) -> io::Result<u64> {
    // The file is read instead of mapped into memory: if the file is truncated meanwhile, a read returns an
    // error, whereas an access to mapped memory would terminate the process with SIGBUS.
    let file = File::open(path)?;
    let size = file.metadata()?.len();
    let mut digest = digest_bytes(&size.to_le_bytes(), seed);
    let mut buffer = Vec::new();
    let mut add = |start: u64, length: u64| -> io::Result<()> {
        buffer.resize(length.min(size - start) as usize, 0);
        file.read_exact_at(&mut buffer, start)?;
        digest = digest_bytes(&buffer, digest);
        Ok(())
    };
    if size >= 8 {
        let mut length = [0; 8];
        file.read_exact_at(&mut length, 0)?;
        add(0, u64::from_le_bytes(length).saturating_add(8).min(HEADER_BYTES))?;
    }
    if size <= SAMPLES * SAMPLE_BYTES {
        add(0, size)?;
    } else {
        for sample in 0..SAMPLES {
            add(sample_offset(sample, size), SAMPLE_BYTES)?;
        }
    }
    Ok(digest)
}

/// Offset of sample number `sample` in a file of `size` bytes, which is larger than all samples together.
fn sample_offset(sample: u64, size: u64) -> u64 {
    let last = size - SAMPLE_BYTES;
    (u128::from(last) * u128::from(sample) / u128::from(SAMPLES - 1)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digest_covers_config_and_weight_files() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| fs::write(dir.path().join(name), text).unwrap();
        let digest = || manifest(dir.path(), LoadFormat::Safetensors);
        assert!(digest().unwrap_err().to_string().contains("config.json"));
        write("config.json", "{}");
        assert!(digest().unwrap_err().to_string().contains("no model.safetensors"));
        write("model.safetensors", "1234");
        let first = digest().unwrap();
        assert_eq!(digest().unwrap(), first);
        write("model.safetensors", "12345");
        let second = digest().unwrap();
        write("config.json", "{ }");
        let third = digest().unwrap();
        assert!(first != second && second != third);
        let synth = |seed| manifest(dir.path(), LoadFormat::Synth { seed }).unwrap();
        assert!(synth(1) != synth(2) && synth(1) == synth(1));
    }

    #[test]
    fn equal_size_files_differ_by_header_and_samples() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model.safetensors");
        let mut bytes = vec![0; 1 << 20];
        bytes[0..8].copy_from_slice(&40_000u64.to_le_bytes());
        let digest = |change: &mut dyn FnMut(&mut Vec<u8>)| {
            let mut bytes = bytes.clone();
            change(&mut bytes);
            fs::write(&path, bytes).unwrap();
            file_digest(&path, 0).unwrap()
        };
        let first = digest(&mut |_| ());
        assert_eq!(digest(&mut |_| ()), first);
        assert_ne!(digest(&mut |bytes| bytes[39_999] = 1), first, "last byte of the header");
        assert_ne!(digest(&mut |bytes| bytes[40_000..].fill(1)), first, "changed weights");
        assert_ne!(
            digest(&mut |bytes| *bytes.last_mut().unwrap() = 1),
            first,
            "last byte of the file"
        );
        assert_ne!(digest(&mut |bytes| bytes.truncate(1 << 19)), first, "truncated file");
        // Files with invalid sizes and headers also have a digest, because `manifest` does not validate them.
        let stated = |length: u64| {
            move |bytes: &mut Vec<u8>| bytes[0..8].copy_from_slice(&length.to_le_bytes())
        };
        assert_ne!(digest(&mut stated(u64::MAX)), first);
        assert_ne!(digest(&mut |bytes| bytes.clear()), first);
    }
}
