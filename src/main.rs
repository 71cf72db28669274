//! Entry point of the `hadron` executable: parses the command line and runs one subcommand.

#![forbid(unsafe_code)]

use hadron::config::{self, CliCommand, CliInvocation, CommandLineError, LogFormat};
use hadron::log::{LogWriter, expand_hadron_filter};
use hadron::{bench, doctor, eval, events, launcher, synth};
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use tracing_subscriber::EnvFilter;

/// The allocator is mimalloc, because it is fast if memory is allocated on one thread and freed on another,
/// as the rows, outputs and events of every step are.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Log filter if `RUST_LOG` is not set.
const LOG_FILTER: &str = "info";

/// Installs the subscriber that writes log events to stderr.
fn start_log(format: LogFormat, filter: &str) {
    let log = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(expand_hadron_filter(filter)))
        .with_writer(LogWriter::default());
    match format {
        LogFormat::Human => log.with_ansi(std::io::stderr().is_terminal()).init(),
        LogFormat::Json => {
            log.json().flatten_event(true).init();
            // Logs a panic as a log event, because the message of the standard library would be the only log
            // line that is not JSON.
            std::panic::set_hook(Box::new(|panic| tracing::error!(%panic, "a thread panicked")));
        }
    }
}

/// Reports the error that ends the process on stderr.
fn report_error(format: LogFormat, error: &anyhow::Error) {
    match format {
        // If stderr is closed, only the exit code shows the failure.
        LogFormat::Human => LogWriter::default().write_plain_line(&format!("hadron: {error:#}")),
        LogFormat::Json => tracing::error!(cause = format!("{error:#}"), "hadron failed"),
    }
}

fn main() -> ExitCode {
    let CliInvocation { command, environment, notes } = match config::from_process() {
        Ok(invocation) => invocation,
        Err(error) => {
            let code = error.exit_code();
            // Help is written to stdout, errors to stderr.
            let _ = match &error {
                CommandLineError::Help(text) => write!(std::io::stdout(), "{text}"),
                CommandLineError::Usage(text) => writeln!(std::io::stderr(), "{text}"),
                CommandLineError::Rejected(text) => writeln!(std::io::stderr(), "hadron: {text}"),
            };
            return ExitCode::from(code);
        }
    };
    let format = match &command {
        CliCommand::Serve(args) => args.log.log_format,
        CliCommand::Executor(args) => args.log_format,
        CliCommand::GrammarWorker(args) => args.log_format,
        _ => LogFormat::Human,
    };
    start_log(format, environment.log.as_deref().unwrap_or(LOG_FILTER));
    for note in notes {
        tracing::info!("{note}");
    }
    let outcome = match command {
        CliCommand::Serve(args) => launcher::serve::run(&args, &environment),
        CliCommand::Executor(args) => launcher::executor_child::run(&args, &environment),
        CliCommand::GrammarWorker(_) => launcher::grammar_worker::run(),
        CliCommand::TemplateWorker => launcher::template_worker::run(),
        CliCommand::Bench(command) => bench::run(command, &environment),
        CliCommand::Eval(command) => eval::run(command, &environment),
        CliCommand::Doctor(args) => doctor::run(&args, &environment),
        CliCommand::Events(command) => events::run(&command, &environment),
        CliCommand::Synth(args) => synth::run(&args),
    };
    outcome.unwrap_or_else(|error| {
        report_error(format, &error);
        ExitCode::FAILURE
    })
}
