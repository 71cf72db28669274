//! `hadron events`: subscriber for KV events that prints, verifies or stores them.

mod check;
mod dump;
mod source;
mod subscriber;
mod table;
mod tail;

use std::process::ExitCode;

use anyhow::Result;

use crate::config::{EventsCommand, ProcessEnvironment};

/// Runs one `events` subcommand.
pub fn run(command: &EventsCommand, environment: &ProcessEnvironment) -> Result<ExitCode> {
    match command {
        EventsCommand::Tail(args) => tail::run(args, environment),
        EventsCommand::Check(args) => check::run(args, environment),
        EventsCommand::Dump(args) => dump::run(args, environment),
    }
}
