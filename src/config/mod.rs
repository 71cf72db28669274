//! Command line, configuration file and environment, parsed once into typed structs.
//!
//! The clap structs in this folder are the only definition of the flags: parsing, help and `docs/cli.md` are
//! derived from them. Order of precedence: flag, `--config FILE`, environment, default. No code outside
//! this folder reads the environment.

mod access;
mod argv;
mod bench;
mod cli_reference;
mod cluster;
mod compat_flags;
mod doctor;
mod engine;
mod environment;
mod eval;
mod events;
mod executor;
mod file;
mod flag_values;
mod grammar_worker;
mod http;
mod kv_events;
mod log;
mod metrics;
mod model;
mod pooling;
mod speculation;
#[cfg(test)]
mod tests;
mod units;

use std::ffi::OsString;

use clap::{Args, CommandFactory as _, FromArgMatches as _, Parser, Subcommand};
use serde_json::{Map, Value};

pub use access::{AccessArgs, StringListArg};
pub use bench::{
    BenchCommand, BenchCompareArgs, BenchOpsArgs, BenchServeArgs, BenchServeEndpoint,
    BenchStepArgs, BenchTraceArgs, PromptKind,
};
pub use cli_reference::{reference, reference_path};
pub(crate) use cluster::SECRET_VARIABLE;
pub use cluster::{LauncherEnvVariables, NodeArgs};
pub use doctor::DoctorArgs;
pub(crate) use engine::BF16_KV_CACHE_MISMATCH;
pub use engine::{
    DeviceArg, EngineArgs, ExecutorModeArg, KvCacheDtypeArg, LoadBalancePolicy, OverloadHttpStatus,
    ParallelArgs, SchedulingPolicyArg,
};
pub use environment::ProcessEnvironment;
pub use eval::{
    EvalClientArgs, EvalCommand, EvalEqualArgs, EvalGoldenArgs, EvalLogprobsArgs, EvalTasksArgs,
};
pub use events::{
    EventsCheckArgs, EventsCommand, EventsDumpArgs, EventsSubscribeArgs, EventsTailArgs,
};
pub use executor::ExecutorArgs;
pub use grammar_worker::GrammarWorkerArgs;
pub use http::{HttpArgs, ReasoningFieldArg, ReplyArgs};
pub use kv_events::KvEventsArgs;
pub use log::{LogArgs, LogFormat};
pub use metrics::MetricsArgs;
pub use model::{DtypeArg, LoadFormatArg, ModelArgs};
pub use pooling::{ConvertArg, PoolerConfigArg, PoolingArgs, PoolingTypeArg, RunnerArg};
pub use speculation::{SpecDecodeMetricsArg, SpeculationArgs};
pub use units::{ByteSize, DurationArg, MaxModelLenArg};

/// Parsed command line, as clap derives it.
#[derive(Debug, Parser)]
#[command(
    name = "hadron",
    version,
    about = "Serves large language models over the OpenAI API",
    max_term_width = 100,
    disable_help_subcommand = true,
    args_override_self = true
)]
/// Command line of `hadron`.
struct CliArgs {
    #[command(subcommand)]
    command: CliCommand,
}

/// Subcommands. Each is implemented as a function `run(args) -> anyhow::Result<ExitCode>` in another module.
#[derive(Debug, Subcommand)]
pub enum CliCommand {
    /// Serve a model on one or several nodes
    Serve(Box<ServeArgs>),
    /// Benchmark a server, the scheduler or single ops; compare results; summarise a trace
    #[command(subcommand)]
    Bench(BenchCommand),
    /// Check outputs: task suites, golden fixtures, log-probabilities, equality of two servers
    #[command(subcommand)]
    Eval(EvalCommand),
    /// Describe this machine: devices, drivers, libraries, limits, and what will be slow
    Doctor(DoctorArgs),
    /// Subscribe to KV events: print, verify, store
    #[command(subcommand)]
    Events(EventsCommand),
    /// One executor of a server; started by the server
    #[command(hide = true)]
    Executor(ExecutorArgs),
    /// Dry runs of grammars for a server; started by the server
    #[command(hide = true)]
    GrammarWorker(GrammarWorkerArgs),
    /// Renders the chat template of one request for a server; started by the server
    #[command(hide = true)]
    TemplateWorker,
    /// Write a checkpoint of deterministic random weights, with a tokenizer
    Synth(SynthArgs),
}

/// Arguments of `hadron serve`.
#[derive(Debug, Clone, Args)]
pub struct ServeArgs {
    /// Model and tokenizer.
    #[command(flatten)]
    pub model: ModelArgs,
    /// Embeddings and scores.
    #[command(flatten)]
    pub pooling: PoolingArgs,
    /// Device, KV cache, scheduler and executors.
    #[command(flatten)]
    pub engine: EngineArgs,
    /// Speculative decoding.
    #[command(flatten)]
    pub speculation: SpeculationArgs,
    /// Numbers of replicas and ranks.
    #[command(flatten)]
    pub parallel: ParallelArgs,
    /// Servers on several nodes.
    #[command(flatten)]
    pub nodes: NodeArgs,
    /// Listen address and timeouts.
    #[command(flatten)]
    pub http: HttpArgs,
    /// API keys, admin listener and CORS.
    #[command(flatten)]
    pub access: AccessArgs,
    /// Content of replies.
    #[command(flatten)]
    pub reply: ReplyArgs,
    /// Prometheus metrics.
    #[command(flatten)]
    pub metrics: MetricsArgs,
    /// Publication of KV events.
    #[command(flatten)]
    pub kv_events: KvEventsArgs,
    /// Log and request trace.
    #[command(flatten)]
    pub log: LogArgs,
    /// Read flags from a TOML or YAML file (.yaml, .yml); flags on the command line take precedence
    #[arg(long, value_name = "FILE", help_heading = "Configuration")]
    pub config: Option<std::path::PathBuf>,
    /// All flags by name with their values, given or default. API keys are replaced with their number.
    #[arg(skip)]
    pub flags: Map<String, Value>,
}

/// Arguments of `hadron synth CONFIG OUT`.
#[derive(Debug, Clone, Args)]
pub struct SynthArgs {
    /// config.json of a supported architecture, or a folder with one
    pub config: std::path::PathBuf,
    /// Output folder; must not exist, or be empty
    pub out: std::path::PathBuf,
    /// Random seed of the weights
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Data type of the weights; auto = bfloat16. The values are equal in all types; only float16 is recorded
    /// in config.json
    #[arg(long, default_value = "auto")]
    pub dtype: DtypeArg,
}

/// Result of parsing the command line and the environment.
#[derive(Debug)]
pub struct CliInvocation {
    /// Subcommand to run, with its arguments.
    pub command: CliCommand,
    /// Values of the environment variables.
    pub environment: ProcessEnvironment,
    /// Notes about flags that were accepted for compatibility without effect, one line each.
    pub notes: Vec<String>,
}

/// Reason why the command line does not start a subcommand.
#[derive(Debug, thiserror::Error)]
pub enum CommandLineError {
    /// Help or version was requested. The text is printed to stdout; the exit code is 0.
    #[error("{0}")]
    Help(String),
    /// The command line cannot be parsed. The exit code is 2.
    #[error("{0}")]
    Usage(String),
    /// The command line can be parsed, but its values are invalid or unsupported. The exit code is 1.
    #[error("{0}")]
    Rejected(String),
}

impl CommandLineError {
    /// Returns the exit code of the process.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Help(_) => 0,
            Self::Rejected(_) => 1,
            Self::Usage(_) => 2,
        }
    }
}

/// Parses the command line and environment of this process.
pub fn from_process() -> Result<CliInvocation, CommandLineError> {
    parse(std::env::args_os().collect(), ProcessEnvironment::from_process())
}

/// Parses a command line, of which the first word is the program name.
pub fn parse(
    argv: Vec<OsString>,
    environment: ProcessEnvironment,
) -> Result<CliInvocation, CommandLineError> {
    let command = CliArgs::command();
    let words = argv::normalise(&command, argv)?;
    let matches = command.try_get_matches_from(&words.argv).map_err(|e| usage(&e))?;
    let flags = flag_values::serve_flag_values(&matches);
    let cli = CliArgs::from_arg_matches(&matches).map_err(|e| usage(&e))?;
    let mut command = cli.command;
    if let CliCommand::Serve(args) = &mut command {
        args.model.resolve(words.served_names_variadic)?;
        args.engine.check(args.model.dtype)?;
        args.parallel.resolve()?;
        args.nodes.resolve(&args.parallel, &environment)?;
        args.reply.check()?;
        args.speculation.check()?;
        args.kv_events.check()?;
        args.access.check(&environment)?;
        args.log.check()?;
        args.flags = flags;
    }
    Ok(CliInvocation { command, environment, notes: words.notes })
}

fn usage(error: &clap::Error) -> CommandLineError {
    if error.use_stderr() {
        CommandLineError::Usage(error.render().to_string())
    } else {
        CommandLineError::Help(error.render().to_string())
    }
}

fn rejected<T>(text: impl Into<String>) -> Result<T, CommandLineError> {
    Err(CommandLineError::Rejected(text.into()))
}
