//! Search for shared libraries of GPU runtimes, opening of libraries, and resolution of their symbols.

use std::ffi::OsStr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use libloading::Library;

use crate::GpuApi;

/// Newest major version for which a library is searched. Versions that do not exist yet are included; each
/// costs one failed lookup.
const NEWEST_MAJOR: u32 = 20;

/// Error of opening a shared library or of resolving one of its symbols.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LibraryOpenError {
    /// The library could not be opened at any of the searched paths.
    #[error("no {what} found; tried {}", tried.join("; "))]
    NotFound {
        /// Name of the library that was not found, for the error message.
        what: &'static str,
        /// Names and paths in the order in which they were tried, each with the error of the dynamic loader.
        /// All names that the loader does not find share one entry.
        tried: Vec<String>,
    },
    /// The library lacks a required symbol: it is too old, or a different library with the same file name.
    #[error("{library} has no symbol {symbol}")]
    NoSymbol {
        /// Path of the library that lacks the symbol.
        library: String,
        /// Name of the missing symbol.
        symbol: String,
    },
}

/// Paths at which a library is searched: first every file name in every folder, then every file name
/// without a folder, for which the dynamic loader searches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LibrarySearchPaths {
    what: &'static str,
    names: Vec<PathBuf>,
    folders: Vec<PathBuf>,
}

impl LibrarySearchPaths {
    /// Paths at which the driver library of `api` is searched.
    #[must_use]
    pub fn driver(api: GpuApi, folders: &[PathBuf]) -> Self {
        let names = match api {
            GpuApi::Hip => versions("libamdhip64.so", 5..=NEWEST_MAJOR),
            // `libcuda.so` without a version may be the library that CUDA ships for linking, which drives no GPU.
            GpuApi::Cuda => vec!["libcuda.so.1".into()],
        };
        Self::new(api.pick("HIP runtime", "CUDA driver"), api, names, folders)
    }

    /// Search paths of the run-time compiler of `api`. For HIP, the driver library also contains a run-time
    /// compiler.
    #[must_use]
    pub fn rtc(api: GpuApi, folders: &[PathBuf]) -> Self {
        let names = match api {
            GpuApi::Hip => [
                versions("libhiprtc.so", 5..=NEWEST_MAJOR),
                versions("libamdhip64.so", 5..=NEWEST_MAJOR),
            ]
            .concat(),
            GpuApi::Cuda => versions("libnvrtc.so", 12..=NEWEST_MAJOR),
        };
        Self::new(api.pick("HIP run-time compiler", "CUDA run-time compiler"), api, names, folders)
    }

    /// Paths at which hipBLASLt or cuBLASLt is searched, as selected by `api`.
    #[must_use]
    pub fn blaslt(api: GpuApi, folders: &[PathBuf]) -> Self {
        let names = match api {
            GpuApi::Hip => versions("libhipblaslt.so", 0..=NEWEST_MAJOR),
            GpuApi::Cuda => versions("libcublasLt.so", 12..=NEWEST_MAJOR),
        };
        Self::new(api.pick("hipBLASLt", "cuBLASLt"), api, names, folders)
    }

    /// Paths at which RCCL or NCCL is searched, as selected by `api`.
    #[must_use]
    pub fn collectives(api: GpuApi, folders: &[PathBuf]) -> Self {
        let names = match api {
            GpuApi::Hip => versions("librccl.so", 1..=NEWEST_MAJOR),
            GpuApi::Cuda => versions("libnccl.so", 2..=NEWEST_MAJOR),
        };
        Self::new(api.pick("RCCL", "NCCL"), api, names, folders)
    }

    /// Returns a search for the library `what` at the path `path` only.
    #[must_use]
    pub fn named(what: &'static str, path: &Path) -> Self {
        Self { what, names: vec![path.to_owned()], folders: Vec::new() }
    }

    fn new(what: &'static str, api: GpuApi, names: Vec<PathBuf>, folders: &[PathBuf]) -> Self {
        let mut folders = folders.to_vec();
        if api == GpuApi::Hip {
            folders.extend(rocm_folders());
        }
        Self { what, names, folders }
    }

    /// Returns the part of the error message that lists the searched folders; empty if there are none.
    fn in_folders(&self) -> String {
        let folders: Vec<String> = self.folders.iter().map(|f| f.display().to_string()).collect();
        if folders.is_empty() { String::new() } else { format!(", nor in {}", folders.join(", ")) }
    }

    /// Paths at which the library is searched, in the order in which they are tried.
    fn paths(&self) -> impl Iterator<Item = PathBuf> {
        let in_folder =
            |folder: &PathBuf| self.names.iter().map(|n| folder.join(n)).collect::<Vec<_>>();
        let existing: Vec<PathBuf> =
            self.folders.iter().flat_map(in_folder).filter(|p| p.exists()).collect();
        existing.into_iter().chain(self.names.clone())
    }
}

/// Returns the file names of the major versions `majors` of a library, newest first. The last one is the name
/// without a version, which only development packages install.
fn versions(name: &str, majors: RangeInclusive<u32>) -> Vec<PathBuf> {
    let names = majors.rev().map(|major| format!("{name}.{major}").into());
    names.chain([name.into()]).collect()
}

/// Library folders of the ROCm installations in `/opt`, newest version first; the last one is the folder
/// without a version, `/opt/rocm`.
fn rocm_folders() -> Vec<PathBuf> {
    let entries = std::fs::read_dir("/opt").into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<String> = names.filter(|name| name.starts_with("rocm")).collect();
    names.sort_by_key(|name| std::cmp::Reverse(version_of(name)));
    names.into_iter().map(|name| Path::new("/opt").join(name).join("lib")).collect()
}

/// Returns the numbers in a folder name such as `rocm-7.1.0`.
fn version_of(name: &str) -> Vec<u32> {
    name.split(|c: char| !c.is_ascii_digit()).filter_map(|digits| digits.parse().ok()).collect()
}

/// Shared library that is never closed. Symbol tables in other crates use it.
#[derive(Debug, Clone)]
pub struct SharedLibrary {
    library: &'static Library,
    found: PathBuf,
}

impl SharedLibrary {
    /// Opens the first path of `search` at which a library can be loaded.
    pub fn open(search: &LibrarySearchPaths) -> Result<Self, LibraryOpenError> {
        let (library, found) = open(search)?;
        Ok(Self { library: Box::leak(Box::new(library)), found })
    }

    /// Returns the path or the file name with which the library was opened.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.found
    }

    /// Resolves the function `name`.
    ///
    /// # Safety
    /// `F` is the function type of the symbol `name`.
    pub unsafe fn symbol<F: Copy>(&self, name: &str) -> Result<F, LibraryOpenError> {
        // SAFETY: the caller guarantees the type; the library is never closed.
        unsafe { symbol(self.library, &self.found, name) }
    }
}

/// Opens the first path of `search` at which a library can be loaded. Returns the library and its path.
pub(crate) fn open(search: &LibrarySearchPaths) -> Result<(Library, PathBuf), LibraryOpenError> {
    let (mut tried, mut not_found) = (Vec::new(), Vec::new());
    for path in search.paths() {
        open_nvrtc_builtins(&path);
        // SAFETY: loading runs the initialisers of the library; the candidates are the names of known GPU
        // runtimes or paths configured by the operator.
        match unsafe { Library::new(&path) } {
            Ok(library) => return Ok((library, path)),
            Err(error) => match reason(&error) {
                reason if is_absent(&path, &reason) => not_found.push(path.display().to_string()),
                reason => tried.push(format!("{}: {reason}", path.display())),
            },
        }
    }
    let absent = match not_found.as_slice() {
        [] => None,
        [only] => Some(only.clone()),
        [first, .., last] => Some(format!("{first} to {last}")),
    };
    if let Some(names) = absent {
        tried.push(format!("{names}: not found by the dynamic loader{}", search.in_folders()));
    }
    Err(LibraryOpenError::NotFound { what: search.what, tried })
}

/// Whether the dynamic loader finds no file with the name `path`, given its error message `reason`. Returns
/// false if the library exists but lacks a dependency: `reason` then contains the name of the dependency.
fn is_absent(path: &Path, reason: &str) -> bool {
    let is_name = path.parent().is_some_and(|folder| folder.as_os_str().is_empty());
    is_name && reason.starts_with(&format!("{}: cannot open", path.display()))
}

/// Opens `libnvrtc-builtins`, before NVRTC opens it by its file name. Opening it by name fails if the library
/// is outside of the loader's search path, but succeeds if it is already open.
fn open_nvrtc_builtins(path: &Path) {
    let starts = |name: &OsStr, with: &str| name.to_str().is_some_and(|n| n.starts_with(with));
    let (Some(name), Some(folder)) = (path.file_name(), path.parent()) else { return };
    if !starts(name, "libnvrtc.so") {
        return;
    }
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        if starts(&entry.file_name(), "libnvrtc-builtins.so") {
            // SAFETY: runs initialisers of an NVIDIA library in the folder of NVRTC, as in `open`. A failure
            // to load is reported when the compiler is used.
            if let Ok(library) = unsafe { Library::new(entry.path()) } {
                std::mem::forget(library);
            }
        }
    }
}

fn reason(error: &libloading::Error) -> String {
    let text =
        std::error::Error::source(error).map_or_else(|| error.to_string(), ToString::to_string);
    text.lines().next().unwrap_or_default().to_owned()
}

/// Resolves the function `name`; returns an error if the library lacks it.
///
/// # Safety
/// `F` is the function type of `name`, and the library is never closed.
pub(crate) unsafe fn symbol<F: Copy>(
    library: &'static Library,
    found: &Path,
    name: &str,
) -> Result<F, LibraryOpenError> {
    // SAFETY: the caller guarantees the type `F`.
    let symbol = unsafe { library.get::<F>(name) };
    symbol.map(|s| *s).map_err(|_| LibraryOpenError::NoSymbol {
        library: found.display().to_string(),
        symbol: name.to_owned(),
    })
}

/// Resolves the optional function `name`; returns `None` if the library lacks it or `name` is empty.
///
/// # Safety
/// `F` is the function type of `name`, and the library is never closed.
pub(crate) unsafe fn optional<F: Copy>(library: &'static Library, name: &str) -> Option<F> {
    if name.is_empty() {
        return None;
    }
    // SAFETY: the caller guarantees the type `F`.
    unsafe { library.get::<F>(name) }.ok().map(|s| *s)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DriverApi;

    #[test]
    fn missing_library_error_lists_tried_paths() {
        let search = LibrarySearchPaths::named("HIP runtime", Path::new("/nowhere/libamdhip64.so"));
        let error =
            DriverApi::open(GpuApi::Hip, &search).expect_err("the path does not exist").to_string();
        assert!(
            error.starts_with("no HIP runtime found; tried /nowhere/libamdhip64.so: "),
            "{error}"
        );
    }

    #[test]
    fn library_without_required_symbol_is_rejected() {
        let search = LibrarySearchPaths::named("HIP runtime", Path::new("libc.so.6"));
        let error =
            DriverApi::open(GpuApi::Hip, &search).expect_err("the C library has no GPU symbols");
        assert_eq!(error.to_string(), "libc.so.6 has no symbol hipInit");
    }

    #[test]
    fn newest_version_of_a_library_is_tried_first() {
        let folder = std::env::temp_dir().join(format!("hadron-libraries-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        for name in ["libamdhip64.so.6", "libamdhip64.so.10"] {
            std::fs::write(folder.join(name), "not a library").unwrap();
        }
        let search = LibrarySearchPaths::driver(GpuApi::Hip, std::slice::from_ref(&folder));
        let paths: Vec<PathBuf> = search.paths().collect();
        assert_eq!(paths[..2], ["libamdhip64.so.10", "libamdhip64.so.6"].map(|n| folder.join(n)));
        let names = [&paths[2..3], &paths[paths.len() - 2..]].concat();
        assert_eq!(
            names,
            ["libamdhip64.so.20", "libamdhip64.so.5", "libamdhip64.so"].map(PathBuf::from)
        );
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn folders_of_rocm_are_ordered_by_version() {
        assert_eq!(version_of("rocm-10.0.1"), [10, 0, 1]);
        assert!(version_of("rocm-10.0") > version_of("rocm-7.2.1"));
        assert!(version_of("rocm-6.4") > version_of("rocm"));
    }

    #[test]
    fn absent_names_are_one_entry_of_the_error() {
        let (name, folder) = ("libhadron_absent.so", PathBuf::from("/nowhere"));
        let search = LibrarySearchPaths {
            what: "test library",
            names: versions(name, 1..=3),
            folders: vec![folder],
        };
        let error = open(&search).expect_err("there is no such library").to_string();
        assert_eq!(
            error,
            "no test library found; tried libhadron_absent.so.3 to libhadron_absent.so: not found by the \
             dynamic loader, nor in /nowhere"
        );
        assert!(!is_absent(Path::new("liba.so"), "libb.so: cannot open shared object file"));
    }

    #[test]
    fn configured_folders_are_searched_first() {
        let manifest_dir = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
        let search = LibrarySearchPaths {
            what: "file",
            names: vec!["Cargo.toml".into()],
            folders: vec![manifest_dir.clone(), "/nowhere".into()],
        };
        let paths: Vec<PathBuf> = search.paths().collect();
        assert_eq!(paths, [manifest_dir.join("Cargo.toml"), "Cargo.toml".into()]);
    }
}
