//! On-disk cache of compiled kernels. Each compiled image is one file, which is written atomically and
//! verified when it is read.
//!
//! File format: magic number (16 bytes), checksum of the image (16 bytes), image. A missing, truncated or
//! modified file is a cache miss and is replaced. If the folder is not writable, kernels are recompiled at
//! the next start.

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};

use xxhash_rust::xxh3::{Xxh3, xxh3_128};

const MAGIC: &[u8; 16] = b"hadron kernel 1\n";
const HEAD: usize = MAGIC.len() + 16;

/// Folder with cached images of compiled kernels.
#[derive(Debug)]
pub(super) struct KernelCache {
    folder: PathBuf,
    /// Number of images written so far. The number is part of the name of a temporary file, so that threads
    /// use different names.
    writes: AtomicU32,
}

impl KernelCache {
    pub(super) fn new(folder: PathBuf) -> Self {
        Self { folder, writes: AtomicU32::new(0) }
    }

    /// Cache key of a compiled image: hash of all inputs of the compilation. The length of each part is
    /// hashed too, so that `"a", "bc"` and `"ab", "c"` have different keys.
    pub(super) fn key<'a>(parts: impl Iterator<Item = &'a str>) -> u128 {
        let mut hash = Xxh3::new();
        for part in parts {
            hash.update(&(part.len() as u64).to_le_bytes());
            hash.update(part.as_bytes());
        }
        hash.digest128()
    }

    fn path(&self, key: u128) -> PathBuf {
        self.folder.join(format!("{key:032x}.co"))
    }

    pub(super) fn read(&self, key: u128) -> Option<Vec<u8>> {
        let mut bytes = fs::read(self.path(key)).ok()?;
        let sum: [u8; 16] = bytes.get(MAGIC.len()..HEAD)?.try_into().ok()?;
        let is_valid = bytes.starts_with(MAGIC) && xxh3_128(&bytes[HEAD..]).to_le_bytes() == sum;
        is_valid.then(|| bytes.split_off(HEAD))
    }

    pub(super) fn write(&self, key: u128, image: &[u8]) {
        let sum = xxh3_128(image).to_le_bytes();
        let bytes = [MAGIC.as_slice(), &sum, image].concat();
        let sequence = self.writes.fetch_add(1, Ordering::Relaxed);
        let temporary =
            self.folder.join(format!("{key:032x}.{}.{sequence}.part", std::process::id()));
        // A failed write is not reported as an error, because it only causes a recompilation at the next
        // start.
        let result = fs::create_dir_all(&self.folder)
            .and_then(|()| fs::write(&temporary, bytes))
            .and_then(|()| fs::rename(&temporary, self.path(key)));
        if result.is_err() {
            let _ = fs::remove_file(&temporary);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bounded_child::{run_if_installed, run_to_end};

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("hadron-{}-{name}", std::process::id()));
        let _ = fs::remove_dir_all(&folder);
        folder
    }

    #[test]
    fn only_written_images_are_read() {
        let cache = KernelCache::new(folder("cache-hit"));
        let key = KernelCache::key(["source", "options"].into_iter());
        assert_eq!(cache.read(key), None);
        cache.write(key, b"image");
        assert_eq!(cache.read(key).as_deref(), Some(b"image".as_slice()));
        assert_eq!(cache.read(KernelCache::key(["sourceo", "ptions"].into_iter())), None);
        fs::remove_dir_all(&cache.folder).unwrap();
    }

    #[test]
    fn damaged_file_is_a_miss_and_is_replaced() {
        let cache = KernelCache::new(folder("cache-damage"));
        let image: Vec<u8> = (0..1000).map(|i| i as u8).collect();
        cache.write(1, &image);
        let whole = fs::read(cache.path(1)).unwrap();
        for damage in 0..4 {
            let mut bytes = whole.clone();
            match damage {
                0 => bytes.truncate(HEAD + 999),
                1 => bytes.truncate(HEAD - 1),
                2 => bytes[HEAD + 500] ^= 1,
                _ => bytes[0] ^= 1,
            }
            fs::write(cache.path(1), &bytes).unwrap();
            assert_eq!(cache.read(1), None, "damage {damage}");
            cache.write(1, &image);
            assert_eq!(cache.read(1).as_deref(), Some(image.as_slice()));
        }
        let files = fs::read_dir(&cache.folder).unwrap().count();
        assert_eq!(files, 1, "no temporary file remains");
        fs::remove_dir_all(&cache.folder).unwrap();
    }

    #[test]
    fn unwritable_folder_is_no_error() {
        let file = folder("cache-none");
        fs::write(&file, b"a file instead of a folder").unwrap();
        let cache = KernelCache::new(file.clone());
        cache.write(2, b"image");
        assert_eq!(cache.read(2), None);
        fs::remove_file(&file).unwrap();
    }

    fn image(key: u128, len: usize) -> Vec<u8> {
        (0..len).map(|i| i as u8 ^ key as u8).collect()
    }

    /// Returns an `unshare` command that runs a program in a separate mount namespace, where it may mount
    /// file systems.
    fn unshare_mount_namespace() -> std::process::Command {
        let mut unshare = std::process::Command::new("unshare");
        unshare.args(["--map-root-user", "--mount"]);
        unshare
    }

    /// Runs a test of this module in a child process, whose working directory is an empty tmpfs with the
    /// mount options `options`.
    fn run_on_tmpfs(options: &str, test: &str) {
        let folder = folder("cache-disk");
        fs::create_dir_all(&folder).unwrap();
        let script = format!(
            "mount -t tmpfs -o {options} none {0} && cd {0} && exec \"$0\" --exact --ignored gpu::kernel_cache::tests::{test}",
            folder.display()
        );
        let test_binary = std::env::current_exe().unwrap();
        let mut unshare = unshare_mount_namespace();
        let output = run_to_end(unshare.args(["sh", "-c", &script]).arg(test_binary));
        let log = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
        assert!(output.status.success() && log.contains("1 passed"), "{log}");
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    #[allow(clippy::print_stdout, reason = "the log must show that the test was skipped")]
    fn full_or_read_only_disk_only_costs_a_compile() {
        let available = run_if_installed(unshare_mount_namespace().arg("true"));
        if !available.is_some_and(|output| output.status.success()) {
            println!("skipped: mount namespaces are not available");
            return;
        }
        run_on_tmpfs("size=64k", "full_disk_keeps_only_complete_files");
        run_on_tmpfs("ro", "read_only_disk_keeps_nothing");
    }

    #[test]
    #[ignore = "`full_or_read_only_disk_only_costs_a_compile` runs it on a small tmpfs"]
    fn full_disk_keeps_only_complete_files() {
        let cache = KernelCache::new(PathBuf::from("."));
        let names = || fs::read_dir(".").unwrap().count();
        cache.write(1, &image(1, 100_000)); // The disk is full in the middle of this write.
        assert_eq!((cache.read(1), names()), (None, 0));
        let kept = (2..12).filter(|&key| {
            cache.write(key, &image(key, 20_000));
            cache.read(key).is_some()
        });
        let kept: Vec<u128> = kept.collect();
        assert_eq!(kept.len(), names(), "no partial file remains");
        assert!((1..10).contains(&kept.len()), "{kept:?}");
        for key in kept {
            assert_eq!(cache.read(key), Some(image(key, 20_000)));
        }
    }

    #[test]
    #[ignore = "`full_or_read_only_disk_only_costs_a_compile` runs it on a read-only tmpfs"]
    fn read_only_disk_keeps_nothing() {
        let cache = KernelCache::new(PathBuf::from("."));
        cache.write(1, b"image");
        assert_eq!(cache.read(1), None);
        let cache = KernelCache::new(PathBuf::from("below"));
        cache.write(1, b"image");
        assert_eq!(cache.read(1), None);
    }

    /// Simulates ranks of one host that start at the same time: all ranks miss the cache and write the same
    /// image.
    #[test]
    fn concurrent_writers_leave_one_complete_file() {
        let folder = folder("cache-race");
        let image: Vec<u8> = (0..100_000).map(|i| i as u8).collect();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                // Every thread starts with `writes = 0`, so that all threads use the same temporary file
                // name, as processes with the same process id in different containers do.
                let cache = KernelCache { folder: folder.clone(), writes: AtomicU32::new(0) };
                let image = &image;
                scope.spawn(move || {
                    for _ in 0..50 {
                        cache.write(3, image);
                        let read = cache.read(3);
                        assert!(
                            read.is_none_or(|found| found == *image),
                            "a partial file was read"
                        );
                    }
                });
            }
        });
        let cache = KernelCache::new(folder);
        cache.write(3, &image);
        assert_eq!(cache.read(3), Some(image));
        assert_eq!(fs::read_dir(&cache.folder).unwrap().count(), 1);
        fs::remove_dir_all(&cache.folder).unwrap();
    }
}
