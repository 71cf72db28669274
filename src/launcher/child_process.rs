//! Functions that all child processes of a server share: path of the executable, and the link to the server,
//! which is a socket on standard input.

use anyhow::{Context, Result};
use protocol::link::LinkSocket;
use rustix::process::{Signal, set_parent_process_death_signal};
use std::fs::File;
use std::io;
use std::os::fd::AsFd;

/// Path of the running executable. It is valid even if the file has been replaced, so a child process always
/// runs the same version as the server.
pub(super) const OWN_BINARY: &str = "/proc/self/exe";

/// Makes the system kill this process when the thread that started it ends, and returns the link to the
/// server.
///
/// Errors: standard input is not a socket, so `hadron ROLE` was not started by a server.
pub(super) fn link_to_server(role: &str) -> Result<LinkSocket> {
    set_parent_process_death_signal(Some(Signal::KILL))
        .context("cannot set the parent-death signal")?;
    link_on_stdin().with_context(|| format!("hadron {role} must be started by hadron serve"))
}

/// Returns the socket on standard input, and replaces standard input with `/dev/null`, so that child
/// processes of this process do not inherit the socket.
fn link_on_stdin() -> io::Result<LinkSocket> {
    let stream = LinkSocket::from_fd(io::stdin().as_fd().try_clone_to_owned()?)?;
    rustix::stdio::dup2_stdin(File::open("/dev/null")?)?;
    Ok(stream)
}
