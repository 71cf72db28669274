//! Builds the emulated GPU for tests. Integration tests of any package include this module by path.
//! [`library`] builds `libhipemu.so` with the system's C++ compiler, once per version of its sources.

#![allow(dead_code, unreachable_pub, reason = "each package uses its part of it")]

#[path = "../../../tests/support/bounded_child.rs"]
pub(crate) mod bounded_child;
mod sources;

use std::ffi::OsString;
use std::fs::{self, File};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};
use std::time::Duration;

use bounded_child::{finish_within, run_within};
use sources::SOURCES;

/// Returns the warp (wavefront) sizes, in lanes, that tests emulate: the value of the environment variable
/// `variable` if it is set; otherwise 64 if kernels are compiled to machine code (`HIPEMU_ISA`), else 64 and
/// 32.
///
/// # Panics
/// If the variable is neither 64 nor 32.
#[allow(clippy::disallowed_methods, reason = "the gate says which width takes its turn")]
pub fn warp_sizes(variable: &str) -> Vec<u32> {
    match std::env::var(variable).as_deref() {
        Ok("64") => vec![64],
        Ok("32") => vec![32],
        Ok(other) => panic!("{variable}={other} is neither 64 nor 32"),
        Err(_) if std::env::var_os("HIPEMU_ISA").is_some() => vec![64],
        Err(_) => vec![64, 32],
    }
}

/// Returns the cache folder of compiled kernels, which all tests of emulated devices share. This is safe,
/// because a cache key includes all inputs of a compilation.
pub fn kernel_cache() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulated-kernels")
}

/// Timeout of one run of the C++ compiler on a machine under load.
const COMPILE_TIMEOUT: Duration = Duration::from_mins(20);

const OPTIONS: &[&str] = &[
    "-std=c++17",
    "-g1",
    "-fPIC",
    "-ftls-model=initial-exec",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-fvisibility=hidden",
];

/// Options for sources in `isa/`, whose loops over 64 lanes use the vector instructions of this CPU. Products
/// and sums are rounded separately, as the emulated instructions do.
const ISA_OPTIONS: &[&str] = &["-O3", "-march=native", "-ffp-contract=off"];

/// Returns the path of `libhipemu.so`, which contains the driver, run-time compiler and collectives of an
/// emulated GPU.
///
/// Environment variables configure the GPU: see `kernels/emu/settings.h`.
///
/// # Panics
/// If there is no C++ compiler or the sources do not compile; the message contains the compiler's output.
pub fn library() -> PathBuf {
    let compiler = OsString::from("c++");
    let mut hasher = DefaultHasher::new();
    (SOURCES, OPTIONS, ISA_OPTIONS, cpu_features(), &compiler).hash(&mut hasher);
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("hipemu");
    let home = folder.join(format!("{:016x}", hasher.finish()));
    let library = home.join("libhipemu.so");
    if library.exists() {
        return library;
    }
    fs::create_dir_all(&home).expect("the target folder can be written to");
    let _lock = lock(&folder);
    if !library.exists() {
        build(&compiler, &home, &library);
    }
    library
}

/// Locks a folder against other threads and processes until the returned file is closed.
fn lock(folder: &Path) -> File {
    let file = File::create(folder.join("lock")).expect("the target folder can be written to");
    file.lock().expect("the file system has locks");
    file
}

/// Returns the instruction sets of this CPU, which decide what `-march=native` means; empty if they are unknown.
fn cpu_features() -> String {
    let info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    info.lines().find(|line| line.starts_with("flags")).unwrap_or_default().to_owned()
}

/// Returns the path of a copy of the library for the process group named `world`, whose ranks are threads of
/// this process, each with its own device. Different process groups need separate devices, because a rank
/// holds the lock of its device while it waits for other ranks.
pub fn library_of(world: &str) -> PathBuf {
    let library = library();
    let copy = library.with_file_name(format!("libhipemu-{world}.so"));
    let _lock = lock(library.parent().expect("a library is in a folder"));
    if !copy.exists() {
        let unfinished = copy.with_extension("unfinished");
        fs::copy(&library, &unfinished).expect("the target folder can be written to");
        fs::rename(&unfinished, &copy).expect("both are in one folder");
    }
    copy
}

/// Compiles all sources in parallel and links them. Renames the library to its final name as the last step.
fn build(compiler: &OsString, home: &Path, library: &Path) {
    fs::create_dir_all(home.join("isa")).expect("the target folder can be written to");
    for (name, text) in SOURCES {
        fs::write(home.join(name), text).expect("the target folder can be written to");
    }
    let names = SOURCES.iter().map(|(name, _)| *name).filter(|name| !name.ends_with('h'));
    let compiles: Vec<Child> = names.clone().map(|name| compile(compiler, home, name)).collect();
    for child in compiles {
        finish(&finish_within(child, COMPILE_TIMEOUT, "the C++ compiler"));
    }
    let unfinished = home.join("unfinished.so");
    let mut link = Command::new(compiler);
    link.args(["-shared", "-Wl,-soname,libhipemu.so", "-Wl,-Bsymbolic", "-o"]).arg(&unfinished);
    link.args(names.map(|name| home.join(name).with_extension("o"))).args(["-pthread", "-ldl"]);
    finish(&run_within(&mut link, COMPILE_TIMEOUT));
    fs::rename(&unfinished, library).expect("both are in one folder");
}

fn compile(compiler: &OsString, home: &Path, name: &str) -> Child {
    let mut command = Command::new(compiler);
    // The emulator embeds the text of its headers, which the compiler reads from this folder.
    command.args(OPTIONS).args(if name.starts_with("isa/") { ISA_OPTIONS } else { &["-O2"] });
    command.arg(format!("-DEMU_FOLDER=\"{}\"", home.display()));
    command.arg("-c").arg(home.join(name)).arg("-o").arg(home.join(name).with_extension("o"));
    command.stderr(std::process::Stdio::piped()).spawn().expect("a C++ compiler is installed")
}

fn finish(output: &Output) {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
