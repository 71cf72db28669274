//! `hadron bench`: benchmarks of a server, the scheduler and single ops, comparison of results, and summaries
//! of traces.

mod compare;
mod load;
mod op_times;
mod prompts;
mod report;
mod rng;
mod samples;
mod step;
mod trace;

use std::process::ExitCode;

use anyhow::Result;

use crate::config::{BenchCommand, ProcessEnvironment};

/// Runs one `bench` subcommand.
pub fn run(command: BenchCommand, environment: &ProcessEnvironment) -> Result<ExitCode> {
    match command {
        BenchCommand::Serve(args) => load::run(&args, environment),
        BenchCommand::Step(args) => step::run(&args),
        BenchCommand::Compare(args) => compare::run(&args),
        BenchCommand::Trace(args) => trace::run(&args),
        BenchCommand::Ops(args) => op_times::run(&args, environment),
    }
}
