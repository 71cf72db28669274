//! Search for shared libraries of GPU runtimes, opening of libraries, and resolution of their symbols.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use libloading::Library;

use crate::GpuApi;

/// Error of opening a shared library or of resolving one of its symbols.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LibraryOpenError {
    /// The library could not be opened at any of the searched paths.
    #[error("no {what} found; tried {}", tried.join("; "))]
    NotFound {
        /// Name of the library that was not found, for the error message.
        what: &'static str,
        /// Names and paths in the order in which they were tried, each with the error of the dynamic loader.
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
pub struct LibrarySearch {
    what: &'static str,
    names: Vec<PathBuf>,
    folders: Vec<PathBuf>,
}

impl LibrarySearch {
    /// Paths at which the driver library of `api` is searched.
    #[must_use]
    pub fn driver(api: GpuApi, folders: &[PathBuf]) -> Self {
        let hip: &[&str] =
            &["libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so.5", "libamdhip64.so"];
        let cuda: &[&str] = &["libcuda.so.1"];
        let what = api.pick("HIP runtime", "CUDA driver");
        Self::new(what, api, api.pick(hip, cuda), folders)
    }

    /// Search paths of the run-time compiler of `api`. For HIP, the driver library also contains a run-time
    /// compiler.
    #[must_use]
    pub fn rtc(api: GpuApi, folders: &[PathBuf]) -> Self {
        let hip: &[&str] = &[
            "libhiprtc.so.7",
            "libhiprtc.so.6",
            "libhiprtc.so",
            "libamdhip64.so.7",
            "libamdhip64.so.6",
            "libamdhip64.so.5",
            "libamdhip64.so",
        ];
        let cuda: &[&str] = &["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"];
        let what = api.pick("HIP run-time compiler", "CUDA run-time compiler");
        Self::new(what, api, api.pick(hip, cuda), folders)
    }

    /// Paths at which hipBLASLt or cuBLASLt is searched, as selected by `api`.
    #[must_use]
    pub fn blaslt(api: GpuApi, folders: &[PathBuf]) -> Self {
        let hip: &[&str] = &["libhipblaslt.so.1", "libhipblaslt.so.0", "libhipblaslt.so"];
        let cuda: &[&str] = &["libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"];
        let what = api.pick("hipBLASLt", "cuBLASLt");
        Self::new(what, api, api.pick(hip, cuda), folders)
    }

    /// Paths at which RCCL or NCCL is searched, as selected by `api`.
    #[must_use]
    pub fn collectives(api: GpuApi, folders: &[PathBuf]) -> Self {
        let hip: &[&str] = &["librccl.so.1", "librccl.so"];
        let cuda: &[&str] = &["libnccl.so.2", "libnccl.so"];
        let what = api.pick("RCCL", "NCCL");
        Self::new(what, api, api.pick(hip, cuda), folders)
    }

    /// Search for a library at the given path only.
    #[must_use]
    pub fn named(what: &'static str, path: &Path) -> Self {
        Self { what, names: vec![path.to_owned()], folders: Vec::new() }
    }

    fn new(what: &'static str, api: GpuApi, names: &[&str], folders: &[PathBuf]) -> Self {
        let mut folders = folders.to_vec();
        if api == GpuApi::Hip {
            folders.extend(rocm_folders());
        }
        Self { what, names: names.iter().map(PathBuf::from).collect(), folders }
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

/// Library folders of the ROCm installations in `/opt`, in descending order of their names (newest first).
fn rocm_folders() -> Vec<PathBuf> {
    let versions = std::fs::read_dir("/opt").into_iter().flatten().flatten().map(|e| e.path());
    let rocm =
        |p: &PathBuf| p.file_name().and_then(OsStr::to_str).is_some_and(|n| n.starts_with("rocm"));
    let mut folders: Vec<PathBuf> = versions.filter(rocm).map(|p| p.join("lib")).collect();
    folders.sort();
    folders.reverse();
    folders
}

/// Shared library that is never closed. Symbol tables in other crates use it.
#[derive(Debug, Clone)]
pub struct SharedLibrary {
    library: &'static Library,
    found: PathBuf,
}

impl SharedLibrary {
    /// Opens the first path of `search` at which a library can be loaded.
    pub fn open(search: &LibrarySearch) -> Result<Self, LibraryOpenError> {
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
pub(crate) fn open(search: &LibrarySearch) -> Result<(Library, PathBuf), LibraryOpenError> {
    let mut tried = Vec::new();
    for path in search.paths() {
        open_nvrtc_builtins(&path);
        // SAFETY: loading runs the initialisers of the library; the candidates are the names of known GPU
        // runtimes or paths configured by the operator.
        match unsafe { Library::new(&path) } {
            Ok(library) => return Ok((library, path)),
            Err(error) => tried.push(format!("{}: {}", path.display(), reason(&error))),
        }
    }
    Err(LibraryOpenError::NotFound { what: search.what, tried })
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
        let search = LibrarySearch::named("HIP runtime", Path::new("/nowhere/libamdhip64.so"));
        let error =
            DriverApi::open(GpuApi::Hip, &search).expect_err("the path does not exist").to_string();
        assert!(
            error.starts_with("no HIP runtime found; tried /nowhere/libamdhip64.so: "),
            "{error}"
        );
    }

    #[test]
    fn library_without_required_symbol_is_rejected() {
        let search = LibrarySearch::named("HIP runtime", Path::new("libc.so.6"));
        let error =
            DriverApi::open(GpuApi::Hip, &search).expect_err("the C library has no GPU symbols");
        assert_eq!(error.to_string(), "libc.so.6 has no symbol hipInit");
    }

    #[test]
    fn configured_folders_are_searched_first() {
        let manifest_dir = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
        let search = LibrarySearch {
            what: "file",
            names: vec!["Cargo.toml".into()],
            folders: vec![manifest_dir.clone(), "/nowhere".into()],
        };
        let paths: Vec<PathBuf> = search.paths().collect();
        assert_eq!(paths, [manifest_dir.join("Cargo.toml"), "Cargo.toml".into()]);
    }
}
