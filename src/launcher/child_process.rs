//! What the children of a server have in common: the binary they are, and the link that is their standard input.

use anyhow::{Context, Result};
use protocol::link::LinkSocket;
use rustix::process::{Signal, set_parent_process_death_signal};
use std::fs::File;
use std::io;
use std::os::fd::AsFd;

/// The running binary, even if the file has been replaced since: both ends are the same build.
pub(super) const OWN_BINARY: &str = "/proc/self/exe";

/// Binds this process to the thread that started it: it dies with that. Returns the link to it.
///
/// Errors: standard input is no socket: nobody but a server starts `hadron ROLE`.
pub(super) fn link_to_server(role: &str) -> Result<LinkSocket> {
    set_parent_process_death_signal(Some(Signal::KILL)).context("cannot bind to the server")?;
    link_on_stdin().with_context(|| format!("hadron {role} is started by hadron serve"))
}

/// The socket that is standard input, which becomes empty: children of this process must not hold it.
fn link_on_stdin() -> io::Result<LinkSocket> {
    let stream = LinkSocket::from_fd(io::stdin().as_fd().try_clone_to_owned()?)?;
    rustix::stdio::dup2_stdin(File::open("/dev/null")?)?;
    Ok(stream)
}
