//! Entry point: parses the command line and runs one role.

use std::io::IsTerminal as _;
use std::process::ExitCode;

use hadron::config::{self, Command, ConfigError, Invocation};
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    let invocation = match config::from_process() {
        Ok(invocation) => invocation,
        Err(error) => return explain(&error),
    };
    start_log(invocation.environment.log.as_deref());
    for note in &invocation.notes {
        tracing::info!("{note}");
    }
    match run(invocation) {
        Ok(code) => code,
        Err(error) => {
            say(&mut std::io::stderr(), &format!("error: {error:#}\n"));
            ExitCode::FAILURE
        }
    }
}

fn run(invocation: Invocation) -> anyhow::Result<ExitCode> {
    let environment = invocation.environment;
    match invocation.command {
        Command::Serve(_) => anyhow::bail!("serve: this build has no server"),
        Command::Bench(command) => hadron::bench::run(command, &environment),
        Command::Eval(command) => hadron::eval::run(command, &environment),
        Command::Synth(args) => hadron::synth::run(&args),
    }
}

/// Help goes to stdout, everything else to stderr.
fn explain(error: &ConfigError) -> ExitCode {
    match error {
        ConfigError::Help(text) => say(&mut std::io::stdout(), text),
        ConfigError::Usage(text) => say(&mut std::io::stderr(), text),
        ConfigError::Refused(text) => say(&mut std::io::stderr(), &format!("error: {text}\n")),
    }
    ExitCode::from(error.exit_code())
}

fn say(out: &mut dyn std::io::Write, text: &str) {
    // Nobody is left to tell if this fails.
    let _ignored = out.write_all(text.as_bytes());
}

fn start_log(filter: Option<&str>) {
    let filter = EnvFilter::try_new(filter.unwrap_or("info"));
    tracing_subscriber::fmt()
        .with_env_filter(filter.unwrap_or_else(|_| EnvFilter::new("info")))
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .with_target(false)
        .init();
}
